"""A decoder that generates text tokens: Llama-shaped, random weights, NumPy for all but attention.

Three prompts of different lengths are computed in one step, then one token each per step. K and V are in a paged cache.
The tokens are compared with those of a decoder without a cache. usage: decoder.py [cpu|cuda]
"""
import sys

import numpy as np

import folio

VOCAB, DIM, LAYERS, HEADS, KV_HEADS, SIZE, FFN = 128, 64, 2, 8, 2, 16, 128
BLOCK, BLOCKS, NEW_TOKENS, MAX_LEN = 16, 32, 20, 64

rng = np.random.default_rng(0)


def weight(*shape):
    return (rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)


embedding, head = rng.standard_normal((VOCAB, DIM)).astype(np.float32), weight(DIM, VOCAB)
layers = [{"q": weight(DIM, HEADS * SIZE), "k": weight(DIM, KV_HEADS * SIZE), "v": weight(DIM, KV_HEADS * SIZE),
           "o": weight(HEADS * SIZE, DIM), "up": weight(DIM, FFN), "gate": weight(DIM, FFN), "down": weight(FFN, DIM)}
          for _ in range(LAYERS)]


def norm(x):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def model(ids, attend):
    """Logits [tokens, VOCAB]. attend(layer, q, k, v): attention of one layer, q and k not yet rotated."""
    x = embedding[ids]
    for number, w in enumerate(layers):
        h = norm(x)
        x = x + attend(number, h @ w["q"], h @ w["k"], h @ w["v"]) @ w["o"]
        h = norm(x)
        gate = h @ w["gate"]
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w["up"])) @ w["down"]
    return norm(x) @ head


def generate(prompts, backend):
    """NEW_TOKENS for each prompt, all of them in one batch."""
    context = folio.Context(backend)
    attention = folio.Attention(context, num_heads=HEADS, num_kv_heads=KV_HEADS, head_size=SIZE)
    cache = folio.KVCache(context, num_layers=LAYERS, num_blocks=BLOCKS, block_size=BLOCK, num_kv_heads=KV_HEADS,
                          head_size=SIZE, dtype="f32")
    rotary = folio.Rotary(context, num_dims=SIZE, num_positions=MAX_LEN)
    plan = folio.Plan(attention, cache=cache, max_seqs=len(prompts), max_query_tokens=sum(map(len, prompts)),
                      max_seq_len=MAX_LEN)
    batch = folio.Batch(cache=cache)
    free = list(range(BLOCKS))
    tables = [[free.pop() for _ in range(-(-MAX_LEN // BLOCK))] for _ in prompts]  # room for all tokens
    # Where arrays lie is the context's business: on a GPU they are copied there and back.
    put = (lambda a: a) if context.on_host else (lambda a: folio.DeviceArray.copy_of(context, a))
    get = (lambda a: a) if context.on_host else (lambda a: a.numpy())

    def attend(layer, q, k, v):
        return get(plan.forward(put(q), put(k), put(v), cache=cache, layer=layer, rotary=rotary))

    tokens, lens, new = [list(p) for p in prompts], [0] * len(prompts), [list(p) for p in prompts]
    for _ in range(NEW_TOKENS):
        batch.clear()  # the step's rows: prompts first, then one token each
        for i, ids in enumerate(new):
            lens[i] += len(ids)
            batch.add(len(ids), lens[i], tables[i])
        plan.update(batch)
        logits = model(np.concatenate(new), attend)
        last = np.cumsum([len(ids) for ids in new]) - 1
        new = [[int(t)] for t in logits[last].argmax(-1)]
        for ids, token in zip(tokens, new):
            ids += token
    print(f"{len(prompts)} prompts on {context!r}, kernel {plan.info()['kernel']}")
    return tokens


def plain_generate(prompt):
    """The same without a cache: all tokens again in each step."""
    def rotate(x):
        angles = np.outer(np.arange(len(x)), 10000.0 ** (-np.arange(0, SIZE, 2) / SIZE))[:, None]
        a, b = x[..., :SIZE // 2], x[..., SIZE // 2:]
        return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], -1)

    def attend(_, q, k, v):
        q, k, v = (a.reshape(len(a), -1, SIZE) for a in (q, k, v))
        k, v = (np.repeat(a, HEADS // KV_HEADS, 1) for a in (rotate(k), v))
        scores = np.einsum("ihd,jhd->hij", rotate(q), k) / np.sqrt(SIZE)
        scores[:, np.triu(np.ones(scores.shape[1:], bool), 1)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out = np.einsum("hij,jhd->ihd", weights / weights.sum(-1, keepdims=True), v)
        return out.reshape(len(out), -1).astype(np.float32)

    tokens = list(prompt)
    for _ in range(NEW_TOKENS):
        tokens.append(int(model(np.array(tokens), attend)[-1].argmax()))
    return tokens


if __name__ == "__main__":
    prompts = [rng.integers(0, VOCAB, n).tolist() for n in (5, 17, 30)]
    results = generate(prompts, sys.argv[1] if len(sys.argv) > 1 else "cpu")
    for prompt, tokens in zip(prompts, results):
        print(f"prompt of {len(prompt):2}: {tokens[len(prompt):]}")
        assert tokens == plain_generate(prompt)
    print("the same tokens as without a cache")
