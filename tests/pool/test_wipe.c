/*
 * test_wipe.c: K, V and token ids that nothing needs any more: when they are overwritten, in caches, in host memory and in
 * the store's file, and what is left alone. What lies there is looked at byte by byte, so all pools are on the host.
 */
#include "cache/kv_cache.h"
#include "cache/pool.h"
#include "pool/generation_rig.h"
#include "pool/store_rig.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

static const gen_geometry several = {.backend = "cpu",
                                     .block_size = 4,
                                     .kv_dtype = FOLIO_BF16,
                                     .num_layer_groups = 2,
                                     .window = 9,
                                     .encoder = true};
static const gen_geometry *const geometries[] = {&several, &gen_quantised, &gen_over_each_other,
                                                 &gen_latent};

/* Bytes that are neither zero nor the poison of slots that nobody wrote. */
static int64_t count_bytes(const void *memory, int64_t bytes, int poison)
{
    const unsigned char *at = memory;
    int64_t n = 0;
    for (int64_t i = 0; i < bytes; i++) n += at[i] != 0 && at[i] != poison;
    return n;
}

static int64_t in_caches(const gen_world *w)
{
    int64_t n = 0;
    for (int i = 0; i <= GEN_GROUPS; i++) {
        const folio_kv_cache *c = w->p.caches[i];
        if (c != NULL) n += count_bytes(c->memory, c->memory_bytes, 0xFF);
    }
    return n;
}

static int64_t in_host_memory(const gen_world *w)
{
    const folioi_frames *f = &w->p.pool->frames;
    return f->memory == NULL ? 0 : count_bytes(f->memory, f->bytes, 0);
}

/* Past the superblock, which has the file's random numbers. */
static int64_t in_file(const gen_world *w)
{
    int64_t size = 0;
    unsigned char *data = srig_read_file(w->store, &size);
    int64_t n = count_bytes(data + 4096, size - 4096, 0);
    free(data);
    return n;
}

static bool open_world(gen_world *w, const gen_geometry *g, folio_wipe wipe, int64_t host)
{
    if (!gen_world_model(w, g, NULL)) return false;
    folio_pool_desc desc = gen_world_desc(w, 64, host, 60);
    desc.wipe = wipe;
    if (!gen_pool_open(&w->p, &w->m, &desc, NULL)) return false;
    folioi_frames *f = &w->p.pool->frames; /* no zeros at first */
    memset(f->memory, 0, (size_t)f->bytes);
    return true;
}

/* Something in every tier: cached blocks in all three, a sequence that came back from the file, one that is swapped. */
static folio_sequence *fill_tiers(gen_world *w, bool host)
{
    folio_sequence_destroy(gen_filled(w, &w->r[2], 34));
    if (host) CHECK(gen_lower(w, FOLIO_TIER_HOST, 3) > 0);
    CHECK(gen_lower(w, FOLIO_TIER_DISK, 2) > 0);
    folio_sequence *s = gen_filled(w, &w->r[0], 38), *swapped = gen_filled(w, &w->r[3], 21);
    CHECK_OK(folio_sequence_swap_out(s, FOLIO_TIER_DISK, NULL, NULL));
    CHECK_OK(folio_sequence_swap_in(s, NULL, NULL));
    CHECK_OK(folio_sequence_swap_out(swapped, FOLIO_TIER_DISK, NULL, NULL));
    folio_sequence_destroy(swapped);
    CHECK_INT(gen_stats(&w->p).store_errors, 0);
    return s;
}

static void check_nothing(const gen_world *w, const char *what, int g)
{
    CHECK_MSG(in_caches(w) == 0, "%s, geometry %d: %lld bytes in caches", what, g,
              (long long)in_caches(w));
    CHECK_MSG(in_host_memory(w) == 0, "%s, geometry %d: %lld bytes in host memory", what, g,
              (long long)in_host_memory(w));
    CHECK_MSG(in_file(w) == 0, "%s, geometry %d: %lld bytes in the file", what, g,
              (long long)in_file(w));
}

