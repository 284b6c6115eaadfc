/* test_cuda_lists.c: the work lists that a device makes, made on the host: each key of each row once, in a fixed order. */
#include "backends/cuda/step/decode_schedule.h"
#include "backends/cuda/step/prefill_list.h"
#include "support.h"

#include <stdlib.h>

enum {
    MAX_SEQS = 300,
    MAX_TILES = 300000,
    MAX_ROWS = 1 << 23,
    MAX_ITEMS = 20000,
    MAX_SHARES = 200
};

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

/* A list of random tiles; its room is what a plan of just these limits has. */
static folioi_prefill_list draw_list(const folioi_cuda_seq *seqs, const folioi_cuda_counts *counts,
                                     folioi_prefill_head *head, folioi_prefill_item *items)
{
    static const int32_t split_lens[] = {0, 0, 0, 128, 1024};
    folioi_prefill_list list = {.seqs = seqs,
                                .counts = counts,
                                .shape = {.queries = 1 + draw(128),
                                          .heads_per_kv = 1 + draw(draw(2) ? 8 : 40),
                                          .decode_rows = draw(2) ? 16 : draw(9),
                                          .window_left = draw(2) ? -1 : draw(500),
                                          .window_right = draw(2) ? -1 : draw(500),
                                          .num_at_once = 1 + draw(300),
                                          .num_alone = 1 + draw(150),
                                          .split_len = split_lens[draw(5)]},
                                .head = head,
                                .items = items};
    int64_t tokens = 0, longest = 0, keys = 0;
    for (int32_t i = 0; i < counts->num_seqs; i++) {
        tokens += seqs[i].query_len;
        longest = max_i64(longest, seqs[i].query_len);
        keys = max_i64(keys, seqs[i].key_len);
    }
    list.room = prefill_room(&list.shape, tokens, counts->num_seqs, longest, keys);
    return list;
}

static bool is_listed(const folioi_prefill_list *list, int32_t seq)
{
    return list->seqs[seq].query_len * list->shape.heads_per_kv > list->shape.decode_rows;
}

static int by_tile_and_part(const void *a, const void *b)
{
    const folioi_prefill_item *x = a, *y = b;
    if (x->seq != y->seq) return x->seq < y->seq ? -1 : 1;
    if (x->first_query != y->first_query) return x->first_query < y->first_query ? -1 : 1;
    return x->part < y->part ? -1 : x->part > y->part;
}

/* The parts of a tile cover the keys that its rows see, one after another; none is empty. How many there are. */
static int32_t check_tile(const folioi_prefill_list *list, int32_t seq, int32_t first,
                          const folioi_prefill_item *parts)
{
    const folioi_prefill_shape *shape = &list->shape;
    const folioi_cuda_seq *s = &list->seqs[seq];
    folioi_prefill_tile t = prefill_tile(shape, s, first, 0);
    int32_t num_parts = parts[0].num_parts, at = t.begin;
    int64_t cut = FOLIOI_PREFILL_CUT;
    if (shape->split_len > 0) { /* what the batch is like does not matter */
        cut =
            (int64_t)shape->split_len * prefill_stride((int64_t)s->query_len * shape->heads_per_kv);
        bool is_cut = s->query_len <= shape->queries && t.end > t.begin;
        CHECK_INT(num_parts, is_cut ? (t.end - 1) / cut - t.begin / cut + 1 : 1);
    }
    for (int32_t p = 0; p < num_parts; p++) {
        CHECK(parts[p].seq == seq && parts[p].first_query == first && parts[p].part == p);
        CHECK(parts[p].num_parts == num_parts && parts[p].store == parts[0].store &&
              parts[p].counter == parts[0].counter);
        CHECK_INT(parts[p].num_queries, min_i64(shape->queries, s->query_len - first));
        CHECK(memcmp(&parts[p].sequence, s, sizeof *s) == 0);
        CHECK_INT(parts[p].begin, at);
        CHECK(parts[p].end > at || num_parts == 1);
        CHECK(p == 0 || at % cut == 0);
        at = parts[p].end;
    }
    CHECK_INT(at, t.end);
    return num_parts;
}

