/*
 * first.c: every object once: create, fill, run, read. Two sequences in a paged KV cache, a prompt of
 * five tokens and one that generates its tenth, in one call.
 */
#include "example.h"

enum { HEADS = 4, KV_HEADS = 2, HEAD_SIZE = 64, BLOCK_SIZE = 16, NUM_BLOCKS = 8 };

int main(void)
{
    /* Create: a context, one layer geometry, a cache of one layer. */
    folio_context *ctx;
    folio_attention *attention;
    folio_kv_cache *cache;
    must(folio_context_create(NULL, &ctx));
    must(folio_attention_create(ctx,
                                &FOLIO_WITH(folio_attention_desc, .num_heads = HEADS,
                                            .num_kv_heads = KV_HEADS, .k_head_size = HEAD_SIZE,
                                            .dtype = FOLIO_F32),
                                &attention));
    must(folio_kv_cache_create(ctx,
                               &FOLIO_WITH(folio_kv_cache_desc, .num_blocks = NUM_BLOCKS,
                                           .num_layers = 1, .block_size = BLOCK_SIZE,
                                           .num_kv_heads = KV_HEADS, .k_head_size = HEAD_SIZE,
                                           .dtype = FOLIO_F32),
                               &cache));
    folio_batch *batch;
    folio_plan *plan;
    must(folio_batch_create(ctx, &FOLIO_WITH(folio_batch_desc, .cache = cache), &batch));
    must(folio_plan_create(ctx,
                           &FOLIO_WITH(folio_plan_desc, .attentions = &attention,
                                       .num_attentions = 1, .cache = cache, .max_seqs = 2,
                                       .max_query_tokens = 16, .max_seq_len = 64),
                           &plan));

    /* Fill. Sequence A owns block 3, sequence B block 6. First B's prompt of nine tokens, then A's
     * prompt of five tokens together with B's tenth. */
    static float q[9 * HEADS * HEAD_SIZE], k[9 * KV_HEADS * HEAD_SIZE], v[9 * KV_HEADS * HEAD_SIZE];
    static float out[9 * HEADS * HEAD_SIZE], lse[9 * HEADS];
    const int32_t block_a[] = {3}, block_b[] = {6};
    for (int step = 0; step < 2; step++) {
        folio_batch_clear(batch);
        folio_batch_seq a = {.struct_size = sizeof a, .query_len = 5, .seq_len = 5};
        folio_batch_seq b =
            FOLIO_WITH(folio_batch_seq, .query_len = step ? 1 : 9, .seq_len = 9 + step);
        a.block_table = block_a;
        b.block_table = block_b;
        a.num_blocks = b.num_blocks = 1;
        if (step == 1) must(folio_batch_add(batch, &a));
        must(folio_batch_add(batch, &b));
        must(folio_plan_update(plan, batch, NULL));

        /* Run: k and v go to the cache, then every query attends to what its sequence has there. */
        int64_t tokens = step ? 6 : 9;
        make_numbers(q, (int)tokens * HEADS * HEAD_SIZE, 1u + (unsigned)step);
        make_numbers(k, (int)tokens * KV_HEADS * HEAD_SIZE, 3u + (unsigned)step);
        make_numbers(v, (int)tokens * KV_HEADS * HEAD_SIZE, 5u + (unsigned)step);
        folio_tensors tensors =
            FOLIO_WITH(folio_tensors, .q = {.data = q, .dtype = FOLIO_F32, .tokens = tokens},
                       .k = {.data = k, .dtype = FOLIO_F32, .tokens = tokens},
                       .v = {.data = v, .dtype = FOLIO_F32, .tokens = tokens},
                       .out = {.data = out, .dtype = FOLIO_F32, .tokens = tokens}, .lse = lse);
        must(folio_attention_forward(plan, 0, FOLIO_ATTENTION_DECODER, cache, 0, &tensors, NULL));

        /* Receive. */
        printf("step %d: %lld tokens in, out[0][0][0..3] = %8.5f %8.5f %8.5f, lse[0][0] = %7.4f\n",
               step, (long long)tokens, (double)out[0], (double)out[1], (double)out[2],
               (double)lse[0]);
    }

    folio_plan_destroy(plan);
    folio_batch_destroy(batch);
    folio_kv_cache_destroy(cache);
    folio_attention_destroy(attention);
    folio_context_destroy(ctx);
    return 0;
}