/* By default all of it goes with a forget, and nothing before; what a sequence holds stays. */
TEST(wipe, a_forget_leaves_nothing)
{
    static gen_world w;
    for (int g = 0; g < COUNT_OF(geometries); g++) {
        REQUIRE_TEST(open_world(&w, geometries[g], FOLIO_WIPE_ON_FORGET, 24));
        folio_sequence *s = fill_tiers(&w, true);
        CHECK(in_caches(&w) > 0 && in_host_memory(&w) > 0 && in_file(&w) > 0);
        CHECK_OK(folio_pool_forget(w.p.pool));
        CHECK(gen_contents_right(&w.p, s, &w.r[0]));
        CHECK_INT(in_file(&w), 0);
        CHECK_INT(in_host_memory(&w), 0);
        gen_end(&w.p, s, &w.r[0]);
        CHECK_OK(folio_pool_forget(w.p.pool));
        check_nothing(&w, "forget", g);
        gen_world_close(&w);
    }
}

/* A sequence that is swapped to the file stays there, also where all other frames go. */
TEST(wipe, a_forget_leaves_what_is_swapped)
{
    static gen_world w;
    REQUIRE_TEST(open_world(&w, &several, FOLIO_WIPE_ON_FORGET, 24));
    folio_sequence *s = fill_tiers(&w, true);
    CHECK_OK(folio_sequence_swap_out(s, FOLIO_TIER_DISK, NULL, NULL));
    CHECK_OK(folio_pool_forget(w.p.pool));
    CHECK_INT(in_caches(&w), 0);
    CHECK(in_file(&w) > 0);
    CHECK_OK(folio_sequence_swap_in(s, NULL, NULL));
    gen_end(&w.p, s, &w.r[0]);
    gen_world_close(&w);
}

/* Frames of an earlier pool, of a sequence that nobody swapped in, and those past a smaller size. */
TEST(wipe, a_forget_of_the_next_pool)
{
    static gen_world w;
    REQUIRE_TEST(open_world(&w, &several, FOLIO_WIPE_NEVER, 0));
    folio_sequence_destroy(fill_tiers(&w, false));
    folio_sequence_destroy(gen_filled(&w, &w.r[1], 39));
    CHECK(gen_lower(&w, FOLIO_TIER_DISK, 30) > 3);
    CHECK_OK(folio_pool_forget(w.p.pool));
    CHECK(in_file(&w) > 0 && in_caches(&w) > 0); /* never means never */
    gen_pool_close(&w.p);
    REQUIRE_TEST(gen_world_pool(&w, 16, 0, 3));
    CHECK_OK(folio_pool_forget(w.p.pool));
    CHECK_INT(in_file(&w), 0);
    gen_world_close(&w);
}

/* On free: as soon as a call has freed it, in every tier. */
TEST(wipe, on_free_nothing_is_left_when_nothing_is_used)
{
    static gen_world w;
    for (int g = 0; g < COUNT_OF(geometries); g++)
        for (int host = 0; host <= 24; host += 24) {
            REQUIRE_TEST(open_world(&w, geometries[g], FOLIO_WIPE_ON_FREE, host));
            folio_sequence *s = gen_sequence(&w, &w.r[0]);
            CHECK_OK(gen_feed(&w.p, s, &w.r[0], 30));
            CHECK_OK(folio_sequence_truncate(s, 0));
            CHECK_OK(folio_pool_swap_out(w.p.pool, FOLIO_TIER_DISK, 100, NULL, NULL, NULL));
            folio_sequence_destroy(s);
            s = fill_tiers(&w, host > 0);
            CHECK(gen_contents_right(&w.p, s, &w.r[0]));
            folio_sequence_destroy(s);
            CHECK(in_file(&w) > 0); /* cached frames are used */
            CHECK_OK(folio_pool_forget(w.p.pool));
            check_nothing(&w, "forget", g);
            gen_world_close(&w);
        }
}

