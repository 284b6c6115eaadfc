/*
 * bench_attention.c: `folio bench`: the forward of one layer over a paged cache, for batches in
 * vLLM's grammar, beside what the machine could do at that moment (bench_ceilings.h).
 *
 *     each case x type x shape:  rig (cache, batch, plan) -> warm up -> R x (ceilings, forward)
 */
#include "args.h"
#include "bench.h"
#include "bench_ceilings.h"
#include "harness.h"
#include "json.h"
#include "term.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_GROUPS = 16, MAX_NAME = 64, MAX_COUNT = 1 << 16, MAX_LEN = 1 << 24, FILL_ROWS = 256 };

static const char help[] =
    "usage: folio bench [OPTION]...\n"
    "       folio bench TOPIC [OPTION]...\n\n"
    "How fast this build is on this machine. Without a topic: attention, the forward of one layer on a\n"
    "paged cache whose blocks lie in random order; K and V are in the cache already. Between the\n"
    "repetitions of a case the ceilings are sampled with as many threads: loops that only multiply and\n"
    "add, or only read memory. share is what a case reached of its ceiling: reading for decodes,\n"
    "arithmetic for prefills (bf16 dot products where the kernel uses them, else f32 multiply-adds).\n"
    "The samples read 256 MiB, so that every repetition finds its K and V in memory, not in a cache.\n\n"
    "topics\n"
    "  pool  KV memory: blocks handed out and taken back, prefix cache, sequences, tiers\n\n"
    "options\n"
    "      --case LIST        batches, see below; default q512,q2k,16q1s4k,1q1s32k\n"
    "      --dtype LIST       of q and out: f32, f16, bf16; default f32,bf16\n"
    "      --kv-dtype LIST    of the cache: f32, f16, bf16, fp8_e4m3, fp8_e5m2, int8; default: as dtype\n"
    "      --heads LIST       query heads:kv heads; default 32:8\n"
    "      --head-size LIST   default 128\n"
    "      --block-size LIST  tokens of a block; default 16\n"
    "      --layout LIST      of the cache: native (default), nhd, hnd, interleaved_nhd,\n"
    "                         interleaved_hnd, xpacked, xpacked_1\n"
    "      --threads N        default: one per processor\n"
    "      --level NAME       highest instruction-set level; default: the best for this CPU\n"
    "      --reps N           repetitions of each case; default 10\n"
    "      --seed N           other numbers and orders; default 1\n"
    "  -o, --output FORMAT    md (default), csv or json\n"
    "  -h, --help             this text; 'folio bench TOPIC --help' tells more of a topic\n\n"
    "All lists are crossed: each case runs with each type, each shape, each layout.\n\n"
    "cases\n"
    "  A case is one batch: groups joined by _, each [COUNT]qQUERY_LEN[sSEQ_LEN]. COUNT sequences (1)\n"
    "  bring QUERY_LEN new tokens and have SEQ_LEN keys with them (QUERY_LEN). k is 1024.\n"
    "  q2k            one prompt of 2048 tokens\n"
    "  q512s8k        512 more tokens of a prompt, 7680 before them\n"
    "  16q1s4k        16 sequences decode a token each at 4096 keys\n"
    "  2q2k_32q1s4k   two prompts and 32 decodes in one batch; such a mix has no share\n\n"
    "examples\n"
    "  folio bench\n"
    "  folio bench --case 32q1s2k --dtype bf16 --kv-dtype bf16,fp8_e4m3,int8\n"
    "  folio bench --case q1k --level scalar --threads 1 --reps 30\n"
    "  folio bench --case 16q1s4k --layout native,nhd,xpacked --block-size 16,64\n"
    "  folio bench -o json > attention.json\n"
    "  folio bench pool --filter match -o csv\n\n"
    "GFLOP/s counts 4 * heads * head size for each key that a query row sees; GB/s the bytes of K and V\n"
    "of all sequences, once. spread is the range of the middle half of the times over their median.\n\n"
    "The JSON is one object: {\"version\", \"cpu\", \"ceilings\": {\"fma_f32_gflops\", \"dot_bf16_gflops\",\n"
    "\"dot_int8_gops\", \"read_gbps\"}, \"results\": [{\"case\", \"phase\", \"backend\", \"device\", \"level\",\n"
    "\"threads\", \"dtype\", \"kv_dtype\", \"heads\", \"kv_heads\", \"head_size\", \"block_size\", \"layout\",\n"
    "\"kernel\", \"median_s\", \"min_s\", \"spread\", \"gflops\", \"gbps\", \"ceiling\": {\"name\", \"value\"},\n"
    "\"share\", \"peers\"}]}; null where a number does not apply. Keys are added in later versions, never\n"
    "renamed or removed.\n\n"
    "exit status\n"
    "  0  done    1  a call failed, or nothing ran    2  the command line is wrong\n";

