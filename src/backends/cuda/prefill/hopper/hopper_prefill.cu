/*
 * hopper_prefill.cu: prefill on Hopper: 16-bit K and V in native pages, head size 128. As many blocks as multiprocessors take tiles
 * until there are none. Of a block's three warpgroups two compute, each 64 rows of a tile, and one loads for them:
 *
 *   step:  Q K^T of this key tile, P V of the one before | both on their way, softmax of this one under P V
 *   end:   the last P V, Q K^T of the next tile          | out is stored under that
 *
 * Q is in registers. Weights P are in the registers that their scores came in.
 */
#include "backends/cuda/prefill/hopper/hopper_load.h"
#include "backends/cuda/prefill/hopper/hopper_slow.h"
#include "backends/cuda/prefill/prefill.h"

#include <type_traits>

static __device__ __forceinline__ void release(const uint64_t &barrier)
{
    if (threadIdx.x % WARP == 0) barrier_arrive(shared_address(&barrier));
}

/* The warp's rows of q to registers; their place is free then. */
static __device__ __forceinline__ void load_q(uint32_t (&q)[32], const hopper_memory &m, int group)
{
    int lane = fresh_lane(), row = (int)threadIdx.x / WARP * 16 + lane % 16;
    uint32_t from = m.q() + row * 128;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        int unit = (i % 4 * 2 + lane / 16) ^ lane % 8;
        ldmatrix(&q[4 * i], from + i / 4 * Q_PANEL_BYTES + unit * 16);
    }
    __syncwarp();
    release(m.sh().q_emptied[group]);
}

/* Scores of the first N keys of a stage. */
template <typename T, int N>
static __device__ __forceinline__ void score_keys(float (&s)[64], const uint32_t (&q)[32],
                                                  uint32_t kv, int stage)
{
    uint64_t k = matrix_at(kv + stage * STAGE_BYTES, 16, HALF_BYTES);
    multiply_rows<T, N, 0>(s, q, k);
#pragma unroll
    for (int i = 1; i < 8; i++)
        multiply_rows<T, N, 1>(s, q + 4 * i, k + (i / 4 * PANEL_BYTES + i % 4 * 32) / 16);
}

/* Weights times V of the first PAGES pages of a stage. */
template <typename T, int PAGES>
static __device__ __forceinline__ void add_values(float (&o)[64], const uint32_t (&p)[32],
                                                  uint32_t kv, int stage, int add)
{
    uint64_t v = matrix_at(kv + stage * STAGE_BYTES + HALF_BYTES / 2, PANEL_BYTES, HALF_BYTES);
    multiply_columns<T>(o, p, v, add);
#pragma unroll
    for (int i = 1; i < PAGES; i++) multiply_columns<T>(o, p + 4 * i, v + i * PAGE_BYTES / 16, 1);
}

/* One key tile, and the values of the one before it, of which PAGES pages have weights. */
template <typename T, int PAGES, bool MASKED, bool WHOLE>
static __device__ __forceinline__ void step(const hopper_args &a, const hopper_memory &m,
                                            const hopper_tile &t, const uint32_t (&q)[32],
                                            float (&s)[64], float (&o)[64], uint32_t (&p)[32],
                                            row_sums &r, const common_keys &all, stage_at &at,
                                            int32_t first_key, int add)
{
    int before = at.stage;
    at.step();
    bulk_wait(shared_address(&m.sh().filled[at.stage]), at.phase);
    products_begin();
    score_keys<T, KEYS>(s, q, m.kv(), at.stage);
    products_commit();
    add_values<T, PAGES>(o, p, m.kv(), before, add);
    products_commit();
    products_wait<1>();
    products_ready(s);
    if (MASKED && (first_key < all.begin || first_key + KEYS > all.end)) {
        products_wait<0>(); /* masks need registers */
        mask<KEYS, WHOLE, false>(s, a, t, all, first_key);
    }
    raise_base<T, KEYS, false>(s, r, a.scale_log2);
    weigh<KEYS>(s, r, a.scale_log2);
    products_wait<0>();
    products_ready(o);
    release(m.sh().emptied[before]);
    rescale(o, r);
    pack_weights<T, KEYS>(p, s);
}

