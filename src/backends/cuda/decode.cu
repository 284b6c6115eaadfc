/*
 * decode.cu: the decode kernels put together, the schedule kernel, and the choice of an instance.
 * Tiles and fragments: decode_kernel.h; an item's end: decode_end.h; who reads what: decode_schedule.h.
 */
#include "backends/cuda/decode_end.h"
#include "backends/cuda/decode_kernel.h"
#include "core/dtype.h"

/* ------------------------------------------------------------------ one tile */

/* What the general instances know of an item's rows, per row of row_state. */
template <int NT> struct row_options {
    float factor[2 * NT]; /* of a cached score: scale, k.scale and what q was divided by */
    float slope[2 * NT];
    int64_t own[2 * NT];  /* key at the row's own position, for ALiBi */
    int64_t bias[2 * NT]; /* index of key 0 */
};

struct tile_view {
    uint32_t k, v;
    const float *scales; /* of int8: K of the 16 tokens, then V; else NULL */
    int tile, low, high;
    bool fresh;
};

static __device__ __forceinline__ float bias_at(const decode_args &a, int64_t index)
{
    const folio_bias &b = a.layer.bias;
    if (b.dtype == FOLIO_F32) return ((const float *)b.data)[index];
    return half_bits_to_float(((const uint16_t *)b.data)[index], b.dtype == FOLIO_BF16);
}

/* Score from a dot product. */
template <int NT>
static __device__ __forceinline__ float option_score(const decode_args &a,
                                                     const row_options<NT> &opt, int row, float dot,
                                                     float by, int token, bool real)
{
    float x = dot * by;
    if (a.layer.soft_cap > 0.0f) x = a.layer.soft_cap * tanhf(x / a.layer.soft_cap);
    if (a.layer.slopes != NULL) x -= opt.slope[row] * fabsf((float)(opt.own[row] - token));
    if (a.layer.bias.data != NULL && real) {
        float bias = bias_at(a, opt.bias[row] + token * a.layer.bias.strides[3]);
        x = bias == -INFINITY ? -INFINITY : x + bias;
    }
    return x;
}

/* Scores of a tile: scaled, every option applied, -inf where not seen. Returns whether some row does not
 * see a token that is in the tile. hidden: lanes of the scores that are -inf. */
template <int PLAIN, int NT>
static __device__ __forceinline__ bool finish_scores(const decode_args &a, const tile_view &tile,
                                                     const row_state<NT> &rows,
                                                     const row_options<NT> &opt, int num_rows,
                                                     bool whole, float s[NT][4],
                                                     uint32_t hidden[NT][4])
{
    int lane = threadIdx.x & 31, g = lane / 4, t = lane & 3;
    bool some = false;
#pragma unroll
    for (int n = 0; n < NT; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            int row = 2 * n + (e & 1), token = tile.tile + g + (e & 2) * 4;
            bool real = 8 * n + 2 * t + (e & 1) < num_rows;
            bool inside = token >= tile.low && token < tile.high;
            if constexpr (PLAIN == FOLIO_F16 || PLAIN == FOLIO_BF16) {
                s[n][e] *= a.layer.scale;
            } else if constexpr (PLAIN != 0) {
                s[n][e] *= opt.factor[row];
            } else {
                float by = tile.fresh ? a.layer.scale : opt.factor[row];
                if (tile.scales != NULL) by *= tile.scales[g + (e & 2) * 4];
                s[n][e] = option_score<NT>(a, opt, row, s[n][e], by, token, real && inside);
            }
            if (!whole && (!inside || token < rows.begin[row] || token >= rows.end[row]))
                s[n][e] = -INFINITY;
            if (!PLAIN || !whole) {
                bool off = s[n][e] == -INFINITY;
                hidden[n][e] = __ballot_sync(ALL_LANES, off);
                some |= off && real && inside;
            }
        }
    }
    if (PLAIN && whole) return false;
    return __any_sync(ALL_LANES, some);
}

/* Scores become probabilities; running maxima and sums go on. Returns whether alpha is not 1 somewhere. */
template <int NT>
static __device__ __forceinline__ bool soften(row_state<NT> &rows, float s[NT][4],
                                              float alpha[2 * NT], bool wide)
{
    bool grown = false;
#pragma unroll
    for (int n = 0; n < NT; n++) {
        if (n > 0 && !wide) break;
#pragma unroll
        for (int e = 0; e < 2; e++) {
            int row = 2 * n + e;
            float m = fmaxf(rows.m[row], row_max(fmaxf(s[n][e], s[n][e + 2])));
            float base = exp_base(m);
            alpha[row] = exp_to(rows.m[row], base);
            grown |= m != rows.m[row];
            rows.m[row] = m;
            s[n][e] = exp_to(s[n][e], base);
            s[n][e + 2] = exp_to(s[n][e + 2], base);
            rows.l[row] = rows.l[row] * alpha[row] + s[n][e] + s[n][e + 2];
        }
    }
    return __any_sync(ALL_LANES, grown);
}

