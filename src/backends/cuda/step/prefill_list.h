/*
 * prefill_list.h: the work of a step's sequences of many rows. A tile is some queries of a sequence, for all query heads of a
 * kv head; an item is a tile with a range of its keys:
 *
 *   sequence   queries                keys
 *   0          [0, 32)                [0, 4096) part 0 of 2     a block computes an item for one kv head (a unit);
 *   0          [0, 32)                [4096, 8192) part 1       parts of a tile meet in the workspace: prefill_parts.h
 *   1          [0, 16)                [0, 900)
 *
 * Tiles are cut where they are too few for the device: prefill_limit chooses the longest part from a histogram of the tiles'
 * keys. With split_len, cuts lie at its multiples instead, and depend on the sequence alone. The list is made in passes that
 * many threads share: on the device one block with a barrier between passes; on the host one thread plays all of them. Items
 * of nearly equal length (3 %) share a bucket, the longest first; their order there is any, and decides when an item is
 * computed, never what it comes to.
 */
#ifndef FOLIOI_CUDA_PREFILL_LIST_H
#define FOLIOI_CUDA_PREFILL_LIST_H

#include "backends/cuda/step/cuda_step.h"

/** Queries and keys of one sequence, for every kv head; a multiple of 16 bytes. */
typedef struct folioi_prefill_item {
    int32_t seq;
    int32_t first_query, num_queries;
    int32_t begin, end;      /* keys: what a row sees outside of them is another part's         */
    int32_t part, num_parts; /* of the tile: parts follow one another and cover its keys        */
    int32_t store;           /* first row of part 0 in the workspace; num_parts > 1             */
    int32_t counter;         /* number of the tile among those that are cut; num_parts > 1      */
    int32_t unused;
    folioi_cuda_seq sequence; /* a copy, so that a block has all in one load */
} folioi_prefill_item;

/** What comes before the items in device memory; a multiple of 16 bytes. */
typedef struct folioi_prefill_head {
    int32_t num_items;
    int32_t num_cut_tiles, num_rows; /* counters and rows of the workspace in use */
    int32_t num_keys;                /* of all sequences with items, INT32_MAX at most */
} folioi_prefill_head;

/** What a list depends on beside the step. */
typedef struct folioi_prefill_shape {
    int32_t queries;      /* of a tile                    */
    int32_t heads_per_kv; /* query heads of one kv head   */
    int64_t window_left, window_right;
    int32_t num_at_once; /* items that the device computes at once           */
    int32_t num_alone;   /* those that have a multiprocessor to themselves   */
    int32_t
        split_len; /* 0, or cuts lie at multiples of it for up to 32 rows of a kv head, of more */
                   /* for more rows, and only sequences of one tile are cut                     */
    int32_t decode_rows; /* sequences of up to so many rows of a kv head are decode's            */
} folioi_prefill_shape;

/* Cuts are at multiples of this many keys, and no part is shorter than FOLIOI_PREFILL_SHORTEST. */
#define FOLIOI_PREFILL_CUT 128
#define FOLIOI_PREFILL_SHORTEST 256
/*
 * In keys: what an item costs beside its own, and what parts cost: where all are computed at once the blocks that have ended
 * merge together, else those that still have items to compute do it alone.
 */
#define FOLIOI_PREFILL_ITEM_COST 128
#define FOLIOI_PREFILL_PART_COST 384
#define FOLIOI_PREFILL_LONE_PART_COST 2048

/* ---- buckets: 32 to the octave, the longest first ---- */

#define FOLIOI_PREFILL_BUCKETS 1024

SHARED_INLINE int32_t prefill_bucket(int32_t keys)
{
    int32_t octave = 0;
    while (keys >> octave >= 64) octave++;
    return FOLIOI_PREFILL_BUCKETS - 1 - (octave * 32 + (keys >> octave));
}

/** The most keys of a bucket. */
SHARED_INLINE int64_t prefill_bucket_keys(int32_t bucket)
{
    int32_t n = FOLIOI_PREFILL_BUCKETS - 1 - bucket, octave = n < 64 ? 0 : n / 32 - 1;
    return ((int64_t)(n - octave * 32 + 1) << octave) - 1;
}

/* ---- room ---- */

