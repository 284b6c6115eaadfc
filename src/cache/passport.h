/*
 * passport.h: what K and V are, as bytes: what the caller states of them, the geometry of their blocks, and the seals
 * that say that bytes are whole. The store's file and exports carry it, in the same form: docs/kv-format.md.
 * Numbers are little-endian.
 */
#ifndef FOLIOI_PASSPORT_H
#define FOLIOI_PASSPORT_H

#include "cache/kv_layout.h"
#include "core/keyed_hash.h"

#define PASSPORT_MODEL_BYTES 256

/** How keys were rotated. All zero: they were not, or nothing is known. Fields that a scaling does not use are 0. */
typedef struct folioi_disk_rotary {
    int32_t
        number[6]; /* num_dims, first_dim, pairing, scaling, exact_bounds, source of the angles */
    int64_t original_len;
    uint64_t real
        [7]; /* bits of f64: theta, factor, low and high_freq_factor, beta_fast and _slow, magnitude */
    unsigned char table[FOLIOI_KEYED_HASH_BYTES]; /* BLAKE2b of frequencies, or of cos, then sin */
} folioi_disk_rotary;

/** Static scales of K or of V. */
typedef struct folioi_disk_scales {
    int64_t count;
    uint32_t first; /* bits of f32 */
    uint32_t zero;
    unsigned char table[FOLIOI_KEYED_HASH_BYTES]; /* BLAKE2b of all of them; zero: there are none */
} folioi_disk_scales;

/** What the caller states: a folio_kv_passport. */
typedef struct folioi_disk_passport {
    char model[PASSPORT_MODEL_BYTES]; /* terminated */
    folioi_disk_rotary rotary;
    folioi_disk_scales k_scales, v_scales;
} folioi_disk_passport;

/** What the cache knows of its blocks, each with all layers. */
typedef struct folioi_frame_geometry {
    int32_t num_layers, block_size, num_kv_heads, k_head_size, v_head_size, v_in_k, dtype;
    int32_t layout_version;
    char layout_id[24]; /* terminated */
    int64_t
        payload_bytes; /* of a whole block, the most a put may have; 0: a group without blocks */
} folioi_frame_geometry;

typedef struct folioi_disk_geometry {
    int32_t number[8]; /* num_layers .. layout_version, as folioi_frame_geometry has them */
    char layout_id[24];
    int64_t payload_bytes;
} folioi_disk_geometry;

_Static_assert(sizeof(folioi_disk_rotary) == 120 && sizeof(folioi_disk_scales) == 48, "on disk");
_Static_assert(sizeof(folioi_disk_passport) == 472, "on disk");
_Static_assert(sizeof(folioi_disk_geometry) == 64, "on disk");

/** p NULL: nothing is stated. */
folio_status folioi_passport_encode(const folio_kv_passport *p, folioi_disk_passport *out);
/** Equal, or a sentence with the first field that differs. `what` begins it: whose data it is. */
folio_status folioi_passport_compare(const char *what, const folioi_disk_passport *there,
                                     const folioi_disk_passport *here);

/** Of one block in this format. */
folioi_frame_geometry folioi_geometry_of(const folioi_kv_format *one);
folioi_disk_geometry folioi_geometry_encode(const folioi_frame_geometry *geometry);
folio_status folioi_geometry_compare(const char *what, const folioi_disk_geometry *there,
                                     const folioi_disk_geometry *here);

/** Says that bytes are whole and, with a key, that somebody who knows it wrote them. */
typedef struct folioi_seal {
    unsigned char byte[FOLIOI_KEYED_HASH_BYTES];
} folioi_seal;

/** What is sealed: one kind's seal is not another's. */
typedef enum folioi_sealed {
    FOLIOI_SEALED_SUPERBLOCK = 1,
    FOLIOI_SEALED_EPOCH,
    FOLIOI_SEALED_HEAD,
    FOLIOI_SEALED_PAYLOAD,
    FOLIOI_SEALED_SECRET,
    FOLIOI_SEALED_EXPORT_HEAD,
    FOLIOI_SEALED_EXPORT_BLOCK
} folioi_sealed;

/** A caller's key: 16..64 bytes, or none. name: its field. */
folio_status folioi_key_read(const char *name, const void *key, int32_t bytes, folioi_bytes *out);
/** The seal of a, then b. Without a key: a checksum that starts from `seed`. */
folioi_seal folioi_seal_make(folioi_bytes key, folioi_sealed what, folioi_bytes a, folioi_bytes b,
                             uint64_t seed);
bool folioi_seal_equal(const folioi_seal *a, const folioi_seal *b);

#endif
