"""An encoder-decoder, as T5 and BART are: the encoder runs once, its K and V go into blocks of a paged cache, and every
step of the decoder reads them there by cross attention. Compared with plain NumPy. Weights are random.
"""
import numpy as np

import folio

DIM, HEADS, SIZE, LAYERS, BLOCK = 64, 4, 16, 2, 16
SOURCE_LENS, STEPS = [21, 9], 6

rng = np.random.default_rng(1)


def weight(*shape):
    return (rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)


def layer_weights():
    return {name: weight(DIM, DIM) for name in ("q", "k", "v", "o", "cross_q", "cross_k", "cross_v", "cross_o")}


encoder_layers = [layer_weights() for _ in range(LAYERS)]
decoder_layers = [layer_weights() for _ in range(LAYERS)]


def norm(x):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def run(sources, targets):
    """The decoder's outputs of all steps, [seqs][steps, DIM], through the paged cache."""
    context = folio.Context()
    attention = folio.Attention(context, num_heads=HEADS, head_size=SIZE)
    shape = {"num_layers": LAYERS, "block_size": BLOCK, "num_kv_heads": HEADS, "head_size": SIZE, "dtype": "f32"}
    own_cache = folio.KVCache(context, num_blocks=4, **shape)
    cross_cache = folio.KVCache(context, num_blocks=8, **shape)
    plan = folio.Plan(attention, types=[["encoder", "decoder", "encoder_decoder"]], cache=own_cache,
                      cross_cache=cross_cache, max_seqs=len(sources), max_query_tokens=len(sources), max_seq_len=64,
                      max_encoder_tokens=sum(map(len, sources)))
    batch = folio.Batch(cache=own_cache)
    cross_tables, first = [], 0
    for source in sources:  # each source has its own blocks
        count = -(-len(source) // BLOCK)
        cross_tables.append(list(range(first, first + count)))
        first += count

    outputs = []
    for step in range(STEPS):
        batch.clear()
        for i, source in enumerate(sources):
            new = len(source) if step == 0 else 0  # the encoder's tokens are new in the first step only
            batch.add(1, step + 1, [i], encoder_len=len(source), encoder_new_len=new, cross_block_table=cross_tables[i])
        plan.update(batch)
        if step == 0:
            encoded = np.concatenate(sources)
            for w in encoder_layers:
                h = norm(encoded)
                encoded = encoded + plan.forward(h @ w["q"], h @ w["k"], h @ w["v"], type="encoder") @ w["o"]
        x = np.stack([target[step] for target in targets])
        for number, w in enumerate(decoder_layers):
            h = norm(x)
            x = x + plan.forward(h @ w["q"], h @ w["k"], h @ w["v"], cache=own_cache, layer=number) @ w["o"]
            q = norm(x) @ w["cross_q"]
            if step == 0:  # stores the encoder's K and V of this layer
                crossed = plan.forward(q, encoded @ w["cross_k"], encoded @ w["cross_v"], cache=cross_cache,
                                       layer=number, type="encoder_decoder")
            else:
                crossed = plan.forward(q, cache=cross_cache, layer=number, type="encoder_decoder")
            x = x + crossed @ w["cross_o"]
        outputs.append(x)
    return np.stack(outputs, 1)


def plain_attention(q, k, v, causal):
    q, k, v = (a.reshape(len(a), HEADS, SIZE) for a in (q, k, v))
    scores = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(SIZE)
    if causal:
        scores[:, np.triu(np.ones(scores.shape[1:], bool), 1)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hij,jhd->ihd", weights / weights.sum(-1, keepdims=True), v).reshape(len(q), DIM)


def plain_run(source, target):
    """All steps of one sequence at once, in plain NumPy."""
    encoded = source
    for w in encoder_layers:
        h = norm(encoded)
        encoded = encoded + plain_attention(h @ w["q"], h @ w["k"], h @ w["v"], False) @ w["o"]
    x = target
    for w in decoder_layers:
        h = norm(x)
        x = x + plain_attention(h @ w["q"], h @ w["k"], h @ w["v"], True) @ w["o"]
        crossed = plain_attention(norm(x) @ w["cross_q"], encoded @ w["cross_k"], encoded @ w["cross_v"], False)
        x = x + crossed @ w["cross_o"]
    return x


if __name__ == "__main__":
    sources = [rng.standard_normal((n, DIM)).astype(np.float32) for n in SOURCE_LENS]
    targets = [rng.standard_normal((STEPS, DIM)).astype(np.float32) for _ in SOURCE_LENS]
    for source, target, got in zip(sources, targets, run(sources, targets)):
        error = abs(got - plain_run(source, target)).max()
        print(f"source of {len(source):2} tokens, {STEPS} steps: off by {error:.1e}")
        assert error < 1e-4