typedef struct group {
    int64_t count, query_len, seq_len;
} group;

typedef struct batch_case {
    char name[MAX_NAME];
    group groups[MAX_GROUPS];
    int num_groups;
    int64_t seqs, rows, keys, pairs; /* pairs: of a query row and a key it sees */
    int64_t longest;
    const char *phase;
} batch_case;

typedef struct head_count {
    int32_t heads, kv_heads;
} head_count;

/* One way to run one case. */
typedef struct setting {
    const batch_case *what;
    folio_dtype dtype, kv_dtype;
    head_count heads;
    int32_t head_size, block_size;
    folio_layout layout;
} setting;

typedef struct result {
    setting of;
    char kernel[MAX_NAME];
    bench_stats seconds;
    double gflops, gbps;
    int ceiling; /* a bench_ceiling; -1: none */
    double ceiling_value, share;
} result;

typedef struct bench {
    batch_case cases[BENCH_MAX_LIST];
    folio_dtype dtypes[BENCH_MAX_LIST], kv_dtypes[BENCH_MAX_LIST]; /* kv 0: as dtype */
    head_count heads[BENCH_MAX_LIST];
    int64_t head_sizes[BENCH_MAX_LIST], block_sizes[BENCH_MAX_LIST];
    folio_layout layouts[BENCH_MAX_LIST];
    int num_cases, num_dtypes, num_kv_dtypes, num_heads, num_head_sizes, num_block_sizes,
        num_layouts;
    int64_t threads, reps, seed;
    const char *level, *output;
    folio_context *ctx;
    folio_context_info info;
    bench_ceilings *ceilings;
    double *samples[BENCH_NUM_CEILINGS]; /* [total] */
    double machine[BENCH_NUM_CEILINGS];  /* medians of the whole run; NAN: not measured */
    double started;
    int64_t done, total; /* repetitions */
    result *results;
    int64_t num_results;
} bench;

/* ---- One setting: what a forward needs */

typedef struct rig {
    folio_attention *attention;
    folio_kv_cache *cache;
    folio_batch *batch;
    folio_plan *plan;
    int32_t *blocks; /* [num_blocks], shuffled: the block tables, one after another */
    int64_t num_blocks;
    void *q, *out; /* [rows][heads][head_size] */
} rig;

/* Uniform in [-1, 1), by a xorshift: a cache takes a hundred million of them. */
static void draw(uint64_t *state, folio_dtype dtype, void *to, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        *state ^= *state << 13;
        *state ^= *state >> 7;
        *state ^= *state << 17;
        double x = (double)(*state >> 40) * 0x1p-23 - 1;
        if (dtype == FOLIO_F32) ((float *)to)[i] = (float)x;
        else harness_store(dtype, to, i, x);
    }
}

static bool fill_cache(const rig *r, const setting *s, uint64_t *state)
{
    int64_t width = (int64_t)s->heads.kv_heads * s->head_size;
    int64_t slots[FILL_ROWS], count = r->num_blocks * s->block_size;
    float *k = bench_alloc(FILL_ROWS * width, sizeof *k);
    float *v = bench_alloc(FILL_ROWS * width, sizeof *v);
    bool ok = true;
    for (int64_t first = 0; first < count && ok; first += FILL_ROWS) {
        int64_t rows = count - first < FILL_ROWS ? count - first : FILL_ROWS;
        for (int64_t i = 0; i < rows; i++) slots[i] = first + i;
        draw(state, FOLIO_F32, k, rows * width);
        draw(state, FOLIO_F32, v, rows * width);
        folio_kv_write write = {.struct_size = sizeof write,
                                .k = {.data = k, .dtype = FOLIO_F32, .tokens = rows},
                                .v = {.data = v, .dtype = FOLIO_F32, .tokens = rows},
                                .slots = slots};
        ok = bench_ok(folio_kv_cache_write(r->cache, 0, &write, NULL), "folio_kv_cache_write");
    }
    free(k);
    free(v);
    return ok;
}

