/* replay_numbers.c: see replay_numbers.h. */
#include "replay/replay_numbers.h"

/* q is larger, so that scores spread over a few units and keys differ in weight. */
static double amplitude(replay_tensor tensor) { return tensor == REPLAY_Q ? 4 : 1; }

void replay_numbers_init(replay_numbers *n, uint64_t seed, folio_dtype dtype, int32_t head_size)
{
    *n = (replay_numbers){.seed = seed, .dtype = dtype, .head_size = head_size};
    for (int t = 0; t < REPLAY_TENSORS; t++)
        for (int i = 0; i < 256; i++) {
            double value = (i - 128) * amplitude((replay_tensor)t) / 128;
            n->f32[t][i] = (float)value;
            if (dtype != FOLIO_F32) kit_store(dtype, n->half[t], i, value);
        }
}

/* Eight numbers from each hash of a counter: any head of any token at once. */
void replay_numbers_row(const replay_numbers *n, replay_tensor tensor, int32_t layer, uint64_t who,
                        int64_t first_head, int64_t num_heads, void *to)
{
    uint64_t of = kit_mix(n->seed ^ kit_mix((uint64_t)layer * REPLAY_TENSORS + tensor));
    uint64_t key = kit_mix(of ^ who);
    int64_t first = first_head * n->head_size / 8, count = num_heads * n->head_size / 8;
    const float *f32 = n->f32[tensor];
    const uint16_t *half = n->half[tensor];
    for (int64_t i = 0; i < count; i++) {
        uint64_t bits = kit_mix(key + (uint64_t)(first + i) * 0xd1342543de82ef95u);
        if (n->dtype == FOLIO_F32)
            for (int b = 0; b < 8; b++) ((float *)to)[8 * i + b] = f32[(bits >> (8 * b)) & 255];
        else
            for (int b = 0; b < 8; b++) ((uint16_t *)to)[8 * i + b] = half[(bits >> (8 * b)) & 255];
    }
}

uint64_t replay_query(const replay_request *r, int64_t position)
{
    return kit_mix((uint64_t)r->index) + (uint64_t)position;
}
