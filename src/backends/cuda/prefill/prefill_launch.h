/* prefill_launch.h: how a line of prefill_instances.def becomes kernels and is launched. */
#ifndef FOLIOI_CUDA_PREFILL_LAUNCH_H
#define FOLIOI_CUDA_PREFILL_LAUNCH_H

#include "backends/cuda/host/launch.h"
#include "backends/cuda/prefill/prefill.h"
#include "backends/cuda/prefill/prefill_kernel.h"

/** All that kernels of a line are given. */
prefill_args folioi_prefill_args(const folioi_prefill_line *line, const folioi_cuda_run *run,
                                 const folioi_cuda_prefill_plan *plan);

/* The type that products are made in, by the dtype of q. */
template <int DTYPE> struct prefill_type;
template <> struct prefill_type<FOLIO_F16> {
    using T = __half;
};
template <> struct prefill_type<FOLIO_BF16> {
    using T = __nv_bfloat16;
};

/* No option on scores, heads of the line's size, everything aligned. */
static inline bool is_plain(const folioi_cuda_line *line, const folioi_cuda_layer *l)
{
    bool has_options =
        l->soft_cap > 0 || l->slopes != NULL || l->bias.data != NULL || !(l->scale > 0);
    return !has_options && l->k_dims == line->k_dims && l->v_dims == line->v_dims &&
           folioi_prefill_aligned(l);
}

/* What fixed lines of 16-bit q take. */
static inline bool is_fixed(const folioi_cuda_line *line, const folioi_cuda_layer *l)
{
    return is_plain(line, l) && folioi_prefill_can(l) &&
           folioi_cuda_is_xpacked(l) == ((const folioi_prefill_line *)line)->xpacked;
}

/*
 * As many blocks as the device holds at once take one item after another; how many there are, the device knows. Where the host
 * knows too, and they are whole tiles, there is a block for each.
 */
template <class I>
static cudaError_t launch_prefill(const folioi_prefill_line *line, const folioi_cuda_run *run,
                                  const folioi_cuda_prefill_plan *plan,
                                  const folioi_prefill_head *whole)
{
    void (*kernel)(prefill_args) = prefill_kernel<I>;
    prefill_args a = folioi_prefill_args(line, run, plan);
    int64_t blocks = (I::ONCE ? (int64_t)whole->num_items : plan->room.items) * a.units;
    int64_t at_once = (int64_t)plan->sm.count * I::BLOCKS;
    size_t bytes = sizeof(typename I::shared);
    cudaError_t error =
        folioi_cuda_prepare(plan->sm.ready, (const void *)kernel, (int)bytes, false);
    if (error != cudaSuccess) return error;
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
    if (!I::ONCE && blocks > at_once) blocks = at_once;
    a.enough = (int32_t)at_once * 7 / 4 + 4; /* at least 4: quarters of it are counts too */
    launch_shape shape = {dim3((unsigned)blocks), I::THREADS, bytes, 0, false};
    return launch_kernel(kernel, shape, a, run->stream);
}

#endif