static bool make_cache(bench *b, rig *r, const setting *s)
{
    folio_attention_desc attention = {.struct_size = sizeof attention,
                                      .num_heads = s->heads.heads,
                                      .num_kv_heads = s->heads.kv_heads,
                                      .k_head_size = s->head_size,
                                      .dtype = s->dtype,
                                      .kv_dtype = s->kv_dtype};
    folio_kv_cache_desc cache = {.struct_size = sizeof cache,
                                 .num_blocks = r->num_blocks,
                                 .num_layers = 1,
                                 .block_size = s->block_size,
                                 .num_kv_heads = s->heads.kv_heads,
                                 .k_head_size = s->head_size,
                                 .dtype = s->kv_dtype,
                                 .layout = s->layout};
    return bench_ok(folio_attention_create(b->ctx, &attention, &r->attention),
                    "folio_attention_create") &&
           bench_ok(folio_kv_cache_create(b->ctx, &cache, &r->cache), "folio_kv_cache_create");
}

/* The batch, its block tables cut from the shuffled blocks, and the plan. */
static bool make_plan(bench *b, rig *r, const setting *s)
{
    const batch_case *c = s->what;
    folio_batch_desc batch = {.struct_size = sizeof batch, .block_size = s->block_size};
    const folio_attention *attentions[] = {r->attention};
    folio_plan_desc plan = {.struct_size = sizeof plan,
                            .attentions = attentions,
                            .num_attentions = 1,
                            .block_size = s->block_size,
                            .num_blocks = r->num_blocks,
                            .max_seqs = c->seqs,
                            .max_query_tokens = c->rows,
                            .max_seq_len = c->longest};
    const int32_t *table = r->blocks;
    if (!bench_ok(folio_batch_create(b->ctx, &batch, &r->batch), "folio_batch_create"))
        return false;
    for (int g = 0; g < c->num_groups; g++) {
        int64_t blocks = (c->groups[g].seq_len + s->block_size - 1) / s->block_size;
        for (int64_t i = 0; i < c->groups[g].count; i++, table += blocks) {
            folio_batch_seq seq = {.struct_size = sizeof seq,
                                   .query_len = c->groups[g].query_len,
                                   .seq_len = c->groups[g].seq_len,
                                   .block_table = table,
                                   .num_blocks = blocks};
            if (!bench_ok(folio_batch_add(r->batch, &seq), "folio_batch_add")) return false;
        }
    }
    return bench_ok(folio_plan_create(b->ctx, &plan, &r->plan), "folio_plan_create") &&
           bench_ok(folio_plan_update(r->plan, r->batch), "folio_plan_update");
}

static bool open_rig(bench *b, rig *r, const setting *s)
{
    const batch_case *c = s->what;
    uint64_t seed = (uint64_t)b->seed;
    uint64_t state = harness_random_bits(seed, HARNESS_USER, 0, 0, 0, 0) | 1; /* never 0 */
    for (int g = 0; g < c->num_groups; g++)
        r->num_blocks +=
            c->groups[g].count * ((c->groups[g].seq_len + s->block_size - 1) / s->block_size);
    if (!make_cache(b, r, s)) return false;
    r->blocks = bench_alloc(r->num_blocks, sizeof *r->blocks);
    for (int64_t i = 0; i < r->num_blocks; i++) { /* Fisher and Yates, from the inside out */
        int64_t j = harness_random_int(seed, HARNESS_SHUFFLE, i, 0, i);
        r->blocks[i] = r->blocks[j];
        r->blocks[j] = (int32_t)i;
    }
    if (!make_plan(b, r, s) || !fill_cache(r, s, &state)) return false;
    int64_t numbers = c->rows * s->heads.heads * s->head_size;
    r->q = bench_alloc(numbers, folio_dtype_size(s->dtype));
    r->out = bench_alloc(numbers, folio_dtype_size(s->dtype));
    draw(&state, s->dtype, r->q, numbers);
    return true;
}

static void close_rig(rig *r)
{
    folio_plan_destroy(r->plan);
    folio_batch_destroy(r->batch);
    folio_kv_cache_destroy(r->cache);
    folio_attention_destroy(r->attention);
    free(r->blocks);
    free(r->q);
    free(r->out);
}

/* ---- Measuring */

