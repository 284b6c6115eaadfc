/* passport.c: what K and V are, encoded and compared; passport.h has the bytes. */
#include "cache/passport.h"

#include "core/hash.h"
#include "core/rotary.h"

#include <endian.h>
#include <math.h>
#include <string.h>

static int32_t disk32(int32_t x) { return (int32_t)htole32((uint32_t)x); }
static int32_t host32(int32_t x) { return (int32_t)le32toh((uint32_t)x); }
static int64_t disk64(int64_t x) { return (int64_t)htole64((uint64_t)x); }
static int64_t host64(int64_t x) { return (int64_t)le64toh((uint64_t)x); }

static uint64_t disk_real(double x)
{
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return htole64(bits);
}

static double host_real(uint64_t disk)
{
    uint64_t bits = le64toh(disk);
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static const folioi_bytes no_bytes = {NULL, 0};

/* --------------------------------------------------------------------------------------- encode */

/* Fields that do not change the angles are left 0. */
static folio_status encode_rotary(const folio_rotary_desc *desc, folioi_disk_rotary *out)
{
    folio_rotary_desc d;
    TRY(folioi_rotary_read(desc, &d));
    bool by_theta = d.cos == NULL && d.frequencies == NULL;
    bool scaled = d.scaling != FOLIO_ROTARY_SCALE_NONE;
    bool yarn = d.scaling == FOLIO_ROTARY_SCALE_YARN;
    bool llama3 = d.scaling == FOLIO_ROTARY_SCALE_LLAMA3;
    const int32_t numbers[6] = {
        d.num_dims,         d.first_dim,           (int32_t)d.pairing,
        (int32_t)d.scaling, yarn * d.exact_bounds, d.cos != NULL ? 2 : !by_theta};
    const double reals[7] = {by_theta ? d.theta : 0,
                             scaled ? d.factor : 0,
                             llama3 ? d.low_freq_factor : 0,
                             llama3 ? d.high_freq_factor : 0,
                             yarn ? d.beta_fast : 0,
                             yarn ? d.beta_slow : 0,
                             d.magnitude};
    for (int i = 0; i < 6; i++) out->number[i] = disk32(numbers[i]);
    for (int i = 0; i < 7; i++) out->real[i] = disk_real(reals[i]);
    out->original_len = disk64(yarn || llama3 ? d.original_len : 0);
    size_t half = (size_t)d.num_dims / 2, table = (size_t)d.num_positions * half * sizeof(float);
    const folioi_bytes given[3] = {
        {d.frequencies, half * sizeof(double)}, {d.cos, table}, {d.sin, table}};
    if (d.frequencies != NULL) folioi_keyed_hash(no_bytes, given, 1, out->table);
    if (d.cos != NULL) folioi_keyed_hash(no_bytes, given + 1, 2, out->table);
    return FOLIO_OK;
}

static folio_status encode_scales(const float *scales, int64_t n, const char *name,
                                  folioi_disk_scales *out)
{
    if (scales == NULL) return FOLIO_OK;
    REQUIRE_ALIGNED(scales, "passport: %s", name);
    for (int64_t i = 0; i < n; i++)
        REQUIRE(isfinite(scales[i]) && scales[i] > 0,
                "passport: %s[%lld] is %g; it must be finite and above 0", name, (long long)i,
                (double)scales[i]);
    if (n == 0) return FOLIO_OK;
    const folioi_bytes all = {scales, (size_t)n * sizeof *scales};
    out->count = disk64(n);
    memcpy(&out->first, scales, sizeof out->first);
    out->first = htole32(out->first);
    folioi_keyed_hash(no_bytes, &all, 1, out->table);
    return FOLIO_OK;
}

folio_status folioi_passport_encode(const folio_kv_passport *passport, folioi_disk_passport *out)
{
    folio_kv_passport p;
    memset(out, 0, sizeof *out);
    if (passport == NULL) return FOLIO_OK;
    STRUCT_IN(p, passport, "folio_kv_passport");
    size_t model = p.model == NULL ? 0 : strlen(p.model);
    REQUIRE(model < PASSPORT_MODEL_BYTES, "the model's name has %zu bytes; the limit is %d", model,
            PASSPORT_MODEL_BYTES - 1);
    if (model > 0) memcpy(out->model, p.model, model);
    if (p.rotary != NULL) TRY(encode_rotary(p.rotary, &out->rotary));
    REQUIRE(p.num_scales >= 0 && p.num_scales <= INT32_MAX,
            "passport: num_scales is %lld, outside [0, 2147483647]", (long long)p.num_scales);
    TRY(encode_scales(p.k_scales, p.num_scales, "k_scales", &out->k_scales));
    return encode_scales(p.v_scales, p.num_scales, "v_scales", &out->v_scales);
}

folioi_frame_geometry folioi_geometry_of(const folioi_kv_format *one)
{
    const folio_kv_cache_desc *d = &one->desc;
    folioi_frame_geometry g = {.num_layers = d->num_layers,
                               .block_size = d->block_size,
                               .num_kv_heads = d->num_kv_heads,
                               .k_head_size = d->k_head_size,
                               .v_head_size = d->v_head_size,
                               .v_in_k = d->v_in_k,
                               .dtype = (int32_t)d->dtype,
                               .layout_version = FOLIOI_LAYOUT_VERSION,
                               .payload_bytes = one->layer_bytes * d->num_layers};
    strncpy(g.layout_id, folioi_layout_id(one), sizeof g.layout_id - 1);
    return g;
}

folioi_disk_geometry folioi_geometry_encode(const folioi_frame_geometry *g)
{
    const int32_t numbers[8] = {g->num_layers,  g->block_size, g->num_kv_heads, g->k_head_size,
                                g->v_head_size, g->v_in_k,     g->dtype,        g->layout_version};
    folioi_disk_geometry disk = {.payload_bytes = disk64(g->payload_bytes)};
    for (int i = 0; i < 8; i++) disk.number[i] = disk32(numbers[i]);
    memcpy(disk.layout_id, g->layout_id, strnlen(g->layout_id, sizeof g->layout_id - 1));
    return disk;
}

/* -------------------------------------------------------------------------------------- compare */

/* Text of others as a sentence may show it: one line of ASCII. */
static const char *shown(const char *text, size_t bytes, char *room)
{
    size_t n = strnlen(text, bytes - 1);
    for (size_t i = 0; i < n; i++) room[i] = text[i] >= ' ' && text[i] <= '~' ? text[i] : '?';
    room[n] = 0;
    return room;
}

static folio_status compare_text(const char *what, const char *field, const char *there,
                                 const char *here, size_t bytes)
{
    char a[PASSPORT_MODEL_BYTES], b[PASSPORT_MODEL_BYTES];
    REQUIRE(memcmp(there, here, bytes) == 0, "%s: %s is \"%s\" there and \"%s\" here", what, field,
            shown(there, bytes, a), shown(here, bytes, b));
    return FOLIO_OK;
}

static folio_status compare_numbers(const char *what, const char *const *fields, int n,
                                    const int32_t *there, const int32_t *here)
{
    for (int i = 0; i < n; i++)
        REQUIRE(there[i] == here[i], "%s: %s is %d there and %d here", what, fields[i],
                host32(there[i]), host32(here[i]));
    return FOLIO_OK;
}

/* A digest's first bytes; it stands for numbers that are not in the passport. */
static uint32_t digest_of(const unsigned char *table)
{
    return (uint32_t)table[0] << 24 | (uint32_t)table[1] << 16 | (uint32_t)table[2] << 8 | table[3];
}

static const char *angles_from(const folioi_disk_rotary *rotary)
{
    static const char *const names[] = {"theta", "frequencies", "cos and sin"};
    uint32_t source = (uint32_t)host32(rotary->number[5]);
    return source < 3 ? names[source] : "unknown angles";
}

static folio_status compare_rotary(const char *what, const folioi_disk_rotary *there,
                                   const folioi_disk_rotary *here)
{
    static const char *const numbers[5] = {"rotary.num_dims", "rotary.first_dim", "rotary.pairing",
                                           "rotary.scaling", "rotary.exact_bounds"};
    static const char *const reals[7] = {
        "theta",     "factor",    "low_freq_factor", "high_freq_factor",
        "beta_fast", "beta_slow", "magnitude"};
    bool rotated = there->number[0] != 0;
    REQUIRE(rotated == (here->number[0] != 0), "%s: rotary is %s there and %s here", what,
            rotated ? "given" : "none", rotated ? "none" : "given");
    TRY(compare_numbers(what, numbers, 5, there->number, here->number));
    REQUIRE(there->number[5] == here->number[5], "%s: rotary has %s there and %s here", what,
            angles_from(there), angles_from(here));
    REQUIRE(there->original_len == here->original_len,
            "%s: rotary.original_len is %lld there and %lld here", what,
            (long long)host64(there->original_len), (long long)host64(here->original_len));
    for (int i = 0; i < 7; i++)
        REQUIRE(there->real[i] == here->real[i], "%s: rotary.%s is %.17g there and %.17g here",
                what, reals[i], host_real(there->real[i]), host_real(here->real[i]));
    REQUIRE(memcmp(there->table, here->table, sizeof here->table) == 0,
            "%s: the hash of rotary's %s begins with %08x there and %08x here", what,
            angles_from(here), digest_of(there->table), digest_of(here->table));
    return FOLIO_OK;
}

static folio_status compare_scales(const char *what, const char *field,
                                   const folioi_disk_scales *there, const folioi_disk_scales *here)
{
    REQUIRE(there->count == here->count, "%s: %s are %lld numbers there and %lld here", what, field,
            (long long)host64(there->count), (long long)host64(here->count));
    uint32_t bits[2] = {le32toh(there->first), le32toh(here->first)};
    float first[2];
    memcpy(first, bits, sizeof first);
    REQUIRE(bits[0] == bits[1] && there->zero == here->zero,
            "%s: %s[0] is %.9g there and %.9g here", what, field, (double)first[0],
            (double)first[1]);
    REQUIRE(memcmp(there->table, here->table, sizeof here->table) == 0,
            "%s: the hash of %s begins with %08x there and %08x here", what, field,
            digest_of(there->table), digest_of(here->table));
    return FOLIO_OK;
}

folio_status folioi_passport_compare(const char *what, const folioi_disk_passport *there,
                                     const folioi_disk_passport *here)
{
    TRY(compare_text(what, "model", there->model, here->model, sizeof here->model));
    TRY(compare_rotary(what, &there->rotary, &here->rotary));
    TRY(compare_scales(what, "k_scales", &there->k_scales, &here->k_scales));
    return compare_scales(what, "v_scales", &there->v_scales, &here->v_scales);
}

folio_status folioi_geometry_compare(const char *what, const folioi_disk_geometry *there,
                                     const folioi_disk_geometry *here)
{
    static const char *const names[8] = {"num_layers",  "block_size",    "num_kv_heads",
                                         "k_head_size", "v_head_size",   "v_in_k",
                                         "dtype",       "layout_version"};
    folio_dtype a = (folio_dtype)host32(there->number[6]), b = (folio_dtype)host32(here->number[6]);
    REQUIRE(a == b, "%s: dtype is %d (%s) there and %d (%s) here", what, (int)a,
            folio_dtype_name(a), (int)b, folio_dtype_name(b));
    TRY(compare_numbers(what, names, 8, there->number, here->number));
    TRY(compare_text(what, "layout_id", there->layout_id, here->layout_id, sizeof here->layout_id));
    REQUIRE(there->payload_bytes == here->payload_bytes,
            "%s: a block has %lld bytes there and %lld here", what,
            (long long)host64(there->payload_bytes), (long long)host64(here->payload_bytes));
    return FOLIO_OK;
}

/* ---------------------------------------------------------------------------------------- seals */

folio_status folioi_key_read(const char *name, const void *key, int32_t bytes, folioi_bytes *out)
{
    REQUIRE(bytes == 0 || (bytes >= 16 && bytes <= FOLIOI_KEYED_HASH_MOST_KEY),
            "%s_bytes is %d, outside [16, %d]", name, bytes, FOLIOI_KEYED_HASH_MOST_KEY);
    REQUIRE((key == NULL) == (bytes == 0), "%s is %s and %s_bytes %d", name,
            key == NULL ? "NULL" : "given", name, bytes);
    *out = (folioi_bytes){key, (size_t)bytes};
    return FOLIO_OK;
}

folioi_seal folioi_seal_make(folioi_bytes key, folioi_sealed what, folioi_bytes a, folioi_bytes b,
                             uint64_t seed)
{
    folioi_seal seal = {{0}};
    if (key.size > 0) {
        const unsigned char kind[1] = {(unsigned char)what};
        const folioi_bytes all[] = {{kind, 1}, a, b};
        folioi_keyed_hash(key, all, 3, seal.byte);
        return seal;
    }
    uint64_t sum = XXH3_64bits_withSeed(a.data, a.size, seed);
    if (what == FOLIOI_SEALED_HEAD) sum = XXH3_64bits_withSeed(b.data, b.size, sum);
    sum = htole64(sum);
    memcpy(seal.byte, &sum, sizeof sum);
    return seal;
}

/* In the same time for all: what of a forged seal is right cannot be measured. */
bool folioi_seal_equal(const folioi_seal *a, const folioi_seal *b)
{
    unsigned difference = 0;
    for (size_t i = 0; i < sizeof a->byte; i++) difference |= a->byte[i] ^ b->byte[i];
    return difference == 0;
}
