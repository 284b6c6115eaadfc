/*
 * machine.h: a GPU played by one thread of the host, which finds races, missing waits and deadlocks of kernels: each
 * thread of a block is a fiber, and which runs next is drawn from a seed. What hardware may do late is done late, or early,
 * in a drawn order: copies land one by one, and products are computed when they are committed or not before they are awaited.
 * Until then what they write is NaN. The first thing that cannot be right ends the launch with a sentence.
 */
#ifndef FOLIO_TESTS_EMULATED_MACHINE_H
#define FOLIO_TESTS_EMULATED_MACHINE_H

#include <stddef.h>
#include <stdint.h>

#include <functional>

/* ---- what kernels see of themselves ---- */

typedef struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
} dim3;

extern dim3 threadIdx, blockIdx, blockDim, gridDim;
extern char (*block_memory)[]; /* dynamic shared memory of the block at hand */

/* ---- places in the source: where a thread waits ---- */

typedef struct place {
    const char *file, *function;
    int line;
    static constexpr place here(const char *file = __builtin_FILE(),
                                const char *function = __builtin_FUNCTION(),
                                int line = __builtin_LINE())
    {
        return {file, function, line};
    }
} place;

/* ---- a launch ---- */

typedef struct machine_result {
    char failure[4096]; /* empty: there was none                                     */
    int64_t steps;      /* of the scheduler                                          */
    int64_t slow_ways;  /* meetings of warps in functions whose name ends with slowly */
} machine_result;

/** A failure of the thread at hand, with its place; the launch ends. */
[[noreturn]] void machine_fail(place at, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/** Where launches draw from, and what they tell; set before one. */
void machine_seed(uint64_t seed);
extern machine_result machine_last;

/** Run `blocks` blocks beside one another; registers: of a thread, when it begins. Failures are in machine_last. */
void machine_launch(const std::function<void()> &thread, int blocks, int threads,
                    size_t shared_bytes, int registers);

/** 0 ... n - 1. */
uint32_t machine_draw(uint32_t n);

/* ---- warps ---- */

struct machine_warp;
/* lanes: what each lane gave. */
typedef void machine_act(machine_warp *warp, void *const *lanes);

/** All lanes of the warp come to the same place; the last to come does `act` for all. */
void machine_meet(const char *what, machine_act *act, void *mine, place at);
/** Other warps may run before this one goes on. */
void machine_pause(place at);
/** The thread at hand does not run for a while. */
void machine_sleep(place at);

/* ---- barriers, copies and registers ---- */

/** Shared memory at an address as kernels count them; `bytes` of it are the block's. */
char *machine_shared(uint32_t address, int bytes, place at);
uint32_t machine_address(const void *p);

void machine_barrier_init(uint32_t barrier, int arrivals, place at);
/** An arrival, which also lets the phase expect so many bytes. */
void machine_barrier_arrive(uint32_t barrier, int bytes, place at);
void machine_barrier_wait(uint32_t barrier, uint32_t parity, place at);
/** bar.sync and bar.arrive. */
void machine_named_barrier(int number, int threads, bool waits, place at);

/** Pieces of `bytes`, `count` of them, to places in shared memory; they land together. from NULL: zeros. */
typedef struct machine_piece {
    uint32_t to;
    int bytes;
    const char *from;
} machine_piece;
void machine_copy(const machine_piece *pieces, int count, uint32_t barrier, place at);

/** setmaxnreg. */
void machine_set_registers(int count, bool takes, place at);

/* ---- products (products.cc) ---- */

/* One product of 64 rows: a[64][16] from registers, or by a matrix in shared memory; b[16][n] by one. */
typedef struct machine_product {
    const uint32_t *a_registers; /* NULL: a is in shared memory */
    uint64_t a, b;
    int n;
    bool is_bf16, b_by_columns, adds; /* b_by_columns: neighbours of b lie along n */
} machine_product;

void machine_multiply(const machine_product &product, float *sums, place at);
void machine_products_begin(place at);
void machine_products_commit(place at);
void machine_products_wait(int pending, place at);
/** What a register holds that has no number. */
void machine_poison(float *x, int count);

#endif
