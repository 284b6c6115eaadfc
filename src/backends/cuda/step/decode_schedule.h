/*
 * decode_schedule.h: divides the keys of a decode step among blocks. The sequences lie one after another on a line. Each is
 * as long as its keys plus a fixed cost. The line is cut into num_shares equal stretches. Share b (one block per kv head)
 * computes what lies in stretch b:
 *
 *   | seq 0        | seq 1 | seq 2                          | seq 3  |
 *   |    share 0      |    share 1      |     share 2     |  share 3 |
 *
 * A few shares stay empty if that avoids cuts: 64 equal sequences fit 32 shares, but not 33. With split_len > 0 keys are cut
 * at its multiples, whatever the batch, and a part goes to the share where its middle lies. A step of few sequences may be
 * computed by clusters of blocks: each sequence then has `cluster` equal parts, one for each of as many shares. Plain C:
 * the device runs it with many threads, host tests with one.
 */
#ifndef FOLIOI_DECODE_SCHEDULE_H
#define FOLIOI_DECODE_SCHEDULE_H

#include "backends/cuda/step/cuda_step.h"

#define FOLIOI_DECODE_CUT 64           /* cuts lie at multiples of this many keys           */
#define FOLIOI_DECODE_ITEM_BYTES 98304 /* what an item costs beside its keys, in bytes of keys */
#define FOLIOI_DECODE_WHOLE 128        /* so many keys are not cut: a tile for each warp    */

/** A stretch of one sequence's keys; a multiple of 16 bytes. */
typedef struct folioi_decode_item {
    int32_t seq, begin, end; /* begin == end: the sequence has no key to see */
    int32_t part, num_parts; /* of the sequence                               */
    int32_t store;           /* part 0's place in the workspace; num_parts > 1 */
    int32_t share;
    int32_t first_tile; /* of a share's first items: how many tiles those before it have; else 0 */
    int64_t slot;       /* of the sequence's first new token; -1: none */
    folioi_cuda_seq sequence; /* a copy, so that it comes with the item */
} folioi_decode_item;

#define FOLIOI_DECODE_KEPT 8
#define FOLIOI_DECODE_TILES 32

/**
 * A share: which items it has, and copies of the first ones, so that a block needs one load. Also the block numbers of
 * these items' first tiles of 16 keys: their copies can start right after that load. A multiple of 16 bytes.
 */
typedef struct folioi_decode_share {
    int32_t begin, end; /* among the schedule's items */
    int32_t unused[2];
    folioi_decode_item kept[FOLIOI_DECODE_KEPT]; /* past the share's end: zeros */
    int32_t blocks[FOLIOI_DECODE_TILES];         /* -1: not known */
} folioi_decode_share;

/** A schedule in device memory. */
typedef struct folioi_decode_table {
    folioi_decode_share *shares; /* [num_shares] */
    folioi_decode_item *items;
    const int32_t *blocks; /* the step's block tables, if each block holds whole tiles; else NULL */
    const int64_t *slots;  /* of the step's new tokens, if decode may store them; else NULL */
} folioi_decode_table;

/** What the schedule depends on beside the sequences. */
typedef struct folioi_decode_rule {
    int32_t heads_per_kv, max_rows, num_shares, split_len;
    int32_t item_cost;    /* of decode_item_cost                                     */
    int32_t cluster;      /* parts of each sequence, in steps of up to cluster_seqs of them */
    int32_t cluster_seqs; /* 0: no step has clusters                                        */
    int64_t window_left, window_right;
    int64_t block_size;
} folioi_decode_rule;

/** Keys that some row of a sequence sees, and how they are cut. */
typedef struct folioi_decode_span {
    int64_t base;       /* cuts are at base + n * FOLIOI_DECODE_CUT, or at multiples of split_len */
    int32_t begin, end; /* as key_range_of says */
    int32_t taken;      /* 0: decode has nothing to do for it */
} folioi_decode_span;

/** Items and workspace places, counted. */
typedef struct folioi_decode_count {
    int32_t items, stores;
} folioi_decode_count;

/** Longer sequences gain nothing from clusters, which have fewer blocks than the device has room for. */
#define FOLIOI_DECODE_CLUSTER_KEYS 32768

/** Is a step of so many sequences computed by clusters of blocks? longest: the most keys of one, as far as the host knows. */
SHARED_INLINE bool decode_is_clustered(int32_t cluster_seqs, int64_t num_seqs, int64_t longest)
{
    return cluster_seqs > 0 && num_seqs <= cluster_seqs && longest <= FOLIOI_DECODE_CLUSTER_KEYS;
}

