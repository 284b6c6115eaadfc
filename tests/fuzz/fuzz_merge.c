/* fuzz_merge.c: folio_state_merge of random parts, strides and types, against the same merge in double. */
#include "fuzz/fuzz.h"

#include <math.h>
#include <stdlib.h>

const char fuzz_name[] = "merge";
enum { MAX_PARTS = 5 };
static const folio_dtype types[] = {FOLIO_F32, FOLIO_F16, FOLIO_BF16};

/* Elements from one row to the next, with a gap now and then. */
typedef struct strides {
    int64_t token, head, lse_token, lse_head;
} strides;

static strides draw_strides(fuzz_input *in, int64_t heads, int64_t size)
{
    strides s = {0, 0, 0, 0};
    if (!fuzz_chance(in, 3)) return s;
    s.head = size + fuzz_any(in, 0, 3);
    s.token = heads * s.head + fuzz_any(in, 0, 5);
    s.lse_head = fuzz_any(in, 1, 2);
    s.lse_token = heads * s.lse_head;
    return s;
}

static int64_t row_at(const strides *s, int64_t heads, int64_t size, int64_t t, int64_t h)
{
    int64_t head = s->head ? s->head : size;
    return t * (s->token ? s->token : heads * head) + h * head;
}

static int64_t lse_at(const strides *s, int64_t heads, int64_t t, int64_t h)
{
    return t * (s->lse_token ? s->lse_token : heads) + h * (s->lse_head ? s->lse_head : 1);
}

static folio_state draw_part(fuzz_input *in, int64_t tokens, int64_t heads, int64_t size,
                             strides *s)
{
    static const float special[] = {-INFINITY, INFINITY, 0, 88, -300, 1e30f, -1e30f};
    folio_dtype dtype = FUZZ_PICK(in, types),
                told = (folio_dtype)fuzz_any(in, (int64_t)dtype, (int64_t)dtype);
    if (told != dtype && folio_dtype_size(told) != 0)
        told = FOLIO_INT8; /* a wider one reads past the memory */
    *s = fuzz_is_valid(in) ? draw_strides(in, heads, size) : (strides){0, 0, 0, 0};
    int64_t count = tokens > 0 ? row_at(s, heads, size, tokens - 1, heads - 1) + size : 0;
    int64_t lses = tokens > 0 ? lse_at(s, heads, tokens - 1, heads - 1) + 1 : 0;
    float *lse = fuzz_numbers(in, FOLIO_F32, lses);
    if (lses > 0 && fuzz_chance(in, 2)) lse[fuzz_int(in, 0, lses - 1)] = FUZZ_PICK(in, special);
    if (lses > 0 && fuzz_chance(in, 3)) lse[fuzz_int(in, 0, lses - 1)] = FUZZ_PICK(in, special);
    return (folio_state){.out = {.data = fuzz_numbers(in, dtype, count),
                                 .dtype = told,
                                 .tokens = fuzz_any(in, tokens, tokens),
                                 .token_stride = s->token,
                                 .head_stride = s->head},
                         .lse = lse,
                         .lse_token_stride = s->lse_token,
                         .lse_head_stride = s->lse_head};
}

static bool is_empty(float lse) { return isinf(lse); }

/* One row of the merged result, number d; and the row's lse. */
static double expected(const folio_merge *m, const strides *s, int64_t t, int64_t h, int64_t d,
                       double *lse)
{
    double most = -INFINITY, sum = 0, value = 0;
    for (int64_t p = 0; p < m->num_parts; p++) {
        float x = m->parts[p].lse[lse_at(&s[p], m->num_heads, t, h)];
        if (!is_empty(x) && x > most) most = x;
    }
    for (int64_t p = 0; p < m->num_parts; p++) {
        float x = m->parts[p].lse[lse_at(&s[p], m->num_heads, t, h)];
        if (is_empty(x)) continue;
        const folio_tensor *out = &m->parts[p].out;
        sum += exp(x - most);
        value += exp(x - most) * kit_load(out->dtype, out->data,
                                          row_at(&s[p], m->num_heads, m->head_size, t, h) + d);
    }
    *lse = sum > 0 ? most + log(sum) : -(double)INFINITY;
    return sum > 0 ? value / sum : 0;
}

static void compare(const folio_merge *m, const strides *s, const strides *o)
{
    for (int64_t t = 0; t < m->out.tokens; t++)
        for (int64_t h = 0; h < m->num_heads; h++)
            for (int64_t d = 0; d < m->head_size; d++) {
                double lse, want = expected(m, s, t, h, d, &lse);
                double got = kit_load(m->out.dtype, m->out.data,
                                      row_at(o, m->num_heads, m->head_size, t, h) + d);
                FUZZ_CHECK(fabs(got - want) <= (m->out.dtype == FOLIO_F32 ? 1e-5 : 0.01),
                           "row %lld, head %lld, number %lld: %g, expected %g", (long long)t,
                           (long long)h, (long long)d, got, want);
                if (m->lse == NULL || d > 0) continue;
                float l = m->lse[lse_at(o, m->num_heads, t, h)];
                FUZZ_CHECK(l == (float)lse || fabs((double)l - lse) <= 1e-5 * (1 + fabs(lse)),
                           "row %lld, head %lld: lse %g, expected %g", (long long)t, (long long)h,
                           (double)l, lse);
            }
}

void fuzz_run(fuzz_input *in)
{
    folio_context *ctx = fuzz_context(fuzz_int(in, 0, fuzz_num_contexts() - 1));
    int64_t heads = fuzz_int(in, 1, 5), size = fuzz_int(in, 1, 40), tokens = fuzz_int(in, 0, 6);
    folio_dtype dtype = FUZZ_PICK(in, types);
    int64_t num_parts = fuzz_int(in, 1, MAX_PARTS);
    strides s[MAX_PARTS], o;
    folio_state parts[MAX_PARTS];
    for (int64_t p = 0; p < num_parts; p++) parts[p] = draw_part(in, tokens, heads, size, &s[p]);
    o = fuzz_is_valid(in) ? draw_strides(in, heads, size) : (strides){0, 0, 0, 0};
    int64_t count = tokens > 0 ? row_at(&o, heads, size, tokens - 1, heads - 1) + size : 0;
    int64_t lses = tokens > 0 ? lse_at(&o, heads, tokens - 1, heads - 1) + 1 : 0;
    folio_merge m =
        FOLIO_WITH(folio_merge, .num_heads = (int32_t)fuzz_any(in, heads, heads),
                   .head_size = (int32_t)fuzz_any(in, size, size),
                   .num_parts = fuzz_any(in, num_parts, num_parts), .parts = parts,
                   .out = {.data = fuzz_poison(in, count, folio_dtype_size(dtype)),
                           .dtype = dtype,
                           .tokens = tokens,
                           .token_stride = o.token,
                           .head_stride = o.head},
                   .lse = fuzz_chance(in, 3) ? NULL : fuzz_poison(in, lses, sizeof(float)),
                   .lse_token_stride = o.lse_token, .lse_head_stride = o.lse_head);
    /* more heads, sizes or parts than there is memory for would be the caller's fault */
    if (m.num_heads > heads || m.head_size > size || m.num_parts > num_parts) return;
    if (fuzz_took(folio_state_merge(ctx, &m, NULL)) && fuzz_is_valid(in)) compare(&m, s, &o);
}
