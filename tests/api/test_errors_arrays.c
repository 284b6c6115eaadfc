/*
 * test_errors_arrays.c: integer arrays that are not aligned, strides that make places overlap, and a
 * batch that outlives its context: refused, or harmless.
 */
#include "kit/layer.h"
#include "support.h"

#include <math.h>

enum { HEADS = 4, SIZE = 8, BLOCK = 16, BLOCKS = 4 };
#define ARG FOLIO_ERR_ARGUMENT

/* The same array, one byte further. */
#define SHIFTED(array) ((const void *)((const char *)(array) + 1))

static folio_kv_cache_desc small_cache(folio_dtype dtype, folio_layout layout)
{
    return FOLIO_WITH(folio_kv_cache_desc, .num_blocks = BLOCKS, .num_layers = 1,
                      .block_size = BLOCK, .num_kv_heads = HEADS, .k_head_size = SIZE,
                      .dtype = dtype, .layout = layout);
}

BACKEND_TEST(errors_arrays, misaligned_arrays_of_a_sequence)
{
    static const int32_t table[8];
    static const int64_t slots[8];
    folio_batch *batch = support_batch(ctx, BLOCK);
    const folio_batch_seq good = FOLIO_WITH(
        folio_batch_seq, .query_len = 2, .seq_len = 2, .block_table = table, .num_blocks = 1,
        .encoder_len = 2, .encoder_new_len = 2, .cross_block_table = table, .num_cross_blocks = 1);
    folio_batch_seq s = good;
    s.block_table = SHIFTED(table);
    REFUSED(folio_batch_add(batch, &s), ARG, "block_table|align");
    s = good;
    s.slots = SHIFTED(slots);
    REFUSED(folio_batch_add(batch, &s), ARG, "slots|align");
    s = good;
    s.cross_block_table = SHIFTED(table);
    REFUSED(folio_batch_add(batch, &s), ARG, "cross_block_table|align");
    s = good;
    s.cross_slots = SHIFTED(slots);
    REFUSED(folio_batch_add(batch, &s), ARG, "cross_slots|align");
    CHECK_OK(folio_batch_add(batch, &good));
    folio_batch_destroy(batch);
    (void)backend;
}

