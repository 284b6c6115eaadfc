/* test_vllm06_ipex.c: the life of vLLM 0.6's ipex backend: a step of prompts, then steps of
 * decodes; its metadata, whose views are the whole, and its errors. */
#include "vllm06_rig.h"

#define BOTH(name, body)                                                                           \
    TEST(vllm06_ipex, name) { v06_on_both("ipex", body); }

BOTH(get_kv_cache_shape, v06_same_get_kv_cache_shape)
BOTH(swap_blocks, v06_same_swap_blocks)
BOTH(copy_blocks, v06_same_copy_blocks)
BOTH(supported_sizes, v06_same_supported_sizes)
BOTH(metadata_fields, v06_same_fields)
BOTH(metadata_builder, v06_same_builder)
BOTH(get_seq_lens, v06_same_get_seq_lens)
BOTH(get_seq_len_block_table_args, v06_same_block_table_args)
BOTH(prompts_then_decodes, v06_same_prompts_then_decodes)
BOTH(mixed_step, v06_same_mixed)
BOTH(profiling_run, v06_same_profiling)
BOTH(use_cuda_graph, v06_same_padding)
BOTH(k_scale_v_scale, v06_same_scales)
BOTH(dtypes, v06_same_dtypes)
BOTH(num_queries_per_kv, v06_same_heads)
BOTH(fused_qkv, v06_same_fused_qkv)
BOTH(alibi_slopes, v06_same_alibi)
BOTH(sliding_window, v06_same_window)
BOTH(logits_soft_cap, v06_same_soft_cap)
BOTH(make_biases, v06_same_biases)
BOTH(set_attn_bias, v06_same_set_attn_bias)
BOTH(encoder_decoder, v06_same_encoder_decoder)
BOTH(encoder_only, v06_same_encoder_only)
BOTH(incomplete_metadata, v06_same_incomplete)
BOTH(init_errors, v06_same_bad_impl)
BOTH(metadata_errors, v06_same_bad_step)
BOTH(builder_errors, v06_same_bad_builder)
BOTH(views_of_views, v06_same_views_of_views)
BOTH(biases_in_fields, v06_same_biases_in_fields)
BOTH(no_encoder, v06_same_no_encoder)
BOTH(cross_bias_of_cached_encoder, v06_same_cross_bias_cached)
BOTH(forward_errors, v06_same_bad_forward)
BOTH(clipped_window, v06_same_clipped_window)
BOTH(cross_decode_metadata, v06_same_cross_decode_metadata)
BOTH(shared_prefix, v06_same_shared_prefix)
BOTH(more_fields, v06_same_more_fields)
BOTH(bad_sums, v06_same_bad_sums)
BOTH(split_arrays, v06_same_split_arrays)
BOTH(graph_padding, v06_same_graph_padding)
BOTH(graph_capture, v06_same_graph_capture)
BOTH(graph_cross, v06_same_graph_cross)
BOTH(graph_clone, v06_same_graph_clone)
BOTH(graph_errors, v06_same_graph_errors)
BOTH(builder_window, v06_same_builder_window)
BOTH(builder_pad, v06_same_builder_pad)
BOTH(compat, v06_same_compat)
BOTH(compat_differs, v06_same_compat_differs)