/* Weights of a tile's first key tile, N columns wide. */
template <typename T, int N, bool WHOLE>
static __device__ __forceinline__ void start_tile(const hopper_args &a, const hopper_tile &t,
                                                  float (&s)[64], uint32_t (&p)[32], row_sums &r,
                                                  const common_keys &all, int32_t first_key)
{
    if ((!WHOLE && first_key < all.begin) || first_key + N > all.end)
        mask<N, WHOLE>(s, a, t, all, first_key);
    raise_base<T, N, true>(s, r, a.scale_log2);
    if (t.is_ragged) quiet_rows(r, a, t);
    weigh<N>(s, r, a.scale_log2);
    pack_weights<T, N>(p, s);
}

/* Scores of the next tile's first keys, N columns wide, while this one is stored; where it is whole. */
template <typename T, int N, bool WHOLE, bool HOLDS>
static __device__ __forceinline__ uint32_t end_tile(const hopper_args &a, const hopper_memory &m,
                                                    const hopper_tile &t, const uint32_t (&q)[32],
                                                    float (&s)[64], float (&o)[64],
                                                    const row_sums &r, int before, int stage)
{
    products_begin();
    score_keys<T, N>(s, q, m.kv(), stage);
    products_commit();
    products_wait<1>();
    products_ready(o);
    release(m.sh().emptied[before]);
    uint32_t is_odd = 0;
    if (WHOLE || t.num_parts == 1) is_odd = store_rows<T, HOLDS>(a, t, o, r);
    products_wait<0>();
    products_ready(s);
    return is_odd;
}

/*
 * WHOLE: tiles see all keys up to the end of each of their rows. No window begins within a key tile, and none is cut; rows
 * end in the last two key tiles. HOLDS: as store_rows has it; 0.3 to 0.8 % slower.
 */
template <typename T, bool WHOLE, bool HOLDS>
static __device__ __forceinline__ void compute_all(const hopper_args &a, const hopper_memory &m,
                                                   int warp)
{
    int group = warp / 4;
    float s[64], o[64];
    uint32_t p[32], q[32];
    row_sums r;
    stage_at at = {0, 0};
    tile_at on = {0, 0, 0};
    hopper_shared &sh = m.sh();
    bulk_wait(shared_address(&sh.q_filled[group]), 0); /* which comes after the tile */
    tile_keys keys = sh.tiles[0].keys;
    if (keys.is_none) return;
    load_q(q, m, group);
    bulk_wait(shared_address(&sh.filled[0]), 0);
    products_begin();
    score_keys<T, KEYS>(s, q, m.kv(), 0);
    products_commit();
    products_wait<0>();
    products_ready(s);
    do { /* scores of a tile's last keys are there */
        int here = on.place;
        const hopper_tile &t = sh.tiles[here];
        common_keys all = t.common[group];
        int32_t i = keys.last, first = WHOLE ? 0 : keys.first;
        bool is_one = i == first, is_early = keys.pages <= 4;
        if (is_early) {
            if (keys.pages > 2) start_tile<T, 2 * STEP_KEYS, WHOLE>(a, t, s, p, r, all, i * KEYS);
            else start_tile<T, STEP_KEYS, WHOLE>(a, t, s, p, r, all, i * KEYS);
            products_forget(o);
            if (i > first) step<T, 4, true, WHOLE>(a, m, t, q, s, o, p, r, all, at, --i * KEYS, 0);
        } else {
            if (keys.pages > 6) start_tile<T, KEYS, WHOLE>(a, t, s, p, r, all, i * KEYS);
            else start_tile<T, 3 * STEP_KEYS, WHOLE>(a, t, s, p, r, all, i * KEYS);
            products_forget(o);
            if (i > first) step<T, 8, true, WHOLE>(a, m, t, q, s, o, p, r, all, at, --i * KEYS, 0);
        }
        while (i > first) step<T, 8, !WHOLE, WHOLE>(a, m, t, q, s, o, p, r, all, at, --i * KEYS, 1);
        int before = at.stage;
        at.step();
        if (is_one && is_early) {
            products_begin();
            add_values<T, 4>(o, p, m.kv(), before, 0);
            products_commit();
        } else {
            products_begin();
            add_values<T, 8>(o, p, m.kv(), before, !is_one);
            products_commit();
        }
        add_up(r);
        on.step();
        bulk_wait(shared_address(&sh.q_filled[group]), on.odd);
        keys = sh.tiles[on.place].keys;
        load_q(q, m, group);
        if (!keys.is_none) bulk_wait(shared_address(&sh.filled[at.stage]), at.phase);
        uint32_t is_odd;
        if (keys.pages <= 4)
            is_odd = end_tile<T, KEYS / 2, WHOLE, HOLDS>(a, m, t, q, s, o, r, before, at.stage);
        else is_odd = end_tile<T, KEYS, WHOLE, HOLDS>(a, m, t, q, s, o, r, before, at.stage);
        if (!WHOLE && t.num_parts > 1) is_odd = store_part<T>(a, t, o, r);
        if (__any_sync(ALL_LANES, is_odd)) compute_slowly<T>(a, t, warp * 16, is_odd);
        __syncwarp();
        release(WHOLE ? sh.tile_emptied[here] : sh.tile_stored[here]);
    } while (!keys.is_none);
    if (WHOLE) return;
    const hopper_tile &t = sh.tiles[on.place > 0 ? on.place - 1 : TILES_AHEAD - 1];
    /* registers are free by now */
    if (t.num_parts > 8) end_part<T, 16, 1, true>(a, t);
    else if (t.num_parts > 4) end_part<T, 8, 2, true>(a, t);
    else if (t.num_parts > 1) end_part<T, 4, 4, true>(a, t);
}

