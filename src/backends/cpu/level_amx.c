/*
 * level_amx.c: AVX-512 with AMX's tiles: bf16 queries on keys of bf16, or of 8 bits made bf16. Up to 32 rows go against a tile of 128 keys:
 *
 *   scores [32][128]  =  q [32][k] x K [k][128]     K as the cache has it: 16 keys x 32 dims are 1 KiB in one piece
 *   p      [32][128]  =  e^(score - max)            attend_body.h's softmax, rounded to bf16
 *   out    [32][v]   +=  p [32][128] x V [128][v]   V copied to panels of 16 dims, once for all rows
 *
 * A product always takes 32 keys, 0 standing for those a row does not see, and all of a chunk of dims: what is
 * added to one number, and in which order, does not depend on the rows around it.
 */
#include "backends/cpu/cpu_kernels.h"

#if defined(__x86_64__)
#define OWN_STRIP
#include "backends/cpu/vec_avx512_bf16.h"

#include "backends/cpu/attend_split.h"

#include <cpuid.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { CHUNK = 32, ROWS = 32 };
_Static_assert(ROWS <= FOLIOI_STRIP_ROWS, "scratch for the scores of a block");

/* ------------------------------------------------------------------------------------------ tiles */

/* As ldtilecfg reads it. */
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_config;

/*
 * Tiles 0 and 1 are sums of the first 16 rows, 2 and 3 of the others; 4 and 5 hold these rows' q or p, 6 and 7
 * K or V in `pairs` rows. A caller may use tiles too, but not across our call: nothing is saved.
 */
static void configure(int32_t rows, int32_t pairs)
{
    int32_t top = rows < 16 ? rows : 16, bottom = rows > 16 ? rows - 16 : 1;
    tile_config c = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        c.row_bytes[i] = (uint16_t)(i == 4 || i == 5 ? 4 * pairs : 64);
        c.rows[i] = (uint8_t)(i >= 6 ? pairs : i < 2 || i == 4 ? top : bottom);
    }
    __asm__ volatile("ldtilecfg %0" : : "m"(c));
}

/* What was stored before is in memory: compilers do not know what a tile's load reads. */
INLINE void settle(void) { __asm__ volatile("" : : : "memory"); }

/* Pairs of dims in a product with K: as many as divide any head size, a multiple of 8. */
INLINE int32_t score_pairs(int32_t k_dims)
{
    return k_dims % 32 == 0 ? 16 : k_dims % 16 == 0 ? 8 : 4;
}

/* Up to 32 rows against a tile. */
typedef struct {
    row_block b;           /* keys from and to are multiples of CHUNK     */
    float *s;              /* [ROWS][TILE] scores, then p as bf16         */
    key_bits hidden[ROWS]; /* keys that a row does not see                */
} block_work;

/* Scores with all keys of the block. two: it has more than 16 rows. lines: of the next tile, fetched at each step. */
INLINE void make_scores(const folioi_attend_args *a, tile *t, const block_work *w, const bool two,
                        int32_t lines)
{
    int64_t stride = (int64_t)a->k_dims * 2, s_stride = TILE * sizeof *w->s;
    int32_t pairs = score_pairs(a->k_dims);
    const char *q = (const char *)a->q + w->b.row * stride, *below = q + 16 * stride;
    for (int32_t key = w->b.from; key < w->b.to; key += CHUNK) {
        const float *k0 = t->ptrs.k[key / SUB], *k1 = t->ptrs.k[key / SUB + 1];
        _tile_zero(0);
        _tile_zero(1);
        if (two) {
            _tile_zero(2);
            _tile_zero(3);
        }
        for (int32_t d = 0; d < a->k_dims / 2; d += pairs) {
            for (int32_t i = 0; i < lines; i += 4) fetch_ahead(t->products, false);
            _tile_loadd(6, k0 + d * SUB, 64);
            _tile_loadd(4, q + d * 4, stride);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, k1 + d * SUB, 64);
            _tile_dpbf16ps(1, 4, 7);
            if (!two) continue;
            _tile_loadd(5, below + d * 4, stride);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, w->s + key, s_stride);
        _tile_stored(1, w->s + key + SUB, s_stride);
        if (!two) continue;
        _tile_stored(2, w->s + key + 16 * TILE, s_stride);
        _tile_stored(3, w->s + key + 16 * TILE + SUB, s_stride);
    }
}

