/*
 * tile_fetch.h: lines of K and V that are on their way from memory while others are computed. Few rows fetch what they will
 * read next, in the order in which they read it and a few KiB ahead, into the nearest cache: from further away it would
 * have to come twice, and what a core can wait for at a time is scarce. Many rows fetch the next tile, evenly.
 */
#ifndef FOLIOI_TILE_FETCH_H
#define FOLIOI_TILE_FETCH_H

#include "backends/cpu/cpu_kernels.h"

enum { TILE = FOLIOI_TILE_KEYS, SUB = 16, SUBS = TILE / SUB, VECS = TILE / LANES };

/* Sub-tiles of four vectors of keys, and lines of 64 bytes that a step with four vectors reads. */
enum { GROUP = 4 * LANES / SUB };

/* Pieces of sixteen or eight tokens: of a tile, and K of the next one's first group. */
enum { MAX_PIECES = TILE / 8 + 2 * GROUP };

/* K or V to be fetched, piece by piece. */
typedef struct {
    const char *piece[MAX_PIECES];
    int32_t rows;       /* of a piece; 1: it is contiguous               */
    int64_t row_stride; /* bytes                                         */
    int32_t bytes;      /* of a row                                      */
    int32_t width;      /* lines at a time: 1, 2 or 4                    */
    bool side_by_side;  /* GROUP pieces are read together, line by line  */
    int32_t bundles;    /* of the tile: lines of `width` rows or pieces  */
} fetch_side;

typedef struct {
    const char *from[4];
    int32_t width, step, offset, end; /* lines at from[i] + offset, i < width, are next */
    int32_t at, num;                  /* bundle under way, of so many                   */
    fetch_side k, v;
} ahead;

/* The lines of bundle f->at: first the tile's K, then its V, then the next K. */
static inline void start_bundle(ahead *f)
{
    int32_t at = f->at;
    const fetch_side *s = &f->k;
    f->offset = 0;
    if (at >= f->num) { /* nothing is left */
        f->width = 0;
        f->step = 0;
        f->end = 1;
        return;
    }
    if (at >= f->k.bundles) {
        at -= f->k.bundles;
        if (at < f->v.bundles) s = &f->v;
        else at += f->k.bundles - f->v.bundles;
    }
    f->width = s->width;
    f->end = s->bytes;
    f->step = 64;
    if (s->rows == 1 && !s->side_by_side) f->step = 64 * s->width;
    int32_t per_piece = s->rows / s->width;
    for (int i = 0; i < s->width; i++) {
        if (s->side_by_side) f->from[i] = s->piece[at * s->width + i];
        else if (s->rows == 1) f->from[i] = s->piece[at] + 64 * i;
        else
            f->from[i] = s->piece[at / per_piece] + (at % per_piece * s->width + i) * s->row_stride;
    }
}

/* near: to the nearest cache. */
INLINE void fetch_ahead(ahead *f, const bool near)
{
#define LINE(i)                                                                                    \
    if (near) __builtin_prefetch(f->from[i] + f->offset, 0, 3);                                    \
    else __builtin_prefetch(f->from[i] + f->offset, 0, 2)
    if (f->width == 0) return;
    LINE(0);
    if (f->width > 1) {
        LINE(1);
        if (f->width > 2) {
            LINE(2);
            LINE(3);
        }
    }
#undef LINE
    f->offset += f->step;
    if (__builtin_expect(f->offset >= f->end, 0)) {
        f->at++;
        start_bundle(f);
    }
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
        f->at++;
        start_bundle(f);
    }
}

#endif
