/*
 * client_0_2.c: a client of version 0.2. It is compiled against the frozen headers folio-0.2.h and
 * folio_pool-0.2.h alone and linked with the shared library of today, so it fails when growth breaks an
 * old binary: a pool's life from the first block to a fork's last, and structs shorter and longer than
 * the library's.
 */
#include <folio/folio_pool.h>
#include <stdio.h>
#include <string.h>

enum { BLOCK = 4, NUM_BLOCKS = 8 };

static int failures;

static void fail(int line, const char *what)
{
    fprintf(stderr, "client_0_2.c:%d: %s (last error: %s)\n", line, what, folio_last_error());
    failures++;
}

#define CHECK(cond)                                                                                \
    do {                                                                                           \
        if (!(cond)) fail(__LINE__, #cond);                                                        \
    } while (0)
#define OK(call) CHECK((call) == FOLIO_OK)

static void on_event(void *user, const folio_cache_event *event)
{
    CHECK(event->struct_size >= sizeof *event);
    CHECK(event->kind != FOLIO_EVENT_STORED || event->num_tokens == BLOCK);
    ++*(int *)user;
}

static void check_stats(folio_pool *pool, int64_t used, int64_t cached)
{
    folio_pool_stats s = {.struct_size = sizeof s};
    OK(folio_pool_get_stats(pool, &s));
    CHECK(s.num_blocks == NUM_BLOCKS && s.num_used == used && s.num_cached == cached);
    CHECK(s.num_free == NUM_BLOCKS - used - cached);
}

/* A prompt of six tokens, its fork, a step of each, and the prompt found again. */
static void live(folio_pool *pool)
{
    int32_t ids[] = {5, 6, 7, 8, 9, 10, 11};
    folio_tokens tokens = {.struct_size = sizeof tokens, .num_tokens = 6, .ids = ids};
    folio_sequence *a = NULL, *b = NULL;
    int64_t slots[6], matched = -1, pairs[2][2], num_pairs = 0;
    OK(folio_sequence_create(pool, NULL, &a));
    OK(folio_sequence_match(a, &tokens, &matched, NULL));
    CHECK(matched == 0);
    OK(folio_sequence_reserve(a, 6, FOLIO_RESERVE_ADMIT, slots));
    CHECK(slots[5] % BLOCK == 1);
    OK(folio_sequence_commit(a, &tokens));
    OK(folio_sequence_fork(a, &b));
    OK(folio_sequence_reserve(b, 1, 0, NULL));
    OK(folio_pool_take_copies(pool, 0, 2, pairs, &num_pairs));
    CHECK(num_pairs == 1);
    check_stats(pool, 3, 0);
    folio_sequence_destroy(b);
    folio_sequence_destroy(a);
    check_stats(pool, 0, 1);
    OK(folio_sequence_create(pool, NULL, &a));
    OK(folio_sequence_match(a, &tokens, &matched, NULL));
    CHECK(matched == BLOCK);
    folio_sequence_info info = {.struct_size = sizeof info};
    OK(folio_sequence_get_info(a, &info));
    CHECK(info.len == BLOCK && info.state == FOLIO_SEQUENCE_RESIDENT && info.num_blocks == 1);
    folio_sequence_destroy(a);
    OK(folio_pool_check(pool));
}

int main(void)
{
    folio_context *ctx = NULL;
    folio_pool *pool = NULL;
    int events = 0;
    OK(folio_context_create(NULL, &ctx));
    struct {
        folio_pool_desc desc;
        char later[64];
    } grown;
    memset(&grown, 0, sizeof grown);
    grown.desc = (folio_pool_desc){.struct_size = sizeof grown,
                                   .num_blocks = NUM_BLOCKS,
                                   .block_size = BLOCK,
                                   .on_event = on_event,
                                   .event_user = &events};
    OK(folio_pool_create(ctx, &grown.desc, &pool)); /* a newer client that uses nothing new */
    live(pool);
    CHECK(events > 0);
    folio_pool_destroy(pool);
    grown.later[63] = 1;
    CHECK(folio_pool_create(ctx, &grown.desc, &pool) == FOLIO_ERR_ARGUMENT && pool == NULL);
    folio_context_destroy(ctx);
    if (failures == 0) printf("a client of 0.2 runs\n");
    return failures > 0;
}
