/* rows_out.h: where host backends find a row of q and put a row of out and lse. */
#ifndef FOLIOI_ROWS_OUT_H
#define FOLIOI_ROWS_OUT_H

#include "core/dtype.h"
#include "plan/call.h"

#include <string.h>

static inline int64_t tensor_index(const folio_tensor *t, int64_t row, int64_t head)
{
    return row * t->token_stride + head * t->head_stride;
}

static inline void lse_store(const folio_tensors *t, int64_t row, int64_t head, float lse)
{
    if (t->lse != NULL) t->lse[row * t->lse_token_stride + head * t->lse_head_stride] = lse;
}

/* A row that sees no key: zeros, and the sink or -inf. */
static inline void row_store_empty(const folioi_call *call, int64_t row, int64_t head)
{
    const folio_tensors *t = &call->tensors;
    int64_t elem = (int64_t)folio_dtype_size(t->out.dtype);
    char *to = (char *)t->out.data + tensor_index(&t->out, row, head) * elem;
    memset(to, 0, (size_t)(call->attention->v_head_size * elem)); /* 0 in every type */
    lse_store(t, row, head, t->sinks != NULL ? t->sinks[head] : -INFINITY);
}

/* Rows past the batch's: the padding of a graph plan. */
static inline void rows_store_padding(const folioi_call *call)
{
    for (int64_t row = call->num_rows; row < call->tensors.out.tokens; row++)
        for (int32_t h = 0; h < call->attention->num_heads; h++) row_store_empty(call, row, h);
}

/* Element index of bias[seq][head][query][0]; add key * strides[3]. */
static inline int64_t bias_index(const folio_bias *b, int64_t seq, int64_t head, int64_t query)
{
    return seq * b->strides[0] + head * b->strides[1] + query * b->strides[2];
}

#endif
