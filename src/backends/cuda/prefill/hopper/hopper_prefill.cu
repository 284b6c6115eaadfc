/*
 * hopper_prefill.cu: prefill on Hopper: K and V in native pages or in rows, of 16 bits or widened to these. As many blocks as
 * multiprocessors take tiles until there are none. Of a block's warpgroups the last loads, and the others compute, each 64 rows
 * of a tile; of 8-bit K and V one more widens:
 *
 *   step:  Q K^T of this key tile, P V of the one before | both on their way, softmax of this one under P V
 *   end:   the last P V, Q K^T of the next tile          | out is stored under that
 *
 * Weights P are in the registers that their scores came in.
 */
#include "backends/cuda/prefill/hopper/hopper_launch.h"
#include "backends/cuda/prefill/hopper/hopper_load.h"
#include "backends/cuda/prefill/hopper/hopper_slow.h"
#include "backends/cuda/prefill/hopper/hopper_widen.h"

#include <type_traits>

static __device__ __forceinline__ void release(const uint64_t &barrier)
{
    if (threadIdx.x % WARP == 0) barrier_arrive(shared_address(&barrier));
}

/* The warp's rows of q to registers, if they are held there; their place is free then. */
template <class I>
static __device__ __forceinline__ void load_q(typename I::query &q, const hopper_memory<I> &m,
                                              int warpgroup)
{
    if (!I::HOLDS_Q) return;
    int lane = fresh_lane(), row = (int)threadIdx.x / WARP * 16 + lane % 16;
    uint32_t from = m.q() + row * (I::PANEL * 2);
#pragma unroll
    for (int i = 0; i < I::DK / 16; i++) {
        int unit = (i % I::PANEL_STEPS * 2 + lane / 16) ^ lane % 8 / (64 / I::PANEL);
        ldmatrix(&q[4 * i], from + i / I::PANEL_STEPS * I::Q_PANEL_BYTES + unit * 16);
    }
    __syncwarp();
    release(m.sh().q_emptied[warpgroup]);
}

/* Scores of the first N keys of a stage. */
template <class I, int N>
static __device__ __forceinline__ void score_keys(typename I::scores &s, const typename I::query &q,
                                                  const hopper_memory<I> &m, int stage)
{
    constexpr int STEPS = I::PANEL_STEPS;
    uint64_t k = matrix_at<I::PANEL>(m.kv() + stage * I::K_STAGE, 16, I::K_STEP);
    if constexpr (I::HOLDS_Q) {
        multiply_rows<typename I::T, N, 0>(s, q, k);
#pragma unroll
        for (int i = 1; i < I::DK / 16; i++)
            multiply_rows<typename I::T, N, 1>(
                s, q + 4 * i, k + (i / STEPS * I::PANEL_STEP + i % STEPS * 32) / 16);
    } else {
        int warpgroup = __shfl_sync(ALL_LANES, threadIdx.x / 128, 0);
        uint64_t rows = matrix_at<I::PANEL>(m.q() + warpgroup * (WARPGROUP_ROWS * I::PANEL * 2), 16,
                                            I::PANEL_STEP);
        multiply_rows<typename I::T, N, 0>(s, rows, k);
#pragma unroll
        for (int i = 1; i < I::DK / 16; i++)
            multiply_rows<typename I::T, N, 1>(
                s, rows + (i / STEPS * I::Q_PANEL_BYTES + i % STEPS * 32) / 16,
                k + (i / STEPS * I::PANEL_STEP + i % STEPS * 32) / 16);
    }
}

/* Weights times V of the first PAGES pages of a stage. */
template <class I, int PAGES>
static __device__ __forceinline__ void add_values(typename I::sums &o, const typename I::weights &p,
                                                  const hopper_memory<I> &m, int stage, int add)
{
    uint64_t v =
        matrix_at<I::PANEL>(m.kv() + I::V_AT + stage * I::V_STAGE, I::PANEL_STEP, I::V_STEP);
    multiply_columns<typename I::W>(o, p, v, add);
#pragma unroll
    for (int i = 1; i < PAGES; i++)
        multiply_columns<typename I::W>(o, p + 4 * i, v + i * (2 * I::V_STEP / 16), 1);
}

