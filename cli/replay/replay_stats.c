/* replay_stats.c: see replay_stats.h. */
#include "replay/replay_stats.h"

#include <math.h>

enum { FIRST = -10, PER_DOUBLING = 128 };

void replay_times_add(replay_times *t, double seconds)
{
    double place = seconds > 0 ? (log2(seconds * 1e3) - FIRST) * PER_DOUBLING : 0;
    int64_t bucket = place < 0 ? 0 : (int64_t)place + 1;
    if (seconds <= 0) bucket = 0;
    if (bucket > REPLAY_BUCKETS) bucket = REPLAY_BUCKETS;
    t->buckets[bucket]++;
    t->count++;
}

double replay_times_of(int bucket)
{
    return bucket == 0 ? 0 : exp2((bucket - 0.5) / PER_DOUBLING + FIRST);
}

double replay_times_at(const replay_times *t, double share)
{
    int64_t rank = (int64_t)ceil(share * (double)t->count), seen = 0;
    if (rank < 1) rank = 1;
    for (int i = 0; i <= REPLAY_BUCKETS; i++) {
        seen += t->buckets[i];
        if (seen >= rank) return replay_times_of(i);
    }
    return 0;
}

void replay_stats_step(replay_stats *s, const replay_step *step)
{
    s->last = *step;
    s->steps++;
    s->prefill_tokens += step->prefill_tokens;
    s->decode_tokens += step->decode_tokens;
    s->prefill_seconds += step->seconds * step->prefill_share;
    s->decode_seconds += step->seconds * (1 - step->prefill_share);
    s->block_steps += (double)(step->used_blocks * s->block_size);
    s->empty_steps += (double)step->empty_slots;
    s->reserved_steps += (double)(step->sequences * s->longest);
    s->stored_steps += (double)step->stored_tokens;
}

static double share(double some, double whole) { return whole > 0 ? some / whole : 0; }

double replay_rate(int64_t count, double seconds) { return share((double)count, seconds); }

double replay_stats_waste(const replay_stats *s) { return share(s->empty_steps, s->block_steps); }

double replay_stats_contiguous_waste(const replay_stats *s)
{
    return s->reserved_steps > 0 ? 1 - s->stored_steps / s->reserved_steps : 0;
}

double replay_stats_hit_rate(const replay_stats *s)
{
    return share((double)s->hit_tokens, (double)s->admitted_tokens);
}
