/* emulated_f32.cc: the kernel of f32 prompts, compiled for the machine. */
#include "mma_emulated.h"

#include "backends/cuda/prefill/prefill_f32.cu"