/* Rows of the workspace and counters: each one tile's, and within the room. */
static void check_places(const folioi_prefill_list *list, const folioi_prefill_item *items)
{
    static char rows[MAX_ROWS], counters[MAX_TILES];
    CHECK(list->head->num_rows <= list->room.rows);
    CHECK(list->head->num_cut_tiles <= list->room.cut_tiles);
    REQUIRE_TEST(list->head->num_rows <= MAX_ROWS && list->head->num_cut_tiles <= MAX_TILES);
    memset(rows, 0, (size_t)list->head->num_rows);
    memset(counters, 0, (size_t)list->head->num_cut_tiles);
    int64_t used = 0;
    for (int32_t i = 0; i < list->head->num_items; i++) {
        const folioi_prefill_item *t = &items[i];
        if (t->num_parts == 1) continue;
        int64_t count = (int64_t)t->num_queries * list->shape.heads_per_kv;
        int64_t first = t->store + t->part * count;
        REQUIRE_TEST(first >= 0 && first + count <= list->head->num_rows);
        for (int64_t r = first; r < first + count; r++) CHECK_INT(rows[r]++, 0);
        used += count;
        REQUIRE_TEST(t->counter >= 0 && t->counter < list->head->num_cut_tiles);
        if (t->part == 0) CHECK_INT(counters[t->counter]++, 0);
    }
    CHECK_INT(used, list->head->num_rows);
}

TEST(cuda_lists, every_prefill_key_once_and_longest_first)
{
    static folioi_prefill_item items[MAX_TILES];
    static folioi_cuda_seq seqs[MAX_SEQS];
    static folioi_prefill_sort sort;
    int64_t num_cut = 0;
    for (int round = 0; round < 400; round++) {
        int32_t n = draw(draw(2) ? MAX_SEQS : 8), last = -1, at = 0;
        folioi_prefill_head head = {0};
        folioi_cuda_counts counts = {.num_seqs = n};
        draw_seqs(seqs, n, draw(2) ? 700 : 40, 1 << draw(17));
        folioi_prefill_list list = draw_list(seqs, &counts, &head, items);
        REQUIRE_TEST(list.room.items <= MAX_TILES);
        prefill_list_make(&list, &sort);
        REQUIRE_TEST(head.num_items <= list.room.items);
        for (int32_t i = 0; i < head.num_items; i++) {
            int32_t bucket = prefill_bucket(items[i].end - items[i].begin);
            CHECK(bucket >= last && bucket >= 0 && bucket < FOLIOI_PREFILL_BUCKETS);
            last = bucket;
        }
        check_places(&list, items);
        folioi_prefill_head counted = {0};
        folioi_prefill_list no_room = list;
        no_room.head = &counted;
        no_room.room.items = 0;
        prefill_list_make(&no_room, &sort);
        CHECK(memcmp(&counted, &head, sizeof head) == 0);
        qsort(items, (size_t)head.num_items, sizeof items[0], by_tile_and_part);
        for (int32_t i = 0; i < n; i++)
            for (int32_t q = 0; q < seqs[i].query_len; q += list.shape.queries)
                if (is_listed(&list, i) && at < head.num_items)
                    at += check_tile(&list, i, q, &items[at]);
        CHECK_INT(at, head.num_items);
        int64_t keys = 0;
        for (int32_t i = 0; i < n; i++)
            if (is_listed(&list, i)) keys += seqs[i].key_len;
        CHECK_INT(head.num_keys, keys);
        num_cut += head.num_cut_tiles;
        if (test_failures() > 0) return;
    }
    CHECK(num_cut > 1000);
}

TEST(cuda_lists, buckets_know_their_most_keys)
{
    for (int32_t keys = 0; keys < 100000; keys++) {
        int32_t bucket = prefill_bucket(keys);
        bool is_last = keys == prefill_bucket_keys(bucket);
        CHECK(keys <= prefill_bucket_keys(bucket));
        CHECK_INT(prefill_bucket(keys + 1), bucket - is_last);
    }
    CHECK(prefill_bucket(INT32_MAX) >= 0);
    CHECK(prefill_bucket_keys(prefill_bucket(INT32_MAX)) >= INT32_MAX);
}

/* How many parts one of `n` equal sequences has. */
static int32_t parts_on(int32_t num_at_once, int32_t num_alone, int32_t n, int32_t query_len,
                        int32_t key_len, int32_t split_len)
{
    static folioi_prefill_item items[MAX_TILES];
    static folioi_prefill_sort sort;
    folioi_cuda_seq seqs[64];
    folioi_prefill_head head = {0};
    folioi_cuda_counts counts = {.num_seqs = n};
    folioi_prefill_list list = {.seqs = seqs,
                                .counts = &counts,
                                .shape = {.queries = 32,
                                          .heads_per_kv = 4,
                                          .window_left = -1,
                                          .window_right = -1,
                                          .num_at_once = num_at_once,
                                          .num_alone = num_alone,
                                          .split_len = split_len},
                                .head = &head,
                                .items = items};
    for (int32_t i = 0; i < n; i++)
        seqs[i] = (folioi_cuda_seq){.query_len = query_len,
                                    .key_len = key_len,
                                    .first_query_pos = key_len - query_len,
                                    .causal = 1};
    list.room = prefill_room(&list.shape, (int64_t)n * query_len, n, query_len, key_len);
    prefill_list_make(&list, &sort);
    return items[0].num_parts;
}

