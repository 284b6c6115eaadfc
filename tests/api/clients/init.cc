// init.cc: FOLIO_INIT, in C++20 FOLIO_WITH, and the three headers in C++: structs know their size, all other fields are zero, and the
// library takes them.
#include <folio/folio.h>
#include <folio/folio_pool.h>
#include <folio/folio_vllm06.h>

#include <cstdio>
#include <cstring>

static int failed;

// A static one is made at compile time.
static constexpr folio_run at_start = FOLIO_INIT(folio_run);
static_assert(at_start.struct_size == sizeof(folio_run) && at_start.stream == nullptr, "FOLIO_INIT");

#if __cplusplus >= 202002L
static constexpr folio_step at_once = FOLIO_WITH(
    folio_step, .num_seqs = 3, .table = {.kind = FOLIO_TABLE_ROWS, .row_stride = 2});
static_assert(at_once.struct_size == sizeof(folio_step) && at_once.num_seqs == 3 &&
                  at_once.seq_lens == nullptr && at_once.table.row_stride == 2,
              "FOLIO_WITH");
#endif

static void check(bool ok, const char *what)
{
    if (ok) return;
    std::printf("FAIL: %s\n", what);
    failed = 1;
}

// A struct in memory that held something else: nothing of that is left.
template <class Struct> static void starts_clean(const char *what, Struct s)
{
    unsigned char bytes[sizeof s];
    std::memcpy(bytes, &s, sizeof s);
    check(s.struct_size == sizeof s, what);
    for (std::size_t i = sizeof s.struct_size; i < sizeof s; i++) check(bytes[i] == 0, what);
}

int main()
{
    starts_clean("folio_context_desc", FOLIO_INIT(folio_context_desc));
    starts_clean("folio_attention_desc", FOLIO_INIT(folio_attention_desc));
    starts_clean("folio_tensors", FOLIO_INIT(folio_tensors));
    starts_clean("folio_pool_desc", FOLIO_INIT(folio_pool_desc));
    starts_clean("folio_vllm06_impl_desc", FOLIO_INIT(folio_vllm06_impl_desc));

    auto desc = FOLIO_INIT(folio_context_desc);
    desc.backend = "cpu";
    desc.num_threads = 1;
    folio_context *ctx = nullptr;
    check(folio_context_create(&desc, &ctx) == FOLIO_OK, folio_last_error());
    auto info = FOLIO_INIT(folio_context_info);
    check(folio_context_get_info(ctx, &info) == FOLIO_OK, folio_last_error());
    check(info.backend != nullptr && std::strcmp(info.backend, "cpu") == 0, "the backend asked for");
    check(info.num_threads == 1, "the threads asked for");
    folio_context_destroy(ctx);
    if (failed == 0) std::printf("folio %s from C++%ld\n", folio_version(), __cplusplus / 100 % 100);
    return failed;
}