template <typename T, int VMAX, int NT, class VALUES>
static __device__ __forceinline__ void add_tile(float o[VMAX / 16][NT][4], const VALUES &values,
                                                int steps, float s[NT][4], int num_rows, bool apart,
                                                const uint32_t hidden[NT][4])
{
    uint32_t p[NT][2];
#pragma unroll
    for (int n = 0; n < NT; n++) {
        p[n][0] = movmatrix(pack<T>(s[n][0], s[n][1]));
        p[n][1] = movmatrix(pack<T>(s[n][2], s[n][3]));
    }
    if (apart) add_values_apart<T, VMAX, NT>(o, values, steps, p, num_rows, hidden);
    else add_values<T, VMAX, NT>(o, values, steps, p, num_rows > 8);
}

/*
 * V of an 8-bit cache: probabilities times V's scales could leave f16's range, so they are divided by the
 * largest scale so far, which grows like a maximum, and lifted away from f16's smallest numbers. Returns
 * what the sums so far must be multiplied with.
 */
#define LIFT 16384.0f
template <int NT>
static __device__ __forceinline__ float scale_values(const decode_args &a, const tile_view &tile,
                                                     const uint32_t hidden[NT][4], float s[NT][4],
                                                     float *largest)
{
    int lane = threadIdx.x & 31, g = lane / 4;
    float low = tile.fresh ? 1.0f : a.layer.v.scale, high = low;
    if (tile.scales != NULL) {
        low = tile.scales[16 + g];
        high = tile.scales[24 + g];
    }
    float m = fmaxf(*largest, row_max(fmaxf(low, high)));
    if (!(m < INFINITY)) m = *largest; /* an infinite scale makes its products infinite by itself */
    float by = m > 0.0f ? LIFT / m : LIFT, ago = m > 0.0f ? *largest / m : 1.0f;
    *largest = m;
#pragma unroll
    for (int n = 0; n < NT; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            bool off = hidden[n][e] >> lane & 1;
            s[n][e] = off ? 0.0f : s[n][e] * ((e & 2 ? high : low) * by);
        }
    }
    return ago;
}

/* ------------------------------------------------------------------ the kernel */

static __device__ __forceinline__ block_shared carve_shared(const decode_args &a, char *memory,
                                                            int q_forms, int warp)
{
    block_shared sh;
    sh.out = (float *)memory;
    memory += a.out_copies * a.out_size * sizeof(float);
    sh.entries = (folioi_decode_item *)memory;
    memory += MAX_ENTRIES * sizeof(folioi_decode_item);
    sh.warp_m = (float *)memory;
    sh.warp_l = sh.warp_m + MAX_WARPS * 16;
    sh.q_factor = sh.warp_l + MAX_WARPS * 16;
    sh.flag = (int *)(sh.q_factor + 16);
    memory += (2 * MAX_WARPS * 16 + 32) * sizeof(float);
    sh.q = (uint16_t *)memory;
    memory += q_forms * 16 * a.q_stride * sizeof(uint16_t);
    sh.notes = (tile_note *)memory + warp * a.num_stages;
    memory += a.num_warps * a.num_stages * sizeof(tile_note);
    sh.scales = (float *)memory + warp * a.num_stages * 32;
    if (a.layer.k.scales != NULL) memory += a.num_warps * a.num_stages * 32 * sizeof(float);
    sh.barriers = (uint64_t *)memory + warp * a.num_stages;
    memory += a.num_warps * a.num_stages * sizeof(uint64_t);
    memory += -(uintptr_t)memory % STAGE_ALIGN;
    sh.stages = memory + (int64_t)warp * a.num_stages * a.stage_bytes;
    return sh;
}

/* Keys that query i sees, called and not inlined: code that is cold when a launch begins costs time. */
static __device__ __noinline__ int2 seen_keys(const decode_args &a, const folioi_cuda_seq &s, int i)
{
    folioi_range seen = seq_keys(&s, a.layer.window_left, a.layer.window_right, i);
    return {seen.begin, seen.end};
}

