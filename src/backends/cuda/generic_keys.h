/*
 * generic_keys.h: keys of any type in any layout, and scores with any option, for the generic kernel. Scores are
 * doubles.
 */
#ifndef FOLIOI_CUDA_GENERIC_KEYS_H
#define FOLIOI_CUDA_GENERIC_KEYS_H

#include "backends/cuda/cuda_attend.h"
#include "backends/cuda/step/row_position.h"
#include "core/dtype.h"

#include <math.h>

/* One row under one head. */
struct row {
    const folioi_cuda_layer *l;
    const folioi_cuda_step *step;
    folioi_cuda_seq seq;
    int32_t seq_index, head, kv_head;
    int64_t query; /* among its sequence's */
    int64_t own;   /* the key whose position is its own */
};

/* Where the numbers of key j begin, of K or V, and how to read them. */
struct key_place {
    const void *base;
    folio_dtype dtype;
    int64_t first;
    float scale;
    const folioi_address *at; /* NULL: neighbours */
    int32_t token;
    const folioi_rotation *rotation; /* NULL: as they are */
    int64_t position;
};

static __device__ inline key_place find_key(const row &r, bool v, int64_t j)
{
    const folioi_cuda_layer &l = *r.l;
    if (!l.cached || (l.append && j >= r.seq.context_len)) {
        const folioi_cuda_rows &t = v ? l.new_v : l.new_k;
        int64_t i = j - r.seq.context_len, row = r.seq.new_row + i;
        int64_t at = row * t.token + r.kv_head * t.head;
        key_place p = {t.data, v ? l.new_v_dtype : l.new_k_dtype, at, 1.0f, nullptr, 0, nullptr, 0};
        if (v || l.rotations.rotation.table == nullptr) return p;
        p.rotation = &l.rotations.rotation;
        p.position = l.rotations.positions != nullptr ? l.rotations.positions[row]
                                                      : r.seq.first_query_pos + i;
        return p;
    }
    const folioi_cuda_side &side = v ? l.v : l.k;
    int32_t key = (int32_t)j, token = key % l.block_size;
    int64_t block = r.step->blocks[r.seq.table + key / l.block_size];
    float scale = side.scales != nullptr
                      ? side.scales[address_token(&side.scales_at, block, r.kv_head, token)]
                      : folioi_cuda_scale(&side, r.kv_head);
    return {side.base,
            l.kv_dtype,
            address_token(&side.at, block, r.kv_head, token),
            scale,
            address_has_rows(&side.at) ? nullptr : &side.at,
            token,
            nullptr,
            0};
}

/* A number of a key, its scale not applied. */
static __device__ inline float number(const key_place &p, int32_t d)
{
    if (p.rotation != nullptr)
        return rotated_number(p.rotation, p.base, p.dtype, p.first, d, p.position);
    return load_f32(p.base, p.dtype,
                    p.first + (p.at != nullptr ? address_dim(p.at, p.token, d) : d));
}

/* A number of the row's q. */
static __device__ inline float query_number(const row &r, int64_t at, int32_t d)
{
    const folioi_cuda_layer &l = *r.l;
    int64_t position = l.rotations.positions != nullptr ? l.rotations.positions[at]
                                                        : r.seq.first_query_pos + r.query;
    return rotated_number(&l.rotations.rotation, l.q.data, l.dtype,
                          at * l.q.token + r.head * l.q.head, d, position);
}

static __device__ inline folioi_range keys_seen(const row &r)
{
    return range_around(r.own, r.seq.key_len, r.seq.causal != 0, r.l->window_left,
                        r.l->window_right);
}

static __device__ inline double bias_of(const row &r, int64_t j)
{
    const folio_bias &b = r.l->bias;
    if (b.data == nullptr) return 0.0;
    return load_f32(b.data, b.dtype,
                    r.seq_index * b.strides[0] + r.head * b.strides[1] + r.query * b.strides[2] +
                        j * b.strides[3]);
}

/* The score of key j, from q times its K. */
static __device__ inline double score_of(const row &r, int64_t j, double product, double bias)
{
    const folioi_cuda_layer &l = *r.l;
    double x = product * l.scale;
    if (l.soft_cap > 0) x = l.soft_cap * tanh(x / l.soft_cap);
    if (l.slopes != nullptr) x -= (double)l.slopes[r.head] * fabs((double)(r.own - j));
    return x + bias;
}

/* What a row's sum of weighted V is multiplied with, and its lse. any: it has seen a key. */
struct generic_end {
    double factor;
    float lse;
};

static __device__ inline generic_end end_of_row(const row &r, double largest, double sum, bool any)
{
    double sink = r.l->sinks != nullptr ? r.l->sinks[r.head] : -INFINITY;
    if (!any) return {0.0, (float)sink};
    double max = largest == -INFINITY ? 0.0 : largest, shrink = 1.0;
    if (sink != -INFINITY) {
        double with = fmax(sink, max);
        shrink = exp(max - with);
        sum = sum * shrink + exp(sink - with);
        max = with;
    }
    return {shrink / sum, (float)(max + log(sum))};
}

#endif
