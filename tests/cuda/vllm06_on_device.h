/*
 * vllm06_on_device.h: the suites of vLLM 0.6's interface on a device, as they are. It is included before each of
 * them and puts its own calls in the place of those that take tensors and caches: what a call is given goes to
 * memory of the device, which the host cannot read, and comes back when the call is done.
 */
#ifndef FOLIO_TESTS_VLLM06_ON_DEVICE_H
#define FOLIO_TESTS_VLLM06_ON_DEVICE_H

#include <folio/folio_vllm06.h>

folio_status on_device_forward(folio_vllm06_impl *impl, const folio_vllm06_forward_args *args,
                               const folio_run *run);
folio_status on_device_copy_blocks(folio_vllm06_state *state,
                                   const folio_vllm06_kv_cache *kv_caches, int64_t num_caches,
                                   const folio_block_pair *pairs, int64_t num_pairs,
                                   const folio_run *run);
folio_status on_device_swap_blocks(folio_vllm06_state *state, const folio_vllm06_kv_cache *src,
                                   const folio_vllm06_kv_cache *dst, const folio_block_pair *pairs,
                                   int64_t num_pairs, const folio_run *run);
folio_status on_device_reshape_and_cache(folio_vllm06_state *state,
                                         const folio_vllm06_reshape_and_cache_args *args,
                                         const folio_vllm06_kv_cache *cache, const folio_run *run);
folio_status on_device_paged_attention_v1(folio_vllm06_state *state,
                                          const folio_vllm06_paged_attention_args *args,
                                          const folio_vllm06_kv_cache *cache, const folio_run *run);
folio_status on_device_paged_attention_v2(folio_vllm06_state *state,
                                          const folio_vllm06_paged_attention_args *args,
                                          const folio_vllm06_kv_cache *cache, float *exp_sums,
                                          float *max_logits, void *tmp_out, const folio_run *run);

#ifndef FOLIO_TESTS_CALL_ITSELF /* defined for what is only written for a device */
#define folio_vllm06_forward on_device_forward
#define folio_vllm06_reshape_and_cache on_device_reshape_and_cache
#define folio_vllm06_paged_attention_v1 on_device_paged_attention_v1
#define folio_vllm06_paged_attention_v2 on_device_paged_attention_v2
#define folio_vllm06_copy_blocks on_device_copy_blocks
#define folio_vllm06_swap_blocks on_device_swap_blocks
#endif

#endif
