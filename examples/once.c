/*
 * once.c: attention in one call, if you have one q, k and v tensor. A prompt of 18 tokens goes into a
 * paged cache; then the next token attends to all of them.
 */
#include <folio/folio.h>
#include <stdio.h>

enum { HEADS = 4, KV_HEADS = 2, SIZE = 64, PROMPT = 18 };

#define MUST(call)                                                                                 \
    if ((call) != FOLIO_OK) return puts(folio_last_error()), 1

int main(void)
{
    static float q[PROMPT][HEADS][SIZE], k[PROMPT][KV_HEADS][SIZE], v[PROMPT][KV_HEADS][SIZE];
    static float out[PROMPT][HEADS][SIZE]; /* q, k and v come from your model */
    folio_context *ctx;
    folio_kv_cache *cache;
    folio_kv_cache_desc desc =
        FOLIO_WITH(folio_kv_cache_desc, .num_layers = 1, .num_blocks = 4, .block_size = 16,
                   .num_kv_heads = KV_HEADS, .k_head_size = SIZE, .dtype = FOLIO_F32);
    MUST(folio_context_create(NULL, &ctx));
    MUST(folio_kv_cache_create(ctx, &desc, &cache));
    for (int i = 0; i < PROMPT; i++) v[i][0][0] = (float)i;
    int32_t seq_len = PROMPT;
    folio_attention_desc attention = FOLIO_WITH(folio_attention_desc, .num_heads = HEADS);
    folio_step step = FOLIO_WITH(
        folio_step, .num_seqs = 1, .seq_lens = &seq_len,
        .table = {.kind = FOLIO_TABLE_ROWS, .indices = (int32_t[]){2, 0}, .row_stride = 2});
    folio_tensors t = FOLIO_WITH(
        folio_tensors, .q = {q, FOLIO_F32, PROMPT, 0, 0}, .k = {k, FOLIO_F32, PROMPT, 0, 0},
        .v = {v, FOLIO_F32, PROMPT, 0, 0}, .out = {out, FOLIO_F32, PROMPT, 0, 0});
    MUST(folio_attend(ctx, &attention, FOLIO_ATTENTION_DECODER, &step, cache, 0, &t, NULL));
    printf("token 17 averages v = 0 ... 17: %g\n", (double)out[17][0][0]);
    t.q.tokens = t.k.tokens = t.v.tokens = t.out.tokens = 1;
    seq_len++;
    v[0][0][0] = 18;
    MUST(folio_attend(ctx, &attention, FOLIO_ATTENTION_DECODER, &step, cache, 0, &t, NULL));
    printf("token 18 averages v = 0 ... 18: %g\n", (double)out[0][0][0]);
    folio_kv_cache_destroy(cache);
    folio_context_destroy(ctx);
    return out[0][0][0] > 8.99f && out[0][0][0] < 9.01f ? 0 : 1;
}
