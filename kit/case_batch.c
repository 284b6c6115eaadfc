/*
 * case_batch.c: a step's sequences as a folio_batch, in the page-table form the case asks for.
 */
#include "kit/kit.h"

#include "kit/kit_internal.h"

#include <stdlib.h>

/* Fills what callers may leave undefined: a block no cache has. */
enum { JUNK_BLOCK = 0x7ffffff0, MAX_OWNED = 16 };

/* A step, and its tables in all three forms. */
typedef struct arrays {
    folio_step a;
    int32_t *tables; /* [num_seqs][stride] */
    int64_t stride;
    int32_t *indptr, *indices, *last;
    void *owned[MAX_OWNED];
    int num_owned;
} arrays;

/* The blocks the batch is told of: released ones are FOLIO_NO_BLOCK. */
static int32_t told_block(const kit_seq *s, const seq_state *state, int64_t b)
{
    return b < s->released ? FOLIO_NO_BLOCK : state->blocks[0][b];
}

/* New tokens' slots [query_len]: by the block table, or -1. */
static void fill_slots(const kit_case *h, const kit_seq *s, const seq_state *state, int64_t *out)
{
    for (int64_t i = 0; i < s->query_len; i++) {
        bool none = s->slots_ignored || s->seq_len == 0 || kit_only_reads(s);
        out[i] = none ? -1 : kit_slot(h, state, 0, s->seq_len - s->query_len + i);
    }
}

static folio_status add_seq(kit_case *h, folio_batch *batch, const kit_seq *s, int64_t id)
{
    seq_state *state = kit_state(h, id);
    int64_t n = kit_blocks_for(h, s->seq_len), nc = kit_blocks_for(h, s->encoder_len);
    int32_t *table = kit_alloc((size_t)n, sizeof *table);
    int64_t *slots = kit_alloc((size_t)s->query_len, sizeof *slots);
    folio_batch_seq seq =
        FOLIO_WITH(folio_batch_seq, .query_len = s->query_len, .seq_len = s->seq_len,
                   .padding = s->seq_len == 0, .phase = s->phase, .causality = s->causality,
                   .positions_given = s->positions_given, .first_query_pos = s->first_query_pos,
                   .first_key_pos = s->first_key_pos, .encoder_len = s->encoder_len,
                   .encoder_new_len = s->encoder_new_len);
    if (h->cache) {
        for (int64_t b = 0; b < n; b++) table[b] = told_block(s, state, b);
        seq.block_table = table;
        seq.num_blocks = n;
        seq.cross_block_table = nc ? state->blocks[1] : NULL;
        seq.num_cross_blocks = nc;
        if (s->slots_given || s->slots_ignored) {
            fill_slots(h, s, state, slots);
            seq.slots = slots;
        }
    }
    folio_status status = folio_batch_add(batch, &seq);
    kit_free(table);
    kit_free(slots);
    return status;
}

static void *take(arrays *x, int64_t count, size_t size)
{
    return x->owned[x->num_owned++] = kit_alloc((size_t)count, size);
}

static void arrays_tables(kit_case *h, const kit_seq *seqs, int64_t n, arrays *x)
{
    int64_t total = 0, cross_stride = 1;
    x->stride = 1;
    for (int64_t i = 0; i < n; i++) {
        int64_t blocks = kit_blocks_for(h, seqs[i].seq_len);
        int64_t cross = kit_blocks_for(h, seqs[i].encoder_len);
        total += blocks;
        if (blocks >= x->stride) x->stride = blocks + 1; /* one column of junk at least */
        if (cross > cross_stride) cross_stride = cross;
    }
    x->tables = take(x, n * x->stride, sizeof(int32_t));
    x->indptr = take(x, n + 1, sizeof(int32_t));
    x->indices = take(x, total, sizeof(int32_t));
    x->last = take(x, n, sizeof(int32_t));
    int32_t *cross_tables = take(x, n * cross_stride, sizeof(int32_t));
    for (int64_t i = 0; i < n; i++) {
        const seq_state *state = kit_state(h, kit_seq_id(seqs, i));
        int64_t blocks = kit_blocks_for(h, seqs[i].seq_len);
        int64_t cross = kit_blocks_for(h, seqs[i].encoder_len);
        x->indptr[i + 1] = x->indptr[i] + (int32_t)blocks;
        x->last[i] = (int32_t)(blocks ? seqs[i].seq_len - (blocks - 1) * h->spec.block_size : 0);
        for (int64_t b = 0; b < x->stride; b++)
            x->tables[i * x->stride + b] = b < blocks ? told_block(&seqs[i], state, b) : JUNK_BLOCK;
        for (int64_t b = 0; b < blocks; b++)
            x->indices[x->indptr[i] + b] = told_block(&seqs[i], state, b);
        for (int64_t b = 0; b < cross_stride; b++)
            cross_tables[i * cross_stride + b] = b < cross ? state->blocks[1][b] : JUNK_BLOCK;
    }
    x->a.cross_table = (folio_table){
        .kind = FOLIO_TABLE_ROWS, .indices = cross_tables, .row_stride = cross_stride};
}

