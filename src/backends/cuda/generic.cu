/*
 * generic.cu: the generic kernel: every type, layout and option, one warp per (row, head). A lane takes one key of 32 for
 * scores, then dims for V. f32 attention runs on it, and other kernels are tested against it where the reference is too
 * slow. It computes in double precision: in f32, rows were up to 15 ulp off.
 */
#include "backends/cuda/cuda_attend.h"
#include "backends/cuda/step/row_position.h"
#include "backends/cuda/warp.h"
#include "core/dtype.h"
#include "plan/key_range.h"

#include <math.h>

namespace {

constexpr int WARPS = 4, MAX_DIMS = FOLIOI_MAX_HEAD_SIZE, PER_LANE = MAX_DIMS / WARP;

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

__device__ key_place find_key(const row &r, bool v, int64_t j)
{
    const folioi_cuda_layer &l = *r.l;
    if (!l.cached || (l.append && j >= r.seq.context_len)) {
        const folioi_cuda_rows &t = v ? l.new_v : l.new_k;
        int64_t i = j - r.seq.context_len, row = r.seq.new_row + i;
        int64_t at = row * t.token + r.kv_head * t.head;
        key_place p = {t.data, v ? l.new_v_dtype : l.new_k_dtype, at, 1.0f, nullptr, 0, nullptr, 0};
        if (v || l.turns.rotation.table == nullptr) return p;
        p.rotation = &l.turns.rotation;
        p.position =
            l.turns.positions != nullptr ? l.turns.positions[row] : r.seq.first_query_pos + i;
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

__device__ double number(const key_place &p, int32_t d)
{
    if (p.rotation != nullptr)
        return rotated_number(p.rotation, p.base, p.dtype, p.first, d, p.position);
    return load_f32(p.base, p.dtype,
                    p.first + (p.at != nullptr ? address_dim(p.at, p.token, d) : d));
}

__device__ float bias_of(const row &r, int64_t j)
{
    const folio_bias &b = r.l->bias;
    return load_f32(b.data, b.dtype,
                    r.seq_index * b.strides[0] + r.head * b.strides[1] + r.query * b.strides[2] +
                        j * b.strides[3]);
}

/* The score of key j; -inf: hidden. */
__device__ double score(const row &r, const double *q, int64_t j)
{
    const folioi_cuda_layer &l = *r.l;
    double bias = l.bias.data != nullptr ? bias_of(r, j) : 0.0;
    if (bias == -INFINITY) return bias;
    key_place k = find_key(r, false, j);
    double x = 0.0;
    for (int32_t d = 0; d < l.k_dims; d++) x = fma(q[d], number(k, d), x);
    x *= (double)k.scale * l.scale;
    if (l.soft_cap > 0) x = l.soft_cap * tanh(x / l.soft_cap);
    if (l.slopes != nullptr) x -= (double)l.slopes[r.head] * fabs((double)(r.own - j));
    return x + bias;
}

struct state {
    double max, sum;
    bool any; /* some key was seen */
    double out[PER_LANE];
};

/* Up to 32 keys from `first` on. */
__device__ void attend_keys(const row &r, const double *q, int64_t first, int64_t end, state *s)
{
    int lane = threadIdx.x % WARP;
    double x = first + lane < end ? score(r, q, first + lane) : -INFINITY;
    unsigned seen = __ballot_sync(ALL_LANES, x != -INFINITY);
    if (seen == 0) return;
    s->any = true;
    double max = fmax(s->max, warp_max(x)); /* NaN is no maximum */
    double base = max == -INFINITY ? 0.0 : max;
    double shrink = s->max == -INFINITY ? 0.0 : exp(s->max - base);
    double p = x == -INFINITY ? 0.0 : exp(x - base);
    s->sum = s->sum * shrink + warp_sum(p);
    if (max > s->max) {
        s->max = max;
        for (int i = 0; i < PER_LANE; i++) s->out[i] *= shrink;
    }
    for (int k = 0; k < WARP; k++) {
        double weight = __shfl_sync(ALL_LANES, p, k);
        if (!(seen >> k & 1u)) continue; /* what is hidden may be NaN */
        key_place v = find_key(r, true, first + k);
        weight *= v.scale;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            int32_t d = lane + i * WARP;
            if (d >= r.l->v_dims) break;
            s->out[i] = fma(weight, number(v, d), s->out[i]);
        }
    }
}

__device__ void store_lse(const folioi_cuda_layer &l, int64_t at, int32_t head, float lse)
{
    if (l.lse != nullptr && threadIdx.x % WARP == 0)
        l.lse[at * l.lse_token + head * l.lse_head] = lse;
}

/* Sink, division, rounding, lse. A row that sees no key: zeros, and the sink or -inf. */
__device__ void finish(const folioi_cuda_layer &l, int64_t at, int32_t head, const state &s)
{
    double sink = l.sinks != nullptr ? l.sinks[head] : -INFINITY, factor = 0.0;
    if (s.any) {
        double max = s.max == -INFINITY ? 0.0 : s.max, sum = s.sum, shrink = 1.0;
        if (sink != -INFINITY) {
            double with = fmax(sink, max);
            shrink = exp(max - with);
            sum = sum * shrink + exp(sink - with);
            max = with;
        }
        factor = shrink / sum;
        store_lse(l, at, head, (float)(max + log(sum)));
    } else store_lse(l, at, head, (float)sink);
    int lane = threadIdx.x % WARP;
    for (int i = 0; i < PER_LANE; i++) {
        int32_t d = lane + i * WARP;
        if (d < l.v_dims)
            store_f32(l.out.data, l.dtype, at * l.out.token + head * l.out.head + d,
                      s.any ? (float)(s.out[i] * factor) : 0.0f);
    }
}

__global__ void __launch_bounds__(WARP *WARPS, 4)
    generic(const __grid_constant__ folioi_cuda_layer l,
            const __grid_constant__ folioi_cuda_step step, bool only_padding)
{
    __shared__ double queries[WARPS][MAX_DIMS];
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    int64_t unit = (int64_t)blockIdx.x * WARPS + warp, at = unit / l.num_heads;
    if (at >= step.out_rows) return;
    row r = {&l, &step};
    r.head = (int32_t)(unit % l.num_heads);
    r.kv_head = r.head / (l.num_heads / l.num_kv_heads);
    r.seq_index = find_seq(step.counts, step.seqs, at);
    if (only_padding && r.seq_index >= 0) return;
    state s = {-INFINITY, 0.0, false, {0}};
    if (r.seq_index >= 0) {
        r.seq = step.seqs[r.seq_index];
        r.query = at - r.seq.query_row;
        r.own = r.seq.first_query_pos + r.query - r.seq.first_key_pos;
        double *q = queries[warp];
        int64_t first = at * l.q.token + r.head * l.q.head,
                position = r.seq.first_query_pos + r.query;
        if (l.turns.positions != nullptr) position = l.turns.positions[at];
        for (int32_t d = lane; d < l.k_dims; d += WARP)
            q[d] = rotated_number(&l.turns.rotation, l.q.data, l.dtype, first, d, position);
        __syncwarp();
        folioi_range seen =
            range_around(r.own, r.seq.key_len, r.seq.causal != 0, l.window_left, l.window_right);
        for (int64_t j = seen.begin; j < seen.end; j += WARP) attend_keys(r, q, j, seen.end, &s);
    }
    finish(l, at, r.head, s);
}

} // namespace

cudaError_t folioi_cuda_generic(const folioi_cuda_run *run, bool only_padding)
{
    int64_t units = run->step->out_rows * run->layer->num_heads;
    if (units == 0) return cudaSuccess;
    generic<<<(unsigned)ceil_div(units, WARPS), WARP * WARPS, 0, run->stream>>>(
        *run->layer, *run->step, only_padding);
    return cudaGetLastError();
}