/* A sequence that goes to another tier and comes back leaves nothing where it was. */
TEST(wipe, on_free_a_swap_leaves_nothing_behind)
{
    static gen_world w;
    REQUIRE_TEST(open_world(&w, &several, FOLIO_WIPE_ON_FREE, 24));
    folio_sequence *s = gen_sequence(&w, &w.r[0]);
    CHECK_OK(folio_sequence_reserve(s, 5, 0, NULL)); /* not committed under ids: never cached */
    CHECK_OK(folio_sequence_commit(s, NULL));
    CHECK_OK(folio_sequence_truncate(s, 0));
    CHECK_OK(gen_write(&w.p, s, &w.r[0], 3)); /* less than a block */
    CHECK_OK(folio_sequence_swap_out(s, FOLIO_TIER_HOST, NULL, NULL));
    CHECK_INT(in_caches(&w), 0);
    CHECK(in_host_memory(&w) > 0);
    CHECK_OK(folio_sequence_swap_out(s, FOLIO_TIER_DISK, NULL, NULL));
    CHECK_INT(in_host_memory(&w), 0);
    CHECK(in_file(&w) > 0);
    CHECK_OK(folio_sequence_swap_in(s, NULL, NULL));
    CHECK_INT(in_file(&w), 0);
    CHECK_INT(in_host_memory(&w), 0); /* the mover's frame is there too */
    CHECK(in_caches(&w) > 0);
    folio_sequence_destroy(s);
    CHECK_INT(in_caches(&w), 0);
    gen_world_close(&w);
}

/* Cached blocks are freed with their pool; the file keeps what the next pool may find. */
TEST(wipe, on_free_the_end_of_a_pool_leaves_nothing_in_memory)
{
    static gen_world w;
    REQUIRE_TEST(open_world(&w, &gen_quantised, FOLIO_WIPE_ON_FREE, 24));
    folio_sequence_destroy(gen_filled(&w, &w.r[0], 38));
    CHECK(gen_lower(&w, FOLIO_TIER_HOST, 1) == 1);
    CHECK(in_caches(&w) > 0);
    folio_pool_destroy(w.p.pool);
    w.p.pool = NULL;
    CHECK_INT(in_caches(&w), 0);
    folio_pool_desc desc = gen_world_desc(&w, 64, 0, 60);
    desc.block_size = 16;
    folio_layer_group group = {.cache = w.p.caches[0]};
    desc.layer_groups = &group;
    CHECK_OK(folio_pool_create(w.m.ctx, &desc, &w.p.pool));
    gen_world_close(&w);
}

/* The last sequence of a salt takes what is cached of the salt along, and nothing of another. */
TEST(wipe, a_salt_ends_with_its_last_sequence)
{
    static gen_world w;
    REQUIRE_TEST(open_world(&w, &gen_windowed, FOLIO_WIPE_ON_SALT, 24));
    w.r[2].encoder_seed = w.r[0].encoder_seed + 1;
    folio_sequence *stays = gen_filled(&w, &w.r[2], 38);
    folio_sequence *s = gen_filled(&w, &w.r[0], 38), *second = NULL;
    CHECK_OK(folio_sequence_fork(s, &second));
    folio_sequence_destroy(s);
    s = gen_sequence(&w, &w.r[0]);
    CHECK_INT(gen_match(&w, s, &w.r[0], 36), 36); /* a fork has the salt still */
    folio_sequence_destroy(s);
    CHECK_OK(folio_sequence_swap_out(second, FOLIO_TIER_HOST, NULL, NULL));
    folio_sequence_destroy(gen_filled(&w, &w.r[0], 38));
    CHECK(in_host_memory(&w) > 0);
    CHECK_OK(folio_sequence_swap_in(second, NULL, NULL)); /* its host blocks are cached now */
    CHECK(gen_lower(&w, FOLIO_TIER_DISK, 4) > 0);
    CHECK(in_file(&w) > 0);
    folio_sequence_destroy(second);
    CHECK_INT(in_file(&w), 0);
    CHECK_INT(in_host_memory(&w), 0);
    s = gen_sequence(&w, &w.r[0]);
    CHECK_INT(gen_match(&w, s, &w.r[0], 36), 0);
    folio_sequence_destroy(s);
    s = gen_sequence(&w, &w.r[2]);
    CHECK_INT(gen_match(&w, s, &w.r[2], 36), 36);
    folio_sequence_destroy(s);
    CHECK(gen_contents_right(&w.p, stays, &w.r[2]));
    folio_sequence_destroy(stays);
    CHECK_INT(in_caches(&w), 0);
    gen_world_close(&w);
}

