/*
 * test_store.c: the disk tier as its users see it: which blocks are the same, what is replaced and in which order,
 * over an open too; what is refused, with the file left as it is; the format. That what is put is found, dropped and
 * forgotten, in all groups and kinds: the model of test_store_walk.c; files and calls that fail: test_store_faults.c.
 */
#include "pool/store_rig.h"

#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---------------------------------------------------------------------------------- put and get */

STORE_TEST(store, payloads_may_be_shorter_than_their_group_has, 8)
{
    const int64_t lengths[] = {0, 1, 699, 700};
    srig_block b;
    unsigned char got[701];
    bool found;
    for (int i = 0; i < COUNT_OF(lengths); i++) {
        srig_block_make(&b, (uint64_t)i, 0, CACHED, 0);
        CHECK_OK(folioi_store_put(rig->store, &b.id, b.payload, lengths[i]));
    }
    for (int open = 0; open < 2; open++, srig_reopen(rig)) {
        for (int i = 0; i < COUNT_OF(lengths); i++) {
            srig_block_make(&b, (uint64_t)i, 0, CACHED, 0);
            memset(got, 0xA5, sizeof got);
            CHECK_OK(folioi_store_get(rig->store, &b.id, got, lengths[i], &found));
            CHECK(found && memcmp(got, b.payload, (size_t)lengths[i]) == 0);
            CHECK(got[lengths[i]] == 0xA5);
            CHECK_OK(folioi_store_get(rig->store, &b.id, got, lengths[i] + 1, &found));
            CHECK(!found);
        }
    }
    CHECK_INT(srig_stats(rig).used, 4);
}

/* Each part of an id but its name, changed: a miss, after an open too, and the frame stays. */
STORE_TEST(store, another_parent_salt_or_id_is_a_miss, 4)
{
    CHECK_OK(PUT(1));
    for (int open = 0; open < 2; open++, srig_reopen(rig)) {
        for (int part = 0; part < 8; part++) {
            srig_block b;
            unsigned char got[SRIG_MAX_PAYLOAD];
            bool found = true;
            srig_block_make(&b, 1, 0, CACHED, 0);
            if (part == 0) b.id.parent.word[0] ^= 1;
            if (part == 1) b.id.parent.word[1] ^= (uint64_t)1 << 63;
            if (part == 2) b.id.salt++;
            if (part == 3) b.ids[0] ^= 1;
            if (part == 4) b.ids[SRIG_IDS - 1] ^= 1 << 30;
            if (part == 5) b.id.ids_bytes -= 4;
            if (part == 6) b.id.hashed = true;
            if (part == 7) b.id.ids = NULL;
            CHECK_OK(folioi_store_get(rig->store, &b.id, got, b.bytes, &found));
            CHECK_MSG(!found, "part %d", part);
            CHECK_INT(folioi_store_has(rig->store, &b.id), part >= 3);
        }
        CHECK_INT(srig_stats(rig).warnings, 0);
        CHECK_INT(GET(1), 1);
    }
}

STORE_TEST(store, a_put_is_checked, 4)
{
    for (int part = 0; part < 8; part++) {
        static const char *const words[] = {"kind is 3", "group is -1", "group is 3", "68 bytes",
                                            "-4 bytes",  "are NULL",    "701 bytes",  "-1 bytes"};
        srig_block b;
        srig_block_make(&b, 1, 0, CACHED, 0);
        if (part == 0) b.id.kind = (folioi_frame_kind)3;
        if (part == 1) b.id.group = -1;
        if (part == 2) b.id.group = SRIG_GROUPS;
        if (part == 3) b.id.ids_bytes = SRIG_IDS * 4 + 4;
        if (part == 4) b.id.ids_bytes = -4;
        if (part == 5) b.id.ids = NULL;
        if (part == 6) b.bytes++;
        if (part == 7) b.bytes = -1;
        REFUSED(folioi_store_put(rig->store, &b.id, b.payload, b.bytes), FOLIO_ERR_ARGUMENT,
                words[part]);
    }
    CHECK_INT(srig_stats(rig).used, 0);
}

