/* pool_check.h: the invariants of a pool. Under its lock. */
#ifndef FOLIOI_POOL_CHECK_H
#define FOLIOI_POOL_CHECK_H

#include "cache/transfer.h"

folio_status folioi_pool_check(folio_pool *pool);

#endif
