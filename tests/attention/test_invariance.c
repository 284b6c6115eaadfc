/*
 * test_invariance.c: step by step equals whole. On the cpu backend the bits of a row, out and lse,
 * come of its q, its position and its keys only: not of threads, executor, the rest of the batch,
 * where the prompt was cut, or whether it was prefilled or decoded. Every option is tried, on short
 * sequences and past several splits of the keys.
 */
#include "kit/kit.h"
#include "test.h"

#include <pthread.h>
#include <stdlib.h>

enum { MAX_THREADS = 8, MAX_PIECES = 1200 };

/* ---- The options ---------------------------------------------------------------------------- */

typedef struct {
    const char *name;
    kit_spec spec;
} option;

/* What is not said here: 2 heads over 1 kv head of size 16, f32. */
static const option options[] = {
    {"plain", {.scale = 0}},
    {"scale", {.scale = 0.7f}},
    {"window 5", {.windowed = 1, .window_left = 4}},
    {"window 20", {.windowed = 1, .window_left = 19}},
    {"alibi", {.alibi = true}},
    {"alibi and window", {.alibi = true, .windowed = 1, .window_left = 11}},
    {"soft cap", {.soft_cap = 1.5f}},
    {"sinks", {.sinks = true}},
    {"bias", {.bias = KIT_BIAS_ALL}},
    {"bias with holes", {.bias = KIT_BIAS_ALL, .bias_hidden = 0.3}},
    {"bias by key", {.bias = KIT_BIAS_KEY, .bias_dtype = FOLIO_BF16}},
    {"everything",
     {.soft_cap = 3,
      .alibi = true,
      .windowed = 1,
      .window_left = 17,
      .sinks = true,
      .bias = KIT_BIAS_ALL,
      .bias_hidden = 0.1}},
    {"large scores", {.amplitude = 50}},
    {"f16 cache", {.kv_dtype = FOLIO_F16}},
    {"bf16 cache", {.kv_dtype = FOLIO_BF16}},
    {"e4m3 cache", {.kv_dtype = FOLIO_FP8_E4M3, .k_scale = 0.5f, .v_scale = 0.3f}},
    {"scales per kv head",
     {.kv_dtype = FOLIO_FP8_E4M3, .num_heads = 4, .num_kv_heads = 2, .head_scales = true}},
    {"e5m2 cache", {.kv_dtype = FOLIO_FP8_E5M2, .k_scale = 0.5f}},
    {"int8 cache", {.kv_dtype = FOLIO_INT8}},
    {"f16", {.dtype = FOLIO_F16}},
    {"bf16", {.dtype = FOLIO_BF16}},
    {"f16 over int8", {.dtype = FOLIO_F16, .kv_dtype = FOLIO_INT8}},
    {"bf16 over e4m3", {.dtype = FOLIO_BF16, .kv_dtype = FOLIO_FP8_E4M3}},
    {"no groups", {.num_heads = 3, .num_kv_heads = 3}},
    {"groups of 4", {.num_heads = 8, .num_kv_heads = 2}},
    {"groups of 7", {.num_heads = 7, .num_kv_heads = 1}},
    {"nhd", {.layout = FOLIO_LAYOUT_NHD}},
    {"hnd", {.layout = FOLIO_LAYOUT_HND}},
    {"interleaved nhd", {.layout = FOLIO_LAYOUT_INTERLEAVED_NHD}},
    {"interleaved hnd", {.layout = FOLIO_LAYOUT_INTERLEAVED_HND}},
    {"x-packed", {.layout = FOLIO_LAYOUT_XPACKED}},
    {"x-packed bf16", {.layout = FOLIO_LAYOUT_XPACKED, .dtype = FOLIO_BF16}},
    {"x-packed 1", {.layout = FOLIO_LAYOUT_XPACKED_1}},
    {"strided", {.layout = FOLIO_LAYOUT_STRIDED}},
    {"strided int8", {.layout = FOLIO_LAYOUT_STRIDED, .kv_dtype = FOLIO_INT8}},
    {"blocks of 1", {.block_size = 1}},
    {"blocks of 5", {.block_size = 5}},
    {"blocks of 32", {.block_size = 32, .dtype = FOLIO_BF16}},
    {"wide v", {.k_head_size = 8, .v_head_size = 40}},
    {"wide k", {.k_head_size = 72, .v_head_size = 16}},
    {"latent", {.v_in_k = true, .k_head_size = 40, .v_head_size = 24}},
    {"latent bf16",
     {.v_in_k = true,
      .k_head_size = 72,
      .v_head_size = 40,
      .dtype = FOLIO_BF16,
      .num_heads = 16,
      .num_kv_heads = 1}},
    {"latent bf16 over int8",
     {.v_in_k = true,
      .k_head_size = 72,
      .v_head_size = 40,
      .dtype = FOLIO_BF16,
      .kv_dtype = FOLIO_INT8,
      .num_heads = 7,
      .num_kv_heads = 1}},
    {"latent nhd, f16",
     {.v_in_k = true,
      .k_head_size = 40,
      .v_head_size = 40,
      .layout = FOLIO_LAYOUT_NHD,
      .dtype = FOLIO_F16}},
    {"strided tensors", {.strided = true}},
    {"no lse", {.no_lse = true}},
    {"k and v NULL", {.no_write = true}},
    {"graph", {.graph = true}},
    {"csr tables", {.table = KIT_TABLE_CSR}},
};
enum { NUM_OPTIONS = sizeof options / sizeof options[0] };

