/*
 * test_errors_forward.c: bad input to a forward, and a plan whose batch has changed. errors_rig.h says
 * what every case checks.
 */
#include "plan/plan.h"

#include "api/errors_rig.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

STEP_TEST(errors_forward, handles_and_indices)
{
    BAD_DECODER("plan", c.plan = NULL);
    BAD_DECODER("tensors", c.no_tensors = true);
    BAD_DECODER("-1", c.attention = -1);
    BAD_DECODER("2", c.attention = 2);
    BAD_DECODER("4", c.type = (folio_attention_type)4);
    BAD_DECODER("-1", c.type = (folio_attention_type)-1);
    BAD_DECODER("2", c.layer = 2);
    BAD_DECODER("-1", c.layer = -1);
    BAD_DECODER("2147483647", c.layer = INT32_MAX);
    BAD_DECODER("context|1", c.cache = NULL); /* sequence 1 has one */
    BAD(FP8, FOLIO_ATTENTION_DECODER, ARG, "encoder_only", c.type = FOLIO_ATTENTION_ENCODER_ONLY);
    BAD(FP8, FOLIO_ATTENTION_DECODER, ARG, "encoder_decoder",
        c.type = FOLIO_ATTENTION_ENCODER_DECODER);
}

/* A check of a good call writes nothing, and does not mind that the workspace is in use. */
STEP_TEST(errors_forward, a_check_runs_nothing)
{
    call c = good_call(f, PLAIN, FOLIO_ATTENTION_DECODER);
    CHECK_OK(folioi_plan_enter_workspace(f->plan, NULL));
    CHECK_OK(check_call(&c));
    folioi_plan_leave_workspace(f->plan);
    check_untouched(f, __LINE__);
}

