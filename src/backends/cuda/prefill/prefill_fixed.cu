/* prefill_fixed.cu: the lines FIXED of prefill_instances.def: 16-bit K and V, no option on scores. */
#include "backends/cuda/prefill/prefill_launch.h"
#include "core/dtype.h"

static bool matches(const folioi_cuda_line *line, const folioi_cuda_layer *l,
                    const folioi_cuda_sm *sm, int32_t rows)
{
    (void)sm, (void)rows;
    return l->dtype == line->dtype && (!l->cached || dtype_is_16_bit(l->kv_dtype)) &&
           is_fixed(line, l);
}

template <class I, class WHOLE>
static cudaError_t launch(const folioi_prefill_line *line, const folioi_cuda_run *run,
                          const folioi_cuda_prefill_plan *plan, const folioi_prefill_head *whole)
{
    bool is_whole = whole->num_items > 0 && PREFILL_HAS_ONCE(plan->sm.capability);
    return is_whole ? launch_prefill<WHOLE>(line, run, plan, whole)
                    : launch_prefill<I>(line, run, plan, whole);
}

template <bool XPACKED, bool ONCE, int TYPE, int DK, int DV, int WARPS, int M_TILES, int KEYS,
          int BLOCKS>
using instance = prefill_instance<typename prefill_type<TYPE>::T, DK, DV, WARPS, M_TILES, KEYS,
                                  BLOCKS, true, XPACKED, KV_WIDE, ONCE>;

const folioi_prefill_line folioi_prefill_fixed[] = {
#define LINE(xpacked, name, type, dk, dv, ...)                                                     \
    {{"prefill_" name "_d" #dk, type, type, dk, dv, false, matches},                               \
     instance<xpacked, false, type, dk, dv, __VA_ARGS__>::ROWS,                                    \
     dv,                                                                                           \
     instance<xpacked, false, type, dk, dv, __VA_ARGS__>::BLOCKS,                                  \
     FOLIOI_DECODE_MAX_ROWS,                                                                       \
     launch<instance<xpacked, false, type, dk, dv, __VA_ARGS__>,                                   \
            instance<xpacked, true, type, dk, dv, __VA_ARGS__>>,                                   \
     xpacked},
#define FIXED(name, ...) LINE(false, #name, __VA_ARGS__)
#define XPACKED_FIXED(name, ...) LINE(true, "x_" #name, __VA_ARGS__)
#define BYTES(...)
#define XPACKED_BYTES(...)
#define FLEXIBLE(...)
#define SPLIT(...)
#include "backends/cuda/prefill/prefill_instances.def"
    {}};
