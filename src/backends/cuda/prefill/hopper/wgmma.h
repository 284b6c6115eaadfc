/*
 * wgmma.h: instructions of sm_90a alone: matrix products of four warps at once (a warpgroup), which run beside the threads
 * that start them, and registers handed from warps that need few to those that need many.
 *
 * A warpgroup's product has 64 rows, 16 of each warp: lane l has rows l / 4 and l / 4 + 8 of them and, of every 8 columns,
 * the pair 2 * (l % 4), as mma.m16n8k16 has them.
 */
#ifndef FOLIOI_CUDA_WGMMA_H
#define FOLIOI_CUDA_WGMMA_H

#include "backends/cuda/instructions.h"

#include <cuda.h>

/* ---- barriers in shared memory, beside those of instructions.h ---- */

static __device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals)
                 : "memory");
}

static __device__ __forceinline__ void barrier_arrive(uint32_t barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/*
 * bulk_wait of a warp that has time. A lone lane that only tries comes back every 14 cycles: three such warps took a sixth of
 * all instructions that a multiprocessor can begin.
 */
static __device__ __forceinline__ void barrier_wait_idly(uint32_t barrier, uint32_t parity)
{
    for (;;) {
        uint32_t done;
        asm volatile("{.reg .pred p;\n"
                     "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, p;}"
                     : "=r"(done)
                     : "r"(barrier), "r"(parity)
                     : "memory");
        if (done) return;
        __nanosleep(64);
    }
}

/* ---- copies of boxes: rows of a tensor that a map describes, a panel of each (matrix_at) ---- */

static __device__ __forceinline__ void prefetch_map(const CUtensorMap *map)
{
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

static __device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap *map, int32_t x,
                                                int32_t y, int32_t z, uint32_t barrier)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
                 "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier)
                 : "memory");
}

/* Boxes of a cache, hopper_boxes: all numbers of 16 tokens of a kv head. y: the first token / 8 in its block; z: block and head. */
static __device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap *map, int32_t y,
                                                int32_t z, uint32_t barrier)
{
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %2, %2, %3, %4}], [%5];" ::"r"(to),
                 "l"(map), "r"(0), "r"(y), "r"(z), "r"(barrier)
                 : "memory");
}

/* ---- registers ---- */

/* A word whose lowest `count` bits are ones, up to all 32. */
static __device__ __forceinline__ uint32_t low_bits(int32_t count)
{
    uint32_t r;
    asm("bmsk.clamp.b32 %0, 0, %1;" : "=r"(r) : "r"(count));
    return r;
}

template <int COUNT> static __device__ __forceinline__ void give_registers()
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT> static __device__ __forceinline__ void take_registers()
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

/* ---- products ---- */

/* Registers that threads wrote are ready for the products that follow. */
static __device__ __forceinline__ void products_begin()
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

/* Ends the batch of products since the last call. */
static __device__ __forceinline__ void products_commit()
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/* Until at most PENDING batches are on their way. */
template <int PENDING> static __device__ __forceinline__ void products_wait()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

/* Sums are not read before this: the compiler sees no bond between a wait and the registers it waits for. */
template <int N> static __device__ __forceinline__ void products_ready(float (&x)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(x[i])::"memory");
}

/* Sums that a product is about to replace: what they were is nobody's, and takes no registers until then. */
template <int N> static __device__ __forceinline__ void products_forget(float (&x)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "=f"(x[i]));
}

/*
 * A matrix in shared memory, in panels of 64, 32 or 16 numbers: bands of 8 rows of a panel, 128, 64 or 32 bytes each, whose
 * 16-byte units are XORed with the row's number, its half or its quarter. Given are its address, and bytes from a panel to
 * the next and from a band to the next.
 */
template <int PANEL = 64>
static __device__ __forceinline__ uint64_t matrix_at(uint32_t address, uint32_t panel,
                                                     uint32_t band)
{
    return (uint64_t)((address & 0x3ffff) >> 4) | (uint64_t)(panel >> 4) << 16 |
           (uint64_t)(band >> 4) << 32 |
           (PANEL == 64   ? 1ull
            : PANEL == 32 ? 2ull
                          : 3ull)
               << 62;
}

