/* span.c: whether two arrays of rows share a byte: compares outer strides first, then the rows. */
#include "core/span.h"

#include <stddef.h>

folioi_span folioi_span_of(const void *p, int64_t bytes)
{
    if (p == NULL) bytes = 0;
    return (folioi_span){(uintptr_t)p, bytes, bytes, {{1, 0}, {1, 0}}};
}

folioi_span folioi_span_rows(const void *p, int64_t elem, int64_t rows, int64_t row_stride,
                             int64_t heads, int64_t head_stride, int64_t dense)
{
    folioi_span s = folioi_span_of(p, rows > 0 ? dense * elem : 0);
    if (s.extent == 0) return s;
    int of_rows = rows == 1 || (heads > 1 && head_stride > row_stride); /* 1: rows are inner */
    s.step[of_rows].count = rows;
    s.step[of_rows].stride = row_stride * elem;
    s.step[1 - of_rows].count = heads;
    s.step[1 - of_rows].stride = head_stride * elem;
    for (int i = 1; i >= 0; i--) {
        bool has_gaps = s.extent > s.dense || s.step[i].stride > s.extent;
        s.extent += (s.step[i].count - 1) * s.step[i].stride;
        if (has_gaps) continue;
        s.dense = s.extent;
        s.step[i].count = 1;
    }
    return s;
}

/* What lies in one step of a span: the span from `level` on. */
typedef struct {
    const folioi_span *span;
    int level;
    int64_t extent;
} inner;

static inner inside(inner p)
{
    int64_t gone = (p.span->step[p.level].count - 1) * p.span->step[p.level].stride;
    return (inner){p.span, p.level + 1, p.extent - gone};
}

static inner skip_single(inner p)
{
    while (p.level < 2 && p.span->step[p.level].count == 1) p.level++;
    return p;
}

static bool share(inner a, inner b, int64_t apart);

/* Steps [first, first + 1] of b, those that there are. */
static bool share_steps(inner a, inner b, int64_t apart, int64_t first)
{
    int64_t count = b.span->step[b.level].count, stride = b.span->step[b.level].stride;
    for (int64_t i = max_i64(first, 0); i <= first + 1 && i < count; i++)
        if (share(a, inside(b), apart + i * stride)) return true;
    return false;
}

/*
 * a has no gaps, or lies within one step of b. The first step of b that ends behind a's begin, and the next: that one
 * begins inside a or behind it.
 */
static bool share_within(inner a, inner b, int64_t apart)
{
    int64_t stride = b.span->step[b.level].stride, before = -apart - inside(b).extent;
    return share_steps(a, b, apart, before < 0 ? 0 : before / stride + 1);
}

static int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b < 0); }

/* Equal strides: only how many steps the two are apart counts, and at most two such numbers bring them together. */
static bool share_matched(inner a, inner b, int64_t apart)
{
    int64_t stride = a.span->step[a.level].stride, least = 1 - b.span->step[b.level].count;
    int64_t most = a.span->step[a.level].count - 1, steps = floor_div(apart, stride);
    for (int64_t i = max_i64(steps, least); i <= min_i64(steps + 1, most); i++)
        if (share(inside(a), inside(b), apart - i * stride)) return true;
    return false;
}

/* b begins `apart` bytes behind a. */
static bool share(inner a, inner b, int64_t apart)
{
    if (apart >= a.extent || -apart >= b.extent) return false;
    a = skip_single(a);
    b = skip_single(b);
    if (a.level == 2 && b.level == 2) return true;
    if (a.level == 2) return share_within(a, b, apart);
    if (b.level == 2) return share_within(b, a, -apart);
    int64_t a_stride = a.span->step[a.level].stride, b_stride = b.span->step[b.level].stride;
    if (a_stride == b_stride) return share_matched(a, b, apart);
    if (a.extent <= b_stride) return share_within(a, b, apart);
    if (b.extent <= a_stride) return share_within(b, a, -apart);
    return true; /* not decided */
}

bool folioi_spans_share_inside(const folioi_span *a, const folioi_span *b)
{
    return share((inner){a, 0, a->extent}, (inner){b, 0, b->extent},
                 (int64_t)(b->first - a->first));
}