/** The rule for a step: its cluster is 0 if none is used. */
SHARED_INLINE folioi_decode_rule decode_rule_for(const folioi_decode_rule *rule, int64_t num_seqs,
                                                 int64_t longest)
{
    folioi_decode_rule to = *rule;
    if (!decode_is_clustered(rule->cluster_seqs, num_seqs, longest)) to.cluster = 0;
    return to;
}

SHARED_INLINE int64_t decode_clamp(int64_t x, int64_t low, int64_t high)
{
    return x < low ? low : x > high ? high : x;
}

SHARED_INLINE folioi_decode_span decode_span(const folioi_decode_rule *rule,
                                             const folioi_cuda_seq *s)
{
    folioi_decode_span span = {0, 0, 0, 0};
    if (s->query_len <= 0 || (int64_t)s->query_len * rule->heads_per_kv > rule->max_rows)
        return span;
    span.begin = seq_keys(s, rule->window_left, rule->window_right, 0).begin;
    span.end = seq_keys(s, rule->window_left, rule->window_right, s->query_len - 1).end;
    if (span.begin > span.end) span.begin = span.end;
    span.base = span.begin / 16 * 16;
    span.taken = 1;
    return span;
}

/** What an item costs beside its keys, in keys. key_bytes: K and V of a key and kv head. */
SHARED_INLINE int32_t decode_item_cost(int64_t key_bytes)
{
    return (int32_t)(FOLIOI_DECODE_ITEM_BYTES / decode_clamp(key_bytes, 128, 1024));
}

/** Fixed parts: number of the first, and how many. */
SHARED_INLINE int32_t decode_fixed_parts(const folioi_decode_rule *rule,
                                         const folioi_decode_span *span, int32_t *first)
{
    *first = span->begin / rule->split_len;
    if (span->begin >= span->end) return 1;
    return (span->end - 1) / rule->split_len + 1 - *first;
}

SHARED_INLINE int64_t decode_cost(const folioi_decode_rule *rule, const folioi_decode_span *span)
{
    if (!span->taken) return 0;
    if (rule->cluster > 0) return rule->cluster; /* a stretch is one part */
    int32_t first, parts = 1;
    if (rule->split_len > 0) parts = decode_fixed_parts(rule, span, &first);
    return span->end - span->base + (int64_t)parts * rule->item_cost;
}

#define FOLIOI_DECODE_CHOICES 3

/** How many shares choice c uses: all of them, or 1/32 or 2/32 fewer; 0: no such choice. */
SHARED_INLINE int32_t decode_choice(const folioi_decode_rule *rule, int32_t c)
{
    if (c > 0 && (rule->split_len > 0 || rule->cluster > 0 || rule->num_shares < 32)) return 0;
    return rule->num_shares - c * (rule->num_shares / 32);
}

/** Is a choice with fewer shares better? It must save some cuts, and its stretches may be longer by an item's cost. */
SHARED_INLINE bool decode_better(const folioi_decode_rule *rule, int32_t items, int64_t stretch,
                                 int32_t all_items, int64_t all_stretch)
{
    return items <= all_items - rule->num_shares / 8 && stretch <= all_stretch + rule->item_cost;
}

/** Length of a share's stretch; at least FOLIOI_DECODE_CUT, so that no part between two cuts is empty. */
SHARED_INLINE int64_t decode_stretch(int32_t num_shares, int64_t total)
{
    int64_t stretch = (total + num_shares - 1) / num_shares;
    return stretch < FOLIOI_DECODE_CUT ? FOLIOI_DECODE_CUT : stretch;
}

/** Key at which the end of share b cuts a sequence that starts at x. */
SHARED_INLINE int32_t decode_cut(const folioi_decode_rule *rule, const folioi_decode_span *span,
                                 int64_t x, int64_t stretch, int64_t b)
{
    int64_t keys = (b + 1) * stretch - x - rule->item_cost + FOLIOI_DECODE_CUT / 2;
    keys = keys < 0 ? 0 : keys / FOLIOI_DECODE_CUT * FOLIOI_DECODE_CUT;
    return (int32_t)decode_clamp(span->base + keys, span->begin, span->end);
}

