/*
 * prefix_cache.c: one system prompt, several requests. The first request computes all of its prompt;
 * the others find the blocks of the system prompt in the prefix cache, and compute only what is
 * their own. Then everything is done again in a pool that caches nothing: the answers must be the
 * same.
 *
 * The "model" is a toy: q, k and v are fixed functions of token and position, and the next token
 * is the one whose embedding has the largest product with the output.
 */
#include "example.h"

#include <folio/folio_pool.h>

#include <stdbool.h>
#include <string.h>

enum { HEADS = 2, D = 16, WIDTH = HEADS * D, VOCABULARY = 50, BLOCK = 8, BLOCKS = 48 };
enum { REQUESTS = 4, SYSTEM_LEN = 42, ANSWER_LEN = 10, MAX_LEN = 80 };

typedef struct {
    int32_t tokens[MAX_LEN], prompt_len, len;
} request;

static folio_context *ctx;
static folio_kv_cache *cache;
static folio_batch *batch;
static folio_plan *plan;

/* Tokens [from, len) of a request, whose slots are reserved: the next token. */
static int32_t forward(folio_sequence *sequence, const request *r, int32_t from)
{
    static float q[MAX_LEN * WIDTH], k[MAX_LEN * WIDTH], v[MAX_LEN * WIDTH], out[MAX_LEN * WIDTH];
    int32_t rows = r->len - from;
    for (int32_t i = 0; i < rows; i++) {
        embed_token(r->tokens[from + i], from + i, 1, q + i * WIDTH, WIDTH);
        embed_token(r->tokens[from + i], from + i, 2, k + i * WIDTH, WIDTH);
        embed_token(r->tokens[from + i], from + i, 3, v + i * WIDTH, WIDTH);
    }
    folio_batch_clear(batch);
    must(folio_batch_add_sequences(batch, 0, &sequence, 1, NULL));
    must(folio_plan_update(plan, batch, NULL));
    folio_tensors tensors =
        FOLIO_WITH(folio_tensors, .q = {.data = q, .dtype = FOLIO_F32, .tokens = rows},
                   .k = {.data = k, .dtype = FOLIO_F32, .tokens = rows},
                   .v = {.data = v, .dtype = FOLIO_F32, .tokens = rows},
                   .out = {.data = out, .dtype = FOLIO_F32, .tokens = rows});
    must(folio_attention_forward(plan, 0, FOLIO_ATTENTION_DECODER, cache, 0, &tensors, NULL));
    return find_token(out + (rows - 1) * WIDTH, WIDTH, VOCABULARY, 0, 4);
}

/* Answer a request; returns how many tokens of its prompt the prefix cache had. */
static int64_t answer(folio_pool *pool, request *r, bool cached)
{
    folio_sequence *sequence;
    must(folio_sequence_create(pool, NULL, &sequence));
    folio_tokens tokens = {.struct_size = sizeof tokens, .ids = r->tokens};
    int64_t matched = 0;
    /* All but the last token: that one's output is needed, so it is computed in any case. */
    tokens.num_tokens = r->len - 1;
    if (cached) must(folio_sequence_match(sequence, &tokens, &matched, NULL));
    for (int64_t done = matched; r->len < r->prompt_len + ANSWER_LEN; done = r->len - 1) {
        must(folio_sequence_reserve(sequence, r->len - done, 0, NULL));
        int32_t next = forward(sequence, r, (int32_t)done);
        /* With ids, full blocks enter the prefix cache; without, they stay the sequence's own. */
        tokens.num_tokens = r->len;
        must(folio_sequence_commit(sequence, cached ? &tokens : NULL));
        r->tokens[r->len++] = next;
    }
    folio_sequence_destroy(sequence); /* its blocks stay in the prefix cache */
    return matched;
}

/* All requests in a new pool; what each took from the cache. */
static void answer_all(request *requests, bool cached, int64_t *matched)
{
    folio_pool *pool;
    must(folio_pool_create(
        ctx, &FOLIO_WITH(folio_pool_desc, .layer_groups = &(folio_layer_group){.cache = cache}),
        &pool));
    for (int i = 0; i < REQUESTS; i++) {
        matched[i] = answer(pool, &requests[i], cached);
        printf("request %d: %2lld of %d prompt tokens from the cache, answer", i,
               (long long)matched[i], (int)requests[i].prompt_len);
        for (int32_t t = requests[i].prompt_len; t < requests[i].len; t++)
            printf(" %2d", (int)requests[i].tokens[t]);
        printf("\n");
    }
    folio_pool_stats stats = {.struct_size = sizeof stats};
    must(folio_pool_get_stats(pool, &stats));
    printf("hit rate %.2f, %lld blocks allocated\n", stats.hit_rate, (long long)stats.allocations);
    folio_pool_destroy(pool);
}

int main(void)
{
    folio_attention *attention;
    must(folio_context_create(NULL, &ctx));
    must(folio_attention_create(
        ctx,
        &FOLIO_WITH(folio_attention_desc, .num_heads = HEADS, .k_head_size = D, .dtype = FOLIO_F32),
        &attention));
    must(folio_kv_cache_create(
        ctx,
        &FOLIO_WITH(folio_kv_cache_desc, .num_blocks = BLOCKS, .num_layers = 1, .block_size = BLOCK,
                    .num_kv_heads = HEADS, .k_head_size = D, .dtype = FOLIO_F32),
        &cache));
    must(folio_batch_create(ctx, &FOLIO_INIT(folio_batch_desc), &batch));
    must(folio_plan_create(ctx,
                           &FOLIO_WITH(folio_plan_desc, .attentions = &attention,
                                       .num_attentions = 1, .cache = cache, .max_seqs = 1,
                                       .max_query_tokens = MAX_LEN, .max_seq_len = MAX_LEN),
                           &plan));

    static request first[REQUESTS], again[REQUESTS];
    for (int i = 0; i < REQUESTS; i++) {
        request *r = &first[i];
        r->prompt_len = r->len = SYSTEM_LEN + 5 + 3 * i;
        for (int32_t t = 0; t < r->len; t++)
            r->tokens[t] = (t < SYSTEM_LEN ? t * 5 : 11 * i + t) % VOCABULARY;
    }
    memcpy(again, first, sizeof again);
    int64_t with[REQUESTS], without[REQUESTS];
    printf("with a prefix cache:\n");
    answer_all(first, true, with);
    printf("without:\n");
    answer_all(again, false, without);

    folio_plan_destroy(plan);
    folio_batch_destroy(batch);
    folio_kv_cache_destroy(cache);
    folio_attention_destroy(attention);
    folio_context_destroy(ctx);

    /* Whole blocks are shared: 5 of 8 tokens, and the system prompt's last two are computed. */
    bool shared = with[0] == 0;
    for (int i = 1; i < REQUESTS; i++) shared = shared && with[i] == SYSTEM_LEN / BLOCK * BLOCK;
    bool equal = memcmp(first, again, sizeof again) == 0;
    printf("answers %s\n", equal ? "equal" : "DIFFER");
    return equal && shared ? 0 : 1;
}