template <int NT>
static __device__ __forceinline__ void start_rows(const decode_args &a, const folioi_cuda_seq &s,
                                                  int num_rows, int first_row, int *whole_begin,
                                                  int *whole_end, row_state<NT> &rows)
{
    int t = threadIdx.x & 3;
    int2 first = seen_keys(a, s, 0), last = first;
    if (s.query_len > 1) last = seen_keys(a, s, s.query_len - 1);
    *whole_begin = last.x;
    *whole_end = first.y;
#pragma unroll
    for (int row = 0; row < 2 * NT; row++) {
        int r = 8 * (row / 2) + 2 * t + (row & 1);
        int2 seen = first;
        if (s.query_len > 1) seen = seen_keys(a, s, (first_row + r) / a.group);
        rows.m[row] = -INFINITY;
        rows.l[row] = 0.0f;
        rows.begin[row] = r < num_rows ? seen.x : 0;
        rows.end[row] = r < num_rows ? seen.y : 0;
    }
}

template <int NT>
static __device__ __forceinline__ void start_options(const decode_args &a, const folioi_cuda_seq &s,
                                                     int seq, int num_rows, int first_row,
                                                     int kv_head, const block_shared &sh,
                                                     row_options<NT> &opt)
{
    int t = threadIdx.x & 3;
    bool converted = a.layer.dtype == FOLIO_BF16 && !cache_is_bf16(a);
#pragma unroll
    for (int row = 0; row < 2 * NT; row++) {
        int r = 8 * (row / 2) + 2 * t + (row & 1);
        int i = (first_row + r) / a.group, h = kv_head * a.group + (first_row + r) % a.group;
        opt.factor[row] = a.layer.scale * a.layer.k.scale * (converted ? sh.q_factor[r] : 1.0f);
        opt.slope[row] = 0.0f;
        opt.bias[row] = 0;
        opt.own[row] = s.first_query_pos + i - s.first_key_pos;
        if (r >= num_rows) continue;
        if (a.layer.slopes != NULL) opt.slope[row] = a.layer.slopes[h];
        const int64_t *strides = a.layer.bias.strides;
        opt.bias[row] = seq * strides[0] + h * strides[1] + i * strides[2];
    }
}

template <int NT>
static __device__ __forceinline__ void general_scores(const decode_args &a, const tile_view &tile,
                                                      const block_shared &sh, bool wide,
                                                      float s[NT][4])
{
    int steps = (a.layer.k_dims + 15) / 16, size = FOLIOI_DECODE_MAX_ROWS * a.q_stride;
    bool q_bf16 = a.layer.dtype == FOLIO_BF16;
    const uint16_t *q = sh.q;
    if (tile.fresh || a.layer.kv_dtype == a.layer.dtype) {
        if (q_bf16) scores_16<__nv_bfloat16, NT>(s, tile.k, a.k_stride, steps, q, a.q_stride, wide);
        else scores_16<__half, NT>(s, tile.k, a.k_stride, steps, q, a.q_stride, wide);
        return;
    }
    if (a.layer.kv_dtype == FOLIO_BF16) {
        scores_16<__nv_bfloat16, NT>(s, tile.k, a.k_stride, steps, q + size, a.q_stride, wide);
        scores_16<__nv_bfloat16, NT>(s, tile.k, a.k_stride, steps, q + 2 * size, a.q_stride, wide);
        return;
    }
    if (q_bf16) q += size;
    switch (a.layer.kv_dtype) {
    case FOLIO_FP8_E4M3:
        scores_8<FOLIO_FP8_E4M3, NT>(s, tile.k, a.k_stride, steps, q, a.q_stride, wide);
        break;
    case FOLIO_FP8_E5M2:
        scores_8<FOLIO_FP8_E5M2, NT>(s, tile.k, a.k_stride, steps, q, a.q_stride, wide);
        break;
    case FOLIO_INT8:
        scores_8<FOLIO_INT8, NT>(s, tile.k, a.k_stride, steps, q, a.q_stride, wide);
        break;
    default: scores_16<__half, NT>(s, tile.k, a.k_stride, steps, q, a.q_stride, wide);
    }
}

template <int VMAX, int NT>
static __device__ __forceinline__ void general_values(const decode_args &a, const tile_view &tile,
                                                      float s[NT][4], int num_rows, bool apart,
                                                      const uint32_t hidden[NT][4],
                                                      float o[VMAX / 16][NT][4])
{
    int steps = (a.layer.v_dims + 15) / 16;
    folio_dtype type = tile.fresh ? a.layer.dtype : a.layer.kv_dtype;
    uint32_t v = tile.v;
    switch (type) {
    case FOLIO_FP8_E4M3:
        add_tile<__half, VMAX, NT>(o, values_8<FOLIO_FP8_E4M3, 0>(v, a.v_stride), steps, s,
                                   num_rows, apart, hidden);
        break;
    case FOLIO_FP8_E5M2:
        add_tile<__half, VMAX, NT>(o, values_8<FOLIO_FP8_E5M2, 0>(v, a.v_stride), steps, s,
                                   num_rows, apart, hidden);
        break;
    case FOLIO_INT8:
        add_tile<__half, VMAX, NT>(o, values_8<FOLIO_INT8, 0>(v, a.v_stride), steps, s, num_rows,
                                   apart, hidden);
        break;
    case FOLIO_BF16:
        add_tile<__nv_bfloat16, VMAX, NT>(o, values_16<0>(v, a.v_stride), steps, s, num_rows, apart,
                                          hidden);
        break;
    default:
        add_tile<__half, VMAX, NT>(o, values_16<0>(v, a.v_stride), steps, s, num_rows, apart,
                                   hidden);
    }
}

