"""Plan.forward, attend and merge_states against float64 NumPy, with arrays of every library on every device."""

from __future__ import annotations

import numpy as np
import pytest

import folio
from core_support import Arrays, Step
from numpy_math import attention, check, random, rotate

MIXED = ([1, 5, 17, 1], [33, 5, 50, 1])  # decodes, a prompt, a chunk of a prompt


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("layout", ["native", "nhd", "hnd", "interleaved_nhd", "interleaved_hnd", "xpacked",
                                    "xpacked_1"])
def test_forward(arrays: Arrays, dtype: str, layout: str) -> None:
    step = Step(arrays, *MIXED, dtype=dtype, layout=layout)
    with step.ready() as plan:
        out, lse = plan.forward(*step.inputs(), cache=step.cache, lse=True)
    expected, expected_lse = step.expected()
    numpy = arrays.device == "cpu" and arrays.library == "device"  # the CPU's own arrays
    assert type(out) is (np.ndarray if numpy else type(arrays.put(step.q)))
    check(arrays.get(out), expected, dtype)
    check(arrays.get(lse), expected_lse, dtype)


def test_forward_again_reads_the_cache_alone(arrays: Arrays) -> None:
    step = Step(arrays, *MIXED)
    plan = step.ready()
    q, k, v = step.inputs()
    first = arrays.get(plan.forward(q, k, v, cache=step.cache))
    again = arrays.get(plan.forward(q, cache=step.cache))
    np.testing.assert_array_equal(first, again)


def test_out_is_written_where_it_was_given(arrays: Arrays) -> None:
    step = Step(arrays, [3, 1], [20, 9])
    plan = step.ready()
    out = arrays.put(np.full((4, 4 * 32), 7, np.float32))  # heads joined
    lse = arrays.put(np.full((4, 4), 7, np.float32))
    q, k, v = step.inputs()
    result = plan.forward(arrays.put(step.q.reshape(4, 128)), k, v, cache=step.cache, out=out, lse=lse)
    assert result[0] is out and result[1] is lse
    expected, expected_lse = step.expected()
    check(arrays.get(out).reshape(4, 4, 32), expected)
    check(arrays.get(lse), expected_lse)


@pytest.mark.parametrize("options", [
    {"window": (7, 0)}, {"window": (40, -1)}, {"soft_cap": 2.0}, {"scale": 0.05}, {"scale": 0.3, "window": (0, 0)},
], ids=str)
def test_geometry(arrays: Arrays, options: dict) -> None:
    step = Step(arrays, *MIXED)
    plan = step.ready(**options)
    check(arrays.get(plan.forward(*step.inputs(), cache=step.cache)), step.expected(**options)[0])


@pytest.mark.parametrize("window", [(-1, -1), (3, 2), (3, -1), (-1, 2)])
def test_rows_that_see_later_keys(arrays: Arrays, window: tuple) -> None:
    step = Step(arrays, [9, 17], [30, 17])
    plan = step.ready(step.batch(causal=False), window=window)
    check(arrays.get(plan.forward(*step.inputs(), cache=step.cache)), step.expected(causal=False, window=window)[0])


def test_slopes_sinks_and_bias(arrays: Arrays) -> None:
    step = Step(arrays, *MIXED)
    plan = step.ready()
    slopes, sinks = np.float32([0.5, 0.1, 0.0, -0.2]), np.float32([1.0, -np.inf, 0.0, 3.0])
    bias = random((4, 4, 17, 50), seed=9)
    bias[:, :, :, 2] = -np.inf  # hides a key; row 3 of the last sequence keeps key 0
    q, k, v = step.inputs()
    for given in ({"slopes": slopes}, {"sinks": sinks}, {"bias": bias}, {"bias": bias[:1, :1]},
                  {"slopes": slopes, "sinks": sinks, "bias": bias}):
        placed = {name: arrays.put(value) for name, value in given.items()}
        out, lse = plan.forward(q, k, v, cache=step.cache, lse=True, **placed)
        expected, expected_lse = step.expected(**given)
        check(arrays.get(out), expected)
        check(arrays.get(lse), expected_lse)


def test_positions_of_a_batch(arrays: Arrays) -> None:
    """A sequence whose keys begin at another position, as a shard of a longer one does."""
    step = Step(arrays, [2], [20])
    plan = step.ready(step.batch(first_query_pos=25, first_key_pos=4), window=(9, 0))
    expected = step.expected(window=(9, 0), first_query=25, first_key=4)[0]
    check(arrays.get(plan.forward(*step.inputs(), cache=step.cache)), expected)