/** The room that a list needs, and the workspace of what it holds. */
typedef struct folioi_prefill_room {
    int64_t items;
    int64_t cut_tiles; /* counters of a unit each                   */
    int64_t rows;      /* sums of a row of one kv head, in all parts */
} folioi_prefill_room;

/** Rows of one kv head of a tile of so many queries. */
SHARED_INLINE int64_t prefill_rows(const folioi_prefill_shape *shape, int64_t queries)
{
    return min_i64(queries, shape->queries) * shape->heads_per_kv;
}

/** Most parts of all tiles that are cut, without split_len: the device is not filled more than twice. */
SHARED_INLINE int64_t prefill_max_parts(const folioi_prefill_shape *shape)
{
    return 2 * (int64_t)shape->num_at_once;
}

/** split_len times this is where a sequence of so many rows is cut; its parts have as many rows as those of one of 32. */
SHARED_INLINE int32_t prefill_stride(int64_t rows)
{
    int32_t stride = 1;
    while (rows > 32 * (int64_t)stride) stride *= 2;
    return stride;
}

/** The room for a plan's steps. */
SHARED_INLINE folioi_prefill_room prefill_room(const folioi_prefill_shape *shape,
                                               int64_t max_query_tokens, int64_t max_seqs,
                                               int64_t max_query_len, int64_t max_seq_len)
{
    int64_t tiles = max_query_tokens / shape->queries + max_seqs;
    folioi_prefill_room room = {0, 0, 0};
    if (shape->split_len > 0) {
        int64_t parts = ceil_div(max_seq_len, shape->split_len);
        int64_t most = prefill_stride(prefill_rows(shape, max_query_len));
        room.cut_tiles = parts > 1 ? max_seqs : 0;
        room.rows = room.cut_tiles * 32 * round_up(parts, most);
        room.items = tiles + room.cut_tiles * parts;
        return room;
    }
    /* a bucket's tiles are cut as its longest is */
    int64_t keys = prefill_bucket_keys(prefill_bucket((int32_t)min_i64(max_seq_len, INT32_MAX)));
    int64_t parts =
        min_i64(prefill_max_parts(shape), tiles * ceil_div(keys, FOLIOI_PREFILL_SHORTEST));
    room.cut_tiles = parts / 2;
    room.rows = parts * prefill_rows(shape, max_query_len);
    room.items = tiles + parts;
    return room;
}

/** Is a sequence computed by the decode kernels? */
SHARED_INLINE bool prefill_leaves(const folioi_prefill_shape *shape, const folioi_cuda_seq *s)
{
    return (int64_t)s->query_len * shape->heads_per_kv <= shape->decode_rows;
}

/* ---- how a tile is cut ---- */

/** Keys that some row of a tile sees, and its parts. */
typedef struct folioi_prefill_tile {
    int32_t first_query, num_queries, begin, end;
    int32_t num_parts;
    int32_t cut; /* cuts are at multiples of it; 0: parts are of equal length */
} folioi_prefill_tile;

/** The tile of a sequence that begins with a query; limit: the longest part, 0 being none. */
SHARED_INLINE folioi_prefill_tile prefill_tile(const folioi_prefill_shape *shape,
                                               const folioi_cuda_seq *s, int32_t first,
                                               int64_t limit)
{
    folioi_prefill_tile t = {first, 0, 0, 0, 1, 0};
    t.num_queries = (int32_t)min_i64(shape->queries, s->query_len - first);
    t.begin = seq_keys(s, shape->window_left, shape->window_right, first).begin;
    t.end = seq_keys(s, shape->window_left, shape->window_right, first + t.num_queries - 1).end;
    if (t.begin > t.end) t.begin = t.end;
    if (t.begin == t.end) return t;
    if (shape->split_len > 0) {
        int64_t cut =
            (int64_t)shape->split_len * prefill_stride((int64_t)s->query_len * shape->heads_per_kv);
        if (s->query_len > shape->queries || cut >= t.end) return t;
        t.cut = (int32_t)cut;
        t.num_parts = (t.end - 1) / t.cut - t.begin / t.cut + 1;
    } else if (limit > 0) {
        t.num_parts =
            (int32_t)ceil_div(prefill_bucket_keys(prefill_bucket(t.end - t.begin)), limit);
    }
    return t;
}