/* V of a stage is there, where it does not come with K. */
template <class I>
static __device__ __forceinline__ void await_values(const hopper_memory<I> &m,
                                                    const stage_at<I::STAGES> &at)
{
    if constexpr (I::SPLIT) bulk_wait(shared_address(&m.sh().v_filled[at.stage]), at.phase);
}

template <class I>
static __device__ __forceinline__ void release_keys(const hopper_memory<I> &m,
                                                    const stage_at<I::STAGES> &at,
                                                    bool is_none = false)
{
    if constexpr (I::SPLIT) release(m.sh().emptied[is_none ? I::STAGES : at.stage]);
}

template <class I>
static __device__ __forceinline__ void release_values(const hopper_memory<I> &m,
                                                      const stage_at<I::STAGES> &at)
{
    release(I::SPLIT ? m.sh().v_emptied[at.stage] : m.sh().emptied[at.stage]);
}

/* All scores of a tile are there: its q is not read any more. */
template <class I>
static __device__ __forceinline__ void release_q(const hopper_memory<I> &m, bool is_last)
{
    if constexpr (!I::HOLDS_Q)
        if (is_last) release(m.sh().q_emptied[threadIdx.x / 128]);
}

/* By what scores are multiplied when they become weights: with options they have been, and where each key has its scale. */
template <class I>
static __device__ __forceinline__ float scale_of(const hopper_args &a, const tile_of<I> &t)
{
    if constexpr (I::FP8) return t.scale_log2;
    else return I::OPTIONS || I::INT8 ? 1.0f : a.scale_log2;
}

/* int8: scores of a stage's keys are multiplied with the keys' scales. */
template <class I>
static __device__ __forceinline__ void scale_keys(typename I::scores &s, const hopper_memory<I> &m,
                                                  int stage)
{
    if constexpr (I::INT8) {
        uint32_t from = shared_address(m.sh().key_scales[stage]) + fresh_lane() % 4 * 8;
#pragma unroll
        for (int j = 0; j < I::KEYS / 8; j++) {
            uint2 two = load_shared(from + j * 32);
            float even = __uint_as_float(two.x), odd = __uint_as_float(two.y);
            s[4 * j] *= even;
            s[4 * j + 1] *= odd;
            s[4 * j + 2] *= even;
            s[4 * j + 3] *= odd;
        }
    }
}

/* One key tile, and the values of the one before it, of which PAGES pages have weights. last_key: where the tile's last begins. */
template <class I, int PAGES, bool MASKED, bool WHOLE>
static __device__ __forceinline__ void step(const hopper_args &a, const hopper_memory<I> &m,
                                            const tile_of<I> &t, const typename I::query &q,
                                            typename I::scores &s, typename I::sums &o,
                                            typename I::weights &p, row_sums &r,
                                            const row_options &opt, const common_keys &all,
                                            stage_at<I::STAGES> &at, int32_t first_key, int add,
                                            int32_t last_key)
{
    stage_at<I::STAGES> before = at;
    at.step();
    bulk_wait(shared_address(&m.sh().filled[at.stage]), at.phase);
    products_begin();
    score_keys<I, I::KEYS>(s, q, m, at.stage);
    products_commit();
    await_values(m, before);
    add_values<I, PAGES>(o, p, m, before.stage, add);
    products_commit();
    products_wait<1>();
    products_ready(s);
    scale_keys<I>(s, m, at.stage);
    release_keys(m, at);
    release_q(m, first_key == last_key);
    if (I::OPTIONS) apply_options<I, I::KEYS>(s, a, opt, first_key);
    if (MASKED && (first_key < all.begin || first_key + I::KEYS > all.end)) {
        products_wait<0>(); /* masks need registers */
        mask<I, I::KEYS, WHOLE, false>(s, a, t, all, first_key);
    }
    raise_base<I, I::KEYS, false>(s, r, scale_of<I>(a, t));
    weigh<I, I::KEYS>(s, r, scale_of<I>(a, t));
    products_wait<0>();
    products_ready(o);
    release_values(m, before);
    rescale(o, r);
    pack_weights<I, I::KEYS>(p, s);
}

