/* fuzz_world.c: see fuzz_world.h. */
#include "pool/fuzz_world.h"

#include "cache/pool.h" /* folioi_pool_set_hash_bits */

#include <stdlib.h>
#include <time.h>
#include <unistd.h>

_Thread_local bool fuzz_is_caller;

static void *slow_alloc(void *user, size_t size, size_t align)
{
    (void)user;
    static _Atomic uint64_t count;
    if (!fuzz_is_caller && ++count % 4 == 0) nanosleep(&(struct timespec){.tv_nsec = 20000}, NULL);
    return aligned_alloc(align, (size + align - 1) / align * align);
}

static void slow_free(void *user, void *ptr, size_t size)
{
    (void)user;
    (void)size;
    free(ptr);
}

static void on_event(void *user, const folio_cache_event *e)
{
    fuzz_world *w = user;
    int32_t place = 1 + (int32_t)e->tier * GROUPS + e->layer_group;
    uint64_t at = support_bits(e->hash[0], (uint64_t)place) % KNOWN;
    known_block *k = &w->known[at];
    while (k->place != 0 && (k->place != place || memcmp(k->hash, e->hash, 16) != 0))
        k = &w->known[++at % KNOWN];
    memcpy(k->hash, e->hash, 16);
    k->place = place;
    bool stored = e->kind == FOLIO_EVENT_STORED;
    w->event_faults += k->there == stored;
    w->event_faults += (e->tier == FOLIO_TIER_DISK) != (e->block == -1);
    w->num_known[e->tier] += stored ? 1 : -1;
    k->there = stored;
}

fuzz_config fuzz_config_of(uint64_t seed)
{
    uint64_t b[24];
    for (int i = 0; i < COUNT_OF(b); i++) b[i] = support_bits(seed, (uint64_t)i + 500);
    static const int32_t sizes[] = {1, 2, 3, 4, 5, 16};
    static const int64_t windows[] = {0, 0, 1, 2, 5, 9, 17, 40};
    static const folio_layout layouts[] = {FOLIO_LAYOUT_NATIVE, FOLIO_LAYOUT_NHD, FOLIO_LAYOUT_HND};
    fuzz_config c = {.block_size = sizes[b[0] % 6],
                     .num_layer_groups = 1 + (int32_t)(b[1] % GROUPS),
                     .num_blocks = 4 + (int64_t)(b[2] % (b[3] % 2 ? 20 : 90)),
                     .host_blocks = b[4] % 3 ? (int64_t)(b[5] % (b[6] % 2 ? 3 : 40)) : 0,
                     .frames = b[7] % 3 ? 2 + (int64_t)(b[8] % (b[9] % 2 ? 3 : 60)) : 0,
                     .encoder = b[10] % 2,
                     .check = b[11] % 2,
                     .num_threads = 1};
    for (int g = 0; g <= c.num_layer_groups; g++) { /* the last one is the encoder's */
        int at = g < c.num_layer_groups ? g : ENCODER;
        c.layers[at] = 1 + (int32_t)(b[12 + g] % 2);
        c.layout[at] = layouts[b[12 + g] / 2 % 3];
        if (g < c.num_layer_groups) c.window[g] = windows[b[16 + g] % 8];
        if (g < c.num_layer_groups && b[20] % 6 == 0 && c.window[g] == 0) c.window[g] = 7;
    }
    return c;
}

/* Room for the file: a frame has a head with ids, one block of a group, and whole pages. */
static int64_t store_bytes(const fuzz_world *w)
{
    int64_t payload = 0;
    for (int g = 0; g <= GROUPS; g++) payload = w->c.layers[g] > payload ? w->c.layers[g] : payload;
    payload *= (int64_t)w->c.block_size * WIDTH * 2 * 4;
    return (w->c.frames + 1) * ((payload + 512 + 4 * w->c.block_size + 4095) / 4096 * 4096);
}

bool fuzz_pool_open(fuzz_world *w)
{
    const fuzz_config *c = &w->c;
    folio_layer_group groups[GROUPS];
    for (int g = 0; g < c->num_layer_groups; g++)
        groups[g] = (folio_layer_group){.window = c->window[g], .cache = w->caches[g]};
    bool listen = c->hash_bits == 0; /* else hashes do not tell blocks apart */
    folio_pool_desc desc = FOLIO_WITH(
        folio_pool_desc, .num_blocks = c->num_blocks, .block_size = c->block_size,
        .num_layer_groups = c->num_layer_groups, .layer_groups = groups,
        .cross_cache = w->caches[ENCODER], .watermark = c->num_blocks / 10,
        .flags = c->check ? FOLIO_POOL_CHECK : 0, .on_event = listen ? on_event : NULL,
        .event_user = w, .host_blocks = c->host_blocks,
        .store_path = c->frames > 0 ? w->store : NULL,
        .store_bytes = c->frames > 0 ? store_bytes(w) : 0, .wipe = (folio_wipe)(w->seed / 2 % 4));
    memset(w->known, 0, KNOWN * sizeof *w->known);
    memset(w->num_known, 0, sizeof w->num_known);
    w->pool = NULL;
    CHECK_OK(folio_pool_create(w->ctx, &desc, &w->pool));
    if (w->pool != NULL && c->hash_bits > 0) folioi_pool_set_hash_bits(w->pool, c->hash_bits);
    return w->pool != NULL;
}

bool fuzz_world_open(fuzz_world *w, const fuzz_config *c, uint64_t seed)
{
    *w = (fuzz_world){.c = *c, .seed = seed, .weights = seed};
    w->known = malloc(KNOWN * sizeof *w->known);
    if (w->known == NULL) abort();
    gen_store_path(w->store, sizeof w->store);
    folio_allocator memory = {slow_alloc, slow_free, NULL};
    w->ctx = support_context(support_backends[seed % 2], 1, &memory);
    if (w->ctx == NULL) return false;
    for (int g = 0; g <= GROUPS; g++) {
        if (g == ENCODER ? !c->encoder : g >= c->num_layer_groups) continue;
        folio_kv_cache_desc desc =
            FOLIO_WITH(folio_kv_cache_desc, .num_blocks = c->num_blocks, .num_layers = c->layers[g],
                       .block_size = c->block_size, .num_kv_heads = 1, .k_head_size = WIDTH,
                       .dtype = FOLIO_F32, .layout = c->layout[g]);
        CHECK_OK(folio_kv_cache_create(w->ctx, &desc, &w->caches[g]));
        if (w->caches[g] == NULL) return false;
        kit_poison_cache(w->caches[g]);
    }
    return fuzz_pool_open(w);
}

void fuzz_world_close(fuzz_world *w)
{
    folio_pool_destroy(w->pool);
    for (int g = 0; g <= GROUPS; g++) folio_kv_cache_destroy(w->caches[g]);
    folio_context_destroy(w->ctx);
    unlink(w->store);
    free(w->known);
}
