/* batch.c: adds sequences one by one, checked and copied; and derives the rows of each attention type. */
#include "batch/batch.h"

#include "batch/block_scan.h"
#include "core/checked.h"

#include <string.h>

#define MAX_POSITION                                                                               \
    ((int64_t)1 << 40) /* so that sums of positions and windows stay far from overflow */

#define MAX_CAPACITY ((int64_t)1 << 40) /* its bytes fit in 64 bits, whatever is counted */

static folio_status reserve(folio_batch *b, folioi_array *array, int64_t count, size_t size,
                            const char *what)
{
    int64_t bytes;
    /* at least one entry, so that no array is ever NULL */
    REQUIRE(checked_mul(max_i64(count, 1), (int64_t)size, &bytes),
            "batch: %lld %s exceed the largest size", (long long)count, what);
    return folioi_array_reserve(&b->allocator, array, bytes, what);
}

static folio_status reserve_all(folio_batch *b, int64_t seqs, int64_t tokens, int64_t blocks,
                                int64_t encoder_tokens, int64_t cross_blocks)
{
    TRY(reserve(b, &b->seqs, seqs, sizeof(folioi_seq), "batch sequences"));
    TRY(reserve(b, &b->slots, tokens, sizeof(int64_t), "batch slots"));
    TRY(reserve(b, &b->positions, tokens, sizeof(int64_t), "batch positions"));
    TRY(reserve(b, &b->blocks, blocks, sizeof(int32_t), "batch blocks"));
    TRY(reserve(b, &b->cross_slots, encoder_tokens, sizeof(int64_t), "batch cross slots"));
    TRY(reserve(b, &b->cross_blocks, cross_blocks, sizeof(int32_t), "batch cross blocks"));
    return reserve(b, &b->taken, seqs, sizeof(folioi_taken), "batch stamps");
}

folio_status folio_batch_create(folio_context *ctx, const folio_batch_desc *desc, folio_batch **out)
{
    REQUIRE(out != NULL, "folio_batch_create: out is NULL");
    *out = NULL;
    REQUIRE(ctx != NULL, "folio_batch_create: ctx is NULL");
    folio_batch_desc d;
    STRUCT_IN(d, desc, "folio_batch_desc");
    REQUIRE(d.block_size >= 0 && d.block_size <= 4096, "batch: block_size is %d, outside [0, 4096]",
            d.block_size);
    folio_kv_cache_view view = {.struct_size = sizeof view};
    if (d.cache != NULL) {
        TRY(folio_kv_cache_get_view(d.cache, 0, &view));
        REQUIRE(d.block_size == 0 || d.block_size == view.desc->block_size,
                "batch: block_size is %d, its cache's %d", d.block_size, view.desc->block_size);
        d.block_size = view.desc->block_size;
        d.cache = NULL;
    }
    REQUIRE(d.decode_query_len >= 0, "batch: decode_query_len is %d; it must be at least 0",
            d.decode_query_len);
    int64_t capacities[] = {d.max_seqs, d.max_query_tokens, d.max_blocks, d.max_encoder_tokens,
                            d.max_cross_blocks};
    static const char *const names[] = {"max_seqs", "max_query_tokens", "max_blocks",
                                        "max_encoder_tokens", "max_cross_blocks"};
    for (int i = 0; i < 5; i++)
        REQUIRE(capacities[i] >= 0 && capacities[i] <= MAX_CAPACITY,
                "batch: %s is %lld, outside [0, 2^40]", names[i], (long long)capacities[i]);
    if (d.decode_query_len == 0) d.decode_query_len = 1;
    void *memory;
    TRY(folioi_alloc(&ctx->allocator, sizeof(folio_batch), "a batch", &memory));
    folio_batch *batch = memory;
    refs_init(&batch->refs);
    refs_retain(&ctx->refs);
    batch->ctx = ctx;
    batch->allocator = ctx->allocator;
    batch->desc = d;
    folio_status status = reserve_all(batch, d.max_seqs, d.max_query_tokens, d.max_blocks,
                                      d.max_encoder_tokens, d.max_cross_blocks);
    if (status != FOLIO_OK) {
        folio_batch_destroy(batch);
        return status;
    }
    *out = batch;
    return FOLIO_OK;
}