/* Weights of a tile's first key tile, N columns wide. */
template <class I, int N, bool WHOLE>
static __device__ __forceinline__ void start_tile(const hopper_args &a, const tile_of<I> &t,
                                                  typename I::scores &s, typename I::weights &p,
                                                  row_sums &r, const row_options &opt,
                                                  const common_keys &all, int32_t first_key)
{
    if (I::OPTIONS) apply_options<I, N>(s, a, opt, first_key);
    if ((!WHOLE && first_key < all.begin) || first_key + N > all.end)
        mask<I, N, WHOLE>(s, a, t, all, first_key);
    raise_base<I, N, true>(s, r, scale_of<I>(a, t));
    if (t.is_ragged) quiet_rows<I>(r, a, t);
    weigh<I, N>(s, r, scale_of<I>(a, t));
    pack_weights<I, N>(p, s);
}

/* The tile's sums of values are there, and are stored if it is whole. Returned: store_rows. */
template <class I, bool WHOLE, bool HOLDS>
static __device__ __forceinline__ uint32_t end_sums(const hopper_args &a, const hopper_memory<I> &m,
                                                    const tile_of<I> &t, typename I::sums &o,
                                                    const row_sums &r,
                                                    const stage_at<I::STAGES> &before)
{
    products_ready(o);
    release_values(m, before);
    if (WHOLE || t.num_parts == 1) return store_rows<I, HOLDS>(a, t, o, r);
    return 0;
}

/* Scores of the next tile's first keys, N columns wide, while this one is stored; or, with few registers, after that. */
template <class I, int N, bool WHOLE, bool HOLDS>
static __device__ __forceinline__ uint32_t end_tile(const hopper_args &a, const hopper_memory<I> &m,
                                                    const tile_of<I> &t, const typename I::query &q,
                                                    typename I::scores &s, typename I::sums &o,
                                                    const row_sums &r,
                                                    const stage_at<I::STAGES> &before,
                                                    const stage_at<I::STAGES> &at, bool is_last)
{
    constexpr bool stores_first = WHOLE ? I::WHOLE_STORES_FIRST : I::STORES_FIRST;
    uint32_t is_odd = 0;
    if constexpr (stores_first) {
        products_wait<0>();
        is_odd = end_sums<I, WHOLE, HOLDS>(a, m, t, o, r, before);
        if (!WHOLE && t.num_parts > 1) is_odd = store_part<I>(a, t, o, r);
    }
    products_begin();
    score_keys<I, N>(s, q, m, at.stage);
    products_commit();
    if constexpr (!stores_first) {
        products_wait<1>();
        is_odd = end_sums<I, WHOLE, HOLDS>(a, m, t, o, r, before);
    }
    products_wait<0>();
    products_ready(s);
    release_keys(m, at, is_last);
    return is_odd;
}

/*
 * WHOLE: tiles see all keys up to the end of each of their rows. No window begins within a key tile, and none is cut; rows
 * end in the last two key tiles. HOLDS: as store_rows has it; 0.3 to 0.8 % slower.
 */
