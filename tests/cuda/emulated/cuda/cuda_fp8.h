/* cuda_fp8.h: no emulated kernel has such numbers. */
