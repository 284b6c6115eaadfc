/*
 * latent.cu: latent attention on Hopper: K of 576 16-bit numbers in native pages, V its first 512, any number of query heads.
 * As many blocks as multiprocessors take tiles until there are none. Of a block's three warpgroups two compute, each half
 * of V for all rows (latent_step.h), and one loads for them.
 */
#include "backends/cuda/prefill/hopper/hopper_launch.h"
#include "backends/cuda/prefill/hopper/latent_load.h"
#include "backends/cuda/prefill/hopper/latent_parts.h"

#include <type_traits>

static __device__ __forceinline__ void start_rows(const hopper_args &a, const latent_tile &t,
                                                  latent_rows &r)
{
    int row = latent_row(fresh_lane());
#pragma unroll
    for (int i = 0; i < 2; i++) { /* rows that are none must not rescale the others */
        r.base[i] = is_row(t.out, place_of(a, row + 8 * i)) ? LOWEST : CUDART_INF_F;
        r.sum_base[i] = r.base[i];
        r.sum[i] = 0.0f;
    }
}

/* Half W of a tile. */
template <typename T, int W, bool BETWEEN>
static __device__ __forceinline__ void compute_tile(const hopper_args &a, const latent_memory &m,
                                                    const latent_tile &t, uint32_t &phase,
                                                    int parity)
{
    latent_shared &sh = m.sh();
    float o[128];
    latent_rows r;
    int32_t count = t.num_keys, first = t.first;
#pragma unroll
    for (int i = 0; i < 128; i++) o[i] = 0.0f;
    start_rows(a, t, r);
    bulk_wait(shared_address(&sh.q_filled), parity);
    if (count <= W) {
        named_sync(BARRIER_WARPGROUP + W, 128); /* a lane that still waits would miss this phase */
        latent_release(sh.q_emptied);
    }
#pragma unroll 1
    for (int32_t i = W; i < count; i += 2, phase ^= 1)
        latent_step<T, W, BETWEEN>(a, m, t, o, r, phase, (first + i) * LATENT_KEYS, i > 0,
                                   i + 2 >= count ? sh.sum[parity][W] : NULL);
    if ((count - 1) % 2 != W) {
        take_weights<W>(sh, o, r);
        products_begin();
        add_other_values<T, W>(m, o);
        products_commit();
        products_wait<0>();
        products_ready(o);
        latent_release(sh.emptied[1 - W][1]);
    }
    uint32_t is_odd = end_latent_tile<T, W>(a, sh, t, o, r, parity);
    if (__any_sync(ALL_LANES, is_odd)) compute_latent_slowly<T, W>(a, t, is_odd);
    __syncwarp();
}

/* Returned: the place of the last tile, which stays; -1: there was none. */
template <typename T, int W, bool BETWEEN>
static __device__ __forceinline__ int compute_tiles(const hopper_args &a, const latent_memory &m)
{
    latent_shared &sh = m.sh();
    uint32_t phase = 0; /* of the own buffer */
    int last = -1;
    for (tile_at on = {0, 0, 0};; on.step()) {
        bulk_wait(shared_address(&sh.tile_filled[on.place]), on.phase);
        const latent_tile &t = sh.tiles[on.place];
        if (t.num_keys == 0) break;
        compute_tile<T, W, BETWEEN>(a, m, t, phase, (int)on.odd);
        latent_release(sh.tile_stored[on.place]);
        last = on.place;
    }
    return last;
}

static __device__ __forceinline__ void start_barriers(latent_shared *sh)
{
    for (int i = 0; i < 2; i++) {
        for (int half = 0; half < 2; half++) {
            barrier_init(shared_address(&sh->filled[i][half]), 1);
            barrier_init(shared_address(&sh->emptied[i][half]), 4); /* a lane of each warp */
        }
    }
    barrier_init(shared_address(&sh->q_filled), 1);
    barrier_init(shared_address(&sh->q_emptied), 8);
    for (int i = 0; i < TILES_AHEAD; i++) {
        barrier_init(shared_address(&sh->tile_filled[i]), 1);
        barrier_init(shared_address(&sh->tile_stored[i]), 8);
        barrier_init(shared_address(&sh->tile_emptied[i]), 1);
    }
    bulk_fence();
}