/** Shares of the first and last part of a sequence at x. */
SHARED_INLINE void decode_shares(const folioi_decode_rule *rule, const folioi_decode_span *span,
                                 int64_t x, int64_t stretch, int64_t *first, int64_t *last)
{
    int64_t cost = decode_cost(rule, span);
    *first = x / stretch;
    *last = (x + cost - 1) / stretch;
    if (span->end - span->base <= FOLIOI_DECODE_WHOLE) *first = *last = (x + cost / 2) / stretch;
    while (*first < *last && decode_cut(rule, span, x, stretch, *first) <= span->begin) ++*first;
    while (*first < *last && decode_cut(rule, span, x, stretch, *last - 1) >= span->end) --*last;
}

/** How many parts a sequence at x has; *first: fixed part or share of part 0. */
SHARED_INLINE int32_t decode_parts(const folioi_decode_rule *rule, const folioi_decode_span *span,
                                   int64_t x, int64_t stretch, int64_t *first)
{
    if (!span->taken) return 0;
    if (rule->cluster > 0) {
        *first = x;
        return rule->cluster;
    }
    if (rule->split_len > 0) {
        int32_t number, parts = decode_fixed_parts(rule, span, &number);
        *first = number;
        return parts;
    }
    int64_t last;
    decode_shares(rule, span, x, stretch, first, &last);
    return (int32_t)(last - *first + 1);
}

/** Part p of `parts`: its keys and share. */
SHARED_INLINE void decode_part(const folioi_decode_rule *rule, const folioi_decode_span *span,
                               int64_t x, int64_t stretch, int64_t first, int32_t parts, int32_t p,
                               folioi_decode_item *item)
{
    item->part = p;
    item->num_parts = parts;
    item->begin = span->begin;
    item->end = span->end;
    int64_t share = first + p;
    if (rule->cluster > 0) { /* whole tiles of 16 keys; some have none */
        int64_t tiles = (span->end - span->base + 15) / 16;
        int64_t low = span->base + tiles * p / parts * 16;
        int64_t high = span->base + tiles * (p + 1) / parts * 16;
        item->begin = (int32_t)decode_clamp(low, span->begin, span->end);
        item->end = (int32_t)decode_clamp(high, span->begin, span->end);
    } else if (rule->split_len > 0) {
        int64_t low = (first + p) * rule->split_len;
        if (p > 0) item->begin = (int32_t)low;
        if (p + 1 < parts) item->end = (int32_t)(low + rule->split_len);
        int64_t cost = rule->item_cost + item->end - item->begin;
        int64_t at = x + (int64_t)p * rule->item_cost + item->begin - span->base;
        share = (at + cost / 2) / stretch;
    } else {
        if (p > 0) item->begin = decode_cut(rule, span, x, stretch, share - 1);
        if (p + 1 < parts) item->end = decode_cut(rule, span, x, stretch, share);
    }
    item->share = (int32_t)decode_clamp(share, 0, rule->num_shares - 1);
}

/** The slot of an item that is there. */
SHARED_INLINE void decode_keep_slot(const folioi_decode_table *table, int32_t n)
{
    folioi_decode_item *item = &table->items[n];
    if (table->slots != 0) item->slot = table->slots[item->sequence.new_row];
}

/** First item of share b among items in rising order of shares. */
SHARED_INLINE int32_t decode_share_begin(const folioi_decode_item *items, int32_t num_items,
                                         int32_t b)
{
    int32_t low = 0, high = num_items;
    while (low < high) {
        int32_t middle = low + (high - low) / 2;
        if (items[middle].share < b) low = middle + 1;
        else high = middle;
    }
    return low;
}

/** Where share b begins, and the one before it ends; b up to num_shares. */
SHARED_INLINE void decode_bound_share(const folioi_decode_rule *rule,
                                      const folioi_decode_table *table, int32_t num_items,
                                      int32_t b)
{
    int32_t at = decode_share_begin(table->items, num_items, b);
    if (b < rule->num_shares) table->shares[b].begin = at;
    if (b > 0) table->shares[b - 1].end = at;
}

/** Tiles of 16 keys that an item has a key of. */
SHARED_INLINE int32_t decode_tiles(const folioi_decode_item *item)
{
    return item->begin < item->end ? (item->end - 1) / 16 - item->begin / 16 + 1 : 0;
}

/** Item n % FOLIOI_DECODE_KEPT of a share that has its bounds. */
SHARED_INLINE void decode_keep_item(const folioi_decode_table *table, int32_t n)
{
    folioi_decode_item none = {0};
    folioi_decode_share *share = &table->shares[n / FOLIOI_DECODE_KEPT];
    const folioi_decode_item *first = &table->items[share->begin];
    int32_t i = n % FOLIOI_DECODE_KEPT;
    share->kept[i] = share->begin + i < share->end ? first[i] : none;
    for (int32_t j = 0; j < i && share->begin + i < share->end; j++)
        share->kept[i].first_tile += decode_tiles(&first[j]);
    if (i == 0) share->unused[0] = share->unused[1] = 0;
}

