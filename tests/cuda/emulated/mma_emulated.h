/*
 * mma_emulated.h: what kernels of mma.sync have beside instructions_emulated.h, which comes before it. Copies of a thread
 * land when it waits for them, and until then their places hold NaN. Sums of products are cut as tensor cores cut them.
 */
#ifndef FOLIO_TESTS_EMULATED_MMA_H
#define FOLIO_TESTS_EMULATED_MMA_H

#include "instructions_emulated.h"
#include "machine_inside.h"

#include <map>

#define CUDART_NAN_F NAN

#define __noinline__

static inline float __int_as_float(int32_t x) { return f32_of_bits((uint32_t)x); }
static inline int __popc(uint32_t x) { return __builtin_popcount(x); }
static inline float __half2float(__half x) { return f16_to_f32(x.bits); }
static inline float __bfloat162float(__nv_bfloat16 x) { return bf16_to_f32(x.bits); }

/* ---- warps and blocks ---- */

static inline bool __all_sync(unsigned lanes, bool mine, place at = place::here())
{
    return __ballot_sync(lanes, mine, at) == EVERY_LANE;
}

static inline int32_t __reduce_max_sync(unsigned lanes, int32_t x, place at = place::here())
{
    for (int by = 16; by > 0; by /= 2) x = max(x, __shfl_xor_sync(lanes, x, by, at));
    return x;
}

/* A block's votes, by the meetings that all of its threads come to. */
static inline int __syncthreads_or(int mine, place at = place::here())
{
    static std::map<machine_block *, int> votes;
    int &all = votes[machine_current()->warp->block];
    __syncthreads(at);
    all = 0;
    __syncthreads(at);
    all |= mine != 0;
    __syncthreads(at);
    return all;
}

/* ---- shared memory ---- */

static inline void store_shared_u32(uint32_t to, uint32_t x, place at = place::here())
{
    memcpy(machine_shared(to, 4, at), &x, 4);
}

struct copy_on_its_way {
    char *to;
    const void *from;
    int bytes, read;
};

static inline std::vector<copy_on_its_way> &copies_of_thread(void)
{
    static std::map<machine_lane *, std::vector<copy_on_its_way>> copies;
    return copies[machine_current()];
}

template <int BYTES, int L2_BYTES = 0>
static inline void cp_async(uint32_t to, const void *from, uint32_t read, place at = place::here())
{
    if (((uintptr_t)from | to) % BYTES != 0) machine_fail(at, "a copy that is not aligned");
    char *there = machine_shared(to, BYTES, at);
    memset(there, 0xff, BYTES);
    copies_of_thread().push_back({there, from, BYTES, (int)read});
}

template <int BYTES, int L2_BYTES = 0>
static inline void cp_async(uint32_t to, const void *from, place at = place::here())
{
    cp_async<BYTES, L2_BYTES>(to, from, BYTES, at);
}

static inline void cp_async_commit(void) {}

template <int PENDING> static inline void cp_async_wait(place at = place::here())
{
    static_assert(PENDING == 0, "waits in use");
    machine_pause(at);
    for (const copy_on_its_way &c : copies_of_thread()) {
        memset(c.to, 0, (size_t)c.bytes);
        memcpy(c.to, c.from, (size_t)c.read);
    }
    copies_of_thread().clear();
}

static inline void ldmatrix_trans(uint32_t *, uint32_t, place at = place::here())
{
    machine_fail(at, "ldmatrix.trans is not emulated");
}

/* ---- what other instances have: named in functions that are not called ---- */

uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t which);
template <typename T> void mma(float *c, const uint32_t *a, uint32_t b0, uint32_t b1);
template <int A, int B> uint32_t e5m2_to_f16(uint32_t x);
template <int A, int B> uint32_t offset_int8_to_f16(uint32_t x);
uint32_t lift_e4m3(uint32_t wide);

/* In place of prefill_widen.h. */
#define FOLIOI_CUDA_PREFILL_WIDEN_H
struct any_row {};
template <class I, class... GIVEN> static any_row fetch_raw(const GIVEN &...) { abort(); }
template <class I, class... GIVEN> static void widen_tile(const GIVEN &...) { abort(); }
template <class... GIVEN> static float value_scale_at_end(const GIVEN &...) { abort(); }

/* ---- products ---- */

struct tf32_lane {
    float *c;
    const uint32_t *a;
    uint32_t b[2];
};

/* c plus 8 products, each cut at the last bit of the largest. */
static inline float add_cut(const double (&x)[9])
{
    int top = -10000, exponent;
    double sum = 0;
    for (double y : x) {
        if (!isfinite(y))
            return (float)(x[0] + x[1] + x[2] + x[3] + x[4] + x[5] + x[6] + x[7] + x[8]);
        if (y != 0 && (frexp(y, &exponent), exponent > top)) top = exponent;
    }
    if (top == -10000) return 0.0f;
    double unit = ldexp(1.0, top - 24);
    for (double y : x) sum += trunc(y / unit);
    if (sum == 0) return 0.0f;
    frexp(sum, &exponent);
    unit = ldexp(1.0, exponent > 24 ? exponent - 24 : 0);
    return (float)(trunc(sum / unit) * unit * ldexp(1.0, top - 24));
}

static inline void multiply_tf32(machine_warp *, void *const *lanes)
{
    double a[16][8], b[8][8];
    for (int l = 0; l < 32; l++) {
        const tf32_lane *lane = (const tf32_lane *)lanes[l];
        for (int i = 0; i < 4; i++)
            a[l / 4 + i % 2 * 8][l % 4 + i / 2 * 4] = f32_of_bits(lane->a[i] & 0xffffe000u);
        for (int i = 0; i < 2; i++) b[l % 4 + i * 4][l / 4] = f32_of_bits(lane->b[i] & 0xffffe000u);
    }
    for (int l = 0; l < 32; l++)
        for (int i = 0; i < 4; i++) {
            float *c = &((const tf32_lane *)lanes[l])->c[i];
            double x[9];
            for (int k = 0; k < 8; k++) x[k] = a[l / 4 + i / 2 * 8][k] * b[k][l % 4 * 2 + i % 2];
            x[8] = *c;
            *c = add_cut(x);
        }
}

static inline void mma_tf32(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1,
                            place at = place::here())
{
    tf32_lane lane = {c, a, {b0, b1}};
    machine_meet("mma", multiply_tf32, &lane, at);
}

#endif
