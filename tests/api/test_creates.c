/*
 * test_creates.c: a create that is refused sets its out pointer to NULL. Every function of the three headers that hands
 * out an object is here, and refused for its description, its parent and want of memory.
 */
#include "support.h"

#include <folio/folio_pool.h>
#include <folio/folio_vllm06.h>

/* What objects are made from; NULL where a parent shall be missing. */
typedef struct {
    folio_context *ctx;
    folio_attention *attention;
    folio_pool *pool;
    folio_sequence *sequence;
    folio_vllm06_state *state;
    folio_vllm06_builder *builder; /* with one sequence */
    folio_allocator allocator;
} parents;

typedef folio_status (*create_fn)(const parents *p, bool bad, void **out);

static const folio_attention_desc attention_desc = {
    .struct_size = sizeof attention_desc, .num_heads = 1, .k_head_size = 8, .dtype = FOLIO_F32};
static const folio_kv_cache_desc cache_desc = {.struct_size = sizeof cache_desc,
                                               .num_blocks = 2,
                                               .num_layers = 1,
                                               .block_size = 4,
                                               .num_kv_heads = 1,
                                               .k_head_size = 8,
                                               .dtype = FOLIO_F32};

/* The description, or one that is refused. */
#define GIVEN(type, ...) (bad ? &(type){0} : &FOLIO_WITH(type, __VA_ARGS__))
#define OUT(type) ((type **)(void *)out)

static folio_status context(const parents *p, bool bad, void **out)
{
    return folio_context_create(GIVEN(folio_context_desc, .allocator = p->allocator),
                                OUT(folio_context));
}

static folio_status memory(const parents *p, bool bad, void **out)
{
    return folio_memory_create(p->ctx, FOLIO_MEMORY_HOST, bad ? 0 : 64, out);
}

static folio_status attention(const parents *p, bool bad, void **out)
{
    return folio_attention_create(p->ctx, bad ? NULL : &attention_desc, OUT(folio_attention));
}

static folio_status rotary(const parents *p, bool bad, void **out)
{
    return folio_rotary_create(p->ctx, GIVEN(folio_rotary_desc, .num_dims = 2, .num_positions = 1),
                               OUT(folio_rotary));
}

static folio_status kv_cache(const parents *p, bool bad, void **out)
{
    return folio_kv_cache_create(p->ctx, bad ? NULL : &cache_desc, OUT(folio_kv_cache));
}

static folio_status kv_cache_wrap(const parents *p, bool bad, void **out)
{
    static float numbers[2 * 2 * 4 * 8] __attribute__((aligned(64)));
    void *k[] = {numbers};
    return folio_kv_cache_wrap(p->ctx, &cache_desc,
                               GIVEN(folio_kv_memory, .k = k, .k_bytes = sizeof numbers),
                               OUT(folio_kv_cache));
}

static folio_status kv_cache_shared(const parents *p, bool bad, void **out)
{
    const folio_kv_cache_desc *descs[] = {bad ? NULL : &cache_desc};
    return folio_kv_cache_create_shared(p->ctx, descs, 1, OUT(folio_kv_cache));
}

static folio_status batch(const parents *p, bool bad, void **out)
{
    return folio_batch_create(p->ctx, GIVEN(folio_batch_desc, .block_size = 4), OUT(folio_batch));
}

static folio_status plan(const parents *p, bool bad, void **out)
{
    folio_attention *list[] = {p->attention};
    return folio_plan_create(p->ctx,
                             GIVEN(folio_plan_desc, .attentions = list, .num_attentions = 1,
                                   .max_seqs = 1, .max_query_tokens = 1, .max_seq_len = 1),
                             OUT(folio_plan));
}

static folio_status pool(const parents *p, bool bad, void **out)
{
    return folio_pool_create(p->ctx, GIVEN(folio_pool_desc, .num_blocks = 2, .block_size = 4),
                             OUT(folio_pool));
}

static folio_status sequence(const parents *p, bool bad, void **out)
{
    return folio_sequence_create(p->pool, GIVEN(folio_sequence_desc, .max_tokens = 4),
                                 OUT(folio_sequence));
}