/* out += p x V for one panel of 16 dims, or `both` of two. */
INLINE void add_panels(const block_work *w, const bool two, const bool both, const float *v,
                       float *out, int64_t width)
{
    const int64_t stride = width * (int64_t)sizeof *out, p_stride = TILE * sizeof *w->s;
    float *below = out + 16 * width;
    _tile_loadd(0, out, stride);
    if (both) _tile_loadd(1, out + LANES, stride);
    if (two) _tile_loadd(2, below, stride);
    if (two && both) _tile_loadd(3, below + LANES, stride);
    for (int32_t pair = w->b.from / 2; pair < w->b.to / 2; pair += CHUNK / 2) {
        _tile_loadd(6, v + pair * LANES, 64);
        _tile_loadd(4, w->s + pair, p_stride);
        _tile_dpbf16ps(0, 4, 6);
        if (both) {
            _tile_loadd(7, v + (pair + TILE / 2) * LANES, 64);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (!two) continue;
        _tile_loadd(5, w->s + pair + 16 * TILE, p_stride);
        _tile_dpbf16ps(2, 5, 6);
        if (both) _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, out, stride);
    if (both) _tile_stored(1, out + LANES, stride);
    if (two) _tile_stored(2, below, stride);
    if (two && both) _tile_stored(3, below + LANES, stride);
}

/* ---------------------------------------------------------------------------------- a tile of keys */

/*
 * V as [panels of 16 dims][64 pairs][16], with zeros for keys that nobody sees, in every chunk that somebody
 * does; and K for sub-tiles past the last key, whose scores are made and never used.
 */
static void prepare(const folioi_attend_args *a, tile *t)
{
    int32_t width = (int32_t)folioi_out_stride(a->v_dims);
    int32_t end = (t->n + CHUNK - 1) / CHUNK * CHUNK;
    for (int32_t key = t->first / CHUNK * CHUNK; key < end; key += 2) {
        float *to = a->v_panels + key / 2 * LANES;
        if (key + 1 < t->first || key >= t->n) {
            for (int32_t d = 0; d < width; d += LANES)
                vec_store(to + d * (TILE / 2), vec_set1(0.0f));
            continue;
        }
        uint32_t low = key < t->first ? 0 : 0xffffu, high = key + 1 < t->n ? 0xffff0000u : 0;
        __m512i seen = _mm512_set1_epi32((int)(low | high));
        const float *v = t->ptrs.v[key / SUB] + key % SUB / 2 * t->ptrs.v_stride[key / SUB];
        for (int32_t d = 0; d < width; d += LANES)
            _mm512_storeu_si512(to + d * (TILE / 2),
                                _mm512_and_si512(_mm512_loadu_si512(v + d), seen));
    }
    for (int32_t i = (t->n + SUB - 1) / SUB; i < SUBS; i++) t->ptrs.k[i] = t->ptrs.k[0];
}

/* One row where V has numbers that it may not see: the same product, with zeros in their place. */
static void add_row_alone(const folioi_attend_args *a, const block_work *w, int32_t r)
{
    int32_t width = (int32_t)folioi_out_stride(a->v_dims);
    uint32_t clean[CHUNK / 2][LANES] __attribute__((aligned(64)));
    for (int32_t chunk = w->b.from / CHUNK; chunk < w->b.to / CHUNK; chunk++) {
        uint32_t bits = (uint32_t)(w->hidden[r].word[chunk * CHUNK / 64] >> (chunk * CHUNK % 64));
        for (int32_t d = 0; d < width; d += LANES) {
            const float *v = a->v_panels + d * (TILE / 2) + chunk * (CHUNK / 2) * LANES;
            for (int j = 0; j < CHUNK / 2; j++) {
                uint32_t seen = (bits >> (2 * j) & 1 ? 0 : 0xffffu) |
                                (bits >> (2 * j + 1) & 1 ? 0 : 0xffff0000u);
                for (int i = 0; i < LANES; i++) clean[j][i] = bits_of_f32(v[j * LANES + i]) & seen;
            }
            settle();
            float *out = a->state.out + (w->b.row + r) * (int64_t)width + d;
            _tile_loadd(0, out, 64);
            _tile_loadd(4, w->s + r * TILE + chunk * CHUNK / 2, 64);
            _tile_loadd(6, clean, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_stored(0, out, 64);
        }
    }
}

/* ----------------------------------------------------------------------------------- blocks of rows */

INLINE void attend_block(const folioi_attend_args *a, tile *t, block_work *w, const bool two,
                         int32_t *shape, int32_t lines)
{
    int32_t width = (int32_t)folioi_out_stride(a->v_dims), pairs = score_pairs(a->k_dims), d = 0;
    if (*shape != w->b.rows) configure(w->b.rows, pairs);
    *shape = pairs == CHUNK / 2 ? w->b.rows : 0;
    settle();
    make_scores(a, t, w, two, lines);
    if (softmax_block(a, t, &w->b, w->s, w->hidden)) {
        /* a probability of 0 hides what is finite */
        if (t->values == UNKNOWN) t->values = values_are_finite(t, a->v_dims) ? FINITE : NOT_FINITE;
        if (t->values == NOT_FINITE) {
            configure(1, CHUNK / 2);
            *shape = 0;
            for (int32_t r = 0; r < w->b.rows; r++) add_row_alone(a, w, r);
            return;
        }
    }
    if (pairs != CHUNK / 2) configure(w->b.rows, CHUNK / 2);
    settle();
    float *out = a->state.out + (int64_t)w->b.row * width;
    const float *v = a->v_panels;
    for (; d + 2 * LANES <= width; d += 2 * LANES, v += LANES * TILE)
        add_panels(w, two, true, v, out + d, width);
    if (d < width) add_panels(w, two, false, v, out + d, width);
}

/* All rows against a tile. */
static void attend_strip(const folioi_attend_args *a, const tile_plan *plan, tile *t, int32_t row,
                         int32_t rows)
{
    (void)plan;
    prepare(a, t);
    int32_t blocks = (rows + ROWS - 1) / ROWS, shape = 0; /* rows the tiles are configured for */
    /* the next tile's lines are fetched a few at each step of the scores */
    int32_t steps = blocks * (TILE / CHUNK) * (a->k_dims / 2 / score_pairs(a->k_dims));
    int32_t lines = TILE * 2 * (a->k_dims + a->v_dims) / 64 / steps + 1;
    block_work w = {.s = a->scores};
    for (int32_t r = row; r < row + rows; r += ROWS) {
        w.b = make_block(a, t, r, row + rows - r < ROWS ? row + rows - r : ROWS);
        if (w.b.from >= w.b.to) continue;
        w.b.from = w.b.from / CHUNK * CHUNK;
        w.b.to = (w.b.to + CHUNK - 1) / CHUNK * CHUNK;
        if (w.b.rows > 16) attend_block(a, t, &w, true, &shape, lines);
        else attend_block(a, t, &w, false, &shape, lines);
    }
}

/* ------------------------------------------------------------------------------------------ level */

/* Rows of q as they are: [rows][dims] of bf16. */
static void copy_queries(float *to, const void *q, folio_dtype type, const int64_t *from,
                         int32_t rows, int32_t dims)
{
    (void)type;
    for (int32_t r = 0; r < rows; r++)
        memcpy((uint16_t *)to + (int64_t)r * dims, (const uint16_t *)q + from[r],
               (size_t)dims * sizeof(uint16_t));
}

static void attend_amx(const folioi_attend_args *a, folio_dtype kv)
{
    /* tiles take numbers below 2^-126 for zero: so must the steps between, or a product with zeros changed them */
    unsigned mode = _mm_getcsr();
    _mm_setcsr(mode | _MM_FLUSH_ZERO_ON);
    attend_split(a, kv);
    _tile_release();
    _mm_setcsr(mode);
}

#define LEVEL amx
#define ATTEND attend_amx
#define LOAD_QUERIES copy_queries
#include "backends/cpu/attend_table.h"

/* Linux lets a process use tiles once it has asked. */
static bool allowed;
static pthread_once_t asked = PTHREAD_ONCE_INIT;

static void ask(void)
{
#if defined(SYS_arch_prctl)
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    const unsigned tiles = 1u << 24, bf16 = 1u << 22, int8 = 1u << 25;
    const unsigned saved = 1u << 17 | 1u << 18; /* the system keeps tiles and their shape */
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c >> 27 & 1u)) return;
    __asm__("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
    if ((a & saved) != saved || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
    if (!(d & tiles) || !(d & bf16) || !(d & int8)) return;
    allowed = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#endif
}

bool folioi_cpu_has_amx(void)
{
    if (!folioi_cpu_has_avx512_bf16()) return false;
    pthread_once(&asked, ask);
    return allowed;
}

bool folioi_cpu_wants_amx(void) { return true; }

void folioi_cpu_fill_amx(folioi_cpu_kernels *table)
{
    fill_bytes();
    fill_attend(table);
    table->exp2 = exp2_of;
    table->soft_cap = soft_cap_of;
    table->store_row = store_row;
}
#endif
