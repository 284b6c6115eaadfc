/* state.c: softmax states of rows, joined from left to right. */
#include "backends/state.h"

#include "backends/exp.h"

#include <math.h>
#include <string.h>

void folioi_state_clear(const folioi_state_rows *state, int32_t rows)
{
    for (int32_t r = 0; r < rows; r++) {
        state->max[r] = -INFINITY;
        state->sum[r] = 0.0f;
    }
}

void folioi_state_fold(const folioi_state_rows *into, const folioi_state_rows *part, int32_t rows,
                       int32_t v_dims)
{
    for (int32_t r = 0; r < rows; r++) {
        float *to = into->out + r * folioi_out_stride(v_dims);
        const float *from = part->out + r * folioi_out_stride(v_dims);
        if (part->max[r] == -INFINITY) continue;
        if (into->max[r] == -INFINITY) {
            into->max[r] = part->max[r];
            into->sum[r] = part->sum[r];
            memcpy(to, from, (size_t)v_dims * sizeof *to);
            continue;
        }
        float largest = into->max[r] > part->max[r] ? into->max[r] : part->max[r];
        float a = exp_f32(into->max[r] - largest), b = exp_f32(part->max[r] - largest);
        into->max[r] = largest;
        into->sum[r] = into->sum[r] * a + part->sum[r] * b;
        for (int32_t d = 0; d < v_dims; d++) to[d] = to[d] * a + from[d] * b;
    }
}