BACKEND_TEST(errors_arrays, misaligned_arrays_of_a_step)
{
    static const int32_t ints[8] = {0, 1, 1}, ones[8] = {1, 1};
    static const int64_t longs[8];
    folio_batch *batch = support_batch(ctx, 1);
    folio_step good = {.struct_size = sizeof good, .num_seqs = 1, .seq_lens = ones};
    good.encoder_lens = ones;
    folio_step a;
#define BAD(field, array)                                                                          \
    a = good;                                                                                      \
    a.field = SHIFTED(array);                                                                      \
    REFUSED(support_set_rows(batch, &a, ints, 1), ARG, #field "|align")
    BAD(query_start, ints);
    BAD(seq_lens, ones);
    BAD(phases, ints);
    BAD(causality, ints);
    BAD(slots, longs);
    BAD(encoder_lens, ints);
    BAD(encoder_new_lens, ints);
    BAD(cross_slots, longs);
    a = good;
    a.cross_table =
        (folio_table){.kind = FOLIO_TABLE_ROWS, .indices = SHIFTED(ints), .row_stride = 1};
    REFUSED(folio_batch_set(batch, &a), ARG, "cross_table.indices|align");
    REFUSED(support_set_rows(batch, &good, SHIFTED(ints), 1), ARG, "table.indices|align");
    REFUSED(support_set_csr(batch, &good, SHIFTED(ints), ints, NULL), ARG, "table.start|align");
    REFUSED(support_set_csr(batch, &good, ints, SHIFTED(ints), NULL), ARG, "table.indices|align");
    REFUSED(support_set_csr(batch, &good, ints, ints, SHIFTED(ints)), ARG,
            "table.last_block_len|align");
    REFUSED(support_set_slots(batch, &good, ints, SHIFTED(ints), 4), ARG, "table.indices|align");
    REFUSED(support_set_slots(batch, &good, ints, SHIFTED(longs), 8), ARG, "table.indices|align");
    CHECK_OK(support_set_slots(batch, &good, ints, longs, 8));
    folio_batch_destroy(batch);
    (void)backend;
}

BACKEND_TEST(errors_arrays, misaligned_arrays_of_a_cache)
{
    static float rows[2 * HEADS * SIZE];
    static const int64_t numbers[8] = {0, 1, 2, 3};
    folio_kv_cache_desc d = small_cache(FOLIO_F32, FOLIO_LAYOUT_NATIVE);
    folio_kv_cache *cache = NULL;
    CHECK_OK(folio_kv_cache_create(ctx, &d, &cache));
    kit_poison_cache(cache);
    folio_kv_write w = {.struct_size = sizeof w, .slots = SHIFTED(numbers)};
    w.k = w.v = (folio_tensor){rows, FOLIO_F32, 2, 0, 0};
    REFUSED(folio_kv_cache_write(cache, 0, &w, NULL), ARG, "slots|align");
    folio_kv_gather g = {.struct_size = sizeof g, .slots = SHIFTED(numbers), .num_slots = 2};
    g.k = w.k;
    REFUSED(folio_kv_cache_gather(cache, 0, &g, NULL), ARG, "slots|align");
    REFUSED(folio_kv_cache_copy_blocks(cache, cache, (const folio_block_pair *)SHIFTED(numbers), 1,
                                       NULL),
            ARG, "pairs|align");
    static float block[BLOCK * HEADS * SIZE];
    folio_kv_rows r = {.struct_size = sizeof r, .k = block, .v = block, .num_blocks = 1};
    r.blocks = SHIFTED(numbers);
    REFUSED(folio_kv_cache_pack(cache, 0, &r, NULL), ARG, "blocks|align");
    folio_kv_cache_view view = support_view(cache, 0);
    CHECK(support_is_poison(view.k, (size_t)view.k_array.bytes));
    folio_kv_cache_destroy(cache);
    (void)backend;
}

BACKEND_TEST(errors_arrays, strides_of_a_cache_that_overlap)
{
    support_buffer memory = support_buffer_make(1 << 16), scales = support_buffer_make(1 << 14);
    void *k[1] = {memory.data};
    float *s[1] = {scales.data};
    folio_kv_cache *cache = NOWHERE;
    folio_kv_memory m = {.struct_size = sizeof m, .k = k, .v = k, .k_bytes = 1 << 16};
    m.v_bytes = 1 << 16;
    m.k_strides = m.v_strides = (folio_kv_strides){SIZE, SIZE, SIZE};
    folio_kv_cache_desc d = small_cache(FOLIO_F32, FOLIO_LAYOUT_STRIDED);
    REFUSED(folio_kv_cache_wrap(ctx, &d, &m, &cache), ARG, "k|overlap");
    m.k_strides = (folio_kv_strides){BLOCK * HEADS * SIZE, SIZE, BLOCK * SIZE};
    m.v_strides = (folio_kv_strides){BLOCK * HEADS * SIZE - 1, SIZE, BLOCK * SIZE};
    REFUSED(folio_kv_cache_wrap(ctx, &d, &m, &cache), ARG, "v|overlap");
    /* K and V may share memory: V inside K is a layout in use. */
    m.v_strides = m.k_strides;
    CHECK_OK(folio_kv_cache_wrap(ctx, &d, &m, &cache));
    folio_kv_cache_destroy(cache);
    folio_kv_memory n = {.struct_size = sizeof n, .k = k, .k_bytes = 1 << 16};
    n.k_scales = n.v_scales = s;
    n.k_scales_bytes = n.v_scales_bytes = 1 << 14;
    n.k_scales_strides = (folio_kv_strides){1, 1, 1};
    d = small_cache(FOLIO_INT8, FOLIO_LAYOUT_NHD);
    REFUSED(folio_kv_cache_wrap(ctx, &d, &n, &cache), ARG, "k_scales|overlap");
    support_buffer_free(&memory);
    support_buffer_free(&scales);
    (void)backend;
}

/* A prompt of three tokens without a cache, lse at the given strides. */
static folio_status run_lse(folio_context *ctx, int64_t token_stride, int64_t head_stride,
                            float *lse)
{
    static float x[3 * HEADS * SIZE], out[3 * HEADS * SIZE];
    kit_layer l = {0};
    CHECK_OK(KIT_LAYER_OPEN(ctx, &l, .num_heads = HEADS, .k_head_size = SIZE, .block_size = 1,
                            .max_seq_len = 3));
    folio_batch_seq s = {.struct_size = sizeof s, .query_len = 3, .seq_len = 3};
    CHECK_OK(folio_batch_add(l.batch, &s));
    CHECK_OK(folio_plan_update(l.plan, l.batch, NULL));
    folio_tensors t = {.struct_size = sizeof t, .lse = lse};
    t.q = t.k = t.v = (folio_tensor){x, FOLIO_F32, 3, 0, 0};
    t.out = (folio_tensor){out, FOLIO_F32, 3, 0, 0};
    t.lse_token_stride = token_stride;
    t.lse_head_stride = head_stride;
    folio_status status =
        folio_attention_forward(l.plan, 0, FOLIO_ATTENTION_DECODER, NULL, 0, &t, NULL);
    kit_layer_close(&l);
    return status;
}

BACKEND_TEST(errors_arrays, strides_of_lse_that_overlap)
{
    support_buffer lse = support_buffer_make(64 * sizeof(float));
    REFUSED(run_lse(ctx, 1, 1, lse.data), ARG, "lse|overlap");
    REFUSED(run_lse(ctx, HEADS - 1, 1, lse.data), ARG, "lse|overlap");
    REFUSED(run_lse(ctx, 2, 2, lse.data), ARG, "lse|overlap");
    CHECK(support_is_poison(lse.data, lse.bytes));
    CHECK_OK(run_lse(ctx, 1, 3, lse.data));
    CHECK_OK(run_lse(ctx, HEADS, 1, lse.data));
    support_buffer_free(&lse);
    (void)backend;
}

/* A plan keeps its batch alive by itself, also when the batch came from another context that is gone. */
TEST(errors_arrays, batch_outlives_its_context)
{
    folio_context *first = support_context("cpu", 1, NULL);
    folio_context *second = support_context("reference", 1, NULL);
    folio_attention_desc a = {.struct_size = sizeof a, .num_heads = 1, .k_head_size = SIZE};
    a.dtype = FOLIO_F32;
    folio_attention *attention = NULL;
    folio_plan *plan = NULL;
    CHECK_OK(folio_attention_create(second, &a, &attention));
    folio_plan_desc p = {.struct_size = sizeof p, .num_attentions = 1, .max_seqs = 1};
    p.attentions = &attention;
    p.max_query_tokens = p.max_seq_len = 1;
    CHECK_OK(folio_plan_create(second, &p, &plan));
    folio_batch *batch = support_batch(first, 1);
    folio_batch_seq s = {.struct_size = sizeof s, .query_len = 1, .seq_len = 1};
    CHECK_OK(folio_batch_add(batch, &s));
    CHECK_OK(folio_plan_update(plan, batch, NULL));
    folio_batch_destroy(batch);
    folio_context_destroy(first);
    float x[SIZE] = {1}, out[SIZE] = {0};
    folio_tensors t = {.struct_size = sizeof t};
    t.q = t.k = t.v = (folio_tensor){x, FOLIO_F32, 1, 0, 0};
    t.out = (folio_tensor){out, FOLIO_F32, 1, 0, 0};
    CHECK_OK(folio_attention_forward(plan, 0, FOLIO_ATTENTION_DECODER, NULL, 0, &t, NULL));
    CHECK(out[0] == 1);
    folio_plan_destroy(plan);
    folio_attention_destroy(attention);
    folio_context_destroy(second);
}

BACKEND_TEST(errors_arrays, last_block_len_out_of_range)
{
    static const int32_t indptr[2] = {0, 2}, indices[2] = {1, 2}, query_start[2] = {0, 1};
    folio_batch *batch = support_batch(ctx, BLOCK);
    folio_step a = {.struct_size = sizeof a, .num_seqs = 1, .query_start = query_start};
    int32_t last[1] = {0};
    REFUSED(support_set_csr(batch, &a, indptr, indices, last), ARG,
            "last_block_len[0] = 0|[1, 16]");
    last[0] = BLOCK + 1;
    REFUSED(support_set_csr(batch, &a, indptr, indices, last), ARG, "last_block_len[0] = 17");
    last[0] = -5;
    REFUSED(support_set_csr(batch, &a, indptr, indices, last), ARG, "last_block_len[0] = -5");
    last[0] = BLOCK;
    CHECK_OK(support_set_csr(batch, &a, indptr, indices, last));
    folio_batch_info s = {.struct_size = sizeof s};
    CHECK_OK(folio_batch_get_info(batch, &s));
    CHECK_INT(s.max_seq_len, 2 * BLOCK);
    folio_batch_destroy(batch);
    (void)backend;
}

BACKEND_TEST(errors_arrays, native_block_stride_keeps_64_bytes)
{
    support_buffer memory = support_buffer_make(1 << 16);
    void *k[1] = {memory.data};
    folio_kv_cache *cache = NOWHERE;
    folio_kv_cache_desc d = small_cache(FOLIO_F32, FOLIO_LAYOUT_NATIVE);
    folio_kv_memory m = {.struct_size = sizeof m, .k = k, .k_bytes = 1 << 16};
    int64_t own = (int64_t)HEADS * BLOCK * SIZE * 2;
    const int64_t bad[] = {1, 4, 8, 12, 15};
    for (int i = 0; i < 5; i++) {
        m.k_strides.block = own + bad[i];
        REFUSED(folio_kv_cache_wrap(ctx, &d, &m, &cache), ARG, "64");
    }
    m.k_strides.block = own + 16;
    CHECK_OK(folio_kv_cache_wrap(ctx, &d, &m, &cache));
    folio_kv_cache_destroy(cache);
    support_buffer_free(&memory);
    (void)backend;
}

/* A size that is no struct's is refused before anything past the struct is read. */
TEST(errors_arrays, struct_size_beyond_all_structs)
{
    folio_context_desc d = {.struct_size = SIZE_MAX};
    folio_context *ctx = NOWHERE;
    REFUSED(folio_context_create(&d, &ctx), ARG, "struct_size");
    d.struct_size = 4097;
    REFUSED(folio_context_create(&d, &ctx), ARG, "4097");
}
