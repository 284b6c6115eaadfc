"""A DeepSeek-style decoder layer on latents. K and V of a token are one row [latent | rotary part], stored once for all
heads: 576 numbers in DeepSeek, 80 here. V is the first numbers of K (v_in_k), so the cache holds no V.

Compared with the textbook form, which expands keys and values of all heads. Weights are random.
"""
import numpy as np

import folio

DIM, HEADS, LATENT, ROPE, NOPE, V_SIZE, BLOCK = 96, 8, 64, 16, 32, 32, 16
ROW = LATENT + ROPE

rng = np.random.default_rng(2)


def weight(*shape):
    return (rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)


w_q = weight(DIM, HEADS * (NOPE + ROPE)).reshape(DIM, HEADS, NOPE + ROPE)
w_down, w_rope = weight(DIM, LATENT), weight(DIM, ROPE)  # a token's latent, and its key part that is rotated
w_up_k, w_up_v = weight(LATENT, HEADS, NOPE), weight(LATENT, HEADS, V_SIZE)
scale = float((NOPE + ROPE) ** -0.5)


def absorbed(x):
    """q and k of the latent form: the keys' up-projection is applied to q instead of to every cached key."""
    q = np.einsum("td,dhs->ths", x, w_q)
    q = np.concatenate([np.einsum("thn,lhn->thl", q[..., :NOPE], w_up_k), q[..., NOPE:]], -1)
    return q.astype(np.float32), np.concatenate([x @ w_down, x @ w_rope], -1)[:, None].astype(np.float32)


def run(x, prompt):
    """Outputs [tokens, HEADS, V_SIZE]: a prompt in one step, then token by token."""
    context = folio.Context()
    attention = folio.Attention(context, num_heads=HEADS, num_kv_heads=1, head_size=ROW, v_head_size=LATENT,
                                scale=scale, v_in_k=True)
    cache = folio.KVCache(context, num_blocks=8, block_size=BLOCK, num_kv_heads=1, head_size=ROW, v_head_size=LATENT,
                          dtype="f32", v_in_k=True)
    rotary = folio.Rotary(context, num_dims=ROPE, first_dim=LATENT, num_positions=64, pairing="pairs")
    plan = folio.Plan(attention, cache=cache, max_seqs=1, max_query_tokens=prompt, max_seq_len=64)
    batch = folio.Batch(cache=cache)
    outs, done = [], 0
    for new in [prompt] + [1] * (len(x) - prompt):
        batch.clear()
        batch.add(new, done + new, [5, 2, 7, 0])
        plan.update(batch)
        q, k = absorbed(x[done:done + new])
        latent = plan.forward(q, k, cache=cache, rotary=rotary)  # [new, HEADS, LATENT]
        outs.append(np.einsum("thl,lhv->thv", latent, w_up_v))
        done += new
    print(f"a token takes {ROW * 4} bytes; expanded K and V would take {HEADS * (NOPE + ROPE + V_SIZE) * 4}")
    return np.concatenate(outs)


def textbook(x):
    def rotate(a):
        angles = np.outer(np.arange(len(a)), 10000.0 ** (-np.arange(0, ROPE, 2) / ROPE))[:, None]
        even, odd = a[..., 0::2], a[..., 1::2]
        turned = np.empty_like(a)
        turned[..., 0::2] = even * np.cos(angles) - odd * np.sin(angles)
        turned[..., 1::2] = odd * np.cos(angles) + even * np.sin(angles)
        return turned

    q = np.einsum("td,dhs->ths", x, w_q).astype(np.float64)
    q = np.concatenate([q[..., :NOPE], rotate(q[..., NOPE:])], -1)
    latent, rope = x @ w_down, rotate((x @ w_rope)[:, None].astype(np.float64))
    k = np.concatenate([np.einsum("tl,lhn->thn", latent, w_up_k), np.repeat(rope, HEADS, 1)], -1)
    v = np.einsum("tl,lhv->thv", latent, w_up_v)
    scores = np.einsum("ihd,jhd->hij", q, k) * scale
    scores[:, np.triu(np.ones(scores.shape[1:], bool), 1)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hij,jhd->ihd", weights / weights.sum(-1, keepdims=True), v)


if __name__ == "__main__":
    x = rng.standard_normal((40, DIM)).astype(np.float32)
    error = abs(run(x, prompt=30) - textbook(x)).max()
    print(f"a prompt of 30 tokens and 10 decodes: off by {error:.1e} from the textbook form")
    assert error < 1e-4
