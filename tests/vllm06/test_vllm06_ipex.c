/* test_vllm06_ipex.c: vLLM 0.6's ipex backend; all its tests are those of every backend. */
#include "vllm06/vllm06_rig.h"

V06_SAME(V06_TEST, vllm06_ipex, "ipex")
