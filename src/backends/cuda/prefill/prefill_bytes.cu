/* prefill_bytes.cu: the lines BYTES of prefill_instances.def: 8-bit K and V, no option on scores. */
#include "backends/cuda/prefill/prefill_launch.h"

static bool matches(const folioi_cuda_line *line, const folioi_cuda_layer *l,
                    const folioi_cuda_sm *sm, int32_t rows)
{
    (void)sm, (void)rows;
    return l->cached && !l->append && l->kv_dtype == line->kv && is_fixed(line, l) &&
           (line->kv == FOLIO_INT8 || l->k.scale > 0) &&
           (folioi_cuda_is_xpacked(l) ||
            (folioi_cuda_side_aligned(&l->k, 1, 16) && folioi_cuda_side_aligned(&l->v, 1, 16)));
}

static constexpr prefill_kv kv_of(int type)
{
    return type == FOLIO_FP8_E4M3 ? KV_E4M3 : type == FOLIO_FP8_E5M2 ? KV_E5M2 : KV_INT8;
}

template <bool XPACKED, int TYPE, int DK, int DV, int WARPS, int M_TILES, int KEYS, int BLOCKS>
using instance =
    prefill_instance<__half, DK, DV, WARPS, M_TILES, KEYS, BLOCKS, true, XPACKED, kv_of(TYPE)>;

const folioi_prefill_line folioi_prefill_bytes[] = {
#define LINE(xpacked, name, type, dk, dv, ...)                                                     \
    {{"prefill_" name "_d" #dk, (folio_dtype)0, type, dk, dv, false, matches},                     \
     instance<xpacked, type, dk, dv, __VA_ARGS__>::ROWS,                                           \
     dv,                                                                                           \
     instance<xpacked, type, dk, dv, __VA_ARGS__>::BLOCKS,                                         \
     FOLIOI_DECODE_MAX_ROWS,                                                                       \
     launch_prefill<instance<xpacked, type, dk, dv, __VA_ARGS__>>,                                 \
     xpacked},
#define BYTES(name, ...) LINE(false, #name, __VA_ARGS__)
#define XPACKED_BYTES(name, ...) LINE(true, "x_" #name, __VA_ARGS__)
#define FIXED(...)
#define XPACKED_FIXED(...)
#define FLEXIBLE(...)
#define SPLIT(...)
#include "backends/cuda/prefill/prefill_instances.def"
    {}};
