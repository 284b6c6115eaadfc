/* vllm06_same_backend.c: descriptions and caches, the same for all three originals; see vllm06_rig.h. */
#include "vllm06/vllm06_rig.h"

typedef struct {
    const char *name, *aliases[3], *cls, *impl, *metadata, *builder;
} original_names;

static const original_names originals[] = {
    {"xformers",
     {"XFORMERS", "XFormersBackend"},
     "XFormersBackend",
     "XFormersImpl",
     "XFormersMetadata",
     "XFormersMetadataBuilder"},
    {"torch-sdpa",
     {"TORCH_SDPA", "TorchSDPABackend"},
     "TorchSDPABackend",
     "TorchSDPABackendImpl",
     "TorchSDPAMetadata",
     "TorchSDPAMetadataBuilder"},
    {"torch-sdpa-ipex",
     {NULL},
     "TorchSDPABackend",
     "TorchSDPABackendImpl",
     "TorchSDPAMetadata",
     "TorchSDPAMetadataBuilder"},
    {"ipex",
     {"ipex-attn", "IPEX", "IpexAttnBackend"},
     "IpexAttnBackend",
     "IpexAttnBackendImpl",
     "IpexAttnMetadata",
     "CommonMetadataBuilder"},
};

V06_TEST(get_name)
{
    const original_names *n = originals;
    while (strcmp(n->name, r->b->name) != 0) n++;
    const folio_vllm06_backend *b = r->b;
    CHECK(b->struct_size >= sizeof *b);
    CHECK(strcmp(b->name, n->name) == 0 && strcmp(b->backend_cls, n->cls) == 0);
    CHECK(strcmp(b->impl_cls, n->impl) == 0 && strcmp(b->metadata_cls, n->metadata) == 0);
    CHECK(strcmp(b->builder_cls, n->builder) == 0);
    for (int i = 0; i < 3 && n->aliases[i] != NULL; i++)
        CHECK(folio_vllm06_backend_find(n->aliases[i]) == b);
    CHECK(folio_vllm06_backend_find("xformer") == NULL);
    CHECK(folio_vllm06_backend_find("xformers2") == NULL);
    CHECK(folio_vllm06_backend_find("") == NULL);
    CHECK(folio_vllm06_backend_find(NULL) == NULL);
}

/* Descriptions are the library's: a copy, or none, is refused by every call that takes one. */
V06_TEST(classes)
{
    v06_open(r);
    const folio_vllm06_backend copy = *r->b, *const bad[] = {&copy, NULL};
    static const char *const words[] = {"folio_vllm06_backend_find", "is NULL"};
    folio_vllm06_metadata_fields f = {.struct_size = sizeof f};
    folio_vllm06_builder_desc d = {.struct_size = sizeof d, .block_size = 8};
    folio_vllm06_graph_capture_desc g = {.struct_size = sizeof g, .block_size = 8};
    g.max_batch_size = g.max_seq_len_to_capture = 1;
    for (int i = 0; i < 2; i++) {
        folio_vllm06_impl *impl;
        folio_vllm06_metadata *m;
        folio_vllm06_builder *builder;
        folio_vllm06_cache_view k, v;
        g.attn_backend = bad[i];
        REJECTED(folio_vllm06_make_impl(r->state, bad[i], &r->d, &impl), words[i]);
        REJECTED(folio_vllm06_make_metadata(r->state, bad[i], &f, &m), words[i]);
        REJECTED(folio_vllm06_builder_create(r->state, bad[i], &d, &builder), words[i]);
        REJECTED(folio_vllm06_split_kv_cache(bad[i], &r->kv[0], &k, &v), words[i]);
        REJECTED(folio_vllm06_graph_capture_begin(r->state, &g), words[i]);
    }
}

