/* vllm06_same_backend.c: descriptions and caches, the same for all three originals; see vllm06_rig.h. */
#include "vllm06/vllm06_rig.h"

static const v06_seq two_prompts[] = {{0, true, 13, 13, 0}, {1, true, 8, 8, 0}};

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

void v06_same_get_name(v06 *r)
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
void v06_same_classes(v06 *r)
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

void v06_same_split_kv_cache(v06 *r)
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

void v06_same_get_kv_cache_shape(__attribute__((unused)) v06 *r)
{
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

static size_t block_bytes(const v06 *r)
{
    const folio_vllm06_kv_cache *c = &r->kv[0];
    return (size_t)(c->block_size * c->num_kv_heads * c->head_size) * folio_dtype_size(c->dtype);
}

/* Move a block of an image: K and V parts apart. */
static void image_move(const v06 *r, int from_layer, int64_t from, int to_layer, int64_t to)
{
    size_t bytes = block_bytes(r);
    for (int64_t part = 0; part < 2; part++)
        memcpy(r->image[to_layer] + (size_t)(part * r->num_blocks + to) * bytes,
               r->image[from_layer] + (size_t)(part * r->num_blocks + from) * bytes, bytes);
}

/* The same memory said to be two tensors. */
static folio_vllm06_kv_cache in_two(const folio_vllm06_kv_cache *c)
{
    folio_vllm06_kv_cache two = *c;
    two.bytes /= 2;
    two.value_cache = (char *)c->key_cache + two.bytes;
    return two;
}

/* One cache as source and target, told by its memory: the order of the copies must not matter. */
static void swap_within_one(const v06 *r, int64_t a)
{
    const folio_block_pair pairs[] = {{a, 7}, {a, 9}}, chain[] = {{a, 11}, {11, 13}};
    const folio_block_pair first[] = {{0, 0}};
    bool placed = strcmp(r->compute, "cuda") == 0; /* there each array gets a place of its own */
    folio_vllm06_kv_cache again = placed ? r->kv[0] : in_two(&r->kv[0]);
    CHECK_OK(folio_vllm06_swap_blocks(r->state, &r->kv[0], &again, pairs, 2, NULL));
    image_move(r, 0, a, 0, 7);
    image_move(r, 0, a, 0, 9);
    v06_check_images(r);
    REJECTED(folio_vllm06_swap_blocks(r->state, &r->kv[0], &again, chain, 2, NULL),
             "block 11 is both read and written");
    if (placed) return;
    again = r->kv[0];
    again.num_blocks = 1; /* keys and values of the last two blocks of values */
    again.bytes = 2 * block_bytes(r);
    again.key_cache = (char *)again.key_cache + r->kv[0].bytes - again.bytes;
    REJECTED(folio_vllm06_swap_blocks(r->state, &again, &r->kv[0], first, 1, NULL),
             "dst value_cache and src key_cache share memory");
    REJECTED(folio_vllm06_swap_blocks(r->state, &r->kv[0], &again, first, 1, NULL),
             "dst key_cache and src value_cache share memory");
}

/* Caches have their own numbers of blocks: of the target, values begin where its keys end. */
static void swap_into_fewer(const v06 *r, int64_t a)
{
    size_t bytes = block_bytes(r);
    support_buffer few = support_buffer_make(2 * 3 * bytes);
    folio_vllm06_kv_cache to = r->kv[0];
    const folio_block_pair pairs[] = {{a, 2}}, outside[] = {{a, 0}, {a, 3}};
    to.key_cache = few.data;
    to.bytes = few.bytes;
    to.num_blocks = 3;
    CHECK_OK(folio_vllm06_swap_blocks(r->state, &r->kv[0], &to, pairs, 1, NULL));
    for (int64_t part = 0; part < 2; part++) {
        const char *at = (const char *)few.data + (size_t)(3 * part) * bytes;
        CHECK(memcmp(at + 2 * bytes, r->image[0] + (size_t)(part * r->num_blocks + a) * bytes,
                     bytes) == 0);
        CHECK(support_is_poison(at, 2 * bytes));
    }
    REJECTED(folio_vllm06_swap_blocks(r->state, &r->kv[0], &to, outside, 2, NULL),
             "pairs (to)[1] = 3 is outside [0, 3)");
    CHECK(support_is_poison(few.data, 2 * bytes));
    support_buffer_free(&few);
}

/* Two layers of a step that has run, in every size of numbers. */
static void after_a_step(v06 *r, void (*body)(v06 *))
{
    static const char *const names[] = {"auto", "auto", "fp8"};
    for (int i = 0; i < 3; i++) {
        v06_reset(r);
        r->d.dtype = i == 0 ? FOLIO_F32 : FOLIO_F16;
        r->d.kv_cache_dtype = names[i];
        v06_play(r, two_prompts, 2, "D");
        body(r);
        v06_check_images(r);
    }
}

/* What the operators' suite does not see: K and V in one allocation. */
static void swap_both_ways(v06 *r)
{
    int64_t a = r->tables[0], b = r->tables[1];
    const folio_block_pair pairs[] = {{a, 5}, {b, 2}};
    folio_vllm06_kv_cache to = in_two(&r->kv[1]);
    CHECK_OK(folio_vllm06_swap_blocks(r->state, &r->kv[0], &to, pairs, 2, NULL));
    image_move(r, 0, a, 1, 5);
    image_move(r, 0, b, 1, 2);
    v06_check_images(r);
    swap_within_one(r, a);
    swap_into_fewer(r, a);
}

void v06_same_swap_blocks(v06 *r) { after_a_step(r, swap_both_ways); }

static void copy_in_both(v06 *r)
{
    int64_t a = r->tables[0], free_block = r->tables[r->blocks_per_seq - 1];
    const folio_block_pair to_layer[] = {{a, 6}};
    CHECK_OK(folio_vllm06_swap_blocks(r->state, &r->kv[0], &r->kv[1], to_layer, 1, NULL));
    image_move(r, 0, a, 1, 6);
    const folio_block_pair pairs[] = {{a, free_block}, {6, 8}, {a, 10}};
    folio_vllm06_kv_cache caches[V06_LAYERS] = {r->kv[0], in_two(&r->kv[1])};
    CHECK_OK(folio_vllm06_copy_blocks(r->state, caches, V06_LAYERS, pairs, 3, NULL));
    for (int i = 0; i < 6; i++) image_move(r, i % 2, pairs[i / 2].from, i % 2, pairs[i / 2].to);
    v06_check_images(r);
    const folio_block_pair fresh[] = {{a, 12}};
    caches[1].num_blocks--;
    REJECTED(folio_vllm06_copy_blocks(r->state, caches, 2, fresh, 1, NULL), "caches[1]");
    caches[1] = r->kv[1];
    caches[1].bytes--; /* the first cache stays as it is, too */
    REJECTED(folio_vllm06_copy_blocks(r->state, caches, 2, fresh, 1, NULL), "bytes is");
}

void v06_same_copy_blocks(v06 *r) { after_a_step(r, copy_in_both); }

/* Blocks of 24 tokens, which no partition of 512 keys is a multiple of, in a step that is said to have long decodes. */
static void odd_block_size(v06 *r)
{
    static const v06_seq prompts[] = {{0, true, 30, 30, 0}}, decodes[] = {{0, false, 1, 31, 0}};
    v06_reset(r);
    r->block_size = 24;
    v06_play(r, prompts, 1, "D");
    v06_fields(r, decodes, 1);
    r->f.max_decode_seq_len = 9000;
    v06_rerun(r, "D");
}

void v06_same_supported_sizes(v06 *r)
{
    enum { LISTED = 9 }; /* the last one is not, and runs too */
    static const int32_t sizes[] = {32, 64, 80, 96, 112, 120, 128, 192, 256, 40};
    static const int32_t of_ipex[] = {32, 64, 80, 96, 112, 128, 256}; /* IPEX's own operators */
    bool own = strcmp(r->b->name, "torch-sdpa-ipex") == 0;
    const folio_vllm06_backend *b = r->b;
    int32_t num_listed = b->num_supported_head_sizes, num_blocks = b->num_supported_block_sizes;
    const int32_t *listed = b->supported_head_sizes, *blocks = b->supported_block_sizes;
    CHECK_INT(num_listed, own ? COUNT_OF(of_ipex) : LISTED);
    CHECK(memcmp(listed, own ? of_ipex : sizes, (size_t)num_listed * sizeof *sizes) == 0);
    CHECK_INT(num_blocks, 3);
    CHECK(blocks[0] == 8 && blocks[1] == 16 && blocks[2] == 32);
    static const v06_seq prompts[] = {{0, true, 9, 9, 0}}, decodes[] = {{0, false, 1, 10, 0}};
    for (int32_t i = 0; i < COUNT_OF(sizes) * num_blocks; i++) {
        v06_reset(r);
        r->d.num_heads = 2;
        r->d.num_kv_heads = 1;
        r->d.head_size = sizes[i / num_blocks];
        r->block_size = blocks[i % num_blocks];
        v06_play(r, prompts, 1, "D");
        v06_play(r, decodes, 1, "D");
    }
    odd_block_size(r);
}