static bool forward(const rig *r, const setting *s, double *seconds)
{
    folio_tensors tensors = {.struct_size = sizeof tensors,
                             .q = {.data = r->q, .tokens = s->what->rows},
                             .out = {.data = r->out, .tokens = s->what->rows}};
    double start = term_seconds();
    folio_status status =
        folio_attention_forward(r->plan, 0, FOLIO_DECODER, r->cache, 0, &tensors, NULL);
    *seconds = term_seconds() - start;
    return bench_ok(status, "folio_attention_forward");
}

/* Bytes of K and V that a forward has to read, the scales of int8 with them. */
static double kv_bytes(const setting *s)
{
    double head = (double)s->head_size * (double)folio_dtype_size(s->kv_dtype);
    if (s->kv_dtype == FOLIO_INT8) head += sizeof(float);
    return 2 * head * s->heads.kv_heads * (double)s->what->keys;
}

/* What bounds this case; -1 where one number cannot say. */
static int ceiling_of(const result *to)
{
    if (strcmp(to->of.what->phase, "decode") == 0) return BENCH_READ;
    if (strcmp(to->of.what->phase, "mixed") == 0) return -1;
    return strstr(to->kernel, "avx512_bf16") ? BENCH_DOT_BF16 : BENCH_FMA_F32;
}

static void add_result(bench *b, const rig *r, const setting *s, double *seconds)
{
    result *to = &b->results[b->num_results++];
    folio_plan_info info = {.struct_size = sizeof info};
    bool named = folio_plan_describe(r->plan, 0, FOLIO_DECODER, &info) == FOLIO_OK;
    double flops = 4.0 * s->heads.heads * s->head_size * (double)s->what->pairs;
    *to = (result){.of = *s, .seconds = bench_stats_of(seconds, b->reps)};
    snprintf(to->kernel, sizeof to->kernel, "%s", named ? info.kernel : "");
    to->gflops = flops / to->seconds.median * 1e-9;
    to->gbps = kv_bytes(s) / to->seconds.median * 1e-9;
    to->ceiling = ceiling_of(to);
    to->ceiling_value = to->share = (double)NAN;
    if (to->ceiling < 0) return;
    /* The samples of this case are the last; sorting them among themselves harms none. */
    double *own = b->samples[to->ceiling] + b->done - b->reps;
    if (isnan(own[0])) return;
    to->ceiling_value = bench_stats_of(own, b->reps).median;
    to->share = (to->ceiling == BENCH_READ ? to->gbps : to->gflops) / to->ceiling_value;
}

static bool run_setting(bench *b, const setting *s)
{
    rig r = {.attention = NULL};
    int64_t first = b->done;
    double *seconds = bench_alloc(b->reps, sizeof *seconds);
    term_progress(b->started, b->done, b->total, s->what->name);
    bool ok = open_rig(b, &r, s) && forward(&r, s, seconds);
    for (int64_t i = 0; i < b->reps && ok; i++) {
        term_progress(b->started, b->done, b->total, s->what->name);
        for (int k = 0; k < BENCH_NUM_CEILINGS; k++) /* reading is last: it empties the caches */
            b->samples[k][b->done] = bench_ceilings_sample(b->ceilings, (bench_ceiling)k);
        b->done++;
        ok = forward(&r, s, &seconds[i]);
    }
    if (ok) {
        add_result(b, &r, s, seconds);
    } else {
        b->done = first;
        b->total -= b->reps;
        fprintf(stderr,
                "folio bench: left out: %s, %s on %s, heads %d:%d of %d, block size %d, %s\n",
                s->what->name, folio_dtype_name(s->dtype), folio_dtype_name(s->kv_dtype),
                (int)s->heads.heads, (int)s->heads.kv_heads, (int)s->head_size, (int)s->block_size,
                folio_layout_name(s->layout));
    }
    close_rig(&r);
    free(seconds);
    return ok;
}

/* Setting number i of the lists crossed; the last list turns fastest. */
static setting nth_setting(const bench *b, int64_t i)
{
    setting s;
    s.layout = b->layouts[i % b->num_layouts];
    i /= b->num_layouts;
    s.block_size = (int32_t)b->block_sizes[i % b->num_block_sizes];
    i /= b->num_block_sizes;
    s.head_size = (int32_t)b->head_sizes[i % b->num_head_sizes];
    i /= b->num_head_sizes;
    s.heads = b->heads[i % b->num_heads];
    i /= b->num_heads;
    s.kv_dtype = b->kv_dtypes[i % b->num_kv_dtypes];
    i /= b->num_kv_dtypes;
    s.dtype = b->dtypes[i % b->num_dtypes];
    if (s.kv_dtype == 0) s.kv_dtype = s.dtype;
    s.what = &b->cases[i / b->num_dtypes];
    return s;
}

