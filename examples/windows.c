/*
 * windows.c: a model whose layers alternate between a sliding window and full attention. Its layers
 * form two layer groups of one pool: a sequence keeps all of its blocks in the one, and the last few
 * in the other. Both groups have layers of one shape, so they name the same KV cache: a block that
 * falls out of the window is free for either group at once.
 *
 * The model generates twice: with a pool that knows the window, and with one that keeps everything.
 * The tokens must be equal. (Groups of different shapes: folio_kv_cache_create_shared.)
 */
#include "example.h"

#include <folio/folio_pool.h>

#include <stdbool.h>
#include <string.h>

enum { LAYERS = 8, GROUPS = 2, HEADS = 2, D = 16, WIDTH = HEADS * D, VOCABULARY = 50 };
enum { BLOCK = 8, BLOCKS = 128, WINDOW = 32, PROMPT = 24, LEN = 400 };

static folio_context *ctx;

/* Stands for a layer's projections: q, k and v are x in another order, each with signs of its own. */
static void project(const float *x, int64_t rows, int layer, int which, float *y)
{
    for (int64_t r = 0; r < rows; r++)
        for (int i = 0; i < WIDTH; i++)
            y[r * WIDTH + i] = x[r * WIDTH + (i * 5 + 7 * which + layer) % WIDTH] *
                               ((i + layer + which) % 3 ? 1.0f : -1.0f);
}

typedef struct {
    folio_attention *attention[GROUPS]; /* layer l is layer l / 2 of group l % 2 */
    folio_kv_cache *cache;              /* of both groups */
    folio_batch *batch[GROUPS];
    folio_plan *plan[GROUPS];
    folio_pool *pool;
} model;

/* Group 0 sees a window, group 1 everything. window: what the pool is told of it; 0: nothing. */
static void open_model(model *m, int64_t window)
{
    must(folio_kv_cache_create(ctx,
                               &FOLIO_WITH(folio_kv_cache_desc, .num_blocks = BLOCKS,
                                           .num_layers = LAYERS / GROUPS, .block_size = BLOCK,
                                           .num_kv_heads = HEADS, .k_head_size = D,
                                           .dtype = FOLIO_F32),
                               &m->cache));
    folio_layer_group groups[GROUPS] = {{.window = window, .cache = m->cache}, {.cache = m->cache}};
    must(folio_pool_create(
        ctx, &FOLIO_WITH(folio_pool_desc, .num_layer_groups = GROUPS, .layer_groups = groups),
        &m->pool));
    for (int g = 0; g < GROUPS; g++) {
        must(folio_attention_create(ctx,
                                    &FOLIO_WITH(folio_attention_desc, .num_heads = HEADS,
                                                .k_head_size = D, .dtype = FOLIO_F32,
                                                .windowed = g == 0,
                                                .window_left = g == 0 ? WINDOW - 1 : 0),
                                    &m->attention[g]));
        folio_attention *list[] = {m->attention[g]};
        must(folio_batch_create(ctx, &FOLIO_WITH(folio_batch_desc, .cache = m->cache),
                                &m->batch[g]));
        must(folio_plan_create(ctx,
                               &FOLIO_WITH(folio_plan_desc, .attentions = list, .num_attentions = 1,
                                           .cache = m->cache, .max_seqs = 1,
                                           .max_query_tokens = PROMPT, .max_seq_len = LEN),
                               &m->plan[g]));
    }
}

static void close_model(model *m)
{
    for (int g = 0; g < GROUPS; g++) {
        folio_plan_destroy(m->plan[g]);
        folio_batch_destroy(m->batch[g]);
        folio_attention_destroy(m->attention[g]);
    }
    folio_pool_destroy(m->pool);
    folio_kv_cache_destroy(m->cache);
}

/* Tokens from .. len - 1 through all layers; the token after them. */
static int32_t step(model *m, folio_sequence *s, const int32_t *tokens, int32_t from, int32_t len)
{
    static float x[PROMPT * WIDTH], q[PROMPT * WIDTH], k[PROMPT * WIDTH], v[PROMPT * WIDTH];
    static float out[PROMPT * WIDTH];
    int64_t rows = len - from;
    must(folio_sequence_reserve(s, rows, 0, NULL)); /* and lets go what fell out of the window */
    for (int g = 0; g < GROUPS; g++) {
        folio_batch_clear(m->batch[g]);
        must(folio_batch_add_sequences(m->batch[g], g, &s, 1, NULL));
        must(folio_plan_update(m->plan[g], m->batch[g], NULL));
    }
    for (int32_t t = from; t < len; t++)
        embed_token(tokens[t], t, 0, x + (t - from) * WIDTH, WIDTH);
    for (int l = 0; l < LAYERS; l++) {
        project(x, rows, l, 0, q);
        project(x, rows, l, 1, k);
        project(x, rows, l, 2, v);
        folio_tensors t =
            FOLIO_WITH(folio_tensors, .q = {.data = q, .dtype = FOLIO_F32, .tokens = rows},
                       .k = {.data = k, .dtype = FOLIO_F32, .tokens = rows},
                       .v = {.data = v, .dtype = FOLIO_F32, .tokens = rows},
                       .out = {.data = out, .dtype = FOLIO_F32, .tokens = rows});
        must(folio_attention_forward(m->plan[l % GROUPS], 0, FOLIO_ATTENTION_DECODER, m->cache,
                                     l / GROUPS, &t, NULL));
        for (int64_t i = 0; i < rows * WIDTH; i++) x[i] = 0.8f * x[i] + 0.6f * out[i];
    }
    must(folio_sequence_commit(s, NULL));
    return find_token(x + (rows - 1) * WIDTH, WIDTH, VOCABULARY, 0, 0);
}

/* Generates up to LEN tokens; the most blocks that were in use. */
static int64_t generate(int64_t window, int32_t *tokens)
{
    model m;
    folio_sequence *s;
    open_model(&m, window);
    must(folio_sequence_create(m.pool, NULL, &s));
    for (int32_t t = 0; t < PROMPT; t++) tokens[t] = t * 7 % VOCABULARY;
    for (int32_t done = 0, len = PROMPT; len < LEN; done = len++)
        tokens[len] = step(&m, s, tokens, done, len);
    folio_pool_stats stats = FOLIO_INIT(folio_pool_stats);
    must(folio_pool_get_stats(m.pool, &stats));
    folio_sequence_destroy(s);
    close_model(&m);
    return stats.peak_used;
}

int main(void)
{
    static int32_t kept[LEN], released[LEN];
    must(folio_context_create(NULL, &ctx));
    int64_t all = generate(0, kept), few = generate(WINDOW, released);
    folio_context_destroy(ctx);
    bool equal = memcmp(kept, released, sizeof kept) == 0;
    int64_t kib = (int64_t)BLOCK * WIDTH * 2 * (int64_t)sizeof(float) * (LAYERS / GROUPS) / 1024;
    printf("%d tokens, %d layers, every other one with a window of %d\n", LEN, LAYERS, WINDOW);
    printf("all blocks kept:    %3lld blocks, %4lld KiB\n", (long long)all, (long long)(all * kib));
    printf("windows released:   %3lld blocks, %4lld KiB, %lld %% less; tokens %s\n", (long long)few,
           (long long)(few * kib), (long long)(100 - few * 100 / all), equal ? "equal" : "DIFFER");
    return equal && few * 10 < all * 6 ? 0 : 1;
}