static int32_t parts_of_equal(int32_t n, int32_t query_len, int32_t key_len, int32_t split_len)
{
    return parts_on(33, 16, n, query_len, key_len, split_len);
}

/* A tile's bucket counts more keys than it has: there is room for the part more. */
TEST(cuda_lists, one_tile_has_room_for_its_parts)
{
    for (int32_t keys = 17; keys < 9000; keys += 13) {
        folioi_prefill_item items[64];
        folioi_prefill_sort sort;
        folioi_prefill_head head = {0};
        folioi_cuda_seq seq = {.query_len = 17, .key_len = keys, .first_query_pos = keys - 17};
        folioi_cuda_counts counts = {.num_seqs = 1};
        folioi_prefill_list list = {.seqs = &seq,
                                    .counts = &counts,
                                    .shape = {.queries = 128,
                                              .heads_per_kv = 1,
                                              .window_left = -1,
                                              .window_right = -1,
                                              .num_at_once = 60,
                                              .num_alone = 30},
                                    .head = &head,
                                    .items = items};
        list.room = prefill_room(&list.shape, 17, 1, 17, keys);
        REQUIRE_TEST(list.room.items <= 64);
        prefill_list_make(&list, &sort);
        CHECK(head.num_items <= list.room.items && head.num_rows <= list.room.rows);
    }
}

/* 132 multiprocessors, one block each and 8 kv heads: 16 items at once, and no second round of parts. */
TEST(cuda_lists, one_block_on_a_multiprocessor)
{
    static const struct {
        int32_t n, query_len, parts;
    } cases[] = {{1, 8, 16},  {1, 32, 16}, {1, 64, 8}, {1, 128, 4}, {1, 256, 2},
                 {1, 384, 1}, {1, 512, 1}, {2, 32, 8}, {8, 32, 2},  {16, 32, 1}};
    for (int i = 0; i < COUNT_OF(cases); i++)
        CHECK_INT(parts_on(16, 16, cases[i].n, cases[i].query_len, 8192, 0), cases[i].parts);
}

/* 132 multiprocessors, two blocks each and 8 kv heads: 33 items at once. */
TEST(cuda_lists, few_tiles_are_cut_to_fill_the_device)
{
    CHECK(parts_of_equal(1, 8, 8192, 0) >= 30); /* 8 draft tokens */
    CHECK_INT(parts_of_equal(16, 8, 8192, 0), 2);
    CHECK_INT(parts_of_equal(33, 32, 8192, 0), 1);
    CHECK_INT(parts_of_equal(1, 32, 32, 0), 1);
    CHECK_INT(parts_of_equal(40, 32, 8192, 0),
              1); /* 80 parts would be more than there is room for */
    CHECK_INT(parts_of_equal(64, 32, 8192, 0), 1);
    CHECK_INT(parts_of_equal(1, 512, 8192, 0), 1); /* 16 tiles of one chunk */
    CHECK(parts_of_equal(1, 64, 8192, 0) >= 15);
    for (int32_t n = 1; n < 64; n += 9) {
        CHECK_INT(parts_of_equal(n, 8, 8192, 2048), 4);
        CHECK_INT(parts_of_equal(n, 16, 8192, 2048), 2);
        CHECK_INT(parts_of_equal(n, 33, 8192, 2048), 1);
    }
}

/* The parts of a sequence: one after another, none empty, within the shares and the room there is. */
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
        CHECK(t->end > t->begin || (t->end == t->begin && rule->cluster > 0) ||
              (parts == 1 && span.begin == span.end));
        CHECK(parts == 1 || t->store == store);
        CHECK(p == 0 || t->begin % 16 == 0 || t->begin == t->end || t->begin == span.begin);
        CHECK(rule->split_len == 0 || p == 0 || t->begin % rule->split_len == 0);
        CHECK(t->share >= 0 && t->share < rule->num_shares);
        if (rule->cluster > 0) { /* the blocks of one cluster, alike to a tile */
            CHECK(t->share % rule->cluster == p && parts == rule->cluster);
            CHECK(t->end - t->begin <= ((span.end - span.base + 15) / 16 / parts + 1) * 16);
        }
        at = t->end;
    }
    CHECK_INT(at, span.end);
    bool is_whole =
        rule->split_len == 0 && rule->cluster == 0 && span.end - span.base <= FOLIOI_DECODE_WHOLE;
    CHECK(!is_whole || parts == 1);
    return parts;
}

