/* host_merge.c: merges attention over parts of the keys by lse, from the first part to the last. */
#include "backends/host_merge.h"

#include "backends/state.h"
#include "cache/kv_rows.h"
#include "core/context.h"

#include <math.h>

#define CHUNK 64 /* numbers of a row merged at a time, on the stack */

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

/* A part's state: its lse as the maximum, a sum of 1. An empty part, its lse infinite, is not read. */
static void merge_row(const folio_merge *m, int64_t row, int64_t head)
{
    float max = -INFINITY, sum = 0.0f, out[CHUNK];
    folioi_state_rows total = {&max, &sum, out};
    for (int32_t d0 = 0; d0 < m->head_size; d0 += CHUNK) {
        int32_t n = m->head_size - d0 < CHUNK ? m->head_size - d0 : CHUNK;
        folioi_state_clear(&total, 1);
        for (int64_t i = 0; i < m->num_parts; i++) {
            const folio_state *p = &m->parts[i];
            float lse = part_lse(m, p, row, head), one = lse == lse ? 1.0f : lse, from[CHUNK];
            if (isinf(lse)) continue;
            folioi_load_row(from, p->out.data, p->out.dtype, part_index(m, p, row, head) + d0, n);
            folioi_state_fold(&total, &(folioi_state_rows){&lse, &one, from}, 1, n);
        }
        for (int32_t d = 0; d < n; d++) out[d] = sum == 0.0f ? 0.0f : out[d] / sum;
        int64_t to = row * m->out.token_stride + head * m->out.head_stride + d0;
        folioi_store_row(m->out.data, m->out.dtype, to, out, n);
    }
    if (m->lse != NULL)
        m->lse[row * m->lse_token_stride + head * m->lse_head_stride] =
            sum == 0.0f ? -INFINITY : max + logf(sum);
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

folio_status folioi_host_merge(const folio_context *ctx, const folio_merge *merge, void *stream)
{
    (void)stream;
    merge_task task = {merge, merge->out.tokens < ctx->num_threads ? 1 : ctx->num_threads};
    folioi_parallel(ctx, task.workers, merge_rows, &task);
    return FOLIO_OK;
}
