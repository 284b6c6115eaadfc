/*
 * engine.c: an inference engine in one file. A Llama-shaped decoder (RMSNorm, rotary embedding,
 * grouped heads, SwiGLU) with random weights serves 16 requests with continuous batching and a
 * prefix cache. It runs twice: once without preemption, once with sequences preempted all the time, by swap to
 * host memory and by recompute. Every logit must have the same bits in both.
 *
 *     engine [file]     writes all tokens and logits there, for a test against PyTorch
 */
#include <folio/folio_pool.h>

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { VOCAB = 96, DIM = 64, LAYERS = 2, HEADS = 8, KV_HEADS = 2, D = 16, FFN = 96 };
enum { REQUESTS = 16, MAX_LEN = 48, MAX_ROWS = 160, NEW_TOKENS = 12, BLOCK = 4, BLOCKS = 128 };

typedef struct {
    float norm[DIM], q[DIM * HEADS * D], k[DIM * KV_HEADS * D], v[DIM * KV_HEADS * D];
    float o[HEADS * D * DIM], ffn_norm[DIM], gate[DIM * FFN], up[DIM * FFN], down[FFN * DIM];
} layer_weights;

static struct {
    float embedding[VOCAB * DIM], norm[DIM], head[DIM * VOCAB];
    layer_weights layer[LAYERS];
} model;

typedef struct {
    int32_t arrival, prompt_len, len, tokens[MAX_LEN]; /* the prompt, then what was generated */
    float logits[NEW_TOKENS][VOCAB];
    int64_t computed;         /* tokens whose K and V are in the cache */
    folio_sequence *sequence; /* NULL: not arrived, or done            */
    bool running;
} request;

static folio_context *ctx;
static folio_attention *attention;
static folio_kv_cache *cache;
static folio_pool *pool;
static folio_batch *batch;
static folio_plan *plan;
static folio_rotary *rotary;

/* False: there is no room now. Any other failure ends the program. */
static bool done(folio_status status)
{
    if (status != FOLIO_OK && status != FOLIO_ERR_FULL) puts(folio_last_error()), exit(1);
    return status == FOLIO_OK;
}

/* ------------------------------------------------------------------------------------ the model */

/* Every weight is a random number in [-0.75, 0.75) that depends only on its place. */
static void make_model(void)
{
    float *weights = (float *)&model;
    for (uint32_t i = 0; i < sizeof model / sizeof(float); i++) {
        uint32_t x = (i + 1) * 0x9e3779b9u;
        x = (x ^ (x >> 16)) * 0x85ebca6bu;
        x = (x ^ (x >> 13)) * 0xc2b2ae35u;
        weights[i] = 0.75f * ((float)((x ^ (x >> 16)) >> 8) / 8388608.0f - 1.0f);
    }
}

/* y[rows][out] = x[rows][in] times w[in][out]; row by row, so that a row's bits are its own. */
static void multiply(const float *x, const float *w, float *y, int64_t rows, int in, int out)
{
    memset(y, 0, (size_t)rows * (size_t)out * sizeof *y);
    for (int64_t r = 0; r < rows; r++)
        for (int i = 0; i < in; i++)
            for (int j = 0; j < out; j++) y[r * out + j] += x[r * in + i] * w[i * out + j];
}

static void rms_norm(const float *x, const float *weight, float *y, int64_t rows)
{
    for (int64_t r = 0; r < rows; r++, x += DIM, y += DIM) {
        float sum = 0;
        for (int i = 0; i < DIM; i++) sum += x[i] * x[i];
        float scale = 1.0f / sqrtf(sum / DIM + 1e-5f);
        for (int i = 0; i < DIM; i++) y[i] = x[i] * scale * weight[i];
    }
}