static __device__ __forceinline__ void start_barriers(hopper_shared *sh, bool whole)
{
    for (int i = 0; i < STAGES; i++) {
        barrier_init(shared_address(&sh->filled[i]), 1);
        barrier_init(shared_address(&sh->emptied[i]), 8); /* a lane of each warp that computes */
    }
    for (int i = 0; i < GROUPS; i++) {
        barrier_init(shared_address(&sh->q_filled[i]), 1);
        barrier_init(shared_address(&sh->q_emptied[i]), 4);
    }
    for (int i = 0; i < TILES_AHEAD; i++) {
        barrier_init(shared_address(&sh->tile_filled[i]), 1);
        barrier_init(shared_address(&sh->tile_stored[i]), 8);
        barrier_init(shared_address(&sh->tile_emptied[i]), whole ? 8 : 1);
    }
    bulk_fence();
}

template <typename T, bool WHOLE, bool HOLDS>
static __global__ void __launch_bounds__(THREADS, 1)
    hopper_prefill(const __grid_constant__ hopper_args a)
{
    extern __shared__ __align__(1024) char memory[];
    hopper_memory m = {memory};
    if (threadIdx.x == 0) start_barriers(&m.sh(), WHOLE);
    __syncthreads();
    int warp = __shfl_sync(ALL_LANES, threadIdx.x / WARP, 0);
    if (warp >= 8) {
        give_registers<WHOLE ? 40 : 56>();
        if (warp == 8) load_all_keys(a, m);
        else if (warp == 9) take_tiles<WHOLE>(a, m);
        else if (!WHOLE && warp == 11) end_parts<T>(a, m);
        else if (WHOLE) load_all_queries(a, m, warp - 10, min(warp - 9, a.q_boxes));
        else load_all_queries(a, m, 0, a.q_boxes);
    } else {
        take_registers<WHOLE ? 232 : 224>();
        compute_all<T, WHOLE, HOLDS>(a, m, warp);
    }
}

/* Strides of out below this: places of a tile's rows, in units of 16 bytes, fit 32 bits. */
constexpr uint64_t MAX_STRIDE = 1 << 27;

static bool matches(const folioi_cuda_line *line, const folioi_cuda_layer *l,
                    const folioi_cuda_sm *sm, int32_t rows)
{
    (void)rows;
    bool has_options =
        l->soft_cap > 0 || l->slopes != NULL || l->bias.data != NULL || !(l->scale > 0);
    return sm->capability == 90 && sm->describe_tensor != NULL && l->cached && !l->append &&
           !has_options && l->dtype == line->dtype && l->kv_dtype == line->kv &&
           l->k_dims == DIMS && l->v_dims == DIMS && folioi_cuda_has_pages(&l->k) &&
           l->k.at.token_tile_stride * 2 == HALF_BYTES && folioi_cuda_rows_aligned(&l->q, 2, 16) &&
           folioi_cuda_rows_aligned(&l->out, 2, 16) && (uint64_t)l->out.token < MAX_STRIDE &&
           (uint64_t)l->out.head < MAX_STRIDE;
}