#define SUMS_4(x, i) "+f"(x[i]), "+f"(x[i + 1]), "+f"(x[i + 2]), "+f"(x[i + 3])
#define SUMS_16(x, i) SUMS_4(x, i), SUMS_4(x, i + 4), SUMS_4(x, i + 8), SUMS_4(x, i + 12)
#define SUMS_32(x) SUMS_16(x, 0), SUMS_16(x, 16)
#define SUMS_40(x) SUMS_32(x), SUMS_4(x, 32), SUMS_4(x, 36)
#define SUMS_48(x) SUMS_32(x), SUMS_16(x, 32)
#define SUMS_56(x) SUMS_48(x), SUMS_4(x, 48), SUMS_4(x, 52)
#define SUMS_64(x) SUMS_48(x), SUMS_16(x, 48)
#define SUMS_96(x) SUMS_64(x), SUMS_16(x, 64), SUMS_16(x, 80)
#define SUMS_128(x) SUMS_96(x), SUMS_16(x, 96), SUMS_16(x, 112)
#define NAMES_16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define NAMES_32 NAMES_16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define NAMES_40 NAMES_32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define NAMES_48 NAMES_40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define NAMES_56 NAMES_48 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define NAMES_64 NAMES_56 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define NAMES_80 NAMES_64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define NAMES_96 NAMES_80 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define NAMES_112                                                                                  \
    NAMES_96 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define NAMES_128                                                                                  \
    NAMES_112 ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define FACTORS(a) "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])

/*
 * s[64][N] = a[64][16] b[N][16]^T, plus s where ADD; neighbours of b, and of a in shared memory, lie along the 16. S: numbers
 * of a thread; then the operands behind them.
 */
#define MULTIPLY_ROWS(type, n, S, a0, a1, a2, a3, b0, add)                                         \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type " {" NAMES_##S     \
                 "},{%" a0 ",%" a1 ",%" a2 ",%" a3 "},%" b0 ",%" add ",1,1,0;"                     \
                 : SUMS_##S(s)                                                                     \
                 : FACTORS(a), "l"(b), "n"(ADD))
template <typename T, int N, int ADD, int COUNT>
static __device__ __forceinline__ void multiply_rows(float (&s)[COUNT], const uint32_t *a,
                                                     uint64_t b)
{
    constexpr bool BF16 = IS_BF16<T>;
    static_assert(N == 64 || N == 80 || N == 96 || N == 128, "widths in use");
    static_assert(N / 2 <= COUNT, "they fit");
    if constexpr (N == 64 && BF16)
        MULTIPLY_ROWS("bf16", "64", 32, "32", "33", "34", "35", "36", "37");
    else if constexpr (N == 64) MULTIPLY_ROWS("f16", "64", 32, "32", "33", "34", "35", "36", "37");
    else if constexpr (N == 80 && BF16)
        MULTIPLY_ROWS("bf16", "80", 40, "40", "41", "42", "43", "44", "45");
    else if constexpr (N == 80) MULTIPLY_ROWS("f16", "80", 40, "40", "41", "42", "43", "44", "45");
    else if constexpr (N == 96 && BF16)
        MULTIPLY_ROWS("bf16", "96", 48, "48", "49", "50", "51", "52", "53");
    else if constexpr (N == 96) MULTIPLY_ROWS("f16", "96", 48, "48", "49", "50", "51", "52", "53");
    else if constexpr (BF16) MULTIPLY_ROWS("bf16", "128", 64, "64", "65", "66", "67", "68", "69");
    else MULTIPLY_ROWS("f16", "128", 64, "64", "65", "66", "67", "68", "69");
}

#define MULTIPLY_SHARED(type, n, S, a0, b0, add)                                                   \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type " {" NAMES_##S     \
                 "},%" a0 ",%" b0 ",%" add ",1,1,0,0;"                                             \
                 : SUMS_##S(s)                                                                     \
                 : "l"(a), "l"(b), "n"(ADD))
