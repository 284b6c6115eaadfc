/* host_merge.h: the merge entry of host backends. */
#ifndef FOLIOI_HOST_MERGE_H
#define FOLIOI_HOST_MERGE_H

#include "core/status.h"

/** Parts of rows by their lse, folded from the first to the last; `merge` was checked. */
folio_status folioi_host_merge(const folio_context *ctx, const folio_merge *merge, void *stream);

#endif
