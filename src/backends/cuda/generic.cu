/*
 * generic.cu: the generic kernel: every type, layout and option, on the tensor cores in double precision. f32 attention
 * runs on it, and other kernels are tested against it where the reference is too slow. (In f32, rows were up to 15 ulp
 * off.) A block computes up to ROWS rows of one kv head. It brings a tile of keys to shared memory, as f32, for all of
 * its warps. A warp has 8 rows. Of each 8 x 8 product, lane l has row l / 4 and columns 2 (l % 4) and the next.
 */
#include "backends/cuda/generic_keys.h"
#include "backends/cuda/warp.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace {

constexpr int WARP_ROWS = 8;

/* Rows of sequences with fewer new tokens are computed one by one: each sequence has its own keys. */
constexpr int SHARED_QUERIES = 4;

/* Blocks of a launch: `tiles` of `queries` rows of out each, for sequences with many; then one for each `few` rows. */
struct block_roles {
    int32_t tiles, queries, few;
    int32_t heads;       /* of a head group, in one block */
    int32_t head_slices; /* blocks that have a head group */
};

/*
 * DIMS: of a row of K at most. Of V a block takes VALUES dims at a time, and computes the scores again if there are
 * more. Rows in shared memory are 4 words apart in banks: loads of q, K and V do not collide.
 */
template <int DIMS> struct tile_shape {
    static constexpr int WARPS = DIMS > 256 ? 4 : 8, THREADS = WARPS * WARP;
    static constexpr int ROWS = WARPS * WARP_ROWS;
    static constexpr int KEYS = DIMS > 256 ? 8 : DIMS > 128 ? 16 : 32;
    static constexpr int VALUES = DIMS > 128 ? 128 : DIMS;
    static constexpr int TEAM = THREADS / KEYS; /* threads that bring one key */
};

template <int DIMS> struct tile_memory {
    using S = tile_shape<DIMS>;
    float k[S::KEYS][DIMS + 4], v[S::KEYS][S::VALUES + 4];
    float k_scale[S::KEYS], v_scale[S::KEYS];
    float q[S::ROWS][DIMS + 4];
};

/* The block's dims of V. */
struct value_dims {
    int32_t first, count;
};

/* c += a times b: 8 x 4 and 4 x 8. Lane l has row l / 4 of a and column l / 4 of b, number l % 4. */
__device__ __forceinline__ void multiply(double (&c)[2], double a, double b)
{
    asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
        : "+d"(c[0]), "+d"(c[1])
        : "d"(a), "d"(b));
}

/* Over the lanes of a row. */
__device__ __forceinline__ double row_max(double x)
{
    x = fmax(x, __shfl_xor_sync(ALL_LANES, x, 1));
    return fmax(x, __shfl_xor_sync(ALL_LANES, x, 2));
}

__device__ __forceinline__ double row_sum(double x)
{
    x += __shfl_xor_sync(ALL_LANES, x, 1);
    return x + __shfl_xor_sync(ALL_LANES, x, 2);
}

/* A lane's row, and its dims of out. */
template <int DIMS> struct tile_state {
    double max, sum, out[tile_shape<DIMS>::VALUES / 8][2];
};

/* Every TEAM-th of a key's numbers from d on, to shared memory: many loads at once. Is one infinite or NaN? */
template <int TEAM, class Load>
__device__ __forceinline__ bool bring_numbers(float *to, int32_t d, int32_t dims, Load load)
{
    constexpr int AT_ONCE = 16;
    bool odd = false;
    for (; d < dims; d += TEAM * AT_ONCE) {
        float x[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) x[i] = d + i * TEAM < dims ? load(d + i * TEAM) : 0.0f;
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            odd |= !(fabsf(x[i]) < INFINITY);
            if (d + i * TEAM < dims) to[d + i * TEAM] = x[i];
        }
    }
    return odd;
}

template <class T> __device__ __forceinline__ float as_float(T x) { return x; }
__device__ __forceinline__ float as_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float as_float(__nv_bfloat16 x) { return __bfloat162float(x); }

