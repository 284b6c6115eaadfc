/*
 * bench_ceilings.c: see bench_ceilings.h. The loops are written for the instructions of a level
 * (AVX-512, AVX2 with FMA, else plain C) and chosen when the program runs; this file is compiled
 * without flags of its own.
 */
#include "bench/bench_ceilings.h"

#include "base/args.h"
#include "base/term.h"
#include "bench/bench.h"

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

/*
 * A sample of some 10 ms: where threads share a core with others, a shorter one meets them or not
 * by chance. It is cut into pieces that threads take as they come, as a forward's are: a thread that
 * another program keeps waiting costs a sample no more than it costs a case. 256 MiB: eight times the
 * last-level cache of a common server's cores that share it.
 */
enum { MAX_THREADS = 256, HUGE_PAGE = 2 << 20, PIECES = 16, ROUNDS = 1600000 / PIECES };
static const int64_t buffer_bytes = (int64_t)256 << 20;

/* A loop returns the operations it did. */
typedef double loop_fn(void);

struct bench_ceilings {
    int32_t threads;
    loop_fn *loops[BENCH_NUM_CEILINGS]; /* NULL: this CPU cannot, or BENCH_READ */
    char *buffer;
    bench_ceiling which; /* of the sample under way */
};

/* ---- Loops */

typedef float quad __attribute__((vector_size(16)));
typedef uint64_t pair __attribute__((vector_size(16)));

/* Returns the bytes it read. Memory, not the width of a load, is the limit here: 64 bytes at once gave no more than 16. */
static double read_pairs(const void *data, int64_t bytes)
{
    const pair *at = data, *end = at + bytes / (int64_t)sizeof(pair) / 8 * 8;
    pair sums[8];
    memset(sums, 0, sizeof sums);
    for (; at < end; at += 8)
        for (int k = 0; k < 8; k++) sums[k] ^= at[k];
    __asm__ volatile("" : : "m"(sums)); /* the sums are used: the loop stays */
    return (double)((const char *)end - (const char *)data);
}

/* Sums that do not wait for each other: 10 of 4 numbers. Nothing here may be worked out early. */
static double fma_plain(void)
{
    quad sums[10], factor = {0.5F, 0.5F, 0.5F, 0.5F}, term = {0.25F, 0.25F, 0.25F, 0.25F};
    memset(sums, 0, sizeof sums);
    __asm__ volatile("" : "+m"(factor), "+m"(term));
    quad f = factor, t = term;
    for (int i = 0; i < ROUNDS; i++)
        for (int k = 0; k < 10; k++) sums[k] = sums[k] * f + t;
    __asm__ volatile("" : : "m"(sums));
    return 2.0 * 4 * 10 * ROUNDS;
}

#if defined(__x86_64__)

#define TWELVE(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11)
#define TWENTY(X) TWELVE(X) X(12) X(13) X(14) X(15) X(16) X(17) X(18) X(19)

/* Two units times four or five cycles ask for 10 sums at most; 20 fit into 32 registers. */
#define START_512(i) __m512 sum##i = _mm512_setzero_ps();
#define FMA(i) __asm__ volatile("vfmadd231ps %1, %2, %0" : "+v"(sum##i) : "v"(a), "v"(b));
#define DOT(i) __asm__ volatile("vdpbf16ps %1, %2, %0" : "+v"(sum##i) : "v"(a), "v"(b));

__attribute__((target("avx512f"))) static double fma_avx512(void)
{
    __m512 a = _mm512_set1_ps(0.5F), b = _mm512_set1_ps(0.25F);
    TWENTY(START_512)
    for (int i = 0; i < ROUNDS; i++) {
        TWENTY(FMA)
    }
    return 2.0 * 16 * 20 * ROUNDS;
}

__attribute__((target("avx512f"))) static double dot_avx512(void)
{
    __m512 a = _mm512_set1_ps(0.5F), b = _mm512_set1_ps(0.25F); /* pairs of bf16 (0, 0.5) */
    TWENTY(START_512)
    for (int i = 0; i < ROUNDS; i++) {
        TWENTY(DOT)
    }
    return 2.0 * 32 * 20 * ROUNDS;
}

#define START_INT(i) __m512i sum##i = _mm512_setzero_si512();
#define DOT_INT8(i) __asm__ volatile("vpdpbusd %1, %2, %0" : "+v"(sum##i) : "v"(a), "v"(b));

