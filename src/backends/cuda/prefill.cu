/*
 * prefill.cu: attention of sequences with many query rows: one launch per layer computes the step's list of tiles. The grid is
 * fixed by the list's room, so a graph may hold it.
 */
#include "backends/cuda/prefill.h"
#include "backends/cuda/prefill_kernel.h"
#include "core/dtype.h"

/* T, DK, DV, warps, row tiles of a warp, keys of a tile, blocks of a multiprocessor, plain */
template <typename T> using plain_64 = prefill_instance<T, 64, 64, 4, 2, 48, 3, true>;
template <typename T> using plain_128 = prefill_instance<T, 128, 128, 4, 2, 64, 2, true>;
template <typename T> using plain_256 = prefill_instance<T, 256, 256, 4, 1, 64, 2, true>;
/* 8-bit K and V, of type KV */
template <prefill_kv KV> using bytes_64 = prefill_instance<__half, 64, 64, 4, 2, 64, 2, true, KV>;
template <prefill_kv KV>
using bytes_128 = prefill_instance<__half, 128, 128, 4, 2, 32, 2, true, KV>;
template <prefill_kv KV>
using bytes_256 = prefill_instance<__half, 256, 256, 4, 1, 64, 2, true, KV>;
template <typename T> using general_64 = prefill_instance<T, 64, 64, 4, 1, 64, 3, false>;
template <typename T> using general_128 = prefill_instance<T, 128, 128, 4, 1, 64, 2, false>;
template <typename T> using general_256 = prefill_instance<T, 256, 256, 4, 1, 32, 2, false>;
template <typename T> using general_512 = prefill_instance<T, 512, 256, 2, 1, 16, 2, false>;

template <class I>
static cudaError_t launch(const prefill_args *a, int32_t capacity, cudaStream_t stream)
{
    int64_t blocks =
        (int64_t)capacity * a->layer.num_kv_heads * a->head_parts * a->value_parts * a->pieces;
    size_t bytes = sizeof(typename I::shared);
    cudaError_t error =
        folioi_cuda_prepare(a->ready, (const void *)prefill_kernel<I>, (int)bytes, false);
    if (error != cudaSuccess) return error;
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
    prefill_args b = *a;
    b.capacity = capacity;
    b.enough = a->enough * I::BLOCKS * 7 / 4 + 4; /* at least 4: quarters of it are counts too */
    prefill_kernel<I><<<(unsigned)blocks, I::THREADS, bytes, stream>>>(b);
    return cudaGetLastError();
}

bool folioi_cuda_prefill_takes(const folioi_cuda_layer *l)
{
    if (!dtype_is_16_bit(l->dtype) || l->k_dims % 8 != 0 || l->v_dims % 8 != 0) return false;
    if (l->k_dims > 512 || l->v_dims > 512 || !folioi_cuda_new_rows_fit(l)) return false;
    /* large V is computed in parts, each from all of q: out in place of q would end it with the first */
    if (l->v_dims > general_512<__half>::DV && l->out.data == l->q.data) return false;
    if (!l->cached) return true;
    if (dtype_is_16_bit(l->kv_dtype) ? l->kv_dtype != l->dtype : l->kv_dtype == FOLIO_F32)
        return false;
    return folioi_cuda_has_rows(&l->k) && folioi_cuda_has_rows(&l->v);
}

/* May all rows be copied in chunks of 8 numbers? */
static bool is_aligned(const folioi_cuda_layer *l)
{
    int64_t size = dtype_is_16_bit(l->kv_dtype) ? 2 : 1;
    bool ok = folioi_cuda_rows_aligned(&l->q, 2, 16) && folioi_cuda_rows_aligned(&l->out, 2, 16);
    if (l->cached)
        ok = ok && folioi_cuda_side_aligned(&l->k, size, size * 8) &&
             folioi_cuda_side_aligned(&l->v, size, size * 8);
    if (!l->cached || l->append)
        ok = ok && folioi_cuda_rows_aligned(&l->new_k, 2, 16) &&
             folioi_cuda_rows_aligned(&l->new_v, 2, 16);
    return ok;
}

/* Is it all plain: equal head sizes with instances of their own, and no option on scores? */
static bool is_plain(const folioi_cuda_layer *l)
{
    bool has_options =
        l->soft_cap > 0 || l->slopes != NULL || l->bias.data != NULL || !(l->scale > 0);
    bool has_size = l->k_dims == 64 || l->k_dims == 128 || l->k_dims == 256;
    return !has_options && has_size && l->k_dims == l->v_dims && is_aligned(l);
}

/* Head size of the plain instance that serves the layer; 0: none does. */
static int plain_dims(const folioi_cuda_layer *l)
{
    return is_plain(l) && (!l->cached || dtype_is_16_bit(l->kv_dtype)) ? l->k_dims : 0;
}

/* Of the one for 8-bit K and V. */
static int bytes_dims(const folioi_cuda_layer *l)
{
    if (!l->cached || l->append || dtype_is_16_bit(l->kv_dtype) || !is_plain(l)) return 0;
    if (l->kv_dtype != FOLIO_INT8 && !(l->k.scale > 0)) return 0;
    bool ok = folioi_cuda_side_aligned(&l->k, 1, 16) && folioi_cuda_side_aligned(&l->v, 1, 16);
    return ok ? l->k_dims : 0;
}