def test_padding(arrays: Arrays) -> None:
    step = Step(arrays, [3], [8])
    batch = folio.Batch(cache=step.cache)
    batch.add(2, padding=True)
    batch.add(3, 8, step.tables[0])
    plan = step.ready(batch)
    q, k, v = (np.concatenate([np.full((2, *a.shape[1:]), np.nan, np.float32), a])
               for a in (step.q, step.new(step.k), step.new(step.v)))
    out, lse = plan.forward(*map(arrays.put, (q, k, v)), cache=step.cache, lse=True)
    assert (arrays.get(out)[:2] == 0).all() and (arrays.get(lse)[:2] == -np.inf).all()
    check(arrays.get(out)[2:], step.expected()[0])


def test_append_stores_nothing(arrays: Arrays) -> None:
    step = Step(arrays, [1, 6], [20, 40])
    last = step.slots(0)[19:]
    sevens = arrays.put(np.full((1, 2, 32), 7, np.float32))
    step.cache.write(0, sevens, sevens, last)
    plan = step.ready()
    check(arrays.get(plan.forward(*step.inputs(), cache=step.cache, append=True)), step.expected()[0])
    assert (arrays.get(step.cache.gather(0, last, like=sevens)[0]) == 7).all()
    plan.forward(*step.inputs(), cache=step.cache)
    np.testing.assert_array_equal(arrays.get(step.cache.gather(0, last, like=sevens)[0]), step.k[19:20])


@pytest.mark.parametrize("pairing", ["halves", "pairs"])
def test_rotary(arrays: Arrays, pairing: str) -> None:
    step = Step(arrays, *MIXED)
    rotary = folio.Rotary(arrays.context, num_dims=16, first_dim=8, num_positions=64, theta=500.0, pairing=pairing)
    plan = step.plan(step.attention())
    keys = np.concatenate([np.arange(n) for n in step.seq_lens])
    rows = np.concatenate([np.arange(n)[n - new:] for new, n in zip(step.query_lens, step.seq_lens)])
    turn = {"num_dims": 16, "theta": 500.0, "pairing": pairing, "first_dim": 8}
    turned_k, turned_q = rotate(step.k, keys, **turn), rotate(step.q, rows, **turn)
    rotated = np.float32(turned_k)
    for i, (new, length) in enumerate(zip(step.query_lens, step.seq_lens)):  # the context, rotated by hand
        own = slice(step.key_starts[i], step.key_starts[i] + length - new)
        step.cache.write(0, arrays.put(rotated[own]), arrays.put(step.v[own]), step.slots(i)[:length - new])
    plan.update(step.batch())
    expected = step.expected(k=turned_k, q=turned_q)[0]
    q, k, v = step.inputs()
    check(arrays.get(plan.forward(q, k, v, cache=step.cache, rotary=rotary)), expected)
    positions = rows if arrays.device == "cpu" else _index(arrays, rows)
    check(arrays.get(plan.forward(q, k, v, cache=step.cache, rotary=rotary, positions=positions)), expected)


def _index(arrays: Arrays, rows: np.ndarray) -> object:
    import torch

    return torch.from_numpy(rows).to(arrays.device)


def test_rotary_tables_and_scalings(context: folio.Context) -> None:
    """cos and sin, frequencies, and theta give the same rotation; a scaling another one."""
    arrays = Arrays("numpy", "cpu", folio.Context("cpu"))
    step = Step(arrays, [12], [12])
    plan = step.ready()
    frequencies = 100.0 ** (-2 * np.arange(16) / 32)
    angles = np.outer(np.arange(12), frequencies)
    forms = [{"theta": 100.0}, {"frequencies": frequencies}, {"cos": np.cos(angles), "sin": np.sin(angles)}]
    outs = [plan.forward(*step.inputs(), cache=step.cache,
                         rotary=folio.Rotary(arrays.context, num_dims=32, num_positions=12, **form)) for form in forms]
    for out in outs[1:]:
        np.testing.assert_array_equal(out, outs[0])
    linear = folio.Rotary(arrays.context, num_dims=32, num_positions=12, theta=100.0, scaling="linear", factor=2.0)
    halved = folio.Rotary(arrays.context, num_dims=32, num_positions=12, frequencies=frequencies / 2)
    np.testing.assert_array_equal(plan.forward(*step.inputs(), cache=step.cache, rotary=linear),
                                  plan.forward(*step.inputs(), cache=step.cache, rotary=halved))
    with pytest.raises(folio.ArgumentError, match="pairing must be one of"):
        folio.Rotary(arrays.context, num_dims=32, num_positions=12, pairing="thirds")
    with pytest.raises(folio.ArgumentError, match=r"cos has shape \(3, 16\)"):
        folio.Rotary(arrays.context, num_dims=32, num_positions=12, cos=angles[:3], sin=angles)