/* ------------------------------------------------------------------------------------ replacing */

typedef struct {
    folioi_store *store;
    folioi_frame_id ids[64];
    int count;
} replaced_log;

/* Calls the store: it would hang here if the lock were held. */
static void log_replaced(void *user, const folioi_frame_id *id)
{
    replaced_log *log = user;
    CHECK(!folioi_store_has(log->store, id));
    CHECK(id->ids == NULL);
    if (log->count < COUNT_OF(log->ids)) log->ids[log->count++] = *id;
}

static bool is_block(const folioi_frame_id *id, uint64_t n, int32_t group)
{
    srig_block b;
    srig_block_make(&b, n, group, CACHED, 0);
    return key_equal(id->key, b.id.key) && key_equal(id->parent, b.id.parent) &&
           id->salt == b.id.salt && id->group == group && id->kind == CACHED &&
           id->hashed == b.id.hashed;
}

STORE_TEST(store, the_least_recently_used_is_replaced, 4)
{
    replaced_log log = {.store = rig->store};
    folioi_store_on_replaced(rig->store, log_replaced, &log);
    for (uint64_t n = 0; n < 4; n++) CHECK_OK(PUT(n));
    CHECK_INT(log.count, 0);
    CHECK_INT(GET(0), 1);                      /* 1 2 3 0 */
    CHECK_OK(PUT(1));                          /* there already: 2 3 0 1 */
    CHECK(srig_has(rig->store, 2, 0, CACHED)); /* no use */
    CHECK_OK(
        srig_put(rig->store, 3, 0, CACHED, 1)); /* equal by its id, whatever the payload: 2 0 1 3 */
    CHECK_INT(srig_stats(rig).writes, 4);
    for (uint64_t n = 4; n < 8; n++) CHECK_OK(PUT(n));
    static const uint64_t order[] = {2, 0, 1, 3};
    REQUIRE_TEST(log.count == 4);
    for (int i = 0; i < 4; i++) CHECK_MSG(is_block(&log.ids[i], order[i], 0), "the %dth", i);
    for (uint64_t n = 0; n < 8; n++) CHECK_INT(GET(n), n >= 4);
    CHECK_INT(srig_stats(rig).evictions, 4);
    CHECK_INT(srig_stats(rig).used, 4);
}

/* The order of the puts, not of the places in the file, and stamps go on where they ended. */
STORE_TEST(store, order_survives_an_open, 5)
{
    for (uint64_t n = 0; n < 8; n++) CHECK_OK(PUT(n)); /* in the file: 5 6 7 3 4 */
    srig_reopen(rig);
    CHECK_OK(PUT(8)); /* for 3 */
    srig_reopen(rig);
    replaced_log log = {.store = rig->store};
    folioi_store_on_replaced(rig->store, log_replaced, &log);
    for (uint64_t n = 10; n < 15; n++) CHECK_OK(PUT(n));
    REQUIRE_TEST(log.count == 5);
    for (int i = 0; i < 5; i++) CHECK_MSG(is_block(&log.ids[i], 4 + (uint64_t)i, 0), "the %dth", i);
}

/* Two blocks of one key: the later one has the name, also after an open. */
STORE_TEST(store, a_cached_name_with_another_block_is_replaced, 2)
{
    srig_block first, second;
    unsigned char got[SRIG_MAX_PAYLOAD];
    bool found;
    srig_block_make(&first, 1, 0, CACHED, 0);
    srig_block_make(&second, 1, 0, CACHED, 1);
    second.ids[3]++;
    CHECK_OK(folioi_store_put(rig->store, &first.id, first.payload, first.bytes));
    CHECK_OK(folioi_store_put(rig->store, &second.id, second.payload, second.bytes));
    CHECK_INT(srig_stats(rig).used, 1);
    for (int open = 0; open < 2; open++, srig_reopen(rig)) {
        CHECK_OK(folioi_store_get(rig->store, &first.id, got, first.bytes, &found));
        CHECK(!found);
        CHECK_OK(folioi_store_get(rig->store, &second.id, got, second.bytes, &found));
        CHECK(found && memcmp(got, second.payload, (size_t)second.bytes) == 0);
    }
    /* The old one is not taken to make room for the new one. */
    CHECK_OK(srig_put(rig->store, 2, 0, SEQUENCE, 0));
    REFUSED(folioi_store_put(rig->store, &first.id, first.payload, first.bytes), FOLIO_ERR_FULL,
            "all of its 2 frames");
    CHECK_OK(folioi_store_get(rig->store, &second.id, got, second.bytes, &found));
    CHECK(found);
    /* And no trace of the first is left for a later open. */
    folioi_store_drop(rig->store, &second.id);
    srig_reopen(rig);
    CHECK_INT(srig_stats(rig).used, 0);
}

