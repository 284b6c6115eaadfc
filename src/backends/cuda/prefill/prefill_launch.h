/*
 * prefill_launch.h: the instances of the prefill kernel, and how one is launched. They are compiled in three parts, which take
 * long: prefill_fixed.cu, prefill_bytes.cu and prefill_flexible.cu.
 */
#ifndef FOLIOI_CUDA_PREFILL_LAUNCH_H
#define FOLIOI_CUDA_PREFILL_LAUNCH_H

#include "backends/cuda/prefill/prefill.h"
#include "backends/cuda/prefill/prefill_instance.h"

/* T, DK, DV, warps, row tiles of a warp, keys of a tile, blocks of a multiprocessor, fixed */
template <typename T, bool ONCE = false>
using fixed_64 = prefill_instance<T, 64, 64, 4, 2, 48, 3, true, KV_WIDE, ONCE>;
template <typename T, bool ONCE = false>
using fixed_128 = prefill_instance<T, 128, 128, 4, 2, 64, 2, true, KV_WIDE, ONCE>;
template <typename T, bool ONCE = false>
using fixed_256 = prefill_instance<T, 256, 256, 4, 1, 64, 2, true, KV_WIDE, ONCE>;
/* 8-bit K and V, of type KV */
template <prefill_kv KV> using bytes_64 = prefill_instance<__half, 64, 64, 4, 2, 64, 2, true, KV>;
template <prefill_kv KV>
using bytes_128 = prefill_instance<__half, 128, 128, 4, 2, 32, 2, true, KV>;
template <prefill_kv KV>
using bytes_256 = prefill_instance<__half, 256, 256, 4, 1, 64, 2, true, KV>;
template <typename T> using flexible_64 = prefill_instance<T, 64, 64, 4, 1, 64, 3, false>;
template <typename T> using flexible_128 = prefill_instance<T, 128, 128, 4, 1, 64, 2, false>;
template <typename T> using flexible_256 = prefill_instance<T, 256, 256, 4, 1, 32, 2, false>;
template <typename T> using flexible_512 = prefill_instance<T, 512, 256, 2, 1, 16, 2, false>;

/** The fixed instance of head size `dims`, that of 8-bit K and V, and a flexible one. whole_tiles: see prefill.h. */
cudaError_t folioi_prefill_fixed(const prefill_args *a, const folioi_cuda_prefill_plan *plan,
                                 int dims, int64_t whole_tiles, cudaStream_t stream);
cudaError_t folioi_prefill_bytes(const prefill_args *a, const folioi_cuda_prefill_plan *plan,
                                 int dims, cudaStream_t stream);
cudaError_t folioi_prefill_flexible(const prefill_args *a, const folioi_cuda_prefill_plan *plan,
                                    int dims, cudaStream_t stream);

/*
 * As many blocks as the device holds at once take one item after another; how many there are, the device knows. Where the host
 * knows too, and they are whole tiles, there is a block for each.
 */
template <class I>
static cudaError_t launch_prefill(void (*kernel)(prefill_args), const prefill_args *a,
                                  const folioi_cuda_prefill_plan *plan, int64_t whole_tiles,
                                  cudaStream_t stream)
{
    int64_t blocks = (I::ONCE ? whole_tiles : plan->room.items) * a->units;
    int64_t at_once = (int64_t)plan->sm.count * I::BLOCKS;
    size_t bytes = sizeof(typename I::shared);
    cudaError_t error =
        folioi_cuda_prepare(plan->sm.ready, (const void *)kernel, (int)bytes, false);
    if (error != cudaSuccess) return error;
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
    if (!I::ONCE && blocks > at_once) blocks = at_once;
    prefill_args b = *a;
    b.enough = (int32_t)at_once * 7 / 4 + 4; /* at least 4: quarters of it are counts too */
    kernel<<<(unsigned)blocks, I::THREADS, bytes, stream>>>(b);
    return cudaGetLastError();
}

#endif
