/*
 * test_store_key.c: a store with a key: what somebody who can read and write the file, and has this library, cannot do
 * without the key. What he can: damage frames, which are misses, and put older ones of the same file back.
 */
#include "cache/pool.h"
#include "core/hash.h"
#include "core/keyed_hash.h"
#include "pool/generation_rig.h"
#include "pool/store_rig.h"

#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

static const unsigned char key_bytes[64] = {
    0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21,
    22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43,
    44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63};
static const folioi_bytes key = {key_bytes, 32}, other_key = {key_bytes + 1, 32};

/* Hashes that Python's hashlib.blake2b gives. */
TEST(store_key, the_hash_is_blake2b)
{
    static const char *const expected[] = {
        "2fa9fbd9be36437de204e139e97d402bce68c828f43391608c891b5faed8a98a",
        "addc17c2281d2013f38522fd8d96d3e0ed6bea3f5785729b500f4ba444321185"};
    unsigned char text[300], out[32];
    for (int i = 0; i < 300; i++) text[i] = (unsigned char)i;
    for (int c = 0; c < 2; c++) {
        const folioi_bytes k = {key_bytes, c == 0 ? 64 : 16};
        const folioi_bytes pieces[] = {{text, c * 7}, {text + 7, 0}, {text + 7, c * 293}};
        char hex[65] = "";
        folioi_keyed_hash(k, pieces, 3, out);
        for (int i = 0; i < 32; i++) snprintf(hex + 2 * i, 3, "%02x", out[i]);
        CHECK_MSG(strcmp(hex, expected[c]) == 0, "case %d: %s", c, hex);
    }
}

/* ------------------------------------------------------------------------------ what is left behind */

enum { STACK_BYTES = 1 << 20 };

typedef struct {
    gen_world w;
    folio_pool_desc desc;
    unsigned char digest_secret[64]; /* its beginning, while the pool lives */
} left_behind;

static bool holds(const unsigned char *memory, size_t bytes, const void *secret, size_t n)
{
    for (size_t i = 0; i + n <= bytes; i++)
        if (memcmp(memory + i, secret, n) == 0) return true;
    return false;
}

static void *plain_alloc(void *user, size_t size, size_t align)
{
    (void)user;
    return aligned_alloc(align > 64 ? align : 64, (size + 63) / 64 * 64);
}

/* Memory that still has the pool's secrets when it is freed. */
static void looking_free(void *user, void *memory, size_t size)
{
    left_behind *l = user;
    if (memory != NULL && l->digest_secret[0] != 0)
        CHECK(!holds(memory, size, l->digest_secret, sizeof l->digest_secret));
    free(memory);
}

static void *open_and_close(void *arg)
{
    left_behind *l = arg;
    CHECK(gen_pool_open(&l->w.p, &l->w.m, &l->desc, NULL));
    memcpy(l->digest_secret, l->w.p.pool->index.digest_secret, sizeof l->digest_secret);
    gen_pool_close(&l->w.p);
    return NULL;
}

/* The keys of digests and seals: neither on the stack of the thread that made the pool, nor in memory that it freed. */
TEST(store_key, no_key_is_left_behind)
{
    static left_behind l;
    static const gen_geometry g = {
        .backend = "cpu", .block_size = 4, .kv_dtype = FOLIO_F32, .num_layer_groups = 1};
    const folio_allocator looking = {plain_alloc, looking_free, &l};
    REQUIRE_TEST(gen_world_model(&l.w, &g, &looking));
    l.desc = gen_world_desc(&l.w, 16, 0, 6);
    l.desc.store_key = key.data, l.desc.store_key_bytes = (int32_t)key.size;
    unsigned char *stack = aligned_alloc(4096, STACK_BYTES);
    memset(stack, 0, STACK_BYTES);
    pthread_attr_t attr;
    pthread_t thread;
    pthread_attr_init(&attr);
    REQUIRE_TEST(pthread_attr_setstack(&attr, stack, STACK_BYTES) == 0);
    REQUIRE_TEST(pthread_create(&thread, &attr, open_and_close, &l) == 0);
    pthread_join(thread, NULL);
    pthread_attr_destroy(&attr);
    int64_t size = 0;
    unsigned char *file = srig_read_file(l.w.store, &size), seals[32], digests[32];
    const unsigned char *secret = file + SRIG_HASH_KEY + 8, kind[1] = {FOLIOI_SEALED_SECRET};
    folioi_keyed_hash(key, (folioi_bytes[]){{file, 8}, {secret, 16}}, 2, seals);
    folioi_keyed_hash((folioi_bytes){seals, 32}, (folioi_bytes[]){{kind, 1}, {secret, 16}}, 2,
                      digests);
    CHECK(!holds(stack, STACK_BYTES, key.data, key.size));
    CHECK(!holds(stack, STACK_BYTES, seals, 32));
    CHECK(!holds(stack, STACK_BYTES, digests, 16));
    CHECK(!holds(stack, STACK_BYTES, l.digest_secret, sizeof l.digest_secret));
    free(file);
    free(stack);
    gen_world_close(&l.w);
}

