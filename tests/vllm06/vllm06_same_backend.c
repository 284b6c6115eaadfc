/* vllm06_same_backend.c: the table of functions, the same for all three originals; see vllm06_rig.h. */
#include "vllm06/vllm06_rig.h"

static const v06_seq two_prompts[] = {{0, true, 13, 13, 0}, {1, true, 8, 8, 0}};

typedef struct {
    const char *name, *aliases[2], *impl, *metadata, *builder;
} original_names;

static const original_names originals[] = {
    {"xformers", {"XFORMERS"}, "XFormersImpl", "XFormersMetadata", "XFormersMetadataBuilder"},
    {"torch-sdpa",
     {"TORCH_SDPA"},
     "TorchSDPABackendImpl",
     "TorchSDPAMetadata",
     "TorchSDPAMetadataBuilder"},
    {"torch-sdpa-ipex",
     {NULL},
     "TorchSDPABackendImpl",
     "TorchSDPAMetadata",
     "TorchSDPAMetadataBuilder"},
    {"ipex",
     {"ipex-attn", "IPEX"},
     "IpexAttnBackendImpl",
     "IpexAttnMetadata",
     "CommonMetadataBuilder"},
};

static const original_names *names_of(const char *original)
{
    const original_names *n = originals;
    while (strcmp(n->name, original) != 0) n++;
    return n;
}

void v06_same_get_name(const char *original, const char *compute)
{
    (void)compute;
    const original_names *n = names_of(original);
    const folio_vllm06_backend *b = folio_vllm06_backend_find(original);
    REQUIRE_TEST(b != NULL);
    CHECK(strcmp(b->get_name(), n->name) == 0);
    CHECK(b->get_impl_cls != NULL && b->get_metadata_cls != NULL && b->get_state_cls != NULL);
    CHECK(b->get_builder_cls != NULL && b->get_supported_head_sizes != NULL);
    CHECK(b->get_supported_block_sizes != NULL && b->get_kv_cache_shape != NULL);
    CHECK(b->split_kv_cache != NULL && b->swap_blocks != NULL && b->copy_blocks != NULL);
    CHECK(b->make_metadata != NULL && b->make_alibi_bias != NULL);
    CHECK(b->make_sliding_window_bias != NULL && b->make_impl != NULL && b->forward != NULL);
    for (int i = 0; i < 2 && n->aliases[i] != NULL; i++)
        CHECK(folio_vllm06_backend_find(n->aliases[i]) == b);
    CHECK(folio_vllm06_backend_find("xformer") == NULL);
    CHECK(folio_vllm06_backend_find("xformers2") == NULL);
    CHECK(folio_vllm06_backend_find("") == NULL);
    CHECK(folio_vllm06_backend_find(NULL) == NULL);
}

void v06_same_classes(const char *original, const char *compute)
{
    (void)compute;
    const original_names *n = names_of(original);
    const folio_vllm06_backend *b = folio_vllm06_backend_find(original);
    REQUIRE_TEST(b != NULL);
    CHECK(b->struct_size >= sizeof *b);
    CHECK(strcmp(b->get_impl_cls(), n->impl) == 0);
    CHECK(strcmp(b->get_metadata_cls(), n->metadata) == 0);
    CHECK(strcmp(b->get_state_cls(), "CommonAttentionState") == 0);
    CHECK(strcmp(b->get_builder_cls(), n->builder) == 0);
}

