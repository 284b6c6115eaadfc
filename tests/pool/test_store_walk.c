/*
 * test_store_walk.c: the disk tier with calls inside of calls (from the reads and writes of another
 * one, where no lock is held), and on a long random walk next to a model that knows every frame and
 * the order of their use.
 */
#include "pool/store_rig.h"

/* ------------------------------------------------------------------------ calls inside of calls */

/* An open store of num_frames frames, and what happens in the middle of the next call. */
typedef struct {
    store_rig rig;
    srig_faults faults;
    folioi_file_ops ops;
    int64_t counted; /* by the hook */
} nested;

static void nested_init(nested *t, int64_t num_frames)
{
    t->faults = (srig_faults){.chunks = SRIG_WHOLE};
    t->counted = 0;
    t->ops = srig_faulty_ops(&t->faults);
    srig_init(&t->rig, num_frames);
    t->rig.desc.ops = &t->ops;
    CHECK_OK(srig_open(&t->rig));
}

/* The hook comes before the next call's n-th write, or read. */
static void in_write(nested *t, int64_t n, void (*hook)(void *))
{
    t->faults.hook = hook;
    t->faults.hook_user = t;
    t->faults.hook_write = t->faults.writes + n;
}

static void in_read(nested *t, int64_t n, void (*hook)(void *))
{
    t->faults.hook = hook;
    t->faults.hook_user = t;
    t->faults.hook_read = t->faults.reads + n;
}

/* So many are in use, the rest and the CACHED ones can be had, and the disk agrees. */
static void nested_end(nested *t, int64_t used, int64_t sequences)
{
    store_rig *rig = &t->rig;
    folioi_store_stats stats = srig_stats(rig);
    CHECK_INT(t->faults.hook_read + t->faults.hook_write, 0); /* it was called */
    CHECK_INT(stats.used, used);
    CHECK_INT(stats.warnings + stats.errors, 0);
    CHECK_INT(folioi_store_available(rig->store), stats.num_frames - sequences);
    srig_reopen(rig);
    CHECK_INT(srig_stats(rig).used, used - sequences);
    CHECK_INT(srig_stats(rig).warnings, 0);
    srig_end(rig);
}

static folio_status put(nested *t, uint64_t n) { return srig_put(t->rig.store, n, 0, CACHED, 0); }
static int get(nested *t, uint64_t n) { return srig_get(t->rig.store, n, 0, CACHED, 0); }

static void drop(nested *t, uint64_t n)
{
    srig_block b;
    srig_block_make(&b, n, 0, CACHED, 0);
    folioi_store_drop(t->rig.store, &b.id);
}

static void hook_forget(void *user) { CHECK_OK(folioi_store_forget(((nested *)user)->rig.store)); }
static void hook_put_1(void *user) { CHECK_OK(put(user, 1)); }
static void hook_drop_1(void *user) { drop(user, 1); }

/* Block 1 is written, not yet there; what is put meanwhile shares the other frames. */
static void hook_no_1(void *user)
{
    nested *t = user;
    CHECK_INT(get(t, 1), 0);
    CHECK(!srig_has(t->rig.store, 1, 0, CACHED));
    CHECK_INT(folioi_store_available(t->rig.store), 1);
    for (uint64_t n = 2; n < 6; n++) CHECK_OK(put(t, n));
    CHECK_OK(srig_put(t->rig.store, 6, 0, SEQUENCE, 0));
    REFUSED(srig_put(t->rig.store, 7, 0, SEQUENCE, 0), FOLIO_ERR_FULL, "busy");
    REFUSED(put(t, 8), FOLIO_ERR_FULL, "busy");
    t->counted = srig_stats(&t->rig).evictions;
}

/* Block 1 is read; it is not replaced, can be read again, and dropped. */
static void hook_others(void *user)
{
    nested *t = user;
    CHECK_INT(folioi_store_available(t->rig.store), 1);
    for (uint64_t n = 2; n < 6; n++) CHECK_OK(put(t, n));
    CHECK_INT(get(t, 1), 1);
}

static void hook_read_and_drop(void *user)
{
    CHECK_INT(get(user, 1), 1);
    drop(user, 1);
    CHECK_INT(get(user, 1), 0);
    CHECK_OK(put(user, 1)); /* in another frame */
    CHECK_INT(get(user, 1), 1);
}

static void hook_old_version(void *user)
{
    nested *t = user;
    t->counted += srig_get(t->rig.store, 1, 0, SEQUENCE, 1) == 1;
}

