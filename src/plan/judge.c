/* judge.c: the reasons why a backend cannot run an attention over a cache. */
#include "plan/judge.h"

#include <stdarg.h>
#include <stdio.h>

void folioi_reasons_add(folioi_reasons *reasons, const char *format, ...)
{
    char line[256];
    va_list args;
    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    reasons->count++;
    if (reasons->size == 0 || reasons->length + 1 >= reasons->size) return;
    int n = snprintf(reasons->text + reasons->length, reasons->size - reasons->length, "%s%s%s%s",
                     reasons->length > 0 ? "\n" : "", reasons->prefix ? reasons->prefix : "",
                     reasons->prefix ? ": " : "", line);
    reasons->length += n > 0 ? (size_t)n : 0;
    if (reasons->length >= reasons->size) reasons->length = reasons->size - 1;
}

void folioi_backend_judge(const folioi_backend *backend, const folioi_request *request,
                          folioi_reasons *reasons)
{
    const folio_attention_desc *a = request->attention;
    const char *unavailable = backend->unavailable();
    if (unavailable != NULL) {
        folioi_reasons_add(reasons, "%s", unavailable);
        return;
    }
    int32_t largest = a->k_head_size > a->v_head_size ? a->k_head_size : a->v_head_size;
    if (largest > backend->max_head_size)
        folioi_reasons_add(reasons, "head size %d is above this backend's largest, %d", largest,
                           backend->max_head_size);
    if ((request->types & FOLIO_ATTENTION_BIT(FOLIO_ATTENTION_ENCODER_DECODER)) &&
        (a->window_left >= 0 || a->window_right >= 0))
        folioi_reasons_add(reasons, "cross attention has no window: a key has no position there");
    if (request->cache == NULL) return;
    const folio_kv_cache_desc *c = &request->cache->desc;
    if (c->dtype != a->kv_dtype)
        folioi_reasons_add(reasons, "the cache holds %s, the attention's kv_dtype is %s",
                           folio_dtype_name(c->dtype), folio_dtype_name(a->kv_dtype));
    if (c->v_in_k != a->v_in_k)
        folioi_reasons_add(reasons, "v_in_k is %d in the cache and %d in the attention", c->v_in_k,
                           a->v_in_k);
    if (c->num_kv_heads != a->num_kv_heads || c->k_head_size != a->k_head_size ||
        c->v_head_size != a->v_head_size)
        folioi_reasons_add(
            reasons, "the cache has %d kv heads of sizes %d and %d, the attention %d of %d and %d",
            c->num_kv_heads, c->k_head_size, c->v_head_size, a->num_kv_heads, a->k_head_size,
            a->v_head_size);
}
