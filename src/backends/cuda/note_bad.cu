/* note_bad.cu: where notes of bad writes begin, and a kernel that looks at rows after other kernels have written them. */
#include "backends/cuda/noted.h"
#include "backends/cuda/step/row_position.h"
#include "backends/cuda/warp.h"
#include "core/dtype.h"

namespace {

constexpr int THREADS = 128;

/* One thread: nothing else of the plan runs. */
__global__ void begin_notes(folioi_cuda_notes *notes, volatile folioi_cuda_bad *bad)
{
    notes->step++;
    if (notes->first == FOLIOI_BAD_NONE) return;
    if (bad->asked != notes->version) { /* kept: no key is below 0 */
        notes->first = 0;
        return;
    }
    folioi_cuda_noting t = {};
    t.notes = notes;
    t.bad = bad;
    folioi_cuda_bad none = {};
    none.key = FOLIOI_BAD_NONE;
    publish(t, none);
    notes->first = FOLIOI_BAD_NONE;
}

/* A warp for each row of a head; of K, V, out. */
__global__ void note_rows(const __grid_constant__ folioi_cuda_noted_rows n)
{
    int what = (int)blockIdx.y, lane = (int)threadIdx.x % WARP;
    int64_t unit = ((int64_t)blockIdx.x * THREADS + threadIdx.x) / WARP;
    if (n.rows[what].data == nullptr || unit >= n.num_rows[what] * n.num_heads[what]) return;
    int64_t row = unit / n.num_heads[what], head = unit % n.num_heads[what];
    bool is_out = what == FOLIO_WRITTEN_OUT;
    if (!is_out && n.slots != nullptr && n.slots[row] < 0) return;
    folioi_rotation r = n.rotations.rotation;
    if (what != FOLIO_WRITTEN_K) r.table = nullptr;
    int64_t position = r.table != nullptr ? row_position(n.rotations, row) : 0;
    int64_t at = row * n.rows[what].token + head * n.rows[what].head;
    float limit = is_out ? INFINITY : n.limit;
    bool bad = false;
    for (int32_t d = lane; d < n.dims[what]; d += WARP) {
        float x = rotated_number(&r, n.rows[what].data, n.dtypes[what], at, d, position);
        bad |= !(fabsf(x) < limit);
    }
    if (__any_sync(ALL_LANES, bad) && lane == 0) note_bad(n.noting, what, row, (int32_t)head);
}

} // namespace

cudaError_t folioi_cuda_begin_notes(folioi_cuda_notes *notes, folioi_cuda_bad *bad,
                                    cudaStream_t stream)
{
    begin_notes<<<1, 1, 0, stream>>>(notes, bad);
    return cudaGetLastError();
}

cudaError_t folioi_cuda_note_rows(const folioi_cuda_noted_rows *rows, cudaStream_t stream)
{
    int64_t units = 0;
    for (int what = 0; what < 3; what++)
        if (rows->rows[what].data != nullptr)
            units = max_i64(units, rows->num_rows[what] * rows->num_heads[what]);
    if (units == 0) return cudaSuccess;
    note_rows<<<dim3((unsigned)ceil_div(units * WARP, THREADS), 3), THREADS, 0, stream>>>(*rows);
    return cudaGetLastError();
}
