/*
 * cascade.c: many sequences with one prefix. The prefix is read once for all of them: their queries
 * are the rows of one sequence that has the prefix as its keys, and so more queries than keys. Each
 * sequence then attends to its own tokens, and folio_state_merge merges the two parts. The plain
 * forward, which reads the prefix once for each sequence, must say the same.
 */
#include "example.h"

#include <math.h>

enum { HEADS = 4, KV_HEADS = 2, D = 32, BLOCK = 16, BLOCKS = 128 };
enum { SEQS = 100, PREFIX_BLOCKS = 5, PREFIX = PREFIX_BLOCKS * BLOCK, MOST = PREFIX + BLOCK };

static folio_context *ctx;
static folio_attention *attention;
static folio_kv_cache *cache;
static folio_batch *batch;
static folio_plan *plan;
static float q[SEQS * HEADS * D];
static int32_t tables[SEQS][PREFIX_BLOCKS + 1]; /* the shared blocks, then one of its own */

typedef struct {
    float out[SEQS * HEADS * D], lse[SEQS * HEADS];
} part;

/* One query of each sequence; tokens of a sequence that came after the prefix, the query's included. */
static int64_t own_len(int i) { return 1 + i % BLOCK; }

/* The batch as it was filled. All keys are in the cache, so k and v are absent. */
static void forward(part *p)
{
    must(folio_plan_update(plan, batch, NULL));
    folio_tensors tensors =
        FOLIO_WITH(folio_tensors, .q = {.data = q, .dtype = FOLIO_F32, .tokens = SEQS},
                   .out = {.data = p->out, .dtype = FOLIO_F32, .tokens = SEQS}, .lse = p->lse);
    must(folio_attention_forward(plan, 0, FOLIO_ATTENTION_DECODER, cache, 0, &tensors, NULL));
    folio_batch_clear(batch);
}

static void plain_forward(part *whole)
{
    for (int i = 0; i < SEQS; i++)
        must(folio_batch_add(
            batch, &FOLIO_WITH(folio_batch_seq, .query_len = 1, .seq_len = PREFIX + own_len(i),
                               .block_table = tables[i], .num_blocks = PREFIX_BLOCKS + 1)));
    forward(whole);
}

static void cascade_forward(part *merged)
{
    static part shared, own;
    /* 100 queries over 80 keys. They all come after the prefix, and see all of it. */
    must(folio_batch_add(batch, &FOLIO_WITH(folio_batch_seq, .query_len = SEQS, .seq_len = PREFIX,
                                            .block_table = tables[0], .num_blocks = PREFIX_BLOCKS,
                                            .positions_given = 1, .first_query_pos = PREFIX,
                                            .first_key_pos = 0)));
    forward(&shared);
    for (int i = 0; i < SEQS; i++)
        must(folio_batch_add(
            batch, &FOLIO_WITH(folio_batch_seq, .query_len = 1, .seq_len = own_len(i),
                               .block_table = &tables[i][PREFIX_BLOCKS], .num_blocks = 1)));
    forward(&own);
    folio_state parts[] = {
        {.out = {.data = shared.out, .dtype = FOLIO_F32, .tokens = SEQS}, .lse = shared.lse},
        {.out = {.data = own.out, .dtype = FOLIO_F32, .tokens = SEQS}, .lse = own.lse}};
    must(folio_state_merge(
        ctx,
        &FOLIO_WITH(folio_merge, .num_heads = HEADS, .head_size = D, .num_parts = 2, .parts = parts,
                    .out = {.data = merged->out, .dtype = FOLIO_F32, .tokens = SEQS},
                    .lse = merged->lse),
        NULL));
}

/* K and V of every slot that a table names, as earlier steps would have left them. */
static void fill_cache(void)
{
    enum { SLOTS = (PREFIX_BLOCKS + SEQS) * BLOCK, NUMBERS = SLOTS * KV_HEADS * D };
    float *k = malloc(2 * NUMBERS * sizeof *k), *v = k + NUMBERS;
    int64_t *slots = malloc(SLOTS * sizeof *slots);
    if (k == NULL || slots == NULL) exit(1);
    make_numbers(k, 2 * NUMBERS, 7);
    for (int i = 0; i < SLOTS; i++) slots[i] = i;
    must(folio_kv_cache_write(
        cache, 0,
        &FOLIO_WITH(folio_kv_write, .k = {.data = k, .dtype = FOLIO_F32, .tokens = SLOTS},
                    .v = {.data = v, .dtype = FOLIO_F32, .tokens = SLOTS}, .slots = slots),
        NULL));
    free(k);
    free(slots);
}

int main(void)
{
    must(folio_context_create(NULL, &ctx));
    must(folio_attention_create(ctx,
                                &FOLIO_WITH(folio_attention_desc, .num_heads = HEADS,
                                            .num_kv_heads = KV_HEADS, .k_head_size = D,
                                            .dtype = FOLIO_F32),
                                &attention));
    must(folio_kv_cache_create(
        ctx,
        &FOLIO_WITH(folio_kv_cache_desc, .num_blocks = BLOCKS, .num_layers = 1, .block_size = BLOCK,
                    .num_kv_heads = KV_HEADS, .k_head_size = D, .dtype = FOLIO_F32),
        &cache));
    must(folio_batch_create(ctx, &FOLIO_WITH(folio_batch_desc, .cache = cache), &batch));
    must(folio_plan_create(ctx,
                           &FOLIO_WITH(folio_plan_desc, .attentions = &attention,
                                       .num_attentions = 1, .cache = cache, .max_seqs = SEQS,
                                       .max_query_tokens = SEQS, .max_seq_len = MOST),
                           &plan));
    for (int i = 0; i < SEQS; i++) {
        for (int b = 0; b < PREFIX_BLOCKS; b++) tables[i][b] = b;
        tables[i][PREFIX_BLOCKS] = PREFIX_BLOCKS + i;
    }
    make_numbers(q, SEQS * HEADS * D, 3);
    fill_cache();

    static part whole, merged;
    plain_forward(&whole);
    cascade_forward(&merged);
    float farthest = 0;
    int64_t plain_keys = 0, cascade_keys = PREFIX;
    for (int i = 0; i < SEQS * HEADS * D; i++)
        farthest = fmaxf(farthest, fabsf(merged.out[i] - whole.out[i]));
    for (int i = 0; i < SEQS * HEADS; i++)
        farthest = fmaxf(farthest, fabsf(merged.lse[i] - whole.lse[i]));
    for (int i = 0; i < SEQS; i++) {
        plain_keys += PREFIX + own_len(i);
        cascade_keys += own_len(i);
    }
    printf("%d sequences that share %d tokens\n", SEQS, PREFIX);
    printf("plain forward: %lld keys read; prefix once, then merged: %lld\n", (long long)plain_keys,
           (long long)cascade_keys);
    printf("largest difference of out and lse: %.1e\n", (double)farthest);

    folio_plan_destroy(plan);
    folio_batch_destroy(batch);
    folio_kv_cache_destroy(cache);
    folio_attention_destroy(attention);
    folio_context_destroy(ctx);
    return farthest < 1e-5f ? 0 : 1;
}
