/*
 * instructions_emulated.h: CUDA's words and built-in functions, and what instructions.h and wgmma.h have, for a kernel that
 * the host compiles; it comes before the kernel's files, and takes the place of these two. What threads do together is told
 * the machine, with the place in the kernel where they do it.
 */
#ifndef FOLIO_TESTS_EMULATED_INSTRUCTIONS_H
#define FOLIO_TESTS_EMULATED_INSTRUCTIONS_H

#define FOLIOI_CUDA_INSTRUCTIONS_H
#define FOLIOI_CUDA_WGMMA_H

#include "machine.h"

#include "core/dtype.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include <algorithm>
#include <type_traits>

/* ---- words ---- */

#define __global__
#define __device__
#define __shared__
#define __grid_constant__
#define __forceinline__ inline
#define __align__(bytes)
#define __launch_bounds__(...)
/* `extern __shared__ char memory[]` declares the machine's pointer, and the name is what it points to. */
#define memory (*block_memory)

using std::max;
using std::min;

struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) uint2 {
    uint32_t x, y;
};
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
static inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w)
{
    return {x, y, z, w};
}

struct __half {
    uint16_t bits;
};
struct __nv_bfloat16 {
    uint16_t bits;
};

/* ---- memory ---- */

template <typename T> static inline T __ldg(const T *p) { return *p; }
template <typename T> static inline T __ldcg(const T *p) { return *p; }
template <typename T> static inline void __stcg(T *p, T x) { *p = x; }
template <typename T> static inline void __stcs(T *p, T x) { *p = x; }
static inline void prefetch(const void *) {}

static inline int32_t atomicAdd(int32_t *p, int32_t x, place at = place::here())
{
    machine_pause(at);
    int32_t was = *p;
    *p += x;
    machine_pause(at);
    return was;
}

static inline int32_t atomicCAS(int32_t *p, int32_t old, int32_t x, place at = place::here())
{
    machine_pause(at);
    int32_t was = *p;
    if (was == old) *p = x;
    return was;
}

static inline int32_t add_in_order(int32_t *p, int32_t x, place at = place::here())
{
    return atomicAdd(p, x, at);
}

static inline int32_t load_in_order(const int32_t *p, place at = place::here())
{
    machine_pause(at);
    return *p;
}

static inline void __nanosleep(unsigned, place at = place::here()) { machine_sleep(at); }

/* ---- warps ---- */

constexpr unsigned EVERY_LANE = 0xffffffffu;

struct shuffled {
    uint64_t x, got;
    int from; /* a lane */
};

static inline void shuffle(machine_warp *, void *const *lanes)
{
    for (int i = 0; i < 32; i++) {
        shuffled *s = (shuffled *)lanes[i];
        s->got = ((const shuffled *)lanes[s->from & 31])->x;
    }
}

template <typename T>
static inline T shuffle_from(const char *what, unsigned lanes, T x, int from, place at)
{
    static_assert(sizeof(T) <= 8, "words in use");
    if (lanes != EVERY_LANE) machine_fail(at, "%s of some lanes", what);
    shuffled s = {0, 0, from};
    memcpy(&s.x, &x, sizeof x);
    machine_meet(what, shuffle, &s, at);
    memcpy(&x, &s.got, sizeof x);
    return x;
}

template <typename T>
static inline T __shfl_sync(unsigned lanes, T x, int from, place at = place::here())
{
    return shuffle_from("shfl", lanes, x, from, at);
}

template <typename T>
static inline T __shfl_xor_sync(unsigned lanes, T x, int by, place at = place::here())
{
    return shuffle_from("shfl.xor", lanes, x, (int)threadIdx.x % 32 ^ by, at);
}

struct vote {
    bool mine;
    uint32_t all;
};

static inline void count_votes(machine_warp *, void *const *lanes)
{
    uint32_t all = 0;
    for (int i = 0; i < 32; i++) all |= (uint32_t)((const vote *)lanes[i])->mine << i;
    for (int i = 0; i < 32; i++) ((vote *)lanes[i])->all = all;
}

static inline uint32_t __ballot_sync(unsigned lanes, bool mine, place at = place::here())
{
    if (lanes != EVERY_LANE) machine_fail(at, "a vote of some lanes");
    vote v = {mine, 0};
    machine_meet("vote", count_votes, &v, at);
    return v.all;
}

static inline bool __any_sync(unsigned lanes, bool mine, place at = place::here())
{
    return __ballot_sync(lanes, mine, at) != 0;
}

static inline void __syncwarp(place at = place::here())
{
    machine_meet("syncwarp", NULL, NULL, at);
}

/* ---- barriers ---- */

static inline uint32_t shared_address(const void *p) { return machine_address(p); }

