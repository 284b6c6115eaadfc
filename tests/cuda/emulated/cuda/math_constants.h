/* math_constants.h: instructions_emulated.h has what kernels use of it. */
