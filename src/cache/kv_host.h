/* kv_host.h: rows and blocks of caches in host memory, one number at a time: entries of host backends. */
#ifndef FOLIOI_KV_HOST_H
#define FOLIOI_KV_HOST_H

#include "cache/kv_rows.h"

folio_status folioi_host_gather(const folio_context *ctx, const folioi_kv_layer *layer,
                                const folioi_kv_tensors *t, const int64_t *slots, int64_t num_slots,
                                void *stream);
folio_status folioi_host_move_blocks(const folio_context *ctx, const folioi_kv_layer *from,
                                     const folioi_kv_layer *to, int32_t num_layers,
                                     const folio_block_pair *pairs, int64_t num_pairs,
                                     void *stream);

#endif
