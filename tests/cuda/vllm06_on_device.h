/*
 * vllm06_on_device.h: the suites of vLLM 0.6's interface on a device, as they are. It is included before each of
 * them and puts its own calls in the place of those that take tensors and caches: what a call is given goes to
 * memory of the device, which the host cannot read, and comes back when the call is done.
 */
#ifndef FOLIO_TESTS_VLLM06_ON_DEVICE_H
#define FOLIO_TESTS_VLLM06_ON_DEVICE_H

#include <folio/folio_vllm06.h>

/* Tables whose forward, swap_blocks and copy_blocks work on the device. */
const folio_vllm06_backend *on_device_backend_find(const char *name);

folio_status on_device_reshape_and_cache(folio_context *ctx, const void *key, const void *value,
                                         folio_dtype dtype, int64_t num_tokens, int64_t key_stride,
                                         int64_t value_stride, const folio_vllm06_ops_cache *cache,
                                         const int64_t *slot_mapping, const folio_run *run);
folio_status on_device_paged_attention_v1(folio_context *ctx,
                                          const folio_vllm06_paged_attention_args *args,
                                          const folio_vllm06_ops_cache *cache,
                                          const folio_run *run);
folio_status on_device_paged_attention_v2(folio_context *ctx,
                                          const folio_vllm06_paged_attention_args *args,
                                          const folio_vllm06_ops_cache *cache, float *exp_sums,
                                          float *max_logits, void *tmp_out, const folio_run *run);
folio_status on_device_copy_blocks(folio_context *ctx, const folio_vllm06_ops_cache *caches,
                                   int64_t num_caches, const int64_t (*block_mapping)[2],
                                   int64_t num_pairs, const folio_run *run);
folio_status on_device_swap_blocks(folio_context *ctx, const folio_vllm06_ops_cache *src,
                                   const folio_vllm06_ops_cache *dst,
                                   const int64_t (*block_mapping)[2], int64_t num_pairs,
                                   const folio_run *run);

#ifndef FOLIO_TESTS_CALL_ITSELF /* defined for what is only written for a device */
#define folio_vllm06_backend_find on_device_backend_find
#define folio_vllm06_reshape_and_cache on_device_reshape_and_cache
#define folio_vllm06_paged_attention_v1 on_device_paged_attention_v1
#define folio_vllm06_paged_attention_v2 on_device_paged_attention_v2
#define folio_vllm06_copy_blocks on_device_copy_blocks
#define folio_vllm06_swap_blocks on_device_swap_blocks
#endif

#endif
