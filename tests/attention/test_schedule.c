/*
 * test_schedule.c: the cpu's work list from the inside. Whatever the batch, threads and memory: every
 * (query, split) is in exactly one item, chains fit the room for partial results, large items lead.
 */
#include "plan/schedule.h"
#include "support.h"

#include <stdlib.h>

enum { MAX_SEQS = 6, SPLIT = 64, TILE_ROWS = 16 };

typedef struct {
    folioi_schedule s;
    void *memory;
} schedule;

static schedule make(const folio_attention_desc *a, int64_t max_queries, int64_t max_keys,
                     int32_t workers, int64_t budget)
{
    schedule x = {.s.limits = folioi_schedule_size(a, MAX_SEQS, max_queries, max_keys, workers,
                                                   TILE_ROWS, SPLIT, budget)};
    folioi_arena arena = {NULL, 0};
    for (int pass = 0; pass < 2; pass++) {
        if (pass == 1) arena = (folioi_arena){x.memory = calloc(1, (size_t)arena.used), 0};
        x.s.items = arena_take(&arena, x.s.limits.max_items * (int64_t)sizeof *x.s.items);
        x.s.scratch = arena_take(&arena, x.s.limits.max_items * (int64_t)sizeof *x.s.scratch);
        x.s.weights = arena_take(&arena, x.s.limits.max_items);
        x.s.chains = arena_take(&arena, x.s.limits.max_chains * (int64_t)sizeof *x.s.chains);
    }
    return x;
}

/* How often the item list covers query q of a sequence in a split. */
static int covered(const folioi_schedule *s, int64_t seq, int64_t q, int64_t split)
{
    int n = 0;
    for (int64_t i = 0; i < s->num_items; i++) {
        const folioi_item *t = &s->items[i];
        n += t->seq == seq && q >= t->first_query && q < t->first_query + t->num_queries &&
             split >= t->split_begin && split < t->split_end;
    }
    return n;
}

static void check_cover(const schedule *x, const folio_attention_desc *a, const folio_batch *batch)
{
    for (int64_t i = 0; i < batch->num_seqs; i++) {
        folioi_rows rows = folioi_batch_rows(batch, i, FOLIO_ATTENTION_DECODER);
        for (int64_t q = 0; q < rows.query_len; q++) {
            folioi_range seen = key_range(&rows, a, q);
            for (int64_t split = 0; split * SPLIT < rows.key_len; split++) {
                bool needed = seen.begin < (split + 1) * SPLIT && seen.end > split * SPLIT;
                int n = covered(&x->s, i, q, split);
                CHECK_MSG(n == 1 || (n == 0 && !needed), "seq %d query %d split %d: %d times",
                          (int)i, (int)q, (int)split, n);
            }
        }
    }
}

/* Chains: as many items as they say, side by side in the room for partials, no two in one place. */
static void check_chains(const schedule *x)
{
    const folioi_schedule *s = &x->s;
    int64_t end = 0;
    CHECK(s->num_items <= s->limits.max_items && s->num_chains <= s->limits.max_chains);
    for (int64_t c = 0; c < s->num_chains; c++) {
        int items = 0;
        int64_t rows = 0;
        for (int64_t i = 0; i < s->num_items; i++) {
            if (s->items[i].chain != c) continue;
            items++;
            rows = (int64_t)s->items[i].num_queries * s->limits.heads_per_kv;
            CHECK(s->items[i].split_begin >= s->chains[c].split_begin &&
                  s->items[i].split_end <= s->chains[c].split_end);
        }
        CHECK_INT(items, s->chains[c].num_items);
        CHECK_INT(s->chains[c].first_partial, end);
        end += rows * (s->chains[c].split_end - s->chains[c].split_begin);
    }
    CHECK_INT(s->num_partials, end);
    CHECK_MSG(end <= s->limits.max_partials, "%lld partial rows, room for %lld", (long long)end,
              (long long)s->limits.max_partials);
}