static option option_at(int n)
{
    option o = options[n];
    o.spec.seed = 31;
    if (o.spec.num_heads == 0) {
        o.spec.num_heads = 2;
        o.spec.num_kv_heads = 1;
    }
    if (o.spec.k_head_size == 0) o.spec.k_head_size = 16;
    return o;
}

/* ---- Contexts ------------------------------------------------------------------------------- */

static folio_context *pools[MAX_THREADS + 1]; /* by number of threads */

static bool open_pools(const char *level)
{
    for (int32_t n = 1; n <= MAX_THREADS; n++) {
        pools[n] = kit_context("cpu", level, n);
        if (pools[n] == NULL) return false;
    }
    return true;
}

static void close_pools(void)
{
    for (int n = 1; n <= MAX_THREADS; n++) {
        folio_context_destroy(pools[n]);
        pools[n] = NULL;
    }
}

/* Keys are cut at multiples of this; 0: the plan does not cut. */
static int64_t split_len_of(folio_context *ctx, const kit_spec *spec, const kit_seq *seqs,
                            int64_t num_seqs, int64_t *num_split_items)
{
    folio_plan_info info = {0};
    kit_case *h = kit_open(ctx, spec, seqs, num_seqs);
    kit_result result = {0};
    bool ok = h && kit_forward(h, NULL, FOLIO_ATTENTION_DECODER, seqs, num_seqs, &result) &&
              kit_plan_info(h, seqs, num_seqs, &info);
    CHECK_MSG(ok, "%s", kit_error());
    kit_result_free(&result);
    kit_close(h);
    *num_split_items = info.num_split_items;
    return info.split_len;
}

/* ---- Comparing ------------------------------------------------------------------------------ */

/* Four sequences around the one that counts: prompt, decode, padding, another chunk. */
static const kit_seq crowd[] = {
    {.id = 50, .query_len = 9, .seq_len = 9, .encoder_len = 6, .encoder_new_len = 6},
    {.id = 51, .query_len = 1, .seq_len = 40, .encoder_len = 3},
    {.id = 52, .query_len = 3, .seq_len = 0},
    {.id = 53, .query_len = 5, .seq_len = 31, .encoder_len = 20}};

typedef struct {
    int32_t threads;
    int64_t num_crowd;
    bool crowd_first;
} company;

/* The sequence in these pieces and this company has the bits of `expected`. */
static void check_pieces(const option *o, folio_context *ctx, folio_attention_type type,
                         const kit_seq *whole, const int64_t *pieces, int64_t num_pieces, company c,
                         const kit_result *expected)
{
    kit_result got;
    if (!kit_run_pieces(ctx, &o->spec, type, whole, pieces, num_pieces, crowd, c.num_crowd,
                        c.crowd_first, &got)) {
        test_fail(__FILE__, __LINE__, "%s: %s", o->name, kit_error());
    } else {
        CHECK_MSG(kit_rows_equal(&got, 0, expected, 0, whole->query_len),
                  "%s: %d rows in %d pieces starting %d, %d threads, crowd of %d%s: bits differ",
                  o->name, (int)whole->query_len, (int)num_pieces, (int)pieces[0], (int)c.threads,
                  (int)c.num_crowd, c.crowd_first ? " first" : "");
    }
    kit_result_free(&got);
}

