/* cpu_forward.h: one layer on the CPU: its scratch memory and entry points. */
#ifndef FOLIOI_CPU_FORWARD_H
#define FOLIOI_CPU_FORWARD_H

#include "backends/cpu/cpu_kernels.h"
#include "plan/schedule.h"

/** What one schedule needs to run: sizes first (base NULL), then the same carving of a workspace. */
typedef struct folioi_cpu_memory {
    int32_t rows, k_dims, v_dims;
    int64_t worker_bytes;
    char *workers;   /* [num_workers] of worker_bytes                                  */
    int *arrived;    /* [max_chains][num_kv_heads] items of a chain that have ended     */
    float *partials; /* [max_partials * num_kv_heads] rows of v_dims + 2               */
    int64_t bytes;
} folioi_cpu_memory;

folioi_cpu_memory folioi_cpu_memory_of(const folioi_schedule_limits *limits,
                                       const folio_attention_desc *a, char *base);

folio_status folioi_cpu_write(const folio_context *ctx, const folioi_kv_layer *layer,
                              const folioi_kv_tensors *t, const int64_t *slots, int64_t num_slots,
                              void *stream);

/** Are keys that the call reads as given, and not from the cache, of the type that kernels for pairs of bf16 take? */
bool folioi_cpu_takes_pairs(const folioi_call *call);

void folioi_cpu_attend(const folioi_call *call, const folioi_schedule *schedule);

#endif