static folio_status fork_of(const parents *p, bool bad, void **out)
{
    /* bad: the parent has tokens that are not committed */
    if (bad && p->sequence != NULL) CHECK_OK(folio_sequence_reserve(p->sequence, 1, 0, NULL));
    folio_status status = folio_sequence_fork(p->sequence, OUT(folio_sequence));
    if (bad && p->sequence != NULL) CHECK_OK(folio_sequence_truncate(p->sequence, 0));
    return status;
}

static folio_status state(const parents *p, bool bad, void **out)
{
    return folio_vllm06_state_create("cpu", GIVEN(folio_context_desc, .allocator = p->allocator),
                                     OUT(folio_vllm06_state));
}

static folio_status builder(const parents *p, bool bad, void **out)
{
    return folio_vllm06_builder_create(p->state, folio_vllm06_backend_find("xformers"),
                                       GIVEN(folio_vllm06_builder_desc, .block_size = 4),
                                       OUT(folio_vllm06_builder));
}

static folio_status build(const parents *p, bool bad, void **out)
{
    return folio_vllm06_builder_build(bad ? NULL : p->builder, OUT(folio_vllm06_metadata));
}

static folio_status graph_clone(const parents *p, bool bad, void **out)
{
    return folio_vllm06_graph_clone(p->state, bad ? 3 : 2, OUT(folio_vllm06_state));
}

static folio_status graph_metadata(const parents *p, bool bad, void **out)
{
    return folio_vllm06_graph_capture_get_metadata_for_batch(p->state, bad ? 3 : 2, 1,
                                                             OUT(folio_vllm06_metadata));
}

static folio_status make_metadata(const char *name, const parents *p, bool bad, void **out)
{
    static const int32_t seq_lens[] = {2};
    return folio_vllm06_make_metadata(p->state, folio_vllm06_backend_find(name),
                                      GIVEN(folio_vllm06_metadata_fields, .num_prefills = 1,
                                            .seq_lens = seq_lens, .is_prompt = 1),
                                      OUT(folio_vllm06_metadata));
}

static folio_status make_impl(const char *name, const parents *p, bool bad, void **out)
{
    static const float slopes[] = {0.5f};
    return folio_vllm06_make_impl(p->state, folio_vllm06_backend_find(name),
                                  GIVEN(folio_vllm06_impl_desc, .num_heads = 1, .head_size = 8,
                                        .alibi_slopes = slopes, .dtype = FOLIO_F32),
                                  OUT(folio_vllm06_impl));
}

#define OF_BACKEND(id, name)                                                                       \
    static folio_status metadata_##id(const parents *p, bool bad, void **out)                      \
    {                                                                                              \
        return make_metadata(name, p, bad, out);                                                   \
    }                                                                                              \
    static folio_status impl_##id(const parents *p, bool bad, void **out)                          \
    {                                                                                              \
        return make_impl(name, p, bad, out);                                                       \
    }
OF_BACKEND(xformers, "xformers")
OF_BACKEND(torch_sdpa, "torch-sdpa")
OF_BACKEND(ipex, "ipex")

static const struct {
    const char *name; /* as the header has it */
    create_fn create;
    bool orphan; /* it has no parent */
} creates[] = {
    {"folio_context_create", context, true},
    {"folio_memory_create", memory, false},
    {"folio_attention_create", attention, false},
    {"folio_rotary_create", rotary, false},
    {"folio_kv_cache_create", kv_cache, false},
    {"folio_kv_cache_wrap", kv_cache_wrap, false},
    {"folio_kv_cache_create_shared", kv_cache_shared, false},
    {"folio_batch_create", batch, false},
    {"folio_plan_create", plan, false},
    {"folio_pool_create", pool, false},
    {"folio_sequence_create", sequence, false},
    {"folio_sequence_fork", fork_of, false},
    {"folio_vllm06_state_create", state, true},
    {"folio_vllm06_builder_create", builder, false},
    {"folio_vllm06_builder_build", build, false},
    {"folio_vllm06_graph_clone", graph_clone, false},
    {"folio_vllm06_graph_capture_get_metadata_for_batch", graph_metadata, false},
    {"make_metadata", metadata_xformers, false},
    {"make_metadata", metadata_torch_sdpa, false},
    {"make_metadata", metadata_ipex, false},
    {"make_impl", impl_xformers, false},
    {"make_impl", impl_torch_sdpa, false},
    {"make_impl", impl_ipex, false},
};