/* --------------------------------------------------------------------------- open, forget, drop */

static void log_each(void *user, const folioi_frame_id *id)
{
    replaced_log *log = user;
    CHECK(id->ids == NULL);
    if (log->count < COUNT_OF(log->ids)) log->ids[log->count++] = *id;
}

STORE_TEST(store, each_lists_what_is_cached, 8)
{
    for (uint64_t n = 0; n < 9; n++) /* 0 is replaced */
        CHECK_OK(srig_put(rig->store, n, (int32_t)(n % 3), n == 4 ? SEQUENCE : CACHED, 0));
    srig_block b;
    srig_block_make(&b, 7, 1, CACHED, 0);
    folioi_store_drop(rig->store, &b.id);
    for (int open = 0; open < 2; open++, srig_reopen(rig)) {
        replaced_log log = {.store = rig->store};
        folioi_store_each(rig->store, log_each, &log);
        CHECK_INT(log.count, 6);
        for (uint64_t n = 0; n < 9; n++) {
            int times = 0;
            for (int i = 0; i < log.count; i++) times += is_block(&log.ids[i], n, (int32_t)(n % 3));
            CHECK_INT(times, n != 0 && n != 4 && n != 7);
        }
    }
}

/* What lies past a smaller store's end is not used, is back with a larger one, can be forgotten. */
STORE_TEST(store, the_size_may_change, 10)
{
    for (uint64_t n = 0; n < 10; n++) CHECK_OK(PUT(n));
    srig_close(rig);
    srig_frames(rig, 4);
    CHECK_OK(srig_open(rig));
    CHECK_INT(srig_stats(rig).num_frames, 4);
    for (uint64_t n = 0; n < 10; n++) CHECK_INT(GET(n), n < 4);
    CHECK_OK(PUT(9)); /* a second frame of a block past the end; for 0 */
    srig_close(rig);
    struct stat st;
    CHECK(stat(rig->path, &st) == 0 && st.st_size > 10 * 4096);
    srig_frames(rig, 12);
    CHECK_OK(srig_open(rig));
    CHECK_INT(srig_stats(rig).used, 9);
    for (uint64_t n = 0; n < 10; n++) CHECK_INT(GET(n), n > 0);
    for (uint64_t n = 10; n < 13; n++) CHECK_OK(PUT(n)); /* all twelve are in use now */
    CHECK_INT(srig_stats(rig).evictions, 0);
    CHECK_INT(srig_stats(rig).used, 12);
    srig_close(rig);
    srig_frames(rig, 2);
    CHECK_OK(srig_open(rig));
    CHECK_OK(folioi_store_forget(rig->store));
    CHECK_OK(PUT(20));
    srig_close(rig);
    srig_frames(rig, 12);
    CHECK_OK(srig_open(rig));
    CHECK_INT(srig_stats(rig).used, 1);
    CHECK_INT(GET(20), 1);
    CHECK_INT(srig_stats(rig).warnings, 0);
}

/* ------------------------------------------------------------------------------------- refusals */

