/* prefill_f32.cu: the lines SPLIT of prefill_instances.def: f32 q, K and V, no option on scores. */
#include "backends/cuda/prefill/prefill_launch.h"

/* Cards with less shared memory than a block needs leave it to the generic kernel. */
template <class I>
static bool matches(const folioi_cuda_line *line, const folioi_cuda_layer *l,
                    const folioi_cuda_sm *sm, int32_t rows)
{
    (void)rows;
    if (sizeof(typename I::shared) > (size_t)sm->shared_of_block) return false;
    if (l->dtype != line->dtype || !folioi_cuda_new_rows_fit(l)) return false;
    if (l->cached && (l->kv_dtype != line->kv || folioi_cuda_form_of(l) != FOLIOI_FORM_ROWS))
        return false;
    return is_plain(line, l);
}

template <int DK, int DV, int WARPS, int M_TILES, int KEYS, int BLOCKS>
using instance = prefill_instance<float, DK, DV, WARPS, M_TILES, KEYS, BLOCKS, true>;

const folioi_prefill_line folioi_prefill_f32[] = {
#define SPLIT(name, type, dk, dv, ...)                                                             \
    {{"prefill_" #name "_d" #dk, type, type, dk, dv, false,                                        \
      matches<instance<dk, dv, __VA_ARGS__>>},                                                     \
     instance<dk, dv, __VA_ARGS__>::ROWS,                                                          \
     dv,                                                                                           \
     instance<dk, dv, __VA_ARGS__>::BLOCKS,                                                        \
     FOLIOI_DECODE_MAX_ROWS,                                                                       \
     launch_prefill<instance<dk, dv, __VA_ARGS__>>},
#define FIXED(...)
#define XPACKED_FIXED(...)
#define BYTES(...)
#define XPACKED_BYTES(...)
#define FLEXIBLE(...)
#include "backends/cuda/prefill/prefill_instances.def"
    {}};