/* ---- Reports */

/* Lists with more than one shape: each row says its own. */
static bool has_shapes(const bench *b)
{
    return b->num_heads * b->num_head_sizes * b->num_block_sizes * b->num_layouts > 1;
}

static const char *shape_text(char *text, size_t size, const setting *s)
{
    snprintf(text, size, "heads %d:%d of %d, block %d, %s", (int)s->heads.heads,
             (int)s->heads.kv_heads, (int)s->head_size, (int)s->block_size,
             folio_layout_name(s->layout));
    return text;
}

static const char *type_text(char *text, size_t size, const setting *s)
{
    if (s->dtype == s->kv_dtype) snprintf(text, size, "%s", folio_dtype_name(s->dtype));
    else
        snprintf(text, size, "%s on %s", folio_dtype_name(s->dtype), folio_dtype_name(s->kv_dtype));
    return text;
}

static void print_row(const bench *b, const result *r)
{
    char a[64], c[32], d[32], ceiling[48] = "-", share[16] = "-";
    printf("| %-13s | %-5s |", r->of.what->name, type_text(a, sizeof a, &r->of));
    if (has_shapes(b)) printf(" %-38s |", shape_text(a, sizeof a, &r->of));
    if (r->ceiling >= 0 && isfinite(r->ceiling_value)) {
        snprintf(ceiling, sizeof ceiling, "%s %.4g", bench_ceiling_name((bench_ceiling)r->ceiling),
                 r->ceiling_value);
        snprintf(share, sizeof share, "%.0f %%", 100 * r->share);
    }
    printf(" %8s | %8s | %4.*f %% | %7.1f | %6.2f | %14s | %5s |\n",
           bench_short_time(c, sizeof c, r->seconds.median * 1e9),
           bench_short_time(d, sizeof d, r->seconds.min * 1e9), r->seconds.spread < 0.9995,
           100 * r->seconds.spread, r->gflops, r->gbps, ceiling, share);
}

static void print_markdown(const bench *b)
{
    char text[96];
    printf("%sfolio %s bench%s: %s\n%s, level %s, %d thread%s, ", term_start(TERM_BOLD),
           folio_version(), term_end(), bench_cpu_name(), b->info.backend, b->info.level,
           (int)b->info.num_threads, b->info.num_threads > 1 ? "s" : "");
    if (!has_shapes(b)) printf("%s, ", shape_text(text, sizeof text, &b->results[0].of));
    printf("%lld rep%s, seed %lld\n\n", (long long)b->reps, b->reps > 1 ? "s" : "",
           (long long)b->seed);
    printf("| %-13s | %-5s |", "case", "type");
    if (has_shapes(b)) printf(" %-38s |", "shape");
    printf(" %8s | %8s | %6s | %7s | %6s | %14s | %5s |\n", "median", "min", "spread", "GFLOP/s",
           "GB/s", "ceiling", "share");
    printf("|:--------------|:------|");
    if (has_shapes(b)) printf(":---------------------------------------|");
    printf("---------:|---------:|-------:|--------:|-------:|---------------:|------:|\n");
    for (int64_t i = 0; i < b->num_results; i++) print_row(b, &b->results[i]);
    printf("\n");
    for (int k = 0; k < BENCH_NUM_CEILINGS; k++)
        if (isfinite(b->machine[k]))
            printf("- ceiling over the whole run: %s %.4g %s\n",
                   bench_ceiling_name((bench_ceiling)k), b->machine[k],
                   bench_ceiling_unit((bench_ceiling)k));
}

static void print_csv(const bench *b)
{
    printf("case,phase,backend,level,threads,dtype,kv_dtype,heads,kv_heads,head_size,block_size,"
           "layout,kernel,median_s,min_s,spread,gflops,gbps,ceiling,ceiling_value,share\n");
    for (int64_t i = 0; i < b->num_results; i++) {
        const result *r = &b->results[i];
        const setting *s = &r->of;
        printf("%s,%s,%s,%s,%d,%s,%s,%d,%d,%d,%d,%s,%s,", s->what->name, s->what->phase,
               b->info.backend, b->info.level, (int)b->info.num_threads, folio_dtype_name(s->dtype),
               folio_dtype_name(s->kv_dtype), (int)s->heads.heads, (int)s->heads.kv_heads,
               (int)s->head_size, (int)s->block_size, folio_layout_name(s->layout), r->kernel);
        printf("%.6g,%.6g,%.4g,%.6g,%.6g,", r->seconds.median, r->seconds.min, r->seconds.spread,
               r->gflops, r->gbps);
        if (isfinite(r->share))
            printf("%s,%.6g,%.4g\n", bench_ceiling_key((bench_ceiling)r->ceiling), r->ceiling_value,
                   r->share);
        else printf(",,\n");
    }
}