static void open_parents(parents *p, support_counter *counter)
{
    memset(p, 0, sizeof *p);
    p->allocator = support_allocator(counter);
    p->ctx = support_context("reference", 1, &p->allocator);
    CHECK_OK(folio_attention_create(p->ctx, &attention_desc, &p->attention));
    CHECK_OK(folio_pool_create(
        p->ctx, &FOLIO_WITH(folio_pool_desc, .num_blocks = 2, .block_size = 4), &p->pool));
    CHECK_OK(folio_sequence_create(p->pool, NULL, &p->sequence));
    folio_context_desc desc =
        FOLIO_WITH(folio_context_desc, .num_threads = 1, .allocator = p->allocator);
    CHECK_OK(folio_vllm06_state_create("reference", &desc, &p->state));
    const folio_vllm06_backend *b = folio_vllm06_backend_find("xformers");
    CHECK_OK(folio_vllm06_builder_create(
        p->state, b, &FOLIO_WITH(folio_vllm06_builder_desc, .block_size = 4), &p->builder));
    CHECK_OK(folio_vllm06_graph_capture_begin(
        p->state, &FOLIO_WITH(folio_vllm06_graph_capture_desc, .attn_backend = b,
                              .max_batch_size = 2, .max_seq_len_to_capture = 4, .block_size = 4)));
    CHECK_OK(folio_vllm06_builder_add(
        p->builder, &FOLIO_WITH(folio_vllm06_seq, .is_prompt = 1, .token_len = 2)));
}

static void close_parents(parents *p)
{
    folio_vllm06_builder_destroy(p->builder);
    folio_vllm06_state_destroy(p->state);
    folio_sequence_destroy(p->sequence);
    folio_pool_destroy(p->pool);
    folio_attention_destroy(p->attention);
    folio_context_destroy(p->ctx);
}

static void refused_with_null(int i, const parents *p, bool bad, const char *why)
{
    void *out = NOWHERE;
    folio_status status = creates[i].create(p, bad, &out);
    CHECK_MSG(status != FOLIO_OK, "%s, %s: it is not refused", creates[i].name, why);
    CHECK_MSG(out == NULL, "%s, %s: its out pointer is not NULL", creates[i].name, why);
}

TEST(creates, a_refused_create_sets_its_out_pointer_to_null)
{
    support_counter counter = {0};
    parents p;
    open_parents(&p, &counter);
    for (int i = 0; i < COUNT_OF(creates); i++) {
        refused_with_null(i, &p, true, "a bad description");
        if (!creates[i].orphan) refused_with_null(i, &(parents){0}, false, "no parent");
        counter.limit = 1; /* no piece of memory is larger */
        refused_with_null(i, &p, false, "no memory");
        counter.limit = 0;
    }
    close_parents(&p);
    CHECK_INT(counter.live, 0);
}

/* A function of the headers that hands out an object has a parameter `**out`, or `**caches`. */
static void check_listed(const char *header, const char *parameter)
{
    static char text[1 << 20];
    char path[1024];
    snprintf(path, sizeof path, "%s/../include/folio/%s", FOLIO_TESTS_DIR, header);
    FILE *file = fopen(path, "r");
    REQUIRE_TEST(file != NULL);
    text[fread(text, 1, sizeof text - 1, file)] = '\0';
    fclose(file);
    int found = 0;
    for (char *at = text; (at = strstr(at, parameter)) != NULL; at++) {
        char *begin = at;
        while (begin > text && *begin != ';' && *begin != '}' && *begin != '/') begin--;
        bool listed = false;
        for (int i = 0; i < COUNT_OF(creates); i++) {
            char *name = strstr(begin, creates[i].name);
            listed = listed || (name != NULL && name < at);
        }
        char *get = strstr(begin, "_get_");
        CHECK_MSG(listed || (get != NULL && get < at), "%s: no test for %.80s", header, begin + 1);
        found++;
    }
    CHECK(found > 0);
}

TEST(creates, every_create_of_the_headers_is_tested)
{
    check_listed("folio.h", "**out)");
    check_listed("folio_pool.h", "**out)");
    check_listed("folio_pool.h", "**caches)");
    check_listed("folio_vllm06.h", "**out)");
}