/* The whole sequence alone on one thread: what every other way must equal. */
static bool run_whole(const option *o, folio_attention_type type, const kit_seq *whole,
                      kit_result *result)
{
    bool ok = kit_run_pieces(pools[1], &o->spec, type, whole, &whole->query_len, 1, NULL, 0, false,
                             result);
    CHECK_MSG(ok, "%s: %s", o->name, kit_error());
    return ok;
}

/* The n-th company: eight thread counts alone, then before and after crowds of one to four. */
static company company_of(int64_t n)
{
    company c = {.threads = 1 + (int32_t)(n % MAX_THREADS)};
    if (n / MAX_THREADS % 2) c.num_crowd = 1 + n % 4;
    c.crowd_first = n / 2 % 2;
    return c;
}

/* A prompt cut in two at every point, and into single tokens, in all 16 companies. */
static void check_every_cut(option o, int64_t len, bool all_companies)
{
    kit_seq whole = {.id = 7, .query_len = len, .seq_len = len};
    kit_result expected;
    if (run_whole(&o, FOLIO_ATTENTION_DECODER, &whole, &expected)) {
        for (int64_t cut = 1; cut < len; cut++) {
            int64_t pieces[2] = {cut, len - cut};
            for (int64_t n = 0; n < (all_companies ? 16 : 2); n++) {
                company c = company_of(5 * cut + n);
                check_pieces(&o, pools[c.threads], FOLIO_ATTENTION_DECODER, &whole, pieces, 2, c,
                             &expected);
            }
        }
        int64_t ones[MAX_PIECES];
        for (int64_t i = 0; i < len; i++) ones[i] = 1;
        for (int64_t n = 0; n < 16; n++) {
            company c = company_of(n);
            check_pieces(&o, pools[c.threads], FOLIO_ATTENTION_DECODER, &whole, ones, len, c,
                         &expected);
        }
    }
    kit_result_free(&expected);
}

TEST(invariance, every_chunking_equals_whole)
{
    REQUIRE_TEST(open_pools(NULL));
    for (int n = 0; n < NUM_OPTIONS; n++) check_every_cut(option_at(n), 37, false);
    close_pools();
}

/* More queries than keys: pieces of them may have fewer, and the keys stay the same. */
TEST(invariance, more_queries_than_keys_in_any_pieces)
{
    enum { QUERIES = 43 };
    REQUIRE_TEST(open_pools(NULL));
    for (int n = 0; n < NUM_OPTIONS; n++) {
        option o = option_at(n);
        kit_seq whole = {.id = 7,
                         .query_len = QUERIES,
                         .seq_len = 17,
                         .positions_given = 1,
                         .first_query_pos = 2,
                         .first_key_pos = 9};
        int64_t cuts[][4] = {{1, 42}, {16, 27}, {18, 25}, {5, 20, 1, 17}}, ones[QUERIES];
        kit_result expected;
        for (int i = 0; i < QUERIES; i++) ones[i] = 1;
        if (run_whole(&o, FOLIO_ATTENTION_DECODER, &whole, &expected)) {
            for (int64_t i = 0; i < 5; i++) {
                company c = company_of(11 * i + n);
                check_pieces(&o, pools[c.threads], FOLIO_ATTENTION_DECODER, &whole,
                             i < 4 ? cuts[i] : ones,
                             i < 3    ? 2
                             : i == 3 ? 4
                                      : QUERIES,
                             c, &expected);
            }
        }
        kit_result_free(&expected);
    }
    close_pools();
}

LONG_TEST(invariance, every_chunking_on_every_level)
{
    folio_backend_info info = {.struct_size = sizeof info};
    CHECK_OK(folio_backend_get_info("cpu", &info));
    for (int32_t level = 0; level < info.num_levels; level++) {
        if (open_pools(info.levels[level]))
            for (int n = 0; n < NUM_OPTIONS; n++) check_every_cut(option_at(n), 53, true);
        close_pools();
    }
}