template <class I, bool WHOLE, bool HOLDS>
static __device__ __forceinline__ void compute_all(const hopper_args &a, const hopper_memory<I> &m,
                                                   int warp)
{
    constexpr int KEYS = I::KEYS, STEP_KEYS = I::STEP_KEYS, PAGES = I::PAGES;
    constexpr int FEW_KEYS = I::EARLY ? KEYS / 2 : KEYS, FEW_PAGES = FEW_KEYS / PAGE_KEYS;
    constexpr bool MASKED = !WHOLE || KEYS < I::ROWS;
    int warpgroup = warp / 4;
    typename I::scores s;
    typename I::sums o;
    typename I::weights p;
    typename I::query q;
    row_sums r;
    row_options opt = {};
    stage_at<I::STAGES> at = {0, 0};
    tile_at on = {0, 0, 0};
    hopper_shared<I> &sh = m.sh();
    bulk_wait(shared_address(&sh.q_filled[warpgroup]), 0); /* which comes after the tile */
    tile_keys keys = sh.tiles[0].keys;
    if (keys.is_none) return;
    load_q(q, m, warpgroup);
    bulk_wait(shared_address(&sh.filled[0]), 0);
    products_begin();
    score_keys<I, KEYS>(s, q, m, 0);
    products_commit();
    products_wait<0>();
    products_ready(s);
    release_keys(m, at);
    do { /* scores of a tile's last keys are there */
        int here = on.place;
        const tile_of<I> &t = sh.tiles[here];
        common_keys all = t.common[warpgroup];
        int32_t i = keys.last, first = WHOLE ? 0 : keys.first;
        bool is_one = i == first, is_early = I::EARLY && keys.pages <= FEW_PAGES;
        release_q(m, is_one);
        scale_keys<I>(s, m, at.stage);
        if (I::OPTIONS) load_options<I>(opt, a, t);
        if (is_early) {
            if (keys.pages > 2) start_tile<I, FEW_KEYS, WHOLE>(a, t, s, p, r, opt, all, i * KEYS);
            else start_tile<I, STEP_KEYS, WHOLE>(a, t, s, p, r, opt, all, i * KEYS);
            products_forget(o);
            if (i > first)
                step<I, FEW_PAGES, true, WHOLE>(a, m, t, q, s, o, p, r, opt, all, at, --i * KEYS, 0,
                                                first * KEYS);
        } else {
            if (!I::EARLY || keys.pages > 6)
                start_tile<I, KEYS, WHOLE>(a, t, s, p, r, opt, all, i * KEYS);
            else start_tile<I, 3 * STEP_KEYS, WHOLE>(a, t, s, p, r, opt, all, i * KEYS);
            products_forget(o);
            if (i > first)
                step<I, PAGES, true, WHOLE>(a, m, t, q, s, o, p, r, opt, all, at, --i * KEYS, 0,
                                            first * KEYS);
        }
        while (i > first)
            step<I, PAGES, MASKED, WHOLE>(a, m, t, q, s, o, p, r, opt, all, at, --i * KEYS, 1,
                                          first * KEYS);
        stage_at<I::STAGES> before = at;
        at.step();
        await_values(m, before);
        if (is_one && is_early) {
            products_begin();
            add_values<I, FEW_PAGES>(o, p, m, before.stage, 0);
            products_commit();
        } else {
            products_begin();
            add_values<I, PAGES>(o, p, m, before.stage, !is_one);
            products_commit();
        }
        add_up(r);
        on.step();
        bulk_wait(shared_address(&sh.q_filled[warpgroup]), on.odd);
        keys = sh.tiles[on.place].keys;
        load_q(q, m, warpgroup);
        if (!keys.is_none) bulk_wait(shared_address(&sh.filled[at.stage]), at.phase);
        uint32_t is_odd;
        if (I::EARLY && keys.pages <= FEW_PAGES)
            is_odd =
                end_tile<I, FEW_KEYS, WHOLE, HOLDS>(a, m, t, q, s, o, r, before, at, keys.is_none);
        else
            is_odd = end_tile<I, KEYS, WHOLE, HOLDS>(a, m, t, q, s, o, r, before, at, keys.is_none);
        if (!WHOLE && !I::STORES_FIRST && t.num_parts > 1) is_odd = store_part<I>(a, t, o, r);
        if (__any_sync(ALL_LANES, is_odd)) compute_slowly<I>(a, t, warp * 16, is_odd);
        __syncwarp();
        release(WHOLE ? sh.tile_emptied[here] : sh.tile_stored[here]);
    } while (!keys.is_none);
    if (WHOLE) return;
    const tile_of<I> &t = sh.tiles[on.place > 0 ? on.place - 1 : TILES_AHEAD - 1];
    /* registers are free by now */
    if (t.num_parts > 8) end_part<I, 16, WARP, true>(a, t);
    else if (t.num_parts > 4) end_part<I, 8, WARP / 2, true>(a, t);
    else if (t.num_parts > 1) end_part<I, 4, WARP / 4, true>(a, t);
}

template <class I>
static __device__ __forceinline__ void start_barriers(hopper_shared<I> *sh, bool whole)
{
    for (int i = 0; i < I::STAGES; i++) {
        barrier_init(shared_address(&sh->filled[i]), I::BYTES ? 4 : 1);
        barrier_init(shared_address(&sh->emptied[i]), I::WARPS); /* a lane of each warp */
        if (!I::SPLIT) continue;
        barrier_init(shared_address(&sh->v_filled[i]), I::BYTES ? 4 : 1);
        barrier_init(shared_address(&sh->v_emptied[i]), I::WARPS);
    }
    if constexpr (I::BYTES)
        for (int i = 0; i < I::RAWS; i++) {
            barrier_init(shared_address(&sh->raw_filled[i]), 1);
            barrier_init(shared_address(&sh->raw_emptied[i]), 4);
        }
    if (I::SPLIT) barrier_init(shared_address(&sh->emptied[I::STAGES]), I::WARPS);
    for (int i = 0; i < I::WARPGROUPS; i++) {
        barrier_init(shared_address(&sh->q_filled[i]), 1);
        barrier_init(shared_address(&sh->q_emptied[i]), 4);
    }
    for (int i = 0; i < TILES_AHEAD; i++) {
        barrier_init(shared_address(&sh->tile_filled[i]), 1);
        barrier_init(shared_address(&sh->tile_stored[i]), I::WARPS);
        barrier_init(shared_address(&sh->tile_emptied[i]), whole ? I::WARPS : 1);
    }
    bulk_fence();
}