/* BETWEEN: see latent_products. */
template <typename T, bool BETWEEN>
static __global__ void __launch_bounds__(LATENT_THREADS, 1)
    latent(const __grid_constant__ hopper_args a)
{
    extern __shared__ __align__(1024) char memory[];
    latent_memory m = {memory};
    if (threadIdx.x == 0) start_barriers(&m.sh());
    __syncthreads();
    int warp = __shfl_sync(ALL_LANES, threadIdx.x / WARP, 0);
    if (warp >= 8) {
        give_registers<56>();
        if (warp == 8) latent_load_all_keys(a, m);
        else if (warp == 9) latent_take_tiles(a, m);
        else if (warp == 10) latent_load_all_queries(a, m);
        else latent_end_parts<T>(a, m);
    } else {
        take_registers<224>();
        int last =
            warp < 4 ? compute_tiles<T, 0, BETWEEN>(a, m) : compute_tiles<T, 1, BETWEEN>(a, m);
        if (last >= 0 && m.sh().tiles[last].num_parts > 1)
            end_last_part<T>(a, m, m.sh().tiles[last]);
    }
}

/* Strides of q below this are some for a tensor map: no other line would take the layer. */
constexpr uint64_t MAX_STRIDE = 1ull << 38;

static bool matches(const folioi_cuda_line *line, const folioi_cuda_layer *l,
                    const folioi_cuda_sm *sm, int32_t rows)
{
    (void)rows;
    return matches_hopper(line, l, sm) && !(l->soft_cap > 0) && l->slopes == NULL &&
           folioi_cuda_has_pages(&l->k) && l->k.at.token_tile_stride * 2 == LATENT_BAND_BYTES &&
           (l->out.data == NULL || l->out.data != l->q.data) && (uint64_t)l->q.token < MAX_STRIDE &&
           (uint64_t)l->q.head < MAX_STRIDE;
}

/* Up to so many query heads of a kv head memory is the limit. */
constexpr int32_t FEW_HEADS = 32;

template <typename T>
static cudaError_t launch(const folioi_prefill_line *line, const folioi_cuda_run *run,
                          const folioi_cuda_prefill_plan *plan, const folioi_prefill_head *whole)
{
    (void)line;
    const folioi_cuda_layer *layer = run->layer;
    hopper_args a = hopper_args_of(run, plan, whole, LATENT_ROWS, LATENT_VALUES);
    int64_t most = plan->room.items * a.units;
    if (most == 0) return cudaSuccess;
    if (most > INT32_MAX - plan->sm.count) return cudaErrorInvalidConfiguration;
    if (!describe_queries(&a, layer, &plan->sm, 64)) return cudaErrorNotSupported;
    int blocks = (int)(most < plan->sm.count ? most : plan->sm.count);
    auto kernel = a.heads_per_kv > FEW_HEADS ? latent<T, true> : latent<T, false>;
    cudaError_t error =
        folioi_cuda_prepare(plan->sm.ready, (const void *)kernel, LATENT_SHARED_BYTES, false);
    if (error != cudaSuccess) return error;
    launch_shape shape = {dim3((unsigned)blocks), LATENT_THREADS, LATENT_SHARED_BYTES, 0, false};
    return launch_kernel(kernel, shape, a, run->stream);
}

template <int TYPE>
using number = typename std::conditional<TYPE == FOLIO_F16, __half, __nv_bfloat16>::type;

#define LINE(name, type)                                                                           \
    {                                                                                              \
        {"latent_hopper_" #name, type, type, LATENT_DIMS, LATENT_VALUES, false, matches, true},    \
            LATENT_ROWS, LATENT_VALUES, 1, 0, launch<number<type>>                                 \
    }
const folioi_prefill_line folioi_prefill_latent[] = {
    LINE(f16, FOLIO_F16), LINE(bf16, FOLIO_BF16), {}};
#undef LINE
