/* test_cuda_lists.c: the work lists that a device makes, made on the host: each key of each row once, in a fixed order. */
#include "backends/cuda/decode_schedule.h"
#include "backends/cuda/prefill_list.h"
#include "support.h"

#include <stdlib.h>

enum { MAX_SEQS = 300, MAX_TILES = 100000, MAX_ITEMS = 20000, MAX_SLOTS = 200 };

static uint32_t state = 11;

static int32_t draw(int32_t below)
{
    state = state * 1664525u + 1013904223u;
    return (int32_t)((state >> 8) % (uint32_t)below);
}

static void draw_seqs(folioi_cuda_seq *seqs, int32_t n, int32_t max_query, int32_t max_context)
{
    memset(seqs, 0, (size_t)n * sizeof *seqs);
    for (int32_t i = 0; i < n; i++) {
        seqs[i].query_len = draw(max_query);
        seqs[i].key_len = draw(10) ? seqs[i].query_len + draw(max_context) : 0;
        seqs[i].first_query_pos = seqs[i].key_len - seqs[i].query_len;
        seqs[i].causal = draw(4) > 0;
    }
}

TEST(cuda_lists, every_prefill_tile_once_and_longest_first)
{
    static folioi_prefill_tile tiles[MAX_TILES];
    static folioi_cuda_seq seqs[MAX_SEQS];
    static folioi_prefill_sort sort;
    static char seen[MAX_SEQS][1000];
    for (int round = 0; round < 200; round++) {
        int32_t n = draw(MAX_SEQS);
        int64_t tokens = 0, want = 0;
        draw_seqs(seqs, n, 700, 3000);
        folioi_cuda_counts counts = {.num_seqs = n};
        folioi_prefill_list list = {.seqs = seqs,
                                    .counts = &counts,
                                    .shape = {1 + draw(128), 1 + draw(8), draw(2) ? -1 : draw(500),
                                              draw(2) ? -1 : draw(500)},
                                    .tiles = tiles};
        for (int32_t i = 0; i < n; i++) {
            tokens += seqs[i].query_len;
            if (!seq_is_decode(&seqs[i], list.shape.group))
                want += ceil_div(seqs[i].query_len, list.shape.queries);
        }
        list.capacity = (int32_t)folioi_prefill_capacity(tokens, n, list.shape.queries);
        memset(seen, 0, sizeof seen);
        folioi_prefill_list_make(&list, &sort);
        CHECK_INT(sort.total, want);
        REQUIRE_TEST(sort.total <= list.capacity);
        int32_t last = -1;
        for (int32_t i = 0; i < list.capacity; i++) {
            if (i >= sort.total) {
                CHECK_INT(tiles[i].seq, -1);
                continue;
            }
            int32_t number = tiles[i].first_query / list.shape.queries;
            CHECK(tiles[i].first_query % list.shape.queries == 0);
            CHECK(!seen[tiles[i].seq][number]);
            seen[tiles[i].seq][number] = 1;
            int32_t bucket =
                folioi_prefill_tile_bucket(&seqs[tiles[i].seq], &list.shape, tiles[i].first_query);
            CHECK(bucket >= last && bucket >= 0 && bucket < FOLIOI_PREFILL_BUCKETS);
            last = bucket;
        }
    }
    CHECK(folioi_prefill_bucket(INT32_MAX) >= 0);
}

/* The parts of a sequence: one after another, none empty, within the slots and the room there is. */
static int32_t check_parts(const folioi_decode_rule *rule, const folioi_cuda_seq *seq,
                           int32_t number, const folioi_decode_item *items, int32_t store)
{
    folioi_decode_span span = decode_span(rule, seq);
    if (!span.taken) return 0;
    int32_t at = span.begin, parts = items[0].num_parts;
    for (int32_t p = 0; p < parts; p++) {
        const folioi_decode_item *t = &items[p];
        CHECK(t->seq == number && t->part == p && t->num_parts == parts);
        CHECK_INT(t->begin, at);
        CHECK(t->end > t->begin || (parts == 1 && span.begin == span.end));
        CHECK(parts == 1 || t->store == store);
        CHECK(p == 0 || t->begin % 16 == 0);
        CHECK(rule->split_len == 0 || p == 0 || t->begin % rule->split_len == 0);
        CHECK(t->slot >= 0 && t->slot < rule->num_slots);
        at = t->end;
    }
    CHECK_INT(at, span.end);
    return parts;
}

/* Slots share out the items in their order, and each holds copies of its first ones. */
static void check_slots(const folioi_decode_table *table, int32_t num_slots, int32_t num_items)
{
    int32_t at = 0;
    for (int32_t b = 0; b < num_slots; b++) {
        const folioi_decode_slot *slot = &table->slots[b];
        CHECK_INT(slot->begin, at);
        for (at = slot->begin; at < slot->end; at++) {
            const folioi_decode_item *item = &table->items[at];
            CHECK_INT(item->slot, b);
            if (at - slot->begin < FOLIOI_DECODE_KEPT)
                CHECK(memcmp(item, &slot->kept[at - slot->begin], sizeof *item) == 0);
        }
        for (int32_t i = slot->end - slot->begin; i < FOLIOI_DECODE_KEPT; i++)
            CHECK_INT(slot->kept[i].num_parts, 0);
    }
    CHECK_INT(at, num_items);
}

TEST(cuda_lists, every_decode_key_once)
{
    static folioi_decode_item items[MAX_ITEMS];
    static folioi_cuda_seq seqs[40];
    static folioi_decode_slot slots[MAX_SLOTS];
    folioi_decode_table table = {slots, items};
    for (int round = 0; round < 20000; round++) {
        int32_t n = draw(40), k = 0, stores = 0;
        folioi_decode_rule rule = {.group = 1 + draw(4),
                                   .max_rows = 16,
                                   .num_slots = 1 + draw(132),
                                   .split_len = draw(3) ? 0 : 512,
                                   .window_left = draw(3) ? -1 : draw(3000),
                                   .window_right = -1};
        draw_seqs(seqs, n, 8, 1 << draw(14));
        int32_t num_items = decode_schedule_host(&rule, seqs, n, &table);
        REQUIRE_TEST(num_items <= MAX_ITEMS);
        for (int32_t i = 0; i < n; i++) {
            int32_t parts = check_parts(&rule, &seqs[i], i, &items[k], stores);
            k += parts;
            stores += parts > 1 ? parts : 0;
        }
        CHECK_INT(k, num_items);
        check_slots(&table, rule.num_slots, num_items);
        for (int32_t i = 1; i < num_items; i++) CHECK(items[i - 1].slot <= items[i].slot);
        if (rule.split_len == 0)
            CHECK(num_items <= n + rule.num_slots && stores <= 2 * rule.num_slots);
        if (test_failures() > 0) return;
    }
}
