/*
 * translate.c: an encoder-decoder at work. Two source sentences are encoded; their K and V go to cross
 * blocks once; then the decoder generates token by token, its own K and V in paged blocks, reading the
 * source through cross attention. At the end everything is computed again from scratch, in one step and
 * without a cache, and every row must have the same bits.
 *
 * The "model" is a toy: embeddings are pseudo-random, q = k = v = embedding, and the next token is the
 * one whose embedding has the largest product with what cross attention returns.
 */
#include "example.h"

#include <string.h>

enum { HEADS = 2, D = 16, WIDTH = HEADS * D, VOCABULARY = 64, BLOCK = 4, BLOCKS = 32 };
enum {
    SEQS = 2,
    STEPS = 12,
    MAX_SOURCE = 9,
    MAX_ROWS = SEQS * (STEPS > MAX_SOURCE ? STEPS : MAX_SOURCE)
};

typedef struct {
    int32_t source[MAX_SOURCE], source_len;
    int32_t target[STEPS + 1], target_len;
    int32_t blocks[STEPS / BLOCK + 1], cross_blocks[MAX_SOURCE / BLOCK + 1];
} sentence;

static folio_context *ctx;
static folio_attention *attention;
static folio_kv_cache *cache; /* layer 0: decoder self-attention, layer 1: cross attention */
static folio_batch *batch;
static folio_plan *plan;

static void attend(folio_attention_type type, folio_kv_cache *c, int32_t layer, const float *q,
                   int64_t rows, const float *kv, int64_t kv_rows, float *out)
{
    folio_tensors t =
        FOLIO_WITH(folio_tensors, .q = {.data = (void *)q, .dtype = FOLIO_F32, .tokens = rows},
                   .k = {.data = (void *)kv, .dtype = FOLIO_F32, .tokens = kv_rows},
                   .v = {.data = (void *)kv, .dtype = FOLIO_F32, .tokens = kv_rows},
                   .out = {.data = out, .dtype = FOLIO_F32, .tokens = rows});
    must(folio_attention_forward(plan, 0, type, c, layer, &t, NULL));
}

/* One step: each sentence's target tokens [from, from + n) through the decoder; with `encode` its source
 * through the encoder first. out: SEQS * n rows. c NULL: no cache is used. */
static void step(sentence *s, int32_t from, int32_t n, int encode, folio_kv_cache *c, float *out)
{
    static float x[MAX_ROWS * WIDTH], self[MAX_ROWS * WIDTH];
    static float source[MAX_ROWS * WIDTH], encoded[MAX_ROWS * WIDTH];
    int32_t rows = 0, source_rows = 0;
    folio_batch_clear(batch);
    for (int i = 0; i < SEQS; i++) {
        folio_batch_seq b = {.struct_size = sizeof b, .query_len = n, .seq_len = from + n};
        b.encoder_len = s[i].source_len;
        b.encoder_new_len = encode ? s[i].source_len : 0;
        if (c != NULL) {
            b.block_table = s[i].blocks;
            b.num_blocks = STEPS / BLOCK + 1;
            b.cross_block_table = s[i].cross_blocks;
            b.num_cross_blocks = MAX_SOURCE / BLOCK + 1;
        }
        must(folio_batch_add(batch, &b));
        for (int32_t t = from; t < from + n; t++)
            embed_token(s[i].target[t], t, 1, x + WIDTH * rows++, WIDTH);
        for (int32_t t = 0; encode && t < s[i].source_len; t++)
            embed_token(s[i].source[t], t, 1, source + WIDTH * source_rows++, WIDTH);
    }
    must(folio_plan_update(plan, batch, NULL));
    attend(FOLIO_ATTENTION_ENCODER, NULL, 0, source, source_rows, source, source_rows, encoded);
    attend(FOLIO_ATTENTION_DECODER, c, 0, x, rows, x, rows, self);
    attend(FOLIO_ATTENTION_ENCODER_DECODER, c, 1, self, rows, encode ? encoded : NULL, source_rows,
           out);
}

static void create(void)
{
    must(folio_context_create(NULL, &ctx));
    folio_attention_desc a = {.struct_size = sizeof a, .num_heads = HEADS, .k_head_size = D};
    a.dtype = FOLIO_F32;
    must(folio_attention_create(ctx, &a, &attention));
    folio_kv_cache_desc k = {.struct_size = sizeof k, .num_blocks = BLOCKS, .num_layers = 2};
    k.block_size = BLOCK;
    k.num_kv_heads = HEADS;
    k.k_head_size = D;
    k.dtype = FOLIO_F32;
    must(folio_kv_cache_create(ctx, &k, &cache));
    folio_batch_desc b = {.struct_size = sizeof b, .cache = cache};
    must(folio_batch_create(ctx, &b, &batch));
    folio_attention *list[] = {attention};
    const uint32_t types[] = {FOLIO_ATTENTION_BIT(FOLIO_ATTENTION_ENCODER) |
                              FOLIO_ATTENTION_BIT(FOLIO_ATTENTION_DECODER) |
                              FOLIO_ATTENTION_BIT(FOLIO_ATTENTION_ENCODER_DECODER)};
    folio_plan_desc p = {.struct_size = sizeof p, .attentions = list, .types = types};
    p.num_attentions = 1;
    p.cache = cache;
    p.max_seqs = SEQS;
    p.max_query_tokens = p.max_encoder_tokens = MAX_ROWS;
    p.max_seq_len = STEPS + MAX_SOURCE;
    must(folio_plan_create(ctx, &p, &plan));
}

int main(void)
{
    static float by_step[STEPS][SEQS * WIDTH], whole[MAX_ROWS * WIDTH];
    sentence s[SEQS] = {
        {{5, 9, 2, 60, 33, 7, 1, 18, 4}, 9, {1}, 1, {7, 3, 12, 30}, {20, 2, 9}},
        {{44, 8, 8, 51, 3}, 5, {1}, 1, {15, 6, 0, 31}, {11, 28, 5}},
    };
    create();
    for (int32_t t = 0; t < STEPS; t++) {
        step(s, t, 1, t == 0, cache, by_step[t]);
        for (int i = 0; i < SEQS; i++)
            s[i].target[t + 1] = find_token(by_step[t] + i * WIDTH, WIDTH, VOCABULARY, t + 1, 1);
    }
    step(s, 0, STEPS, 1, NULL, whole);
    int different = 0;
    for (int i = 0; i < SEQS; i++) {
        printf("source of %d tokens ->", s[i].source_len);
        for (int32_t t = 0; t < STEPS; t++) {
            printf(" %d", s[i].target[t + 1]);
            different += memcmp(by_step[t] + i * WIDTH, whole + (i * STEPS + t) * WIDTH,
                                WIDTH * sizeof(float)) != 0;
        }
        printf("\n");
    }
    printf("%d rows by steps, %d differ from computing everything again\n", SEQS * STEPS,
           different);
    folio_plan_destroy(plan);
    folio_batch_destroy(batch);
    folio_kv_cache_destroy(cache);
    folio_attention_destroy(attention);
    folio_context_destroy(ctx);
    return different != 0;
}