void v06_same_split_kv_cache(const char *original, const char *compute)
{
    static const folio_dtype dtypes[] = {FOLIO_F32, FOLIO_F16, FOLIO_BF16, FOLIO_FP8_E4M3};
    (void)compute;
    const folio_vllm06_backend *b = folio_vllm06_backend_find(original);
    char memory[64];
    folio_vllm06_cache_view k, v;
    for (int i = 0; i < COUNT_OF(dtypes); i++) {
        int64_t elem = (int64_t)folio_dtype_size(dtypes[i]);
        int64_t x = strcmp(original, "ipex") == 0 ? 1 : 16 / elem;
        folio_vllm06_kv_cache c = {memory, dtypes[i], 10, 8 * 3 * 80};
        CHECK_OK(b->split_kv_cache(&c, 3, 80, &k, &v));
        CHECK(k.data == memory && (char *)v.data - memory == 10 * 8 * 3 * 80 * elem);
        CHECK(v.num_dims == 4 && v.dims[0] == 10 && v.dims[1] == 3);
        CHECK(k.dims[0] == 10 && k.dims[1] == 3);
        if (strcmp(original, "torch-sdpa-ipex") == 0) {
            CHECK(k.num_dims == 4 && k.dims[2] == 8 && k.dims[3] == 80);
            CHECK(v.dims[2] == 8 && v.dims[3] == 80);
        } else {
            CHECK(k.num_dims == 5 && k.dims[2] == 80 / x && k.dims[3] == 8 && k.dims[4] == x);
            CHECK(v.dims[2] == 80 && v.dims[3] == 8);
        }
    }
    folio_vllm06_kv_cache c = {memory, FOLIO_FP8_E4M3, 10, 16 * 2 * 120};
    if (strcmp(original, "xformers") == 0 || strcmp(original, "torch-sdpa") == 0)
        REFUSED(b->split_kv_cache(&c, 2, 120, &k, &v), FOLIO_ERR_ARGUMENT, "120|16");
    REFUSED(b->split_kv_cache(&c, 7, 64, &k, &v), FOLIO_ERR_ARGUMENT, "block_elements");
    REFUSED(b->split_kv_cache(NULL, 2, 64, &k, &v), FOLIO_ERR_ARGUMENT, "NULL");
    REFUSED(b->split_kv_cache(&c, 2, 120, NULL, &v), FOLIO_ERR_ARGUMENT, "NULL");
    REFUSED(b->split_kv_cache(&c, 2, 120, &k, NULL), FOLIO_ERR_ARGUMENT, "NULL");
    REFUSED(b->split_kv_cache(&c, 0, 120, &k, &v), FOLIO_ERR_ARGUMENT, "0 kv heads");
    REFUSED(b->split_kv_cache(&c, 2, 0, &k, &v), FOLIO_ERR_ARGUMENT, "2 kv heads x 0");
    c.data = NULL;
    REFUSED(b->split_kv_cache(&c, 2, 120, &k, &v), FOLIO_ERR_ARGUMENT, "data is NULL");
    c.dtype = (folio_dtype)99;
    REFUSED(b->split_kv_cache(&c, 2, 120, &k, &v), FOLIO_ERR_ARGUMENT, "99");
    c.block_elements = 0;
    REFUSED(b->split_kv_cache(&c, 2, 120, &k, &v), FOLIO_ERR_ARGUMENT, "block_elements 0");
}

void v06_same_get_kv_cache_shape(const char *original, const char *compute)
{
    (void)compute;
    const folio_vllm06_backend *b = folio_vllm06_backend_find(original);
    int64_t shape[3] = {0, 0, 0};
    CHECK_OK(b->get_kv_cache_shape(100, 16, 8, 128, shape));
    CHECK(shape[0] == 2 && shape[1] == 100 && shape[2] == 16 * 8 * 128);
    CHECK_OK(b->get_kv_cache_shape(7, 32, 3, 80, shape));
    CHECK(shape[0] == 2 && shape[1] == 7 && shape[2] == 32 * 3 * 80);
    shape[0] = 77;
    REFUSED(b->get_kv_cache_shape(0, 16, 8, 128, shape), FOLIO_ERR_ARGUMENT, "0 blocks");
    REFUSED(b->get_kv_cache_shape(1, -1, 8, 128, shape), FOLIO_ERR_ARGUMENT, "-1");
    REFUSED(b->get_kv_cache_shape(1, 0, 8, 128, shape), FOLIO_ERR_ARGUMENT, "0 tokens");
    REFUSED(b->get_kv_cache_shape(1, 16, 0, 128, shape), FOLIO_ERR_ARGUMENT, "0 kv heads");
    REFUSED(b->get_kv_cache_shape(1, 16, 8, 0, shape), FOLIO_ERR_ARGUMENT, "size");
    REFUSED(b->get_kv_cache_shape(INT64_MAX / 8, 1, 1, 1, shape), FOLIO_ERR_ARGUMENT, "size");
    REFUSED(b->get_kv_cache_shape(INT64_MAX, 16, 8, 128, shape), FOLIO_ERR_ARGUMENT, "size");
    REFUSED(b->get_kv_cache_shape(1, 1, 1, 1, NULL), FOLIO_ERR_ARGUMENT, "NULL");
    CHECK_INT(shape[0], 77);
}