void folio_batch_destroy(folio_batch *batch)
{
    if (batch == NULL || !refs_release(&batch->refs)) return;
    folio_context *ctx = batch->ctx;
    folio_allocator a = batch->allocator;
    folioi_batch_drop_stamps(batch, 0);
    folioi_array_free(&a, &batch->taken);
    folioi_array_free(&a, &batch->seqs);
    folioi_array_free(&a, &batch->slots);
    folioi_array_free(&a, &batch->positions);
    folioi_array_free(&a, &batch->blocks);
    folioi_array_free(&a, &batch->cross_slots);
    folioi_array_free(&a, &batch->cross_blocks);
    for (int t = 0; t < FOLIO_NUM_ATTENTION_TYPES; t++)
        for (int p = 0; p < FOLIOI_NUM_PHASES; p++) folioi_array_free(&a, &batch->views[t][p]);
    folioi_free(&a, batch, sizeof *batch);
    folio_context_destroy(ctx);
}

void folio_batch_clear(folio_batch *batch)
{
    if (batch == NULL) return;
    batch->num_seqs = batch->num_query_tokens = batch->num_blocks = 0;
    batch->num_encoder_tokens = batch->num_cross_blocks = 0;
    batch->blocks_end = batch->cross_blocks_end = 0;
    batch->has_encoder_lens = false;
    batch->num_by_hand = 0;
    folioi_batch_drop_stamps(batch, 0);
    batch->generation++;
}

/* ---- stamps of a pool's sequences */

void folioi_batch_take_stamp(folio_batch *batch, folioi_stamp *stamp, uint64_t changes)
{
    refs_retain(&stamp->refs);
    ((folioi_taken *)batch->taken.data)[batch->num_taken++] =
        (folioi_taken){.stamp = stamp, .changes = changes, .seq = batch->num_seqs - 1};
}

void folioi_batch_drop_stamps(folio_batch *batch, int64_t first)
{
    const folioi_taken *taken = batch->taken.data;
    while (batch->num_taken > first) stamp_release(taken[--batch->num_taken].stamp);
}

folio_status folioi_batch_check_stamps(const folio_batch *batch)
{
    const folioi_taken *taken = batch->taken.data;
    for (int64_t i = 0; i < batch->num_taken; i++)
        REQUIRE(
            stamp_changes(taken[i].stamp) == taken[i].changes,
            "seq %lld: %s changed its sequence after it was put into the batch; clear the batch "
            "and fill it again",
            (long long)taken[i].seq, atomic_load(&taken[i].stamp->last_call));
    return FOLIO_OK;
}

/* ---- sequences one by one */

/* Lengths of one sequence, positions and enums. i is its number, for the sentence. */
static folio_status check_lengths(const folio_batch_seq *s, long long i)
{
    REQUIRE(s->query_len >= 0 && s->query_len <= INT32_MAX,
            "seq %lld: query_len %lld is outside [0, 2147483647]", i, (long long)s->query_len);
    REQUIRE(s->seq_len >= 0 && s->seq_len <= INT32_MAX,
            "seq %lld: seq_len %lld is outside [0, 2147483647]", i, (long long)s->seq_len);
    REQUIRE(s->seq_len > 0 || s->padding,
            "seq %lld: seq_len is 0; it is the cached tokens plus query_len %lld (set padding for "
            "rows without keys)",
            i, (long long)s->query_len);
    REQUIRE(s->seq_len == 0 || !s->padding, "seq %lld: padding has no keys, yet seq_len is %lld", i,
            (long long)s->seq_len);
    REQUIRE(
        s->positions_given || !seq_only_reads(s->query_len, s->seq_len),
        "seq %lld: query_len %lld is more than seq_len %lld, which counts cached and new tokens; "
        "more queries than keys need positions_given",
        i, (long long)s->query_len, (long long)s->seq_len);
    REQUIRE(s->encoder_len >= 0 && s->encoder_len <= INT32_MAX,
            "seq %lld: encoder_len %lld is outside [0, 2147483647]", i, (long long)s->encoder_len);
    REQUIRE(s->encoder_new_len == 0 || s->encoder_new_len == s->encoder_len,
            "seq %lld: encoder_new_len %lld is neither 0 nor encoder_len %lld", i,
            (long long)s->encoder_new_len, (long long)s->encoder_len);
    REQUIRE(!s->padding || s->encoder_new_len == 0,
            "seq %lld: padding has no encoder tokens, but encoder_new_len is %lld", i,
            (long long)s->encoder_new_len);
    REQUIRE((unsigned)s->phase <= FOLIO_PHASE_DECODE, "seq %lld: phase %d is unknown", i,
            (int)s->phase);
    REQUIRE((unsigned)s->causality <= FOLIO_CAUSAL_NO, "seq %lld: causality %d is unknown", i,
            (int)s->causality);
    REQUIRE(!s->positions_given ||
                (s->first_query_pos > -MAX_POSITION && s->first_query_pos < MAX_POSITION &&
                 s->first_key_pos > -MAX_POSITION && s->first_key_pos < MAX_POSITION),
            "seq %lld: first positions %lld and %lld exceed 2^40", i, (long long)s->first_query_pos,
            (long long)s->first_key_pos);
    return FOLIO_OK;
}

