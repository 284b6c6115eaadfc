/* judge.h: can a backend run an attention over a cache? Every reason why not. */
#ifndef FOLIOI_JUDGE_H
#define FOLIOI_JUDGE_H

#include "cache/kv_layout.h"
#include "core/backend.h"

/** One question to `supports`, with defaults filled in. */
typedef struct folioi_request {
    const folio_attention_desc *attention;
    uint32_t types;
    const folioi_kv_format *cache; /* NULL: without one */
} folioi_request;

/** Reasons, a line each, into a buffer that may be too small. */
typedef struct folioi_reasons {
    char *text;
    size_t size, length;
    int32_t count;
    const char *prefix; /* who refuses; NULL: nobody is named */
} folioi_reasons;

void folioi_reasons_add(folioi_reasons *reasons, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/** Every reason why a backend cannot run this. */
void folioi_backend_judge(const folioi_backend *backend, const folioi_request *request,
                          folioi_reasons *reasons);

#endif