/* Blocks taken by hand may hold K and V of any group. */
TEST(wipe, blocks_by_hand)
{
    static gen_world w;
    int32_t blocks[64];
    REQUIRE_TEST(open_world(&w, &several, FOLIO_WIPE_ON_FREE, 0));
    CHECK_OK(folio_pool_alloc(w.p.pool, 64, blocks));
    for (int i = 0; i <= GEN_GROUPS; i++)
        memset(w.p.caches[i]->memory, 0x55, (size_t)w.p.caches[i]->memory_bytes);
    CHECK_OK(folio_pool_release(w.p.pool, 63, blocks));
    int64_t block_bytes = 0;
    for (int i = 0; i <= GEN_GROUPS; i++) block_bytes += w.p.caches[i]->memory_bytes / 64;
    CHECK_INT(in_caches(&w), block_bytes);
    CHECK_OK(folio_pool_release(w.p.pool, 1, &blocks[63]));
    CHECK_INT(in_caches(&w), 0);
    gen_world_close(&w);
}

/* Whoever took copies would find their sources overwritten; the pool runs them itself. */
TEST(wipe, on_free_copies_are_not_taken)
{
    static gen_world w;
    folio_block_pair pair;
    int64_t n = -1;
    folio_sequence *fork = NULL;
    REQUIRE_TEST(open_world(&w, &several, FOLIO_WIPE_ON_FREE, 0));
    folio_sequence *s = gen_filled(&w, &w.r[0], 18);
    CHECK_OK(folio_sequence_fork(s, &fork));
    CHECK_OK(folio_sequence_reserve(fork, 1, 0, NULL));
    folio_sequence_destroy(s); /* the source is held by its copy alone */
    REFUSED(folio_pool_take_copies(w.p.pool, 0, 1, &pair, &n), FOLIO_ERR_ARGUMENT,
            "group 0|folio_pool_run_copies");
    CHECK_INT(gen_stats(&w.p).num_copies, 2);
    CHECK_OK(folio_pool_run_copies(w.p.pool, NULL));
    CHECK_OK(folio_sequence_truncate(fork, 18));
    CHECK(gen_contents_right(&w.p, fork, &w.r[0]));
    folio_sequence_destroy(fork);
    gen_world_close(&w);
}

/* A shorter payload does not leave the end of a longer one behind it. */
STORE_TEST(wipe, a_shorter_block_covers_a_longer_one, 2)
{
    CHECK_OK(srig_put(rig->store, 1, 1, CACHED, 0));
    CHECK_OK(srig_put(rig->store, 2, 1, CACHED, 0));
    CHECK_OK(srig_put(rig->store, 3, 0, CACHED, 0));
    CHECK_OK(srig_put(rig->store, 4, 2, CACHED, 0));
    int64_t size = 0;
    unsigned char *data = srig_read_file(rig->path, &size);
    CHECK(size > 8192 + SRIG_HEAD + 700);
    CHECK_INT(count_bytes(data + 4096 + SRIG_HEAD + 700, 4096 - SRIG_HEAD - 700, 0), 0);
    CHECK_INT(count_bytes(data + 8192 + SRIG_HEAD + 1, size - 8192 - SRIG_HEAD - 1, 0), 0);
    free(data);
    CHECK_INT(srig_get(rig->store, 3, 0, CACHED, 0), 1);
    CHECK_INT(srig_get(rig->store, 4, 2, CACHED, 0), 1);
}