@pytest.mark.parametrize("kv_dtype, bound", [("fp8_e4m3", 0.08), ("fp8_e5m2", 0.16), ("int8", 0.02)])
def test_small_caches(arrays: Arrays, kv_dtype: str, bound: float) -> None:
    """What the cache holds, dequantised, is near K and V; attention is exact over what it holds."""
    step = Step(arrays, *MIXED, kv_dtype=kv_dtype)
    scales = {} if kv_dtype == "int8" else {"k_scale": 0.5, "v_scale": 2.0}
    plan = step.ready()
    step.write_context(**scales)
    out = arrays.get(plan.forward(*step.inputs(), cache=step.cache, **scales))
    slots = np.concatenate([step.slots(i) for i in range(len(step.seq_lens))])
    k, v = (arrays.get(a) for a in step.cache.gather(0, slots, like=arrays.put(step.q), **scales))
    assert abs(k - step.k).max() <= bound * abs(step.k).max() and abs(v - step.v).max() <= bound * abs(step.v).max()
    check(out, step.expected(k=k, v=v)[0], factor=4)


def test_head_scales(arrays: Arrays) -> None:
    step = Step(arrays, [4], [4], kv_dtype="fp8_e4m3")
    plan = step.ready()
    scales = np.float32([0.25, 2.0])
    placed = {"k_head_scales": arrays.put(scales), "v_head_scales": arrays.put(scales)}
    out = arrays.get(plan.forward(*step.inputs(), cache=step.cache, **placed))
    parts = []
    for scale in scales:
        k, v = (arrays.get(a) for a in step.cache.gather(0, step.slots(0), k_scale=scale, v_scale=scale,
                                                         like=arrays.put(step.q)))
        parts.append((k, v))
    k, v = (np.stack([parts[h][j][:, h] for h in range(2)], 1) for j in range(2))
    assert abs(k - step.k).max() <= 0.08 * abs(step.k).max()
    check(out, step.expected(k=k, v=v)[0], factor=4)


def test_latent_attention(arrays: Arrays) -> None:
    step = Step(arrays, *MIXED, heads=8, kv_heads=1, size=96, v_size=64, dtype="bf16", v_in_k=True)
    plan = step.ready(scale=0.1)
    check(arrays.get(plan.forward(*step.inputs(), cache=step.cache)), step.expected(scale=0.1)[0], "bf16")


def test_value_heads_of_another_size(arrays: Arrays) -> None:
    step = Step(arrays, *MIXED, size=64, v_size=32)
    plan = step.ready()
    check(arrays.get(plan.forward(*step.inputs(), cache=step.cache)), step.expected()[0])


