/*
 * kv_export.c: blocks as bytes for other processes, and back: docs/kv-format.md has the format.
 *
 *   header (576) | a seal (32) of each block | a seal of all before it | blocks, as frames of the host tier have them
 *
 * An import verifies all of it before it writes to the cache. Blocks pass through frames in host memory that the
 * cache's device can reach, some at a time.
 */
#include "cache/kv_cache.h"
#include "cache/passport.h"

#include <endian.h>
#include <string.h>

#define EXPORT_VERSION 1
#define MOST_BLOCKS 256 /* through the frames at once */
#define MOST_BYTES ((int64_t)16 << 20)

typedef struct export_header {
    char magic[8];
    uint32_t version;
    uint32_t keyed;
    int64_t num_blocks, num_tokens;
    int64_t total_bytes;
    folioi_disk_geometry geometry;
    folioi_disk_passport passport;
} export_header;

_Static_assert(sizeof(export_header) == 576, "as documented");

static const char export_magic[8] = {'F', 'o', 'l', 'i', 'o', 'E', 'x', '\n'};
static const folioi_bytes no_bytes = {NULL, 0};

/* One call's blocks: what the caller wants, the header that it amounts to, and the form of a block. */
typedef struct parcel {
    const folio_kv_cache *cache;
    folio_kv_blocks want;
    folio_run run;
    folioi_bytes key;
    folioi_kv_format one; /* of a block */
    export_header header;
    int64_t head_bytes, block_bytes, total_bytes;
} parcel;

/* ---------------------------------------------------------------------------------- description */

static int64_t seal_offset(int64_t block)
{
    return (int64_t)sizeof(export_header) + block * (int64_t)sizeof(folioi_seal);
}

static folio_status check_tokens(const parcel *p)
{
    int64_t n = p->want.num_blocks, tokens = p->want.num_tokens;
    int64_t size = p->cache->format.desc.block_size;
    int64_t least = n == 0 ? 0 : (n - 1) * size + 1;
    REQUIRE(tokens >= least && tokens <= n * size,
            "num_tokens is %lld; %lld blocks of %lld tokens hold %lld to %lld", (long long)tokens,
            (long long)n, (long long)size, (long long)least, (long long)(n * size));
    return FOLIO_OK;
}

static folio_status read_want(parcel *p, const folio_kv_cache *cache, const folio_kv_blocks *blocks,
                              bool import, const folio_run *run)
{
    memset(p, 0, sizeof *p);
    REQUIRE(cache != NULL, "KV cache is NULL");
    p->cache = cache;
    STRUCT_IN(p->want, blocks, "folio_kv_blocks");
    TRY(folioi_run_in(cache->ctx, run, &p->run));
    TRY(folioi_kv_check_blocks(cache, p->want.blocks, p->want.num_blocks, !import));
    TRY(check_tokens(p));
    TRY(folioi_key_read("key", p->want.key, p->want.key_bytes, &p->key));
    p->head_bytes = seal_offset(p->want.num_blocks + 1);
    return folioi_passport_encode(p->want.passport, &p->header.passport);
}

/* Blocks in this layout: the rest of the header, and all sizes. */
static folio_status describe(parcel *p, folio_layout layout)
{
    int64_t n = p->want.num_blocks;
    REQUIRE(layout != FOLIO_LAYOUT_STRIDED,
            "layout strided has no form of its own; blocks need another one");
    TRY(folioi_kv_block_format(&p->cache->format.desc, layout, p->cache->format.on_device,
                               &p->one));
    const folioi_frame_geometry geometry = folioi_geometry_of(&p->one);
    p->block_bytes = geometry.payload_bytes;
    REQUIRE(checked_mul(n, p->block_bytes, &p->total_bytes) &&
                checked_add(p->total_bytes, p->head_bytes, &p->total_bytes),
            "%lld blocks of %lld bytes exceed the largest size", (long long)n,
            (long long)p->block_bytes);
    memcpy(p->header.magic, export_magic, sizeof export_magic);
    p->header.version = htole32(EXPORT_VERSION);
    p->header.keyed = htole32(p->key.size > 0);
    p->header.num_blocks = (int64_t)htole64((uint64_t)n);
    p->header.num_tokens = (int64_t)htole64((uint64_t)p->want.num_tokens);
    p->header.total_bytes = (int64_t)htole64((uint64_t)p->total_bytes);
    p->header.geometry = folioi_geometry_encode(&geometry);
    return FOLIO_OK;
}

static folio_status check_apart(const parcel *p, const void *data, int64_t bytes)
{
    const folioi_place place = {"data", folioi_span_of(data, bytes)};
    return folioi_kv_cache_check_apart(p->cache, &place, 1);
}

static folioi_seal head_seal(const parcel *p, const char *data)
{
    const folioi_bytes all = {data, (size_t)seal_offset(p->want.num_blocks)};
    return folioi_seal_make(p->key, FOLIOI_SEALED_EXPORT_HEAD, all, no_bytes, 0);
}