/* PLAIN: 0, or the dtype of q, K, V and out, VMAX then being their head size. */
template <int VMAX, int NT, int PLAIN, int WARPS>
__global__ void __launch_bounds__(32 * WARPS, VMAX <= 128 ? 2 : 1)
    decode_kernel(const __grid_constant__ decode_args a)
{
    extern __shared__ __align__(128) char memory[];
    using T = typename std::conditional<PLAIN == FOLIO_BF16, __nv_bfloat16, __half>::type;
    constexpr bool Q_IN_REGISTERS = PLAIN != 0 && VMAX <= 128;
    constexpr bool EIGHT = PLAIN == FOLIO_FP8_E4M3 || PLAIN == FOLIO_FP8_E5M2;
    constexpr int Q_FORMS = PLAIN == 0 ? 3 : EIGHT ? 2 : Q_IN_REGISTERS ? 0 : 1;
    constexpr bool PACKED = PLAIN != 0 && !EIGHT && plain_packed(VMAX, 2);
    constexpr bool Q_EARLY = Q_IN_REGISTERS && !EIGHT;
    constexpr int Q_STEPS = Q_IN_REGISTERS ? VMAX / 16 : 1;
    int warp = threadIdx.x / 32;
    int kv_head = blockIdx.x / a.row_blocks % a.layer.num_kv_heads;
    int slot = blockIdx.x / (a.row_blocks * a.layer.num_kv_heads);
    int first_row = blockIdx.x % a.row_blocks * 8;
    block_shared sh = carve_shared(a, memory, Q_FORMS, warp);
    if (PLAIN == 0 && (a.layer.k_dims | a.layer.v_dims) % 16 != 0) {
        /* columns past the head size meet zeros of q; no copy ever writes there */
        for (int n = threadIdx.x & 31; n < a.num_stages * a.stage_bytes / 16; n += 32)
            ((uint4 *)sh.stages)[n] = make_uint4(0, 0, 0, 0);
        __syncwarp();
    }
    int item_begin = a.slot_begin[slot], item_end = a.slot_begin[slot + 1];
    sh.item_begin = item_begin;
    constexpr int CHUNKS = sizeof(folioi_decode_item) / 16;
    int kept = min(item_end - item_begin, MAX_ENTRIES) * CHUNKS;
    for (int n = threadIdx.x; n < kept; n += blockDim.x)
        ((uint4 *)sh.entries)[n] = ((const uint4 *)&a.items[item_begin])[n];
    __syncthreads();
    cursor c = {};
    c.item = item_begin;
    c.item_end = item_end;
    seek_item<PLAIN>(a, sh, c, warp, first_row);
    ask_block<PLAIN>(a, c, threadIdx.x & 31);
    int stage = 0, filled = 0; /* the oldest stage, and how many hold tiles */
    uint32_t phases = 0;       /* of the stages' barriers, a bit each */
    if constexpr (HAS_BULK_COPIES) {
        if ((threadIdx.x & 31) < a.num_stages)
            bulk_init(shared_address(sh.barriers + (threadIdx.x & 31)));
        bulk_fence();
        __syncwarp();
    }
    uint32_t q[Q_STEPS][NT][2];
    if constexpr (Q_EARLY)
        if (item_begin < item_end)
            load_q<VMAX, NT>(a, item_at(a, sh, item_begin)->sequence, first_row, kv_head, q);
    for (int n = item_begin; n < item_end; n++) {
        const folioi_decode_item &item = *item_at(a, sh, n);
        const folioi_cuda_seq &s = item.sequence;
        int num_rows = min(s.query_len * a.group - first_row, 8 * NT);
        if (num_rows <= 0) continue;
        bool wide = num_rows > 8;
        row_state<NT> rows;
        row_options<NT> opt;
        float o[VMAX / 16][NT][4] = {};
        float largest_scale = 0.0f;
        int whole_begin, whole_end;
        start_rows<NT>(a, s, num_rows, first_row, &whole_begin, &whole_end, rows);
        if constexpr (!Q_EARLY) {
            stage_q(a, s, num_rows, first_row, kv_head, Q_FORMS, sh.q, sh.q_factor);
            __syncthreads();
        }
        if constexpr (EIGHT) {
            int form = a.layer.dtype == FOLIO_BF16 ? 16 * a.q_stride : 0;
            load_q_turned<VMAX, NT>(sh.q + form, a.q_stride, q);
        }
        if constexpr (PLAIN == 0 || EIGHT)
            start_options<NT>(a, s, item.seq, num_rows, first_row, kv_head, sh, opt);
        for (;;) {
            if (filled < a.num_stages && c.item < c.item_end) {
                int next = stage + filled;
                if (next >= a.num_stages) next -= a.num_stages;
                fetch<VMAX, PLAIN>(a, c, sh, next, kv_head, warp, first_row);
                filled++;
                continue;
            }
            if (filled == 0) break;
            __syncwarp();
            int4 note = *(const int4 *)&sh.notes[stage];
            if (note.x >> 1 != n) break;
            if (comes_in_bulk<VMAX, PLAIN>(a, note.y, note.z, note.w)) {
                if constexpr (HAS_BULK_COPIES)
                    bulk_wait(shared_address(sh.barriers + stage), phases >> stage & 1);
                phases ^= 1u << stage;
            } else {
                wait_stage(filled);
            }
            tile_view tile = {shared_address(sh.stages) + stage * a.stage_bytes,
                              0,
                              NULL,
                              note.y,
                              note.z,
                              note.w,
                              (note.x & 1) != 0};
            tile.v = tile.k + 16 * a.k_stride;
            bool whole =
                note.y >= max(whole_begin, note.z) && note.y + 16 <= min(whole_end, note.w);
            float sc[NT][4] = {}, alpha[2 * NT];
            uint32_t hidden[NT][4];
            if constexpr (EIGHT) {
                scores_plain_8<PLAIN, VMAX, NT>(sc, tile.k, q, wide);
            } else if constexpr (PACKED) {
                scores_packed<T, VMAX, NT>(sc, tile.k, q, wide);
            } else if constexpr (Q_IN_REGISTERS) {
                scores_plain<T, VMAX, NT>(sc, tile.k, q, wide);
            } else if constexpr (PLAIN != 0) {
                scores_16<T, NT>(sc, tile.k, a.k_stride, VMAX / 16, sh.q, a.q_stride, wide);
            } else {
                if (a.layer.k.scales != NULL && !tile.fresh) tile.scales = sh.scales + stage * 32;
                general_scores<NT>(a, tile, sh, wide, sc);
            }
            bool apart = finish_scores<PLAIN, NT>(a, tile, rows, opt, num_rows, whole, sc, hidden);
            bool grown = soften<NT>(rows, sc, alpha, wide);
            if constexpr (EIGHT) {
                if (grown) rescale<VMAX, NT>(o, alpha, wide);
                add_tile<__half, VMAX, NT>(o, values_8<PLAIN, VMAX>(tile.v, 0), VMAX / 16, sc,
                                           num_rows, apart, hidden);
            } else if constexpr (PACKED) {
                if (grown) rescale<VMAX, NT>(o, alpha, wide);
                add_tile<T, VMAX, NT>(o, values_packed<VMAX>(tile.v), VMAX / 16, sc, num_rows,
                                      apart, hidden);
            } else if constexpr (PLAIN != 0) {
                if (grown) rescale<VMAX, NT>(o, alpha, wide);
                add_tile<T, VMAX, NT>(o, values_16<VMAX>(tile.v, 0), VMAX / 16, sc, num_rows, apart,
                                      hidden);
            } else {
                if (a.kv_bytes == 1) {
                    float ago = scale_values<NT>(a, tile, hidden, sc, &largest_scale);
                    grown |= ago != 1.0f;
#pragma unroll
                    for (int r = 0; r < 2 * NT; r++) alpha[r] *= ago;
                }
                if (grown) rescale<VMAX, NT>(o, alpha, wide);
                general_values<VMAX, NT>(a, tile, sc, num_rows, apart, hidden, o);
            }
            __syncwarp();
            filled--;
            if (++stage == a.num_stages) stage = 0;
        }
        if constexpr (Q_EARLY) /* the next item's, on its way while this one ends */
            if (n + 1 < item_end)
                load_q<VMAX, NT>(a, item_at(a, sh, n + 1)->sequence, first_row, kv_head, q);
        int steps = PLAIN != 0 ? VMAX / 16 : (a.layer.v_dims + 15) / 16;
        dim_order order = PACKED                                     ? PACKED_DIMS
                          : EIGHT || (PLAIN == 0 && a.kv_bytes == 1) ? TURNED_DIMS
                                                                     : PLAIN_DIMS;
        if constexpr (EIGHT) {
            float by[2 * NT];
#pragma unroll
            for (int r = 0; r < 2 * NT; r++) by[r] = a.layer.v.scale;
            rescale<VMAX, NT>(o, by, wide);
        }
        if constexpr (PLAIN == 0) {
            float by[2 * NT];
#pragma unroll
            for (int r = 0; r < 2 * NT; r++) by[r] = largest_scale * (1.0f / LIFT);
            if (a.kv_bytes == 1) rescale<VMAX, NT>(o, by, wide);
        }
        add_warps<VMAX, NT>(a, sh, rows, o, steps, order, warp, wide);
        end_item(a, sh, s, item, num_rows, first_row, kv_head);
        __syncthreads();
    }
    cp_async_wait<0>();
    store_padding(a);
}