__attribute__((target("avx512f"))) static double dot_vnni(void)
{
    __m512i a = _mm512_set1_epi32(0x01010101), b = a;
    TWENTY(START_INT)
    for (int i = 0; i < ROUNDS; i++) {
        TWENTY(DOT_INT8)
    }
    return 2.0 * 64 * 20 * ROUNDS;
}

/* Six tiles of 16 x 16 sums; a product is 16 x 16 x 32 multiply-adds. The context has asked for tiles. */
#define TILE_DOT(i) __asm__ volatile("tdpbf16ps %%tmm7, %%tmm6, %%tmm" #i : :);

static double dot_amx(void)
{
    struct {
        uint8_t palette, zeros[15];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1};
    for (int i = 0; i < 8; i++) config.row_bytes[i] = 64, config.rows[i] = 16;
    __asm__ volatile("ldtilecfg %0" : : "m"(config));
    for (int i = 0; i < ROUNDS / 6; i++) {
        TILE_DOT(0) TILE_DOT(1) TILE_DOT(2) TILE_DOT(3) TILE_DOT(4) TILE_DOT(5)
    }
    __asm__ volatile("tilerelease" : :);
    return 2.0 * 16 * 16 * 32 * 6 * (ROUNDS / 6);
}

/* 16 registers: 12 sums and two factors. */
#define START_256(i) __m256 sum##i = _mm256_setzero_ps();
#define FMA_256(i) __asm__ volatile("vfmadd231ps %1, %2, %0" : "+x"(sum##i) : "x"(a), "x"(b));

__attribute__((target("avx2,fma"))) static double fma_avx2(void)
{
    __m256 a = _mm256_set1_ps(0.5F), b = _mm256_set1_ps(0.25F);
    TWELVE(START_256)
    for (int i = 0; i < ROUNDS; i++) {
        TWELVE(FMA_256)
    }
    return 2.0 * 8 * 12 * ROUNDS;
}

