/*
 * beam.c: beam search by forks. Four hypotheses share the blocks of all tokens they have in
 * common; a fork copies nothing, and the first token written to a shared block copies that one
 * block. A step: reserve, run the copies, forward, score, keep the four best continuations,
 * destroy the rest. At the end the winner is computed again from scratch and must have the same
 * bits.
 *
 * The "model" is a toy: q, k and v are fixed functions of token and position, and a token's score
 * is the product of its embedding with the output.
 */
#include "example.h"

#include <folio/folio_pool.h>

#include <math.h>
#include <stdbool.h>
#include <string.h>

enum { HEADS = 2, D = 16, WIDTH = HEADS * D, VOCABULARY = 40, BLOCK = 4, BLOCKS = 64 };
enum { BEAMS = 4, PROMPT_LEN = 22, STEPS = 16, MAX_LEN = PROMPT_LEN + STEPS };

typedef struct {
    folio_sequence *sequence;
    int32_t tokens[MAX_LEN], len; /* the last token has no K and V yet */
    float score;                  /* sum of log probabilities          */
    float out[WIDTH];             /* of the last token computed        */
} beam;

typedef struct {
    int parent;
    int32_t token;
    float score;
} candidate;

static folio_context *ctx;
static folio_kv_cache *cache;
static folio_batch *batch;
static folio_plan *plan;
static folio_pool *pool;

/* Log probability of each token. */
static void score_tokens(const float *out, float *logp)
{
    float e[WIDTH], sum = 0;
    for (int32_t t = 0; t < VOCABULARY; t++) {
        embed_token(t, 0, 4, e, WIDTH);
        logp[t] = 0;
        for (int i = 0; i < WIDTH; i++) logp[t] += 2.0f * out[i] * e[i];
        sum += expf(logp[t]);
    }
    for (int32_t t = 0; t < VOCABULARY; t++) logp[t] -= logf(sum);
}

/* All tokens of the beams that have no K and V yet, in one batch. */
static void forward(beam *beams, int n)
{
    static float q[BEAMS * MAX_LEN * WIDTH], k[BEAMS * MAX_LEN * WIDTH];
    static float v[BEAMS * MAX_LEN * WIDTH], out[BEAMS * MAX_LEN * WIDTH];
    int64_t rows = 0;
    folio_sequence *sequences[BEAMS];
    for (int i = 0; i < n; i++) {
        folio_sequence_info info = {.struct_size = sizeof info};
        must(folio_sequence_get_info(beams[i].sequence, &info));
        must(folio_sequence_reserve(beams[i].sequence, beams[i].len - info.len, 0, NULL));
        for (int32_t t = (int32_t)info.len; t < beams[i].len; t++, rows++) {
            embed_token(beams[i].tokens[t], t, 1, q + rows * WIDTH, WIDTH);
            embed_token(beams[i].tokens[t], t, 2, k + rows * WIDTH, WIDTH);
            embed_token(beams[i].tokens[t], t, 3, v + rows * WIDTH, WIDTH);
        }
        sequences[i] = beams[i].sequence;
    }
    folio_batch_clear(batch); /* adding copies shared blocks that are about to be written */
    must(folio_batch_add_sequences(batch, 0, sequences, n, NULL));
    must(folio_plan_update(plan, batch, NULL));
    folio_tensors tensors =
        FOLIO_WITH(folio_tensors, .q = {.data = q, .dtype = FOLIO_F32, .tokens = rows},
                   .k = {.data = k, .dtype = FOLIO_F32, .tokens = rows},
                   .v = {.data = v, .dtype = FOLIO_F32, .tokens = rows},
                   .out = {.data = out, .dtype = FOLIO_F32, .tokens = rows});
    must(folio_attention_forward(plan, 0, FOLIO_ATTENTION_DECODER, cache, 0, &tensors, NULL));
    folio_batch_view view = FOLIO_INIT(folio_batch_view);
    must(folio_batch_get_view(batch, FOLIO_ATTENTION_DECODER, FOLIO_PHASE_AUTO, &view));
    for (int i = 0; i < n; i++) {
        must(folio_sequence_commit(beams[i].sequence, NULL));
        memcpy(beams[i].out, out + view.last_rows[i] * WIDTH, sizeof beams[i].out);
    }
}

static int better(const void *a, const void *b)
{
    const candidate *x = a, *y = b;
    if (x->score != y->score) return x->score > y->score ? -1 : 1;
    return x->parent != y->parent ? x->parent - y->parent : x->token - y->token;
}