STEP_TEST(errors_forward, tensors)
{
    BAD_DECODER("q|NULL", c.t.q.data = NULL);
    BAD_DECODER("out|NULL", c.t.out.data = NULL);
    BAD_DECODER("without v", c.t.v.data = NULL); /* K without V */
    BAD_DECODER("without k", c.t.k.data = NULL);
    BAD_DECODER("q|align", c.t.q.data = (char *)f->q + 1);
    BAD_DECODER("k|align", c.t.k.data = (char *)f->k + 2);
    BAD_DECODER("v|align", c.t.v.data = (char *)f->v + 3);
    BAD_DECODER("out|align", c.t.out.data = (char *)f->out.data + 1);
    BAD_DECODER("lse|align", c.t.lse = (float *)(void *)((char *)f->lse.data + 2));
    BAD_DECODER("q|7|8", c.t.q.tokens = 7);
    BAD_DECODER("q|9|8", c.t.q.tokens = 9);
    BAD_DECODER("k|7|8", c.t.k.tokens = 7);
    BAD_DECODER("v|9|8", c.t.v.tokens = 9);
    BAD_DECODER("out|0|8", c.t.out.tokens = 0);
    BAD_DECODER("-8", c.t.q.tokens = -8);
    BAD_DECODER("q: dtype is 0", c.t.q.dtype = 0);
    BAD_DECODER("k: dtype is 0", c.t.k.dtype = 0);
    BAD_DECODER("v: dtype is 0", c.t.v.dtype = 0);
    BAD_DECODER("out: dtype is 0", c.t.out.dtype = 0);
    BAD_DECODER("f16", c.t.q.dtype = FOLIO_F16);
    BAD_DECODER("bf16", c.t.out.dtype = FOLIO_BF16);
    BAD_DECODER("fp8_e4m3", c.t.k.dtype = FOLIO_FP8_E4M3);
    BAD_DECODER("int8", c.t.v.dtype = FOLIO_INT8);
    BAD_DECODER("99", c.t.q.dtype = (folio_dtype)99);
    BAD_DECODER("-1", c.t.k.dtype = (folio_dtype)-1);
    BAD_DECODER("q|-64", c.t.q.token_stride = -64);
    BAD_DECODER("k|-16", c.t.k.head_stride = -16);
    BAD_DECODER("v|-1", c.t.v.token_stride = -1);
    BAD_DECODER("out|-8", c.t.out.head_stride = -8);
    BAD_DECODER("out|stride", c.t.out.token_stride = 8); /* rows would overlap */
    BAD_DECODER("q|token_stride", c.t.q.token_stride = INT64_MAX / 2);
    BAD_DECODER("k|head_stride", c.t.k.head_stride = INT64_MAX);
    BAD_DECODER("v|token_stride", c.t.v.token_stride = INT64_MAX / 7);
    BAD_DECODER("out|stride", c.t.out.token_stride = INT64_MAX);
    BAD_DECODER("lse|-4", c.t.lse_token_stride = -4);
    BAD_DECODER("lse|stride", c.t.lse_head_stride = INT64_MAX / 2);
    BAD_DECODER("lse|-1", c.t.lse_token_stride = 1; c.t.lse_head_stride = -1);
    BAD_DECODER("lse|overlap", c.t.lse_token_stride = c.t.lse_head_stride = 1);
    BAD_DECODER("lse|overlap", c.t.lse_token_stride = HEADS - 1; c.t.lse_head_stride = 1);
    BAD_DECODER("lse|overlap", c.t.lse_token_stride = c.t.lse_head_stride = 2);
    BAD_DECODER("flags|8", c.t.flags = 8u);
    BAD_DECODER("flags", c.t.flags = 0x80000001u);
    BAD_DECODER("k and v|FOLIO_KV_APPEND", c.t.flags = FOLIO_KV_APPEND;
                c.t.k = c.t.v = (folio_tensor){0});
    if (strcmp(backend, "cpu") == 0) /* only the reference has it */
        BAD(PLAIN, FOLIO_ATTENTION_DECODER, ANY_REFUSAL, "f64", c.t.out.dtype = FOLIO_F64);
    check_still_serves(f, __LINE__);
    /* [head][token] is as good as any */
    call c = good_call(f, PLAIN, FOLIO_ATTENTION_DECODER);
    CHECK_OK(run_call(&c));
    float lse[TOKENS * HEADS];
    memcpy(lse, f->lse.data, sizeof lse);
    c.t.lse_token_stride = 1, c.t.lse_head_stride = TOKENS;
    CHECK_OK(run_call(&c));
    for (int i = 0; i < TOKENS * HEADS; i++)
        CHECK(((float *)f->lse.data)[i % HEADS * TOKENS + i / HEADS] == lse[i]);
}

STEP_TEST(errors_forward, tensors_of_the_encoder_types)
{
    BAD(PLAIN, FOLIO_ATTENTION_ENCODER, ARG, "8|6", c.t.q.tokens = 8);
    BAD(PLAIN, FOLIO_ATTENTION_ENCODER, ARG, "5|6", c.t.out.tokens = 5);
    BAD(PLAIN, FOLIO_ATTENTION_ENCODER, ARG, "8|6", c.t.k.tokens = c.t.v.tokens = 8);
    BAD(PLAIN, FOLIO_ATTENTION_ENCODER, ARG, "k and v", c.t.k = c.t.v = (folio_tensor){0});
    BAD(PLAIN, FOLIO_ATTENTION_ENCODER_ONLY, ARG, "k and v", c.t.k = c.t.v = (folio_tensor){0});
    BAD(PLAIN, FOLIO_ATTENTION_ENCODER_ONLY, ARG, "6|8", c.t.k.tokens = c.t.v.tokens = 6);
    BAD(PLAIN, FOLIO_ATTENTION_ENCODER_DECODER, ARG, "8|6", c.t.k.tokens = c.t.v.tokens = 8);
    BAD(PLAIN, FOLIO_ATTENTION_ENCODER_DECODER, ARG, "6|8", c.t.q.tokens = 6);
    BAD(PLAIN, FOLIO_ATTENTION_ENCODER_DECODER, ARG, "1|cache",
        c.cache = NULL); /* sequence 1 reads its blocks */
    const float slopes[HEADS] = {0.5f, 0.25f, 0.125f, 0.0625f};
    BAD(PLAIN, FOLIO_ATTENTION_ENCODER_DECODER, UNSUPPORTED, "ALiBi", c.t.slopes = slopes);
}

