/*
 * schedule.h: the work of one attention of one type in one step, cut into items. Pure: no threads, no
 * memory of its own.
 *
 * A tile is up to tile_queries neighbouring queries of one sequence, times the heads of a head group. Its
 * keys are cut into splits at multiples of split_len, whatever the batch or the threads. Most tiles are
 * one item that folds its splits from left to right. A tile with far more than its share of the work
 * becomes a chain: several items, each of which leaves one partial result per split, and whoever ends
 * last folds them, in the same order. So threads decide who computes a split, never where it is cut.
 */
#ifndef FOLIOI_SCHEDULE_H
#define FOLIOI_SCHEDULE_H

#include "batch/batch.h"
#include "plan/attention.h"
#include "plan/row_ranges.h"

typedef struct folioi_item {
    int32_t seq;
    int32_t first_query, num_queries;
    int32_t split_begin, split_end; /* equal: no row sees a key */
    int32_t chain;                  /* -1: the item is the whole tile */
} folioi_item;

typedef struct folioi_chain {
    int32_t split_begin, split_end;
    int32_t num_items;
    int64_t first_partial; /* partial rows of one kv head before it: sum of splits x rows */
} folioi_chain;

/** Fixed when a plan is created. */
typedef struct folioi_schedule_limits {
    int32_t heads_per_kv, num_kv_heads, num_workers;
    int32_t tile_queries, split_len; /* the most queries of a tile ... */
    int32_t least_queries;           /* ... and the fewest it is cut down to */
    int64_t max_items, max_chains;
    int64_t max_partials; /* partial rows of one kv head */
} folioi_schedule_limits;

typedef struct folioi_schedule {
    folioi_schedule_limits limits;
    folioi_item *items;   /* [max_items], largest first after an update */
    folioi_item *scratch; /* [max_items] */
    uint8_t *weights;     /* [max_items] log2 of each item's work */
    folioi_chain *chains; /* [max_chains] */
    int64_t num_items, num_chains, num_partials;
    int32_t tile_queries; /* of this step */
    int32_t num_workers;  /* worth waking: all, or 1 where the whole step is a few microseconds */
} folioi_schedule;

/** Capacities for a plan's limits. partial_budget: most partial rows of one kv head worth keeping. */
folioi_schedule_limits folioi_schedule_size(const folio_attention_desc *a, int64_t max_seqs,
                                            int64_t max_queries, int64_t max_keys,
                                            int32_t num_workers, int32_t tile_rows,
                                            int32_t split_len, int64_t partial_budget);

void folioi_schedule_fill(folioi_schedule *schedule, const folio_attention_desc *a,
                          const folio_batch *batch, folio_attention_type type);

#endif