/* A disk that fails: the error is told, and the next call does the rest. */
TEST(wipe, a_disk_that_fails)
{
    static store_rig rig;
    static srig_faults faults;
    srig_init(&rig, 6);
    folioi_file_ops ops = srig_faulty_ops(&faults);
    rig.desc.ops = &ops;
    REQUIRE_TEST(srig_open(&rig) == FOLIO_OK);
    for (uint64_t n = 0; n < 4; n++) CHECK_OK(srig_put(rig.store, n, 0, CACHED, 0));
    CHECK_OK(srig_put(rig.store, 9, 1, SEQUENCE, 0));
    CHECK_OK(folioi_store_forget(rig.store));
    faults.fail_write = faults.writes + 2;
    faults.write_errno = 5;
    REFUSED(folioi_store_wipe(rig.store), FOLIO_ERR_IO, "Input/output error");
    CHECK_INT(srig_stats(&rig).errors, 1);
    CHECK_OK(folioi_store_wipe(rig.store));
    int64_t size = 0, found = 0;
    unsigned char *data = srig_read_file(rig.path, &size);
    for (int64_t i = 1; i * 4096 < size; i++) found += count_bytes(data + i * 4096, 4096, 0) > 0;
    free(data);
    CHECK_INT(found, 1);
    CHECK_INT(srig_get(rig.store, 9, 1, SEQUENCE, 0), 1);
    CHECK_INT(folioi_store_available(rig.store), 5);
    for (uint64_t n = 10; n < 15; n++) CHECK_OK(srig_put(rig.store, n, 0, CACHED, 0));
    srig_end(&rig);
}

/* What a hook starts during a wipe, on another thread. */
typedef struct {
    folioi_store *store;
    void *(*run)(void *); /* run(this) */
    pthread_t thread;
    atomic_int done; /* steps of it */
    int steps;       /* that the hook waits for */
} beside;

static void start_beside(void *user)
{
    beside *b = user;
    CHECK(pthread_create(&b->thread, NULL, b->run, b) == 0);
    for (int i = 0; i < 1000 && atomic_load(&b->done) < b->steps; i++)
        nanosleep(&(struct timespec){0, 10000000}, NULL);
    CHECK_MSG(atomic_load(&b->done) >= b->steps, "the other thread waits for the wipe");
    nanosleep(&(struct timespec){0, 20000000}, NULL); /* its next step, if it need not wait */
}

static void *put_promised(void *user)
{
    beside *b = user;
    for (uint64_t n = 20; n < 23; n++, atomic_fetch_add(&b->done, 1))
        CHECK_OK(srig_put(b->store, n, 1, SEQUENCE, 0));
    return NULL;
}

static void *forget_again(void *user)
{
    beside *b = user;
    CHECK_OK(folioi_store_forget(b->store));
    atomic_fetch_add(&b->done, 1);
    return NULL;
}

static void open_faulty(store_rig *rig, srig_faults *faults, folioi_file_ops *ops, int64_t frames)
{
    srig_init(rig, frames);
    *ops = srig_faulty_ops(faults);
    rig->desc.ops = ops;
    CHECK_OK(srig_open(rig));
}

/* Frames that are promised are wiped too; a put that needs the one under the zeros waits for it. */
TEST(wipe, frames_under_promise)
{
    static store_rig rig;
    static srig_faults faults;
    folioi_file_ops ops;
    open_faulty(&rig, &faults, &ops, 3);
    beside other = {.store = rig.store, .run = put_promised, .steps = 2};
    for (uint64_t n = 0; n < 3; n++) CHECK_OK(srig_put(rig.store, n, 0, CACHED, 0));
    CHECK_OK(folioi_store_forget(rig.store));
    CHECK(folioi_store_promise(rig.store, 3));
    faults.hook = start_beside;
    faults.hook_user = &other;
    faults.hook_write = faults.writes + 1;
    CHECK_OK(folioi_store_wipe(rig.store));
    REQUIRE_TEST(faults.hook_write == 0); /* it wiped one */
    pthread_join(other.thread, NULL);
    for (uint64_t n = 20; n < 23; n++) CHECK_INT(srig_get(rig.store, n, 1, SEQUENCE, 0), 1);
    CHECK_INT(folioi_store_available(rig.store), 0);
    srig_end(&rig);
}

/* Others forget while the bytes past a smaller size are overwritten, which takes as long as they are many. */
TEST(wipe, nobody_waits_for_the_tail)
{
    static store_rig rig;
    static srig_faults faults;
    folioi_file_ops ops;
    open_faulty(&rig, &faults, &ops, 3);
    for (uint64_t n = 0; n < 3; n++) CHECK_OK(srig_put(rig.store, n, 0, CACHED, 0));
    CHECK_OK(folioi_store_forget(rig.store));
    srig_frames(&rig, 2);
    srig_reopen(&rig);
    beside other = {.store = rig.store, .run = forget_again, .steps = 1};
    faults.hook = start_beside;
    faults.hook_user = &other;
    faults.hook_write = faults.writes + 3;
    CHECK_OK(folioi_store_wipe(rig.store));
    REQUIRE_TEST(faults.hook_write == 0);
    pthread_join(other.thread, NULL);
    srig_end(&rig);
}