STEP_TEST(errors_forward, numbers)
{
    const float bad[][HEADS] = {{0, 0, NAN, 0}, {0, INFINITY, 0, 0}, {-INFINITY, 0, 0, 0}};
    BAD_DECODER("slopes|2", c.t.slopes = bad[0]);
    BAD_DECODER("slopes|1", c.t.slopes = bad[1]);
    BAD_DECODER("slopes|0", c.t.slopes = bad[2]);
    BAD_DECODER("sinks|2", c.t.sinks = bad[0]);
    BAD_DECODER("sinks|1", c.t.sinks = bad[1]);
    BAD_DECODER("slopes|align", c.t.slopes = (const float *)(const void *)((const char *)bad + 1));
    BAD_DECODER("sinks|align", c.t.sinks = (const float *)(const void *)((const char *)bad + 2));
    const float wrong[] = {NAN, INFINITY, -INFINITY, -1.0f, -0x1p-149f};
    for (int i = 0; i < COUNT_OF(wrong); i++) {
        BAD(FP8, FOLIO_ATTENTION_DECODER, ARG, "k_scale", c.t.k_scale = wrong[i]);
        BAD(FP8, FOLIO_ATTENTION_DECODER, ARG, "v_scale", c.t.v_scale = wrong[i]);
        const float each[HEADS] = {1.0f, wrong[i], 1.0f, 1.0f}; /* the fixture has 2 kv heads */
        BAD(FP8, FOLIO_ATTENTION_DECODER, ARG, "k_head_scales|1", c.t.k_head_scales = each);
        BAD(FP8, FOLIO_ATTENTION_DECODER, ARG, "v_head_scales|1", c.t.v_head_scales = each);
        BAD(PLAIN, FOLIO_ATTENTION_DECODER, ARG, "v_head_scales|1", c.t.v_head_scales = each);
    }
    const float fine[HEADS] = {1.0f, 0.5f, 0.0f, 0.0f}, zero[HEADS] = {0.0f, 1.0f, 1.0f, 1.0f};
    BAD(FP8, FOLIO_ATTENTION_DECODER, ARG, "k_head_scales|0", c.t.k_head_scales = zero);
    BAD(FP8, FOLIO_ATTENTION_DECODER, ARG, "k_scale is 1|k_head_scales", c.t.k_head_scales = fine;
        c.t.k_scale = 1.0f);
    BAD(FP8, FOLIO_ATTENTION_DECODER, ARG, "v_scale is 2|v_head_scales", c.t.v_head_scales = fine;
        c.t.v_scale = 2.0f);
    BAD(FP8, FOLIO_ATTENTION_DECODER, ARG, "k_head_scales|align",
        c.t.k_head_scales = (const float *)((uintptr_t)fine + 1));
    float lse[100];
    for (int i = 0; i < COUNT_OF(lse); i++) lse[i] = 1.0f;
    BAD(FP8, FOLIO_ATTENTION_DECODER, ARG, "lse and v_head_scales", c.t.lse = lse;
        c.t.v_head_scales = lse + 3);
    check_still_serves(f, __LINE__);
    /* -inf is no sink, and fine */
    call c = good_call(f, PLAIN, FOLIO_ATTENTION_DECODER);
    c.t.sinks = bad[2];
    CHECK_OK(run_call(&c));
}

#define BAD_BIAS(words, ...) BAD_DECODER(words, c.t.bias = good; __VA_ARGS__)