static void write_result(json *j, const bench *b, const result *r)
{
    const setting *s = &r->of;
    json_object(j, NULL);
    json_string(j, "case", s->what->name);
    json_string(j, "phase", s->what->phase);
    json_string(j, "backend", b->info.backend);
    json_string(j, "device", b->info.device);
    json_string(j, "level", b->info.level);
    json_integer(j, "threads", b->info.num_threads);
    json_string(j, "dtype", folio_dtype_name(s->dtype));
    json_string(j, "kv_dtype", folio_dtype_name(s->kv_dtype));
    json_integer(j, "heads", s->heads.heads);
    json_integer(j, "kv_heads", s->heads.kv_heads);
    json_integer(j, "head_size", s->head_size);
    json_integer(j, "block_size", s->block_size);
    json_string(j, "layout", folio_layout_name(s->layout));
    json_string(j, "kernel", r->kernel);
    json_number(j, "median_s", r->seconds.median);
    json_number(j, "min_s", r->seconds.min);
    json_number(j, "spread", r->seconds.spread);
    json_number(j, "gflops", r->gflops);
    json_number(j, "gbps", r->gbps);
    if (r->ceiling >= 0) {
        json_object(j, "ceiling");
        json_string(j, "name", bench_ceiling_key((bench_ceiling)r->ceiling));
        json_number(j, "value", r->ceiling_value);
        json_close(j);
    } else {
        json_number(j, "ceiling", (double)NAN);
    }
    json_number(j, "share", r->share);
    json_object(j, "peers"); /* other programs on the same case; none yet */
    json_close(j);
    json_close(j);
}

static void print_json(const bench *b)
{
    json j = {.out = stdout};
    json_object(&j, NULL);
    json_string(&j, "version", folio_version());
    json_string(&j, "cpu", bench_cpu_name());
    json_object(&j, "ceilings");
    for (int k = 0; k < BENCH_NUM_CEILINGS; k++)
        json_number(&j, bench_ceiling_key((bench_ceiling)k), b->machine[k]);
    json_close(&j);
    json_array(&j, "results");
    for (int64_t i = 0; i < b->num_results; i++) write_result(&j, b, &b->results[i]);
    json_close(&j);
    json_close(&j);
}

/* ---- Options */

/* A number of the grammar, k after it or not; -1: there is none in [1, max]. */
static int64_t parse_number(const char **at, int64_t max)
{
    int64_t n = 0;
    if (**at < '0' || **at > '9') return -1;
    for (; **at >= '0' && **at <= '9'; (*at)++)
        if (n <= max) n = 10 * n + (**at - '0');
    if (**at == 'k') {
        n *= 1024;
        (*at)++;
    }
    return n >= 1 && n <= max ? n : -1;
}

/* [COUNT]qQUERY_LEN[sSEQ_LEN] */
static bool parse_group(const char **at, group *g)
{
    g->count = **at == 'q' ? 1 : parse_number(at, MAX_COUNT);
    if (g->count < 0 || *(*at)++ != 'q') return false;
    g->query_len = g->seq_len = parse_number(at, MAX_LEN);
    if (g->query_len > 0 && **at == 's') {
        (*at)++;
        g->seq_len = parse_number(at, MAX_LEN);
    }
    return g->query_len > 0 && g->seq_len >= g->query_len;
}

static void count_case(batch_case *c)
{
    bool decode = false, prefill = false;
    for (int i = 0; i < c->num_groups; i++) {
        const group *g = &c->groups[i];
        int64_t q = g->query_len, context = g->seq_len - q;
        c->seqs += g->count;
        c->rows += g->count * q;
        c->keys += g->count * g->seq_len;
        c->pairs += g->count * (q * context + q * (q + 1) / 2);
        if (g->seq_len > c->longest) c->longest = g->seq_len;
        *(q == 1 ? &decode : &prefill) = true;
    }
    c->phase = !prefill ? "decode" : !decode ? "prefill" : "mixed";
}

