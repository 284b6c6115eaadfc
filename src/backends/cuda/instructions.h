/*
 * instructions.h: the instructions of sm_80 and later that attention kernels use, one function each, and the steps that
 * their exponentials share. T is __half or __nv_bfloat16. Fragments are those of mma.m16n8k16: lane l holds rows l / 4
 * and l / 4 + 8 and, of every 8 columns, the pair 2 * (l % 4).
 */
#ifndef FOLIOI_CUDA_INSTRUCTIONS_H
#define FOLIOI_CUDA_INSTRUCTIONS_H

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>
#include <stdint.h>
#include <type_traits>

constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;

template <typename T> constexpr bool IS_BF16 = std::is_same<T, __nv_bfloat16>::value;

/* ---- shared memory ---- */

static __device__ __forceinline__ uint32_t shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* 16 bytes. */
static __device__ __forceinline__ void load_shared(uint32_t r[4], uint32_t from)
{
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(from)
                 : "memory");
}

/* 8 bytes. */
static __device__ __forceinline__ uint2 load_shared(uint32_t from)
{
    uint2 x;
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(from) : "memory");
    return x;
}

static __device__ __forceinline__ void store_shared(uint32_t to, uint4 x)
{
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z),
                 "r"(x.w)
                 : "memory");
}

static __device__ __forceinline__ void store_shared_u32(uint32_t to, uint32_t x)
{
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(x) : "memory");
}

static __device__ __forceinline__ void store_shared_u16(uint32_t to, uint16_t x)
{
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(x) : "memory");
}

/* The low byte of x. */
static __device__ __forceinline__ void store_shared_u8(uint32_t to, uint16_t x)
{
    asm volatile("st.shared.u8 [%0], %1;" ::"r"(to), "h"(x) : "memory");
}

/* ---- copies to shared memory ---- */

/* 16, 8 or 4 bytes. L2_BYTES 128: the 128 bytes around them are brought to L2. */
template <int BYTES, int L2_BYTES = 0>
static __device__ __forceinline__ void cp_async(uint32_t to, const void *from)
{
    static_assert(L2_BYTES == 0 || (BYTES == 16 && L2_BYTES == 128), "copies in use");
    if constexpr (L2_BYTES == 128)
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from)
                     : "memory");
    else if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(BYTES)
                     : "memory");
}

/* The same of which `read` bytes are read; the others are zeros. */
template <int BYTES, int L2_BYTES = 0>
static __device__ __forceinline__ void cp_async(uint32_t to, const void *from, uint32_t read)
{
    static_assert(L2_BYTES == 0 || (BYTES == 16 && L2_BYTES == 128), "copies in use");
    if constexpr (L2_BYTES == 128)
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                     "r"(read)
                     : "memory");
    else if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(read)
                     : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from),
                     "n"(BYTES), "r"(read)
                     : "memory");
}

static __device__ __forceinline__ void cp_async_commit()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int PENDING> static __device__ __forceinline__ void cp_async_wait()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

/*
 * Copies of many bytes by one thread, from sm_90 on: memory gives about 5 % more to them than to copies of 16
 * bytes. They end at a barrier in shared memory, which counts their bytes. Call these where HAS_BULK_COPIES only.
 */
#if __CUDA_ARCH__ >= 900
constexpr bool HAS_BULK_COPIES = true;
#else
constexpr bool HAS_BULK_COPIES = false;
#endif

static __device__ __forceinline__ void bulk_init(uint32_t barrier)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
}

static __device__ __forceinline__ void bulk_expect(uint32_t barrier, int bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

static __device__ __forceinline__ void bulk_copy(uint32_t to, const void *from, int bytes,
                                                 uint32_t barrier)
{
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
        "[%3];" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
}

/* What threads wrote to shared memory comes before what bulk copies write there. */
static __device__ __forceinline__ void bulk_fence()
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

static __device__ __forceinline__ void bulk_wait(uint32_t barrier, uint32_t parity)
{
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n"
                 "}" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
}

/* ---- memory ---- */

/* Bring a line nearer: to L2. */
static __device__ __forceinline__ void prefetch(const void *p)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

/*
 * Add to a number and get what it was. What this thread's block wrote before, up to its last barrier, is seen by every block
 * that meets the sum here.
 */
static __device__ __forceinline__ int32_t add_in_order(int32_t *p, int32_t x)
{
    int32_t was;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;"
                 : "=r"(was)
                 : "l"(p), "r"(x)
                 : "memory");
    return was;
}

/* A number that other blocks add to; what they wrote before is seen. */
static __device__ __forceinline__ int32_t load_in_order(const int32_t *p)
{
    int32_t x;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
    return x;
}

/* ---- launches that overlap, from sm_90 on: see launch.h ---- */

/* Wait until the kernels ahead in the stream have ended, and see what they wrote. */
static __device__ __forceinline__ void await_kernels_ahead()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* The next kernel in the stream may begin when all blocks have come here. */
static __device__ __forceinline__ void let_next_begin()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* ---- clusters of blocks, from sm_90 on: call these where HAS_BULK_COPIES only ---- */