/* ------------------------------------------------------------------ host */

/* How an instance lies in shared memory. */
typedef struct block_fit {
    int num_warps, num_stages, blocks_per_sm, row_blocks, rows, q_forms;
    int k_stride, v_stride, stage_bytes, q_stride, out_stride, out_copies;
    bool scales;
    size_t shared_bytes;
} block_fit;

/* An odd number of 16-byte chunks per row keeps ldmatrix free of bank conflicts. */
static int row_stride(int dims, int bytes) { return ((dims * bytes + 15) / 16 | 1) * 16; }

static size_t fit_bytes(const block_fit *f)
{
    size_t bytes = (size_t)f->out_copies * f->rows * f->out_stride * sizeof(float) +
                   MAX_ENTRIES * sizeof(folioi_decode_item) +
                   (2 * MAX_WARPS * 16 + 32) * sizeof(float) +
                   (size_t)f->q_forms * 16 * f->q_stride * sizeof(uint16_t) + STAGE_ALIGN;
    size_t stage = f->stage_bytes + sizeof(tile_note) + sizeof(uint64_t) +
                   (f->scales ? 32 * sizeof(float) : 0);
    return bytes + stage * f->num_warps * f->num_stages;
}

static bool fits(block_fit *f, const folioi_cuda_sm *sm, int blocks, int warps, int stages)
{
    f->blocks_per_sm = blocks;
    f->num_warps = warps;
    f->num_stages = stages;
    f->shared_bytes = fit_bytes(f);
    /* the device keeps 1 KB of every block for itself */
    size_t room = (size_t)sm->shared_bytes / (size_t)blocks - 1024;
    return f->shared_bytes <= room && f->shared_bytes <= (size_t)sm->shared_of_block;
}

