/* test_errors_arrays.c: integer arrays that are not aligned, and a batch that outlives its context. */
#include "kit/layer.h"
#include "support.h"

enum { HEADS = 4, SIZE = 8, BLOCK = 16, BLOCKS = 4 };
#define ARG FOLIO_ERR_ARGUMENT

/* The same array, one byte further. */
#define SHIFTED(array) ((const void *)((const char *)(array) + 1))

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
}

BACKEND_TEST(errors_arrays, misaligned_arrays_of_a_cache)
{
    static float rows[2 * HEADS * SIZE];
    static const int64_t numbers[8] = {0, 1, 2, 3};
    folio_kv_cache_desc d =
        FOLIO_WITH(folio_kv_cache_desc, .num_blocks = BLOCKS, .num_layers = 1, .block_size = BLOCK,
                   .num_kv_heads = HEADS, .k_head_size = SIZE, .dtype = FOLIO_F32);
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
}

/* A plan keeps its batch alive by itself, also when the batch came from another context that is gone. */
TEST(errors_arrays, batch_outlives_its_context)
{
    folio_context *first = support_context("cpu", 1, NULL);
    folio_context *second = support_context("reference", 1, NULL);
    kit_layer l = {0};
    CHECK_OK(KIT_LAYER_OPEN(second, &l, .num_heads = 1, .k_head_size = SIZE, .max_seq_len = 1));
    folio_batch *batch = support_batch(first, 1);
    folio_batch_seq s = {.struct_size = sizeof s, .query_len = 1, .seq_len = 1};
    CHECK_OK(folio_batch_add(batch, &s));
    CHECK_OK(folio_plan_update(l.plan, batch, NULL));
    folio_batch_destroy(batch);
    folio_context_destroy(first);
    float x[SIZE] = {1}, out[SIZE] = {0};
    folio_tensors t = {.struct_size = sizeof t};
    t.q = t.k = t.v = (folio_tensor){x, FOLIO_F32, 1, 0, 0};
    t.out = (folio_tensor){out, FOLIO_F32, 1, 0, 0};
    CHECK_OK(folio_attention_forward(l.plan, 0, FOLIO_ATTENTION_DECODER, NULL, 0, &t, NULL));
    CHECK(out[0] == 1);
    kit_layer_close(&l);
    folio_context_destroy(second);
}