/* ---- Past several splits -------------------------------------------------------------------- */

/* Long enough for three splits and a rest; 0 when the plan never cuts keys. */
static int64_t long_len(void)
{
    kit_spec spec = {.seed = 31, .num_heads = 1, .k_head_size = 8};
    kit_seq seq = {.id = 7, .query_len = 1, .seq_len = 9000};
    int64_t split_items = 0;
    int64_t split = split_len_of(pools[1], &spec, &seq, 1, &split_items);
    CHECK(split >= 0 && split <= 4096);
    return split ? split : 512;
}

/* One row past several splits costs what matters; the prompt comes in as context, then rows. */
static void check_long(option small, int64_t split, bool thorough)
{
    if (small.spec.k_head_size == 16) small.spec.k_head_size = 8;
    /* A window that spans a split edge, where the option has one. */
    if (small.spec.windowed) small.spec.window_left += split - 3;
    int64_t len = 2 * split + 70, tail = thorough ? split + 90 : 84;
    /* The rows are those from len - tail on; what precedes is stored as context. */
    kit_seq whole = {.id = 7, .query_len = tail, .seq_len = len};
    kit_result expected;
    if (run_whole(&small, FOLIO_ATTENTION_DECODER, &whole, &expected)) {
        int64_t edge = 2 * split - (len - tail); /* rows before the third split begins */
        const int64_t cuts[] = {edge - 1, edge, edge + 1, 1, tail - 1};
        for (int n = 0; n < (thorough ? 5 : 3); n++) {
            int64_t pieces[2] = {cuts[n], tail - cuts[n]};
            company c = company_of(3 * n + tail);
            check_pieces(&small, pools[c.threads], FOLIO_ATTENTION_DECODER, &whole, pieces, 2, c,
                         &expected);
        }
        int64_t ones[MAX_PIECES], steps = thorough ? tail : 6;
        ones[0] = tail - steps + 1;
        for (int64_t i = 1; i < steps; i++) ones[i] = 1;
        for (int32_t t = 1; t <= MAX_THREADS; t += thorough ? 2 : 3) {
            company c = company_of(t);
            c.threads = t;
            c.num_crowd = t % 2 ? 0 : 4;
            check_pieces(&small, pools[t], FOLIO_ATTENTION_DECODER, &whole, ones, steps, c,
                         &expected);
        }
    }
    kit_result_free(&expected);
}

TEST(invariance, long_decode_equals_whole)
{
    REQUIRE_TEST(open_pools(NULL));
    int64_t split = long_len();
    for (int n = 0; n < NUM_OPTIONS; n++) check_long(option_at(n), split, false);
    close_pools();
}

LONG_TEST(invariance, long_decode_step_by_step)
{
    REQUIRE_TEST(open_pools(NULL));
    int64_t split = long_len();
    for (int n = 0; n < NUM_OPTIONS; n++) check_long(option_at(n), split, true);
    close_pools();
}

/* A whole prompt past two splits, no context to begin with, cut at the edges of the splits. */
TEST(invariance, long_chunks_equal_whole)
{
    REQUIRE_TEST(open_pools(NULL));
    int64_t split = long_len(), len = 2 * split + 33;
    static const option long_options[] = {
        {"plain", {.seed = 8, .num_heads = 2, .num_kv_heads = 1, .k_head_size = 8}},
        {"bf16, alibi, sinks",
         {.seed = 8,
          .num_heads = 2,
          .num_kv_heads = 1,
          .k_head_size = 8,
          .dtype = FOLIO_BF16,
          .alibi = true,
          .sinks = true}},
        {"int8, window",
         {.seed = 8,
          .num_heads = 2,
          .num_kv_heads = 1,
          .k_head_size = 8,
          .kv_dtype = FOLIO_INT8,
          .windowed = 1,
          .window_left = 700}}};
    for (int n = 0; n < 3; n++) {
        const option *o = &long_options[n];
        kit_seq whole = {.id = 7, .query_len = len, .seq_len = len};
        kit_result expected;
        if (run_whole(o, FOLIO_ATTENTION_DECODER, &whole, &expected)) {
            const int64_t cuts[] = {split - 1, split, split + 1, 2 * split, 2 * split + 1};
            for (int i = 0; i < 5; i++) {
                int64_t pieces[2] = {cuts[i], len - cuts[i]};
                company c = company_of(i + 1);
                check_pieces(o, pools[c.threads], FOLIO_ATTENTION_DECODER, &whole, pieces, 2, c,
                             &expected);
            }
            int64_t thirds[3] = {300, split, len - 300 - split};
            company c = {.threads = 8};
            check_pieces(o, pools[8], FOLIO_ATTENTION_DECODER, &whole, thirds, 3, c, &expected);
        }
        kit_result_free(&expected);
    }
    close_pools();
}