def test_encoder_and_cross_attention(arrays: Arrays) -> None:
    """An encoder-decoder step: bidirectional over new encoder tokens, then cross attention through the cache."""
    ctx = arrays.context
    lengths, queries, block = [21, 7], [3, 1], 16
    at = folio.Attention(ctx, num_heads=4, num_kv_heads=2, head_size=32)
    cache = folio.KVCache(ctx, num_blocks=6, block_size=block, num_kv_heads=2, head_size=32, dtype="f32", num_layers=2)
    plan = folio.Plan(at, types=[["decoder", "encoder", "encoder_decoder"]], cache=cache, cross_cache=cache, max_seqs=2,
                      max_query_tokens=16, max_seq_len=64, max_encoder_tokens=32)
    batch = folio.Batch(cache=cache)
    tables = [[4, 1], [3]]
    for length, new, table, own in zip(lengths, queries, tables, ([0], [5])):
        batch.add(new, new, own, encoder_len=length, encoder_new_len=length, cross_block_table=table)
    plan.update(batch)
    q, k, v = (random((sum(lengths), heads, 32), seed=i) for i, heads in enumerate((4, 2, 2)))
    out = arrays.get(plan.forward(*map(arrays.put, (q, k, v)), type="encoder"))
    starts = np.cumsum([0, *lengths])
    pieces = [slice(a, b) for a, b in zip(starts, starts[1:])]
    check(out, np.concatenate([attention(q[p], k[p], v[p], causal=False)[0] for p in pieces]))

    dq, dk, dv = (random((sum(queries), heads, 32), seed=i + 5) for i, heads in enumerate((4, 2, 2)))
    rows = [slice(0, 3), slice(3, 4)]
    crossed = arrays.get(plan.forward(arrays.put(dq), arrays.put(k), arrays.put(v), cache=cache, layer=1,
                                      type="encoder_decoder"))
    expected = np.concatenate([attention(dq[r], k[p], v[p], causal=False)[0] for r, p in zip(rows, pieces)])
    check(crossed, expected)
    own = arrays.get(plan.forward(*map(arrays.put, (dq, dk, dv)), cache=cache))
    check(own, np.concatenate([attention(dq[r], dk[r], dv[r])[0] for r in rows]))

    batch.clear()  # the next step: the encoder's keys are in the cache
    for length, table, own_table, new in zip(lengths, tables, ([0], [5]), queries):
        batch.add(1, new + 1, own_table, encoder_len=length, cross_block_table=table)
    plan.update(batch)
    dq = random((2, 4, 32), seed=11)
    crossed = arrays.get(plan.forward(arrays.put(dq), cache=cache, layer=1, type="encoder_decoder"))
    check(crossed, np.concatenate([attention(dq[i:i + 1], k[p], v[p], causal=False)[0] for i, p in enumerate(pieces)]))


def test_encoder_only(arrays: Arrays) -> None:
    at = folio.Attention(arrays.context, num_heads=4, num_kv_heads=4, head_size=64, window=(5, 5))
    plan = folio.Plan(at, types="encoder_only", max_seqs=2, max_query_tokens=40, max_seq_len=40)
    batch = folio.Batch(arrays.context)
    batch.set_block_tables(None, [9, 20], [0, 9, 29])
    plan.update(batch)
    q, k, v = (random((29, 4, 64), seed=i) for i in range(3))
    out = arrays.get(plan.forward(*map(arrays.put, (q, k, v)), type="encoder_only"))
    parts = [slice(0, 9), slice(9, 29)]
    check(out, np.concatenate([attention(q[p], k[p], v[p], causal=False, window=(5, 5))[0] for p in parts]))


def test_several_attentions_and_layers_share_a_plan(arrays: Arrays) -> None:
    ctx = arrays.context
    full, local = (folio.Attention(ctx, num_heads=4, num_kv_heads=2, head_size=32, window=w) for w in (None, (3, 0)))
    cache = folio.KVCache(ctx, num_blocks=4, num_kv_heads=2, head_size=32, dtype="f32", num_layers=2)
    plan = folio.Plan([full, local], cache=cache, max_seqs=1, max_query_tokens=20, max_seq_len=20)
    batch = folio.Batch(cache=cache)
    batch.add(20, 20, [2, 0])
    plan.update(batch)
    for layer, window in enumerate([(-1, -1), (3, 0)]):
        q, k, v = (random((20, heads, 32), seed=layer) for heads in (4, 2, 2))
        out = plan.forward(*map(arrays.put, (q, k, v)), cache=cache, layer=layer, attention=layer)
        check(arrays.get(out), attention(q, k, v, window=window)[0])
    with pytest.raises(folio.ArgumentError, match="attention 2 is outside"):
        plan.forward(arrays.put(q), cache=cache, attention=2)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_attend_without_a_cache(arrays: Arrays, dtype: str) -> None:
    q, k, v = (random((30, heads, 32), dtype, i) for i, heads in enumerate((4, 2, 2)))
    placed = [arrays.put(a) for a in (q, k, v)]
    out, lse = folio.attend(*placed, context=arrays.context, lse=True)
    expected, expected_lse = attention(q, k, v)
    check(arrays.get(out), expected, dtype)
    check(arrays.get(lse), expected_lse, dtype)
    parts = [slice(0, 11), slice(11, 30)]
    out = folio.attend(*placed, query_start=[0, 11, 30], causal=False, window=(4, 4), context=arrays.context)
    check(arrays.get(out), np.concatenate([attention(q[p], k[p], v[p], causal=False, window=(4, 4))[0]
                                           for p in parts]), dtype)