/** Where part p of a tile begins; that of part num_parts is the end. */
SHARED_INLINE int32_t prefill_cut(const folioi_prefill_tile *t, int32_t p)
{
    if (p == 0) return t->begin;
    if (p == t->num_parts) return t->end;
    if (t->cut > 0) return (t->begin / t->cut + p) * t->cut;
    int64_t base = t->begin / FOLIOI_PREFILL_CUT * FOLIOI_PREFILL_CUT;
    int64_t keys = (t->end - base) * p / t->num_parts;
    return (int32_t)(base +
                     (keys + FOLIOI_PREFILL_CUT / 2) / FOLIOI_PREFILL_CUT * FOLIOI_PREFILL_CUT);
}

/* ---- the longest part ---- */

#define FOLIOI_PREFILL_CHOICES 32

/** What the lengths of all parts come to where none passes a limit. */
typedef struct folioi_prefill_choice {
    int32_t items, parts; /* all, and those of tiles that are cut */
    int32_t longest;
    int64_t time; /* in keys */
} folioi_prefill_choice;

/* In shared memory on the device. */
typedef struct folioi_prefill_sort {
    int32_t
        at[FOLIOI_PREFILL_BUCKETS]; /* tiles or items of a bucket, then where the next one goes */
    int32_t sums[32];
    folioi_prefill_choice choices[FOLIOI_PREFILL_CHOICES];
    unsigned long long keys;     /* of all tiles, as buckets count them */
    unsigned long long all_keys; /* of all sequences with tiles         */
    int32_t tiles, seqs;
    int64_t limit;
    folioi_prefill_head head;
} folioi_prefill_sort;

SHARED_INLINE int32_t folioi_add(int32_t *x, int32_t n)
{
#ifdef __CUDA_ARCH__
    return atomicAdd(x, n);
#else
    int32_t old = *x;
    *x += n;
    return old;
#endif
}

SHARED_INLINE void folioi_add_keys(unsigned long long *x, unsigned long long n)
{
#ifdef __CUDA_ARCH__
    atomicAdd(x, n);
#else
    *x += n;
#endif
}

SHARED_INLINE void folioi_raise(int32_t *x, int32_t n)
{
#ifdef __CUDA_ARCH__
    atomicMax(x, n);
#else
    if (n > *x) *x = n;
#endif
}

/** Limit c: none, or an even share of all keys, of half of it and of lengths above. */
SHARED_INLINE int64_t prefill_choice_limit(const folioi_prefill_shape *shape,
                                           const folioi_prefill_sort *sort, int32_t c)
{
    if (c == 0) return 0;
    int64_t share = (int64_t)(sort->keys / (unsigned long long)shape->num_at_once);
    int64_t limit = share * (16 + c % 16) / 16 / (1 + c / 16);
    return max_i64(limit, FOLIOI_PREFILL_SHORTEST);
}

/** Add what `tiles` tiles of a bucket come to. */
SHARED_INLINE void prefill_weigh(folioi_prefill_choice *choice, int64_t limit, int32_t bucket,
                                 int32_t tiles)
{
    if (tiles == 0) return;
    int64_t keys = prefill_bucket_keys(bucket);
    int32_t parts = limit > 0 ? (int32_t)ceil_div(keys, limit) : 1;
    if (parts == 0) parts = 1;
    folioi_add(&choice->items, tiles * parts);
    if (parts > 1) folioi_add(&choice->parts, tiles * parts);
    folioi_raise(&choice->longest, (int32_t)ceil_div(keys, parts));
}

/** Have sequences two tiles or more, on the average? Prompts and chunks, no draft tokens. */
SHARED_INLINE bool prefill_are_chunks(int64_t tiles, int64_t seqs) { return tiles >= 2 * seqs; }

/** Tiles that fill the device four times are not cut, nor those of chunks that have most multiprocessors; but where cuts are fixed. */
SHARED_INLINE bool prefill_are_whole(const folioi_prefill_shape *shape, int64_t tiles, int64_t seqs)
{
    if (shape->split_len > 0) return false;
    return tiles >= 4 * (int64_t)shape->num_at_once ||
           (prefill_are_chunks(tiles, seqs) && tiles >= shape->num_alone);
}

/** Is there a limit to choose? */
SHARED_INLINE bool prefill_has_choice(const folioi_prefill_shape *shape,
                                      const folioi_prefill_sort *sort)
{
    return shape->split_len == 0 && !prefill_are_whole(shape, sort->tiles, sort->seqs);
}