V06_TEST(split_kv_cache)
{
    static const folio_dtype dtypes[] = {FOLIO_F32, FOLIO_F16, FOLIO_BF16, FOLIO_FP8_E4M3};
    const folio_vllm06_backend *b = r->b;
    static char memory[40000], other[40000];
    folio_vllm06_cache_view k, v;
    for (int i = 0; i < COUNT_OF(dtypes); i++) {
        int64_t elem = (int64_t)folio_dtype_size(dtypes[i]);
        int64_t x = strcmp(r->b->name, "ipex") == 0 ? 1 : 16 / elem;
        folio_vllm06_kv_cache c = {.key_cache = memory,
                                   .bytes = (size_t)(2 * 10 * 8 * 3 * 80 * elem),
                                   .dtype = dtypes[i],
                                   .block_size = 8,
                                   .num_kv_heads = 3,
                                   .head_size = 80,
                                   .num_blocks = 10};
        CHECK_OK(folio_vllm06_split_kv_cache(b, &c, &k, &v));
        CHECK(k.data == memory && (char *)v.data - memory == 10 * 8 * 3 * 80 * elem);
        CHECK(v.num_dims == 4 && v.dims[0] == 10 && v.dims[1] == 3);
        CHECK(k.dims[0] == 10 && k.dims[1] == 3);
        if (strcmp(r->b->name, "torch-sdpa-ipex") == 0) {
            CHECK(k.num_dims == 4 && k.dims[2] == 8 && k.dims[3] == 80);
            CHECK(v.dims[2] == 8 && v.dims[3] == 80);
        } else {
            CHECK(k.num_dims == 5 && k.dims[2] == 80 / x && k.dims[3] == 8 && k.dims[4] == x);
            CHECK(v.dims[2] == 80 && v.dims[3] == 8);
        }
    }
    /* K and V as two tensors */
    folio_vllm06_kv_cache c = {memory, other, 10 * 16 * 2 * 120, FOLIO_FP8_E4M3, 16, 2, 120, 10};
    bool packs = strcmp(r->b->name, "xformers") == 0 || strcmp(r->b->name, "torch-sdpa") == 0;
    if (packs) REJECTED(folio_vllm06_split_kv_cache(b, &c, &k, &v), "120|16");
    c.head_size = 112;
    CHECK_OK(folio_vllm06_split_kv_cache(b, &c, &k, &v));
    CHECK(k.data == memory && v.data == other);
    REJECTED(folio_vllm06_split_kv_cache(b, NULL, &k, &v), "kv_cache is NULL");
    REJECTED(folio_vllm06_split_kv_cache(b, &c, NULL, &v), "NULL");
    REJECTED(folio_vllm06_split_kv_cache(b, &c, &k, NULL), "NULL");
    const folio_vllm06_kv_cache bad[] = {{NULL, other, c.bytes, c.dtype, 16, 2, 112, 10},
                                         {memory, other, c.bytes, (folio_dtype)99, 16, 2, 112, 10},
                                         {memory, other, c.bytes, c.dtype, 16, 0, 112, 10},
                                         {memory, other, c.bytes, c.dtype, 16, 2, 0, 10},
                                         {memory, other, c.bytes, c.dtype, 0, 2, 112, 10},
                                         {memory, other, c.bytes, c.dtype, 16, 2, 112, 11},
                                         {memory, NULL, c.bytes, c.dtype, 16, 2, 112, 10}};
    static const char *const words[] = {"key_cache is NULL",
                                        "99",
                                        "0 kv heads",
                                        "2 kv heads x 0",
                                        "0 tokens",
                                        "39424 bytes each; bytes is 38400",
                                        "71680 bytes, K and V in one allocation; bytes is 38400"};
    for (int i = 0; i < COUNT_OF(bad); i++)
        REJECTED(folio_vllm06_split_kv_cache(b, &bad[i], &k, &v), words[i]);
}

V06_TEST_OF("xformers", get_kv_cache_shape)
{
    (void)r;
    int64_t shape[3] = {0, 0, 0};
    CHECK_OK(folio_vllm06_get_kv_cache_shape(100, 16, 8, 128, shape));
    CHECK(shape[0] == 2 && shape[1] == 100 && shape[2] == 16 * 8 * 128);
    CHECK_OK(folio_vllm06_get_kv_cache_shape(7, 32, 3, 80, shape));
    CHECK(shape[0] == 2 && shape[1] == 7 && shape[2] == 32 * 3 * 80);
    shape[0] = 77;
    REJECTED(folio_vllm06_get_kv_cache_shape(0, 16, 8, 128, shape), "0 blocks");
    REJECTED(folio_vllm06_get_kv_cache_shape(1, -1, 8, 128, shape), "-1");
    REJECTED(folio_vllm06_get_kv_cache_shape(1, 0, 8, 128, shape), "0 tokens");
    REJECTED(folio_vllm06_get_kv_cache_shape(1, 16, 0, 128, shape), "0 kv heads");
    REJECTED(folio_vllm06_get_kv_cache_shape(1, 16, 8, 0, shape), "size");
    REJECTED(folio_vllm06_get_kv_cache_shape(INT64_MAX / 8, 1, 1, 1, shape), "size");
    REJECTED(folio_vllm06_get_kv_cache_shape(INT64_MAX, 16, 8, 128, shape), "size");
    REJECTED(folio_vllm06_get_kv_cache_shape(1, 1, 1, 1, NULL), "NULL");
    CHECK_INT(shape[0], 77);
}

