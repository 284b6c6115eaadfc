/*
 * case_memory.c: memory of the cases. While a context of a device is open it is host memory that the device
 * reaches too, so that cases are made and judged in place; else plain memory.
 */
#include "kit/kit.h"

#include "kit/kit_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Sizes are powers of two; what is freed waits for the next of its size, since pinned memory is slow to come by. */
enum { HEADER = 64, NUM_SIZES = 48 };
#define PIECE ((size_t)64 << 20)

typedef struct chunk {
    struct chunk *next;
    int size; /* its number; -1: plain memory */
} chunk;

static folio_context *device; /* of its own, for its memory alone: others come and go */
static chunk *waiting[NUM_SIZES];
static char *piece;
static size_t piece_left;

bool kit_is_device(const folio_context *ctx)
{
    folio_context_info info = {.struct_size = sizeof info};
    return folio_context_get_info(ctx, &info) == FOLIO_OK && strcmp(info.backend, "cuda") == 0;
}

void kit_reach(const folio_context *ctx)
{
    folio_context_desc desc = {.struct_size = sizeof desc, .backend = "cuda"};
    if (device == NULL && kit_is_device(ctx) && folio_context_create(&desc, &device) != FOLIO_OK)
        device = NULL;
}

static void *no_memory(size_t bytes)
{
    fprintf(stderr, "folio: no memory for %zu bytes\n", bytes);
    exit(1);
}

/* Never given back: it lives as long as the program. */
static void *from_piece(size_t bytes)
{
    void *p;
    if (bytes > piece_left) {
        size_t size = bytes > PIECE ? bytes : PIECE;
        if (folio_memory_create(device, FOLIO_MEMORY_HOST, size, &p) != FOLIO_OK)
            return no_memory(size);
        if (bytes > PIECE) return p;
        piece = p;
        piece_left = size;
    }
    p = piece;
    piece += bytes;
    piece_left -= bytes;
    return p;
}

void *kit_alloc(size_t count, size_t size)
{
    size_t bytes = (count ? count : 1) * (size ? size : 1) + HEADER;
    int number = 7; /* 128 bytes */
    while (number < NUM_SIZES - 1 && (size_t)1 << number < bytes) number++;
    chunk *c;
    if (device == NULL) {
        c = calloc(1, bytes);
        if (c == NULL) return no_memory(bytes);
        c->size = -1;
    } else {
        c = waiting[number];
        if (c != NULL) waiting[number] = c->next;
        else c = from_piece((size_t)1 << number);
        memset(c, 0, bytes);
        c->size = number;
    }
    return (char *)c + HEADER;
}

void kit_free(const void *memory)
{
    if (memory == NULL) return;
    chunk *c = (chunk *)(void *)((char *)(uintptr_t)memory - HEADER);
    if (c->size < 0) {
        free(c);
        return;
    }
    c->next = waiting[c->size];
    waiting[c->size] = c;
}
