/* touch.c: spreads the pages of new memory over the context's threads. */
#include "core/touch.h"

#include "core/cancel.h"
#include "core/checked.h"

#include <stdio.h>
#include <string.h>

#define STRIPE ((int64_t)2 << 20) /* a huge page */
#define PAGE 4096                 /* the smallest there is */

typedef struct {
    char *memory;
    int64_t bytes, workers;
} touch_task;

static void touch_stripes(void *arg, int64_t worker)
{
    const touch_task *t = arg;
    for (int64_t from = worker * STRIPE; from < t->bytes; from += t->workers * STRIPE)
        for (int64_t at = from; at < min_i64(from + STRIPE, t->bytes); at += PAGE)
            *(volatile char *)(t->memory + at) = 0;
}

void folioi_touch(const folio_context *ctx, void *memory, int64_t bytes)
{
    touch_task t = {memory, bytes, ctx->num_threads};
    folioi_parallel(ctx, t.workers, touch_stripes, &t);
}

bool folioi_has_memory_nodes(void)
{
    /* "0", or a list such as "0-1" or "0,2" */
    char nodes[64] = "";
    int cancel = cancel_defer();
    FILE *f = fopen("/sys/devices/system/node/has_normal_memory", "re");
    bool many = f != NULL && fgets(nodes, sizeof nodes, f) != NULL && strpbrk(nodes, "-,") != NULL;
    if (f != NULL) fclose(f);
    cancel_allow(cancel);
    return many;
}