STEP_TEST(errors_forward, bias)
{
    static float bias[3 * HEADS * 5 * 21 + 1];
    /* [3 sequences][heads][5 queries][21 keys] */
    const folio_bias good = {.data = bias,
                             .dtype = FOLIO_F32,
                             .dims = {3, HEADS, 5, 21},
                             .strides = {HEADS * 5 * 21, 5 * 21, 21, 1}};
    BAD_BIAS("bias|dtype", c.t.bias.dtype = (folio_dtype)0);
    BAD_BIAS("fp8_e4m3", c.t.bias.dtype = FOLIO_FP8_E4M3);
    BAD_BIAS("bias|align", c.t.bias.data = (char *)bias + 2);
    BAD_BIAS("2|3", c.t.bias.dims[0] = 2);
    BAD_BIAS("3|4", c.t.bias.dims[1] = 3);
    BAD_BIAS("4|5", c.t.bias.dims[2] = 4);
    BAD_BIAS("20|21", c.t.bias.dims[3] = 20);
    BAD_BIAS("bias|0", c.t.bias.dims[3] = 0);
    BAD_BIAS("bias|-1", c.t.bias.dims[1] = -1);
    BAD_BIAS("bias|stride", c.t.bias.strides[0] = INT64_MAX / 2);
    BAD_BIAS("bias|stride", c.t.bias.strides[3] = INT64_MAX);
    BAD_BIAS("strides[0]|largest",
             c.t.bias.strides[0] = (int64_t)1 << 58); /* its bytes are too many */
    BAD_BIAS("bias|stride", c.t.bias.strides[1] = -1);
    for (int i = 0; i < 4; i++) /* left out among others: neither contiguous nor a broadcast */
        BAD_BIAS("strides[|is 0|dim to 1", c.t.bias.strides[i] = 0);
    BAD_BIAS("bias|largest", memset(c.t.bias.strides, 0, sizeof c.t.bias.strides);
             c.t.bias.dims[2] = (int64_t)1 << 40; c.t.bias.dims[3] = (int64_t)1 << 40);
    check_still_serves(f, __LINE__);
    /* broadcast dims need no stride; more than needed is fine */
    for (int i = 0; i < 4; i++) {
        call c = good_call(f, PLAIN, FOLIO_ATTENTION_DECODER);
        c.t.bias = good;
        c.t.bias.dims[i] = 1, c.t.bias.strides[i] = INT64_MAX;
        CHECK_OK(run_call(&c));
    }
}

/* Strides that are all 0 mean what zero means everywhere: the default, no gaps. */
STEP_TEST(errors_forward, bias_without_strides)
{
    static float bias[4 * (HEADS + 1) * 5 * 21], with[TOKENS * HEADS * DV];
    static const int64_t dims[][4] = {
        {3, HEADS, 5, 21}, {4, HEADS + 1, 5, 21}, {1, HEADS, 1, 21}, {3, 1, 5, 1}, {1, 1, 1, 1}};
    support_fill(bias, COUNT_OF(bias), 9, 2.0f);
    for (int i = 0; i < COUNT_OF(dims); i++) {
        call c = good_call(f, PLAIN, FOLIO_ATTENTION_DECODER);
        c.t.bias = (folio_bias){.data = bias, .dtype = FOLIO_F32};
        memcpy(c.t.bias.dims, dims[i], sizeof dims[i]);
        c.t.bias.strides[3] = 1;
        for (int d = 2; d >= 0; d--) c.t.bias.strides[d] = c.t.bias.strides[d + 1] * dims[i][d + 1];
        CHECK_OK(run_call(&c));
        memcpy(with, f->out.data, sizeof with);
        memset(c.t.bias.strides, 0, sizeof c.t.bias.strides);
        CHECK_OK(run_call(&c));
        CHECK(memcmp(with, f->out.data, sizeof with) == 0);
    }
}