/* Has a table the `need` entries that `len` tokens fill? */
static folio_status check_table(const int32_t *table, int64_t num, int64_t len, int64_t need,
                                int32_t block_size, const char *name, long long i)
{
    if (table == NULL) {
        REQUIRE(num == 0, "seq %lld: %s is NULL, but its number of blocks is %lld", i, name,
                (long long)num);
        return FOLIO_OK;
    }
    REQUIRE_ALIGNED(table, "seq %lld: %s", i, name);
    REQUIRE(num >= need, "seq %lld: %s has %lld blocks of %d, its %lld tokens need %lld", i, name,
            (long long)num, block_size, (long long)len, (long long)need);
    return FOLIO_OK;
}

/* The n entries of a table that are needed, each a block or FOLIO_NO_BLOCK. */
static folio_status copy_table(int32_t *to, const int32_t *table, int64_t n, const char *name,
                               long long i, folioi_block_scan *found)
{
    *found = folioi_scan_blocks(to, table, n);
    if (found->end <= (uint32_t)INT32_MAX + 1) return FOLIO_OK;
    for (int64_t k = 0; k < n; k++)
        REQUIRE(to[k] >= FOLIO_NO_BLOCK, "seq %lld: %s[%lld] = %d is negative", i, name,
                (long long)k, to[k]);
    return FOLIO_OK;
}

static folio_status check_slots(const int64_t *slots, int64_t n, const char *name, long long i)
{
    REQUIRE_ALIGNED(slots, "seq %lld: %s", i, name);
    for (int64_t k = 0; slots != NULL && k < n; k++)
        REQUIRE(slots[k] >= -1, "seq %lld: %s[%lld] = %lld is below -1", i, name, (long long)k,
                (long long)slots[k]);
    return FOLIO_OK;
}

/* Nothing of a sequence with more queries than keys is stored. */
static folio_status check_no_slots(const folio_batch_seq *s, long long i)
{
    for (int64_t k = 0; s->slots != NULL && k < s->query_len; k++)
        REQUIRE(s->slots[k] == -1,
                "seq %lld: slots[%lld] is %lld, but query_len %lld is more than seq_len %lld; such "
                "a sequence stores nothing, so its slots must be -1",
                i, (long long)k, (long long)s->slots[k], (long long)s->query_len,
                (long long)s->seq_len);
    return FOLIO_OK;
}

/* The caller's slots, or those of tokens [first, first + n) by the block table. */
static void fill_slots(int64_t *out, int64_t n, const int64_t *given, const int32_t *table,
                       int64_t first, int32_t block_size)
{
    for (int64_t k = 0; k < n; k++) {
        int64_t token = first + k;
        if (given != NULL) out[k] = given[k];
        else if (table == NULL || table[token / block_size] < 0) out[k] = -1;
        else out[k] = (int64_t)table[token / block_size] * block_size + token % block_size;
    }
}

