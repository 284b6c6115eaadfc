/*
 * decode.c: the loop of an engine. Prompts of different lengths arrive over time; each step
 * computes one mixed batch: prompts that were just admitted and sequences that generate. The
 * pool is too small for all of them: when it is full, the youngest sequence is preempted, and
 * computed again later. At the end the same requests are run in a pool that is large enough,
 * and must produce the same tokens.
 *
 * The "model" is a toy: q, k and v are fixed functions of token and position, and the next token
 * is the one whose embedding has the largest product with the output.
 */
#include "example.h"

#include <folio/folio_pool.h>

#include <stdbool.h>
#include <string.h>

enum { HEADS = 2, D = 16, WIDTH = HEADS * D, VOCABULARY = 50, BLOCK = 4 };
enum { REQUESTS = 6, MAX_LEN = 40, MAX_ROWS = REQUESTS * MAX_LEN };
enum { FEW_BLOCKS = 14, MAX_BLOCKS = 64 };

typedef struct {
    int32_t arrival, target_len;
    int32_t tokens[MAX_LEN], len; /* the prompt, then what was generated */
    folio_sequence *sequence;     /* NULL: not arrived, or done          */
    bool running;                 /* in the batch of every step          */
} request;

static folio_context *ctx;

static int64_t committed_len(const request *r)
{
    folio_sequence_info info = {.struct_size = sizeof info};
    must(folio_sequence_get_info(r->sequence, &info));
    return info.committed_len;
}

/* Slots for all tokens that have no K and V yet. A new or preempted sequence first takes what the
 * prefix cache has: its own blocks too, if nobody needed them. The last token is always computed,
 * because its output says what comes next. */
static folio_status reserve(request *r, uint32_t flags)
{
    folio_tokens tokens = FOLIO_WITH(folio_tokens, .num_tokens = r->len - 1, .ids = r->tokens);
    must(folio_sequence_resume(r->sequence, &tokens, NULL, NULL, NULL));
    return folio_sequence_reserve(r->sequence, r->len - committed_len(r), flags, NULL);
}

static void preempt(request *r)
{
    must(folio_sequence_preempt(r->sequence, FOLIO_PREEMPT_RECOMPUTE, NULL, NULL));
    r->running = false;
}

/* Who takes part in the next step. Running sequences grow first; then those that wait are admitted,
 * as long as the pool stays above its watermark. Returns the number of preemptions. */
static int schedule(folio_pool *pool, request *all, int32_t step)
{
    int preempted = 0;
    for (int i = 0; i < REQUESTS; i++) {
        while (all[i].running) {
            folio_status status = reserve(&all[i], 0);
            if (status == FOLIO_OK) break;
            if (status != FOLIO_ERR_FULL) must(status);
            int youngest = REQUESTS - 1;
            while (!all[youngest].running) youngest--;
            preempt(&all[youngest]);
            preempted++;
        }
    }
    for (int i = 0; i < REQUESTS && preempted == 0; i++) {
        request *r = &all[i];
        if (r->running || r->len == r->target_len || r->arrival > step) continue;
        if (r->sequence == NULL) must(folio_sequence_create(pool, NULL, &r->sequence));
        folio_status status = reserve(r, FOLIO_RESERVE_ADMIT);
        if (status == FOLIO_ERR_FULL) {
            preempt(r); /* gives back what it matched */
            break;      /* first come, first served   */
        }
        must(status);
        r->running = true;
    }
    return preempted;
}

/* One step: batch, plan, forward; then each sequence gets its next token. Returns the rows. */
static int64_t run_step(folio_kv_cache *cache, folio_plan *plan, folio_batch *batch, request *all)
{
    static float q[MAX_ROWS * WIDTH], k[MAX_ROWS * WIDTH], v[MAX_ROWS * WIDTH];
    static float out[MAX_ROWS * WIDTH];
    static int32_t tokens_in[MAX_ROWS];
    int64_t rows = 0;
    folio_batch_clear(batch);
    for (int i = 0; i < REQUESTS; i++) {
        request *r = &all[i];
        if (!r->running) continue;
        must(folio_batch_add_sequences(batch, 0, &r->sequence, 1, NULL));
        for (int64_t t = committed_len(r); t < r->len; t++) tokens_in[rows++] = r->tokens[t];
    }
    if (rows == 0) return 0;
    folio_batch_view view = FOLIO_INIT(folio_batch_view);
    must(folio_batch_get_view(batch, FOLIO_ATTENTION_DECODER, FOLIO_PHASE_AUTO, &view));
    for (int64_t row = 0; row < rows; row++) {
        int32_t position = (int32_t)view.positions[row];
        embed_token(tokens_in[row], position, 1, q + row * WIDTH, WIDTH);
        embed_token(tokens_in[row], position, 2, k + row * WIDTH, WIDTH);
        embed_token(tokens_in[row], position, 3, v + row * WIDTH, WIDTH);
    }
    must(folio_plan_update(plan, batch, NULL));
    folio_tensors tensors =
        FOLIO_WITH(folio_tensors, .q = {.data = q, .dtype = FOLIO_F32, .tokens = rows},
                   .k = {.data = k, .dtype = FOLIO_F32, .tokens = rows},
                   .v = {.data = v, .dtype = FOLIO_F32, .tokens = rows},
                   .out = {.data = out, .dtype = FOLIO_F32, .tokens = rows});
    must(folio_attention_forward(plan, 0, FOLIO_ATTENTION_DECODER, cache, 0, &tensors, NULL));
    int64_t n = 0;
    for (int i = 0; i < REQUESTS; i++) {
        request *r = &all[i];
        if (!r->running) continue;
        int64_t row = view.last_rows[n++];
        folio_tokens tokens = FOLIO_WITH(folio_tokens, .num_tokens = r->len, .ids = r->tokens);
        must(folio_sequence_commit(r->sequence, &tokens));
        r->tokens[r->len++] = find_token(out + row * WIDTH, WIDTH, VOCABULARY, 0, 4);
        if (r->len < r->target_len) continue;
        folio_sequence_destroy(r->sequence);
        r->sequence = NULL;
        r->running = false;
    }
    return rows;
}