/* Number of this block in its cluster. */
static __device__ __forceinline__ uint32_t cluster_rank()
{
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

/*
 * All threads of a cluster come to the one and then to the other. Of what a thread did before the first, others see after
 * the second only what was fenced.
 */
static __device__ __forceinline__ void cluster_arrive()
{
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

static __device__ __forceinline__ void cluster_wait()
{
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/* Barriers that this thread made ready are so for other blocks, once they are past cluster_wait. */
static __device__ __forceinline__ void cluster_fence_barriers()
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/* The place in shared memory of block `rank` that `address` is in this one's. */
static __device__ __forceinline__ uint32_t cluster_address(uint32_t address, uint32_t rank)
{
    uint32_t there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}

/* Two or four numbers to a block of the cluster; its barrier counts their bytes. */
static __device__ __forceinline__ void cluster_send(uint32_t to, float x, float y, uint32_t barrier)
{
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::
            "r"(to),
        "f"(x), "f"(y), "r"(barrier)
        : "memory");
}

static __device__ __forceinline__ void cluster_send(uint32_t to, float4 x, uint32_t barrier)
{
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::
            "r"(to),
        "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(barrier)
        : "memory");
}

/* As bulk_wait, for bytes that other blocks send. */
static __device__ __forceinline__ void cluster_await(uint32_t barrier, uint32_t parity)
{
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n"
                 "}" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
}

/* ---- matrices ---- */

/* Four 8 x 8 matrices of 16-bit numbers; lane l gives the address of row l % 8 of matrix l / 8. */
static __device__ __forceinline__ void ldmatrix(uint32_t r[4], uint32_t from)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(from)
                 : "memory");
}

static __device__ __forceinline__ void ldmatrix_trans(uint32_t r[4], uint32_t from)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(from)
                 : "memory");
}

/* An 8 x 8 matrix transposed. */
static __device__ __forceinline__ uint32_t movmatrix(uint32_t x)
{
    uint32_t r;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(x));
    return r;
}

/* c[16][8] += a[16][16] b[16][8]; a and b of type T. */
template <typename T>
static __device__ __forceinline__ void mma(float c[4], const uint32_t a[4], uint32_t b0,
                                           uint32_t b1)
{
    if constexpr (IS_BF16<T>)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
            "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
            "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/*
 * c[16][8] += a[16][8] b[8][8] of f32 numbers, of which the low 13 bits are ignored: tf32. Lane l has of a row l / 4, then
 * l / 4 + 8, at column l % 4, then the same at l % 4 + 4; of b column l / 4 at these rows. c is cut, not rounded.
 */
static __device__ __forceinline__ void mma_tf32(float c[4], const uint32_t a[4], uint32_t b0,
                                                uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, "
        "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* ---- numbers ---- */

static __device__ __forceinline__ float exp2_approx(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

static __device__ __forceinline__ float log2_approx(float x)
{
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

static __device__ __forceinline__ float reciprocal(float x)
{
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* What scores are compared with: their maximum, or 0 where there is none. */
static __device__ __forceinline__ float softmax_base(float max)
{
    return max == -CUDART_INF_F ? 0.0f : max;
}

/* Two numbers rounded to T, the first in the low half. */
template <typename T> static __device__ __forceinline__ uint32_t pack(float x, float y)
{
    uint32_t r;
    if constexpr (IS_BF16<T>) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(y), "f"(x));
    else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(y), "f"(x));
    return r;
}

/* Zeros, plus NaN where a number is not finite. */
template <typename T> static __device__ __forceinline__ uint32_t add_odd(uint32_t odd, uint32_t two)
{
    uint32_t r;
    if constexpr (IS_BF16<T>)
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(two), "r"(0), "r"(odd));
    else asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(two), "r"(0), "r"(odd));
    return r;
}

static __device__ __forceinline__ float half_bits_to_float(uint16_t bits, bool is_bf16)
{
    if (is_bf16) return __uint_as_float((uint32_t)bits << 16);
    return __half2float(__ushort_as_half(bits));
}

static __device__ __forceinline__ uint16_t float_to_half_bits(float x, bool is_bf16)
{
    if (is_bf16) return __bfloat16_as_ushort(__float2bfloat16_rn(x));
    return __half_as_ushort(__float2half_rn(x));
}

/* ---- 8-bit numbers: bytes A and B of x as two f16 numbers, which is exact ---- */

template <int A, int B> static __device__ __forceinline__ uint32_t e5m2_to_f16(uint32_t x)
{
    return __byte_perm(x, 0, B << 12 | 0x404 | A << 4); /* each is the upper byte of an f16 */
}

/* int8 numbers plus 128: 0x6400 + u is 1024 + u in f16. */
template <int A, int B> static __device__ __forceinline__ uint32_t offset_int8_to_f16(uint32_t x)
{
    uint32_t u = __byte_perm(x, 0x64646464u, 0x4040 | B << 8 | A);
    __half2 h = __hsub2(*(__half2 *)&u, __half2half2(__ushort_as_half(0x6480))); /* 1152 */
    return *(uint32_t *)&h;
}

/* e4m3 from sm_89 on; UPPER: the upper two bytes. */
template <bool UPPER = false> static __device__ __forceinline__ uint32_t cvt_e4m3(uint32_t x)
{
    uint32_t r;
    asm("{\n"
        ".reg .b16 half<2>;\n"
        "mov.b32 {half0, half1}, %1;\n"
        "cvt.rn.f16x2.e4m3x2 %0, half%2;\n"
        "}"
        : "=r"(r)
        : "r"(x), "n"((int)UPPER));
    return r;
}

/* e4m3 before sm_89, each the upper byte of a half; NaN is left to the caller. The exponents' biases differ by 8. */
static __device__ __forceinline__ uint32_t lift_e4m3(uint32_t wide)
{
    uint32_t bits = (wide & 0x80008000u) | ((wide & 0x7f007f00u) >> 1);
    __half2 h = __hmul2(*(__half2 *)&bits, __half2half2(__ushort_as_half(0x5c00))); /* 256 */
    return *(uint32_t *)&h;
}

#endif
