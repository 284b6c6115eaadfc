/* emulated_hopper.cc: the wgmma kernel's own file, compiled for the machine. */
#include "instructions_emulated.h"

#include "backends/cuda/prefill/hopper/hopper_prefill.cu"

void *emulated_describe_tensor(void) { return (void *)cuTensorMapEncodeTiled; }
