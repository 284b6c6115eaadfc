/*
 * fuzz.h: what the fuzz targets share. A target is a file fuzz_<what>.c with one function, fuzz_run: it makes numbers
 * of an input's bytes and calls the library with them. Most inputs are valid: numbers stay in their ranges. In one
 * input of four a single fuzz_any or fuzz_spoil gives a wrong one. A find aborts with a sentence. Memory has its exact
 * size, so that AddressSanitizer sees every byte past it.
 */
#ifndef FOLIO_FUZZ_H
#define FOLIO_FUZZ_H

#include "support.h"

#define FUZZ_COUNT(list) ((int64_t)(sizeof(list) / sizeof((list)[0])))
enum { FUZZ_MAX_MEMORY = 512 };

typedef struct fuzz_input {
    const uint8_t *at;
    size_t left;
    int64_t until_wrong; /* places before the one that is wrong; below 0: all are right */
    void *memory[FUZZ_MAX_MEMORY];
    int num_memory;
} fuzz_input;

/* The target's own. */
extern const char fuzz_name[];
void fuzz_run(fuzz_input *in);
/* No number of this input is wrong. */
bool fuzz_is_valid(const fuzz_input *in);

/* The next number of an input, low .. high; low where the input has ended. */
int64_t fuzz_int(fuzz_input *in, int64_t low, int64_t high);
/* The same; or any number at all, where this place is the wrong one of the input. */
int64_t fuzz_any(fuzz_input *in, int64_t low, int64_t high);
/* The same in an array of right numbers, which is one place: one of them gets any number, mostly near low and high. */
void fuzz_spoil32(fuzz_input *in, int32_t *numbers, int64_t n, int64_t low, int64_t high);
void fuzz_spoil64(fuzz_input *in, int64_t *numbers, int64_t n, int64_t low, int64_t high);
bool fuzz_chance(fuzz_input *in, int64_t one_in);
#define FUZZ_PICK(in, list) ((list)[fuzz_int((in), 0, FUZZ_COUNT(list) - 1)])

/* Exact memory, aligned to 64 bytes, freed after the input. The second one is filled with NaN in each type. */
void *fuzz_zeros(fuzz_input *in, int64_t count, size_t size);
void *fuzz_poison(fuzz_input *in, int64_t count, size_t size);
/* Numbers in [-1, 1) of F32, F16 or BF16, by a byte of the input. */
void *fuzz_numbers(fuzz_input *in, folio_dtype dtype, int64_t count);
/* 0 .. n - 1 in some order. */
void fuzz_shuffle(fuzz_input *in, int32_t *order, int64_t n);

/* A context of one thread, made once: kind 0 is the reference, the others are the cpu's levels of this machine, lowest
 * first. What an input makes on it must be freed at the input's end. */
folio_context *fuzz_context(int64_t kind);

int64_t fuzz_num_contexts(void);
const char *fuzz_context_name(int64_t kind);
/* The allocator of the contexts: the call numbered fail_at fails, once; 0: none. */
extern support_counter fuzz_memory;

/* Counts a call, and checks its sentence where it is refused. True: accepted. */
bool fuzz_took(folio_status status);

void fuzz_find(const char *file, int line, const char *format, ...)
    __attribute__((format(printf, 3, 4), noreturn));
#define FUZZ_CHECK(cond, ...)                                                                      \
    do {                                                                                           \
        if (!(cond)) fuzz_find(__FILE__, __LINE__, __VA_ARGS__);                                   \
    } while (0)

#endif
