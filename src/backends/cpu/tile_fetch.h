/*
 * tile_fetch.h: lines of K and V that are on their way from memory while others are computed. Few rows fetch what they will
 * read next, in the order in which they read it and a few KiB ahead: a core can wait for few lines at a time. They come to
 * L1 on CPUs where it can wait for enough of them (folioi_cpu_kernels.deep_l1), else to L2. Many rows fetch the next tile,
 * evenly.
 */
#ifndef FOLIOI_TILE_FETCH_H
#define FOLIOI_TILE_FETCH_H

#include "backends/cpu/cpu_kernels.h"

enum { TILE = FOLIOI_TILE_KEYS, SUB = 16, SUBS = TILE / SUB, VECS = TILE / LANES };

/* Sub-tiles of four vectors of keys, and lines of 64 bytes that a step with four vectors reads. */
enum { SUBS_AT_ONCE = 4 * LANES / SUB };

/* Pieces of sixteen or eight tokens: of a tile, and K of the next one's first sub-tiles. */
enum { MAX_PIECES = TILE / 8 + 2 * SUBS_AT_ONCE };

/* K or V to be fetched, piece by piece. */
typedef struct {
    const char *piece[MAX_PIECES];
    int32_t num;          /* pieces of the tile                                     */
    int32_t rows;         /* of a piece; 1: it is contiguous                        */
    int64_t row_stride;   /* bytes                                                  */
    int32_t bytes;        /* of a row, or of its slice                              */
    int32_t width;        /* lines at a time, of as many rows: 1, 2 or 4            */
    bool side_by_side;    /* `width` pieces are read together, line by line         */
    int32_t at_once;      /* else so many are read slice by slice: the first slice  */
    int32_t slices;       /* of each of them, then the next                         */
    int64_t slice_stride; /* bytes                                                  */
    bool near;            /* to L1 where rows are few, else to L2                   */
} fetch_side;

typedef struct {
    const char *from[4];
    int32_t width, step, offset, end; /* lines at from[i] + offset, i < width, are next */
    fetch_side k, v;
    const fetch_side *side; /* under way: K of the tile, its V, then the next K */
    int32_t first, last;    /* pieces read together, under way                  */
    int32_t piece, slice, row;
    int32_t num_k;   /* pieces of K, the next tile's included        */
    bool alternates; /* a piece of K, its V, the next piece of K ... */
} ahead;

static inline int32_t min_i32(int32_t a, int32_t b) { return a < b ? a : b; }

/* Begin with piece `piece` of a side, or with what comes after it. */
static void start_piece(ahead *f, const fetch_side *s, int32_t piece)
{
    if (f->alternates) {
        bool was_k = s == &f->k && piece > 0 && f->v.num > 0;
        s = was_k ? &f->v : &f->k;
        piece -= was_k;
    } else if (s == &f->k && piece == s->num && f->v.num > 0) {
        s = &f->v;
        piece = 0;
    } else if (s == &f->v && piece == s->num) {
        s = &f->k;
        piece = s->num;
    }
    int32_t num = s == &f->v ? s->num : piece < s->num ? s->num : f->num_k;
    f->side = s;
    f->piece = f->first = piece;
    f->last = min_i32(piece + s->at_once, num);
    f->slice = f->row = f->offset = 0;
    f->width = piece < num ? s->width : 0; /* 0: nothing is left */
    f->end = s->bytes;
    f->step = s->rows > 1 || s->side_by_side ? 64 : 64 * s->width;
}

/* Lines from the place under way on. */
static void start_lines(ahead *f)
{
    const fetch_side *s = f->side;
    f->offset = 0;
    if (f->width == 0) return; /* nothing is left */
    const char *from = s->piece[f->piece] + f->slice * s->slice_stride + f->row * s->row_stride;
    for (int i = 0; i < f->width; i++)
        f->from[i] = s->side_by_side ? s->piece[min_i32(f->piece + i, f->last - 1)]
                                     : from + i * (s->rows > 1 ? s->row_stride : 64);
}

/* Go on to the next rows, piece or slice. */
static void step_lines(ahead *f)
{
    const fetch_side *s = f->side;
    f->row += s->rows > 1 ? s->width : 1;
    if (f->row >= s->rows) {
        f->row = 0;
        f->piece += s->side_by_side ? s->width : 1;
        if (f->piece >= f->last && ++f->slice < s->slices) f->piece = f->first;
        if (f->piece >= f->last) start_piece(f, s, f->last);
    }
    start_lines(f);
}

/* The builtin wants a constant: clang takes no argument of an inlined function for one. */
INLINE void fetch_line(const char *line, const bool near)
{
    if (near) __builtin_prefetch(line, 0, 3);
    else __builtin_prefetch(line, 0, 2);
}

INLINE void fetch_lines(const ahead *f, const bool near)
{
    fetch_line(f->from[0] + f->offset, near);
    if (f->width == 1) return;
    fetch_line(f->from[1] + f->offset, near);
    if (f->width == 2) return;
    fetch_line(f->from[2] + f->offset, near);
    fetch_line(f->from[3] + f->offset, near);
}

/* few: for few rows, which fetch a few KiB ahead. */
INLINE void fetch_ahead(ahead *f, const bool few)
{
    if (f->width == 0) return;
    if (few && f->side->near) fetch_lines(f, true);
    else fetch_lines(f, false);
    f->offset += f->step;
    if (__builtin_expect(f->offset >= f->end, 0)) step_lines(f);
}

/* Reads a number of each line. Loads side by side wait together for lines that are still on their way; products would wait
 * for one after another. With V of bf16 a Zen 5 core reads 29.5 GB/s so, and 27 without it; K, and f32, gain nothing. */
INLINE void await_lines(const char *from, int64_t bytes)
{
    for (int64_t at = 0; at < bytes; at += 64) (void)*(const volatile char *)(from + at);
}

/* Pass over that many lines: they were fetched before. */
static inline void skip_lines(ahead *f, int32_t lines)
{
    while (lines > 0 && f->width > 0) {
        int32_t here = (f->end + f->step - 1) / f->step * f->width;
        if (lines < here) {
            f->offset = lines / f->width * f->step;
            return;
        }
        lines -= here;
        step_lines(f);
    }
}

#endif
