/* rotary.h: a rotary embedding: its description, and the table that folio_rotary_create made. */
#ifndef FOLIOI_ROTARY_H
#define FOLIOI_ROTARY_H

#include "core/context.h"
#include "core/rotation.h"

struct folio_rotary {
    folioi_refs refs;
    folio_context *ctx;
    folioi_rotation rotation;
    int64_t bytes; /* of the table */
};

/* Longest rows that rotate on their way into a cache: they pass the stack. Kernels' limits are lower. */
#define FOLIOI_ROTARY_MAX_DIMS 8192

/** A description as the caller gave it, checked and with its defaults. */
folio_status folioi_rotary_read(const folio_rotary_desc *desc, folio_rotary_desc *out);

/** Can rows of k_head_size numbers of such a context's tensors rotate by it? v_in_k: how many of them are V; else 0. */
folio_status folioi_rotary_check(const folio_rotary *rotary, const folio_context *ctx,
                                 int32_t k_head_size, int32_t v_in_k);

#endif