/* What a warp does that does not compute. */
template <class I, bool WHOLE>
static __device__ __forceinline__ void load_all(const hopper_args &a, const hopper_memory<I> &m,
                                                int warp)
{
    constexpr int boxes = (I::WARPGROUPS + 1) / 2; /* of a warp, if two load q */
    int other = warp - I::WARPS;
    give_registers<WHOLE ? I::WHOLE_OTHERS : I::OTHERS>();
    if (other == 0) {
        if constexpr (I::BYTES) load_all_bytes<I>(a, m);
        else load_all_keys<I>(a, m);
    } else if (other == 1) take_tiles<I, WHOLE>(a, m);
    else if (!WHOLE && other == 3) end_parts<I>(a, m);
    else if (WHOLE)
        load_all_queries<I>(a, m, (other - 2) * boxes, min((other - 1) * boxes, a.q_boxes));
    else load_all_queries<I>(a, m, 0, a.q_boxes);
}

template <class I, bool WHOLE, bool HOLDS>
static __global__ void __launch_bounds__(I::THREADS, 1)
    hopper_prefill(const __grid_constant__ hopper_args a)
{
    extern __shared__ __align__(1024) char memory[];
    hopper_memory<I> m = {memory};
    if (threadIdx.x == 0) start_barriers<I>(&m.sh(), WHOLE);
    __syncthreads();
    int warp = __shfl_sync(ALL_LANES, threadIdx.x / WARP, 0);
    if constexpr (I::BYTES)
        if (warp >= I::WARPS + 4) {
            give_registers<WHOLE ? I::WHOLE_WIDENERS : I::WIDENERS>();
            widen_all<I, WHOLE ? 3 : 2>(a, m);
            return;
        }
    /* in the other order ptxas 13.0 serialises the products of f16 with head size 128 */
    if (WHOLE && warp >= I::WARPS) load_all<I, WHOLE>(a, m, warp);
    else if (WHOLE || warp < I::WARPS) {
        take_registers<WHOLE ? I::WHOLE_REGISTERS : I::REGISTERS>();
        compute_all<I, WHOLE, HOLDS>(a, m, warp);
    } else load_all<I, WHOLE>(a, m, warp);
}

/* Strides of out below this: places of a tile's rows, in units of 16 bytes, fit 32 bits. */
constexpr uint64_t MAX_STRIDE = 1 << 27;

/* What every instance asks of a layer. */
static bool is_computed(const folioi_cuda_line *line, const folioi_cuda_layer *l,
                        const folioi_cuda_sm *sm)
{
    return matches_hopper(line, l, sm) && (uint64_t)l->out.token < MAX_STRIDE &&
           (uint64_t)l->out.head < MAX_STRIDE;
}

/* What divides the strides of blocks and kv heads: the step of a map's last coordinate. 0 in a plan's prototype; else it
 * has to be 128 bytes, so that 31 bits of steps reach all memory of a device. */