/** Block n % FOLIOI_DECODE_TILES of a share that has its items. */
SHARED_INLINE void decode_keep_block(const folioi_decode_rule *rule,
                                     const folioi_decode_table *table, int32_t n)
{
    folioi_decode_share *share = &table->shares[n / FOLIOI_DECODE_TILES];
    int32_t i = n % FOLIOI_DECODE_TILES, at = 0;
    share->blocks[i] = -1;
    for (int32_t k = 0; table->blocks != 0 && k < FOLIOI_DECODE_KEPT; k++) {
        const folioi_decode_item *item = &share->kept[k];
        int32_t tiles = decode_tiles(item), key = (item->begin / 16 + i - at) * 16;
        if (i >= at && i < at + tiles)
            share->blocks[i] = table->blocks[item->sequence.table + key / rule->block_size];
        at += tiles;
    }
}

/** Cost of sequences [first, last). */
SHARED_INLINE int64_t decode_cost_of(const folioi_decode_rule *rule, const folioi_cuda_seq *seqs,
                                     int32_t first, int32_t last)
{
    int64_t cost = 0;
    for (int32_t s = first; s < last; s++) {
        folioi_decode_span span = decode_span(rule, &seqs[s]);
        cost += decode_cost(rule, &span);
    }
    return cost;
}

/** Items of sequences [first, last), the first of them at x. items == NULL only counts. */
SHARED_INLINE folioi_decode_count decode_items(const folioi_decode_rule *rule,
                                               const folioi_cuda_seq *seqs, int32_t first,
                                               int32_t last, int64_t x, int64_t stretch,
                                               folioi_decode_count start, folioi_decode_item *items)
{
    folioi_decode_count at = start;
    for (int32_t s = first; s < last; s++) {
        folioi_decode_span span = decode_span(rule, &seqs[s]);
        int64_t first_share = 0;
        int32_t parts = decode_parts(rule, &span, x, stretch, &first_share);
        for (int32_t p = 0; items != 0 && p < parts; p++) {
            folioi_decode_item *item = &items[at.items + p];
            decode_part(rule, &span, x, stretch, first_share, parts, p, item);
            item->seq = s;
            item->store = at.stores;
            item->first_tile = 0;
            item->slot = -1;
            item->sequence = seqs[s];
        }
        at.items += parts;
        at.stores += parts > 1 ? parts : 0;
        x += decode_cost(rule, &span);
    }
    return at;
}

/** Items and places of the whole schedule by one thread. rule: of decode_rule_for. *stretch: of a share. */
static inline folioi_decode_count decode_count_host(const folioi_decode_rule *rule,
                                                    const folioi_cuda_seq *seqs, int32_t num_seqs,
                                                    int64_t *stretch)
{
    int64_t total = decode_cost_of(rule, seqs, 0, num_seqs);
    folioi_decode_count none = {0, 0}, best = none;
    for (int32_t c = 0; c < FOLIOI_DECODE_CHOICES && decode_choice(rule, c) > 0; c++) {
        int64_t length = decode_stretch(decode_choice(rule, c), total);
        folioi_decode_count n = decode_items(rule, seqs, 0, num_seqs, 0, length, none, 0);
        if (c > 0 && !decode_better(rule, n.items, length, best.items, *stretch)) continue;
        best = n;
        *stretch = length;
    }
    return best;
}

/** The whole schedule by one thread; returns the number of items. */
static inline int32_t decode_schedule_host(const folioi_decode_rule *rule,
                                           const folioi_cuda_seq *seqs, int32_t num_seqs,
                                           const folioi_decode_table *table)
{
    int64_t stretch = 0;
    folioi_decode_count n = decode_count_host(rule, seqs, num_seqs, &stretch), none = {0, 0};
    decode_items(rule, seqs, 0, num_seqs, 0, stretch, none, table->items);
    for (int32_t i = 0; i < n.items; i++) decode_keep_slot(table, i);
    for (int32_t b = 0; b <= rule->num_shares; b++) decode_bound_share(rule, table, n.items, b);
    for (int32_t i = 0; i < rule->num_shares * FOLIOI_DECODE_KEPT; i++) decode_keep_item(table, i);
    for (int32_t i = 0; i < rule->num_shares * FOLIOI_DECODE_TILES; i++)
        decode_keep_block(rule, table, i);
    return n.items;
}

#endif