template <typename T, int N, int ADD, int COUNT>
static __device__ __forceinline__ void multiply_rows(float (&s)[COUNT], uint64_t a, uint64_t b)
{
    constexpr bool BF16 = IS_BF16<T>;
    static_assert(N == 64 || N == 80 || N == 96 || N == 112 || N == 128, "widths in use");
    static_assert(N / 2 <= COUNT, "they fit");
    if constexpr (N == 64 && BF16) MULTIPLY_SHARED("bf16", "64", 32, "32", "33", "34");
    else if constexpr (N == 64) MULTIPLY_SHARED("f16", "64", 32, "32", "33", "34");
    else if constexpr (N == 80 && BF16) MULTIPLY_SHARED("bf16", "80", 40, "40", "41", "42");
    else if constexpr (N == 80) MULTIPLY_SHARED("f16", "80", 40, "40", "41", "42");
    else if constexpr (N == 96 && BF16) MULTIPLY_SHARED("bf16", "96", 48, "48", "49", "50");
    else if constexpr (N == 96) MULTIPLY_SHARED("f16", "96", 48, "48", "49", "50");
    else if constexpr (N == 112 && BF16) MULTIPLY_SHARED("bf16", "112", 56, "56", "57", "58");
    else if constexpr (N == 112) MULTIPLY_SHARED("f16", "112", 56, "56", "57", "58");
    else if constexpr (BF16) MULTIPLY_SHARED("bf16", "128", 64, "64", "65", "66");
    else MULTIPLY_SHARED("f16", "128", 64, "64", "65", "66");
}

/* o[64][2 * COUNT] = a[64][16] b[16][2 * COUNT], plus o where `add`; neighbours of b lie along its rows. */
#define MULTIPLY_COLUMNS(type, n, S, a0, a1, a2, a3, b0, sum)                                      \
    asm volatile("{.reg .pred add; setp.ne.b32 add,%" sum ",0;"                                    \
                 "wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type " {" NAMES_##S     \
                 "},{%" a0 ",%" a1 ",%" a2 ",%" a3 "},%" b0 ",add,1,1,1;}"                         \
                 : SUMS_##S(o)                                                                     \
                 : FACTORS(a), "l"(b), "r"(add))
template <typename T, int COUNT>
static __device__ __forceinline__ void multiply_columns(float (&o)[COUNT], const uint32_t *a,
                                                        uint64_t b, int add)
{
    constexpr bool BF16 = IS_BF16<T>;
    static_assert(COUNT == 32 || COUNT == 40 || COUNT == 48 || COUNT == 64 || COUNT == 96 ||
                      COUNT == 128,
                  "widths in use");
    if constexpr (COUNT == 32 && BF16)
        MULTIPLY_COLUMNS("bf16", "64", 32, "32", "33", "34", "35", "36", "37");
    else if constexpr (COUNT == 32)
        MULTIPLY_COLUMNS("f16", "64", 32, "32", "33", "34", "35", "36", "37");
    else if constexpr (COUNT == 40 && BF16)
        MULTIPLY_COLUMNS("bf16", "80", 40, "40", "41", "42", "43", "44", "45");
    else if constexpr (COUNT == 40)
        MULTIPLY_COLUMNS("f16", "80", 40, "40", "41", "42", "43", "44", "45");
    else if constexpr (COUNT == 48 && BF16)
        MULTIPLY_COLUMNS("bf16", "96", 48, "48", "49", "50", "51", "52", "53");
    else if constexpr (COUNT == 48)
        MULTIPLY_COLUMNS("f16", "96", 48, "48", "49", "50", "51", "52", "53");
    else if constexpr (COUNT == 64 && BF16)
        MULTIPLY_COLUMNS("bf16", "128", 64, "64", "65", "66", "67", "68", "69");
    else if constexpr (COUNT == 64)
        MULTIPLY_COLUMNS("f16", "128", 64, "64", "65", "66", "67", "68", "69");
    else if constexpr (COUNT == 96 && BF16)
        MULTIPLY_COLUMNS("bf16", "192", 96, "96", "97", "98", "99", "100", "101");
    else if constexpr (COUNT == 96)
        MULTIPLY_COLUMNS("f16", "192", 96, "96", "97", "98", "99", "100", "101");
    else if constexpr (BF16)
        MULTIPLY_COLUMNS("bf16", "256", 128, "128", "129", "130", "131", "132", "133");
    else MULTIPLY_COLUMNS("f16", "256", 128, "128", "129", "130", "131", "132", "133");
}