/* Splits shared out among threads and merged: the plan says so, and the bits stay. */
TEST(invariance, split_items_keep_bits)
{
    REQUIRE_TEST(open_pools(NULL));
    option o = {"one long decode",
                {.seed = 4, .num_heads = 2, .num_kv_heads = 1, .k_head_size = 8}};
    for (int n = 0; n < 3; n++) {
        if (n == 1) o.spec.sinks = true;
        if (n == 2) o.spec.kv_dtype = FOLIO_INT8;
        kit_seq seq = {.id = 7, .query_len = 2, .seq_len = 9001};
        int64_t split_items = 0;
        int64_t split = split_len_of(pools[8], &o.spec, &seq, 1, &split_items);
        CHECK(split > 0);
        CHECK_MSG(split_items > 0, "9001 keys on 8 threads: no split item");
        kit_result expected;
        if (run_whole(&o, FOLIO_ATTENTION_DECODER, &seq, &expected)) {
            for (int32_t t = 1; t <= MAX_THREADS; t++) {
                int64_t pieces[2] = {1, 1};
                company c = {.threads = t, .num_crowd = t % 3 ? 0 : 4, .crowd_first = t == 6};
                check_pieces(&o, pools[t], FOLIO_ATTENTION_DECODER, &seq, &seq.query_len, 1, c,
                             &expected);
                check_pieces(&o, pools[t], FOLIO_ATTENTION_DECODER, &seq, pieces, 2, c, &expected);
            }
        }
        kit_result_free(&expected);
    }
    close_pools();
}

/* ---- Threads, executors, company, storage --------------------------------------------------- */

/* Every type and option, 1 to 8 threads, whole. Encoders cannot be cut, but can be kept company. */
TEST(invariance, threads_change_nothing)
{
    REQUIRE_TEST(open_pools(NULL));
    for (int n = 0; n < NUM_OPTIONS; n++) {
        for (int type = 0; type < FOLIO_NUM_ATTENTION_TYPES; type++) {
            option chosen = option_at(n), *o = &chosen;
            if (type == FOLIO_ATTENTION_ENCODER_DECODER && (o->spec.alibi || o->spec.windowed))
                continue;
            kit_seq whole = {.id = 7, .query_len = 26, .seq_len = 26};
            whole.encoder_len = whole.encoder_new_len = 26;
            kit_result expected;
            if (run_whole(o, (folio_attention_type)type, &whole, &expected)) {
                for (int32_t t = 1; t <= MAX_THREADS; t++) {
                    company c = {
                        .threads = t, .num_crowd = t % 2 ? 0 : 4, .crowd_first = t % 4 == 2};
                    check_pieces(o, pools[t], (folio_attention_type)type, &whole, &whole.query_len,
                                 1, c, &expected);
                }
            }
            kit_result_free(&expected);
        }
    }
    close_pools();
}

typedef enum { SEQUENTIAL, REVERSE, ODD_THEN_EVEN, REAL_THREADS, NUM_ORDERS } order;

typedef struct {
    folio_task_fn fn;
    void *task;
    int64_t index;
} thread_task;

static void *run_task(void *arg)
{
    thread_task *t = arg;
    t->fn(t->task, t->index);
    return NULL;
}