static folioi_seal block_seal(const parcel *p, const char *block)
{
    const folioi_bytes all = {block, (size_t)p->block_bytes};
    return folioi_seal_make(p->key, FOLIOI_SEALED_EXPORT_BLOCK, all, no_bytes, 0);
}

/* --------------------------------------------------------------------------------------- frames */

/* Room for some blocks in host memory, and a cache around it. */
typedef struct staging {
    folio_context *ctx;
    folioi_kv_frame_memory frames;
    folio_kv_cache *cache;
    folio_block_pair pairs[MOST_BLOCKS];
} staging;

static void staging_free(staging *s)
{
    folio_kv_cache_destroy(s->cache);
    s->ctx->backend->free(s->ctx, FOLIO_MEMORY_HOST, s->frames.memory,
                          (size_t)(s->frames.num * s->frames.frame_bytes));
}

static folio_status staging_make(const parcel *p, staging *s)
{
    int64_t most = max_i64(1, min_i64(MOST_BLOCKS, MOST_BYTES / p->block_bytes));
    void *memory = NULL;
    s->ctx = p->cache->ctx;
    s->cache = NULL;
    s->frames = (folioi_kv_frame_memory){NULL, min_i64(most, p->want.num_blocks), p->block_bytes};
    TRY(s->ctx->backend->alloc(s->ctx, FOLIO_MEMORY_HOST,
                               (size_t)(s->frames.num * s->frames.frame_bytes),
                               "blocks to export or import", &memory));
    s->frames.memory = memory;
    folio_status status = folioi_kv_wrap_frames(s->ctx, &p->one, &s->frames, &s->cache);
    if (status != FOLIO_OK) staging_free(s);
    return status;
}

/* Blocks [first, first + n) of the call and the frames, in either direction; when it returns, it is done. */
static folio_status move(const parcel *p, staging *s, int64_t first, int64_t n, bool in)
{
    const folioi_backend *b = s->ctx->backend;
    const folioi_kv_layer *cache = p->cache->layers, *frames = s->cache->layers;
    for (int64_t i = 0; i < n; i++) {
        int64_t block = p->want.blocks[first + i];
        s->pairs[i] = in ? (folio_block_pair){i, block} : (folio_block_pair){block, i};
    }
    folio_status status =
        b->move_blocks(s->ctx, in ? frames : cache, in ? cache : frames,
                       p->cache->format.desc.num_layers, s->pairs, n, p->run.stream);
    folio_status waited = b->wait(s->ctx, p->run.stream); /* the frames are this call's */
    return status != FOLIO_OK ? status : waited;
}

/* --------------------------------------------------------------------------------------- export */

static folio_status export_blocks(const parcel *p, staging *s, char *data)
{
    int64_t size = p->cache->format.desc.block_size;
    for (int64_t first = 0; first < p->want.num_blocks; first += s->frames.num) {
        int64_t n = min_i64(s->frames.num, p->want.num_blocks - first);
        TRY(move(p, s, first, n, false));
        for (int64_t i = 0; i < n; i++) {
            char *frame = s->frames.memory + i * p->block_bytes;
            int64_t tokens = min_i64(size, p->want.num_tokens - (first + i) * size);
            folioi_kv_clear_rest(&p->one, frame, (int32_t)tokens);
            memcpy(data + p->head_bytes + (first + i) * p->block_bytes, frame,
                   (size_t)p->block_bytes);
            const folioi_seal seal = block_seal(p, frame);
            memcpy(data + seal_offset(first + i), &seal, sizeof seal);
        }
    }
    return FOLIO_OK;
}

folio_status folio_kv_cache_export(const folio_kv_cache *cache, const folio_kv_blocks *blocks,
                                   void *data, size_t capacity, size_t *bytes, const folio_run *run)
{
    parcel p;
    REQUIRE(bytes != NULL, "folio_kv_cache_export: bytes is NULL");
    TRY(read_want(&p, cache, blocks, false, run));
    TRY(describe(&p, p.want.layout));
    if (data != NULL) {
        REQUIRE(capacity >= (size_t)p.total_bytes, "capacity is %zu; the export has %lld bytes",
                capacity, (long long)p.total_bytes);
        TRY(check_apart(&p, data, p.total_bytes));
        if (p.want.num_blocks > 0) {
            staging s;
            TRY(staging_make(&p, &s));
            folio_status status = export_blocks(&p, &s, data);
            staging_free(&s);
            if (status != FOLIO_OK) return status;
        }
        memcpy(data, &p.header, sizeof p.header); /* last: until then the data is no export */
        const folioi_seal seal = head_seal(&p, data);
        memcpy((char *)data + seal_offset(p.want.num_blocks), &seal, sizeof seal);
    }
    *bytes = (size_t)p.total_bytes;
    return FOLIO_OK;
}

/* --------------------------------------------------------------------------------------- import */