/* -------------------------------------------------------------------------------- forged frames */

enum { FORGED = 36 };

static void set_sum(unsigned char *at, uint64_t sum)
{
    memset(at, 0, 32);
    for (int i = 0; i < 8; i++) at[i] = (unsigned char)(sum >> 8 * i);
}

/* The superblock as that of a store without a key, with all its numbers. */
static void take_key_away(unsigned char *file)
{
    uint64_t hash_key;
    memcpy(&hash_key, file + SRIG_HASH_KEY, 8);
    file[SRIG_KEYED] = 0;
    set_sum(file + SRIG_SEAL, XXH3_64bits(file, SRIG_SEAL));
    set_sum(file + SRIG_EPOCH_SEAL, XXH3_64bits_withSeed(file + SRIG_EPOCH, 8, hash_key));
}

/* A number of K of the sequence's first token. */
static float some_k(gen_world *w, const folio_sequence *s)
{
    float k[64] = {0};
    int64_t n = 0, slot;
    const int32_t *table = NULL;
    CHECK_OK(folio_sequence_get_table(s, 0, &table, &n));
    slot = table[0];
    folio_kv_gather gather =
        FOLIO_WITH(folio_kv_gather, .k = {.data = k, .dtype = FOLIO_F32, .tokens = 1},
                   .slots = &slot, .num_slots = 1);
    CHECK_OK(folio_kv_cache_gather(w->p.caches[0], 0, &gather, NULL));
    return k[5];
}

/* A copy of the file gets frames of the request's prompt, with K that was changed; the frames go into the file. */
static float forge(gen_world *w)
{
    char path[280];
    int64_t size = 0, forged_size = 0;
    snprintf(path, sizeof path, "%s.copy", w->store);
    unsigned char *file = srig_read_file(w->store, &size);
    if (file[SRIG_KEYED] != 0) take_key_away(file);
    srig_write_file(path, file, 4096);
    folio_pool_desc desc = gen_world_desc(w, 64, 0, 60);
    desc.store_path = path;
    CHECK(gen_pool_open(&w->p, &w->m, &desc, NULL));
    folio_sequence *s = gen_filled(w, &w->r[0], FORGED);
    float right = some_k(w, s), forged_k;
    int64_t n = 0;
    const int32_t *table = NULL;
    CHECK_OK(folio_sequence_get_table(s, 0, &table, &n));
    for (int64_t i = 0; i < n; i++) gen_nudge(&w->p, 0, table[i]);
    forged_k = some_k(w, s);
    CHECK(forged_k != right);
    folio_sequence_destroy(s);
    CHECK_INT(gen_lower(w, FOLIO_TIER_DISK, 60), FORGED);
    gen_pool_close(&w->p);
    unsigned char *forged = srig_read_file(path, &forged_size);
    free(file);
    file = srig_read_file(w->store, &size);
    memcpy(forged, file, 4096);
    srig_write_file(w->store, forged, forged_size);
    free(forged);
    free(file);
    unlink(path);
    return forged_k;
}

/* How many of 36 tokens, each a block, a pool finds in a file with 36 forged frames; *wrong: with the forged K. */
static int64_t attack(bool keyed, int64_t *warnings, bool *wrong)
{
    static gen_world w;
    static const gen_geometry g = {
        .backend = "cpu", .block_size = 1, .kv_dtype = FOLIO_F32, .num_layer_groups = 1};
    if (!gen_world_model(&w, &g, NULL)) return -1;
    folio_pool_desc desc = gen_world_desc(&w, 64, 0, 60);
    if (keyed) desc.store_key = key.data, desc.store_key_bytes = (int32_t)key.size;
    CHECK(gen_pool_open(&w.p, &w.m, &desc, NULL));
    gen_pool_close(&w.p);
    float forged_k = forge(&w);
    CHECK(gen_pool_open(&w.p, &w.m, &desc, NULL));
    *warnings = gen_stats(&w.p).store_warnings;
    folio_sequence *s = gen_sequence(&w, &w.r[0]);
    int64_t matched = gen_match(&w, s, &w.r[0], FORGED);
    *wrong = matched > 0 && some_k(&w, s) == forged_k;
    folio_sequence_destroy(s);
    gen_world_close(&w);
    return matched;
}