TEST(schedule, every_split_once_and_partials_have_room)
{
    folio_context *ctx = support_context("cpu", 1, NULL);
    folio_batch *batch = support_batch(ctx, 16);
    int64_t chains = 0, refused = 0;
    for (uint64_t seed = 0; seed < 300; seed++) {
        folio_batch_clear(batch);
        int64_t n = 1 + (int64_t)(support_bits(seed, 0) % MAX_SEQS), queries = 0;
        for (int64_t i = 0; i < n; i++) {
            int64_t len = (int64_t)(support_bits(seed, 10 + (uint64_t)i) % 900);
            folio_batch_seq s = {.struct_size = sizeof s, .seq_len = len, .padding = len == 0};
            s.query_len = len ? 1 + (int64_t)(support_bits(seed, 20 + (uint64_t)i) % 3 == 0
                                                  ? support_bits(seed, 30) % (uint64_t)len
                                                  : 0)
                              : 1;
            queries += s.query_len;
            CHECK_OK(folio_batch_add(batch, &s));
        }
        folio_attention_desc a = {.num_heads = 4, .num_kv_heads = seed % 2 ? 1 : 4};
        a.window_left = seed % 5 == 0 ? 100 : -1;
        a.window_right = -1;
        int64_t budget = seed % 3 == 0 ? (int64_t)(support_bits(seed, 40) % 40) : 1 << 20;
        schedule x = make(&a, queries, 900, (int32_t)(1 + seed % 9), budget);
        folioi_schedule_fill(&x.s, &a, batch, FOLIO_ATTENTION_DECODER);
        check_cover(&x, &a, batch);
        check_chains(&x);
        chains += x.s.num_chains;
        refused += x.s.limits.max_partials == budget;
        free(x.memory);
    }
    CHECK_MSG(chains > 100 && refused > 10, "%lld chains, %lld tight budgets: not put to the test",
              (long long)chains, (long long)refused);
    folio_batch_destroy(batch);
    folio_context_destroy(ctx);
}

TEST(schedule, one_worker_makes_no_chains)
{
    folio_context *ctx = support_context("cpu", 1, NULL);
    folio_batch *batch = support_batch(ctx, 16);
    folio_batch_seq s = {.struct_size = sizeof s, .query_len = 1, .seq_len = 5000};
    CHECK_OK(folio_batch_add(batch, &s));
    folio_attention_desc a = {.num_heads = 1, .num_kv_heads = 1};
    a.window_left = a.window_right = -1;
    for (int32_t workers = 1; workers < 3; workers++) {
        schedule x = make(&a, 1, 5000, workers, 1 << 20);
        folioi_schedule_fill(&x.s, &a, batch, FOLIO_ATTENTION_DECODER);
        CHECK_INT(x.s.num_chains, workers - 1);
        CHECK(workers == 1 ? x.s.num_items == 1 : x.s.num_items > 1);
        free(x.memory);
    }
    folio_batch_destroy(batch);
    folio_context_destroy(ctx);
}

/* A step of a few microseconds is for the calling thread only, by its work and nothing else. */
TEST(schedule, small_steps_wake_nobody)
{
    folio_context *ctx = support_context("cpu", 1, NULL);
    folio_batch *batch = support_batch(ctx, 16);
    folio_attention_desc a = {.num_heads = 32, .num_kv_heads = 8, .k_head_size = 128};
    a.v_head_size = 128;
    a.window_left = a.window_right = -1;
    static const struct {
        int64_t seqs, len, workers;
    } cases[] = {{1, 1, 1}, {1, 16, 1}, {1, 17, 4}, {2, 8, 1}, {2, 9, 4}, {3, 4096, 4}};
    for (int i = 0; i < COUNT_OF(cases); i++) {
        folio_batch_clear(batch);
        folio_batch_seq s = {.struct_size = sizeof s, .query_len = 1, .seq_len = cases[i].len};
        for (int64_t n = 0; n < cases[i].seqs; n++) CHECK_OK(folio_batch_add(batch, &s));
        schedule x = make(&a, 3, 4096, 4, 1 << 20);
        folioi_schedule_fill(&x.s, &a, batch, FOLIO_ATTENTION_DECODER);
        CHECK_INT(x.s.num_workers, cases[i].workers);
        free(x.memory);
    }
    folio_batch_destroy(batch);
    folio_context_destroy(ctx);
}