/* Move a block of an image: K and V parts apart. */
static void image_move(const v06 *r, int from_layer, int64_t from, int to_layer, int64_t to)
{
    size_t bytes = (size_t)r->kv[0].block_elements * folio_dtype_size(r->kv_dtype);
    for (int64_t part = 0; part < 2; part++)
        memcpy(r->image[to_layer] + (size_t)(part * r->num_blocks + to) * bytes,
               r->image[from_layer] + (size_t)(part * r->num_blocks + from) * bytes, bytes);
}

/* One cache as source and target: the order of the copies must not matter here either. */
static void swap_within_one(const v06 *r, int64_t a, int64_t b)
{
    const int64_t pairs[][2] = {{a, 7}, {a, 9}}, chain[][2] = {{a, 11}, {11, 13}};
    const int64_t turn[][2] = {{a, b}, {b, a}}, twice[][2] = {{a, 11}, {b, 11}};
    CHECK_OK(r->b->swap_blocks(r->state, &r->kv[0], &r->kv[0], pairs, 2, NULL));
    image_move(r, 0, a, 0, 7);
    image_move(r, 0, a, 0, 9);
    v06_check_images(r);
    folio_vllm06_kv_cache again = r->kv[0]; /* the memory tells, not the struct */
    REFUSED(r->b->swap_blocks(r->state, &r->kv[0], &again, chain, 2, NULL), FOLIO_ERR_ARGUMENT,
            "block 11 is both read and written");
    const int64_t back[][2] = {{11, 13}, {a, 11}}; /* the same chain in the other order */
    REFUSED(r->b->swap_blocks(r->state, &r->kv[0], &again, back, 2, NULL), FOLIO_ERR_ARGUMENT,
            "block 11 is both read and written");
    REFUSED(r->b->swap_blocks(r->state, &r->kv[0], &again, turn, 2, NULL), FOLIO_ERR_ARGUMENT,
            "is both read and written");
    REFUSED(r->b->swap_blocks(r->state, &r->kv[0], &again, twice, 2, NULL), FOLIO_ERR_ARGUMENT,
            "pairs (to)[1] = 11 is written twice");
    if (strcmp(r->compute, "cuda") != 0) { /* there such a part is brought to a place of its own */
        again.num_blocks--;
        REFUSED(r->b->swap_blocks(r->state, &r->kv[0], &again, pairs, 2, NULL), FOLIO_ERR_ARGUMENT,
                "dst key_cache and src key_cache share memory");
        again = r->kv[0];
        again.num_blocks *= 2; /* in blocks of half the size: keys and values begin alike */
        again.block_elements /= 2;
        REFUSED(r->b->swap_blocks(r->state, &r->kv[0], &again, pairs, 2, NULL), FOLIO_ERR_ARGUMENT,
                "dst key_cache and src key_cache share memory");
        again = r->kv[0];
        again.num_blocks = 1; /* keys and values of the last two blocks of values */
        again.data = (char *)r->kv[0].data + (2 * r->num_blocks - 2) * r->kv[0].block_elements *
                                                 (int64_t)folio_dtype_size(r->kv_dtype);
        const int64_t first[][2] = {{0, 0}};
        REFUSED(r->b->swap_blocks(r->state, &again, &r->kv[0], first, 1, NULL), FOLIO_ERR_ARGUMENT,
                "dst value_cache and src key_cache share memory");
        REFUSED(r->b->swap_blocks(r->state, &r->kv[0], &again, first, 1, NULL), FOLIO_ERR_ARGUMENT,
                "dst key_cache and src value_cache share memory");
    }
    v06_check_images(r);
}