/* Bytes to pairs, pairs to sums of four, added up: what VNNI does in one. 8 sums: it takes scratch. */
#define EIGHT(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7)
#define START_INT_256(i) __m256i sum##i = _mm256_setzero_si256();
#define MADD_INT8(i)                                                                               \
    {                                                                                              \
        __m256i pairs;                                                                             \
        __asm__ volatile("vpmaddubsw %2, %3, %1\n\tvpmaddwd %4, %1, %1\n\tvpaddd %1, %0, %0"       \
                         : "+x"(sum##i), "=&x"(pairs)                                              \
                         : "x"(a), "x"(b), "x"(ones));                                             \
    }

__attribute__((target("avx2"))) static double dot_avx2(void)
{
    __m256i a = _mm256_set1_epi8(1), b = a, ones = _mm256_set1_epi16(1);
    EIGHT(START_INT_256)
    for (int i = 0; i < ROUNDS; i++) {
        EIGHT(MADD_INT8)
    }
    return 2.0 * 32 * 8 * ROUNDS;
}

static void choose_x86(bench_ceilings *c, const char *level)
{
    bool avx2 = strncmp(level, "avx2", 4) == 0, scalar = strcmp(level, "scalar") == 0;
    __builtin_cpu_init();
    if (!avx2 && !scalar && __builtin_cpu_supports("avx512f")) {
        c->loops[BENCH_FMA_F32] = fma_avx512;
        if (strcmp(level, "avx512") != 0 && __builtin_cpu_supports("avx512bf16"))
            c->loops[BENCH_DOT_BF16] = strcmp(level, "amx") == 0 ? dot_amx : dot_avx512;
        if (__builtin_cpu_supports("avx512vnni")) c->loops[BENCH_DOT_INT8] = dot_vnni;
    } else if (!scalar && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        c->loops[BENCH_FMA_F32] = fma_avx2;
        c->loops[BENCH_DOT_INT8] = dot_avx2;
    }
}

#endif

static void choose_loops(bench_ceilings *c, const char *level)
{
    c->loops[BENCH_FMA_F32] = fma_plain;
#if defined(__x86_64__)
    choose_x86(c, level);
#else
    (void)level;
#endif
}

/* ---- Threads */

/* What the threads of one measurement share. */
typedef struct crew {
    bench_piece_fn *piece;
    void *state;
    int64_t count;
    atomic_llong next;         /* the first piece that nobody has taken */
    pthread_barrier_t barrier; /* all start together */
} crew;

typedef struct runner {
    crew *of;
    double start, end, work;
} runner;

static int64_t take(crew *c) { return atomic_fetch_add(&c->next, 1); }

/* The next piece is taken early, as forwards do: it may be on its way from memory. */
static void *run(void *state)
{
    runner *r = state;
    crew *c = r->of;
    pthread_barrier_wait(&c->barrier);
    r->start = term_seconds();
    for (int64_t i = take(c), next; i < c->count; i = next) {
        next = take(c);
        r->work += c->piece(c->state, i, next < c->count ? next : -1);
    }
    r->end = term_seconds();
    return NULL;
}

static void stop_unless(bool ok, const char *what)
{
    if (ok) return;
    term_progress_end();
    fprintf(stderr, "folio bench: %s\n", what);
    exit(EXIT_FAILED);
}

double bench_in_parallel(int32_t threads, int64_t count, bench_piece_fn *piece, void *state,
                         double *seconds)
{
    pthread_t ids[MAX_THREADS];
    runner runners[MAX_THREADS];
    crew c = {.piece = piece, .state = state, .count = count};
    if (threads > MAX_THREADS) threads = MAX_THREADS;
    stop_unless(pthread_barrier_init(&c.barrier, NULL, (unsigned)threads) == 0,
                "threads cannot be started");
    for (int32_t i = 0; i < threads; i++) {
        runners[i] = (runner){.of = &c};
        if (i > 0)
            stop_unless(pthread_create(&ids[i], NULL, run, &runners[i]) == 0,
                        "a thread cannot be started");
    }
    run(&runners[0]);
    for (int32_t i = 1; i < threads; i++) pthread_join(ids[i], NULL);
    pthread_barrier_destroy(&c.barrier);
    double start = runners[0].start, end = runners[0].end, work = 0;
    for (int32_t i = 0; i < threads; i++) {
        start = fmin(start, runners[i].start);
        end = fmax(end, runners[i].end);
        work += runners[i].work;
    }
    *seconds = end - start;
    return work;
}

/* ---- Samples */

bench_ceilings *bench_ceilings_open(int32_t threads, const char *level)
{
    bench_ceilings *c = bench_alloc(1, sizeof *c);
    c->threads = threads < MAX_THREADS ? threads : MAX_THREADS;
    choose_loops(c, level);
    c->buffer = aligned_alloc(HUGE_PAGE, (size_t)buffer_bytes);
    stop_unless(c->buffer != NULL, "cannot allocate memory for the ceilings");
    /* Small pages would make it a measure of page tables; a system without huge ones says no. */
    (void)madvise(c->buffer, (size_t)buffer_bytes, MADV_HUGEPAGE);
    memset(c->buffer, 1, (size_t)buffer_bytes);
    return c;
}

void bench_ceilings_close(bench_ceilings *c)
{
    if (c == NULL) return;
    free(c->buffer);
    free(c);
}

static double run_piece(void *state, int64_t i, int64_t next)
{
    const bench_ceilings *c = state;
    int64_t bytes = buffer_bytes / PIECES / c->threads / 256 * 256;
    (void)next;
    if (c->which != BENCH_READ) return c->loops[c->which]();
    return read_pairs(c->buffer + i * bytes, bytes);
}

double bench_ceilings_sample(bench_ceilings *c, bench_ceiling which)
{
    double seconds;
    c->which = which;
    if (which != BENCH_READ && c->loops[which] == NULL) return (double)NAN;
    double work =
        bench_in_parallel(c->threads, (int64_t)PIECES * c->threads, run_piece, c, &seconds);
    return work / seconds * 1e-9;
}

/* ---- Names */

const char *bench_ceiling_key(bench_ceiling which)
{
    static const char *const keys[] = {"fma_f32_gflops", "dot_bf16_gflops", "dot_int8_gops",
                                       "read_gbps"};
    return keys[which];
}

const char *bench_ceiling_name(const char *backend, bench_ceiling which)
{
    static const char *const names[] = {"f32 FMA", "bf16 dot", "int8 dot", "read"};
    return which == BENCH_DOT_BF16 && strcmp(backend, "cpu") != 0 ? "bf16 mma" : names[which];
}

const char *bench_ceiling_unit(bench_ceiling which)
{
    static const char *const units[] = {"GFLOP/s", "GFLOP/s", "Gop/s", "GB/s"};
    return units[which];
}
