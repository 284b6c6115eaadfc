/* test_memory.c: memory of a context on host backends: created, filled, copied, given back; streams refused. */
#include "test.h"

#include <folio/folio.h>
#include <string.h>

static folio_context *open_context(const char *backend)
{
    folio_context_desc desc = {.struct_size = sizeof desc, .backend = backend, .num_threads = 1};
    folio_context *ctx = NULL;
    CHECK(folio_context_create(&desc, &ctx) == FOLIO_OK);
    return ctx;
}

static void both_kinds(const char *backend)
{
    folio_context *ctx = open_context(backend);
    for (int kind = FOLIO_MEMORY_DEVICE; kind <= FOLIO_MEMORY_HOST; kind++) {
        void *a = NULL, *b = NULL;
        unsigned char seen[100];
        CHECK(folio_memory_create(ctx, (folio_memory_kind)kind, 100, &a) == FOLIO_OK);
        CHECK(folio_memory_create(ctx, (folio_memory_kind)kind, 100, &b) == FOLIO_OK);
        CHECK((uintptr_t)a % 64 == 0 && (uintptr_t)b % 64 == 0);
        CHECK(folio_memory_fill(ctx, a, 0xab, 100, NULL) == FOLIO_OK);
        CHECK(folio_memory_fill(ctx, a, 0x12, 3, NULL) == FOLIO_OK);
        CHECK(folio_memory_copy(ctx, b, a, 100, NULL) == FOLIO_OK);
        CHECK(folio_memory_copy(ctx, seen, b, 100, NULL) == FOLIO_OK);
        CHECK(folio_run_wait(ctx, NULL) == FOLIO_OK);
        for (int i = 0; i < 100; i++) CHECK(seen[i] == (i < 3 ? 0x12 : 0xab));
        folio_memory_destroy(ctx, (folio_memory_kind)kind, a, 100);
        folio_memory_destroy(ctx, (folio_memory_kind)kind, b, 100);
    }
    folio_context_destroy(ctx);
}

TEST(memory, both_kinds_are_plain_memory_on_host_backends)
{
    both_kinds("cpu");
    both_kinds("reference");
}

TEST(memory, copies_may_overlap_on_host_backends)
{
    folio_context *ctx = open_context("cpu");
    unsigned char x[100];
    for (int i = 0; i < 100; i++) x[i] = (unsigned char)i;
    CHECK(folio_memory_copy(ctx, x + 1, x, 99, NULL) == FOLIO_OK);
    for (int i = 0; i < 100; i++) CHECK(x[i] == (i == 0 ? 0 : i - 1));
    folio_context_destroy(ctx);
}

TEST(memory, wrong_calls_are_told)
{
    folio_context *ctx = open_context("cpu");
    void *p = &p;
    char byte = 7;
    CHECK(folio_memory_create(ctx, (folio_memory_kind)2, 8, &p) == FOLIO_ERR_ARGUMENT && p == NULL);
    CHECK(strstr(folio_last_error(), "kind 2") != NULL);
    CHECK(folio_memory_create(ctx, FOLIO_MEMORY_HOST, 0, &p) == FOLIO_ERR_ARGUMENT);
    CHECK(folio_memory_create(ctx, FOLIO_MEMORY_HOST, 8, NULL) == FOLIO_ERR_ARGUMENT);
    CHECK(folio_memory_create(NULL, FOLIO_MEMORY_HOST, 8, &p) == FOLIO_ERR_ARGUMENT);
    CHECK(folio_memory_fill(ctx, &byte, 256, 1, NULL) == FOLIO_ERR_ARGUMENT && byte == 7);
    CHECK(folio_memory_fill(ctx, NULL, 1, 1, NULL) == FOLIO_ERR_ARGUMENT);
    CHECK(folio_memory_copy(ctx, &byte, NULL, 1, NULL) == FOLIO_ERR_ARGUMENT && byte == 7);
    CHECK(folio_memory_copy(NULL, &byte, &byte, 1, NULL) == FOLIO_ERR_ARGUMENT);
    CHECK(folio_memory_copy(ctx, NULL, NULL, 0, NULL) == FOLIO_OK);
    folio_run stream = {.struct_size = sizeof stream, .stream = &byte};
    CHECK(folio_run_wait(ctx, &stream) == FOLIO_ERR_ARGUMENT);
    CHECK(strstr(folio_last_error(), "no streams") != NULL);
    folio_memory_destroy(ctx, FOLIO_MEMORY_HOST, NULL, 8);
    folio_memory_destroy(NULL, FOLIO_MEMORY_HOST, NULL, 8);
    folio_context_destroy(ctx);
}

TEST(memory, default_contexts_take_host_memory)
{
    folio_context *ctx = NULL;
    folio_context_info info = {.struct_size = sizeof info};
    CHECK(folio_context_create(NULL, &ctx) == FOLIO_OK);
    CHECK(folio_context_get_info(ctx, &info) == FOLIO_OK && strcmp(info.backend, "cpu") == 0);
    folio_context_destroy(ctx);
}

TEST(memory, a_plan_is_updated_on_no_stream)
{
    CHECK(folio_plan_update(NULL, NULL, NULL) == FOLIO_ERR_ARGUMENT);
    CHECK(strstr(folio_last_error(), "plan is NULL") != NULL);
}
