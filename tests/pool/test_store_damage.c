/*
 * test_store_damage.c: thousands of stores, each damaged in a few places at random: bits, ranges, frames in the place of
 * others, frames of another store, ends cut off or added. What is found afterwards is right; all else is a miss.
 */
#include "pool/store_rig.h"

#include <stdlib.h>

enum { FRAMES = 8, FRAME = 4096, BLOCKS = 6, MOST = (FRAMES + 4) * FRAME };

typedef struct {
    unsigned char *bytes;
    int64_t size;
} image;

/* A store of three groups: blocks 0 .. 5, and a swapped sequence. version: of their payloads. */
static image make_image(store_rig *rig, uint64_t version)
{
    image made = {NULL, 0};
    CHECK_OK(srig_open(rig));
    for (uint64_t n = 0; n < BLOCKS; n++)
        CHECK_OK(srig_put(rig->store, n, (int32_t)(n % 3), CACHED, version));
    CHECK_OK(srig_put(rig->store, 90, 1, SEQUENCE, version));
    srig_close(rig);
    made.bytes = srig_read_file(rig->path, &made.size);
    CHECK(remove(rig->path) == 0);
    return made;
}

typedef struct {
    uint64_t seed, n;
} numbers;

static int64_t draw(numbers *r, int64_t end)
{
    return (int64_t)(support_bits(r->seed, r->n++) % (uint64_t)end);
}

/* Half of the places lie in heads and the superblock, where they are read. */
static int64_t place(numbers *r, int64_t size)
{
    int64_t at = draw(r, size);
    return draw(r, 2) ? at : at / FRAME * FRAME + at % SRIG_HEAD;
}

/* One damage to file, which has room for MOST bytes. other: of another store with the same key. */
static void damage(numbers *r, unsigned char *file, int64_t *size, const image *other)
{
    if (*size < 2 * FRAME) return;
    int64_t at = place(r, *size), n = 1 + draw(r, 300), from = place(r, *size);
    int64_t a = 1 + draw(r, *size / FRAME - 1), b = 1 + draw(r, *size / FRAME - 1);
    if (at + n > *size) n = *size - at;
    if (from + n > *size) n = *size - from;
    switch (draw(r, 8)) {
    case 0:
    case 1: file[at] ^= (unsigned char)(1 << draw(r, 8)); break;
    case 2:
        for (int64_t i = 0; i < n; i++) file[at + i] = (unsigned char)draw(r, 256);
        break;
    case 3: memset(file + at, draw(r, 2) ? 0 : 0xFF, (size_t)n); break;
    case 4: memmove(file + at, file + from, (size_t)n); break;
    case 5: memmove(file + a * FRAME, file + b * FRAME, FRAME); break;
    case 6:
        b = 1 + draw(r, other->size / FRAME - 1);
        memcpy(file + a * FRAME, other->bytes + b * FRAME, FRAME / 2);
        break;
    default:
        n = draw(r, 3 * FRAME);
        if (draw(r, 2) || *size + n > MOST) *size -= n < *size ? n : 0;
        else *size += n;
    }
}

typedef struct {
    int64_t refused, found, missed;
} counts;

static void check_damaged(store_rig *rig, counts *c)
{
    if (srig_open(rig) != FOLIO_OK) {
        c->refused++;
        CHECK(rig->store == NULL && strlen(folio_last_error()) > 8);
        return;
    }
    for (uint64_t n = 0; n < BLOCKS + 2; n++) { /* two were never put */
        int got = srig_get(rig->store, n, (int32_t)(n % 3), CACHED, 0);
        CHECK_MSG(got >= 0 && (n < BLOCKS || got == 0), "block %d: wrong bytes", (int)n);
        *(got == 1 ? &c->found : &c->missed) += n < BLOCKS;
    }
    CHECK(srig_get(rig->store, 90, 1, SEQUENCE, 0) == 0); /* nobody has it any more */
    for (uint64_t n = 10; n < 13; n++) {                  /* and it works */
        CHECK_OK(srig_put(rig->store, n, 0, CACHED, 0));
        CHECK_INT(srig_get(rig->store, n, 0, CACHED, 0), 1);
    }
    srig_close(rig);
}

static void damage_many(uint64_t seed, int64_t rounds)
{
    static const unsigned char key_bytes[32] = {3, 1, 4, 1, 5};
    static unsigned char file[MOST];
    counts c = {0, 0, 0};
    for (int keyed = 0; keyed < 2; keyed++) {
        store_rig rig;
        srig_init(&rig, FRAMES);
        if (keyed) rig.desc.key = (folioi_bytes){key_bytes, sizeof key_bytes};
        image own = make_image(&rig, 0), other = make_image(&rig, 1);
        for (int64_t i = 0; i < rounds / 2 && test_failures() == 0; i++) {
            numbers r = {seed + (uint64_t)keyed, (uint64_t)i * 100000};
            int64_t size = own.size;
            memset(file, 0, sizeof file);
            memcpy(file, own.bytes, (size_t)size);
            for (int64_t times = 1 + draw(&r, 4); times > 0; times--)
                damage(&r, file, &size, &other);
            srig_write_file(rig.path, file, size);
            check_damaged(&rig, &c);
            if (test_failures() > 0) printf("  ... keyed %d, store %lld\n", keyed, (long long)i);
        }
        free(own.bytes);
        free(other.bytes);
        srig_end(&rig);
    }
    CHECK(c.refused > rounds / 100 && c.found > rounds && c.missed > rounds / 10);
}

TEST(store_damage, a_thousand_stores) { damage_many(1, 1000); }

LONG_TEST(store_damage, ten_thousand_stores) { damage_many(2, 10000); }