/* Caches have their own numbers of blocks; each side of a pair has its own limit. */
static void swap_into_fewer(const v06 *r, int64_t a, int64_t b)
{
    size_t bytes = (size_t)r->kv[0].block_elements * folio_dtype_size(r->kv_dtype);
    support_buffer few = support_buffer_make(2 * 3 * bytes);
    folio_vllm06_kv_cache to = r->kv[0];
    const int64_t pairs[][2] = {{a, 2}}, outside[][2] = {{a, 0}, {b, 3}};
    to.data = few.data;
    to.num_blocks = 3;
    CHECK_OK(r->b->swap_blocks(r->state, &r->kv[0], &to, pairs, 1, NULL));
    for (int64_t part = 0; part < 2; part++) {
        const char *at = (const char *)few.data + (size_t)(3 * part) * bytes;
        CHECK(memcmp(at + 2 * bytes, r->image[0] + (size_t)(part * r->num_blocks + a) * bytes,
                     bytes) == 0);
        CHECK(support_is_poison(at, 2 * bytes));
    }
    REFUSED(r->b->swap_blocks(r->state, &r->kv[0], &to, outside, 2, NULL), FOLIO_ERR_ARGUMENT,
            "pairs (to)[1] = 3 is outside [0, 3)");
    CHECK(support_is_poison(few.data, 2 * bytes));
    support_buffer_free(&few);
}

/* Caches of smaller numbers: the values begin where the keys end. */
static void move_small_numbers(const char *original, const char *compute)
{
    static const char *const names[] = {"auto", "fp8"};
    for (int i = 0; i < 2; i++) {
        v06 r;
        v06_init(&r, original, compute);
        r.d.dtype = FOLIO_F16;
        r.d.kv_cache_dtype = names[i];
        if (v06_open(&r) && v06_step(&r, two_prompts, 2)) {
            v06_run(&r, FOLIO_ATTENTION_DECODER);
            const int64_t pairs[][2] = {{r.tables[0], 5}};
            CHECK_OK(r.b->swap_blocks(r.state, &r.kv[0], &r.kv[1], pairs, 1, NULL));
            image_move(&r, 0, r.tables[0], 1, 5);
            v06_check_images(&r);
            const int64_t within[][2] = {{5, 8}, {r.tables[0], 10}};
            CHECK_OK(r.b->copy_blocks(r.state, r.kv, V06_LAYERS, within, 2, NULL));
            for (int k = 0; k < 4; k++)
                image_move(&r, k / 2, within[k % 2][0], k / 2, within[k % 2][1]);
            v06_check_images(&r);
        }
        v06_close(&r);
    }
}