/* Where a step is of one kind, its view is the step itself, and the other kind has none. */
static void views(const char *ancestor, const char *compute)
{
    static const v06_seq step[] = {{0, true, 5, 5, 0}, {1, false, 1, 4, 0}};
    v06 r;
    v06_init(&r, ancestor, compute);
    if (v06_open(&r)) {
        if (v06_step(&r, step, 1)) {
            CHECK(folio_vllm06_prefill_metadata(r.m) == r.m);
            CHECK(folio_vllm06_decode_metadata(r.m) == NULL);
        }
        if (v06_step(&r, step + 1, 1)) {
            CHECK(folio_vllm06_prefill_metadata(r.m) == NULL);
            CHECK(folio_vllm06_decode_metadata(r.m) == r.m);
        }
        if (v06_step(&r, step, 2)) {
            const folio_vllm06_metadata *p = folio_vllm06_prefill_metadata(r.m);
            const folio_vllm06_metadata *d = folio_vllm06_decode_metadata(r.m);
            CHECK(p != NULL && p != r.m && p == folio_vllm06_prefill_metadata(r.m));
            CHECK(d != NULL && d != r.m && d == folio_vllm06_decode_metadata(r.m));
            CHECK_INT(folio_vllm06_metadata_get(p)->is_prompt, 1);
            CHECK_INT(folio_vllm06_metadata_get(d)->is_prompt, 0);
            CHECK_INT(folio_vllm06_metadata_get(d)->seq_lens[0], 4);
        }
    }
    v06_close(&r);
}
BOTH(views, views)

/* is_prompt and decodes in the same step contradict each other. */
static void is_prompt(const char *ancestor, const char *compute)
{
    static const v06_seq step[] = {{0, true, 5, 5, 0}, {1, false, 1, 4, 0}};
    folio_vllm06_metadata *m = NOWHERE;
    v06 r;
    v06_init(&r, ancestor, compute);
    if (v06_open(&r) && v06_step(&r, step, 1)) {
        CHECK_INT(folio_vllm06_metadata_get(r.m)->is_prompt, 1);
        if (v06_step(&r, step + 1, 1)) CHECK_INT(folio_vllm06_metadata_get(r.m)->is_prompt, 0);
        for (int first = 0; first < 2; first++) {
            v06_fields(&r, step + first, 2 - first);
            r.f.is_prompt = 1;
            REFUSED(r.b->make_metadata(r.state, &r.f, &m), FOLIO_ERR_ARGUMENT, "is_prompt");
            CHECK(m == NULL);
        }
    }
    v06_close(&r);
}
BOTH(is_prompt, is_prompt)

TEST(vllm06_ipex, get_name)
{
    const folio_vllm06_backend *b = folio_vllm06_backend_find("ipex");
    REQUIRE_TEST(b != NULL);
    CHECK(strcmp(b->get_name(), "ipex") == 0);
    CHECK(folio_vllm06_backend_find("ipex-attn") == b);
    CHECK(folio_vllm06_backend_find("IPEX") == b);
}

TEST(vllm06_ipex, classes)
{
    v06_same_classes("ipex", "IpexAttnBackendImpl", "IpexAttnMetadata", "CommonMetadataBuilder");
    const folio_vllm06_backend *b = folio_vllm06_backend_find("ipex");
    static const int32_t sizes[] = {32, 64, 80, 96, 112, 120, 128, 192, 256};
    int32_t count = 0;
    const int32_t *listed = b->get_supported_head_sizes(&count);
    CHECK(count == COUNT_OF(sizes) && memcmp(listed, sizes, sizeof sizes) == 0);
}

/* x = 1 whatever the type of number. */
TEST(vllm06_ipex, split_kv_cache)
{
    static const folio_dtype dtypes[] = {FOLIO_F32, FOLIO_BF16, FOLIO_FP8_E5M2};
    const folio_vllm06_backend *b = folio_vllm06_backend_find("ipex");
    char memory[64];
    for (int i = 0; i < 3; i++) {
        folio_vllm06_kv_cache c = {memory, dtypes[i], 6, 8 * 3 * 80};
        folio_vllm06_cache_view k, v;
        CHECK_OK(b->split_kv_cache(&c, 3, 80, &k, &v));
        CHECK(k.num_dims == 5 && k.dims[0] == 6 && k.dims[1] == 3 && k.dims[2] == 80);
        CHECK(k.dims[3] == 8 && k.dims[4] == 1);
        CHECK(v.num_dims == 4 && v.dims[2] == 80 && v.dims[3] == 8);
        CHECK((char *)v.data - memory == 6 * 8 * 3 * 80 * (int64_t)folio_dtype_size(dtypes[i]));
    }
}
