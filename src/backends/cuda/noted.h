/* noted.h: what kernels that note bad writes call: is a number bad, and where it is. */
#ifndef FOLIOI_CUDA_NOTED_H
#define FOLIOI_CUDA_NOTED_H

#include "backends/cuda/note_bad.h"

/* Is one of two 16-bit numbers NaN or infinite? */
static __device__ __forceinline__ bool is_bad_pair(uint32_t x, bool bf16)
{
    uint32_t exponent = bf16 ? 0x7f80u : 0x7c00u;
    return (x & exponent) == exponent || (x >> 16 & exponent) == exponent;
}

static __device__ __forceinline__ bool is_bad_unit(uint4 x, bool bf16)
{
    return is_bad_pair(x.x, bf16) || is_bad_pair(x.y, bf16) || is_bad_pair(x.z, bf16) ||
           is_bad_pair(x.w, bf16);
}

/* To the host. An odd version tells it that the rest is half written. */
static __device__ inline void publish(const folioi_cuda_noting &t, const folioi_cuda_bad &note)
{
    volatile folioi_cuda_bad *to = t.bad;
    t.notes->version += 2;
    to->version = t.notes->version - 1;
    __threadfence_system();
    to->key = note.key;
    to->step = note.step;
    to->seq = note.seq;
    to->position = note.position;
    to->layer = note.layer;
    to->attention = note.attention;
    __threadfence_system();
    to->version = t.notes->version;
}

/* Row `row` of K, V or out is bad under this head. Rare, and never inlined: callers have no register to spare. */
static __device__ __noinline__ void note_bad(const folioi_cuda_noting &t, int what, int64_t row,
                                             int32_t head)
{
    uint64_t key = bad_key(t.layer, t.attention, t.num_attentions, t.type, what, row, head);
    volatile uint64_t *first = &t.notes->first;
    folioi_cuda_bad note = {};
    if (key >= *first) return;
    if (!bad_place(t.counts, t.seqs, t.type == FOLIO_ATTENTION_DECODER, what, row, &note.seq,
                   &note.position))
        return;
    note.key = key;
    note.layer = t.layer;
    note.attention = t.attention;
    /* whoever has the lock leaves the loop's body with it released: lanes of one warp wait for each other */
    for (bool done = false; !done;) {
        if (atomicCAS(&t.notes->lock, 0u, 1u) != 0u) continue;
        __threadfence();
        note.step = *(volatile int64_t *)&t.notes->step;
        if (key < *first) {
            publish(t, note);
            *first = key;
        }
        __threadfence();
        atomicExch(&t.notes->lock, 0u);
        done = true;
    }
}

#endif