/* The best continuations of n beams become the new ones, each a fork of its parent. */
static void keep_best(beam *beams, int n)
{
    static candidate all[BEAMS * VOCABULARY];
    static beam next[BEAMS];
    float logp[VOCABULARY];
    for (int i = 0; i < n; i++) {
        score_tokens(beams[i].out, logp);
        for (int32_t t = 0; t < VOCABULARY; t++)
            all[i * VOCABULARY + t] = (candidate){i, t, beams[i].score + logp[t]};
    }
    qsort(all, (size_t)(n * VOCABULARY), sizeof all[0], better);
    for (int i = 0; i < BEAMS; i++) {
        next[i] = beams[all[i].parent];
        must(folio_sequence_fork(beams[all[i].parent].sequence, &next[i].sequence));
        next[i].tokens[next[i].len++] = all[i].token;
        next[i].score = all[i].score;
    }
    for (int i = 0; i < n; i++) folio_sequence_destroy(beams[i].sequence);
    memcpy(beams, next, sizeof next);
}

static void create_all(folio_attention **attention)
{
    must(folio_context_create(NULL, &ctx));
    must(folio_attention_create(
        ctx,
        &FOLIO_WITH(folio_attention_desc, .num_heads = HEADS, .k_head_size = D, .dtype = FOLIO_F32),
        attention));
    must(folio_kv_cache_create(
        ctx,
        &FOLIO_WITH(folio_kv_cache_desc, .num_blocks = BLOCKS, .num_layers = 1, .block_size = BLOCK,
                    .num_kv_heads = HEADS, .k_head_size = D, .dtype = FOLIO_F32),
        &cache));
    must(folio_batch_create(ctx, &FOLIO_INIT(folio_batch_desc), &batch));
    must(folio_plan_create(ctx,
                           &FOLIO_WITH(folio_plan_desc, .attentions = attention,
                                       .num_attentions = 1, .cache = cache, .max_seqs = BEAMS,
                                       .max_query_tokens = BEAMS * MAX_LEN, .max_seq_len = MAX_LEN),
                           &plan));
    must(folio_pool_create(
        ctx, &FOLIO_WITH(folio_pool_desc, .layer_groups = &(folio_layer_group){.cache = cache}),
        &pool));
}

int main(void)
{
    folio_attention *attention;
    create_all(&attention);
    static beam beams[BEAMS], again;
    beams[0].len = PROMPT_LEN;
    for (int32_t t = 0; t < PROMPT_LEN; t++) beams[0].tokens[t] = t * 7 % VOCABULARY;
    must(folio_sequence_create(pool, NULL, &beams[0].sequence));
    forward(beams, 1); /* the prompt, once for all */
    keep_best(beams, 1);

    int64_t most_used = 0, most_copies = 0;
    while (beams[0].len < MAX_LEN) {
        forward(beams, BEAMS);
        folio_pool_stats s = {.struct_size = sizeof s};
        must(folio_pool_get_stats(pool, &s));
        int64_t copies = (int64_t)BEAMS * ((beams[0].len + BLOCK - 1) / BLOCK);
        printf("%2d tokens: %2lld blocks used, %2lld of them shared; copies would need %2lld\n",
               (int)beams[0].len, (long long)s.num_used, (long long)s.num_shared,
               (long long)copies);
        if (s.num_used > most_used) most_used = s.num_used;
        if (copies > most_copies) most_copies = copies;
        keep_best(beams, BEAMS);
    }
    forward(beams, BEAMS);
    printf("best, %.3f:", (double)beams[0].score);
    for (int32_t t = PROMPT_LEN; t < beams[0].len; t++) printf(" %d", (int)beams[0].tokens[t]);

    /* The winner from nothing, in one step. */
    again = beams[0];
    must(folio_sequence_create(pool, NULL, &again.sequence));
    forward(&again, 1);
    bool equal = memcmp(again.out, beams[0].out, sizeof again.out) == 0;
    printf("\n%lld blocks at most where copies need %lld; computed again: %s\n",
           (long long)most_used, (long long)most_copies, equal ? "equal" : "DIFFERS");

    folio_sequence_destroy(again.sequence);
    for (int i = 0; i < BEAMS; i++) folio_sequence_destroy(beams[i].sequence);
    folio_pool_destroy(pool);
    folio_plan_destroy(plan);
    folio_batch_destroy(batch);
    folio_kv_cache_destroy(cache);
    folio_attention_destroy(attention);
    folio_context_destroy(ctx);
    return equal && most_used < most_copies ? 0 : 1;
}