/* Shares hold the items in their order, and each holds copies of its first ones. */
static void check_shares(const folioi_decode_table *table, int32_t num_shares, int32_t num_items)
{
    int32_t at = 0;
    for (int32_t b = 0; b < num_shares; b++) {
        const folioi_decode_share *share = &table->shares[b];
        int32_t tiles = 0;
        CHECK_INT(share->begin, at);
        for (at = share->begin; at < share->end; at++) {
            const folioi_decode_item *item = &table->items[at];
            CHECK_INT(item->share, b);
            folioi_decode_item copy = *item;
            copy.first_tile = tiles;
            if (at - share->begin < FOLIOI_DECODE_KEPT)
                CHECK(memcmp(&copy, &share->kept[at - share->begin], sizeof copy) == 0);
            tiles += decode_tiles(item);
        }
        for (int32_t i = share->end - share->begin; i < FOLIOI_DECODE_KEPT; i++)
            CHECK_INT(share->kept[i].num_parts, 0);
    }
    CHECK_INT(at, num_items);
}

/* Where the first tiles of each share lie: one item's tiles after another's. */
static void check_blocks(const folioi_decode_rule *rule, const folioi_decode_table *table)
{
    for (int32_t b = 0; b < rule->num_shares; b++) {
        const folioi_decode_share *share = &table->shares[b];
        int32_t n = 0, items = share->end - share->begin;
        for (int32_t i = 0; table->blocks != NULL && i < items && i < FOLIOI_DECODE_KEPT; i++) {
            const folioi_decode_item *item = &table->items[share->begin + i];
            for (int32_t key = item->begin / 16 * 16;
                 item->begin < item->end && key < item->end && n < FOLIOI_DECODE_TILES; key += 16)
                CHECK_INT(share->blocks[n++],
                          table->blocks[item->sequence.table + key / rule->block_size]);
        }
        while (n < FOLIOI_DECODE_TILES) CHECK_INT(share->blocks[n++], -1);
    }
}

TEST(cuda_lists, every_decode_key_once)
{
    static folioi_decode_item items[MAX_ITEMS];
    static folioi_cuda_seq seqs[40];
    static folioi_decode_share shares[MAX_SHARES];
    static int32_t blocks[1 << 16];
    static int64_t slots[1 << 10];
    folioi_decode_table table = {shares, items, NULL, NULL};
    for (int32_t i = 0; i < 1 << 10; i++) slots[i] = i * 3 - 1;
    for (int32_t i = 0; i < 1 << 16; i++) blocks[i] = i * 7 % 65537;
    for (int round = 0; round < 20000; round++) {
        int32_t n = draw(40), k = 0, stores = 0;
        folioi_decode_rule rule = {.heads_per_kv = 1 + draw(4),
                                   .max_rows = 16,
                                   .num_shares = 1 + draw(132),
                                   .item_cost = decode_item_cost(16 << draw(8)),
                                   .split_len = draw(3) ? 0 : 512,
                                   .window_left = draw(3) ? -1 : draw(3000),
                                   .window_right = -1,
                                   .block_size = 16 * (1 + draw(4))};
        if (rule.split_len == 0) {
            rule.cluster = 2 + draw(15);
            rule.cluster_seqs = rule.num_shares / rule.cluster;
        }
        draw_seqs(seqs, n, 8, 1 << draw(14));
        for (int32_t i = 0; i < n; i++) seqs[i].table = i * 1024, seqs[i].new_row = i * 5 + 1;
        table.blocks = draw(4) ? blocks : NULL;
        table.slots = draw(2) ? slots : NULL;
        int64_t longest = FOLIOI_DECODE_CLUSTER_KEYS + draw(2);
        folioi_decode_rule now = decode_rule_for(&rule, n, longest);
        bool has_clusters = rule.cluster_seqs > 0 && n <= rule.cluster_seqs &&
                            longest == FOLIOI_DECODE_CLUSTER_KEYS;
        CHECK_INT(now.cluster, has_clusters ? rule.cluster : 0);
        int32_t num_items = decode_schedule_host(&now, seqs, n, &table);
        REQUIRE_TEST(num_items <= MAX_ITEMS);
        for (int32_t i = 0; i < n; i++) {
            int32_t parts = check_parts(&now, &seqs[i], i, &items[k], stores);
            k += parts;
            stores += parts > 1 ? parts : 0;
        }
        CHECK_INT(k, num_items);
        for (int32_t i = 0; i < num_items; i++)
            CHECK_INT(items[i].slot, table.slots ? slots[items[i].sequence.new_row] : -1);
        int64_t stretch = 0;
        folioi_decode_count counted = decode_count_host(&now, seqs, n, &stretch);
        CHECK(counted.items == num_items && counted.stores == stores);
        check_shares(&table, rule.num_shares, num_items);
        check_blocks(&rule, &table);
        for (int32_t i = 1; i < num_items; i++) CHECK(items[i - 1].share <= items[i].share);
        if (rule.split_len == 0)
            CHECK(num_items <= n + rule.num_shares && stores <= 2 * rule.num_shares);
        if (test_failures() > 0) return;
    }
}