/* Warps of a block: one warp waits for its own results most of the time, so as many as registers allow. */
static int most_warps(bool plain, int rows, int dims, int kv_bytes)
{
    if (rows > 8) return 4;
    if (!plain) return 6;
    return dims == 64 || kv_bytes == 1 ? 8 : 6;
}

/* Do the general instances have one for few rows? */
static bool few_rows(int v_dims, int rows) { return v_dims <= 128 && rows <= 8; }

/* stage_elem: bytes of the widest number a stage may hold. */
static block_fit fit_block(const folioi_cuda_sm *sm, bool plain, int k_dims, int v_dims,
                           int kv_bytes, int stage_elem, int rows, bool scales)
{
    block_fit f = {};
    f.scales = scales;
    f.row_blocks = v_dims > 256 ? 2 : 1;
    f.rows = (plain ? rows <= 8 : few_rows(v_dims, rows)) || f.row_blocks == 2 ? 8 : 16;
    f.out_copies = plain && f.rows == 8 ? 2 : 1;
    f.q_forms = !plain ? 3 : kv_bytes == 1 ? 2 : k_dims <= 128 ? 0 : 1;
    f.k_stride = row_stride(k_dims, stage_elem);
    f.v_stride = row_stride((int)round_up(v_dims, 16), stage_elem); /* turned rows fill 16 dims */
    f.stage_bytes = 16 * (f.k_stride + f.v_stride);
    f.q_stride = (int)round_up(k_dims, 16) + 8;
    f.out_stride = (int)round_up(v_dims, 32) + 4;
    int most = most_warps(plain, plain || few_rows(v_dims, rows) ? rows : 16, k_dims, kv_bytes);
    for (int warps = most; warps >= 4; warps--)
        for (int stages = 6; stages >= (warps > 4 ? 2 : 3); stages--)
            if (fits(&f, sm, 2, warps, stages)) return f;
    for (int stages = 6; stages >= 2; stages--)
        if (fits(&f, sm, 1, most, stages)) return f;
    fits(&f, sm, 1, 2, 2);
    return f;
}