/* The same with 256 columns, plus o: of latent attention. a in registers, or in shared memory. */
#define MULTIPLY_WIDE(type)                                                                        \
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type " {" NAMES_128       \
                 "},{%128,%129,%130,%131},%132,1,1,1,1;"                                           \
                 : SUMS_128(o)                                                                     \
                 : FACTORS(a), "l"(b))
template <typename T>
static __device__ __forceinline__ void multiply_columns(float (&o)[128], const uint32_t *a,
                                                        uint64_t b)
{
    if constexpr (IS_BF16<T>) MULTIPLY_WIDE("bf16");
    else MULTIPLY_WIDE("f16");
}

#define MULTIPLY_WIDE_SHARED(type)                                                                 \
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type " {" NAMES_128       \
                 "},%128,%129,1,1,1,0,1;"                                                          \
                 : SUMS_128(o)                                                                     \
                 : "l"(a), "l"(b))
template <typename T>
static __device__ __forceinline__ void multiply_columns(float (&o)[128], uint64_t a, uint64_t b)
{
    if constexpr (IS_BF16<T>) MULTIPLY_WIDE_SHARED("bf16");
    else MULTIPLY_WIDE_SHARED("f16");
}

/* ---- barriers of some of a block's warps, by number; and a warp's four matrices to shared memory ---- */

static __device__ __forceinline__ void named_sync(int barrier, int threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

static __device__ __forceinline__ void named_arrive(int barrier, int threads)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

static __device__ __forceinline__ void stmatrix(uint32_t to, const uint32_t *r)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
                 "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

static __device__ __forceinline__ float load_shared_float(uint32_t from)
{
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(from) : "memory");
    return x;
}

/* ---- 8-bit numbers, beside those of instructions.h ---- */

static __device__ __forceinline__ uint32_t f16_to_bf16(uint32_t two)
{
    float2 x = __half22float2(*(__half2 *)&two);
    return pack<__nv_bfloat16>(x.x, x.y);
}

/* 0x4300 + its lower 7 bits is 128 + what they are in bf16; 0x4300 + its sign's bit is 128 or 256. */
template <int A, int B> static __device__ __forceinline__ uint32_t int8_to_bf16(uint32_t x)
{
    uint32_t u = __byte_perm(x, 0x43434343u, 0x4040 | B << 8 | A), low = u & 0xff7fff7fu,
             sign = u & 0xff80ff80u;
    __nv_bfloat162 two = __hsub2(*(__nv_bfloat162 *)&low, *(__nv_bfloat162 *)&sign);
    return *(uint32_t *)&two;
}

/* A scale of 15 bits: 2^15 + 128 times it is exact. */
static __device__ __forceinline__ float short_scale(float scale)
{
    return __uint_as_float((__float_as_uint(scale) + 0x100u) & ~0x1ffu);
}

/* Bytes A and B, int8, times a short scale, rounded to T once. 0x4700uu00 is 2^15 + uu in f32, uu being the number plus 128. */
template <typename T, int A, int B>
static __device__ __forceinline__ uint32_t scale_int8(uint32_t x, float scale)
{
    uint32_t u = x ^ 0x80808080u;
    float base = -32896.0f * scale;
    return pack<T>(
        fmaf(__uint_as_float(__byte_perm(u, 0x47000000u, 0x7404 | A << 4)), scale, base),
        fmaf(__uint_as_float(__byte_perm(u, 0x47000000u, 0x7404 | B << 4)), scale, base));
}

#endif