void v06_same_swap_blocks(const char *original, const char *compute)
{
    v06 r;
    move_small_numbers(original, compute);
    v06_init(&r, original, compute);
    if (v06_open(&r) && v06_step(&r, two_prompts, 2)) {
        v06_run(&r, FOLIO_ATTENTION_DECODER);
        int64_t a = r.tables[0], b = r.tables[1];
        const int64_t pairs[][2] = {{a, 5}, {b, 2}};
        CHECK_OK(r.b->swap_blocks(r.state, &r.kv[0], &r.kv[1], pairs, 2, NULL));
        image_move(&r, 0, a, 1, 5);
        image_move(&r, 0, b, 1, 2);
        v06_check_images(&r);
        const int64_t outside[][2] = {{a, 3}, {r.num_blocks, 4}}, below[][2] = {{a, 3}, {b, -1}};
        const int64_t from_below[][2] = {{a, 3}, {-1, 4}}, past[][2] = {{a, 3}, {b, r.num_blocks}};
        REFUSED(r.b->swap_blocks(r.state, &r.kv[0], &r.kv[1], from_below, 2, NULL),
                FOLIO_ERR_ARGUMENT, "pairs (from)[1] = -1 is outside [0,");
        REFUSED(r.b->swap_blocks(r.state, &r.kv[0], &r.kv[1], past, 2, NULL), FOLIO_ERR_ARGUMENT,
                "pairs (to)[1]|outside [0,");
        const int64_t twice[][2] = {{a, 3}, {b, 3}};
        REFUSED(r.b->swap_blocks(r.state, &r.kv[0], &r.kv[1], outside, 2, NULL), FOLIO_ERR_ARGUMENT,
                "pairs (from)[1]|outside [0,");
        REFUSED(r.b->swap_blocks(r.state, &r.kv[0], &r.kv[1], below, 2, NULL), FOLIO_ERR_ARGUMENT,
                "pairs (to)[1] = -1 is outside [0,");
        REFUSED(r.b->swap_blocks(r.state, &r.kv[0], &r.kv[1], twice, 2, NULL), FOLIO_ERR_ARGUMENT,
                "pairs (to)[1] = 3 is written twice");
        swap_within_one(&r, a, b);
        swap_into_fewer(&r, a, b);
        REFUSED(r.b->swap_blocks(r.state, NULL, &r.kv[1], pairs, 2, NULL), FOLIO_ERR_ARGUMENT,
                "NULL");
        REFUSED(r.b->swap_blocks(r.state, &r.kv[0], NULL, pairs, 2, NULL), FOLIO_ERR_ARGUMENT,
                "NULL");
        REFUSED(r.b->swap_blocks(NULL, &r.kv[0], &r.kv[1], pairs, 2, NULL), FOLIO_ERR_ARGUMENT,
                "NULL");
        const int64_t fresh[][2] = {{a, 12}};
        folio_vllm06_kv_cache other = r.kv[1];
        other.block_elements /= 2;
        REFUSED(r.b->swap_blocks(r.state, &r.kv[0], &other, fresh, 1, NULL), FOLIO_ERR_ARGUMENT,
                "geometries differ");
        REFUSED(r.b->swap_blocks(r.state, &other, &r.kv[0], fresh, 1, NULL), FOLIO_ERR_ARGUMENT,
                "geometries differ");
        other = r.kv[1];
        other.dtype = FOLIO_F16;
        REFUSED(r.b->swap_blocks(r.state, &r.kv[0], &other, fresh, 1, NULL), FOLIO_ERR_ARGUMENT,
                "dtypes differ, f32 and f16");
        other = r.kv[1];
        static const int64_t no_blocks[] = {0, 12, (int64_t)1 << 40};
        for (int i = 0; i < COUNT_OF(no_blocks); i++) {
            other.block_elements = no_blocks[i];
            REFUSED(r.b->swap_blocks(r.state, &r.kv[0], &other, fresh, 1, NULL), FOLIO_ERR_ARGUMENT,
                    "block_elements is");
        }
        other = r.kv[1];
        other.data = NULL;
        REFUSED(r.b->swap_blocks(r.state, &r.kv[0], &other, fresh, 1, NULL), FOLIO_ERR_ARGUMENT,
                "kv_cache: data is NULL");
        v06_check_images(&r);
    }
    v06_close(&r);
}

/* Caches with as many blocks, half as large in the second. */
static void copy_other_sizes(const v06 *r, int64_t a)
{
    size_t bytes = (size_t)r->kv[0].block_elements * folio_dtype_size(r->kv_dtype) / 2;
    support_buffer small = support_buffer_make(2 * (size_t)r->num_blocks * bytes);
    folio_vllm06_kv_cache both[2] = {r->kv[0], r->kv[0]};
    char *from = (char *)small.data + (size_t)a * bytes, *to = (char *)small.data + 16 * bytes;
    const int64_t pairs[][2] = {{a, 16}};
    both[1].data = small.data;
    both[1].block_elements /= 2;
    memset(from, 5, bytes);
    memset(from + (size_t)r->num_blocks * bytes, 6, bytes);
    CHECK_OK(r->b->copy_blocks(r->state, both, 2, pairs, 1, NULL));
    image_move(r, 0, a, 0, 16);
    CHECK(memcmp(from, to, bytes) == 0 && to[0] == 5);
    from += (size_t)r->num_blocks * bytes;
    to += (size_t)r->num_blocks * bytes;
    CHECK(memcmp(from, to, bytes) == 0 && to[0] == 6);
    support_buffer_free(&small);
}

