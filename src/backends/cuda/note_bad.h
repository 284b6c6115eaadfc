/*
 * note_bad.h: FOLIO_PLAN_NOTE_BAD on a device. The kernels that write k, v and out call note_bad where a number is bad. It
 * takes a lock and is rare: once a step has a note, only smaller keys come so far, and steps after it note nothing. The host
 * reads the note in its own memory, so asking never waits.
 */
#ifndef FOLIOI_CUDA_NOTE_BAD_H
#define FOLIOI_CUDA_NOTE_BAD_H

#include "backends/cuda/cuda_attend.h"
#include "backends/cuda/step/bad_place.h"

/** In host memory: the first bad write, and what the host has told the caller. */
typedef struct folioi_cuda_bad {
    uint64_t version; /* odd: it is being written                                 */
    uint64_t asked;   /* written by the host: the version that the caller has     */
    uint64_t key;     /* FOLIOI_BAD_NONE: there is none                           */
    int64_t step, seq, position;
    int32_t layer, attention;
} folioi_cuda_bad;

/** In device memory, one for each plan. */
typedef struct folioi_cuda_notes {
    uint64_t first;   /* the least key of this step; 0: there is one of an earlier step */
    uint64_t version; /* of the note */
    int64_t step;
    uint32_t lock;
} folioi_cuda_notes;

/** What a kernel needs to note a bad write. */
typedef struct folioi_cuda_noting {
    folioi_cuda_notes *notes; /* NULL: the plan notes none */
    volatile folioi_cuda_bad *bad;
    const folioi_cuda_counts *counts;
    const folioi_cuda_seq *seqs;
    int32_t layer, attention, num_attentions, type;
} folioi_cuda_noting;

/** What a noting kernel looks at besides: rows of K, V and out that no other kernel has looked at. */
typedef struct folioi_cuda_noted_rows {
    folioi_cuda_rows rows[3]; /* K, V, out; data NULL: not this one */
    folio_dtype dtypes[3];
    int64_t num_rows[3];
    int32_t num_heads[3], dims[3];
    float limit;          /* what is infinite in the cache: of K and V */
    const int64_t *slots; /* of K and V: those with -1 are left out; NULL: all are looked at */
    folioi_cuda_rotations rotations; /* of K */
    folioi_cuda_noting noting;
} folioi_cuda_noted_rows;

/** The least number that rounds to infinity in a cache's type. */
static inline float folioi_cuda_limit(folio_dtype dtype)
{
    if (dtype == FOLIO_F16) return 65520.0f;
    return dtype == FOLIO_BF16 ? 0x1.ffp127f : INFINITY;
}

#if defined(__cplusplus)
extern "C" {
#endif

/** A step begins. What the caller has is forgotten, what it has not is kept. */
cudaError_t folioi_cuda_begin_notes(folioi_cuda_notes *notes, folioi_cuda_bad *bad,
                                    cudaStream_t stream);
/** One launch over the rows of K, V and out that the kernels before it have written. */
cudaError_t folioi_cuda_note_rows(const folioi_cuda_noted_rows *rows, cudaStream_t stream);

#if defined(__cplusplus)
}
#endif

#endif