/* Past the batch's last sequence, where nobody looks until the counts grow at the end. */
static folio_status append(folio_batch *b, const folio_batch_seq *s, int64_t nb, int64_t ncb)
{
    int32_t bs = b->desc.block_size;
    bool padding = s->seq_len == 0;
    int64_t context_len = seq_context_len(s->query_len, s->seq_len);
    int32_t *table = (int32_t *)b->blocks.data + b->num_blocks;
    int32_t *cross = (int32_t *)b->cross_blocks.data + b->num_cross_blocks;
    folioi_block_scan scan, cross_scan;
    TRY(copy_table(table, s->block_table, nb, "block_table", b->num_seqs, &scan));
    TRY(copy_table(cross, s->cross_block_table, ncb, "cross_block_table", b->num_seqs,
                   &cross_scan));
    folio_phase phase = s->phase;
    if (phase == FOLIO_PHASE_AUTO)
        phase = context_len > 0 && s->query_len <= b->desc.decode_query_len ? FOLIO_PHASE_DECODE
                                                                            : FOLIO_PHASE_PREFILL;
    folioi_seq *q = (folioi_seq *)b->seqs.data + b->num_seqs;
    *q = (folioi_seq){
        .query_len = (int32_t)s->query_len,
        .seq_len = (int32_t)s->seq_len,
        .phase = padding ? FOLIO_PHASE_AUTO : phase,
        .causal = s->causality != FOLIO_CAUSAL_NO,
        .has_table = !padding && s->block_table != NULL,
        .has_cross_table = !padding && s->cross_block_table != NULL,
        .has_holes = scan.holes,
        .has_cross_holes = cross_scan.holes,
        .query_row = b->num_query_tokens,
        .first_query_pos = s->positions_given ? s->first_query_pos : context_len,
        .first_key_pos = s->positions_given ? s->first_key_pos : 0,
        .table_start = b->num_blocks,
        .num_blocks = (int32_t)nb,
        .num_cross_blocks = (int32_t)ncb,
        .encoder_len = (int32_t)s->encoder_len,
        .encoder_new_len = (int32_t)s->encoder_new_len,
        .encoder_row = b->num_encoder_tokens,
        .cross_start = b->num_cross_blocks,
    };
    bool stores = q->has_table && !seq_only_reads(s->query_len, s->seq_len);
    fill_slots((int64_t *)b->slots.data + b->num_query_tokens, s->query_len,
               padding ? NULL : s->slots, stores ? table : NULL, context_len, bs);
    int64_t *positions = (int64_t *)b->positions.data + b->num_query_tokens;
    for (int64_t k = 0; k < s->query_len; k++) positions[k] = q->first_query_pos + k;
    fill_slots((int64_t *)b->cross_slots.data + b->num_encoder_tokens, s->encoder_new_len,
               s->cross_slots, q->has_cross_table ? cross : NULL, 0, bs);
    b->num_seqs++;
    b->num_query_tokens += s->query_len;
    b->num_blocks += nb;
    b->num_encoder_tokens += s->encoder_new_len;
    b->num_cross_blocks += ncb;
    b->blocks_end = max_i64(b->blocks_end, scan.end);
    b->cross_blocks_end = max_i64(b->cross_blocks_end, cross_scan.end);
    if (s->encoder_len > 0) b->has_encoder_lens = true;
    b->generation++;
    return FOLIO_OK;
}

folio_status folioi_batch_add(folio_batch *batch, const folio_batch_seq *s)
{
    long long i = batch->num_seqs;
    int32_t bs = batch->desc.block_size;
    bool tabled = s->block_table != NULL, crossed = s->cross_block_table != NULL;
    TRY(check_lengths(s, i));
    REQUIRE(bs > 0 || (!tabled && !crossed),
            "seq %lld has a block table, but the batch has no block size: set "
            "folio_batch_desc.block_size or .cache",
            i);
    int64_t nb = tabled ? ceil_div(s->seq_len, bs) : 0;
    int64_t ncb = crossed && s->seq_len > 0 ? ceil_div(s->encoder_len, bs) : 0;
    if (s->seq_len > 0) {
        TRY(check_table(s->block_table, s->num_blocks, s->seq_len, nb, bs, "block_table", i));
        TRY(check_table(s->cross_block_table, s->num_cross_blocks, s->encoder_len, ncb, bs,
                        "cross_block_table", i));
        TRY(check_slots(s->slots, s->query_len, "slots", i));
        TRY(check_slots(s->cross_slots, s->encoder_new_len, "cross_slots", i));
        if (seq_only_reads(s->query_len, s->seq_len)) TRY(check_no_slots(s, i));
    }
    TRY(reserve_all(batch, batch->num_seqs + 1, batch->num_query_tokens + s->query_len,
                    batch->num_blocks + nb, batch->num_encoder_tokens + s->encoder_new_len,
                    batch->num_cross_blocks + ncb));
    return append(batch, s, nb, ncb);
}