static int64_t step_of(const folioi_cuda_side *side)
{
    int64_t a = side->at.block, b = side->at.head;
    while (b != 0) {
        int64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

/* Can boxes of rows bring it? size: of a number. */
static bool has_boxes(const folioi_cuda_side *side, int64_t size)
{
    return folioi_cuda_has_rows(side) && !folioi_cuda_has_pages(side) &&
           folioi_cuda_side_aligned(side, size, 16) && side->at.block >= 0 && side->at.head >= 0 &&
           side->at.token_tile_stride >= 0 && (step_of(side) == 0 || step_of(side) * size >= 128);
}

static bool are_boxes(const folioi_cuda_layer *l, int64_t size)
{
    return l->block_size % PAGE_KEYS == 0 && has_boxes(&l->k, size) && has_boxes(&l->v, size);
}

template <class I>
static bool matches(const folioi_cuda_line *line, const folioi_cuda_layer *l,
                    const folioi_cuda_sm *sm, int32_t rows)
{
    (void)rows;
    if (!is_computed(line, l, sm)) return false;
    if (!I::OPTIONS && (l->soft_cap > 0 || l->slopes != NULL)) return false;
    if (I::FP8 && !(l->k.scale > 0)) return false;
    if (I::BYTES || I::FROM_ROWS) return are_boxes(l, I::BYTES ? 1 : 2);
    return folioi_cuda_has_pages(&l->k) &&
           l->k.at.token_tile_stride == 8 * (line->k_dims + line->v_dims);
}

/*
 * Boxes of 16 tokens of a kv head. Of rows: a panel, 8 tokens, panels, 2 times 8 tokens. Pages are swizzled as they lie, and
 * rows of bytes are copied as they lie, two of them as one number.
 */
template <class I>
static bool describe_side(CUtensorMap *map, const folioi_cuda_layer *l, const folioi_cuda_sm *sm,
                          const folioi_cuda_side *side, int32_t num_dims)
{
    bool has_pages = folioi_cuda_has_pages(side);
    cuuint64_t size = I::BYTES ? 1 : 2, token = (cuuint64_t)side->at.token_tile_stride * size,
               panels = (cuuint64_t)num_dims / I::PANEL;
    cuuint64_t bands = (cuuint64_t)l->block_size / 8, step = (cuuint64_t)step_of(side) * size;
    cuuint64_t of_rows[5] = {I::PANEL, 8, panels, bands, INT32_MAX};
    cuuint64_t of_pages[5] = {256, 2 * panels, 1, bands, INT32_MAX};
    cuuint64_t of_bytes[5] = {(cuuint64_t)num_dims / 2, 8, 1, bands, INT32_MAX};
    cuuint64_t row_strides[4] = {token, 2 * I::PANEL, 8 * token, step},
               page_strides[4] = {512, 512, token, step};
    const cuuint64_t *dims = has_pages ? of_pages : I::BYTES ? of_bytes : of_rows;
    cuuint32_t box[5] = {(cuuint32_t)dims[0], (cuuint32_t)dims[1], (cuuint32_t)dims[2], 2, 1};
    return describe(map, l, sm, side->base, 5, dims, has_pages ? page_strides : row_strides, box,
                    dims == of_rows ? swizzle_of(I::PANEL) : CU_TENSOR_MAP_SWIZZLE_NONE);
}

/* False too: a place of the cache is past 32 bits. */
template <class I>
static bool describe_cache(hopper_boxes *b, const folioi_cuda_layer *l, const folioi_cuda_sm *sm)
{
    int64_t k = step_of(&l->k), v = step_of(&l->v);
    b->k_block = (int32_t)(l->k.at.block / k);
    b->k_head = (int32_t)(l->k.at.head / k);
    b->v_block = (int32_t)(l->v.at.block / v);
    b->v_head = (int32_t)(l->v.at.head / v);
    b->v_at = l->v.at;
    int64_t far = max_i64(max_i64(l->k.at.block / k, l->v.at.block / v) * l->num_blocks, 0);
    far += max_i64(l->k.at.head / k, l->v.at.head / v) * l->num_kv_heads;
    return far <= INT32_MAX && describe_side<I>(&b->k, l, sm, &l->k, l->k_dims) &&
           describe_side<I>(&b->v, l, sm, &l->v, l->v_dims);
}

static hopper_bytes bytes_of(const folioi_cuda_layer *l)
{
    return {l->k.scales,    l->v.scales,    l->k.head_scales, l->v.head_scales,
            l->k.scales_at, l->v.scales_at, l->k.scale,       l->v.scale};
}

template <class I>
static cudaError_t launch(const folioi_prefill_line *line, const folioi_cuda_run *run,
                          const folioi_cuda_prefill_plan *plan, const folioi_prefill_head *whole)
{
    (void)line;
    static_assert(SHARED_BYTES<I> <= 227 * 1024, "it fits a multiprocessor");
    const folioi_cuda_layer *layer = run->layer;
    hopper_args a = hopper_args_of(run, plan, whole, I::ROWS, I::DV);
    a.whole = *whole;
    a.q_boxes = WARPGROUP_ROWS % a.heads == 0 ? I::WARPGROUPS : 1;
    a.tile_blocks = I::PAGES / a.block_pages;
    a.tile_pages = I::PAGES - a.tile_blocks * a.block_pages;
    a.most_shift = shift_of(a.units);
    a.out_token = (uint32_t)(layer->out.token / 8);
    a.out_head = (uint32_t)(layer->out.head / 8);
    int64_t most = plan->room.items * a.units;
    if (most == 0) return cudaSuccess;
    if (most > INT32_MAX - plan->sm.count) return cudaErrorInvalidConfiguration;
    if (!describe_queries(&a, layer, &plan->sm, I::PANEL)) return cudaErrorNotSupported;
    if ((I::BOXES || I::BYTES) && !describe_cache<I>(&a.boxes, layer, &plan->sm))
        return cudaErrorNotSupported;
    if (I::BYTES) a.bytes = bytes_of(layer);
    if (layer->soft_cap > 0)
        a.options = {NULL, layer->soft_cap, layer->soft_cap * LOG2E,
                     layer->scale / layer->soft_cap};
    a.options.slopes = layer->slopes;
    int blocks = (int)(most < plan->sm.count ? most : plan->sm.count);
    bool is_whole = whole->num_items > 0 && layer->window_left < 0 && layer->window_right < 0;
    void (*kernel)(hopper_args) = hopper_prefill<I, false, true>;
    if constexpr (!I::OPTIONS && !I::BYTES)
        if (is_whole && layer->q.data == layer->out.data) kernel = hopper_prefill<I, true, true>;
    if constexpr (!I::OPTIONS)
        if (is_whole && layer->q.data != layer->out.data) kernel = hopper_prefill<I, true, false>;
    cudaError_t error =
        folioi_cuda_prepare(plan->sm.ready, (const void *)kernel, SHARED_BYTES<I>, false);
    if (error != cudaSuccess) return error;
    launch_shape shape = {dim3((unsigned)blocks), I::THREADS, SHARED_BYTES<I>, 0, false};
    return launch_kernel(kernel, shape, a, run->stream);
}

template <int TYPE>
using number = typename std::conditional<TYPE == FOLIO_F16, __half, __nv_bfloat16>::type;

#define INSTANCE(type, dk, dv, warpgroups, keys, stages, holds_q, split, rows, ...)                \
    hopper_instance<number<type>, dk, dv, warpgroups, keys, stages, holds_q, split, rows,          \
                    __VA_ARGS__>
#define LINE(decode_rows, name, type, kv, dk, dv, warpgroups, ...)                                 \
    {{name, type, kv, dk, dv, false, matches<INSTANCE(type, dk, dv, warpgroups, __VA_ARGS__)>},    \
     warpgroups * WARPGROUP_ROWS,                                                                  \
     dv,                                                                                           \
     1,                                                                                            \
     decode_rows,                                                                                  \
     launch<INSTANCE(type, dk, dv, warpgroups, __VA_ARGS__)>},
#define LINE_16(name, type, ...) LINE(4, name, type, type, __VA_ARGS__)
const folioi_prefill_line folioi_prefill_hopper[] = {
#define PAGES(name, ...) LINE_16("prefill_hopper_" #name, __VA_ARGS__, false, false)
#define PAGES_OPTIONS(name, ...) LINE_16("prefill_hopper_options_" #name, __VA_ARGS__, false, true)
#define ROWS(name, ...) LINE_16("prefill_hopper_rows_" #name, __VA_ARGS__, true, false)
#define ROWS_OPTIONS(name, ...)                                                                    \
    LINE_16("prefill_hopper_rows_options_" #name, __VA_ARGS__, true, true)
#define BYTES(name, type, kv, ...)                                                                 \
    LINE(FOLIOI_DECODE_MAX_ROWS, "prefill_hopper_bytes_" #name, type, kv, __VA_ARGS__, false,      \
         false, false, kv)
#include "backends/cuda/prefill/hopper/hopper_instances.def"
#undef PAGES
#undef PAGES_OPTIONS
#undef ROWS
#undef ROWS_OPTIONS
#undef BYTES
    {}};