/* The open is refused with these words, and leaves the file as it is. */
static void check_refused(store_rig *rig, const folioi_store_desc *desc, const char *words)
{
    int64_t before_size, after_size;
    unsigned char *before = srig_read_file(rig->path, &before_size);
    folioi_store *store = NOWHERE;
    REFUSED(folioi_store_open(&rig->allocator, desc, &store), FOLIO_ERR_ARGUMENT, words);
    CHECK(store == NULL);
    unsigned char *after = srig_read_file(rig->path, &after_size);
    CHECK(before_size == after_size && memcmp(before, after, (size_t)before_size) == 0);
    free(before);
    free(after);
}

STORE_TEST(store, another_model_or_geometry_is_refused, 4)
{
    CHECK_OK(PUT(1));
    uint64_t key = folioi_store_hash_key(rig->store);
    srig_close(rig);
    folioi_store_desc d = rig->desc;
    folio_kv_passport other = FOLIO_WITH(folio_kv_passport, .model = "another");
    d.passport = &other;
    check_refused(rig, &d, "store|model is \"a model\" there and \"another\" here");
    other.model = NULL;
    check_refused(rig, &d, "model is \"a model\" there and \"\" here");
    d.passport = NULL;
    check_refused(rig, &d, "model is \"a model\" there and \"\" here");
    const folio_rotary_desc rotary =
        FOLIO_WITH(folio_rotary_desc, .num_dims = 8, .num_positions = 1);
    const float scale = 0.5f;
    other = FOLIO_WITH(folio_kv_passport, .model = "a model", .rotary = &rotary);
    d.passport = &other;
    check_refused(rig, &d, "rotary is none there and given here");
    other = FOLIO_WITH(folio_kv_passport, .model = "a model", .v_scales = &scale, .num_scales = 1);
    check_refused(rig, &d, "v_scales are 0 numbers there and 1 here");
    d = rig->desc;
    d.num_layer_groups = 2;
    check_refused(rig, &d, "made for 3 groups, here there are 2");
    d = rig->desc;
    d.ids_bytes = 60;
    check_refused(rig, &d, "made with 64 bytes for a block's ids, here there are 60");
    d = rig->desc;
    d.hash_key = key ^ 1;
    check_refused(rig, &d, "another hash key");
    const folioi_frame_geometry was = rig->geometry[1];
    folioi_frame_geometry *g = &rig->geometry[1];
    g->num_layers = 9;
    check_refused(rig, &rig->desc, "group 1|num_layers is 3 there and 9 here");
    *g = was, g->block_size = 9;
    check_refused(rig, &rig->desc, "group 1|block_size is 16 there and 9 here");
    *g = was, g->num_kv_heads = 9;
    check_refused(rig, &rig->desc, "group 1|num_kv_heads is 4 there and 9 here");
    *g = was, g->k_head_size = 9;
    check_refused(rig, &rig->desc, "group 1|k_head_size is 64 there and 9 here");
    *g = was, g->v_head_size = 9;
    check_refused(rig, &rig->desc, "group 1|v_head_size is 32 there and 9 here");
    *g = was, g->v_in_k = 1;
    check_refused(rig, &rig->desc, "group 1|v_in_k is 0 there and 1 here");
    *g = was, g->dtype = 9;
    check_refused(rig, &rig->desc, "group 1|dtype is 1 (f32) there and 9 (unknown) here");
    *g = was, g->layout_version = 9;
    check_refused(rig, &rig->desc, "group 1|layout_version is 1 there and 9 here");
    *g = was, strcpy(g->layout_id, "rows of twenty-three ch");
    check_refused(rig, &rig->desc,
                  "group 1|layout_id is \"rows\" there and \"rows of twenty-three ch\" here");
    *g = was, g->payload_bytes--;
    check_refused(rig, &rig->desc, "group 1|a block has 3776 bytes there and 3775 here");
    *g = was;
    rig->desc.hash_key = key; /* the file's own */
    CHECK_OK(srig_open(rig));
    CHECK_INT(GET(1), 1);
}