def test_attend_with_a_cache(arrays: Arrays) -> None:
    step = Step(arrays, *MIXED)
    step.write_context()
    tables = np.zeros((4, max(map(len, step.tables))), np.int32)
    for row, table in zip(tables, step.tables):
        row[:len(table)] = table
    sinks, slopes = np.float32([0.5] * 4), np.float32([0.1] * 4)
    given = {"cache": step.cache, "block_tables": tables, "seq_lens": step.seq_lens, "query_start": step.query_starts,
             "sinks": arrays.put(sinks), "slopes": arrays.put(slopes), "soft_cap": 5.0, "scale": 0.2}
    out = folio.attend(*step.inputs(), **given)
    expected = step.expected(sinks=sinks, slopes=slopes, soft_cap=5.0, scale=0.2)[0]
    check(arrays.get(out), expected)
    again = arrays.put(np.zeros_like(step.q))
    assert folio.attend(arrays.put(step.q), out=again, **given) is again  # k and v are in the cache by now
    check(arrays.get(again), expected)


def test_merge_states(arrays: Arrays) -> None:
    q, k, v = (random((6, heads, 32), seed=i) for i, heads in enumerate((4, 2, 2)))
    k2, v2 = random((9, 2, 32), seed=7), random((9, 2, 32), seed=8)
    parts = [attention(q, a, b, causal=False) for a, b in ((k, v), (k2, v2))]
    placed = [(arrays.put(np.float32(out)), arrays.put(np.float32(lse))) for out, lse in parts]
    empty = (arrays.put(np.full((6, 4, 32), np.nan, np.float32)), arrays.put(np.full((6, 4), -np.inf, np.float32)))
    out, lse = folio.merge_states([*placed, empty], context=arrays.context)
    expected, expected_lse = attention(q, np.concatenate([k, k2]), np.concatenate([v, v2]), causal=False)
    check(arrays.get(out), expected)
    check(arrays.get(lse), expected_lse)
    with pytest.raises(folio.ArgumentError, match="parts is empty"):
        folio.merge_states([])


def test_the_reference_backend_agrees() -> None:
    arrays = Arrays("numpy", "cpu", folio.Context("reference"))
    step = Step(arrays, *MIXED)
    plan = step.ready()
    check(plan.forward(*step.inputs(), cache=step.cache), step.expected()[0])


def test_the_same_bits_whatever_the_threads_and_the_level() -> None:
    """Threads never change bits; a lower level may, within the bound."""
    outs = []
    for options in ({"threads": 1}, {"threads": 3}, {"threads": 2, "level": "scalar"}):
        arrays = Arrays("numpy", "cpu", folio.Context("cpu", **options))
        step = Step(arrays, *MIXED, seed=3)
        plan = step.ready()
        outs.append(plan.forward(*step.inputs(), cache=step.cache))
        assert arrays.context.num_threads == options["threads"]
    np.testing.assert_array_equal(outs[0], outs[1])
    check(outs[2], step.expected()[0])
    assert arrays.context.level == "scalar"


def test_plan_info_and_kernels(context: folio.Context) -> None:
    arrays = Arrays("numpy" if context.on_host else "device", "cpu" if context.on_host else "cuda", context)
    step = Step(arrays, *MIXED, dtype="bf16", size=64)
    plan = step.ready()
    info = plan.info()
    assert set(info) == {"kernel", "num_items", "num_split_items", "split_len", "fallback"} and info["num_items"] > 0
    names = {kernel.name for kernel in context.kernels()}
    assert names & set(info["kernel"].split()), (names, info)
    assert plan.workspace_size > 0 and plan.new_workspace().nbytes >= plan.workspace_size


def test_graph_plans_have_fixed_buffers(arrays: Arrays) -> None:
    step = Step(arrays, [2, 1], [6, 9])
    step.write_context()
    plan = folio.Plan(step.attention(), cache=step.cache, max_seqs=4, max_query_tokens=5, max_seq_len=32, graph=True)
    plan.update(step.batch())
    q, k, v = (np.concatenate([a, np.full((2, *a.shape[1:]), np.nan, np.float32)])
               for a in (step.q, step.new(step.k), step.new(step.v)))
    out = arrays.get(plan.forward(*map(arrays.put, (q, k, v)), cache=step.cache))
    check(out[:3], step.expected()[0])
    assert (out[3:] == 0).all()
