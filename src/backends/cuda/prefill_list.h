/*
 * prefill_list.h: the list of prefill tiles of a step, longest first, made from the sequences in six passes that many threads
 * share. On the device one block runs them with a barrier between passes; on the host one thread plays all of them.
 * Tiles of nearly equal cost (3 %) share a bucket, and their order there is any: it decides when a tile runs, never what it
 * computes.
 */
#ifndef FOLIOI_CUDA_PREFILL_LIST_H
#define FOLIOI_CUDA_PREFILL_LIST_H

#include "backends/cuda/cuda_step.h"

/** Queries [first_query, first_query + queries of the shape) of one sequence; seq -1: no tile. */
typedef struct folioi_prefill_tile {
    int32_t seq, first_query;
    folioi_cuda_seq sequence; /* a copy, so that a block has all in one load */
} folioi_prefill_tile;

/** What a list depends on beside the step. */
typedef struct folioi_prefill_shape {
    int32_t queries; /* of a tile                    */
    int32_t group;   /* query heads of one kv head   */
    int64_t window_left, window_right;
} folioi_prefill_shape;

/** Tiles a list may need: the room to give it. */
SHARED_INLINE int64_t folioi_prefill_capacity(int64_t max_query_tokens, int64_t max_seqs,
                                              int32_t queries)
{
    return max_query_tokens / queries + max_seqs;
}

/* 32 to the octave, the costliest first. */
#define FOLIOI_PREFILL_BUCKETS 1024

SHARED_INLINE int32_t folioi_prefill_bucket(int32_t keys)
{
    int32_t octave = 0;
    while (keys >> octave >= 64) octave++;
    return FOLIOI_PREFILL_BUCKETS - 1 - (octave * 32 + (keys >> octave));
}

/* Bucket counts, then where the next tile of each bucket goes; in shared memory on the device. */
typedef struct folioi_prefill_sort {
    int32_t at[FOLIOI_PREFILL_BUCKETS];
    int32_t sums[32];
    int32_t total;
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

/** One list being made: `threads` is a multiple of 32. */
typedef struct folioi_prefill_list {
    const folioi_cuda_seq *seqs;
    const folioi_cuda_counts *counts;
    folioi_prefill_shape shape;
    folioi_prefill_tile *tiles; /* [capacity] */
    int32_t capacity;
} folioi_prefill_list;

SHARED_INLINE int32_t folioi_prefill_tile_bucket(const folioi_cuda_seq *s,
                                                 const folioi_prefill_shape *shape, int32_t first)
{
    int32_t past = first + shape->queries < s->query_len ? first + shape->queries : s->query_len;
    int32_t begin = seq_keys(s, shape->window_left, shape->window_right, first).begin;
    int32_t end = seq_keys(s, shape->window_left, shape->window_right, past - 1).end;
    return folioi_prefill_bucket(end > begin ? end - begin : 0);
}

/* Count the tiles of each bucket, or put them in place: 32 threads share a sequence. */
SHARED_INLINE void folioi_prefill_visit(const folioi_prefill_list *list, folioi_prefill_sort *sort,
                                        int place, int32_t thread, int32_t threads)
{
    const folioi_prefill_shape *shape = &list->shape;
    for (int32_t i = thread / 32; i < list->counts->num_seqs; i += threads / 32) {
        const folioi_cuda_seq *s = &list->seqs[i];
        if (seq_is_decode(s, shape->group)) continue;
        for (int64_t first = (int64_t)(thread % 32) * shape->queries; first < s->query_len;
             first += 32 * (int64_t)shape->queries) {
            int32_t bucket = folioi_prefill_tile_bucket(s, shape, (int32_t)first);
            int32_t at = folioi_add(&sort->at[bucket], 1);
            folioi_prefill_tile tile = {i, (int32_t)first, *s};
            if (place && at < list->capacity) list->tiles[at] = tile;
        }
    }
}

#define FOLIOI_PREFILL_PASSES 6

/* Every thread must have ended a pass before the next begins. */
SHARED_INLINE void folioi_prefill_pass(int pass, const folioi_prefill_list *list,
                                       folioi_prefill_sort *sort, int32_t thread, int32_t threads)
{
    const int32_t share = FOLIOI_PREFILL_BUCKETS / 32;
    switch (pass) {
    case 0:
        for (int32_t b = thread; b < FOLIOI_PREFILL_BUCKETS; b += threads) sort->at[b] = 0;
        break;
    case 1: folioi_prefill_visit(list, sort, 0, thread, threads); break;
    case 2:
        if (thread >= 32) break;
        sort->sums[thread] = 0;
        for (int32_t b = 0; b < share; b++) sort->sums[thread] += sort->at[thread * share + b];
        break;
    case 3: {
        if (thread >= 32) break;
        int32_t next = 0;
        for (int32_t t = 0; t < thread; t++) next += sort->sums[t];
        for (int32_t b = thread * share; b < (thread + 1) * share; b++) {
            int32_t count = sort->at[b];
            sort->at[b] = next;
            next += count;
        }
        if (thread == 31) sort->total = next;
        break;
    }
    case 4: folioi_prefill_visit(list, sort, 1, thread, threads); break;
    case 5:
        for (int32_t i = sort->total + thread; i < list->capacity; i += threads) {
            folioi_prefill_tile none = {-1, 0, {0}};
            list->tiles[i] = none;
        }
        break;
    }
}

/** The list on the host. */
static inline void folioi_prefill_list_make(const folioi_prefill_list *list,
                                            folioi_prefill_sort *sort)
{
    for (int pass = 0; pass < FOLIOI_PREFILL_PASSES; pass++)
        for (int32_t thread = 0; thread < 32; thread++)
            folioi_prefill_pass(pass, list, sort, thread, 32);
}

#endif
