/*
 * replay_numbers.h: a replay's numbers. K and V of a token are made up from (seed, layer, the token's
 * identity), q from (seed, layer, request, position), so that two sequences that share a block would
 * have written the same bytes to it. They are multiples of 1/128 in [-1, 1), of q of 1/32 in [-4, 4):
 * exact in f32, f16 and bf16.
 */
#ifndef FOLIO_REPLAY_NUMBERS_H
#define FOLIO_REPLAY_NUMBERS_H

#include "replay/replay_trace.h"

#include <folio/folio.h>

typedef enum replay_tensor { REPLAY_Q, REPLAY_K, REPLAY_V, REPLAY_TENSORS } replay_tensor;

/* The made-up numbers. */
typedef struct replay_numbers {
    uint64_t seed;
    folio_dtype dtype;
    int32_t head_size;
    float f32[REPLAY_TENSORS][256]; /* a byte of the hash to a number, of the dtype's table */
    uint16_t half[REPLAY_TENSORS][256];
} replay_numbers;

/* dtype: F32, F16 or BF16; head_size: a multiple of 8. */
void replay_numbers_init(replay_numbers *n, uint64_t seed, folio_dtype dtype, int32_t head_size);
/* Heads [first_head, first_head + num_heads) of one token; who: its identity, or of q its place. */
void replay_numbers_row(const replay_numbers *n, replay_tensor tensor, int32_t layer, uint64_t who,
                        int64_t first_head, int64_t num_heads, void *to);
/* Of q: request and position in one number. */
uint64_t replay_query(const replay_request *r, int64_t position);

#endif
