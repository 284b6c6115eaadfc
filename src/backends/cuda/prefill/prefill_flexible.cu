/* prefill_flexible.cu: the lines FLEXIBLE of prefill_instances.def: all that a layer may have. */
#include "backends/cuda/prefill/prefill_launch.h"

static bool matches(const folioi_cuda_line *line, const folioi_cuda_layer *l,
                    const folioi_cuda_sm *sm, int32_t rows)
{
    (void)sm, (void)rows;
    /* large V is computed in slices, each from all of q: out in place of q would end it with the first */
    bool in_slices = l->v_dims > ((const folioi_prefill_line *)line)->values;
    if (in_slices && l->out.data != NULL && l->out.data == l->q.data) return false;
    return l->dtype == line->dtype && l->k_dims <= line->k_dims && l->v_dims <= line->v_dims &&
           folioi_prefill_can(l);
}

template <int TYPE, int DK, int DV, int WARPS, int M_TILES, int KEYS, int BLOCKS>
using instance =
    prefill_instance<typename prefill_type<TYPE>::T, DK, DV, WARPS, M_TILES, KEYS, BLOCKS, false>;

const folioi_prefill_line folioi_prefill_flexible[] = {
#define FLEXIBLE(name, type, dk, dv, ...)                                                          \
    {{"prefill_any_" #name "_d" #dk, type, (folio_dtype)0, dk, dk, true, matches},                 \
     instance<type, dk, dv, __VA_ARGS__>::ROWS,                                                    \
     dv,                                                                                           \
     instance<type, dk, dv, __VA_ARGS__>::BLOCKS,                                                  \
     FOLIOI_DECODE_MAX_ROWS,                                                                       \
     launch_prefill<instance<type, dk, dv, __VA_ARGS__>>},
#define FIXED(...)
#define XPACKED_FIXED(...)
#define BYTES(...)
#define XPACKED_BYTES(...)
#define SPLIT(...)
#include "backends/cuda/prefill/prefill_instances.def"
    {}};