/* A file of version 2, byte by byte, with its right checksum: its model lies where version 3 has it. */
NEW_STORE_TEST(store, a_store_of_version_2_is_refused, 4)
{
    unsigned char old[4096] = "FolioKV\n";
    old[8] = 2;             /* version */
    old[12] = SRIG_GROUPS;  /* groups */
    old[17] = 4096 >> 8;    /* a frame's bytes */
    old[24] = SRIG_IDS * 4; /* its ids' */
    strcpy((char *)old + 32, "a model");
    old[2080] = old[2088] = old[2096] = old[4088] = 1; /* hash key, secret, epoch */
    uint64_t sums[2] = {htole64(XXH3_64bits(old, 2112)),
                        htole64(XXH3_64bits_withSeed(old + 4088, 8, 1))};
    memcpy(old + 2112, &sums[0], 8);
    memcpy(old + 4056, &sums[1], 8);
    srig_write_file(rig->path, old, sizeof old);
    check_refused(rig, &rig->desc, "format version 2; this library reads version 3");
}

NEW_STORE_TEST(store, a_hash_key_is_kept, 4)
{
    rig->desc.hash_key = 77;
    CHECK_OK(srig_open(rig));
    CHECK(folioi_store_hash_key(rig->store) == 77);
    rig->desc.hash_key = 0;
    srig_reopen(rig);
    CHECK(folioi_store_hash_key(rig->store) == 77);
    srig_close(rig);
    uint64_t random[2];
    for (int i = 0; i < 2; i++) {
        unlink(rig->path);
        CHECK_OK(srig_open(rig));
        random[i] = folioi_store_hash_key(rig->store);
        srig_close(rig);
    }
    CHECK(random[0] != random[1] && random[0] != 77);
}

STORE_TEST(store, a_file_in_use_is_refused, 4)
{
    check_refused(rig, &rig->desc, "store|is in use");
    CHECK_OK(PUT(1));
    srig_reopen(rig);
    CHECK_INT(GET(1), 1);
}

NEW_STORE_TEST(store, files_that_are_no_stores_are_refused, 4)
{
    unsigned char bytes[9000];
    for (int i = 0; i < COUNT_OF(bytes); i++)
        bytes[i] = (unsigned char)support_bits(5, (uint64_t)i);
    const int64_t sizes[] = {1, 7, 8, 100, 4095, 4096, 9000};
    for (int i = 0; i < COUNT_OF(sizes); i++) {
        srig_write_file(rig->path, bytes, sizes[i]);
        check_refused(rig, &rig->desc, "is not a store");
    }
    memset(bytes, 0, sizeof bytes); /* zeros: only a part of a superblock is made anew */
    srig_write_file(rig->path, bytes, 4096);
    check_refused(rig, &rig->desc, "is not a store");
    bytes[4094] = 1;
    srig_write_file(rig->path, bytes, 4095);
    check_refused(rig, &rig->desc, "is not a store");
}

STORE_TEST(store, another_version_is_refused, 4)
{
    CHECK_OK(PUT(1));
    srig_close(rig);
    int64_t size;
    unsigned char *bytes = srig_read_file(rig->path, &size);
    const int others[] = {1, 2, 4};
    for (int i = 0; i < COUNT_OF(others); i++) {
        char words[80];
        snprintf(words, sizeof words, "format version %d; this library reads version 3", others[i]);
        bytes[8] = (unsigned char)others[i];
        srig_write_file(rig->path, bytes, size);
        check_refused(rig, &rig->desc, words);
    }
    bytes[8] = 3;
    bytes[40] ^= 1; /* of the model's name */
    srig_write_file(rig->path, bytes, size);
    check_refused(rig, &rig->desc, "is damaged|checksum");
    free(bytes);
}

