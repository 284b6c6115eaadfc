/* test_vllm06_torch_sdpa.c: vLLM 0.6's torch-sdpa backend. */
#include "vllm06/vllm06_rig.h"

V06_SAME(V06_TEST, vllm06_torch_sdpa, "torch-sdpa")

/* Where IPEX was installed: another layout, the same numbers. */
TEST(vllm06_torch_sdpa, ipex_layout)
{
    static const v06_body bodies[] = {v06_same_get_name,        v06_same_classes,
                                      v06_same_split_kv_cache,  v06_same_prompts_then_decodes,
                                      v06_same_mixed_step,      v06_same_k_scale_v_scale,
                                      v06_same_encoder_decoder, v06_same_sliding_window,
                                      v06_same_swap_blocks,     v06_same_copy_blocks,
                                      v06_same_dtypes,          v06_same_supported_sizes,
                                      v06_same_graph_capture};
    for (int i = 0; i < COUNT_OF(bodies); i++) v06_on_both("torch-sdpa-ipex", bodies[i]);
}