/* The layout that has this id, or NATIVE, which is then compared. */
static folio_layout layout_of(const folioi_disk_geometry *geometry)
{
    for (int i = FOLIO_LAYOUT_NATIVE + 1; i < FOLIO_LAYOUT_STRIDED; i++)
        if (strncmp(geometry->layout_id, folio_layout_name((folio_layout)i),
                    sizeof geometry->layout_id) == 0)
            return (folio_layout)i;
    return FOLIO_LAYOUT_NATIVE;
}

/* What must hold before any other byte means something. */
static folio_status check_form(const parcel *p, const export_header *there, size_t bytes)
{
    uint32_t version = le32toh(there->version), keyed = le32toh(there->keyed);
    REQUIRE(memcmp(there->magic, export_magic, sizeof export_magic) == 0,
            "import: the data is no export of KV blocks: it begins with other bytes");
    REQUIRE(version == EXPORT_VERSION,
            "import: the data has format version %u; this library reads version %d", version,
            EXPORT_VERSION);
    REQUIRE(le64toh((uint64_t)there->total_bytes) == bytes,
            "import: the data has %zu bytes, but its header says %llu", bytes,
            (unsigned long long)le64toh((uint64_t)there->total_bytes));
    int64_t n = (int64_t)le64toh((uint64_t)there->num_blocks);
    REQUIRE(n == p->want.num_blocks, "import: num_blocks is %lld there and %lld here", (long long)n,
            (long long)p->want.num_blocks);
    REQUIRE(bytes >= (size_t)p->head_bytes,
            "import: the data has %zu bytes; the head of %lld blocks has %lld", bytes, (long long)n,
            (long long)p->head_bytes);
    REQUIRE(keyed <= 1, "import: keyed is %u there, not 0 or 1", keyed);
    REQUIRE((keyed == 1) == (p->key.size > 0),
            "import: the data was sealed %s a key, here there is %s", keyed ? "with" : "without",
            keyed ? "none" : "one");
    return FOLIO_OK;
}

/* block -1: the head */
static folio_status check_seal(const parcel *p, const char *data, int64_t block)
{
    const char *reason = p->key.size > 0 ? "was sealed with another key, or is damaged"
                                         : "is damaged: its checksum is wrong";
    bool head = block < 0;
    folioi_seal seal, right = head ? head_seal(p, data)
                                   : block_seal(p, data + p->head_bytes + block * p->block_bytes);
    memcpy(&seal, data + seal_offset(head ? p->want.num_blocks : block), sizeof seal);
    REQUIRE(folioi_seal_equal(&seal, &right) || !head, "import: the data's head %s", reason);
    REQUIRE(folioi_seal_equal(&seal, &right), "import: block %lld of the data %s", (long long)block,
            reason);
    return FOLIO_OK;
}

/* Are these the blocks that the caller wants, whole, in a layout that the cache can take? */
static folio_status verify(parcel *p, const char *data, size_t bytes)
{
    export_header there;
    REQUIRE(data != NULL, "import: data is NULL");
    REQUIRE(bytes >= sizeof there, "import: the data has %zu bytes; a header has %zu", bytes,
            sizeof there);
    memcpy(&there, data, sizeof there);
    TRY(check_form(p, &there, bytes));
    TRY(check_seal(p, data, -1));
    TRY(folioi_passport_compare("import", &there.passport, &p->header.passport));
    TRY(describe(p, layout_of(&there.geometry)));
    TRY(folioi_geometry_compare("import", &there.geometry, &p->header.geometry));
    REQUIRE(there.num_tokens == p->header.num_tokens,
            "import: num_tokens is %lld there and %lld here",
            (long long)le64toh((uint64_t)there.num_tokens), (long long)p->want.num_tokens);
    REQUIRE(there.total_bytes == p->header.total_bytes,
            "import: the data has %zu bytes; its blocks need %lld", bytes,
            (long long)p->total_bytes);
    for (int64_t i = 0; i < p->want.num_blocks; i++) TRY(check_seal(p, data, i));
    return FOLIO_OK;
}

static folio_status import_blocks(const parcel *p, staging *s, const char *data)
{
    for (int64_t first = 0; first < p->want.num_blocks; first += s->frames.num) {
        int64_t n = min_i64(s->frames.num, p->want.num_blocks - first);
        memcpy(s->frames.memory, data + p->head_bytes + first * p->block_bytes,
               (size_t)(n * p->block_bytes));
        TRY(move(p, s, first, n, true));
    }
    return FOLIO_OK;
}

folio_status folio_kv_cache_import(folio_kv_cache *cache, const folio_kv_blocks *blocks,
                                   const void *data, size_t bytes, const folio_run *run)
{
    parcel p;
    TRY(read_want(&p, cache, blocks, true, run));
    TRY(verify(&p, data, bytes));
    TRY(check_apart(&p, data, p.total_bytes));
    if (p.want.num_blocks == 0) return FOLIO_OK;
    staging s;
    TRY(staging_make(&p, &s));
    folio_status status = import_blocks(&p, &s, data);
    staging_free(&s);
    return status;
}
