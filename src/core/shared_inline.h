/* shared_inline.h: SHARED_INLINE functions are compiled for a device too, where a device's compiler reads them. */
#ifndef FOLIOI_SHARED_INLINE_H
#define FOLIOI_SHARED_INLINE_H

#if defined(__CUDACC__)
#define SHARED_INLINE static __host__ __device__ inline
#else
#define SHARED_INLINE static inline
#endif

#endif
