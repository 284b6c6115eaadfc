/* attention.h: one layer geometry, checked, with defaults filled in. */
#ifndef FOLIOI_ATTENTION_H
#define FOLIOI_ATTENTION_H

#include "core/context.h"

struct folio_attention {
    folioi_refs refs;
    folio_context *ctx;
    folio_attention_desc desc; /* no window: both sides -1 */
};

/** Check a description and fill in its defaults. */
folio_status folioi_attention_resolve(const folio_attention_desc *desc, folio_attention_desc *out);

#endif