/* One transformer layer over all rows of the step: x += attention, x += SwiGLU. */
static void run_layer(int32_t l, float *x, int64_t rows)
{
    static float n[MAX_ROWS * DIM], q[MAX_ROWS * HEADS * D], k[MAX_ROWS * KV_HEADS * D];
    static float v[MAX_ROWS * KV_HEADS * D], y[MAX_ROWS * DIM];
    static float gate[MAX_ROWS * FFN], up[MAX_ROWS * FFN];
    const layer_weights *w = &model.layer[l];
    rms_norm(x, w->norm, n, rows);
    multiply(n, w->q, q, rows, DIM, HEADS * D);
    multiply(n, w->k, k, rows, DIM, KV_HEADS * D);
    multiply(n, w->v, v, rows, DIM, KV_HEADS * D);
    folio_tensors t = FOLIO_WITH(folio_tensors, .q = {q, FOLIO_F32, rows, 0, 0},
                                 .rotary = rotary); /* rotates q and k by the batch's positions */
    t.k = t.v = t.out = t.q;                        /* out: in the place of q */
    t.k.data = k, t.v.data = v;
    done(folio_attention_forward(plan, 0, FOLIO_ATTENTION_DECODER, cache, l, &t, NULL));
    multiply(q, w->o, y, rows, HEADS * D, DIM);
    for (int64_t i = 0; i < rows * DIM; i++) x[i] += y[i];
    rms_norm(x, w->ffn_norm, n, rows);
    multiply(n, w->gate, gate, rows, DIM, FFN);
    multiply(n, w->up, up, rows, DIM, FFN);
    for (int64_t i = 0; i < rows * FFN; i++) gate[i] *= up[i] / (1.0f + expf(-gate[i]));
    multiply(gate, w->down, y, rows, FFN, DIM);
    for (int64_t i = 0; i < rows * DIM; i++) x[i] += y[i];
}

/* ----------------------------------------------------------------------------------- the engine */

/* A new request takes what the prefix cache has of its prompt, a preempted one what it had. The
 * last token is always computed: its logits say what comes next. */
static bool admit(request *r)
{
    if (r->sequence == NULL) done(folio_sequence_create(pool, NULL, &r->sequence));
    folio_tokens known = FOLIO_WITH(folio_tokens, .num_tokens = r->len - 1, .ids = r->tokens);
    return done(folio_sequence_resume(r->sequence, &known, &r->computed, NULL, NULL)) &&
           done(folio_sequence_reserve(r->sequence, r->len - r->computed, 0, NULL));
}

/* The most likely token, from the last row of a sequence. */
static int32_t next_token(const float *x, float *logits)
{
    float n[DIM];
    int32_t best = 0;
    rms_norm(x, model.norm, n, 1);
    multiply(n, model.head, logits, 1, DIM, VOCAB);
    for (int32_t t = 1; t < VOCAB; t++)
        if (logits[t] > logits[best]) best = t;
    return best;
}

/* All rows of the step through the model; then every running request gets its next token. */
static void run_step(request *all)
{
    static float x[MAX_ROWS * DIM];
    int64_t rows = 0, seq = 0;
    folio_batch_clear(batch);
    for (request *r = all; r < all + REQUESTS; r++) {
        if (!r->running) continue;
        for (int64_t t = r->computed; t < r->len; t++)
            memcpy(x + rows++ * DIM, model.embedding + r->tokens[t] * DIM, DIM * sizeof *x);
        done(folio_batch_add_sequences(batch, 0, &r->sequence, 1, NULL));
    }
    folio_batch_view view = FOLIO_INIT(folio_batch_view);
    done(folio_batch_get_view(batch, FOLIO_ATTENTION_DECODER, FOLIO_PHASE_AUTO, &view));
    done(folio_plan_update(plan, batch, NULL));
    for (int32_t l = 0; l < LAYERS; l++) run_layer(l, x, rows);
    for (request *r = all; r < all + REQUESTS; r++) {
        if (!r->running) continue;
        folio_tokens ids = FOLIO_WITH(folio_tokens, .num_tokens = r->len, .ids = r->tokens);
        done(folio_sequence_commit(r->sequence, &ids));
        const float *last = x + view.last_rows[seq++] * DIM;
        r->tokens[r->len] = next_token(last, r->logits[r->len - r->prompt_len]);
        if (++r->len < r->prompt_len + NEW_TOKENS) continue;
        folio_sequence_destroy(r->sequence);
        r->sequence = NULL;
    }
}

