/*
 * replay.h: what the files of `folio replay` share: its options.
 *
 *     trace -> engine (admission, chunks, preemption over a pool) -> model (one forward a layer)
 *                 |                                                     |
 *                 +-> stats -> report                                   +-> verify
 */
#ifndef FOLIO_REPLAY_H
#define FOLIO_REPLAY_H

#include <folio/folio.h>
#include <stdbool.h>
#include <stdint.h>

typedef struct replay_options {
    const char *backend;
    int32_t threads;
    uint64_t seed;
    int32_t layers, heads, kv_heads, head_size;
    folio_dtype dtype, kv_dtype;
    int64_t num_blocks, host_blocks;
    int32_t block_size;
    int64_t max_seqs; /* running at once                                      */
    int64_t budget;   /* tokens of a step                                     */
    int64_t window;   /* keys a token sees; 0: all                            */
    bool prefill_first;
    bool admit_chunk; /* room for a first chunk is enough; false: for the whole prompt */
    bool swap;        /* preempt by swapping to host memory; false: by recomputing */
    bool no_attention;
    double speed;     /* of the trace's clock; 0: a request comes when a seat is free */
    double verify;    /* percent of (token, head) rows                        */
    const char *rows; /* file for a hash of every row; NULL: none             */
} replay_options;

/* What so many blocks need; -1: the library refuses such a cache. */
int64_t replay_cache_bytes(const replay_options *o, int64_t blocks);

void replay_help(void);

#endif