/* user: the order. */
static void parallel_for(void *user, int64_t count, folio_task_fn fn, void *task)
{
    order how = *(const order *)user;
    if (how == SEQUENTIAL)
        for (int64_t i = 0; i < count; i++) fn(task, i);
    if (how == REVERSE)
        for (int64_t i = count; i-- > 0;) fn(task, i);
    for (int64_t odd = 1; how == ODD_THEN_EVEN && odd >= 0; odd--)
        for (int64_t i = odd; i < count; i += 2) fn(task, i);
    if (how != REAL_THREADS) return;
    pthread_t threads[MAX_THREADS];
    thread_task tasks[MAX_THREADS];
    for (int64_t i = 0; i < count; i++) {
        tasks[i] = (thread_task){fn, task, i};
        if (pthread_create(&threads[i], NULL, run_task, &tasks[i]) != 0) abort();
    }
    for (int64_t i = 0; i < count; i++) pthread_join(threads[i], NULL);
}

TEST(invariance, callers_executor_in_any_order)
{
    REQUIRE_TEST(open_pools(NULL));
    for (int how = 0; how < NUM_ORDERS; how++) {
        order user = (order)how;
        for (int32_t threads = 1; threads <= MAX_THREADS; threads += how == REAL_THREADS ? 7 : 3) {
            folio_context_desc desc = {.struct_size = sizeof desc, .backend = "cpu"};
            desc.executor = (folio_executor){parallel_for, &user, threads};
            folio_context *ctx = NULL;
            CHECK_OK(folio_context_create(&desc, &ctx));
            for (int n = 0; ctx && n < NUM_OPTIONS; n += 5) {
                /* A chunk and a decode, each past several splits. */
                kit_seq whole = {.id = 7, .query_len = 3, .seq_len = 1700};
                int64_t pieces[2] = {2, 1};
                company c = {.threads = threads, .num_crowd = 4 * (n % 2)};
                kit_result expected;
                option o = option_at(n);
                if (run_whole(&o, FOLIO_ATTENTION_DECODER, &whole, &expected))
                    check_pieces(&o, ctx, FOLIO_ATTENTION_DECODER, &whole, pieces, 2, c, &expected);
                kit_result_free(&expected);
            }
            folio_context_destroy(ctx);
        }
    }
    close_pools();
}

/* Two specs that may differ only in where things lie: the same bits. */
static void check_same(const option *a, const option *b, const kit_seq *seq)
{
    kit_result x;
    if (run_whole(a, FOLIO_ATTENTION_DECODER, seq, &x)) {
        company c = {.threads = 2};
        check_pieces(b, pools[2], FOLIO_ATTENTION_DECODER, seq, &seq->query_len, 1, c, &x);
    }
    kit_result_free(&x);
}

/* Every layout with every block size, for queries that kernels multiply as f32 and as bf16. */
TEST(invariance, layouts_change_nothing)
{
    REQUIRE_TEST(open_pools(NULL));
    const folio_dtype queries[] = {FOLIO_F32, FOLIO_BF16};
    const folio_dtype dtypes[] = {FOLIO_F32,      FOLIO_F16,      FOLIO_BF16,
                                  FOLIO_FP8_E4M3, FOLIO_FP8_E5M2, FOLIO_INT8};
    const int32_t block_sizes[] = {16, 48, 1, 7, 64};
    kit_seq seqs[] = {{.id = 7, .query_len = 21, .seq_len = 50},
                      {.id = 7, .query_len = 1, .seq_len = 700}};
    for (int n = 0; n < 2 * 6 * FOLIO_NUM_LAYOUTS * 5; n++) {
        option native = {"native, blocks of 16",
                         {.seed = 9, .num_heads = 4, .num_kv_heads = 2, .k_head_size = 80}};
        native.spec.dtype = queries[n % 2];
        native.spec.kv_dtype = dtypes[n / 2 % 6];
        option o = native;
        o.spec.layout = (folio_layout)(n / 12 % FOLIO_NUM_LAYOUTS);
        o.spec.block_size = block_sizes[n / 12 / FOLIO_NUM_LAYOUTS];
        o.name = folio_layout_name(o.spec.layout);
        for (int s = 0; s < 2; s++) check_same(&native, &o, &seqs[s]);
    }
    close_pools();
}
