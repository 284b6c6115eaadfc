/*
 * touch.h: where large memory lies on machines with several memory nodes. A page comes from the node of
 * the thread that first writes to it. Which thread will read a block of a KV cache nobody knows when the
 * cache is made; what can be had is that its pages are spread evenly, so that no node serves them all.
 */
#ifndef FOLIOI_TOUCH_H
#define FOLIOI_TOUCH_H

#include "core/context.h"

/** Let the context's threads write to the pages of new memory, each its share of every stretch. */
void folioi_touch(const folio_context *ctx, void *memory, int64_t bytes);

/** Is there more than one memory node? Where there is not, pages are better left to their first use. */
bool folioi_has_memory_nodes(void);

#endif