/* A cache that is not the layer's. */
STEP_TEST(errors_forward, cache_geometry)
{
    for (int i = 0; i < 6; i++) {
        const char *words[] = {"1|2", "24|16", "16|8", "bf16|f32", "32|16", "11|12"};
        folio_kv_cache_desc d = cache_desc(FOLIO_F32);
        if (i == 0) d.num_kv_heads = 1;
        if (i == 1) d.k_head_size = 24;
        if (i == 2) d.v_head_size = 16;
        if (i == 3) d.dtype = FOLIO_BF16;
        if (i == 4) d.block_size = 32;
        if (i == 5) d.num_blocks = BLOCKS - 1;
        folio_kv_cache *other = NULL;
        CHECK_OK(folio_kv_cache_create(ctx, &d, &other));
        BAD_DECODER(words[i], c.cache = other);
        BAD(PLAIN, FOLIO_ATTENTION_ENCODER_DECODER, ARG, words[i], c.cache = other);
        folio_kv_cache_destroy(other);
    }
    BAD_DECODER("fp8_e4m3|f32", c.cache = f->cache[FP8]);
    check_still_serves(f, __LINE__);
    folio_kv_cache_desc d = cache_desc(FOLIO_F32);
    d.num_blocks = BLOCKS + 1; /* more is fine */
    folio_kv_cache *larger = NULL;
    CHECK_OK(folio_kv_cache_create(ctx, &d, &larger));
    kit_poison_cache(larger);
    call c = good_call(f, PLAIN, FOLIO_ATTENTION_DECODER);
    c.cache = larger;
    CHECK_OK(run_call(&c));
    folio_kv_cache_destroy(larger);
}

STEP_TEST(errors_forward, runs)
{
    size_t need = f->workspace.bytes - 64;
    char *w = f->workspace.data;
    BAD_DECODER("struct_size", c.r.struct_size = 0);
    BAD_DECODER("stream", c.r.stream = f);
    BAD_DECODER("align|64", c.r.workspace = w + 32; c.r.workspace_size = need + 32);
    if (need > 0) BAD_DECODER("workspace", c.r.workspace = w; c.r.workspace_size = need - 1);
    check_still_serves(f, __LINE__);
    call c = good_call(f, PLAIN, FOLIO_ATTENTION_DECODER);
    c.r.workspace = w, c.r.workspace_size = need;
    CHECK_OK(run_call(&c));
    CHECK(memcmp(f->out.data, f->good_out, sizeof f->good_out) == 0);
    CHECK(support_is_poison(w + need, 64)); /* no byte past what was asked for */
}

/* A plan that brings no workspace of its own. */
STEP_TEST(errors_forward, no_workspace)
{
    folio_plan_desc d = plan_desc(f);
    d.flags = FOLIO_PLAN_NO_WORKSPACE;
    folio_plan *plan = NULL;
    CHECK_OK(folio_plan_create(ctx, &d, &plan));
    CHECK_OK(folio_plan_update(plan, f->batch, NULL));
    size_t need = 0;
    CHECK_OK(folio_plan_get_workspace_size(plan, &need));
    CHECK(need <= f->workspace.bytes);
    if (need > 0) BAD_DECODER("workspace", c.plan = plan);
    call c = good_call(f, PLAIN, FOLIO_ATTENTION_DECODER);
    c.plan = plan;
    c.r.workspace = f->workspace.data, c.r.workspace_size = need;
    CHECK_OK(run_call(&c));
    CHECK(memcmp(f->out.data, f->good_out, sizeof f->good_out) == 0);
    folio_plan_destroy(plan);
}