static void print_step(folio_pool *pool, int32_t step, int64_t rows, int preempted)
{
    static const char glyphs[] = ".#%o"; /* by folio_block_state */
    folio_pool_stats s = {.struct_size = sizeof s};
    uint8_t states[MAX_BLOCKS];
    must(folio_pool_get_stats(pool, &s));
    must(folio_pool_get_block_states(pool, FOLIO_TIER_DEVICE, 0, s.num_blocks, states));
    printf("step %2d  %2lld rows  %lld seqs  used %2lld  cached %2lld  free %2lld  ", (int)step,
           (long long)rows, (long long)s.num_sequences, (long long)s.num_used,
           (long long)s.num_cached, (long long)s.num_free);
    for (int64_t b = 0; b < s.num_blocks; b++) putchar(glyphs[states[b]]);
    printf("%s\n", preempted ? "  preempted" : "");
}

/* All requests to their ends. Returns the number of preemptions. */
static int serve(request *all, int64_t num_blocks, bool print)
{
    folio_attention *attention;
    folio_kv_cache *cache;
    folio_batch *batch;
    folio_plan *plan;
    folio_pool *pool;
    must(folio_attention_create(
        ctx,
        &FOLIO_WITH(folio_attention_desc, .num_heads = HEADS, .k_head_size = D, .dtype = FOLIO_F32),
        &attention));
    must(folio_kv_cache_create(ctx,
                               &FOLIO_WITH(folio_kv_cache_desc, .num_blocks = num_blocks,
                                           .num_layers = 1, .block_size = BLOCK,
                                           .num_kv_heads = HEADS, .k_head_size = D,
                                           .dtype = FOLIO_F32),
                               &cache));
    must(folio_batch_create(ctx, &FOLIO_INIT(folio_batch_desc), &batch));
    must(folio_plan_create(ctx,
                           &FOLIO_WITH(folio_plan_desc, .attentions = &attention,
                                       .num_attentions = 1, .cache = cache, .max_seqs = REQUESTS,
                                       .max_query_tokens = MAX_ROWS, .max_seq_len = MAX_LEN),
                           &plan));
    must(folio_pool_create(ctx,
                           &FOLIO_WITH(folio_pool_desc,
                                       .layer_groups = &(folio_layer_group){.cache = cache},
                                       .watermark = 2),
                           &pool));
    int total = 0, left = REQUESTS;
    for (int32_t step = 0; left > 0; step++) {
        int preempted = schedule(pool, all, step);
        int64_t rows = run_step(cache, plan, batch, all);
        if (print) print_step(pool, step, rows, preempted);
        total += preempted;
        left = 0;
        for (int i = 0; i < REQUESTS; i++) left += all[i].len < all[i].target_len;
    }
    folio_pool_destroy(pool);
    folio_plan_destroy(plan);
    folio_batch_destroy(batch);
    folio_kv_cache_destroy(cache);
    folio_attention_destroy(attention);
    return total;
}

int main(void)
{
    static request crowded[REQUESTS], roomy[REQUESTS];
    static const int32_t arrivals[REQUESTS] = {0, 0, 1, 4, 9, 9};
    static const int32_t prompts[REQUESTS] = {9, 3, 17, 1, 12, 6};
    for (int i = 0; i < REQUESTS; i++) {
        request *r = &crowded[i];
        *r = (request){.arrival = arrivals[i], .len = prompts[i]};
        r->target_len = r->len + 14;
        for (int32_t t = 0; t < r->len; t++) r->tokens[t] = (i * 7 + t * 3) % VOCABULARY;
    }
    memcpy(roomy, crowded, sizeof roomy);

    must(folio_context_create(NULL, &ctx));
    printf(". free  # used  %% shared  o cached\n");
    int preempted = serve(crowded, FEW_BLOCKS, true);
    int none = serve(roomy, MAX_BLOCKS, false);
    folio_context_destroy(ctx);

    bool equal = true;
    for (int i = 0; i < REQUESTS; i++)
        equal = equal && memcmp(crowded[i].tokens, roomy[i].tokens, sizeof roomy[i].tokens) == 0;
    printf("%d preemptions in %d blocks, %d in %d; tokens %s\n", preempted, FEW_BLOCKS, none,
           MAX_BLOCKS, equal ? "equal" : "DIFFER");
    return equal && preempted > 0 && none == 0 ? 0 : 1;
}
