/*
 * client_0_1.c: a client of version 0.1. It is compiled against the frozen header folio-0.1.h alone
 * and linked with the shared library of today, so it fails when growth breaks an old binary. On every
 * backend it lives a whole life (context to forward, judged by its own softmax loop), and it passes
 * structs shorter and longer than the library's.
 */
#include <folio/folio.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    HEADS = 4,
    KV_HEADS = 2,
    DIM = 16,
    BLOCK = 4,
    NUM_BLOCKS = 16,
    SEQS = 2,
    MAX_LEN = 24,
    MAX_ROWS = 16,
    ROW = HEADS * DIM,
    KV_ROW = KV_HEADS * DIM
};

static int failures;

static void fail(int line, const char *what)
{
    fprintf(stderr, "client_0_1.c:%d: %s (last error: %s)\n", line, what, folio_last_error());
    failures++;
}

#define CHECK(cond)                                                                                \
    do {                                                                                           \
        if (!(cond)) fail(__LINE__, #cond);                                                        \
    } while (0)
#define OK(call) CHECK((call) == FOLIO_OK)

/* The client's own copy of every token's K and V: [seq][token][kv_head * dim]. */
static float k_all[SEQS][MAX_LEN][KV_ROW], v_all[SEQS][MAX_LEN][KV_ROW];

static uint32_t random_state = 12345;

static float random_unit(void)
{
    random_state = random_state * 1664525u + 1013904223u;
    return (float)(random_state >> 8) / 8388608.0f - 1.0f;
}

/* One row of causal attention over the keys [0, num_keys) of a sequence, in double. q, out: [DIM] */
static void plain_row(int seq, int head, int num_keys, const float *q, double *out, double *lse)
{
    int column = head / (HEADS / KV_HEADS) * DIM;
    double score[MAX_LEN], largest = -INFINITY, sum = 0;
    for (int j = 0; j < num_keys; j++) {
        score[j] = 0;
        for (int d = 0; d < DIM; d++) score[j] += (double)q[d] * (double)k_all[seq][j][column + d];
        score[j] /= sqrt((double)DIM);
        if (score[j] > largest) largest = score[j];
    }
    for (int d = 0; d < DIM; d++) out[d] = 0;
    for (int j = 0; j < num_keys; j++) {
        double p = exp(score[j] - largest);
        sum += p;
        for (int d = 0; d < DIM; d++) out[d] += p * (double)v_all[seq][j][column + d];
    }
    for (int d = 0; d < DIM; d++) out[d] /= sum;
    *lse = largest + log(sum);
}

/* One step: sequence s brings query_len[s] tokens after context_len[s] cached ones. */
static void step(folio_plan *plan, folio_batch *batch, folio_kv_cache *cache,
                 const int query_len[SEQS], const int context_len[SEQS])
{
    static const int32_t tables[SEQS][6] = {{9, 2, 14, 0, 7, 5}, {3, 11, 1, 8, 15, 4}};
    static float q[MAX_ROWS][ROW], k[MAX_ROWS][KV_ROW], v[MAX_ROWS][KV_ROW], out[MAX_ROWS][ROW];
    static float lse[MAX_ROWS][HEADS];
    int rows = 0;
    folio_batch_clear(batch);
    for (int s = 0; s < SEQS; s++) {
        folio_batch_seq seq;
        memset(&seq, 0, sizeof seq);
        seq.struct_size = sizeof seq;
        seq.query_len = query_len[s];
        seq.seq_len = context_len[s] + query_len[s];
        seq.block_table = tables[s];
        seq.num_blocks = 6;
        OK(folio_batch_add(batch, &seq));
        for (int i = 0; i < query_len[s]; i++, rows++) {
            for (int c = 0; c < ROW; c++) q[rows][c] = 2 * random_unit();
            for (int c = 0; c < KV_ROW; c++) {
                k[rows][c] = k_all[s][context_len[s] + i][c] = random_unit();
                v[rows][c] = v_all[s][context_len[s] + i][c] = random_unit();
            }
        }
    }
    folio_tensors tensors;
    memset(&tensors, 0, sizeof tensors);
    tensors.struct_size = sizeof tensors;
    tensors.q = (folio_tensor){.data = q, .tokens = rows};
    tensors.k = (folio_tensor){.data = k, .tokens = rows};
    tensors.v = (folio_tensor){.data = v, .tokens = rows};
    tensors.out = (folio_tensor){.data = out, .tokens = rows};
    tensors.lse = &lse[0][0];
    memset(out, 0xff, sizeof out);
    OK(folio_plan_update(plan, batch));
    OK(folio_attention_forward(plan, 0, FOLIO_DECODER, cache, 0, &tensors, NULL));

    int wrong = 0; /* counted by !(error <= limit), so that a NaN is wrong too */
    for (int s = 0, row = 0; s < SEQS; s++)
        for (int i = 0; i < query_len[s]; i++, row++)
            for (int h = 0; h < HEADS; h++) {
                double expected[DIM], expected_lse;
                plain_row(s, h, context_len[s] + i + 1, &q[row][h * DIM], expected, &expected_lse);
                if (!(fabs((double)lse[row][h] - expected_lse) <= 1e-5)) wrong++;
                for (int d = 0; d < DIM; d++)
                    if (!(fabs((double)out[row][h * DIM + d] - expected[d]) <= 1e-5)) wrong++;
            }
    CHECK(wrong == 0);
}

static void whole_life(const char *backend)
{
    folio_context_desc context_desc = {.struct_size = sizeof context_desc, .backend = backend};
    folio_context *ctx = NULL;
    OK(folio_context_create(&context_desc, &ctx));
    folio_attention_desc attention_desc = {.struct_size = sizeof attention_desc,
                                           .num_heads = HEADS,
                                           .num_kv_heads = KV_HEADS,
                                           .k_head_size = DIM,
                                           .dtype = FOLIO_F32};
    folio_attention *attention = NULL;
    OK(folio_attention_create(ctx, &attention_desc, &attention));
    folio_kv_cache_desc cache_desc = {.struct_size = sizeof cache_desc,
                                      .num_blocks = NUM_BLOCKS,
                                      .num_layers = 1,
                                      .block_size = BLOCK,
                                      .num_kv_heads = KV_HEADS,
                                      .k_head_size = DIM,
                                      .dtype = FOLIO_F32};
    folio_kv_cache *cache = NULL;
    OK(folio_kv_cache_create(ctx, &cache_desc, &cache));
    folio_batch_desc batch_desc = {.struct_size = sizeof batch_desc,
                                   .block_size = BLOCK,
                                   .max_seqs = SEQS,
                                   .max_query_tokens = MAX_ROWS,
                                   .max_blocks = SEQS * 6};
    folio_batch *batch = NULL;
    OK(folio_batch_create(ctx, &batch_desc, &batch));
    const folio_attention *attentions[1] = {attention};
    folio_plan_desc plan_desc = {.struct_size = sizeof plan_desc,
                                 .attentions = attentions,
                                 .num_attentions = 1,
                                 .block_size = BLOCK,
                                 .num_blocks = NUM_BLOCKS,
                                 .max_seqs = SEQS,
                                 .max_query_tokens = MAX_ROWS,
                                 .max_seq_len = MAX_LEN};
    folio_plan *plan = NULL;
    OK(folio_plan_create(ctx, &plan_desc, &plan));
    if (failures == 0) {
        step(plan, batch, cache, (const int[]){7, 3}, (const int[]){0, 0});  /* two prompts       */
        step(plan, batch, cache, (const int[]){1, 9}, (const int[]){7, 3});  /* decode, and chunk */
        step(plan, batch, cache, (const int[]){1, 1}, (const int[]){8, 12}); /* two decodes       */
    }
    folio_plan_destroy(plan);
    folio_batch_destroy(batch);
    folio_kv_cache_destroy(cache);
    folio_attention_destroy(attention);
    folio_context_destroy(ctx);
}

/* A shorter struct comes from an older client: what lies past its end is not the library's to read. */
static void shorter_structs(folio_context *ctx)
{
    folio_attention_desc desc;
    memset(&desc, 0xff, sizeof desc); /* past the prefix: NaN, a window, a block-sparse pointer */
    memset(&desc, 0, offsetof(folio_attention_desc, scale));
    desc.struct_size = offsetof(folio_attention_desc, scale);
    desc.num_heads = HEADS;
    desc.k_head_size = DIM;
    desc.dtype = FOLIO_F32;
    folio_attention *attention = NULL;
    OK(folio_attention_create(ctx, &desc, &attention));
    folio_attention_destroy(attention);

    union {
        folio_context_info info;
        unsigned char bytes[sizeof(folio_context_info)];
    } out;
    memset(&out, 0xa5, sizeof out);
    size_t prefix = offsetof(folio_context_info, device);
    out.info.struct_size = prefix;
    OK(folio_context_describe(ctx, &out.info));
    CHECK(out.info.struct_size == prefix && out.info.backend[0] != 0 && out.info.level[0] != 0);
    for (size_t i = prefix; i < sizeof out.bytes; i++) CHECK(out.bytes[i] == 0xa5);
}

/* A longer struct comes from a newer client: fine as long as it asks for nothing unknown here. */
static void longer_structs(folio_context *ctx)
{
    struct {
        folio_attention_desc desc;
        unsigned char tail[64];
    } longer;
    memset(&longer, 0, sizeof longer);
    longer.desc.struct_size = sizeof longer;
    longer.desc.num_heads = HEADS;
    longer.desc.k_head_size = DIM;
    longer.desc.dtype = FOLIO_F32;
    folio_attention *attention = NULL;
    OK(folio_attention_create(ctx, &longer.desc, &attention));
    folio_attention_destroy(attention);

    attention = NULL;
    longer.tail[sizeof longer.tail - 1] = 1;
    CHECK(folio_attention_create(ctx, &longer.desc, &attention) == FOLIO_ERR_ARGUMENT);
    CHECK(attention == NULL && strstr(folio_last_error(), "struct_size") != NULL);

    longer.tail[sizeof longer.tail - 1] = 0;
    longer.desc.struct_size = 0;
    CHECK(folio_attention_create(ctx, &longer.desc, &attention) == FOLIO_ERR_ARGUMENT);
    CHECK(attention == NULL && strstr(folio_last_error(), "struct_size") != NULL);
}

int main(void)
{
    int lives = 0;
    for (int32_t i = 0; i < folio_backend_count(); i++) {
        folio_backend_info info = {.struct_size = sizeof info};
        OK(folio_backend_describe(folio_backend_name(i), &info));
        if (!info.available) continue;
        whole_life(info.name);
        printf("%s: compiled for %s, runs on %s\n", info.name, FOLIO_VERSION_STRING,
               folio_version());
        lives++;
    }
    CHECK(lives >= 2); /* cpu and reference are always there */
    folio_context *ctx = NULL;
    OK(folio_context_create(NULL, &ctx));
    if (ctx != NULL) {
        shorter_structs(ctx);
        longer_structs(ctx);
    }
    folio_context_destroy(ctx);
    if (failures) fprintf(stderr, "%d checks failed\n", failures);
    return failures != 0;
}