static void open_engine(void)
{
    folio_attention_desc a = FOLIO_WITH(folio_attention_desc, .dtype = FOLIO_F32, .k_head_size = D,
                                        .num_heads = HEADS, .num_kv_heads = KV_HEADS);
    folio_kv_cache_desc c = FOLIO_WITH(folio_kv_cache_desc, .dtype = FOLIO_F32, .k_head_size = D,
                                       .num_kv_heads = KV_HEADS, .num_layers = LAYERS,
                                       .block_size = BLOCK, .num_blocks = BLOCKS);
    done(folio_context_create(NULL, &ctx)), done(folio_attention_create(ctx, &a, &attention));
    done(folio_kv_cache_create(ctx, &c, &cache));
    folio_layer_group group = {.cache = cache};
    folio_pool_desc p = FOLIO_WITH(folio_pool_desc, .layer_groups = &group, .host_blocks = BLOCKS);
    done(folio_pool_create(ctx, &p, &pool));
    done(folio_batch_create(ctx, &FOLIO_INIT(folio_batch_desc), &batch));
    folio_plan_desc d =
        FOLIO_WITH(folio_plan_desc, .attentions = &attention, .num_attentions = 1, .cache = cache,
                   .max_query_tokens = MAX_ROWS, .max_seqs = REQUESTS, .max_seq_len = MAX_LEN);
    done(folio_plan_create(ctx, &d, &plan));
    folio_rotary_desc r = FOLIO_WITH(folio_rotary_desc, .num_dims = D, .num_positions = MAX_LEN);
    done(folio_rotary_create(ctx, &r, &rotary));
}

static void close_engine(void)
{
    folio_plan_destroy(plan), folio_batch_destroy(batch), folio_pool_destroy(pool);
    folio_kv_cache_destroy(cache), folio_attention_destroy(attention);
    folio_rotary_destroy(rotary), folio_context_destroy(ctx);
}

/* All requests to their ends. disturbed: in every step a running one loses its blocks. */
static void serve(request *all, bool disturbed)
{
    int preempted[2] = {0, 0};
    open_engine();
    for (int step = 0, left = REQUESTS; left > 0; step++) {
        request *victim = disturbed ? &all[step * 7 % REQUESTS] : NULL;
        if (victim != NULL && victim->sequence != NULL) {
            folio_preemption how = step % 2 ? FOLIO_PREEMPT_SWAP : FOLIO_PREEMPT_RECOMPUTE;
            preempted[how] += done(folio_sequence_preempt(victim->sequence, how, NULL, NULL));
        }
        left = 0;
        for (request *r = all; r < all + REQUESTS; r++) {
            bool unfinished = r->len < r->prompt_len + NEW_TOKENS;
            r->running = unfinished && r->arrival <= step && r != victim && admit(r);
            left += unfinished;
        }
        run_step(all);
    }
    close_engine();
    printf("%d requests served; %d times one was recomputed, %d times swapped out and in\n",
           REQUESTS, preempted[0], preempted[1]);
}

/* Requests with an even number share the first nine tokens. */
static void make_requests(request *all)
{
    for (int i = 0; i < REQUESTS; i++) {
        all[i] = (request){.arrival = i / 3, .prompt_len = 10 + 5 * (i % 6)};
        for (int32_t *n = &all[i].len; *n < all[i].prompt_len; ++*n)
            all[i].tokens[*n] = (*n * 5 + (i % 2 == 0 && *n < 9 ? 0 : 7 * i + 1)) % VOCAB;
    }
}

int main(int argc, char **argv)
{
    static request calm[REQUESTS], disturbed[REQUESTS];
    make_model(), make_requests(calm), make_requests(disturbed);
    serve(calm, false), serve(disturbed, true);
    bool equal = true;
    for (int i = 0; i < REQUESTS; i++)
        equal = equal && memcmp(calm[i].logits, disturbed[i].logits, sizeof calm[i].logits) == 0;
    printf("logits with and without preemption: %s\n", equal ? "the same bits" : "DIFFERENT");
    if (argc < 2) return equal ? 0 : 1;
    FILE *file = fopen(argv[1], "wb");
    for (int i = 0; i < REQUESTS && file != NULL; i++)
        fwrite(&calm[i], offsetof(request, computed), 1, file);
    return file == NULL || fclose(file) != 0 || !equal;
}