TEST(store_walk, a_put_that_is_forgotten_meanwhile_is_forgotten)
{
    for (int64_t at = 1; at <= 3; at++)
        for (int kind = CACHED; kind <= SEQUENCE; kind++) {
            nested t;
            nested_init(&t, 3);
            CHECK_OK(put(&t, 0));
            in_write(&t, at, hook_forget);
            CHECK_OK(srig_put(t.rig.store, 1, 0, (folioi_frame_kind)kind, 0));
            int sequence = kind == SEQUENCE;
            CHECK_INT(srig_get(t.rig.store, 1, 0, (folioi_frame_kind)kind, 0), sequence);
            nested_end(&t, sequence, sequence);
        }
}

TEST(store_walk, of_two_equal_puts_at_once_one_stays)
{
    for (int64_t at = 1; at <= 3; at++) {
        nested t;
        nested_init(&t, 3);
        in_write(&t, at, hook_put_1);
        CHECK_OK(put(&t, 1));
        CHECK_INT(get(&t, 1), 1);
        CHECK_INT(srig_stats(&t.rig).writes, 2);
        drop(&t, 1);
        nested_end(&t, 0, 0); /* no second frame of it on disk */
    }
}

TEST(store_walk, a_frame_is_not_taken_while_it_is_written)
{
    for (int64_t at = 1; at <= 3; at++) {
        nested t;
        nested_init(&t, 2);
        in_write(&t, at, hook_no_1);
        CHECK_OK(put(&t, 1));
        CHECK_INT(t.counted, 4);
        CHECK_INT(get(&t, 1), 1);
        CHECK_INT(srig_get(t.rig.store, 6, 0, SEQUENCE, 0), 1);
        nested_end(&t, 2, 1);
    }
}

TEST(store_walk, a_frame_is_not_taken_while_it_is_read)
{
    for (int64_t at = 1; at <= 2; at++) {
        nested t;
        nested_init(&t, 2);
        CHECK_OK(put(&t, 1));
        in_read(&t, at, hook_others);
        CHECK_INT(get(&t, 1), 1);
        CHECK_INT(get(&t, 5), 1);
        nested_end(&t, 2, 0);
    }
}

/* No warning: the file is well. Once the head is read, the payload is still there. */
TEST(store_walk, a_frame_dropped_while_it_is_read_is_a_miss)
{
    for (int64_t at = 1; at <= 2; at++) {
        nested t;
        nested_init(&t, 2);
        CHECK_OK(put(&t, 1));
        in_read(&t, at, hook_drop_1);
        CHECK_INT(get(&t, 1), at == 2);
        CHECK_INT(get(&t, 1), 0);
        nested_end(&t, 0, 0);
    }
    nested t;
    nested_init(&t, 2);
    CHECK_OK(put(&t, 1));
    in_read(&t, 1, hook_read_and_drop);
    CHECK_INT(get(&t, 1), 0);
    CHECK_INT(get(&t, 1), 1);
    nested_end(&t, 1, 0);
}

TEST(store_walk, the_old_sequence_is_there_while_the_new_one_is_written)
{
    for (int64_t at = 1; at <= 3; at++) {
        nested t;
        nested_init(&t, 2);
        CHECK_OK(srig_put(t.rig.store, 1, 0, SEQUENCE, 1));
        in_write(&t, at, hook_old_version);
        CHECK_OK(srig_put(t.rig.store, 1, 0, SEQUENCE, 2));
        CHECK_INT(t.counted, 1);
        CHECK_INT(srig_get(t.rig.store, 1, 0, SEQUENCE, 2), 1);
        nested_end(&t, 1, 1);
    }
}

/* ---------------------------------------------------------------------------------------- model */

#define MODEL_FRAMES 12

typedef struct {
    uint64_t n, version, used,
        stamp; /* version: of a SEQUENCE; of a CACHED one, which parent it has */
    int32_t group;
    folioi_frame_kind kind;
} model_frame;

typedef struct {
    model_frame frames[MODEL_FRAMES];
    int count;
    uint64_t clock, stamp;
    int64_t evictions, refused;
} model;

static model_frame *model_find(model *m, uint64_t n, int32_t group, folioi_frame_kind kind)
{
    for (int i = 0; i < m->count; i++) {
        model_frame *f = &m->frames[i];
        if (f->n == n && f->group == group && f->kind == kind) return f;
    }
    return NULL;
}

static void model_remove(model *m, model_frame *f) { *f = m->frames[--m->count]; }

