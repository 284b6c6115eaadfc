/* merge.c: merges attention over parts of the keys by lse, from the first part to the last. */
#include "cache/kv_rows.h"
#include "core/context.h"
#include "core/dtype.h"
#include "core/tensor.h"

#include <math.h>
#include <stdio.h>

#define CHUNK 64
#define MAX_ROWS ((int64_t)1 << 32) /* of all heads: a device's grid counts them in 32 bits */

/* A resolved part against what is written. out may be its out, lse its lse. */
static folio_status check_part_apart(const folio_merge *m, const folio_state *p, int64_t i)
{
    int64_t heads = m->num_heads, tokens = m->out.tokens;
    folioi_span out = folioi_tensor_span(&m->out, heads, m->head_size);
    folioi_span lse =
        folioi_lse_span(m->lse, m->lse_token_stride, m->lse_head_stride, heads, tokens);
    folioi_span part = folioi_tensor_span(&p->out, heads, m->head_size);
    folioi_span part_lse =
        folioi_lse_span(p->lse, p->lse_token_stride, p->lse_head_stride, heads, tokens);
    bool own_lse = m->lse == p->lse && m->lse_token_stride == p->lse_token_stride &&
                   m->lse_head_stride == p->lse_head_stride;
    REQUIRE(folioi_tensors_same(&m->out, &p->out) || !folioi_spans_share(&out, &part),
            "merge: out and parts[%lld].out share memory, but are not the same tensor",
            (long long)i);
    REQUIRE(own_lse || !folioi_spans_share(&lse, &part_lse),
            "merge: lse and parts[%lld].lse share memory, but are not the same array",
            (long long)i);
    REQUIRE(!folioi_spans_share(&out, &part_lse), "merge: out and parts[%lld].lse share memory",
            (long long)i);
    REQUIRE(!folioi_spans_share(&lse, &part), "merge: lse and parts[%lld].out share memory",
            (long long)i);
    REQUIRE(!folioi_spans_share(&out, &lse), "merge: out and lse share memory");
    return FOLIO_OK;
}

static folio_status check_merge(folio_merge *m)
{
    REQUIRE(m->num_heads >= 1 && m->head_size >= 1,
            "merge: num_heads is %d and head_size %d; both must be at least 1", m->num_heads,
            m->head_size);
    REQUIRE(m->num_parts >= 1 && m->parts != NULL, "merge: there are no parts (num_parts %lld)",
            (long long)m->num_parts);
    REQUIRE(m->out.dtype != 0, "merge: out has no dtype");
    TRY(folioi_tensor_resolve(&m->out, "merge: out", 0, m->num_heads, m->head_size, m->out.tokens));
    REQUIRE(m->out.tokens <= MAX_ROWS / m->num_heads,
            "merge: out has %lld tokens of %d heads, more than %lld rows", (long long)m->out.tokens,
            m->num_heads, (long long)MAX_ROWS);
    TRY(folioi_lse_resolve(m->lse, &m->lse_token_stride, &m->lse_head_stride, m->num_heads,
                           m->out.tokens));
    for (int64_t i = 0; i < m->num_parts; i++) {
        folio_state p = m->parts[i];
        char name[48];
        snprintf(name, sizeof name, "merge: parts[%lld].out", (long long)i);
        TRY(folioi_tensor_resolve(&p.out, name, 0, m->num_heads, m->head_size, m->out.tokens));
        REQUIRE(p.lse != NULL || m->out.tokens == 0, "merge: parts[%lld].lse is NULL",
                (long long)i);
        TRY(folioi_lse_resolve(p.lse, &p.lse_token_stride, &p.lse_head_stride, m->num_heads,
                               m->out.tokens));
        TRY(check_part_apart(m, &p, i));
    }
    return FOLIO_OK;
}

static float part_lse(const folio_merge *m, const folio_state *p, int64_t row, int64_t head)
{
    int64_t ts = p->lse_token_stride ? p->lse_token_stride : m->num_heads;
    int64_t hs = p->lse_head_stride ? p->lse_head_stride : 1;
    return p->lse[row * ts + head * hs];
}

static int64_t part_index(const folio_merge *m, const folio_state *p, int64_t row, int64_t head)
{
    int64_t hs = p->out.head_stride ? p->out.head_stride : m->head_size;
    int64_t ts = p->out.token_stride ? p->out.token_stride : m->num_heads * hs;
    return row * ts + head * hs;
}

/* weight of part i = exp(lse_i - max) / sum; an empty part, its lse infinite, weighs nothing and is not read. */
static void merge_row(const folio_merge *m, int64_t row, int64_t head)
{
    float largest = -INFINITY, sum = 0.0f;
    for (int64_t i = 0; i < m->num_parts; i++) {
        float lse = part_lse(m, &m->parts[i], row, head);
        if ((lse > largest && lse < INFINITY) || lse != lse) largest = lse;
        if (lse != lse) break;
    }
    for (int64_t i = 0; i < m->num_parts; i++) {
        float lse = part_lse(m, &m->parts[i], row, head);
        if (!isinf(lse)) sum += expf(lse - largest);
    }
    int64_t to = row * m->out.token_stride + head * m->out.head_stride;
    for (int32_t d0 = 0; d0 < m->head_size; d0 += CHUNK) {
        float acc[CHUNK] = {0}, part[CHUNK];
        int32_t n = m->head_size - d0 < CHUNK ? m->head_size - d0 : CHUNK;
        for (int64_t i = 0; i < m->num_parts; i++) {
            const folio_state *p = &m->parts[i];
            float lse = part_lse(m, p, row, head);
            if (isinf(lse)) continue;
            float weight = expf(lse - largest) / sum;
            folioi_load_row(part, p->out.data, p->out.dtype, part_index(m, p, row, head) + d0, n);
            for (int32_t d = 0; d < n; d++) acc[d] += weight * part[d];
        }
        folioi_store_row(m->out.data, m->out.dtype, to + d0, acc, n);
    }
    if (m->lse != NULL)
        m->lse[row * m->lse_token_stride + head * m->lse_head_stride] =
            sum == 0.0f ? -INFINITY : largest + logf(sum);
}

typedef struct {
    const folio_merge *merge;
    int64_t workers;
} merge_task;

static void merge_rows(void *arg, int64_t worker)
{
    const merge_task *task = arg;
    int64_t rows = task->merge->out.tokens;
    for (int64_t r = rows * worker / task->workers; r < rows * (worker + 1) / task->workers; r++)
        for (int32_t h = 0; h < task->merge->num_heads; h++) merge_row(task->merge, r, h);
}

folio_status folio_merge_states(folio_context *ctx, const folio_merge *merge, const folio_run *run)
{
    REQUIRE(ctx != NULL, "folio_merge_states: ctx is NULL");
    folio_merge m;
    folio_run r;
    STRUCT_IN(m, merge, "folio_merge");
    TRY(folioi_run_in(ctx, run, &r));
    TRY(check_merge(&m));
    if (ctx->memory != NULL) return ctx->memory->merge(ctx, &m, r.stream);
    merge_task task = {&m, m.out.tokens < ctx->num_threads ? 1 : ctx->num_threads};
    context_parallel(ctx, task.workers, merge_rows, &task);
    return FOLIO_OK;
}