void v06_same_copy_blocks(const char *original, const char *compute)
{
    v06 r;
    move_small_numbers(original, compute);
    v06_init(&r, original, compute);
    if (v06_open(&r) && v06_step(&r, two_prompts, 2)) {
        v06_run(&r, FOLIO_ATTENTION_DECODER);
        int64_t a = r.tables[0], free_block = r.tables[r.blocks_per_seq - 1];
        const int64_t to_layer[][2] = {{a, 6}};
        CHECK_OK(r.b->swap_blocks(r.state, &r.kv[0], &r.kv[1], to_layer, 1, NULL));
        image_move(&r, 0, a, 1, 6);
        const int64_t pairs[][2] = {{a, free_block}, {6, 8}, {a, 10}};
        CHECK_OK(r.b->copy_blocks(r.state, r.kv, V06_LAYERS, pairs, 3, NULL));
        for (int l = 0; l < V06_LAYERS; l++) {
            for (int i = 0; i < 3; i++) image_move(&r, l, pairs[i][0], l, pairs[i][1]);
        }
        v06_check_images(&r);
        const int64_t outside[][2] = {{a, 12}, {0, -1}};
        REFUSED(r.b->copy_blocks(r.state, r.kv, V06_LAYERS, outside, 2, NULL), FOLIO_ERR_ARGUMENT,
                "pairs (to)[1] = -1 is outside [0,");
        const int64_t above[][2] = {{a, 12}, {r.num_blocks, 14}};
        REFUSED(r.b->copy_blocks(r.state, r.kv, V06_LAYERS, above, 2, NULL), FOLIO_ERR_ARGUMENT,
                "pairs (from)[1]|outside [0,");
        const int64_t below[][2] = {{a, 12}, {-1, 14}}, past[][2] = {{a, 12}, {6, r.num_blocks}};
        REFUSED(r.b->copy_blocks(r.state, r.kv, V06_LAYERS, below, 2, NULL), FOLIO_ERR_ARGUMENT,
                "pairs (from)[1] = -1 is outside [0,");
        REFUSED(r.b->copy_blocks(r.state, r.kv, V06_LAYERS, past, 2, NULL), FOLIO_ERR_ARGUMENT,
                "pairs (to)[1]|outside [0,");
        const int64_t twice[][2] = {{a, 12}, {6, 12}};
        REFUSED(r.b->copy_blocks(r.state, r.kv, V06_LAYERS, twice, 2, NULL), FOLIO_ERR_ARGUMENT,
                "pairs (to)[1] = 12 is written twice");
        REFUSED(r.b->swap_blocks(r.state, &r.kv[0], &r.kv[1], twice, 2, NULL), FOLIO_ERR_ARGUMENT,
                "pairs (to)[1] = 12 is written twice");
        REFUSED(r.b->swap_blocks(r.state, &r.kv[0], &r.kv[1], above, 2, NULL), FOLIO_ERR_ARGUMENT,
                "pairs (from)[1]|outside [0,");
        const int64_t chain[][2] = {{a, 12}, {12, 14}};
        REFUSED(r.b->copy_blocks(r.state, r.kv, V06_LAYERS, chain, 2, NULL), FOLIO_ERR_ARGUMENT,
                "block 12 is both read and written");
        const int64_t back[][2] = {{12, 14}, {a, 12}};
        REFUSED(r.b->copy_blocks(r.state, r.kv, V06_LAYERS, back, 2, NULL), FOLIO_ERR_ARGUMENT,
                "block 12 is both read and written");
        REFUSED(r.b->copy_blocks(r.state, NULL, 1, pairs, 1, NULL), FOLIO_ERR_ARGUMENT,
                "kv_caches is NULL");
        REFUSED(r.b->copy_blocks(r.state, r.kv, -1, pairs, 1, NULL), FOLIO_ERR_ARGUMENT,
                "num_caches is outside [0, 2147483647]");
        REFUSED(r.b->copy_blocks(r.state, r.kv, INT64_MAX, pairs, 1, NULL), FOLIO_ERR_ARGUMENT,
                "num_caches is outside [0, 2147483647]");
        REFUSED(r.b->copy_blocks(NULL, r.kv, 1, pairs, 1, NULL), FOLIO_ERR_ARGUMENT, "NULL");
        folio_vllm06_kv_cache uneven[2] = {r.kv[0], r.kv[1]};
        const int64_t fresh[][2] = {{a, 12}};
        uneven[1].num_blocks--;
        REFUSED(r.b->copy_blocks(r.state, uneven, 2, fresh, 1, NULL), FOLIO_ERR_ARGUMENT,
                "caches[1]");
        uneven[1] = r.kv[1];
        uneven[0].num_blocks--;
        REFUSED(r.b->copy_blocks(r.state, uneven, 2, fresh, 1, NULL), FOLIO_ERR_ARGUMENT,
                "caches[1]");
        uneven[0] = r.kv[0];
        copy_other_sizes(&r, a);
        uneven[1].data = NULL; /* the first cache stays as it is, too */
        REFUSED(r.b->copy_blocks(r.state, uneven, 2, fresh, 1, NULL), FOLIO_ERR_ARGUMENT, "NULL");
        uneven[1] = r.kv[1];
        uneven[1].dtype = (folio_dtype)99;
        REFUSED(r.b->copy_blocks(r.state, uneven, 2, fresh, 1, NULL), FOLIO_ERR_ARGUMENT, "dtype");
        CHECK_OK(r.b->copy_blocks(r.state, NULL, 0, pairs, 1, NULL));
        v06_check_images(&r);
    }
    v06_close(&r);
}