static inline void __syncthreads(place at = place::here())
{
    machine_named_barrier(0, (int)blockDim.x, true, at);
}

static inline void named_sync(int barrier, int threads, place at = place::here())
{
    machine_named_barrier(barrier, threads, true, at);
}

static inline void named_arrive(int barrier, int threads, place at = place::here())
{
    machine_named_barrier(barrier, threads, false, at);
}

static inline void barrier_init(uint32_t barrier, int arrivals, place at = place::here())
{
    machine_barrier_init(barrier, arrivals, at);
}

static inline void barrier_arrive(uint32_t barrier, place at = place::here())
{
    machine_barrier_arrive(barrier, 0, at);
}

static inline void bulk_expect(uint32_t barrier, int bytes, place at = place::here())
{
    machine_barrier_arrive(barrier, bytes, at);
}

static inline void bulk_wait(uint32_t barrier, uint32_t parity, place at = place::here())
{
    machine_barrier_wait(barrier, parity, at);
}

static inline void barrier_wait_idly(uint32_t barrier, uint32_t parity, place at = place::here())
{
    machine_barrier_wait(barrier, parity, at);
}

static inline void bulk_fence() {}

/* ---- copies ---- */

static inline void bulk_copy(uint32_t to, const void *from, int bytes, uint32_t barrier,
                             place at = place::here())
{
    machine_piece piece = {to, bytes, (const char *)from};
    machine_copy(&piece, 1, barrier, at);
}

typedef uint32_t cuuint32_t;
typedef uint64_t cuuint64_t;
enum CUresult { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1 };
enum CUtensorMapDataType {
    CU_TENSOR_MAP_DATA_TYPE_FLOAT16 = 6,
    CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 = 9,
};
enum CUtensorMapInterleave { CU_TENSOR_MAP_INTERLEAVE_NONE = 0 };
enum CUtensorMapSwizzle {
    CU_TENSOR_MAP_SWIZZLE_NONE = 0,
    CU_TENSOR_MAP_SWIZZLE_32B = 1,
    CU_TENSOR_MAP_SWIZZLE_64B = 2,
    CU_TENSOR_MAP_SWIZZLE_128B = 3
};
enum CUtensorMapL2promotion { CU_TENSOR_MAP_L2_PROMOTION_L2_256B = 3 };
enum CUtensorMapFloatOOBfill { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE = 0 };

struct CUtensorMap {
    const char *data;
    uint64_t dims[5], strides[5]; /* strides[i] is that of dim i */
    uint32_t box[5];
    uint32_t swizzle; /* bits of an address that its unit is XORed with */
};