/* Boxes of half the numbers of a tile's rows of q. False: the strides are none for a tensor map. */
static bool describe_queries(hopper_args *a, const folioi_cuda_layer *l, const folioi_cuda_sm *sm)
{
    cuuint64_t dims[3] = {DIMS, (cuuint64_t)l->num_heads, (cuuint64_t)l->q_rows};
    cuuint64_t strides[2] = {(cuuint64_t)l->q.head * 2, (cuuint64_t)l->q.token * 2};
    cuuint32_t box[3] = {64, (cuuint32_t)a->heads, (cuuint32_t)(a->queries / a->q_boxes)};
    cuuint32_t steps[3] = {1, 1, 1};
    CUtensorMapDataType type =
        l->dtype == FOLIO_F16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    decltype(&cuTensorMapEncodeTiled) encode = (decltype(encode))sm->describe_tensor;
    return encode(&a->q, type, 3, l->q.data, dims, strides, box, steps,
                  CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

/* log2 of the largest power of 2 that divides x. */
static int32_t shift_of(int32_t x)
{
    int32_t shift = 0;
    while (shift < 30 && (x >> shift & 1) == 0) shift++;
    return shift;
}

template <typename T>
static cudaError_t launch(const folioi_prefill_line *line, const folioi_cuda_run *run,
                          const folioi_cuda_prefill_plan *plan, const folioi_prefill_head *whole)
{
    (void)line;
    const folioi_cuda_layer *layer = run->layer;
    hopper_args a = {};
    a.layer = {layer->q,          layer->out,         layer->lse,          layer->lse_token,
               layer->lse_head,   layer->sinks,       layer->k.base,       layer->v.base,
               layer->k.at,       layer->window_left, layer->window_right, layer->num_kv_heads,
               layer->block_size, layer->scale};
    a.blocks = run->step->blocks;
    a.head = folioi_cuda_prefill_head(plan);
    a.whole = *whole;
    a.items = folioi_cuda_prefill_items(plan);
    a.counters = run->counters;
    a.part_out = (float *)(run->workspace + plan->counter_bytes);
    a.part_lse = a.part_out + plan->room.rows * layer->num_kv_heads * DIMS;
    a.group = layer->num_heads / layer->num_kv_heads;
    a.heads = a.group < ROWS ? a.group : ROWS;
    a.inverse = (65536u + (uint32_t)a.heads - 1) / (uint32_t)a.heads;
    a.head_parts = (int32_t)ceil_div(a.group, a.heads);
    a.queries = ROWS / a.heads;
    a.q_boxes = GROUP_ROWS % a.heads == 0 ? GROUPS : 1;
    a.units = layer->num_kv_heads * a.head_parts;
    a.block_pages = layer->block_size / PAGE_KEYS;
    a.page_shift = shift_of(a.block_pages);
    if (1 << a.page_shift != a.block_pages) a.page_shift = -1;
    a.tile_blocks = KEYS / PAGE_KEYS / a.block_pages;
    a.tile_pages = KEYS / PAGE_KEYS - a.tile_blocks * a.block_pages;
    a.most_shift = shift_of(a.units);
    a.table_len = whole->num_keys / layer->block_size;
    a.out_token = (uint32_t)(layer->out.token / 8);
    a.out_head = (uint32_t)(layer->out.head / 8);
    a.scale_log2 = layer->scale * LOG2E;
    int64_t most = plan->room.items * a.units;
    if (most == 0) return cudaSuccess;
    if (most > INT32_MAX - plan->sm.count) return cudaErrorInvalidConfiguration;
    if (!describe_queries(&a, layer, &plan->sm)) return cudaErrorNotSupported;
    int blocks = (int)(most < plan->sm.count ? most : plan->sm.count);
    bool is_whole = whole->num_items > 0 && layer->window_left < 0 && layer->window_right < 0;
    auto kernel = !is_whole                          ? hopper_prefill<T, false, true>
                  : layer->q.data == layer->out.data ? hopper_prefill<T, true, true>
                                                     : hopper_prefill<T, true, false>;
    cudaError_t error =
        folioi_cuda_prepare(plan->sm.ready, (const void *)kernel, SHARED_BYTES, false);
    if (error != cudaSuccess) return error;
    kernel<<<blocks, THREADS, SHARED_BYTES, run->stream>>>(a);
    return cudaGetLastError();
}

template <int TYPE>
using number = typename std::conditional<TYPE == FOLIO_F16, __half, __nv_bfloat16>::type;

const folioi_prefill_line folioi_prefill_hopper[] = {
#define X(name, type)                                                                              \
    {{"prefill_hopper_" #name "_d128", type, type, DIMS, DIMS, false, matches},                    \
     ROWS,                                                                                         \
     DIMS,                                                                                         \
     1,                                                                                            \
     4,                                                                                            \
     launch<number<type>>},
#include "backends/cuda/prefill/hopper/hopper_instances.def"
#undef X
    {}};
