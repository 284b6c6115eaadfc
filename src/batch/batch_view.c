/* batch_view.c: counts, completeness, and views of a batch by attention type and phase. */
#include "batch/batch.h"

#include "core/checked.h"

#include <string.h>

folio_status folio_batch_get_info(const folio_batch *batch, folio_batch_info *out)
{
    REQUIRE(batch != NULL, "folio_batch_get_info: batch is NULL");
    folio_batch_info s = {
        .num_seqs = batch->num_seqs,
        .num_query_tokens = batch->num_query_tokens,
        .num_encoder_tokens = batch->num_encoder_tokens,
    };
    for (int64_t i = 0; i < batch->num_seqs; i++) {
        const folioi_seq *q = batch_seq(batch, i);
        s.max_query_len = max_i64(s.max_query_len, q->query_len);
        s.max_seq_len = max_i64(s.max_seq_len, q->seq_len);
        s.max_encoder_len = max_i64(s.max_encoder_len, q->encoder_len);
        s.max_encoder_new_len = max_i64(s.max_encoder_new_len, q->encoder_new_len);
        if (q->phase == FOLIO_PHASE_PREFILL) {
            s.num_prefills++;
            s.num_prefill_tokens += q->query_len;
            s.max_prefill_seq_len = max_i64(s.max_prefill_seq_len, q->seq_len);
        } else if (q->phase == FOLIO_PHASE_DECODE) {
            s.num_decodes++;
            s.num_decode_tokens += q->query_len;
            s.max_decode_seq_len = max_i64(s.max_decode_seq_len, q->seq_len);
        } else {
            s.num_padding++;
            s.num_padding_tokens += q->query_len;
        }
    }
    s.kind = s.num_prefills && s.num_decodes ? FOLIO_BATCH_MIXED
             : s.num_prefills                ? FOLIO_BATCH_PREFILLS
             : s.num_decodes                 ? FOLIO_BATCH_DECODES
                                             : FOLIO_BATCH_EMPTY;
    return folioi_struct_out(out, &s, sizeof s, "folio_batch_info");
}

int folio_batch_is_complete(const folio_batch *batch, folio_attention_type type,
                            const char **missing)
{
    const char *lacks = NULL;
    if (batch == NULL) lacks = "batch";
    else if ((unsigned)type >= FOLIO_NUM_ATTENTION_TYPES) lacks = "attention type";
    else if ((type == FOLIO_ATTENTION_ENCODER || type == FOLIO_ATTENTION_ENCODER_DECODER) &&
             !batch->has_encoder_lens)
        lacks = "encoder_len";
    for (int64_t i = 0; lacks == NULL && i < batch->num_seqs; i++) {
        folioi_rows r = folioi_batch_rows(batch, i, type);
        if (r.key_len == 0 || r.blocks != NULL) continue;
        if (type == FOLIO_ATTENTION_DECODER) lacks = "block_table";
        if (type == FOLIO_ATTENTION_ENCODER_DECODER) lacks = "cross_block_table";
    }
    if (missing != NULL) *missing = lacks;
    return lacks == NULL;
}

static bool in_phase(const folioi_seq *s, folio_phase phase)
{
    return phase == FOLIO_PHASE_AUTO || s->phase == phase;
}

/* The arrays of a view, one after another in one piece of memory. */
typedef struct view_arrays {
    int64_t *seqs, *query_rows, *query_start, *last_rows, *positions, *key_start, *slots;
    int64_t *table_start;
    int32_t *query_lens, *key_lens, *context_lens, *blocks;
} view_arrays;

static void carve(folioi_arena *arena, const folio_batch_view *v, int64_t num_blocks,
                  view_arrays *a)
{
    int64_t n = v->num_seqs;
    a->seqs = arena_take(arena, n * 8);
    a->query_rows = arena_take(arena, n * 8);
    a->query_start = arena_take(arena, (n + 1) * 8);
    a->last_rows = arena_take(arena, n * 8);
    a->positions = arena_take(arena, v->num_query_tokens * 8);
    a->key_start = arena_take(arena, (n + 1) * 8);
    a->table_start = arena_take(arena, (n + 1) * 8);
    a->slots = arena_take(arena, v->num_new_tokens * 8);
    a->query_lens = arena_take(arena, n * 4);
    a->key_lens = arena_take(arena, n * 4);
    a->context_lens = arena_take(arena, n * 4);
    a->blocks = arena_take(arena, num_blocks * 4);
}