/* A table by hand may name blocks that a sequence of the pool holds: the two do not go together. */
folio_status folio_batch_add(folio_batch *batch, const folio_batch_seq *seq)
{
    REQUIRE(batch != NULL, "folio_batch_add: batch is NULL");
    folio_batch_seq s;
    STRUCT_IN(s, seq, "folio_batch_seq");
    REQUIRE(batch->num_taken == 0 || s.padding,
            "seq %lld: the batch has sequences of a pool, and only padding may be added to them; "
            "use another batch",
            (long long)batch->num_seqs);
    TRY(folioi_batch_add(batch, &s));
    batch->num_by_hand += !s.padding;
    return FOLIO_OK;
}

folioi_rows folioi_batch_rows(const folio_batch *batch, int64_t seq, folio_attention_type type)
{
    const folioi_seq *s = batch_seq(batch, seq);
    bool padding = s->seq_len == 0;
    const int32_t *blocks = (const int32_t *)batch->blocks.data + s->table_start;
    const int32_t *cross = (const int32_t *)batch->cross_blocks.data + s->cross_start;
    folioi_rows r = {.query_row = s->query_row, .query_len = s->query_len};
    switch (type) {
    case FOLIO_ATTENTION_DECODER:
        r.key_len = s->seq_len;
        r.context_len = (int32_t)seq_context_len(s->query_len, s->seq_len);
        r.new_row = s->query_row;
        r.new_len = s->query_len;
        r.blocks = s->has_table ? blocks : NULL;
        r.num_blocks = s->num_blocks;
        r.slots = (const int64_t *)batch->slots.data + s->query_row;
        r.causal = s->causal;
        r.first_query_pos = s->first_query_pos;
        r.first_key_pos = s->first_key_pos;
        break;
    case FOLIO_ATTENTION_ENCODER:
        r.query_row = r.new_row = s->encoder_row;
        r.query_len = r.new_len = r.key_len = s->encoder_new_len;
        break;
    case FOLIO_ATTENTION_ENCODER_ONLY:
        r.new_row = s->query_row;
        r.new_len = s->query_len;
        r.key_len = padding ? 0 : s->query_len;
        break;
    case FOLIO_ATTENTION_ENCODER_DECODER:
        r.key_len = padding ? 0 : s->encoder_len;
        r.context_len = r.key_len - s->encoder_new_len;
        r.new_row = s->encoder_row;
        r.new_len = s->encoder_new_len;
        r.blocks = s->has_cross_table ? cross : NULL;
        r.num_blocks = s->num_cross_blocks;
        r.slots = (const int64_t *)batch->cross_slots.data + s->encoder_row;
        break;
    }
    return r;
}

int64_t folioi_batch_query_rows(const folio_batch *batch, folio_attention_type type)
{
    return type == FOLIO_ATTENTION_ENCODER ? batch->num_encoder_tokens : batch->num_query_tokens;
}

int64_t folioi_batch_new_rows(const folio_batch *batch, folio_attention_type type)
{
    return type == FOLIO_ATTENTION_ENCODER || type == FOLIO_ATTENTION_ENCODER_DECODER
               ? batch->num_encoder_tokens
               : batch->num_query_tokens;
}

const int64_t *folioi_batch_slots(const folio_batch *batch, folio_attention_type type)
{
    if (type == FOLIO_ATTENTION_DECODER) return batch->slots.data;
    if (type == FOLIO_ATTENTION_ENCODER_DECODER) return batch->cross_slots.data;
    return NULL;
}
