/* emulated_latent.cc: the wgmma kernel of latent attention, compiled for the machine. */
#include "instructions_emulated.h"

#include "backends/cuda/prefill/hopper/latent.cu"