/* In a batch with such a sequence nobody brings k and v, and all keys are in the cache. */
STEP_TEST(errors_forward, more_queries_than_keys)
{
    const char *words = "seq 1|query_len 4|seq_len 3|k and v must be NULL";
    folio_batch *batch = support_batch(ctx, BLOCK);
    folio_plan_desc d = plan_desc(f);
    folio_plan *plan = NULL;
    CHECK_OK(folio_plan_create(ctx, &d, &plan));
    folio_batch_seq seqs[2] = {good_seq(0), good_seq(1)};
    seqs[0].query_len = 4; /* of 5 */
    seqs[1].query_len = 4, seqs[1].seq_len = 3, seqs[1].positions_given = 1;
    for (int i = 0; i < 2; i++) CHECK_OK(folio_batch_add(batch, &seqs[i]));
    CHECK_OK(folio_plan_update(plan, batch, NULL));
    BAD_DECODER(words, c.plan = plan);
    BAD_DECODER(words, c.plan = plan; c.t.flags = FOLIO_KV_APPEND);
    BAD_DECODER(words, c.plan = plan; c.t.flags = FOLIO_KV_APPEND;
                c.t.k = c.t.v = (folio_tensor){0});
    BAD_DECODER(words, c.plan = plan; c.t.k = (folio_tensor){0});
    BAD_DECODER("seq 0|context|cache", c.plan = plan; c.t.k = c.t.v = (folio_tensor){0};
                c.cache = NULL);
    BAD_DECODER("q|7|8", c.plan = plan; c.t.k = c.t.v = (folio_tensor){0}; c.t.q.tokens = 7);
    call c = good_call(f, PLAIN, FOLIO_ATTENTION_DECODER);
    c.plan = plan;
    c.t.k = c.t.v = (folio_tensor){0};
    CHECK_OK(run_call(&c));
    c = good_call(f, PLAIN, FOLIO_ATTENTION_ENCODER_ONLY); /* does not look at seq_len */
    c.plan = plan;
    CHECK_OK(run_call(&c));
    support_buffer_poison(&f->out);
    support_buffer_poison(&f->lse);
    check_untouched(f, __LINE__);
    check_still_serves(f, __LINE__);
    folio_plan_destroy(plan);
    folio_batch_destroy(batch);
}

/* ----------------------------------------------------------------------- the plan and its batch */

BACKEND_TEST(errors_forward, kernels_by_number)
{
    folio_context_info all = {.struct_size = sizeof all};
    folio_context_kernel kernel = {.struct_size = sizeof kernel};
    CHECK_OK(folio_context_get_info(ctx, &all));
    CHECK(all.num_kernels > 0);
    for (int32_t i = 0; i < all.num_kernels; i++) {
        CHECK_OK(folio_context_get_kernel(ctx, i, &kernel));
        CHECK(kernel.name[0] != '\0' && kernel.dtype != 0 && kernel.kv_dtype != 0);
        CHECK(kernel.head_size > 0 && kernel.min_rows >= 1);
    }
    char words[64];
    snprintf(words, sizeof words, "index %d|[0, %d)", all.num_kernels, all.num_kernels);
    REFUSED(folio_context_get_kernel(ctx, -1, &kernel), ARG, "index -1");
    REFUSED(folio_context_get_kernel(ctx, all.num_kernels, &kernel), ARG, words);
    REFUSED(folio_context_get_kernel(NULL, 0, &kernel), ARG, "ctx");
    REFUSED(folio_context_get_kernel(ctx, 0, NULL), ARG, "folio_context_kernel");
}

