/* decode_ptx.h: the few instructions of sm_80 and later that decode kernels are made of. */
#ifndef FOLIOI_DECODE_PTX_H
#define FOLIOI_DECODE_PTX_H

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

static __device__ __forceinline__ uint32_t shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* Copy 16, 8 or 4 bytes to shared memory; zeros where !valid, and src is then not read. */
template <int BYTES>
static __device__ __forceinline__ void copy_async(uint32_t dst, const void *src, bool valid)
{
    int size = valid ? BYTES : 0;
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src),
                     "r"(size)
                     : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(dst), "l"(src),
                     "n"(BYTES), "r"(size)
                     : "memory");
}

static __device__ __forceinline__ void copy_async_16(uint32_t dst, const void *src)
{
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(dst), "l"(src)
                 : "memory");
}

static __device__ __forceinline__ void copy_commit()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int PENDING> static __device__ __forceinline__ void copy_wait()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

/*
 * Copies of many bytes by one thread, from sm_90 on: memory gives about 5 % more to them than to copies of 16
 * bytes. They end at a barrier in shared memory, which counts their bytes.
 */
#if __CUDA_ARCH__ >= 900
#define BULK_COPIES 1
#else
#define BULK_COPIES 0
#endif

#if BULK_COPIES
static __device__ __forceinline__ void bulk_init(uint32_t barrier)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
}

static __device__ __forceinline__ void bulk_expect(uint32_t barrier, int bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

static __device__ __forceinline__ void bulk_copy(uint32_t dst, const void *src, int bytes,
                                                 uint32_t barrier)
{
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
        "[%3];" ::"r"(dst),
        "l"(src), "r"(bytes), "r"(barrier)
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
#endif

static __device__ __forceinline__ void load_matrices(uint32_t r[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

static __device__ __forceinline__ void load_matrices_trans(uint32_t r[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

static __device__ __forceinline__ void load_chunk(uint32_t r[4], uint32_t address)
{
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

static __device__ __forceinline__ uint32_t transpose_matrix(uint32_t a)
{
    uint32_t r;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(a));
    return r;
}

/* c[16][8] += a[16][16] b[16][8] */
template <bool BF16>
static __device__ __forceinline__ void multiply(float c[4], const uint32_t a[4], uint32_t b0,
                                                uint32_t b1)
{
    if constexpr (BF16)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, "
            "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, "
            "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* low half a, high half b */
template <bool BF16> static __device__ __forceinline__ uint32_t pack_halves(float a, float b)
{
    uint32_t r;
    if constexpr (BF16) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a));
    else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a));
    return r;
}

static __device__ __forceinline__ float exp2_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

static __device__ __forceinline__ float half_bits_to_float(uint16_t bits, bool bf16)
{
    if (bf16) return __uint_as_float((uint32_t)bits << 16);
    return __half2float(__ushort_as_half(bits));
}

static __device__ __forceinline__ uint16_t float_to_half_bits(float x, bool bf16)
{
    if (bf16) return __bfloat16_as_ushort(__float2bfloat16_rn(x));
    return __half_as_ushort(__float2half_rn(x));
}

/* Two e4m3 numbers (low 16 bits of x) as f16; every one is exact there. */
static __device__ __forceinline__ uint32_t e4m3_to_f16(uint32_t x)
{
#if __CUDA_ARCH__ >= 890
    uint32_t r;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r) : "h"((uint16_t)x));
    return r;
#else
    uint32_t wide = __byte_perm(x, 0, 0x1404); /* each byte on top of a half */
    uint32_t bits = (wide & 0x80008000u) | ((wide & 0x7f007f00u) >> 1);
    __half2 by =
        __half2half2(__ushort_as_half(0x5c00)); /* 256: the exponents' biases differ by 8 */
    __half2 h = __hmul2(*(__half2 *)&bits, by);
    uint32_t r = *(uint32_t *)&h;
    if ((wide & 0x7f00u) == 0x7f00u) r |= 0x7fffu;
    if ((wide & 0x7f000000u) == 0x7f000000u) r |= 0x7fff0000u;
    return r;
#endif
}

static __device__ __forceinline__ uint32_t e5m2_to_f16(uint32_t x)
{
    return __byte_perm(x, 0, 0x1404);
}

/* 0x6400 + u is 1024 + u in f16, so u = x + 128 needs one subtraction. */
static __device__ __forceinline__ uint32_t int8_to_f16(uint32_t x)
{
    uint32_t u = __byte_perm(x ^ 0x8080u, 0x64646464u, 0x4140);
    __half2 less = __half2half2(__ushort_as_half(0x6480)); /* 1152 */
    __half2 h = __hsub2(*(__half2 *)&u, less);
    return *(uint32_t *)&h;
}

#endif