/* Bytes by which all rows of K and V can be copied; below 4 they are copied number by number. */
static int widest_copy(const folioi_cuda_layer *y, int elem)
{
    for (int bytes = 16; bytes >= 4; bytes /= 2) {
        bool fit = y->k_dims * elem % bytes == 0 && y->v_dims * elem % bytes == 0;
        if (y->cached)
            fit = fit && folioi_cuda_side_aligned(&y->k, elem, bytes) &&
                  folioi_cuda_side_aligned(&y->v, elem, bytes);
        /* beside an 8-bit cache new rows are copied slowly */
        if ((!y->cached || y->append) && elem == 2)
            fit = fit && folioi_cuda_rows_aligned(&y->new_k, 2, bytes) &&
                  folioi_cuda_rows_aligned(&y->new_v, 2, bytes);
        if (fit) return bytes;
    }
    return elem;
}

static bool plain_dims(int k_dims, int v_dims, int kv_bytes)
{
    if (k_dims != v_dims) return false;
    return k_dims == 128 || (kv_bytes == 2 && (k_dims == 64 || k_dims == 256));
}

static bool is_plain(const folioi_cuda_layer *y)
{
    bool fp8 = dtype_is_fp8(y->kv_dtype);
    if (!y->cached || y->append || (y->kv_dtype != y->dtype && !fp8)) return false;
    if (!plain_dims(y->k_dims, y->v_dims, fp8 ? 1 : 2)) return false;
    if (y->soft_cap > 0.0f || y->slopes != NULL || y->bias.data != NULL) return false;
    return widest_copy(y, fp8 ? 1 : 2) == 16 && folioi_cuda_rows_aligned(&y->q, 2, 4);
}

extern "C" bool folioi_cuda_decode_takes(const folioi_cuda_layer *y)
{
    if (!dtype_is_16_bit(y->dtype)) return false;
    if (y->k_dims > 512 || y->v_dims > 512 || y->num_heads / y->num_kv_heads > 16) return false;
    if (!y->cached) return true;
    return y->kv_dtype != FOLIO_F32 && folioi_cuda_has_rows(&y->k) && folioi_cuda_has_rows(&y->v);
}

extern "C" void folioi_cuda_decode_init(folioi_cuda_decode_plan *plan,
                                        const folioi_cuda_decode_limits *l)
{
    int group = l->num_heads / l->num_kv_heads;
    *plan = {};
    int64_t rows = l->max_query_len > 0 ? (int64_t)l->max_query_len * group : 16;
    plan->max_rows = (int32_t)(rows > 16 ? 16 : round_up(rows, 2));
    plan->sm = l->sm;
    block_fit f = fit_block(&l->sm, plain_dims(l->k_dims, l->v_dims, l->kv_bytes), l->k_dims,
                            l->v_dims, l->kv_bytes, l->kv_bytes, plan->max_rows, false);
    int64_t slots = (int64_t)l->sm.count * f.blocks_per_sm / l->num_kv_heads;
    plan->num_slots = (int32_t)(slots < 1 ? 1 : slots);
    plan->max_items = l->max_seqs + plan->num_slots;
    plan->max_stores = 2 * (int64_t)plan->num_slots;
    if (l->batch_invariant) {
        int64_t len = round_up(ceil_div(l->max_seq_len, 64), 64); /* at most 64 parts */
        plan->split_len = (int32_t)(len < 1024 ? 1024 : len);
        plan->max_items = l->max_seqs * (ceil_div(l->max_seq_len, plan->split_len) + 1);
        plan->max_stores = plan->max_items;
    }
    plan->schedule_bytes = (size_t)(round_up((plan->num_slots + 1) * 4, 256) +
                                    plan->max_items * (int64_t)sizeof(folioi_decode_item));
    plan->counter_bytes = (size_t)round_up(l->max_seqs * l->num_kv_heads * 2 * 4, 256);
    plan->workspace_bytes = plan->counter_bytes + (size_t)(plan->max_stores * l->num_kv_heads *
                                                           plan->max_rows * (l->v_dims + 2) * 4);
}

extern "C" folioi_decode_table folioi_cuda_decode_table(const folioi_cuda_decode_plan *plan)
{
    return {(int32_t *)plan->schedule,
            (folioi_decode_item *)(plan->schedule + round_up((plan->num_slots + 1) * 4, 256))};
}