/* Left by a process that was killed while it made the file. */
STORE_TEST(store, an_unfinished_file_is_made_anew, 4)
{
    srig_close(rig);
    int64_t size;
    unsigned char *whole = srig_read_file(rig->path, &size), zeros[4096] = {0};
    CHECK_INT(size, 4096);
    for (int64_t n = 0; n < 4096; n += n < 64 ? 1 : 61) {
        for (int zero = 0; zero < 2; zero++) {
            srig_write_file(rig->path, zero ? zeros : whole, n);
            CHECK_OK(srig_open(rig));
            CHECK_OK(PUT(1));
            srig_reopen(rig);
            CHECK_INT(GET(1), 1);
            srig_close(rig);
        }
        if (n == 0 || n > SRIG_HASH_KEY) continue; /* a hash key is random */
        whole[n - 1] ^= 1;                         /* not ours */
        srig_write_file(rig->path, whole, n);
        check_refused(rig, &rig->desc, "store");
        whole[n - 1] ^= 1;
    }
    free(whole);
}

NEW_STORE_TEST(store, an_open_is_checked, 4)
{
    char name[257];
    memset(name, 'm', 256);
    name[256] = 0;
    folioi_store *store = NOWHERE;
    folioi_frame_geometry wide[33] = {{.payload_bytes = 8}};
    for (int g = 0; g < 33; g++) wide[g] = rig->geometry[0];
    for (int part = 0; part < 8; part++) {
        static const char *const words[] = {"path is NULL",
                                            "256 bytes|255",
                                            "ids_bytes is 7",
                                            "num_layer_groups is 0",
                                            "num_layer_groups is 33",
                                            "no geometry",
                                            "group 2: payload_bytes is -1",
                                            "12287|4096|12288"};
        folioi_store_desc d = rig->desc;
        if (part == 0) d.path = NULL;
        if (part == 1) rig->passport.model = name;
        if (part == 2) rig->passport.model = "";
        if (part == 2) d.ids_bytes = 7;
        if (part == 3) d.num_layer_groups = 0;
        if (part == 4) d.num_layer_groups = 33, d.geometry = wide;
        if (part == 5) d.geometry = NULL;
        rig->geometry[2].payload_bytes = part == 6 ? -1 : 1;
        if (part == 7) d.max_bytes = 3 * 4096 - 1;
        REFUSED(folioi_store_open(&rig->allocator, &d, &store), FOLIO_ERR_ARGUMENT, words[part]);
        CHECK(store == NULL);
        CHECK(access(rig->path, F_OK) != 0); /* no file was made */
    }
    /* The most of each is taken, and a group without blocks. */
    wide[31].payload_bytes = 0;
    folioi_store_desc d = rig->desc;
    rig->passport.model = name + 1;
    d.num_layer_groups = 32;
    d.geometry = wide;
    d.max_bytes = 3 * 4096;
    for (int open = 0; open < 2; open++) {
        CHECK_OK(folioi_store_open(&rig->allocator, &d, &store));
        CHECK_INT(folioi_store_get_stats(store).num_frames, 2);
        CHECK_INT(srig_get(store, 1, 0, CACHED, 0), open);
        CHECK_OK(srig_put(store, 1, 0, CACHED, 0));
        folioi_store_close(store);
    }
    folioi_store_close(NULL);
}

NEW_STORE_TEST(store, what_the_system_refuses_is_said_in_its_words, 4)
{
    folioi_store_desc d = rig->desc;
    folioi_store *store = NOWHERE;
    d.path = rig->dir;
    REFUSED(folioi_store_open(&rig->allocator, &d, &store), FOLIO_ERR_IO, "directory");
    CHECK(store == NULL);
    char path[400];
    snprintf(path, sizeof path, "%s/none/store", rig->dir);
    d.path = path;
    REFUSED(folioi_store_open(&rig->allocator, &d, &store), FOLIO_ERR_IO,
            "none/store|No such file");
    d.path = "/dev/null"; /* its size is 0: it must not be taken for an empty file */
    REFUSED(folioi_store_open(&rig->allocator, &d, &store), FOLIO_ERR_ARGUMENT,
            "/dev/null|no regular file");
}

/* --------------------------------------------------------------------------------------- format */

static uint64_t little_endian(const unsigned char *bytes, int n)
{
    uint64_t x = 0;
    for (int i = n - 1; i >= 0; i--) x = x << 8 | bytes[i];
    return x;
}