/* A forget of a salt that is cut short in its middle, as by a kill: an open finds none of its frames, all of the others. */
TEST(wipe, heads_of_a_salt_go_first)
{
    enum { BYTES = 96 * 1024, FRAMES = 12 }; /* two writes of zeros a frame */
    static store_rig rig;
    static srig_faults faults;
    static unsigned char payload[BYTES];
    folioi_file_ops ops = srig_faulty_ops(&faults);
    srig_init(&rig, 0);
    rig.geometry[0].payload_bytes = BYTES;
    rig.desc.max_bytes = (FRAMES + 1) * (int64_t)(BYTES + 4096);
    rig.desc.ops = &ops;
    REQUIRE_TEST(srig_open(&rig) == FOLIO_OK);
    for (uint64_t n = 0; n < FRAMES; n++) {
        folioi_frame_id id = {
            .key = {{n, ~n}}, .salt = n % 3, .kind = CACHED, .ids = &n, .ids_bytes = 8};
        CHECK_OK(folioi_store_put(rig.store, &id, payload, BYTES));
    }
    folioi_store_forget_salt(rig.store, 1);
    CHECK_INT(folioi_store_available(rig.store), FRAMES);
    faults.fail_write = faults.writes + FRAMES / 3 + 1;
    faults.write_errno = 5;
    faults.from_then_on = true;
    REFUSED(folioi_store_wipe(rig.store), FOLIO_ERR_IO, "Input/output error");
    srig_close(&rig);
    faults = (srig_faults){.fail_write = 0};
    CHECK_OK(srig_open(&rig));
    CHECK_INT(srig_stats(&rig).used, FRAMES * 2 / 3);
    CHECK_INT(srig_stats(&rig).warnings, 0);
    srig_end(&rig);
}

/* A pool that has not got all its memory has nothing to overwrite. */
TEST(wipe, on_free_memory_that_runs_out)
{
    int64_t n = 1;
    for (bool failed = true; failed && test_failures() == 0; n++) {
        support_counter counter = {0};
        folio_allocator allocator = support_allocator(&counter);
        folio_context *ctx = support_context("reference", 1, &allocator);
        folio_kv_cache_desc kv =
            FOLIO_WITH(folio_kv_cache_desc, .num_blocks = 8, .num_layers = 1, .block_size = 4,
                       .num_kv_heads = 1, .k_head_size = 8, .dtype = FOLIO_F32);
        folio_layer_group group = {.window = 0};
        CHECK_OK(folio_kv_cache_create(ctx, &kv, &group.cache));
        folio_pool_desc desc = FOLIO_WITH(folio_pool_desc, .layer_groups = &group, .host_blocks = 4,
                                          .wipe = FOLIO_WIPE_ON_FREE);
        folio_pool *pool = NULL;
        counter.fail_at = counter.calls + n;
        folio_status status = folio_pool_create(ctx, &desc, &pool);
        failed = counter.calls >= counter.fail_at;
        CHECK_INT(status, failed ? FOLIO_ERR_MEMORY : FOLIO_OK);
        folio_pool_destroy(pool);
        folio_kv_cache_destroy(group.cache);
        folio_context_destroy(ctx);
        CHECK_INT(counter.live, 0);
    }
    CHECK(n > 5);
}

TEST(wipe, a_policy_that_is_unknown)
{
    folio_context *ctx = support_context("reference", 1, NULL);
    folio_pool *pool = NOWHERE;
    folio_pool_desc desc = FOLIO_WITH(folio_pool_desc, .num_blocks = 4, .block_size = 4);
    desc.wipe = (folio_wipe)4;
    REFUSED(folio_pool_create(ctx, &desc, &pool), FOLIO_ERR_ARGUMENT, "wipe|4");
    CHECK(pool == NULL);
    folio_context_destroy(ctx);
}
