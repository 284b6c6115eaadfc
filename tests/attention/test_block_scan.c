/*
 * test_block_scan.c: block tables are copied and judged in vectors; whatever the length and the place of
 * the one bad entry, it is found, and named by its index.
 */
#include "batch/block_scan.h"
#include "support.h"

enum { LONGEST = 75, BLOCK = 16 };

TEST(block_scan, finds_what_a_plain_loop_finds)
{
    static const int32_t specials[] = {0, 1, -1, -2, INT32_MIN, INT32_MAX, 70000};
    int32_t from[LONGEST + 1], to[LONGEST + 1];
    for (int n = 0; n <= LONGEST; n++)
        for (int at = 0; at < n || at == 0; at++)
            for (int v = 0; v < COUNT_OF(specials); v++) {
                uint32_t end = 0;
                bool holes = false;
                for (int k = 0; k < n; k++) {
                    from[k] = k == at ? specials[v] : (int32_t)(support_bits(3, (uint64_t)k) % 999);
                    if ((uint32_t)from[k] + 1 > end) end = (uint32_t)from[k] + 1;
                    if (from[k] < 0) holes = true;
                }
                to[n] = 12345;
                folioi_block_scan found = folioi_scan_blocks(to, from, n);
                CHECK_INT(found.end, end);
                CHECK_INT(found.holes, holes);
                CHECK(memcmp(to, from, (size_t)n * sizeof *to) == 0);
                CHECK_INT(to[n], 12345);
            }
}

/* Narrowed slot lists are moved within their own array, to the front. */
TEST(block_scan, copies_over_itself)
{
    for (int by = 0; by < 20; by++) {
        int32_t list[LONGEST + 20];
        for (int k = 0; k < LONGEST + 20; k++) list[k] = k;
        folioi_block_scan found = folioi_scan_blocks(list, list + by, LONGEST);
        CHECK_INT(found.end, LONGEST + by);
        for (int k = 0; k < LONGEST; k++) CHECK_INT(list[k], k + by);
    }
}

typedef struct {
    folio_batch *batch;
    folio_plan *plan;
    int32_t table[LONGEST];
} world;

/* Two sequences, the second with this table; the first one is well. */
static folio_status update(world *w, int blocks, bool cross)
{
    int32_t well[LONGEST];
    for (int k = 0; k < LONGEST; k++) well[k] = k;
    folio_batch_clear(w->batch);
    for (int i = 0; i < 2; i++) {
        folio_batch_seq s = {.struct_size = sizeof s, .query_len = 1, .num_blocks = LONGEST};
        s.block_table = i == 1 && !cross ? w->table : well;
        s.cross_block_table = i == 1 && cross ? w->table : well;
        s.num_cross_blocks = LONGEST;
        s.slots = (const int64_t[]){-1};
        s.seq_len = s.encoder_len = (int64_t)blocks * BLOCK;
        folio_status status = folio_batch_add(w->batch, &s);
        if (status != FOLIO_OK) return status;
    }
    return folio_plan_update(w->plan, w->batch, NULL);
}

BACKEND_TEST(block_scan, bad_entries_are_named)
{
    world w;
    folio_attention *attention = NULL;
    folio_attention_desc a = {.struct_size = sizeof a, .num_heads = 1, .k_head_size = 8};
    a.dtype = FOLIO_F32;
    CHECK_OK(folio_attention_create(ctx, &a, &attention));
    w.batch = support_batch(ctx, BLOCK);
    uint32_t types[] = {FOLIO_ATTENTION_BIT(FOLIO_ATTENTION_DECODER) |
                        FOLIO_ATTENTION_BIT(FOLIO_ATTENTION_ENCODER_DECODER)};
    folio_plan_desc p =
        FOLIO_WITH(folio_plan_desc, .attentions = &attention, .types = types, .num_attentions = 1,
                   .block_size = BLOCK, .num_blocks = LONGEST, .cross_num_blocks = LONGEST + 1,
                   .max_seqs = 2, .max_query_tokens = 2, .max_seq_len = LONGEST * BLOCK);
    CHECK_OK(folio_plan_create(ctx, &p, &w.plan));
    for (int cross = 0; cross < 2; cross++)
        for (int n = 1; n <= LONGEST; n += n < 20 ? 1 : 11)
            for (int at = 0; at < n; at++) {
                char words[64];
                const char *name = cross ? "cross_block_table" : "seq 1: block_table";
                const int32_t limit = LONGEST + cross, bad[] = {-2, limit, INT32_MAX, -1};
                for (int k = 0; k < LONGEST; k++) w.table[k] = k;
                w.table[at] = limit - 1;
                CHECK_OK(update(&w, n, cross));
                for (int v = 0; v < COUNT_OF(bad); v++) {
                    w.table[at] = bad[v];
                    snprintf(words, sizeof words, "%s[%d]", name, at);
                    REFUSED(update(&w, n, cross), FOLIO_ERR_ARGUMENT, words);
                }
            }
    folio_plan_destroy(w.plan);
    folio_batch_destroy(w.batch);
    folio_attention_destroy(attention);
}