/* Files outlive libraries: the places of version 3, written out. */
NEW_STORE_TEST(store, the_format_is_as_it_was, 4)
{
    rig->desc.hash_key = 0x0123456789ABCDEF;
    REQUIRE_TEST(srig_open(rig) == FOLIO_OK);
    CHECK_OK(PUT(1));
    CHECK_OK(srig_put(rig->store, 3, 1, SEQUENCE, 0));
    srig_close(rig);
    struct stat st;
    CHECK(stat(rig->path, &st) == 0 && (st.st_mode & 0777) == 0600);
    int64_t size;
    unsigned char *bytes = srig_read_file(rig->path, &size);
    CHECK_INT(size, 2 * 4096 + SRIG_HEAD + SRIG_MAX_PAYLOAD);
    CHECK(memcmp(bytes, "FolioKV\n", 8) == 0);
    CHECK_INT(little_endian(bytes + 8, 4), 3);     /* version */
    CHECK_INT(little_endian(bytes + 12, 4), 3);    /* groups */
    CHECK_INT(little_endian(bytes + 16, 8), 4096); /* a frame's bytes */
    CHECK_INT(little_endian(bytes + 24, 4), 64);   /* its ids' */
    CHECK(strcmp((char *)bytes + 32, "a model") == 0);
    const unsigned char *g1 = bytes + 504 + 64;
    const uint64_t numbers[] = {3, 16, 4, 64, 32, 0, 1, 1};
    for (int i = 0; i < 8; i++) CHECK_INT(little_endian(g1 + 4 * i, 4), numbers[i]);
    CHECK(strcmp((const char *)g1 + 32, "rows") == 0);
    CHECK_INT(little_endian(g1 + 56, 8), SRIG_MAX_PAYLOAD);
    CHECK(little_endian(bytes + 2552, 8) == 0x0123456789ABCDEF);
    CHECK_INT(little_endian(bytes + 2576, 4), 0); /* no key; after the secret */
    CHECK(little_endian(bytes + 2584, 8) == XXH3_64bits(bytes, 2584));

    srig_block b;
    srig_block_make(&b, 3, 1, SEQUENCE, 0);
    const unsigned char *f = bytes + 2 * 4096;
    CHECK(memcmp(f, "FolioFr\n", 8) == 0);
    CHECK_INT(little_endian(f + 8, 4), 3);       /* version */
    CHECK_INT(little_endian(f + 12, 4), 2);      /* kind */
    CHECK_INT(little_endian(f + 16, 8), 2);      /* frame */
    CHECK(memcmp(f + 24, bytes + 4088, 8) == 0); /* epoch */
    CHECK_INT(little_endian(f + 32, 8), 2);      /* stamp */
    CHECK(little_endian(f + 40, 8) == b.id.key.word[0]);
    CHECK(little_endian(f + 48, 8) == b.id.key.word[1]);
    CHECK(little_endian(f + 56, 8) == b.id.parent.word[0]);
    CHECK(little_endian(f + 64, 8) == b.id.parent.word[1]);
    CHECK(little_endian(f + 72, 8) == b.id.salt);
    CHECK_INT(little_endian(f + 80, 4), 1);                /* group */
    CHECK_INT(little_endian(f + 84, 4), 8);                /* bytes of its ids */
    CHECK_INT(little_endian(f + 88, 4), 1);                /* hashed */
    CHECK_INT(little_endian(f + 96, 8), SRIG_MAX_PAYLOAD); /* bytes of its payload */
    CHECK(memcmp(f + 104, g1, 64) == 0);
    CHECK(little_endian(f + 192, 8) == XXH3_64bits(b.payload, SRIG_MAX_PAYLOAD));
    uint64_t seed = XXH3_64bits_withSeed(f, 224, 0x0123456789ABCDEF);
    CHECK(little_endian(f + 224, 8) == XXH3_64bits_withSeed(b.ids, 8, seed));
    CHECK(memcmp(f + 256, b.ids, 8) == 0);
    CHECK(memcmp(f + SRIG_HEAD, b.payload, SRIG_MAX_PAYLOAD) == 0);
    free(bytes);
}