/* ------------------------------------------------------------------------------- moves of blocks */

static size_t block_bytes(const folio_vllm06_kv_cache *c)
{
    return (size_t)(c->block_size * c->num_kv_heads * c->head_size) * folio_dtype_size(c->dtype);
}

/* A block's keys (part 0) or values (part 1) in the image of the layer whose memory the cache describes. */
static unsigned char *image_of(const v06 *r, const folio_vllm06_kv_cache *c, int64_t block,
                               int part)
{
    int layer = (char *)c->key_cache == (char *)r->kv[1].key_cache;
    size_t n = block_bytes(c), values = (size_t)c->num_blocks * n;
    if (c->value_cache != NULL) values = (size_t)((char *)c->value_cache - (char *)c->key_cache);
    return r->image[layer] + (part ? values : 0) + (size_t)block * n;
}

static void expect_move(const v06 *r, const folio_vllm06_kv_cache *from,
                        const folio_vllm06_kv_cache *to, const folio_block_pair *pairs, int n)
{
    for (int i = 0; i < 2 * n; i++)
        memcpy(image_of(r, to, pairs[i / 2].to, i % 2), image_of(r, from, pairs[i / 2].from, i % 2),
               block_bytes(from));
}

/* Caches of two layers: other numbers in each block of both, in f16. */
static void fill_caches(v06 *r)
{
    r->d.dtype = FOLIO_F16;
    v06_open(r);
    for (int l = 0; l < V06_LAYERS; l++) {
        support_fill((float *)(void *)r->image[l], (int64_t)(r->cache[l].bytes / 4),
                     5 + (uint64_t)l, 9);
        memcpy(r->cache[l].data, r->image[l], r->cache[l].bytes);
    }
}

/* Pairs that every move refuses; within one cache also a chain. */
static void bad_pairs(const v06 *r, const folio_vllm06_kv_cache *from,
                      const folio_vllm06_kv_cache *to)
{
    int64_t n = r->num_blocks;
    const struct {
        folio_block_pair pairs[2];
        const char *words;
        bool chain;
    } bad[] = {{{{9, 3}, {n, 4}}, "(from)[1]|outside [0,", false},
               {{{9, 3}, {-1, 4}}, "(from)[1] = -1 is outside [0,", false},
               {{{9, 3}, {8, -1}}, "(to)[1] = -1 is outside [0,", false},
               {{{9, 3}, {2, n}}, "(to)[1]|outside [0,", false},
               {{{9, 3}, {8, 3}}, "(to)[1] = 3 is written twice", false},
               {{{9, 3}, {3, 4}}, "block 3 is both read and written", true},
               {{{3, 4}, {9, 3}}, "block 3 is both read and written", true}};
    for (int i = 0; i < COUNT_OF(bad); i++) {
        if (bad[i].chain && from != to) continue;
        REJECTED(folio_vllm06_swap_blocks(r->state, from, to, bad[i].pairs, 2, NULL), bad[i].words);
        if (from == to)
            REJECTED(folio_vllm06_copy_blocks(r->state, from, 1, bad[i].pairs, 2, NULL),
                     bad[i].words);
    }
}

/* One thing in which a cache differs from others; of the same number of blocks it needs no more memory. */
static folio_vllm06_kv_cache changed(folio_vllm06_kv_cache c, int change)
{
    if (change == 0) c.block_size /= 2;
    if (change == 1) c.num_kv_heads /= 2;
    if (change == 2) c.head_size /= 2;
    if (change == 3) c.dtype = FOLIO_FP8_E4M3;
    if (change == 4) c.dtype = FOLIO_BF16;
    if (change == 5) c = v06_in_two(&c);
    return c;
}

