/* kv_shape.c: the shape that a cache of a description has on a backend, without creating it. */
#include "backends/registry.h"
#include "cache/kv_layout.h"
#include "core/alloc.h"
#include "core/dtype.h"

#include <string.h>

folio_status folio_kv_cache_get_shape(const char *backend, const folio_kv_cache_desc *desc,
                                      folio_kv_cache_shape *shape)
{
    folioi_kv_format f;
    folio_backend_info info = {.struct_size = sizeof info};
    bool on_device = false;
    if (backend != NULL && strcmp(backend, "auto") != 0) {
        TRY(folio_backend_get_info(backend, &info));
        if (!info.available) FAIL(FOLIO_ERR_UNSUPPORTED, "%s: %s", backend, info.reason);
        on_device = folioi_backend_find(backend)->on_device;
    }
    TRY(folioi_kv_format_init(desc, on_device, &f));
    folio_kv_cache_shape s = {
        .k = f.k,
        .v = f.v,
        .k_scales = f.k_scales,
        .v_scales = f.v_scales,
        .layer_bytes = f.layer_bytes,
        .total_bytes = f.layer_bytes * f.desc.num_layers,
        .alignment = f.desc.layout == FOLIO_LAYOUT_NATIVE ? FOLIOI_ALIGN
                                                          : (int64_t)folio_dtype_size(f.desc.dtype),
        .layout_id = folioi_layout_id(&f),
        .layout_version = FOLIOI_LAYOUT_VERSION,
    };
    return folioi_struct_out(shape, &s, sizeof s, "folio_kv_cache_shape");
}