/** How long a choice takes: rounds of items of mean length, or the longest one. */
SHARED_INLINE int64_t prefill_time(const folioi_prefill_shape *shape,
                                   const folioi_prefill_sort *sort,
                                   const folioi_prefill_choice *choice)
{
    int64_t rounds =
        ((uint32_t)choice->items + (uint32_t)shape->num_at_once - 1) / (uint32_t)shape->num_at_once;
    int64_t mean = (int64_t)(sort->keys / (unsigned long long)max_i64(choice->items, 1));
    int64_t merge = rounds > 1 ? FOLIOI_PREFILL_LONE_PART_COST : FOLIOI_PREFILL_PART_COST;
    return max_i64(rounds * mean, choice->longest) + rounds * FOLIOI_PREFILL_ITEM_COST +
           (choice->parts > 0 ? merge : 0);
}

/** The limit of the shortest choice that there is room for. */
SHARED_INLINE int64_t prefill_limit(const folioi_prefill_shape *shape,
                                    const folioi_prefill_sort *sort)
{
    int32_t best = 0;
    if (!prefill_has_choice(shape, sort)) return 0;
    for (int32_t c = 1; c < FOLIOI_PREFILL_CHOICES; c++)
        if (sort->choices[c].parts <= prefill_max_parts(shape) &&
            sort->choices[c].time < sort->choices[best].time)
            best = c;
    return prefill_choice_limit(shape, sort, best);
}

/* ---- the list ---- */

/** One list being made. */
typedef struct folioi_prefill_list {
    const folioi_cuda_seq *seqs;
    const folioi_cuda_counts *counts;
    folioi_prefill_shape shape;
    folioi_prefill_head *head;
    folioi_prefill_item *items; /* [room.items] */
    folioi_prefill_room room;
} folioi_prefill_list;

enum prefill_visit { PREFILL_COUNT_TILES, PREFILL_COUNT_ITEMS, PREFILL_PLACE_ITEMS };

/** A tile's items: counted, or put in place. */
SHARED_INLINE void prefill_items(const folioi_prefill_list *list, folioi_prefill_sort *sort,
                                 enum prefill_visit visit, int32_t seq,
                                 const folioi_prefill_tile *t)
{
    folioi_prefill_item item = {seq, t->first_query, t->num_queries, 0, 0, 0, t->num_parts, 0, 0,
                                0,   list->seqs[seq]};
    if (visit == PREFILL_PLACE_ITEMS && t->num_parts > 1) {
        int64_t rows = prefill_rows(&list->shape, t->num_queries);
        item.store = folioi_add(&sort->head.num_rows, (int32_t)(t->num_parts * rows));
        item.counter = folioi_add(&sort->head.num_cut_tiles, 1);
    }
    for (int32_t p = 0; p < t->num_parts; p++) {
        item.part = p;
        item.begin = prefill_cut(t, p);
        item.end = prefill_cut(t, p + 1);
        int32_t at = folioi_add(&sort->at[prefill_bucket(item.end - item.begin)], 1);
        if (visit == PREFILL_PLACE_ITEMS && at < list->room.items) list->items[at] = item;
    }
}

/** All tiles: 32 threads share a sequence. */
SHARED_INLINE void prefill_visit_tiles(const folioi_prefill_list *list, folioi_prefill_sort *sort,
                                       enum prefill_visit visit, int32_t thread, int32_t threads)
{
    const folioi_prefill_shape *shape = &list->shape;
    for (int32_t i = thread / 32; i < list->counts->num_seqs; i += threads / 32) {
        const folioi_cuda_seq *s = &list->seqs[i];
        if (prefill_leaves(shape, s)) continue;
        for (int64_t first = (int64_t)(thread % 32) * shape->queries; first < s->query_len;
             first += 32 * (int64_t)shape->queries) {
            folioi_prefill_tile t = prefill_tile(shape, s, (int32_t)first, sort->limit);
            if (visit != PREFILL_COUNT_TILES) {
                prefill_items(list, sort, visit, i, &t);
                continue;
            }
            int32_t bucket = prefill_bucket(t.end - t.begin);
            folioi_add(&sort->at[bucket], 1);
            folioi_add(&sort->tiles, 1);
            if (first == 0) {
                folioi_add(&sort->seqs, 1);
                folioi_add_keys(&sort->all_keys, (unsigned long long)s->key_len);
            }
            folioi_add_keys(&sort->keys, (unsigned long long)prefill_bucket_keys(bucket));
        }
    }
}