/* Numbers of type T. */
template <int TEAM, class T>
__device__ __forceinline__ bool bring_typed(float *to, const key_place &p, int32_t first,
                                            int32_t dims)
{
    int32_t lane = (int32_t)threadIdx.x % TEAM;
    const T *row = (const T *)p.base + p.first;
    if (p.at == nullptr)
        return bring_numbers<TEAM>(to, lane, dims,
                                   [=](int32_t d) { return as_float(row[first + d]); });
    folioi_address at = *p.at;
    int32_t token = p.token;
    return bring_numbers<TEAM>(to, lane, dims, [=](int32_t d) {
        return as_float(row[address_dim(&at, token, first + d)]);
    });
}

/* Dims [first, first + dims) of a key. Its type is looked up once: else each load would wait for the one before. */
template <int TEAM>
__device__ __forceinline__ bool bring_row(float *to, const key_place &p, int32_t first,
                                          int32_t dims)
{
    if (p.rotation == nullptr && p.dtype == FOLIO_F32)
        return bring_typed<TEAM, float>(to, p, first, dims);
    if (p.rotation == nullptr && p.dtype == FOLIO_BF16)
        return bring_typed<TEAM, __nv_bfloat16>(to, p, first, dims);
    if (p.rotation == nullptr && p.dtype == FOLIO_F16)
        return bring_typed<TEAM, __half>(to, p, first, dims);
    return bring_numbers<TEAM>(to, (int32_t)threadIdx.x % TEAM, dims,
                               [&](int32_t d) { return number(p, first + d); });
}

/*
 * The tile of keys from `first` on to shared memory. Outside `seen` it is zeros: blocks that no row sees may be gone.
 * Is a number of V infinite or NaN?
 */
template <int DIMS>
__device__ bool bring_keys(const row &r, tile_memory<DIMS> &tile, value_dims values, int64_t first,
                           folioi_range seen)
{
    using S = tile_shape<DIMS>;
    static const float no_numbers[DIMS] = {};
    int32_t key = (int32_t)threadIdx.x / S::TEAM;
    bool inside = first + key >= seen.begin && first + key < seen.end;
    key_place k = {no_numbers, FOLIO_F32}, v = k;
    v.first = -values.first;
    if (inside) k = find_key(r, false, first + key), v = find_key(r, true, first + key);
    (void)bring_row<S::TEAM>(tile.k[key], k, 0, r.l->k_dims);
    bool odd = bring_row<S::TEAM>(tile.v[key], v, values.first, values.count);
    if (threadIdx.x % S::TEAM == 0) tile.k_scale[key] = k.scale, tile.v_scale[key] = v.scale;
    return odd;
}

/* Scores of the tile's keys: -inf where hidden. */
template <int DIMS>
__device__ __forceinline__ void score_keys(const row &r, const tile_memory<DIMS> &tile,
                                           folioi_range seen, int64_t first,
                                           double (&x)[tile_shape<DIMS>::KEYS / 8][2])
{
    int lane = threadIdx.x % WARP;
    const float *own_q = tile.q[threadIdx.x / 4] + lane % 4;
#pragma unroll
    for (int i = 0; i < DIMS / 4; i++) {
        double q = own_q[i * 4];
#pragma unroll
        for (int n = 0; n < tile_shape<DIMS>::KEYS / 8; n++)
            multiply(x[n], q, tile.k[n * 8 + lane / 4][i * 4 + lane % 4]);
    }
#pragma unroll
    for (int n = 0; n < tile_shape<DIMS>::KEYS / 8; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            int key = n * 8 + lane % 4 * 2 + e;
            int64_t j = first + key;
            double bias = j >= seen.begin && j < seen.end ? bias_of(r, j) : -INFINITY;
            x[n][e] = bias == -INFINITY ? bias
                                        : score_of(r, j, x[n][e] * (double)tile.k_scale[key], bias);
        }
}

