/*
 * fuzz_import.c: blocks that are exported, damaged and imported. What was not damaged arrives bit for bit. What is
 * rejected writes nothing. Some damage gets a right checksum again, so that the fields behind it are read too.
 */
#include "fuzz/fuzz.h"

#include "core/hash.h"

#include <stdlib.h>

const char fuzz_name[] = "import";
enum { BLOCKS = 4, HEADER = 576, SEAL = 32 }; /* docs/kv-format.md */

static folio_kv_cache *make_cache(fuzz_input *in, folio_context *ctx, folio_kv_cache_desc d)
{
    folio_kv_cache *cache = NULL;
    if (!fuzz_took(folio_kv_cache_create(ctx, &d, &cache))) return NULL;
    int64_t tokens = d.num_blocks * d.block_size;
    int64_t slots[BLOCKS * 32];
    for (int64_t i = 0; i < tokens; i++) slots[i] = i;
    folio_kv_write write = FOLIO_WITH(folio_kv_write, .slots = slots);
    write.k = (folio_tensor){fuzz_numbers(in, FOLIO_F32, tokens * d.num_kv_heads * d.k_head_size),
                             FOLIO_F32, tokens, 0, 0};
    write.v = (folio_tensor){fuzz_numbers(in, FOLIO_F32, tokens * d.num_kv_heads * d.k_head_size),
                             FOLIO_F32, tokens, 0, 0};
    if (d.v_in_k) write.v = (folio_tensor){.data = NULL};
    for (int32_t l = 0; l < d.num_layers; l++)
        fuzz_took(folio_kv_cache_write(cache, l, &write, NULL));
    return cache;
}

static folio_kv_cache_desc draw_desc(fuzz_input *in)
{
    static const folio_layout layouts[] = {FOLIO_LAYOUT_NATIVE, FOLIO_LAYOUT_NHD, FOLIO_LAYOUT_HND};
    static const int32_t sizes[] = {16, 1, 5};
    return FOLIO_WITH(folio_kv_cache_desc, .num_blocks = BLOCKS,
                      .num_layers = (int32_t)fuzz_int(in, 1, 2), .block_size = FUZZ_PICK(in, sizes),
                      .num_kv_heads = (int32_t)fuzz_int(in, 1, 2), .k_head_size = 16,
                      .dtype = (folio_dtype)fuzz_int(in, FOLIO_F32, FOLIO_INT8),
                      .layout = FUZZ_PICK(in, layouts), .v_in_k = fuzz_chance(in, 6));
}

/* The checksum of n bytes, as the format has it. */
static void seal(unsigned char *to, const void *data, size_t n)
{
    uint64_t sum = XXH3_64bits(data, n);
    memset(to, 0, SEAL);
    for (int i = 0; i < 8; i++) to[i] = (unsigned char)(sum >> 8 * i);
}

/* Some bytes, anywhere or in the header, get other values. Did the checksums follow? */
static bool damage(fuzz_input *in, unsigned char *data, size_t bytes, int64_t num_blocks)
{
    size_t head = HEADER + (size_t)(num_blocks + 1) * SEAL,
           block = (bytes - head) / (size_t)num_blocks;
    for (int64_t n = fuzz_int(in, 1, 4); n > 0; n--) {
        int64_t most = fuzz_chance(in, 2) ? (int64_t)bytes : HEADER;
        data[fuzz_int(in, 0, most - 1)] ^= (unsigned char)fuzz_int(in, 1, 255);
    }
    if (fuzz_chance(in, 3)) return false;
    for (int64_t i = 0; i < num_blocks; i++)
        seal(data + HEADER + i * SEAL, data + head + (size_t)i * block, block);
    seal(data + head - SEAL, data, head - SEAL);
    return true;
}

static void send_blocks(fuzz_input *in, folio_kv_cache *from, folio_kv_cache *to,
                        int32_t block_size)
{
    static const int64_t out[BLOCKS] = {2, 0, 3, 1}, back[BLOCKS] = {1, 3, 0, 2};
    static const char *const models[] = {NULL, "a", "another model"};
    folio_kv_passport passport = FOLIO_WITH(folio_kv_passport, .model = FUZZ_PICK(in, models));
    float scales[2] = {0.5F, 2};
    if (fuzz_chance(in, 3)) passport.k_scales = scales, passport.num_scales = 2;
    int64_t n = fuzz_int(in, 1, 3);
    folio_kv_blocks what = FOLIO_WITH(
        folio_kv_blocks, .blocks = out, .num_blocks = n,
        .num_tokens = fuzz_any(in, (n - 1) * block_size + 1, n * block_size), .passport = &passport,
        .key = "0123456789abcdef", .key_bytes = fuzz_chance(in, 3) ? 16 : 0,
        .layout = fuzz_chance(in, 2) ? FOLIO_LAYOUT_NHD : 0);
    if (what.key_bytes == 0) what.key = NULL;
    size_t bytes = 0, again = 0;
    if (!fuzz_took(folio_kv_cache_export(from, &what, NULL, 0, &bytes, NULL))) return;
    unsigned char *data = fuzz_zeros(in, (int64_t)bytes, 1),
                  *sent = fuzz_zeros(in, (int64_t)bytes, 1);
    fuzz_took(folio_kv_cache_export(from, &what, sent, bytes, &again, NULL));
    FUZZ_CHECK(again == bytes, "%zu bytes, then %zu", bytes, again);
    memcpy(data, sent, bytes);
    bool is_short = fuzz_chance(in, 8), follows = fuzz_chance(in, 2) && damage(in, data, bytes, n);
    size_t given = is_short ? (size_t)fuzz_int(in, 0, (int64_t)bytes - 1) : bytes;
    unsigned char *exact = fuzz_zeros(in, (int64_t)given, 1);
    if (given > 0) memcpy(exact, data, given);
    bool damaged = memcmp(data, sent, bytes) != 0;
    what.blocks = back;
    uint64_t before = kit_hash_cache(to);
    bool took = fuzz_took(folio_kv_cache_import(to, &what, exact, given, NULL));
    FUZZ_CHECK(took || kit_hash_cache(to) == before, "a rejected import wrote");
    FUZZ_CHECK(!took || !is_short, "%zu of %zu bytes were taken", given, bytes);
    FUZZ_CHECK(!took || !damaged || (follows && what.key_bytes == 0), "damage was taken");
    FUZZ_CHECK(took || damaged || is_short, "what was exported is rejected");
    if (!took || damaged) return;
    fuzz_took(folio_kv_cache_export(to, &what, data, bytes, &again, NULL));
    FUZZ_CHECK(memcmp(data, sent, bytes) == 0, "blocks arrived with other bits");
}

void fuzz_run(fuzz_input *in)
{
    folio_context *ctx = fuzz_context(fuzz_int(in, 0, 1));
    folio_kv_cache_desc d = draw_desc(in);
    folio_kv_cache *from = make_cache(in, ctx, d), *to = make_cache(in, ctx, d);
    if (from != NULL && to != NULL) send_blocks(in, from, to, d.block_size);
    folio_kv_cache_destroy(from);
    folio_kv_cache_destroy(to);
}