/* Nothing counted yet. */
SHARED_INLINE void prefill_clear(folioi_prefill_sort *sort, int32_t thread, int32_t threads)
{
    folioi_prefill_choice none = {0, 0, 0, 0};
    folioi_prefill_head empty = {0, 0, 0, 0};
    for (int32_t b = thread; b < FOLIOI_PREFILL_BUCKETS; b += threads) sort->at[b] = 0;
    for (int32_t c = thread; c < FOLIOI_PREFILL_CHOICES; c += threads) sort->choices[c] = none;
    if (thread != 0) return;
    sort->keys = sort->all_keys = 0;
    sort->tiles = sort->seqs = 0;
    sort->limit = 0;
    sort->head = empty;
}

/* What each choice of a limit comes to: 32 threads share one. */
SHARED_INLINE void prefill_weigh_choices(const folioi_prefill_shape *shape,
                                         folioi_prefill_sort *sort, int32_t thread, int32_t threads)
{
    if (!prefill_has_choice(shape, sort)) return;
    for (int32_t c = thread / 32; c < FOLIOI_PREFILL_CHOICES; c += threads / 32) {
        int64_t limit = prefill_choice_limit(shape, sort, c);
        for (int32_t b = thread % 32; b < FOLIOI_PREFILL_BUCKETS; b += 32)
            prefill_weigh(&sort->choices[c], limit, b, sort->at[b]);
    }
}

/* Counts of buckets become their places: the first of 32 threads. */
SHARED_INLINE void prefill_add_up(folioi_prefill_sort *sort, int32_t thread, bool places)
{
    const int32_t share = FOLIOI_PREFILL_BUCKETS / 32;
    if (thread >= 32) return;
    if (!places) {
        sort->sums[thread] = 0;
        for (int32_t b = 0; b < share; b++) sort->sums[thread] += sort->at[thread * share + b];
        return;
    }
    int32_t next = 0;
    for (int32_t t = 0; t < thread; t++) next += sort->sums[t];
    for (int32_t b = thread * share; b < (thread + 1) * share; b++) {
        int32_t count = sort->at[b];
        sort->at[b] = next;
        next += count;
    }
    if (thread != 31) return;
    sort->head.num_items = next;
    sort->head.num_keys = (int32_t)min_i64((int64_t)sort->all_keys, INT32_MAX);
}

#define FOLIOI_PREFILL_PASSES 10

/** Every thread must have ended a pass before the next begins; `threads` is a multiple of 32. */
SHARED_INLINE void prefill_pass(int pass, const folioi_prefill_list *list,
                                folioi_prefill_sort *sort, int32_t thread, int32_t threads)
{
    const folioi_prefill_shape *shape = &list->shape;
    switch (pass) {
    case 0: prefill_clear(sort, thread, threads); break;
    case 1: prefill_visit_tiles(list, sort, PREFILL_COUNT_TILES, thread, threads); break;
    case 2: prefill_weigh_choices(shape, sort, thread, threads); break;
    case 3:
        for (int32_t b = thread; b < FOLIOI_PREFILL_BUCKETS; b += threads) sort->at[b] = 0;
        if (thread < FOLIOI_PREFILL_CHOICES && prefill_has_choice(shape, sort))
            sort->choices[thread].time = prefill_time(shape, sort, &sort->choices[thread]);
        break;
    case 4:
        if (thread == 0) sort->limit = prefill_limit(shape, sort);
        break;
    case 5: prefill_visit_tiles(list, sort, PREFILL_COUNT_ITEMS, thread, threads); break;
    case 6: prefill_add_up(sort, thread, false); break;
    case 7: prefill_add_up(sort, thread, true); break;
    case 8: prefill_visit_tiles(list, sort, PREFILL_PLACE_ITEMS, thread, threads); break;
    case 9:
        if (thread == 0) *list->head = sort->head;
        break;
    }
}

/** The list on the host. */
static inline void prefill_list_make(const folioi_prefill_list *list, folioi_prefill_sort *sort)
{
    for (int pass = 0; pass < FOLIOI_PREFILL_PASSES; pass++)
        for (int32_t thread = 0; thread < 32; thread++) prefill_pass(pass, list, sort, thread, 32);
}

#endif