static bool parse_case(const char *word, void *to)
{
    batch_case *c = to;
    const char *at = word;
    *c = (batch_case){.num_groups = 0};
    if (strlen(word) >= sizeof c->name) return false;
    memcpy(c->name, word, strlen(word) + 1);
    do {
        if (c->num_groups == MAX_GROUPS || !parse_group(&at, &c->groups[c->num_groups++]))
            return false;
    } while (*at++ == '_');
    if (at[-1] != '\0') return false;
    count_case(c);
    return true;
}

static bool parse_dtype(const char *word, folio_dtype last, folio_dtype *to)
{
    for (int t = FOLIO_F32; t <= (int)last; t++)
        if (strcmp(word, folio_dtype_name((folio_dtype)t)) == 0) {
            *to = (folio_dtype)t;
            return true;
        }
    return false;
}

static bool parse_q_dtype(const char *word, void *to) { return parse_dtype(word, FOLIO_BF16, to); }

static bool parse_kv_dtype(const char *word, void *to) { return parse_dtype(word, FOLIO_INT8, to); }

static bool parse_layout(const char *word, void *to)
{
    for (int l = 0; l < FOLIO_LAYOUT_STRIDED; l++) /* that one is the caller's memory */
        if (strcmp(word, folio_layout_name((folio_layout)l)) == 0) {
            *(folio_layout *)to = (folio_layout)l;
            return true;
        }
    return false;
}

static bool parse_heads(const char *word, void *to)
{
    head_count *h = to;
    char *end, *rest;
    if (*word < '1' || *word > '9') return false;
    long heads = strtol(word, &end, 10), kv_heads = heads;
    if (*end == ':' && end[1] >= '1' && end[1] <= '9') {
        kv_heads = strtol(end + 1, &rest, 10);
        end = rest;
    }
    if (*end != '\0' || heads > 1024 || kv_heads > heads || heads % kv_heads != 0) return false;
    *h = (head_count){.heads = (int32_t)heads, .kv_heads = (int32_t)kv_heads};
    return true;
}

/* "a,b,c", each by parse into values[i], `size` bytes long. */
static bool parse_words(const char *option, const char *text, const char *takes,
                        bool (*parse)(const char *word, void *to), void *values, size_t size,
                        int *count)
{
    char word[4 * MAX_NAME];
    const char *at = text;
    *count = 0;
    for (;;) {
        size_t length = strcspn(at, ",");
        bool fits = *count < BENCH_MAX_LIST && length < sizeof word;
        if (fits) {
            memcpy(word, at, length);
            word[length] = '\0';
        }
        if (!fits || !parse(word, (char *)values + size * (size_t)*count)) break;
        (*count)++;
        at += length;
        if (*at++ == '\0') return true;
    }
    args_complain("bench", "--%s takes up to %d of %s, not '%s'", option, BENCH_MAX_LIST, takes,
                  text);
    return false;
}

/* The lists as given. */
typedef struct texts {
    const char *cases, *dtypes, *kv_dtypes, *heads, *head_sizes, *block_sizes, *layouts;
} texts;

static bool parse_lists(bench *b, const texts *t)
{
    b->num_kv_dtypes = 1; /* 0, as dtype */
    return parse_words("case", t->cases, "[COUNT]qQUERY_LEN[sSEQ_LEN] joined by _, such as 8q1s1k",
                       parse_case, b->cases, sizeof b->cases[0], &b->num_cases) &&
           parse_words("dtype", t->dtypes, "f32, f16, bf16", parse_q_dtype, b->dtypes,
                       sizeof b->dtypes[0], &b->num_dtypes) &&
           (t->kv_dtypes == NULL ||
            parse_words("kv-dtype", t->kv_dtypes, "f32, f16, bf16, fp8_e4m3, fp8_e5m2, int8",
                        parse_kv_dtype, b->kv_dtypes, sizeof b->kv_dtypes[0], &b->num_kv_dtypes)) &&
           parse_words("heads", t->heads,
                       "HEADS:KV_HEADS up to 1024, the second a divisor of the first", parse_heads,
                       b->heads, sizeof b->heads[0], &b->num_heads) &&
           bench_parse_list("bench", "head-size", t->head_sizes, 8, 512, b->head_sizes,
                            &b->num_head_sizes) &&
           bench_parse_list("bench", "block-size", t->block_sizes, 1, 4096, b->block_sizes,
                            &b->num_block_sizes) &&
           parse_words("layout", t->layouts,
                       "native, nhd, hnd, interleaved_nhd, interleaved_hnd, xpacked, xpacked_1",
                       parse_layout, b->layouts, sizeof b->layouts[0], &b->num_layouts);
}