STEP_TEST(errors_forward, batch_changes_and_lifetimes)
{
    folio_plan_desc d = plan_desc(f);
    folio_plan *fresh = NULL;
    CHECK_OK(folio_plan_create(ctx, &d, &fresh));
    BAD_DECODER("update", c.plan = fresh); /* never updated */
    folio_plan_info info = {.struct_size = sizeof info};
    REFUSED(folio_plan_get_info(fresh, PLAIN, FOLIO_ATTENTION_DECODER, &info), ARG, "update");
    CHECK_OK(folio_plan_update(fresh, f->batch, NULL));
    CHECK_OK(folio_plan_get_info(fresh, PLAIN, FOLIO_ATTENTION_DECODER, &info));
    CHECK(info.kernel[0] != '\0' && info.fallback != NULL && info.num_items > 0);
    REFUSED(folio_plan_get_info(fresh, 2, FOLIO_ATTENTION_DECODER, &info), ARG, "2");
    REFUSED(folio_plan_get_info(fresh, FP8, FOLIO_ATTENTION_ENCODER, &info), ARG, "encoder");
    REFUSED(folio_plan_get_info(NULL, PLAIN, FOLIO_ATTENTION_DECODER, &info), ARG, "plan");
    REFUSED(folio_plan_get_info(fresh, PLAIN, FOLIO_ATTENTION_DECODER, NULL), ARG, "info");
    folio_plan_destroy(fresh);
    /* looking is no change */
    folio_batch_view v = {.struct_size = sizeof v};
    CHECK_OK(folio_batch_get_view(f->batch, FOLIO_ATTENTION_ENCODER_ONLY, FOLIO_PHASE_DECODE, &v));
    check_still_serves(f, __LINE__);
    /* a change is refused until the next update */
    folio_batch_seq s = good_seq(2);
    CHECK_OK(folio_batch_add(f->batch, &s));
    BAD_DECODER("changed", c.layer = 1);
    CHECK_OK(folio_plan_update(f->plan, f->batch, NULL));
    folio_batch_clear(f->batch);
    BAD_DECODER("changed", c.layer = 1);
    fill_batch(f->batch);
    BAD_DECODER("changed", c.layer = 1); /* the same sequences again, but filled anew */
    CHECK_OK(folio_plan_update(f->plan, f->batch, NULL));
    check_still_serves(f, __LINE__);
    const int32_t len = 5;
    folio_step a = {.struct_size = sizeof a, .num_seqs = 1, .seq_lens = &len};
    CHECK_OK(support_set_rows(f->batch, &a, table0, 1));
    BAD_DECODER("changed", c.layer = 1);
    fill_batch(f->batch);
    CHECK_OK(folio_plan_update(f->plan, f->batch, NULL));
    /* the plan keeps its batch alive */
    folio_batch_destroy(f->batch);
    f->batch = NULL;
}

/* Cross blocks without tables, a context without tables. */
STEP_TEST(errors_forward, incomplete_batches)
{
    folio_batch *batch = support_batch(ctx, BLOCK);
    folio_batch_seq s = good_seq(0);
    s.cross_block_table = NULL, s.num_cross_blocks = 0;
    CHECK_OK(folio_batch_add(batch, &s));
    if (folio_plan_update(f->plan, batch, NULL) == FOLIO_OK) /* there or in the forward */
        BAD(PLAIN, FOLIO_ATTENTION_ENCODER_DECODER, ARG, "cross_block_table",
            c.t.q.tokens = c.t.out.tokens = 5;
            c.t.k.tokens = c.t.v.tokens = ENCODER_TOKENS);
    else CHECK(strstr(folio_last_error(), "cross_block_table") != NULL);
    folio_batch_destroy(batch);
    CHECK_OK(folio_plan_update(f->plan, f->batch, NULL));
    /* a context, a cache, but no block table */
    batch = support_batch(ctx, BLOCK);
    s = good_seq(1);
    s.block_table = NULL, s.num_blocks = 0;
    CHECK_OK(folio_batch_add(batch, &s));
    if (folio_plan_update(f->plan, batch, NULL) == FOLIO_OK)
        BAD_DECODER("block_table", c.t.q.tokens = c.t.k.tokens = c.t.v.tokens = c.t.out.tokens = 1);
    else CHECK(strstr(folio_last_error(), "block_table") != NULL);
    folio_batch_destroy(batch);
    CHECK_OK(folio_plan_update(f->plan, f->batch, NULL));
}
