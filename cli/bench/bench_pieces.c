/*
 * bench_pieces.c: a ceiling for decodes on the CPU: a loop that only reads what a decode reads, in its order. A thread
 * takes one kv head of one sequence after another, the longest sequences first, and reads tiles of 128 keys: their K,
 * then their V, in pieces of 16 keys which lie where the block table says. The order is that of src/plan/schedule.c.
 */
#include "bench/bench_attention.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { PIECE_KEYS = 16, TILE_KEYS = 128, SPLIT_KEYS = 512, ITEMS_PER_THREAD = 4, LINE = 64 };

/*
 * Bytes between what is read and what is fetched. With 8 to 24 KiB a thread reads nearly the same; without fetching it reads
 * half as fast, because pieces lie in random order.
 */
enum { AHEAD_BYTES = 16384 };

typedef struct piece {
    const char *at;
    int64_t bytes;
} piece;

/* Keys of one sequence. */
typedef struct item {
    const int32_t *blocks;
    int64_t begin, end, number;
} item;

struct bench_pieces {
    piece *pieces;
    int64_t *starts; /* [num_units + 1], of pieces; a unit is one kv head of an item */
    int64_t num_units;
    bool near; /* lines are fetched to L1, else to L2: whichever this machine reads faster */
};

static bool reads_faster_near(bench_pieces *p, int32_t threads);

/* ---- Order */

static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

static int log2_of(int64_t n) { return 63 - __builtin_clzll((unsigned long long)larger(n, 1)); }

/* Largest first, by powers of two; the others in the order of the batch. */
static int compare_items(const void *a, const void *b)
{
    const item *x = a, *y = b;
    int weight_x = log2_of(x->end - x->begin), weight_y = log2_of(y->end - y->begin);
    if (weight_x != weight_y) return weight_y - weight_x;
    return (x->number > y->number) - (x->number < y->number);
}

/* Item i in pieces of whole splits, none of which is much more than a share; the others are added at the end. */
static void cut_item(item *items, int64_t i, int64_t *count, int64_t share)
{
    item whole = items[i];
    int64_t first = whole.begin / SPLIT_KEYS, splits = ceil_div(whole.end, SPLIT_KEYS) - first;
    int64_t pieces = smaller(ceil_div(whole.end - whole.begin, share), splits);
    for (int64_t p = 0; p < pieces && pieces > 1; p++) {
        item one = whole;
        one.begin = larger(whole.begin, (first + splits * p / pieces) * SPLIT_KEYS);
        one.end = smaller(whole.end, (first + splits * (p + 1) / pieces) * SPLIT_KEYS);
        one.number = p == 0 ? i : *count;
        items[p == 0 ? i : (*count)++] = one;
    }
}

/* The decodes of a rig as items, in order; the caller frees them. */
static item *make_items(const rig *r, int32_t threads, int64_t *count)
{
    const batch_case *c = r->of.what;
    int64_t wanted =
        threads == 1 ? 1 : ceil_div((int64_t)ITEMS_PER_THREAD * threads, r->of.heads.kv_heads);
    int64_t total = 0, seqs = 0;
    const int32_t *blocks = r->blocks;
    item *items = bench_alloc(c->seqs + wanted, sizeof *items);
    for (int g = 0; g < c->num_kinds; g++)
        for (int64_t i = 0; i < c->kinds[g].count; i++) {
            int64_t end = bench_seq_len(&c->kinds[g], i), window = r->of.with->window;
            item one = {.blocks = blocks, .end = end, .number = seqs};
            if (window > 0) one.begin = larger(end - window, 0);
            total += end - one.begin;
            items[seqs++] = one;
            blocks += ceil_div(end, r->of.block_size);
        }
    *count = seqs;
    for (int64_t i = 0; i < seqs; i++) cut_item(items, i, count, ceil_div(total, wanted));
    qsort(items, (size_t)*count, sizeof *items, compare_items);
    return items;
}

/* ---- Pieces */

/* One of the arrays of a layer: its first byte, bytes from block to block, from head to head and from key to key. */
typedef struct array {
    const char *base;
    int64_t block, head, key;
} array;

static array array_of(const void *base, const folio_kv_array *of, int64_t number_bytes,
                      int64_t numbers)
{
    return (array){.base = base,
                   .block = of->strides[0] * number_bytes,
                   .head = of->strides[1] * number_bytes,
                   .key = numbers * number_bytes};
}

/* Keys [begin, end) of one head, in one array; returns how many pieces. pieces NULL: only counts them. */
static int64_t add_keys(const array *a, const item *of, int32_t block_size, int32_t head,
                        int64_t begin, int64_t end, piece *pieces)
{
    int64_t count = 0;
    for (int64_t key = begin / PIECE_KEYS * PIECE_KEYS, keys; a->base && key < end; key += keys) {
        int64_t in_block = key % block_size;
        keys = smaller(PIECE_KEYS - key % PIECE_KEYS, block_size - in_block);
        if (pieces)
            pieces[count] = (piece){.at = a->base + of->blocks[key / block_size] * a->block +
                                          head * a->head + in_block * a->key,
                                    .bytes = keys * a->key};
        count++;
    }
    return count;
}