/* Weights times V, where no key is hidden or all of V is finite. */
template <int DIMS>
__device__ __forceinline__ void add_values(const tile_memory<DIMS> &tile, tile_state<DIMS> &s,
                                           const double (&p)[tile_shape<DIMS>::KEYS / 8][2])
{
    int lane = threadIdx.x % WARP;
#pragma unroll
    for (int n = 0; n < tile_shape<DIMS>::KEYS / 8; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) /* keys 2 (l % 4) + e: those of which a lane has weights */
#pragma unroll
            for (int i = 0; i < tile_shape<DIMS>::VALUES / 8; i++)
                multiply(s.out[i], p[n][e], tile.v[n * 8 + lane % 4 * 2 + e][i * 8 + lane / 4]);
}

/* The same key by key, without those that are hidden from a row: 0 times infinity is NaN. */
template <int DIMS>
__device__ __forceinline__ void add_seen_values(const tile_memory<DIMS> &tile, tile_state<DIMS> &s,
                                                const double (&p)[tile_shape<DIMS>::KEYS / 8][2],
                                                const bool (&hidden)[tile_shape<DIMS>::KEYS / 8][2])
{
    int lane = threadIdx.x % WARP;
#pragma unroll
    for (int n = 0; n < tile_shape<DIMS>::KEYS / 8; n++)
#pragma unroll
        for (int e = 0; e < 2; e++)
            for (int t = 0; t < 4; t++) {
                int from = lane / 4 * 4 + t;
                double weight = __shfl_sync(ALL_LANES, p[n][e], from);
                if (__shfl_sync(ALL_LANES, (int)hidden[n][e], from)) continue;
#pragma unroll
                for (int i = 0; i < tile_shape<DIMS>::VALUES / 8; i++)
#pragma unroll
                    for (int c = 0; c < 2; c++)
                        s.out[i][c] =
                            fma(weight, (double)tile.v[n * 8 + t * 2 + e][i * 8 + lane % 4 * 2 + c],
                                s.out[i][c]);
            }
}

/* Keys [first, first + KEYS); those outside `seen` are hidden. odd: V has numbers that are infinite or NaN. */
template <int DIMS>
__device__ __forceinline__ void attend_tile(const row &r, const tile_memory<DIMS> &tile,
                                            tile_state<DIMS> &s, folioi_range seen, int64_t first,
                                            bool odd)
{
    constexpr int N = tile_shape<DIMS>::KEYS / 8;
    double x[N][2] = {};
    bool sees = first < seen.end && first + N * 8 > seen.begin;
    if (!__any_sync(ALL_LANES, sees)) return;
    score_keys<DIMS>(r, tile, seen, first, x);
    double max = s.max;
    bool hides = false, hidden[N][2];
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            hidden[n][e] = x[n][e] == -INFINITY;
            hides |= hidden[n][e];
            max = fmax(max, x[n][e]); /* NaN is no maximum */
        }
    max = row_max(max);
    double base = max == -INFINITY ? 0.0 : max, sum = 0.0;
    double shrink = s.max == -INFINITY ? 0.0 : exp(s.max - base);
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            double p = hidden[n][e] ? 0.0 : exp(x[n][e] - base);
            sum += p;
            x[n][e] =
                hidden[n][e] ? 0.0 : p * (double)tile.v_scale[n * 8 + (int)threadIdx.x % 4 * 2 + e];
        }
    s.sum = s.sum * shrink + row_sum(sum);
    if (max > s.max) {
        s.max = max;
#pragma unroll
        for (int i = 0; i < tile_shape<DIMS>::VALUES / 8; i++)
            s.out[i][0] *= shrink, s.out[i][1] *= shrink;
    }
    if (odd && __any_sync(ALL_LANES, hides)) add_seen_values<DIMS>(tile, s, x, hidden);
    else add_values<DIMS>(tile, s, x);
}

