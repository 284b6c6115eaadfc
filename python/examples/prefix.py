"""Prefix sharing: four requests with the same system prompt. The pool finds the blocks that are computed already, so
the prompt is computed once; a fork shares everything and copies a block only when it writes to it.
"""
import numpy as np

import folio

HEADS, SIZE, BLOCK = 4, 32, 16

cache = folio.KVCache(num_blocks=32, block_size=BLOCK, num_kv_heads=HEADS, head_size=SIZE, dtype="f32")
pool = folio.Pool(cache)
attention = folio.Attention(num_heads=HEADS, head_size=SIZE)
plan = folio.Plan(attention, cache=cache, max_seqs=1, max_query_tokens=256, max_seq_len=256)
batch = folio.Batch(cache=cache)
computed = 0


def states(ids):
    """In place of a model: q, k and v of tokens, by their ids and positions."""
    x = np.sin(np.outer(np.arange(len(ids)) * 0.3 + np.asarray(ids) * 1.7, np.arange(1, HEADS * SIZE + 1)) * 0.1)
    return x.reshape(len(ids), HEADS, SIZE).astype(np.float32)


def run(sequence, ids):
    """Computes the tokens of ids that the sequence does not have. Returns the last token's output."""
    global computed
    have = sequence.info()["committed_len"]
    sequence.reserve(len(ids) - have)
    batch.clear()
    batch.add_sequences([sequence])
    plan.update(batch)
    x = states(ids)[have:]
    out = plan.forward(x, x, x, cache=cache)
    sequence.commit(ids)  # full blocks are found by others from now on
    computed += len(ids) - have
    return out[-1]


system = list(range(100))
requests, outs = [], []
for i in range(4):
    ids = system + [200 + i] * (5 + i)
    sequence = pool.sequence()
    hit = sequence.match(ids[:-1])  # not the last token: its output is needed
    outs.append(run(sequence, ids))
    requests.append((sequence, ids))
    print(f"request {i}: {len(ids)} tokens, {hit} of them cached, blocks {sequence.table().tolist()}")

first, ids = requests[0]
fork = first.fork()
run(fork, ids + [7])
print(f"fork:      blocks {fork.table().tolist()}: the last one is its own")

stats = pool.stats()
print(f"{computed} tokens computed instead of {sum(len(i) for _, i in requests) + len(ids) + 1}; "
      f"{stats['num_shared']} blocks are shared, {stats['num_free']} of {stats['num_blocks']} free")
print("".join(".#+o"[s] for s in pool.block_states()), " . free  # used  + shared  o cached")

for (_, ids), out in zip(requests, outs):  # the same as alone, without a pool
    x = states(ids)
    assert (folio.attend(x, x, x)[-1] == out).all()
assert stats["num_shared"] == 6 and computed == 105 + 10 + 11 + 12 + 1