static int max_dims(const folioi_cuda_layer *l)
{
    return l->k_dims > l->v_dims ? l->k_dims : l->v_dims;
}

static int general_dims(const folioi_cuda_layer *l)
{
    int dims = max_dims(l);
    return dims <= 64 ? 64 : dims <= 128 ? 128 : dims <= 256 ? 256 : 512;
}

/* Rows and V numbers of the tiles that serve the layer. */
static void tile_size(const folioi_cuda_layer *l, int32_t *rows, int32_t *values)
{
    using T = __half;
    switch (plain_dims(l)) {
    case 64: *rows = plain_64<T>::ROWS, *values = 64; return;
    case 128: *rows = plain_128<T>::ROWS, *values = 128; return;
    case 256: *rows = plain_256<T>::ROWS, *values = 256; return;
    }
    switch (bytes_dims(l)) {
    case 64: *rows = bytes_64<KV_INT8>::ROWS, *values = 64; return;
    case 128: *rows = bytes_128<KV_INT8>::ROWS, *values = 128; return;
    case 256: *rows = bytes_256<KV_INT8>::ROWS, *values = 256; return;
    }
    switch (general_dims(l)) {
    case 64: *rows = general_64<T>::ROWS, *values = 64; return;
    case 128: *rows = general_128<T>::ROWS, *values = 128; return;
    case 256: *rows = general_256<T>::ROWS, *values = 256; return;
    default: *rows = general_512<T>::ROWS, *values = general_512<T>::DV; return;
    }
}

/* Lists are made for tiles of the plain instances' rows; instances with fewer take a tile in pieces. */
static int32_t list_rows(int32_t dims)
{
    using T = __half;
    if (dims <= 64) return plain_64<T>::ROWS;
    if (dims <= 128) return plain_128<T>::ROWS;
    return dims <= 256 ? plain_256<T>::ROWS : general_512<T>::ROWS;
}

folioi_prefill_shape folioi_cuda_prefill_shape(int32_t dims, int32_t group, int64_t window_left,
                                               int64_t window_right)
{
    int32_t rows = list_rows(dims);
    return {group < rows ? rows / group : 1, group, window_left, window_right};
}

template <prefill_kv KV>
static cudaError_t launch_bytes(const prefill_args *a, int32_t capacity, cudaStream_t stream)
{
    switch (a->layer.k_dims) {
    case 64: return launch<bytes_64<KV>>(a, capacity, stream);
    case 128: return launch<bytes_128<KV>>(a, capacity, stream);
    default: return launch<bytes_256<KV>>(a, capacity, stream);
    }
}

template <typename T>
static cudaError_t launch_as(const prefill_args *a, int32_t capacity, cudaStream_t stream)
{
    switch (plain_dims(&a->layer)) {
    case 64: return launch<plain_64<T>>(a, capacity, stream);
    case 128: return launch<plain_128<T>>(a, capacity, stream);
    case 256: return launch<plain_256<T>>(a, capacity, stream);
    }
    switch (general_dims(&a->layer)) {
    case 64: return launch<general_64<T>>(a, capacity, stream);
    case 128: return launch<general_128<T>>(a, capacity, stream);
    case 256: return launch<general_256<T>>(a, capacity, stream);
    default: return launch<general_512<T>>(a, capacity, stream);
    }
}

cudaError_t folioi_cuda_prefill(const folioi_cuda_layer *layer, const folioi_cuda_step *step,
                                const folioi_prefill_tile *tiles, int32_t capacity,
                                const folioi_cuda_sm *sm, cudaStream_t stream)
{
    if (!folioi_cuda_prefill_takes(layer)) return cudaErrorNotSupported;
    int32_t rows, values;
    tile_size(layer, &rows, &values);
    prefill_args a = {};
    a.layer = *layer;
    if (!layer->cached) a.layer.kv_dtype = layer->dtype;
    a.step = *step;
    a.tiles = tiles;
    a.group = layer->num_heads / layer->num_kv_heads;
    a.heads = a.group < rows ? a.group : rows;
    a.head_parts = (int32_t)ceil_div(a.group, a.heads);
    a.value_parts = (int32_t)ceil_div(layer->v_dims, values);
    a.enough = sm->count;
    a.ready = sm->ready;
    a.tile_queries = folioi_cuda_prefill_shape(max_dims(layer), a.group, 0, 0).queries;
    a.pieces = (int32_t)ceil_div(a.tile_queries, rows / a.heads);
    a.queries = (int32_t)ceil_div(a.tile_queries, a.pieces);
    a.aligned = is_aligned(layer);
    a.is_direct = a.aligned && dtype_is_16_bit(a.layer.kv_dtype);
    if (bytes_dims(layer) != 0) switch (layer->kv_dtype) {
        case FOLIO_FP8_E4M3: return launch_bytes<KV_E4M3>(&a, capacity, stream);
        case FOLIO_FP8_E5M2: return launch_bytes<KV_E5M2>(&a, capacity, stream);
        default: return launch_bytes<KV_INT8>(&a, capacity, stream);
        }
    if (layer->dtype == FOLIO_F16) return launch_as<__half>(&a, capacity, stream);
    return launch_as<__nv_bfloat16>(&a, capacity, stream);
}