/* ---- The command */

static bool open_bench(bench *b, int64_t count)
{
    folio_context_desc desc = {.struct_size = sizeof desc,
                               .backend = "cpu",
                               .num_threads = (int32_t)b->threads,
                               .level = b->level};
    b->info.struct_size = sizeof b->info;
    if (!bench_ok(folio_context_create(&desc, &b->ctx), "folio_context_create")) return false;
    folio_context_describe(b->ctx, &b->info);
    b->ceilings = bench_ceilings_open(b->info.num_threads);
    b->started = term_seconds();
    b->total = count * b->reps;
    b->results = bench_alloc(count, sizeof *b->results);
    for (int k = 0; k < BENCH_NUM_CEILINGS; k++)
        b->samples[k] = bench_alloc(b->total, sizeof *b->samples[k]);
    return true;
}

static void close_bench(bench *b)
{
    for (int k = 0; k < BENCH_NUM_CEILINGS; k++) free(b->samples[k]);
    free(b->results);
    bench_ceilings_close(b->ceilings);
    folio_context_destroy(b->ctx);
}

static int run_bench(bench *b)
{
    int64_t count = (int64_t)b->num_cases * b->num_dtypes * b->num_kv_dtypes * b->num_heads *
                    b->num_head_sizes * b->num_block_sizes * b->num_layouts;
    bool ok = open_bench(b, count);
    for (int64_t i = 0; i < count && b->ctx; i++) {
        setting s = nth_setting(b, i);
        ok = run_setting(b, &s) && ok;
    }
    term_progress_end();
    if (b->num_results > 0) {
        for (int k = 0; k < BENCH_NUM_CEILINGS; k++)
            b->machine[k] = isnan(b->samples[k][0]) ? (double)NAN
                                                    : bench_stats_of(b->samples[k], b->done).median;
        if (strcmp(b->output, "json") == 0) print_json(b);
        else if (strcmp(b->output, "csv") == 0) print_csv(b);
        else print_markdown(b);
    }
    close_bench(b);
    return ok ? EXIT_OK : EXIT_FAILED;
}

int bench_attention_main(int argc, char **argv)
{
    bench b = {.reps = 10, .seed = 1, .output = "md"};
    texts t = {.cases = "q512,q2k,16q1s4k,1q1s32k",
               .dtypes = "f32,bf16",
               .heads = "32:8",
               .head_sizes = "128",
               .block_sizes = "16",
               .layouts = "native"};
    const arg_option table[] = {
        {.name = "case", .kind = ARG_TEXT, .value = &t.cases},
        {.name = "dtype", .kind = ARG_TEXT, .value = &t.dtypes},
        {.name = "kv-dtype", .kind = ARG_TEXT, .value = &t.kv_dtypes},
        {.name = "heads", .kind = ARG_TEXT, .value = &t.heads},
        {.name = "head-size", .kind = ARG_TEXT, .value = &t.head_sizes},
        {.name = "block-size", .kind = ARG_TEXT, .value = &t.block_sizes},
        {.name = "layout", .kind = ARG_TEXT, .value = &t.layouts},
        {.name = "threads", .kind = ARG_NUMBER, .value = &b.threads, .min = 1, .max = 256},
        {.name = "level", .kind = ARG_TEXT, .value = &b.level},
        {.name = "reps", .kind = ARG_NUMBER, .value = &b.reps, .min = 1, .max = 10000},
        {.name = "seed", .kind = ARG_NUMBER, .value = &b.seed, .min = 0, .max = INT64_MAX},
        {.name = "output",
         .letter = 'o',
         .kind = ARG_CHOICE,
         .value = &b.output,
         .choices = "md|csv|json"},
        {.name = NULL},
    };
    switch (args_parse(argc, argv, table)) {
    case ARGS_HELP: fputs(help, stdout); return EXIT_OK;
    case ARGS_WRONG: return EXIT_USAGE;
    case ARGS_RUN: break;
    }
    if (!parse_lists(&b, &t)) return EXIT_USAGE;
    return run_bench(&b);
}