/* In the caches of all layers, which differ in one thing. */
V06_TEST(copy_blocks)
{
    const folio_block_pair pairs[] = {{9, 1}, {9, 0}, {8, 2}}, fresh[] = {{9, 5}};
    fill_caches(r);
    for (int change = 0; change < 2 * 7; change++) {
        folio_vllm06_kv_cache caches[] = {r->kv[0], r->kv[1]};
        caches[change % 2] = changed(caches[change % 2], change / 2);
        CHECK_OK(folio_vllm06_copy_blocks(r->state, caches, 2, pairs, 3, NULL));
        for (int l = 0; l < 2; l++) expect_move(r, &caches[l], &caches[l], pairs, 3);
        v06_check_images(r);
        for (int l = 0; l < 2; l++) /* other numbers for the next */
            for (int k = 0; k < 2; k++) image_of(r, &r->kv[l], 9, k)[0] = (unsigned char)change;
        for (int l = 0; l < 2; l++) memcpy(r->cache[l].data, r->image[l], r->cache[l].bytes);
    }
    CHECK_OK(folio_vllm06_copy_blocks(r->state, NULL, 0, fresh, 1, NULL)); /* none at all */
    bad_pairs(r, &r->kv[0], &r->kv[0]);
    REJECTED(folio_vllm06_copy_blocks(r->state, NULL, 2, fresh, 1, NULL), "NULL");
    REJECTED(folio_vllm06_copy_blocks(NULL, r->kv, 2, fresh, 1, NULL), "state");
    REJECTED(folio_vllm06_copy_blocks(r->state, r->kv, -1, fresh, 1, NULL), "[0, 2147483647]");
    REJECTED(folio_vllm06_copy_blocks(r->state, r->kv, INT64_MAX, fresh, 1, NULL), "num_caches");
    for (int i = 0; i < 2; i++) { /* the last is refused before the first is written */
        folio_vllm06_kv_cache caches[] = {r->kv[0], changed(r->kv[1], 2)};
        if (i) caches[1].bytes = 1;
        else caches[1].num_blocks--;
        REJECTED(folio_vllm06_copy_blocks(r->state, caches, 2, fresh, 1, NULL),
                 i ? "bytes is" : "caches[1] has|kv_caches[0]");
    }
    folio_vllm06_kv_cache tiny = changed(changed(r->kv[0], 2), 1);
    tiny.block_size = 1; /* 16 numbers are moved, 4 are not */
    CHECK_OK(folio_vllm06_copy_blocks(r->state, &tiny, 1, fresh, 1, NULL));
    expect_move(r, &tiny, &tiny, fresh, 1);
    tiny.head_size = 4;
    REJECTED(folio_vllm06_copy_blocks(r->state, &tiny, 1, fresh, 1, NULL), "multiple of 8");
    v06_check_images(r);
}

/* One cache as source and target, told by its memory: the order of the copies must not matter. */
static void swap_within_one(const v06 *r)
{
    const folio_block_pair pairs[] = {{9, 7}, {9, 6}};
    bool placed = strcmp(r->compute, "cuda") == 0; /* there each array gets a place of its own */
    const folio_vllm06_kv_cache *one = &r->kv[0], again = placed ? *one : v06_in_two(one);
    CHECK_OK(folio_vllm06_swap_blocks(r->state, one, placed ? one : &again, pairs, 2, NULL));
    expect_move(r, one, one, pairs, 2);
    v06_check_images(r);
    bad_pairs(r, one, one);
    const folio_block_pair chain[] = {{9, 11}, {11, 13}};
    REJECTED(folio_vllm06_swap_blocks(r->state, one, &again, chain, 2, NULL), "block 11 is both");
    if (placed) return;
    const folio_block_pair first[] = {{0, 0}};
    folio_vllm06_kv_cache last = again; /* one block: the last of the keys, or of the values */
    last.num_blocks = 1;
    last.bytes = block_bytes(&last);
    for (int i = 0; i < 8; i++) {
        static const char *const names[] = {"key_cache", "value_cache"};
        int part = i % 2, as = i / 2 % 2;
        char words[64];
        char *at = (char *)(part ? again.value_cache : again.key_cache) + again.bytes - last.bytes;
        last.key_cache = as ? r->kv[1].key_cache : at;
        last.value_cache = as ? at : r->kv[1].key_cache;
        snprintf(words, sizeof words, "dst %s and src %s share memory", names[i < 4 ? part : as],
                 names[i < 4 ? as : part]);
        REJECTED(folio_vllm06_swap_blocks(r->state, i < 4 ? &last : &again, i < 4 ? &again : &last,
                                          first, 1, NULL),
                 words);
    }
    for (int change = 0; change < 5; change++) {
        const folio_vllm06_kv_cache other = changed(*one, change);
        REJECTED(folio_vllm06_swap_blocks(r->state, one, &other, first, 1, NULL), "share memory");
    }
}

