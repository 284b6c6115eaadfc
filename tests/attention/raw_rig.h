/*
 * raw_rig.h: attention over a cache whose every bit is the test's. The keys of one long sequence lie as plain rows
 * on the test's side, are packed into a cache of any layout, and all sequences of a call are beginnings of it, read
 * through tables of the same blocks: one call tries many lengths. q is in 64ths, exact in every type.
 */
#ifndef FOLIO_RAW_RIG_H
#define FOLIO_RAW_RIG_H

#include "support.h"

enum { RAW_KEYS = 768, RAW_SEQS = 65 }; /* a multiple of every block size in use */

/* Rows as stored: k [RAW_KEYS][heads][k_size], scales [RAW_KEYS][heads]. */
typedef struct {
    folio_dtype dtype;
    int32_t heads, k_size, v_size;
    unsigned char *k, *v;
    float *k_scales, *v_scales;
} raw_keys;

/* Zeros, all scales 1. */
raw_keys raw_keys_make(folio_dtype dtype, int32_t heads, int32_t k_size, int32_t v_size);
void raw_keys_free(raw_keys *keys);
/* Numbers of modest size, a scale of its own for each row. */
void raw_keys_random(raw_keys *keys, uint64_t seed);

/* A cache of one layer that holds them; NULL where it could not be made. */
typedef struct {
    folio_kv_cache *cache;
    folio_kv_cache_desc desc;
    void *memory; /* of a wrapped one */
    size_t bytes;
    int32_t table[RAW_KEYS];
} raw_cache;
bool raw_cache_make(folio_context *ctx, const raw_keys *keys, folio_layout layout,
                    int32_t block_size, raw_cache *out);
/* The same in memory of the test's, INT8's scales token by token, [block][N][heads + 1]. */
void raw_cache_part_scales(folio_context *ctx, const raw_keys *keys, raw_cache *cache);
/* The block of one key once more, as the rows are now. */
void raw_cache_renew(raw_cache *cache, const raw_keys *keys, int64_t key);
void raw_cache_free(raw_cache *cache);

typedef struct {
    int64_t query_len, seq_len;
    folio_causality causality;
} raw_seq;

typedef struct {
    folio_attention_desc desc; /* heads, sizes and types */
    folio_tensors t;           /* options only */
    raw_seq seqs[RAW_SEQS];
    int64_t num_seqs;
    const int8_t *q;      /* [rows][heads][k_size], 64ths */
    const raw_keys *keys; /* what FOLIO_KV_APPEND, or a call without a cache, gives; not INT8 */
    bool release;         /* blocks that no row of their sequence sees are missing */
} raw_call;

/* out [rows][heads][v_size] of the call's dtype, lse [rows][heads]. */
typedef struct {
    int64_t rows;
    size_t row_bytes, lse_bytes; /* of one row */
    support_buffer out, lse;
} raw_result;

int64_t raw_rows(const raw_call *call);
/* cache NULL: without one. False, and a failure noted, where a call was refused. */
bool raw_run(folio_context *ctx, const raw_call *call, const raw_cache *cache, raw_result *result);
bool raw_rows_equal(const raw_result *a, const raw_result *b, int64_t row, int64_t count);
void raw_result_free(raw_result *result);

#endif