/* Without a key the attack works, which is what the header says: the test of the test. */
static int64_t len_of(const folio_sequence *s)
{
    folio_sequence_info info = {.struct_size = sizeof info};
    CHECK_OK(folio_sequence_get_info(s, &info));
    return info.len;
}

/* A sequence that was swapped out in an earlier run: its frame, put where another's lies, is not that one's. */
TEST(store_key, frames_of_earlier_runs_are_not_swapped_in)
{
    static gen_world w;
    static const gen_geometry g = {
        .backend = "cpu", .block_size = 16, .kv_dtype = FOLIO_F32, .num_layer_groups = 1};
    REQUIRE_TEST(gen_world_model(&w, &g, NULL));
    folio_pool_desc desc = gen_world_desc(&w, 64, 0, 60);
    desc.store_key = key.data, desc.store_key_bytes = (int32_t)key.size;
    unsigned char *file[3] = {NULL};
    int64_t size[3] = {0};
    /* The file as it was made; with A's frames; with B's, and then A's. The prefix cache has no block. */
    for (int run = 0; run < 3; run++) {
        if (run == 2) srig_write_file(w.store, file[0], size[0]);
        REQUIRE_TEST(gen_pool_open(&w.p, &w.m, &desc, NULL));
        folio_sequence *s = run > 0 ? gen_filled(&w, &w.r[run], 8) : NULL;
        if (s != NULL) CHECK_OK(folio_sequence_swap_out(s, FOLIO_TIER_DISK, NULL, NULL));
        if (run == 2) {
            CHECK_OK(folio_pool_forget(w.p.pool));
            srig_write_file(w.store, file[1], size[1]);
            CHECK_OK(folio_sequence_swap_in(s, NULL, NULL));
            CHECK_INT(len_of(s), 0); /* its frames are lost, and nothing came in their place */
        }
        file[run] = srig_read_file(w.store, &size[run]);
        folio_sequence_destroy(s);
        if (run < 2) gen_pool_close(&w.p);
    }
    for (int run = 0; run < 3; run++) free(file[run]);
    gen_world_close(&w);
}

TEST(store_key, forged_frames_are_refused)
{
    int64_t warnings = -1;
    bool wrong = false;
    CHECK_INT(attack(false, &warnings, &wrong), FORGED);
    CHECK_INT(warnings, 0);
    CHECK(wrong);
    CHECK_INT(attack(true, &warnings, &wrong), 0);
    CHECK_INT(warnings, FORGED);
}

/* ------------------------------------------------------------------------------------ the file */

static void make_store(store_rig *rig, folioi_bytes k, uint64_t first, uint64_t n)
{
    rig->desc.key = k;
    REQUIRE_TEST(srig_open(rig) == FOLIO_OK);
    for (uint64_t i = first; i < first + n; i++) CHECK_OK(PUT(i));
    srig_close(rig);
}

static void check_refused(store_rig *rig, folioi_bytes k, const char *words)
{
    rig->desc.key = k;
    REFUSED(srig_open(rig), FOLIO_ERR_ARGUMENT, words);
    CHECK(rig->store == NULL);
}

NEW_STORE_TEST(store_key, a_file_has_the_key_it_was_made_with, 4)
{
    make_store(rig, key, 0, 3);
    check_refused(rig, (folioi_bytes){NULL, 0}, "with a store key|none");
    check_refused(rig, other_key, "another store key");
    check_refused(rig, (folioi_bytes){key_bytes, 31}, "another store key");
    check_refused(rig, (folioi_bytes){key_bytes, 15}, "15 bytes|16");
    check_refused(rig, (folioi_bytes){key_bytes, 65}, "65 bytes|64");
    check_refused(rig, (folioi_bytes){NULL, 32}, "32 bytes|NULL");
    rig->desc.key = key;
    REQUIRE_TEST(srig_open(rig) == FOLIO_OK);
    CHECK_INT(srig_stats(rig).used, 3);
    for (uint64_t i = 0; i < 3; i++) CHECK_INT(GET(i), 1);
    CHECK_OK(folioi_store_forget(rig->store));
    srig_reopen(rig);
    CHECK_INT(srig_stats(rig).used, 0);
    CHECK_INT(srig_stats(rig).warnings, 0);
    srig_close(rig);
    unlink(rig->path);
    make_store(rig, (folioi_bytes){NULL, 0}, 0, 3);
    check_refused(rig, key, "without a store key|one");
}