/* Optional arrays are left out where no sequence needs them. */
static void arrays_open(kit_case *h, const kit_seq *seqs, int64_t n, arrays *x)
{
    *x = (arrays){.a = {.struct_size = sizeof x->a, .num_seqs = n}};
    bool positions = false, encoder = false, slots = false;
    int32_t *start = take(x, n + 1, 4), *lens = take(x, n, 4), *phases = take(x, n, 4);
    int32_t *causality = take(x, n, 4), *enc = take(x, n, 4), *enc_new = take(x, n, 4);
    int64_t *first_query = take(x, n, 8), *first_key = take(x, n, 8);
    for (int64_t i = 0; i < n; i++) {
        const kit_seq *s = &seqs[i];
        bool given = s->positions_given != 0;
        start[i + 1] = start[i] + (int32_t)s->query_len;
        lens[i] = (int32_t)s->seq_len;
        phases[i] = (int32_t)s->phase;
        causality[i] = (int32_t)s->causality;
        enc[i] = (int32_t)s->encoder_len;
        enc_new[i] = (int32_t)s->encoder_new_len;
        first_query[i] = given ? s->first_query_pos : s->seq_len ? kit_seq_context(s) : 0;
        first_key[i] = given ? s->first_key_pos : 0;
        positions |= given;
        encoder |= s->encoder_len > 0;
        slots |= s->slots_given || s->slots_ignored;
    }
    int64_t *mapping = take(x, start[n], 8);
    for (int64_t i = 0; slots && h->cache && i < n; i++)
        fill_slots(h, &seqs[i], kit_state(h, kit_seq_id(seqs, i)), mapping + start[i]);
    if (h->cache) arrays_tables(h, seqs, n, x);
    x->a.query_start = start;
    x->a.seq_lens = lens;
    x->a.phases = phases;
    x->a.causality = causality;
    x->a.slots = slots && h->cache ? mapping : NULL;
    x->a.first_query_pos = positions ? first_query : NULL;
    x->a.first_key_pos = positions ? first_key : NULL;
    x->a.encoder_lens = encoder ? enc : NULL;
    x->a.encoder_new_lens = encoder ? enc_new : NULL;
    if (!encoder) x->a.cross_table = (folio_table){.kind = FOLIO_TABLE_NONE};
}

static folio_status set_arrays(kit_case *h, folio_batch *batch, const kit_seq *seqs, int64_t n)
{
    arrays x;
    arrays_open(h, seqs, n, &x);
    if (h->spec.table == KIT_TABLE_CSR_LAST) x.a.seq_lens = NULL;
    if (h->spec.table == KIT_TABLE_SLOTS || h->spec.table == KIT_TABLE_CSR ||
        h->spec.table == KIT_TABLE_CSR_LAST)
        x.a.table = (folio_table){.kind = h->spec.table == KIT_TABLE_SLOTS ? FOLIO_TABLE_SLOTS
                                                                           : FOLIO_TABLE_CSR,
                                  .indices = x.indices,
                                  .start = x.indptr,
                                  .last_block_len = x.last};
    else if (x.tables != NULL)
        x.a.table =
            (folio_table){.kind = FOLIO_TABLE_ROWS, .indices = x.tables, .row_stride = x.stride};
    folio_status status = folio_batch_set(batch, &x.a);
    for (int i = 0; i < x.num_owned; i++) kit_free(x.owned[i]);
    return status;
}

folio_batch *kit_batch_make(kit_case *h, folio_context *ctx, const kit_seq *seqs, int64_t n)
{
    folio_batch_desc desc = {.struct_size = sizeof desc, .block_size = h->spec.block_size};
    folio_batch *batch = NULL;
    if (!kit_reserve_all(h, seqs, n)) return NULL;
    folio_status status = folio_batch_create(ctx, &desc, &batch);
    if (status != FOLIO_OK) {
        kit_refused("batch", status);
        return NULL;
    }
    if (h->spec.table == KIT_TABLE_SEQS) {
        for (int64_t i = 0; status == FOLIO_OK && i < n; i++)
            status = add_seq(h, batch, &seqs[i], kit_seq_id(seqs, i));
    } else {
        status = set_arrays(h, batch, seqs, n);
    }
    if (status == FOLIO_OK) return batch;
    kit_refused("batch", status);
    folio_batch_destroy(batch);
    return NULL;
}

folio_batch *kit_batch(kit_case *h, const kit_seq *seqs, int64_t num_seqs)
{
    return kit_batch_make(h, h->ctx, seqs, num_seqs);
}