/* A unit's pieces: K of a tile, V of a tile, and so on, with the scales of each. */
static int64_t add_unit(const array *arrays, const item *of, int32_t block_size, int32_t head,
                        piece *pieces)
{
    int64_t count = 0;
    for (int64_t key = of->begin, end; key < of->end; key = end) {
        end = smaller((key / TILE_KEYS + 1) * TILE_KEYS, of->end);
        for (int i = 0; i < 4; i++)
            count += add_keys(&arrays[i], of, block_size, head, key, end,
                              pieces ? pieces + count : NULL);
    }
    return count;
}

bench_pieces *bench_pieces_open(const rig *r, int32_t threads)
{
    const setting *s = &r->of;
    folio_kv_cache_view v = {.struct_size = sizeof v};
    if (r->device || s->layout != FOLIO_LAYOUT_NATIVE || strcmp(s->what->phase, "decode") != 0 ||
        folio_kv_cache_get_view(r->l.cache, 0, &v) != FOLIO_OK)
        return NULL;
    int64_t size = (int64_t)folio_dtype_size(s->kv_dtype), scale = sizeof(float), num_items;
    const array arrays[4] = {array_of(v.k, &v.k_array, size, s->head_size),
                             array_of(v.k_scales, &v.k_scales_array, scale, 1),
                             array_of(v.v, &v.v_array, size, bench_v_size(s)),
                             array_of(v.v_scales, &v.v_scales_array, scale, 1)};
    int32_t heads = s->heads.kv_heads;
    item *items = make_items(r, threads, &num_items);
    bench_pieces *p = bench_alloc(1, sizeof *p);
    p->num_units = num_items * heads;
    p->starts = bench_alloc(p->num_units + 1, sizeof *p->starts);
    for (int64_t u = 0; u < p->num_units; u++)
        p->starts[u + 1] = p->starts[u] + add_unit(arrays, &items[u / heads], s->block_size,
                                                   (int32_t)(u % heads), NULL);
    p->pieces = bench_alloc(p->starts[p->num_units], sizeof *p->pieces);
    for (int64_t u = 0; u < p->num_units; u++)
        (void)add_unit(arrays, &items[u / heads], s->block_size, (int32_t)(u % heads),
                       p->pieces + p->starts[u]);
    free(items);
    p->near = reads_faster_near(p, threads);
    return p;
}

void bench_pieces_close(bench_pieces *p)
{
    if (p == NULL) return;
    free(p->pieces);
    free(p->starts);
    free(p);
}

/* ---- Reading */

typedef uint64_t pair __attribute__((vector_size(16)));

/* Four lines of a piece at a time, while as many of another one are fetched: line by line a thread reads less. */
static void read_piece(const piece *p, const piece *later, bool near, pair sums[4])
{
    int64_t whole = p->bytes / LINE * LINE, fetched = later ? later->bytes : 0;
    for (int64_t at = 0; at < whole; at += 4 * LINE) {
        for (int64_t i = at; i < smaller(at + 4 * LINE, fetched); i += LINE) {
            if (near) __builtin_prefetch(later->at + i, 0, 3);
            else __builtin_prefetch(later->at + i, 0, 2);
        }
        for (int64_t i = at; i < smaller(at + 4 * LINE, whole); i += LINE) {
            pair line[4];
            memcpy(line, p->at + i, sizeof line);
            for (int k = 0; k < 4; k++) sums[k] ^= line[k];
        }
    }
    if (p->bytes % LINE) sums[0][0] ^= (uint64_t)p->at[p->bytes - 1]; /* its line comes too */
}

static double read_unit(void *state, int64_t i, int64_t next)
{
    const bench_pieces *p = state;
    int64_t end = p->starts[i + 1], next_begin = next < 0 ? 0 : p->starts[next],
            next_end = next < 0 ? 0 : p->starts[next + 1];
    pair sums[4];
    memset(sums, 0, sizeof sums);
    for (int64_t k = p->starts[i]; k < end; k++) {
        int64_t later = k + larger(AHEAD_BYTES / larger(p->pieces[k].bytes, 1), 1);
        int64_t ahead = later < end ? later : next_begin + later - end;
        bool there = later < end || ahead < next_end;
        read_piece(&p->pieces[k], there ? &p->pieces[ahead] : NULL, p->near, sums);
    }
    __asm__ volatile("" : : "m"(*(const pair(*)[4])sums)); /* the sums are used: the loop stays */
    return 0;
}

double bench_pieces_read(bench_pieces *p, int32_t threads)
{
    double seconds;
    (void)bench_in_parallel(threads, p->num_units, read_unit, p, &seconds);
    return seconds;
}

static bool reads_faster_near(bench_pieces *p, int32_t threads)
{
    double best[2] = {INFINITY, INFINITY};
    for (int i = 0; i < 6; i++) {
        p->near = i % 2;
        best[i % 2] = fmin(best[i % 2], bench_pieces_read(p, threads));
    }
    return best[1] < best[0];
}