/* Division, rounding, lse of the lane's row. */
template <int DIMS>
__device__ __forceinline__ void store_row(const row &r, int64_t at, value_dims values,
                                          const tile_state<DIMS> &s)
{
    const folioi_cuda_layer &l = *r.l;
    bool any = !(s.sum == 0.0);
    generic_end end = end_of_row(r, s.max, s.sum, any);
    if (l.lse != nullptr && threadIdx.x % 4 == 0 && values.first == 0)
        l.lse[at * l.lse_token + r.head * l.lse_head] = end.lse;
#pragma unroll
    for (int i = 0; i < tile_shape<DIMS>::VALUES / 8; i++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            int32_t d = i * 8 + (int)threadIdx.x % 4 * 2 + e;
            if (d < values.count)
                store_f32(l.out.data, l.dtype,
                          at * l.out.token + r.head * l.out.head + values.first + d,
                          any ? (float)(s.out[i][e] * end.factor) : 0.0f);
        }
}

/* Rows of a tile that are of one sequence: its queries, `heads` heads from first_head on. */
template <int DIMS>
__device__ void attend_rows(row r, tile_memory<DIMS> &tile, int64_t first_row, int64_t past_row,
                            int32_t first_head, int32_t heads)
{
    using S = tile_shape<DIMS>;
    int lane = threadIdx.x % WARP, i = (int)threadIdx.x / WARP * WARP_ROWS + lane / 4;
    int64_t at = first_row + i / heads, last = past_row - 1;
    bool is_there = at < past_row;
    row last_row = r;
    r.head = first_head + i % heads;
    r.query = (is_there ? at : last) - r.seq.query_row; /* of no row: as the last one */
    r.own = r.seq.first_query_pos + r.query - r.seq.first_key_pos;
    last_row.own = r.own + (last - r.seq.query_row) - r.query;
    row first_of = last_row;
    first_of.own = last_row.own - (last - first_row);
    folioi_range seen = keys_seen(r);
    folioi_range all = {keys_seen(first_of).begin, keys_seen(last_row).end};
    tile_state<DIMS> s;
    /* no other warp reads this row; all of it is read before out is stored, which may be q */
    for (int32_t d = lane % 4; d < DIMS; d += 4)
        tile.q[i][d] = is_there && d < r.l->k_dims ? query_number(r, at, d) : 0.0f;
    __syncwarp();
    value_dims values = {0, 0};
    for (; values.first < r.l->v_dims; values.first += S::VALUES) {
        values.count = min(S::VALUES, r.l->v_dims - values.first);
        s.max = -INFINITY, s.sum = 0.0;
#pragma unroll
        for (int k = 0; k < S::VALUES / 8; k++) s.out[k][0] = s.out[k][1] = 0.0;
        for (int64_t first = all.begin / S::KEYS * S::KEYS; first < all.end; first += S::KEYS) {
            __syncthreads(); /* all are done with the tile before */
            bool odd = __syncthreads_or(bring_keys<DIMS>(r, tile, values, first, all));
            attend_tile<DIMS>(r, tile, s, is_there ? seen : folioi_range{0, 0}, first, odd);
        }
        if (is_there) store_row<DIMS>(r, at, values, s);
    }
}

/* A row of out that no sequence has. */
__device__ void store_padding(const folioi_cuda_layer &l, int64_t at, int32_t first_head,
                              int32_t heads)
{
    for (int32_t i = (int32_t)threadIdx.x; i < heads * l.v_dims; i += (int32_t)blockDim.x) {
        int32_t head = first_head + i / l.v_dims, d = i % l.v_dims;
        store_f32(l.out.data, l.dtype, at * l.out.token + head * l.out.head + d, 0.0f);
        if (l.lse != nullptr && d == 0)
            l.lse[at * l.lse_token + head * l.lse_head] =
                l.sinks != nullptr ? l.sinks[head] : -INFINITY;
    }
}