/* Numbers of 2 bytes in up to five dims; with a swizzle, the first dim of a box is as long as that. */
static inline CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType, uint32_t rank,
                                              void *data, const cuuint64_t *dims,
                                              const cuuint64_t *strides, const cuuint32_t *box,
                                              const cuuint32_t *, CUtensorMapInterleave,
                                              CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                                              CUtensorMapFloatOOBfill)
{
    bool ok = rank >= 1 && rank <= 5 && (uintptr_t)data % 16 == 0 && box[0] % 8 == 0 &&
              (swizzle == CU_TENSOR_MAP_SWIZZLE_NONE || box[0] == 8u << swizzle);
    *map = {(const char *)data, {1, 1, 1, 1, 1}, {}, {1, 1, 1, 1, 1}, (1u << swizzle) - 1};
    for (uint32_t i = 0; i < rank && ok; i++) {
        ok = box[i] > 0 && box[i] <= 256 && dims[i] > 0 && dims[i] <= 1ull << 32;
        map->dims[i] = dims[i];
        map->box[i] = box[i];
        if (i == 0) continue;
        ok = ok && strides[i - 1] % 16 == 0 && strides[i - 1] < 1ull << 40;
        map->strides[i] = strides[i - 1];
    }
    return ok ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static inline void prefetch_map(const CUtensorMap *) {}

/* A box, units of 16 bytes of which are XORed with bits of their address; zeros outside of the tensor. */
static inline void copy_box(uint32_t to, const CUtensorMap *map, const int32_t (&first)[5],
                            uint32_t barrier, place at)
{
    static machine_piece pieces[8 * 256 * 256];
    int64_t rows = 1;
    int count = 0;
    if (to % 128 != 0) machine_fail(at, "a box to 0x%x", to);
    for (int i = 1; i < 5; i++) rows *= map->box[i];
    for (int64_t row = 0; row < rows; row++) {
        const char *from = map->data;
        bool is_in = true;
        int64_t rest = row;
        for (int i = 1; i < 5; i++) {
            int64_t x = first[i] + rest % map->box[i];
            rest /= map->box[i];
            is_in = is_in && x >= 0 && x < (int64_t)map->dims[i];
            from += x * (int64_t)map->strides[i];
        }
        for (uint32_t unit = 0; unit < map->box[0] / 8; unit++, to += 16) {
            int64_t x = first[0] + (int64_t)unit * 8;
            bool is_there = is_in && x >= 0 && x < (int64_t)map->dims[0];
            uint32_t address = to ^ (to >> 7 & map->swizzle) << 4;
            pieces[count++] = {address, 16, is_there ? from + x * 2 : NULL};
        }
    }
    machine_copy(pieces, count, barrier, at);
}

static inline void copy_box(uint32_t to, const CUtensorMap *map, int32_t x, int32_t y, int32_t z,
                            uint32_t barrier, place at = place::here())
{
    copy_box(to, map, {x, y, z, 0, 0}, barrier, at);
}

static inline void copy_box(uint32_t to, const CUtensorMap *map, int32_t y, int32_t z,
                            uint32_t barrier, place at = place::here())
{
    copy_box(to, map, {0, 0, 0, y, z}, barrier, at);
}

/* ---- matrices ---- */

struct matrix_rows {
    uint32_t address;
    uint32_t *words;
    place at;
};

/* Lane l gives the address of row l % 8 of matrix l / 8, and has of each row l / 4 the pair l % 4. */
template <bool LOADS> static inline void move_matrices(machine_warp *, void *const *lanes)
{
    for (int matrix = 0; matrix < 4; matrix++)
        for (int lane = 0; lane < 32; lane++) {
            const matrix_rows *row = (const matrix_rows *)lanes[matrix * 8 + lane / 4];
            char *there = machine_shared(row->address, 16, row->at) + lane % 4 * 4;
            uint32_t *word = &((const matrix_rows *)lanes[lane])->words[matrix];
            if (LOADS) memcpy(word, there, 4);
            else memcpy(there, word, 4);
        }
}

static inline void ldmatrix(uint32_t *r, uint32_t from, place at = place::here())
{
    matrix_rows rows = {from, r, at};
    machine_meet("ldmatrix", move_matrices<true>, &rows, at);
}

static inline void stmatrix(uint32_t to, const uint32_t *r, place at = place::here())
{
    matrix_rows rows = {to, const_cast<uint32_t *>(r), at};
    machine_meet("stmatrix", move_matrices<false>, &rows, at);
}

static inline void store_shared(uint32_t to, uint4 x, place at = place::here())
{
    memcpy(machine_shared(to, 16, at), &x, 16);
}

static inline void load_shared(uint32_t *r, uint32_t from, place at = place::here())
{
    memcpy(r, machine_shared(from, 16, at), 16);
}

static inline float load_shared_float(uint32_t from, place at = place::here())
{
    float x;
    memcpy(&x, machine_shared(from, 4, at), 4);
    return x;
}

static inline uint2 load_shared(uint32_t from, place at = place::here())
{
    uint2 x;
    memcpy(&x, machine_shared(from, 8, at), 8);
    return x;
}

template <int COUNT> static inline void give_registers(place at = place::here())
{
    machine_set_registers(COUNT, false, at);
}

template <int COUNT> static inline void take_registers(place at = place::here())
{
    machine_set_registers(COUNT, true, at);
}

static inline void products_begin(place at = place::here()) { machine_products_begin(at); }
static inline void products_commit(place at = place::here()) { machine_products_commit(at); }
template <int PENDING> static inline void products_wait(place at = place::here())
{
    machine_products_wait(PENDING, at);
}
template <int N> static inline void products_ready(float (&)[N]) {}
template <int N> static inline void products_forget(float (&x)[N]) { machine_poison(x, N); }

template <int PANEL = 64>
static inline uint64_t matrix_at(uint32_t address, uint32_t panel, uint32_t group)
{
    return (uint64_t)((address & 0x3ffff) >> 4) | (uint64_t)(panel >> 4) << 16 |
           (uint64_t)(group >> 4) << 32 |
           (PANEL == 64   ? 1ull
            : PANEL == 32 ? 2ull
                          : 3ull)
               << 62;
}

static inline int __ffs(int x) { return __builtin_ffs(x); }

template <typename T> constexpr bool IS_BF16 = std::is_same<T, __nv_bfloat16>::value;

template <typename T, int N, int ADD, int COUNT>
static inline void multiply_rows(float (&s)[COUNT], const uint32_t *a, uint64_t b,
                                 place at = place::here())
{
    static_assert(N / 2 <= COUNT, "they fit");
    machine_multiply({a, 0, b, N, IS_BF16<T>, false, ADD != 0}, s, at);
}

template <typename T, int N, int ADD, int COUNT>
static inline void multiply_rows(float (&s)[COUNT], uint64_t a, uint64_t b,
                                 place at = place::here())
{
    static_assert(N / 2 <= COUNT, "they fit");
    machine_multiply({NULL, a, b, N, IS_BF16<T>, false, ADD != 0}, s, at);
}

template <typename T, int COUNT>
static inline void multiply_columns(float (&o)[COUNT], const uint32_t *a, uint64_t b, int add,
                                    place at = place::here())
{
    machine_multiply({a, 0, b, 2 * COUNT, IS_BF16<T>, true, add != 0}, o, at);
}

template <typename T>
static inline void multiply_columns(float (&o)[128], const uint32_t *a, uint64_t b,
                                    place at = place::here())
{
    machine_multiply({a, 0, b, 256, IS_BF16<T>, true, true}, o, at);
}

template <typename T>
static inline void multiply_columns(float (&o)[128], uint64_t a, uint64_t b,
                                    place at = place::here())
{
    machine_multiply({NULL, a, b, 256, IS_BF16<T>, true, true}, o, at);
}

/* ---- numbers ---- */

#define CUDART_INF_F INFINITY
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;

static inline float flush(float x) { return fabsf(x) < FLT_MIN ? copysignf(0.0f, x) : x; }
static inline float exp2_approx(float x) { return flush(exp2f(x)); }
static inline float log2_approx(float x) { return log2f(flush(x)); }
static inline float reciprocal(float x) { return flush(1.0f / flush(x)); }
static inline float softmax_base(float x) { return x == -CUDART_INF_F ? 0.0f : x; }

static inline float half_bits_to_float(uint16_t bits, bool is_bf16)
{
    return is_bf16 ? bf16_to_f32(bits) : f16_to_f32(bits);
}

static inline uint16_t float_to_half_bits(float x, bool is_bf16)
{
    return is_bf16 ? f32_to_bf16(x) : f32_to_f16(x);
}

template <typename T> static inline uint32_t pack(float x, float y)
{
    return float_to_half_bits(x, IS_BF16<T>) | (uint32_t)float_to_half_bits(y, IS_BF16<T>) << 16;
}

static inline uint32_t byte_of(uint32_t x, int i) { return x >> 8 * i & 255; }

static inline float __uint_as_float(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static inline uint32_t __float_as_uint(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

/* ---- 8-bit numbers, as instructions.h has them ---- */

template <int A, int B> static inline uint32_t e5m2_to_f16(uint32_t x)
{
    return byte_of(x, A) << 8 | byte_of(x, B) << 24;
}

/* Halves whose upper bytes are e4m3; NaN is left to the caller. */
static inline uint32_t lift_e4m3(uint32_t wide)
{
    return f32_to_f16(e4m3_to_f32((uint8_t)byte_of(wide, 1))) |
           (uint32_t)f32_to_f16(e4m3_to_f32((uint8_t)byte_of(wide, 3))) << 16;
}

template <int A, int B> static inline uint32_t offset_int8_to_f16(uint32_t x)
{
    return f32_to_f16((float)byte_of(x, A) - 128.0f) |
           (uint32_t)f32_to_f16((float)byte_of(x, B) - 128.0f) << 16;
}

static inline uint32_t f16_to_bf16(uint32_t two)
{
    return f32_to_bf16(f16_to_f32((uint16_t)two)) |
           (uint32_t)f32_to_bf16(f16_to_f32((uint16_t)(two >> 16))) << 16;
}

template <int A, int B> static inline uint32_t int8_to_bf16(uint32_t x)
{
    return f32_to_bf16((float)(int8_t)byte_of(x, A)) |
           (uint32_t)f32_to_bf16((float)(int8_t)byte_of(x, B)) << 16;
}

static inline float short_scale(float scale)
{
    return __uint_as_float((__float_as_uint(scale) + 0x100u) & ~0x1ffu);
}

template <typename T, int A, int B> static inline uint32_t scale_int8(uint32_t x, float scale)
{
    float base = -32896.0f * scale;
    return pack<T>(fmaf(32896.0f + (float)(int8_t)byte_of(x, A), scale, base),
                   fmaf(32896.0f + (float)(int8_t)byte_of(x, B), scale, base));
}

template <typename T> static inline uint32_t add_odd(uint32_t odd, uint32_t two)
{
    uint32_t r = 0;
    for (int shift = 0; shift < 32; shift += 16) {
        float x = half_bits_to_float((uint16_t)(two >> shift), IS_BF16<T>),
              sum = half_bits_to_float((uint16_t)(odd >> shift), IS_BF16<T>);
        r |= (uint32_t)float_to_half_bits(fmaf(x, 0.0f, sum), IS_BF16<T>) << shift;
    }
    return r;
}

static inline uint32_t low_bits(int32_t count)
{
    return count >= 32 ? ~0u : count <= 0 ? 0 : (1u << count) - 1;
}

#endif
