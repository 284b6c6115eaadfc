/* example.h: what the examples share: must() ends the program on an error; make_numbers() stands in for a model's
 * projections. */
#ifndef FOLIO_EXAMPLE_H
#define FOLIO_EXAMPLE_H

#include <folio/folio.h>

#include <stdio.h>
#include <stdlib.h>

static inline void must(folio_status status)
{
    if (status == FOLIO_OK) return;
    fprintf(stderr, "%s: %s\n", folio_status_name(status), folio_last_error());
    exit(1);
}

/* Stands for the model's projections. */
static inline void make_numbers(float *x, int64_t n, unsigned seed)
{
    for (int64_t i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        x[i] = (float)(seed >> 8) / 8388608.0f - 1.0f;
    }
}

/* A toy model's embedding of a token at a position: x[width]. */
static inline void embed_token(int32_t token, int32_t position, unsigned salt, float *x, int width)
{
    make_numbers(x, width, (unsigned)token * 2654435761u + (unsigned)position * 40503u + salt);
}

/* The token of a vocabulary whose embedding has the largest product with x; width: at most 64. */
static inline int32_t find_token(const float *x, int width, int32_t vocabulary, int32_t position,
                                 unsigned salt)
{
    int32_t best = 0;
    float best_dot = 0, e[64];
    for (int32_t t = 0; t < vocabulary; t++) {
        float dot = 0;
        embed_token(t, position, salt, e, width);
        for (int i = 0; i < width; i++) dot += x[i] * e[i];
        if (t == 0 || dot > best_dot) best_dot = dot, best = t;
    }
    return best;
}

#endif