template <int DIMS>
__global__ void __launch_bounds__(tile_shape<DIMS>::THREADS, 1)
    generic(const __grid_constant__ folioi_cuda_layer l,
            const __grid_constant__ folioi_cuda_step step, const block_roles roles)
{
    extern __shared__ __align__(16) char memory[];
    tile_memory<DIMS> &tile = *(tile_memory<DIMS> *)memory;
    row r = {&l, &step};
    int32_t units = l.num_kv_heads * roles.head_slices, unit = (int32_t)blockIdx.x % units;
    int32_t heads_per_kv = l.num_heads / l.num_kv_heads, slice = unit % roles.head_slices;
    r.kv_head = unit / roles.head_slices;
    int32_t first_head = r.kv_head * heads_per_kv + slice * roles.heads;
    int32_t heads = min(roles.heads, (r.kv_head + 1) * heads_per_kv - first_head);
    for (int32_t i = (int32_t)threadIdx.x; i < tile_shape<DIMS>::KEYS * DIMS;
         i += (int32_t)blockDim.x)
        if (i % DIMS >= l.k_dims)
            tile.k[i / DIMS][i % DIMS] = 0.0f; /* as in q; of V, such dims are not stored */
    int32_t n = (int32_t)blockIdx.x / units;
    bool is_tile = n < roles.tiles;
    int64_t rows = is_tile ? roles.queries : roles.few, at_once = is_tile ? rows : 1;
    int64_t first = (is_tile ? n : n - roles.tiles) * rows, past = min(first + rows, step.out_rows);
    for (int64_t at = first; at < past && !is_tile; at++)
        if (find_seq(step.counts, step.seqs, at) < 0) store_padding(l, at, first_head, heads);
    for (int32_t i = last_seq(step.counts, step.seqs, first); i < step.counts->num_seqs; i++) {
        r.seq_index = i;
        r.seq = step.seqs[i];
        if (r.seq.query_row >= past) return;
        if (is_tile != (r.seq.query_len >= SHARED_QUERIES)) continue;
        int64_t end = min(past, r.seq.query_row + r.seq.query_len);
        for (int64_t at = max(first, r.seq.query_row); at < end; at += at_once)
            attend_rows<DIMS>(r, tile, at, min(at + at_once, end), first_head, heads);
    }
}

/* A block for each row of out. */
__global__ void pad_rows(const __grid_constant__ folioi_cuda_layer l,
                         const __grid_constant__ folioi_cuda_step step)
{
    if (find_seq(step.counts, step.seqs, blockIdx.x) < 0)
        store_padding(l, blockIdx.x, 0, l.num_heads);
}

} // namespace

template <int DIMS> static cudaError_t launch(const folioi_cuda_run *run)
{
    using S = tile_shape<DIMS>;
    const folioi_cuda_layer *l = run->layer;
    int32_t heads_per_kv = l->num_heads / l->num_kv_heads,
            bytes = (int32_t)sizeof(tile_memory<DIMS>);
    int64_t rows = run->step->out_rows;
    block_roles roles = {};
    roles.heads = heads_per_kv < S::ROWS ? heads_per_kv : S::ROWS;
    roles.head_slices = (int32_t)ceil_div(heads_per_kv, roles.heads);
    roles.queries = S::ROWS / roles.heads;
    roles.tiles = (int32_t)ceil_div(rows, roles.queries);
    roles.few = (int32_t)ceil_div(rows, 1024);
    cudaError_t error = cudaFuncSetAttribute((const void *)generic<DIMS>,
                                             cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return error;
    int64_t units = (int64_t)l->num_kv_heads * roles.head_slices;
    int64_t blocks = (roles.tiles + ceil_div(rows, roles.few)) * units;
    if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
    generic<DIMS><<<(unsigned)blocks, S::THREADS, bytes, run->stream>>>(*l, *run->step, roles);
    return cudaGetLastError();
}

cudaError_t folioi_cuda_generic(const folioi_cuda_run *run, bool only_padding)
{
    int32_t k = run->layer->k_dims, v = run->layer->v_dims;
    if (run->step->out_rows == 0) return cudaSuccess;
    if (only_padding) {
        pad_rows<<<(unsigned)run->step->out_rows, 128, 0, run->stream>>>(*run->layer, *run->step);
        return cudaGetLastError();
    }
    if (k <= 64 && v <= 64) return launch<64>(run);
    if (k <= 128 && v <= 128) return launch<128>(run);
    return k <= 256 ? launch<256>(run) : launch<FOLIOI_MAX_HEAD_SIZE>(run);
}