/* Every byte of the file that somebody changes: refused, or a miss. */
NEW_STORE_TEST(store_key, a_changed_byte_is_found, 4)
{
    make_store(rig, key, 0, 2);
    int64_t size = 0;
    unsigned char *file = srig_read_file(rig->path, &size);
    for (int64_t at = 0; at < size; at += at < 4096 ? 7 : 3) {
        if (at >= SRIG_UNUSED && at < SRIG_EPOCH_SEAL) continue; /* not used */
        if (at >= 4096 + SRIG_HEAD + 700 && at < 8192) continue;
        file[at] ^= 1;
        srig_write_file(rig->path, file, size);
        file[at] ^= 1;
        folio_status status = srig_open(rig);
        if (at < SRIG_UNUSED) {
            CHECK_MSG(status == FOLIO_ERR_ARGUMENT, "byte %d", (int)at);
        } else {
            REQUIRE_TEST(status == FOLIO_OK);
            CHECK_MSG(GET(0) + GET(1) == (at >= 4096), "byte %d", (int)at);
            CHECK_INT(srig_stats(rig).warnings, 1);
        }
        srig_close(rig);
    }
    free(file);
}

/* Whole frames under the right key, elsewhere: in another place, and in another file. */
NEW_STORE_TEST(store_key, frames_are_where_they_were_written, 4)
{
    make_store(rig, key, 0, 3);
    int64_t size = 0, other_size = 0;
    unsigned char *file = srig_read_file(rig->path, &size);
    unlink(rig->path);
    make_store(rig, key, 0, 3);
    unsigned char *other = srig_read_file(rig->path, &other_size);
    memcpy(other + 4096, file + 4096, 4096); /* of another file with the same key */
    memcpy(other + 2 * 4096, other + 3 * 4096, SRIG_HEAD + 700); /* of another place */
    srig_write_file(rig->path, other, other_size);
    REQUIRE_TEST(srig_open(rig) == FOLIO_OK);
    CHECK_INT(srig_stats(rig).warnings, 2);
    CHECK(GET(0) == 0 && GET(1) == 0 && GET(2) == 1);
    free(file);
    free(other);
}

/* K and V that a caller chose are sealed too. That seal is none of an epoch of the same eight bytes. */
NEW_STORE_TEST(store_key, a_seal_of_a_payload_is_none_of_an_epoch, 4)
{
    static const unsigned char epoch[] = "an epoch";
    srig_block b;
    int64_t size = 0;
    make_store(rig, key, 1, 1);
    srig_block_make(&b, 0, 0, CACHED, 0);
    REQUIRE_TEST(srig_open(rig) == FOLIO_OK);
    CHECK_OK(folioi_store_put(rig->store, &b.id, epoch, 8));
    srig_close(rig);
    unsigned char *file = srig_read_file(rig->path, &size);
    memcpy(file + SRIG_EPOCH_SEAL, file + 2 * 4096 + 192, 32);
    memcpy(file + SRIG_EPOCH, epoch, 8);
    srig_write_file(rig->path, file, size);
    REQUIRE_TEST(srig_open(rig) == FOLIO_OK);
    CHECK_INT(srig_stats(rig).used, 0);
    CHECK_INT(srig_stats(rig).warnings, 1);
    free(file);
}

/* What the key does not find, as the header says: an older frame of the same file and epoch. */
NEW_STORE_TEST(store_key, an_older_frame_that_is_put_back_is_read, 2)
{
    make_store(rig, key, 0, 2);
    int64_t size = 0;
    unsigned char *before = srig_read_file(rig->path, &size);
    make_store(rig, key, 2, 2);
    srig_write_file(rig->path, before, size);
    REQUIRE_TEST(srig_open(rig) == FOLIO_OK);
    CHECK(GET(0) == 1 && GET(1) == 1);
    free(before);
}

TEST(store_key, keys_of_a_pool)
{
    folio_context *ctx = support_context("reference", 1, NULL);
    folio_pool *pool = NOWHERE;
    folio_pool_desc desc = FOLIO_WITH(folio_pool_desc, .num_blocks = 4, .block_size = 4);
    desc.store_key = key_bytes;
    REFUSED(folio_pool_create(ctx, &desc, &pool), FOLIO_ERR_ARGUMENT, "store_key|0");
    desc.store_key_bytes = 15;
    REFUSED(folio_pool_create(ctx, &desc, &pool), FOLIO_ERR_ARGUMENT, "store_key_bytes|15|16");
    desc.store_key_bytes = 65;
    REFUSED(folio_pool_create(ctx, &desc, &pool), FOLIO_ERR_ARGUMENT, "store_key_bytes|65|64");
    desc.store_key = NULL;
    desc.store_key_bytes = 32;
    REFUSED(folio_pool_create(ctx, &desc, &pool), FOLIO_ERR_ARGUMENT, "store_key is NULL|32");
    CHECK(pool == NULL);
    folio_context_destroy(ctx);
}