static bool model_put(model *m, uint64_t n, int32_t group, folioi_frame_kind kind, uint64_t version)
{
    model_frame *old = model_find(m, n, group, kind), *victim = NULL;
    if (old != NULL) old->used = ++m->clock;
    if (old != NULL && kind == CACHED && old->version == version) return true;
    if (m->count == MODEL_FRAMES) {
        for (int i = 0; i < m->count; i++) {
            model_frame *f = &m->frames[i];
            if (f->kind == CACHED && f != old && (victim == NULL || f->used < victim->used))
                victim = f;
        }
        if (victim == NULL) return false;
        m->evictions++;
        model_remove(m, victim);
    }
    old = model_find(m, n, group, kind);
    if (old != NULL) model_remove(m, old);
    m->frames[m->count++] = (model_frame){n, version, ++m->clock, ++m->stamp, group, kind};
    return true;
}

static int64_t model_count(const model *m, folioi_frame_kind kind)
{
    int64_t count = 0;
    for (int i = 0; i < m->count; i++) count += m->frames[i].kind == kind;
    return count;
}

static void model_forget(model *m, folioi_frame_kind kind)
{
    for (int i = m->count - 1; i >= 0; i--)
        if (m->frames[i].kind == kind) model_remove(m, &m->frames[i]);
}

static void model_block(srig_block *b, uint64_t n, int32_t group, folioi_frame_kind kind,
                        uint64_t version)
{
    srig_block_make(b, n, group, kind, version);
    if (kind == CACHED) b->id.parent.word[1] += version;
}

/* One random step on both; false when they differ. */
static bool model_step(store_rig *rig, model *m, uint64_t r)
{
    uint64_t n = r % 10;
    int32_t group = (int32_t)((r >> 8 & 255) % SRIG_GROUPS);
    folioi_frame_kind kind = (r >> 16) % 3 == 0 ? SEQUENCE : CACHED;
    uint64_t version = kind == SEQUENCE ? m->clock + 1 : (r >> 24) % 8 == 0;
    model_frame *f = model_find(m, n, group, kind);
    srig_block b;
    unsigned char got[SRIG_MAX_PAYLOAD];
    bool found;
    uint64_t action = (r >> 32) % 16;
    if (action < 6) {
        model_block(&b, n, group, kind, version);
        bool room = model_put(m, n, group, kind, version);
        folio_status status = folioi_store_put(rig->store, &b.id, b.payload, b.bytes);
        m->refused += !room;
        return status == (room ? FOLIO_OK : FOLIO_ERR_FULL);
    }
    if (action < 8) {
        model_block(&b, n, group, kind, 0);
        if (f != NULL) model_remove(m, f);
        folioi_store_drop(rig->store, &b.id);
        return folioi_store_available(rig->store) == MODEL_FRAMES - model_count(m, SEQUENCE);
    }
    if (kind == SEQUENCE && f != NULL) version = f->version;
    model_block(&b, n, group, kind, version);
    if (f != NULL && f->version != version) f = NULL;
    if (folioi_store_has(rig->store, &b.id) != (f != NULL)) return false;
    if (folioi_store_get(rig->store, &b.id, got, b.bytes, &found) != FOLIO_OK) return false;
    if (found != (f != NULL)) return false;
    if (f != NULL) f->used = ++m->clock;
    return !found || memcmp(got, b.payload, (size_t)b.bytes) == 0;
}

static void model_walk(uint64_t seed, int64_t steps)
{
    store_rig rig;
    srig_init(&rig, MODEL_FRAMES);
    REQUIRE_TEST(srig_open(&rig) == FOLIO_OK);
    model m = {.count = 0};
    for (int64_t step = 0; step < steps && test_failures() == 0; step++) {
        uint64_t r = support_bits(seed, (uint64_t)step), event = (r >> 40) % 512;
        if (event == 0) { /* what is left is in the order of its puts */
            srig_reopen(&rig);
            model_forget(&m, SEQUENCE);
            for (int i = 0; i < m.count; i++) m.frames[i].used = m.frames[i].stamp;
            m.clock = m.clock > m.stamp ? m.clock : m.stamp;
            m.evictions = 0;
        } else if (event == 1) {
            CHECK_OK(folioi_store_forget(rig.store));
            model_forget(&m, CACHED);
        } else {
            CHECK_MSG(model_step(&rig, &m, r), "seed %llu, step %lld", (unsigned long long)seed,
                      (long long)step);
        }
        folioi_store_stats stats = srig_stats(&rig);
        CHECK_INT(stats.used, m.count);
        CHECK_INT(stats.evictions, m.evictions);
        CHECK_INT(stats.warnings + stats.errors, 0);
    }
    CHECK(m.refused > steps / 1000); /* the walk came to where all is full */
    srig_end(&rig);
}

TEST(store_walk, a_random_walk_agrees_with_a_model) { model_walk(1, 20000); }

LONG_TEST(store_walk, a_long_walk_agrees_with_a_model)
{
    for (uint64_t seed = 2; seed < 7; seed++) model_walk(seed, 100000);
}
