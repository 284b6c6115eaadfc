/*
 * test_large_scores.c: scores far larger than a softmax's range: finite masks as models add them, and biases on
 * every key. Each level against the reference, over several tiles and splits.
 */
#include "kit/kit.h"
#include "kit/layer.h"
#include "test.h"

#include <folio/folio.h>
#include <math.h>
#include <stdlib.h>

enum { HEADS = 2, SIZE = 32, KEYS = 1200, BLOCK = 16, MAX_ROWS = 40 };

typedef struct {
    folio_dtype dtype;
    int64_t rows;
    float bias[KEYS];
    char *q, *k, *v;
} large_case;

typedef struct {
    double out[MAX_ROWS * HEADS * SIZE];
    float lse[MAX_ROWS * HEADS];
} answer;

static char *random_rows(const large_case *c, int32_t tensor, int64_t rows)
{
    char *data = calloc((size_t)(rows * HEADS * SIZE), folio_dtype_size(c->dtype));
    for (int64_t i = 0; i < rows * HEADS * SIZE; i++)
        kit_store(c->dtype, data, i, 0.5 * kit_random(11, tensor, 0, i, 0, 0));
    return data;
}

static void open_case(large_case *c)
{
    c->q = random_rows(c, KIT_Q, c->rows);
    c->k = random_rows(c, KIT_K, KEYS);
    c->v = random_rows(c, KIT_V, KEYS);
}

static void close_case(large_case *c)
{
    free(c->q);
    free(c->k);
    free(c->v);
}

static void run_case(const large_case *c, const char *backend, const char *level, answer *a)
{
    static char out[MAX_ROWS * HEADS * SIZE * 4];
    folio_context *ctx = kit_context(backend, level, 2);
    kit_layer l = {0};
    int64_t slots[KEYS];
    int32_t table[KEYS / BLOCK];
    for (int i = 0; i < KEYS; i++) slots[i] = i;
    for (int i = 0; i < KEYS / BLOCK; i++) table[i] = i;
    CHECK_OK(KIT_LAYER_OPEN(ctx, &l, .num_heads = HEADS, .k_head_size = SIZE, .dtype = c->dtype,
                            .num_blocks = KEYS / BLOCK, .block_size = BLOCK,
                            .max_query_tokens = c->rows, .max_seq_len = KEYS));
    folio_kv_write write = FOLIO_WITH(folio_kv_write, .k = {c->k, c->dtype, KEYS, 0, 0},
                                      .v = {c->v, c->dtype, KEYS, 0, 0}, .slots = slots);
    CHECK_OK(folio_kv_cache_write(l.cache, 0, &write, NULL));
    folio_batch_seq seq =
        FOLIO_WITH(folio_batch_seq, .query_len = (int32_t)c->rows, .seq_len = KEYS,
                   .block_table = table, .num_blocks = KEYS / BLOCK);
    CHECK_OK(folio_batch_add(l.batch, &seq));
    CHECK_OK(folio_plan_update(l.plan, l.batch, NULL));
    folio_tensors t = FOLIO_WITH(folio_tensors, .q = {c->q, c->dtype, c->rows, 0, 0},
                                 .out = {out, c->dtype, c->rows, 0, 0}, .lse = a->lse,
                                 .bias = {c->bias, FOLIO_F32, {1, 1, 1, KEYS}, {0, 0, 0, 1}});
    CHECK_OK(folio_attention_forward(l.plan, 0, FOLIO_ATTENTION_DECODER, l.cache, 0, &t, NULL));
    for (int64_t i = 0; i < c->rows * HEADS * SIZE; i++) a->out[i] = kit_load(c->dtype, out, i);
    kit_layer_close(&l);
    folio_context_destroy(ctx);
}

typedef void check_fn(const large_case *c, const char *level, const answer *got, const answer *ref);

static void each_level(const large_case *c, check_fn *check)
{
    static answer got, ref;
    folio_backend_info info = {.struct_size = sizeof info};
    CHECK_OK(folio_backend_get_info("cpu", &info));
    run_case(c, "reference", NULL, &ref);
    for (int32_t i = 0; i < info.num_levels; i++) {
        run_case(c, "cpu", info.levels[i], &got);
        check(c, info.levels[i], &got, &ref);
    }
}

/* What a mask hides counts for nothing; where it hides all a row sees, the reference says what is left. */
static void check_close(const large_case *c, const char *level, const answer *got,
                        const answer *ref)
{
    double tolerance = c->dtype == FOLIO_F32 ? 2e-6 : 8e-3;
    for (int64_t i = 0; i < c->rows * HEADS * SIZE; i++)
        CHECK_MSG(fabs(got->out[i] - ref->out[i]) <= tolerance, "%s: out[%lld] is %g, not %g",
                  level, (long long)i, got->out[i], ref->out[i]);
    for (int64_t i = 0; i < c->rows * HEADS; i++)
        CHECK_MSG(fabs((double)got->lse[i] - (double)ref->lse[i]) <= 1e-5, "%s: lse %g, not %g",
                  level, (double)got->lse[i], (double)ref->lse[i]);
}

TEST(large_scores, finite_masks_hide_padding)
{
    static const float masks[] = {-1e4f, -1e9f, -1e10f, -1e15f, -1e30f, -3.4028235e38f};
    static const int hidden[] = {100, 200, 700};
    for (size_t m = 0; m < sizeof masks / sizeof masks[0]; m++)
        for (size_t h = 0; h < sizeof hidden / sizeof hidden[0]; h++)
            for (int kind = 0; kind < 4; kind++) {
                large_case c = {.dtype = kind % 2 ? FOLIO_BF16 : FOLIO_F32,
                                .rows = kind < 2 ? 1 : MAX_ROWS};
                for (int i = 0; i < hidden[h]; i++) c.bias[i] = masks[m];
                open_case(&c);
                each_level(&c, check_close);
                close_case(&c);
            }
}

/* f32 keeps nothing of the scores below such a bias: any weights are right, but weights they must be. */
static void check_sane(const large_case *c, const char *level, const answer *got, const answer *ref)
{
    for (int64_t i = 0; i < c->rows * HEADS * SIZE; i++)
        CHECK_MSG(fabs(got->out[i]) <= 1.0, "%s: out[%lld] is %g", level, (long long)i,
                  got->out[i]);
    for (int64_t i = 0; i < c->rows * HEADS; i++)
        CHECK_MSG(fabs((double)got->lse[i] / (double)ref->lse[i] - 1.0) <= 1e-6,
                  "%s: lse %g, not %g", level, (double)got->lse[i], (double)ref->lse[i]);
}

TEST(large_scores, a_bias_on_every_key_leaves_an_average)
{
    static const float biases[] = {1e10f, -1e10f, 1e30f, -1e30f, -3e38f};
    for (size_t b = 0; b < sizeof biases / sizeof biases[0]; b++)
        for (int kind = 0; kind < 4; kind++) {
            large_case c = {.dtype = kind % 2 ? FOLIO_BF16 : FOLIO_F32,
                            .rows = kind < 2 ? 1 : MAX_ROWS};
            for (int i = 0; i < KEYS; i++) c.bias[i] = biases[b];
            open_case(&c);
            each_level(&c, check_sane);
            close_case(&c);
        }
}