/* Blocks of 24 tokens, which no partition of 512 keys is a multiple of, in a step that is said to have long decodes. */
static void odd_block_size(const char *original, const char *compute)
{
    static const v06_seq prompts[] = {{0, true, 30, 30, 0}}, decodes[] = {{0, false, 1, 31, 0}};
    v06 r;
    v06_init(&r, original, compute);
    r.block_size = 24;
    if (v06_open(&r) && v06_step(&r, prompts, 1)) {
        v06_run(&r, FOLIO_ATTENTION_DECODER);
        v06_fields(&r, decodes, 1);
        r.f.max_decode_seq_len = 9000;
        if (v06_remake(&r)) v06_run(&r, FOLIO_ATTENTION_DECODER);
    }
    v06_close(&r);
}

void v06_same_supported_sizes(const char *original, const char *compute)
{
    enum { LISTED = 9 }; /* the last one is not, and runs too */
    static const int32_t sizes[] = {32, 64, 80, 96, 112, 120, 128, 192, 256, 40};
    static const int32_t of_ipex[] = {32, 64, 80, 96, 112, 128, 256}; /* IPEX's own operators */
    bool own = strcmp(original, "torch-sdpa-ipex") == 0;
    const folio_vllm06_backend *b = folio_vllm06_backend_find(original);
    int32_t num_listed = 0, num_blocks = 0;
    const int32_t *listed = b->get_supported_head_sizes(&num_listed);
    const int32_t *blocks = b->get_supported_block_sizes(&num_blocks);
    CHECK(listed == b->get_supported_head_sizes(NULL));
    CHECK_INT(num_listed, own ? COUNT_OF(of_ipex) : LISTED);
    CHECK(memcmp(listed, own ? of_ipex : sizes, (size_t)num_listed * sizeof *sizes) == 0);
    CHECK_INT(num_blocks, 3);
    CHECK(blocks[0] == 8 && blocks[1] == 16 && blocks[2] == 32);
    static const v06_seq prompts[] = {{0, true, 9, 9, 0}}, decodes[] = {{0, false, 1, 10, 0}};
    for (int32_t i = 0; i < COUNT_OF(sizes) * num_blocks; i++) {
        v06 r;
        v06_init(&r, original, compute);
        r.d.num_heads = 2;
        r.d.num_kv_heads = 1;
        r.d.head_size = sizes[i / num_blocks];
        r.block_size = blocks[i % num_blocks];
        if (v06_open(&r) && v06_step(&r, prompts, 1)) {
            v06_run(&r, FOLIO_ATTENTION_DECODER);
            if (v06_step(&r, decodes, 1)) v06_run(&r, FOLIO_ATTENTION_DECODER);
        }
        v06_close(&r);
    }
    odd_block_size(original, compute);
}