static void fill(const folio_batch *batch, folio_attention_type type, folio_phase phase,
                 const view_arrays *a)
{
    int64_t n = 0, slot = 0;
    a->query_start[0] = a->key_start[0] = a->table_start[0] = 0;
    for (int64_t i = 0; i < batch->num_seqs; i++) {
        const folioi_seq *s = batch_seq(batch, i);
        if (!in_phase(s, phase)) continue;
        folioi_rows r = folioi_batch_rows(batch, i, type);
        /* cross attention has no positions, but its queries are the decoder's */
        int64_t pos =
            type == FOLIO_ATTENTION_ENCODER_DECODER ? s->first_query_pos : r.first_query_pos;
        a->seqs[n] = i;
        a->query_rows[n] = r.query_row;
        a->query_lens[n] = r.query_len;
        a->key_lens[n] = r.key_len;
        a->context_lens[n] = r.context_len;
        a->last_rows[n] = r.query_len > 0 ? r.query_row + r.query_len - 1 : -1;
        a->query_start[n + 1] = a->query_start[n] + r.query_len;
        a->key_start[n + 1] = a->key_start[n] + r.key_len;
        a->table_start[n + 1] = a->table_start[n] + r.num_blocks;
        if (r.num_blocks > 0)
            memcpy(a->blocks + a->table_start[n], r.blocks, (size_t)r.num_blocks * 4);
        for (int32_t k = 0; k < r.query_len; k++) a->positions[a->query_start[n] + k] = pos + k;
        for (int32_t k = 0; r.slots != NULL && k < r.new_len; k++) a->slots[slot++] = r.slots[k];
        n++;
    }
}

folio_status folio_batch_get_view(folio_batch *batch, folio_attention_type type, folio_phase phase,
                                  folio_batch_view *out)
{
    REQUIRE(batch != NULL, "folio_batch_get_view: batch is NULL");
    REQUIRE((unsigned)type < FOLIO_NUM_ATTENTION_TYPES, "attention type %d is unknown", (int)type);
    REQUIRE((unsigned)phase < FOLIOI_NUM_PHASES, "phase %d is unknown", (int)phase);
    folio_batch_view v = {0};
    int64_t num_blocks = 0;
    for (int64_t i = 0; i < batch->num_seqs; i++) {
        if (!in_phase(batch_seq(batch, i), phase)) continue;
        folioi_rows r = folioi_batch_rows(batch, i, type);
        v.num_seqs++;
        v.num_query_tokens += r.query_len;
        v.num_new_tokens += r.new_len;
        v.max_query_len = max_i64(v.max_query_len, r.query_len);
        v.max_key_len = max_i64(v.max_key_len, r.key_len);
        num_blocks += r.num_blocks;
    }
    view_arrays a;
    folioi_arena arena = {NULL, 0};
    folioi_array *memory = &batch->views[type][phase];
    carve(&arena, &v, num_blocks, &a);
    TRY(folioi_array_reserve(&batch->allocator, memory, arena.used, "a batch view"));
    arena = (folioi_arena){memory->data, 0};
    carve(&arena, &v, num_blocks, &a);
    fill(batch, type, phase, &a);
    bool paged = type == FOLIO_ATTENTION_DECODER || type == FOLIO_ATTENTION_ENCODER_DECODER;
    v.seqs = a.seqs;
    v.query_rows = a.query_rows;
    v.query_lens = a.query_lens;
    v.query_start = a.query_start;
    v.last_rows = a.last_rows;
    v.positions = a.positions;
    v.key_lens = a.key_lens;
    v.key_start = a.key_start;
    v.context_lens = a.context_lens;
    v.slot_mapping = paged ? a.slots : NULL;
    v.table_start = paged ? a.table_start : NULL;
    v.blocks = paged ? a.blocks : NULL;
    return folioi_struct_out(out, &v, sizeof v, "folio_batch_view");
}