/* Into another cache, also one of two tensors or with fewer blocks: its values begin where its keys end. */
V06_TEST(swap_blocks)
{
    fill_caches(r);
    const folio_vllm06_kv_cache two = v06_in_two(&r->kv[1]);
    folio_vllm06_kv_cache fewer = r->kv[1];
    const folio_block_pair pairs[] = {{9, 1}, {9, 0}, {8, 2}}, beyond[] = {{9, 2}, {8, 3}};
    CHECK_OK(folio_vllm06_swap_blocks(r->state, &r->kv[0], &two, pairs, 3, NULL));
    expect_move(r, &r->kv[0], &two, pairs, 3);
    CHECK_OK(folio_vllm06_swap_blocks(r->state, &r->kv[1], &r->kv[0], beyond, 1, NULL));
    expect_move(r, &r->kv[1], &r->kv[0], beyond, 1);
    v06_check_images(r);
    fewer.num_blocks = 3;
    REJECTED(folio_vllm06_swap_blocks(r->state, &r->kv[0], &fewer, beyond, 2, NULL),
             "pairs (to)[1] = 3 is outside [0, 3)");
    CHECK_OK(folio_vllm06_swap_blocks(r->state, &r->kv[0], &fewer, beyond, 1, NULL));
    expect_move(r, &r->kv[0], &fewer, beyond, 1);
    v06_check_images(r);
    bad_pairs(r, &r->kv[0], &r->kv[1]);
    for (int change = 0; change < 5; change++) {
        const folio_vllm06_kv_cache other = changed(r->kv[1], change);
        const char *words = change < 3 ? "geometries differ" : "dtypes differ, f16 and";
        REJECTED(folio_vllm06_swap_blocks(r->state, &r->kv[0], &other, pairs, 2, NULL), words);
    }
    REJECTED(folio_vllm06_swap_blocks(r->state, &r->kv[0], NULL, pairs, 2, NULL), "dst");
    REJECTED(folio_vllm06_swap_blocks(r->state, NULL, &r->kv[0], pairs, 2, NULL), "src");
    REJECTED(folio_vllm06_swap_blocks(NULL, &r->kv[0], &r->kv[1], pairs, 2, NULL), "state");
    swap_within_one(r);
    v06_check_images(r);
}

/* ---------------------------------------------------------------------------------------- sizes */

/* Every size that is listed, and others: 40, and blocks of 24, which do not divide a partition of 512 keys. */
V06_TEST(supported_sizes)
{
    static const int32_t sizes[] = {32, 64, 80, 96, 112, 120, 128, 192, 256, 40};
    static const int32_t of_ipex[] = {32, 64, 80, 96, 112, 128, 256}; /* IPEX's own operators */
    static const int32_t blocks[] = {8, 16, 32, 24};
    static const v06_seq prompts[] = {{0, true, 9, 9, 0}}, decodes[] = {{0, false, 1, 10, 0}};
    bool own = strcmp(r->b->name, "torch-sdpa-ipex") == 0;
    const folio_vllm06_backend *b = r->b;
    CHECK_INT(b->num_supported_head_sizes, own ? COUNT_OF(of_ipex) : COUNT_OF(sizes) - 1);
    CHECK(memcmp(b->supported_head_sizes, own ? of_ipex : sizes,
                 (size_t)b->num_supported_head_sizes * sizeof *sizes) == 0);
    CHECK_INT(b->num_supported_block_sizes, 3);
    CHECK(memcmp(b->supported_block_sizes, blocks, 3 * sizeof *blocks) == 0);
    for (int i = 0; i < 20; i++) { /* each head size, each with two block sizes */
        v06_reset(r);
        r->d.num_heads = 2;
        r->d.num_kv_heads = 1;
        r->d.head_size = sizes[i % 10];
        r->block_size = blocks[(i + i / 10) % 4];
        r->max_tokens = 48;
        v06_play(r, prompts, 1, "D");
        v06_fields(r, decodes, 1);
        r->f.max_decode_seq_len = 9000;
        v06_rerun(r, "D");
    }
}
