/*
 * touch.h: placement of large memory on machines with several NUMA nodes. A page comes from the node of the thread
 * that writes it first. When a KV cache is created, nobody knows which thread will read a block. So its pages are
 * spread evenly, and no node serves all of them.
 */
#ifndef FOLIOI_TOUCH_H
#define FOLIOI_TOUCH_H

#include "core/context.h"

/** Let the context's threads write to the pages of new memory, each its share of every stretch. */
void folioi_touch(const folio_context *ctx, void *memory, int64_t bytes);

/** Is there more than one memory node? Where there is not, pages are better left to their first use. */
bool folioi_has_memory_nodes(void);

#endif
