/*
 * golden_inputs.h: the numbers of q, k, v, cached rows and bias that generate.py drew too, from a
 * counter-based generator, so that no input is stored. Part of test_golden.c, used by
 * test_vllm06_torch.c too.
 */
#ifndef FOLIO_GOLDEN_INPUTS_H
#define FOLIO_GOLDEN_INPUTS_H

#include "data/golden/golden_file.h"
#include "kit/kit.h"

#include <math.h>

/* Tensors of the input generator; generate.py has the same numbers. */
enum { T_Q = 1, T_K, T_V, T_CACHED_K, T_CACHED_V, T_BIAS, T_BIAS_HIDE, T_BIAS_BLIND, T_ZERO };
enum { T_WEIGHT = 18 }; /* above T_ZERO + T_CACHED_V */

#define GOLDEN_RATIO UINT64_C(0x9E3779B97F4A7C15)

static uint64_t mix(uint64_t z)
{
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    return z ^ (z >> 31);
}

static uint64_t draw(const golden_case *c, int tensor, int64_t index)
{
    uint64_t base = mix(c->seed + (uint64_t)tensor * GOLDEN_RATIO);
    return mix(base + ((uint64_t)index + 1) * GOLDEN_RATIO);
}

/* A number in [-2, 2) with as many bits as dtype holds exactly. */
static float uniform(uint64_t bits, folio_dtype dtype)
{
    int width = dtype == FOLIO_F32 ? 24 : dtype == FOLIO_F16 ? 11 : 8;
    int64_t whole = (int64_t)(bits >> (64 - width)) - (INT64_C(1) << (width - 1));
    return (float)ldexp((double)whole, 2 - width);
}

/* A tensor with gaps; all bytes 0xFF, NaN in every type, until filled. */
typedef struct {
    folio_tensor t; /* strides resolved */
    int64_t heads, size, extent;
} strided;

static strided make_tensor(arena *a, folio_dtype dtype, int64_t rows, int64_t heads, int64_t size,
                           const int64_t *strides)
{
    strided x = {.heads = heads, .size = size};
    x.t.dtype = dtype;
    x.t.tokens = rows;
    x.t.head_stride = strides[1] ? strides[1] : size;
    x.t.token_stride = strides[0] ? strides[0] : heads * x.t.head_stride;
    if (rows > 0) x.extent = (rows - 1) * x.t.token_stride + (heads - 1) * x.t.head_stride + size;
    x.t.data = take(a, (size_t)x.extent * folio_dtype_size(dtype), 0xFF);
    return x;
}

/* Row `row` of the tensor gets the numbers of row `source` of the generator's tensor. */
static void fill_row(const golden_case *c, strided *x, int64_t row, int tensor, int64_t source)
{
    for (int64_t h = 0; h < x->heads; h++) {
        int64_t head = source * x->heads + h;
        int64_t at = row * x->t.token_stride + h * x->t.head_stride;
        bool zero = c->zeros && tensor != T_Q && draw(c, T_ZERO + tensor, head) % 8 == 0;
        for (int64_t d = 0; d < x->size; d++)
            kit_store(x->t.dtype, x->t.data, at + d,
                      zero ? 0.0
                           : (double)uniform(draw(c, tensor, head * x->size + d), x->t.dtype));
    }
}

/*
 * A row and head of out against its sum in the file. Each number has a weight of its own in [-2, 2),
 * so a wrong one shows. Errors of up to `bound` a number are allowed; they add like random numbers.
 * Returns the error's share of what is allowed: above 1, or NaN, it is wrong.
 */
static double share_of_bound(const golden_case *c, const strided *out, int64_t row, int64_t h,
                             double bound)
{
    double sum = 0, squares = 0;
    for (int64_t d = 0; d < out->size; d++) {
        int64_t index = (row * out->heads + h) * out->size + d;
        double weight = (double)uniform(draw(c, T_WEIGHT, index), FOLIO_F32);
        sum += weight * kit_load(out->t.dtype, out->t.data,
                                 row * out->t.token_stride + h * out->t.head_stride + d);
        squares += weight * weight;
    }
    double error = fabs(sum - (double)c->sums[row * out->heads + h]);
    return error == 0 ? 0 : error / (2 * bound * sqrt(squares));
}

static float bias_value(const golden_case *c, int64_t index)
{
    bool hidden = draw(c, T_BIAS_HIDE, index) % 100 < (uint64_t)c->bias_hide ||
                  draw(c, T_BIAS_BLIND, index / c->bias_dims[3]) % 100 < (uint64_t)c->bias_blind;
    return hidden ? -INFINITY : uniform(draw(c, T_BIAS, index), c->bias_dtype);
}

static void make_bias(golden_case *c, folio_bias *bias)
{
    if (c->bias_dtype == 0) return;
    const int64_t *dims = c->bias_dims, *strides = c->bias_strides;
    int64_t extent = 1, count = 1;
    for (int i = 0; i < 4; i++) {
        if (dims[i] > 1) extent += (dims[i] - 1) * strides[i];
        count *= dims[i];
        bias->dims[i] = dims[i];
        bias->strides[i] = strides[i];
    }
    void *data = take(&c->mem, (size_t)extent * folio_dtype_size(c->bias_dtype), 0xFF);
    for (int64_t index = 0; index < count; index++) {
        int64_t rest = index, at = 0;
        for (int i = 3; i >= 0; i--) {
            if (dims[i] > 1) at += rest % dims[i] * strides[i];
            rest /= dims[i];
        }
        kit_store(c->bias_dtype, data, at, (double)bias_value(c, index));
    }
    bias->data = data;
    bias->dtype = c->bias_dtype;
}

/* Does the bias hide key j of a sequence from all its rows? Then its slot may hold NaN. */
static bool bias_hides(const golden_case *c, int64_t seq, int64_t rows, int64_t j)
{
    if (c->bias_dtype == 0) return false;
    const int64_t *dims = c->bias_dims;
    for (int64_t h = 0; h < dims[1]; h++)
        for (int64_t i = 0; i < (dims[2] > 1 ? rows : 1); i++) {
            int64_t index = dims[0] > 1 ? seq : 0;
            index = (index * dims[1] + h) * dims[2] + i;
            index = index * dims[3] + (dims[3] > 1 ? j : 0);
            if (bias_value(c, index) != -INFINITY) return false;
        }
    return true;
}

#endif