static void fill_args(decode_args *a, const folioi_cuda_layer *y, const folioi_cuda_step *step,
                      const folioi_cuda_decode_plan *plan, char *workspace)
{
    a->layer = *y;
    if (!y->cached) a->layer.kv_dtype = y->dtype;
    if (a->layer.kv_dtype != FOLIO_INT8) a->layer.k.scales = a->layer.v.scales = NULL;
    if (!dtype_is_fp8(a->layer.kv_dtype)) a->layer.k.scale = a->layer.v.scale = 1.0f;
    folioi_decode_table table = folioi_cuda_decode_table(plan);
    a->blocks = step->blocks;
    a->counts = step->counts;
    a->seqs = step->seqs;
    a->slot_begin = table.slot_begin;
    a->items = table.items;
    a->out_quads = y->v_dims % 4 == 0 && folioi_cuda_rows_aligned(&y->out, 2, 8);
    a->counters = (int32_t *)workspace;
    a->partials = (float *)(workspace + plan->counter_bytes);
    a->out_rows = step->out_rows;
    a->max_rows = plan->max_rows;
    a->group = y->num_heads / y->num_kv_heads;
    a->kv_bytes = dtype_is_16_bit(a->layer.kv_dtype) ? 2 : 1;
    a->copy_bytes = widest_copy(&a->layer, a->kv_bytes);
    a->k_copies = y->k_dims * a->kv_bytes / a->copy_bytes;
    a->v_copies = y->v_dims * a->kv_bytes / a->copy_bytes;
    a->block_shift = -1;
    for (int shift = 0; shift < 31; shift++)
        if (y->block_size == 1 << shift) a->block_shift = shift;
    a->one_block_tiles = y->block_size % 16 == 0;
    a->bulk = a->one_block_tiles && y->k.at.token_tile_stride == y->k_dims &&
              y->v.at.token_tile_stride == y->v_dims;
    a->k_inverse = ((1u << 22) + a->k_copies - 1) / a->k_copies;
    a->v_inverse = ((1u << 22) + a->v_copies - 1) / a->v_copies;
}

typedef void decode_fn(decode_args);

static cudaError_t launch(decode_fn *kernel, decode_args *a, const block_fit *f, int slots,
                          cudaStream_t stream)
{
    a->num_warps = f->num_warps;
    a->num_stages = f->num_stages;
    a->row_blocks = f->row_blocks;
    a->k_stride = f->k_stride;
    a->v_stride = f->v_stride;
    a->stage_bytes = f->stage_bytes;
    a->q_stride = f->q_stride;
    a->out_stride = f->out_stride;
    a->out_copies = f->out_copies;
    a->out_size = f->rows * f->out_stride;
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                             (int)f->shared_bytes);
    if (error != cudaSuccess) return error;
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, 100);
    if (error != cudaSuccess) return error;
    int blocks = slots * a->layer.num_kv_heads * f->row_blocks;
    kernel<<<blocks, 32 * f->num_warps, f->shared_bytes, stream>>>(*a);
    return cudaGetLastError();
}

/* Instances: few rows (at most 8) or up to 16, and the warps that most_warps says. */
#define INSTANCE(dims, type, warps)                                                                \
    (few ? decode_kernel<dims, 1, type, warps> : decode_kernel<dims, 2, type, 4>)

static decode_fn *choose(const folioi_cuda_layer *y, bool plain, bool few)
{
    if (!plain && y->v_dims <= 128 && few) return decode_kernel<128, 1, 0, 6>;
    if (!plain && y->v_dims <= 128) return decode_kernel<128, 2, 0, 4>;
    if (!plain && y->v_dims <= 256) return decode_kernel<256, 2, 0, 4>;
    if (!plain) return decode_kernel<512, 1, 0, 4>;
    if (y->kv_dtype == FOLIO_FP8_E4M3) return INSTANCE(128, FOLIO_FP8_E4M3, 8);
    if (y->kv_dtype == FOLIO_FP8_E5M2) return INSTANCE(128, FOLIO_FP8_E5M2, 8);
    bool bf16 = y->dtype == FOLIO_BF16;
    if (y->k_dims == 64) return bf16 ? INSTANCE(64, FOLIO_BF16, 8) : INSTANCE(64, FOLIO_F16, 8);
    if (y->k_dims == 128) return bf16 ? INSTANCE(128, FOLIO_BF16, 6) : INSTANCE(128, FOLIO_F16, 6);
    return bf16 ? INSTANCE(256, FOLIO_BF16, 6) : INSTANCE(256, FOLIO_F16, 6);
}

extern "C" cudaError_t folioi_cuda_decode(const folioi_cuda_layer *y, const folioi_cuda_step *step,
                                          const folioi_cuda_decode_plan *plan, int32_t rows,
                                          char *workspace, cudaStream_t stream)
{
    decode_args a = {};
    fill_args(&a, y, step, plan, workspace);
    bool plain = is_plain(y), few = rows <= 8;
    int stage_elem = !plain && y->append ? 2 : a.kv_bytes;
    block_fit f = fit_block(&plan->sm, plain, y->k_dims, y->v_dims, a.kv_bytes, stage_elem, rows,
                            a.layer.k.scales != NULL);
    return launch(choose(&a.layer, plain, few), &a, &f, plan->num_slots, stream);
}
