"""KVCache: layouts, wrapped arrays, write, gather, copies, shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import folio
from core_support import Arrays, Step
from numpy_math import DTYPES, attention, check, random

LAYOUTS = ["native", "nhd", "hnd", "interleaved_nhd", "interleaved_hnd", "xpacked", "xpacked_1"]


def gather(arrays: Arrays, cache: folio.KVCache, layer: int, slots: Any, **options: Any) -> tuple:
    like = arrays.put(np.zeros(1, DTYPES["f32"]))
    return tuple(arrays.get(a) for a in cache.gather(layer, slots, like=like, **options))


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_write_and_gather(arrays: Arrays, layout: str, dtype: str) -> None:
    cache = folio.KVCache(arrays.context, num_blocks=4, block_size=16, num_kv_heads=3, head_size=32, dtype=dtype,
                          num_layers=2, layout=layout)
    k, v = random((5, 3, 32), dtype, 1), random((5, 3, 32), dtype, 2)
    slots = [40, -1, 3, 63, 16]  # -1 is not stored
    cache.write(1, arrays.put(k), arrays.put(v), slots)
    got_k, got_v = gather(arrays, cache, 1, [63, 40, -1, 16, 3])
    order = [3, 0, None, 4, 2]
    for got, rows in ((got_k, k), (got_v, v)):
        assert got.dtype == DTYPES[dtype] and got.shape == (5, 3, 32)
        for line, row in zip(got, order):
            np.testing.assert_array_equal(line, 0 if row is None else rows[row])
    as_f32 = gather(arrays, cache, 1, [3], dtype="f32")[0]
    assert as_f32.dtype == np.float32
    np.testing.assert_array_equal(as_f32[0], k[2].astype(np.float32))


def test_repr_and_attributes(context: folio.Context) -> None:
    cache = folio.KVCache(context, num_blocks=4, num_kv_heads=3, head_size=32, v_head_size=64, dtype="bf16",
                          num_layers=2)
    assert (cache.num_blocks, cache.num_layers, cache.block_size, cache.num_kv_heads) == (4, 2, 16, 3)
    assert (cache.head_size, cache.v_head_size, cache.dtype, cache.layout, cache.v_in_k) == (32, 64, "bf16", "native",
                                                                                           False)
    assert "2 layers, 4 blocks of 16 tokens, 3 kv heads of 32, bf16, native" in repr(cache)


def wrapped_inputs(arrays: Arrays, layout: str, dtype: str) -> tuple:
    shape = (5, 16, 2, 32) if layout == "nhd" else (5, 2, 16, 32)
    return tuple([arrays.put(np.zeros(shape, DTYPES[dtype])) for _ in range(2)] for _ in range(2))


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("layout", ["nhd", "hnd"])
def test_wrap(arrays: Arrays, layout: str, dtype: str) -> None:
    """The caller's arrays hold what is written, and attention reads what the caller wrote there."""
    k, v = wrapped_inputs(arrays, layout, dtype)
    cache = folio.KVCache.wrap(k, v, layout=layout, context=arrays.context)
    assert (cache.num_layers, cache.num_blocks, cache.block_size) == (2, 5, 16)
    assert (cache.num_kv_heads, cache.head_size) == (2, 32)
    rows = random((20, 2, 32), dtype)
    at = folio.Attention(arrays.context, num_heads=4, num_kv_heads=2, head_size=32, dtype=dtype)
    plan = folio.Plan(at, cache=cache, max_seqs=1, max_query_tokens=20, max_seq_len=20)
    batch = folio.Batch(cache=cache)
    batch.add(20, 20, [3, 1])
    plan.update(batch)
    q = random((20, 4, 32), dtype, 4)
    out = plan.forward(arrays.put(q), arrays.put(rows), arrays.put(rows), cache=cache, layer=1)
    check(arrays.get(out), attention(q, rows, rows)[0], dtype)
    held = arrays.get(k[1])
    held = held if layout == "nhd" else held.transpose(0, 2, 1, 3)
    np.testing.assert_array_equal(held[3], rows[:16])
    np.testing.assert_array_equal(held[1, :4], rows[16:])
    assert (arrays.get(k[0]) == 0).all()


def test_wrap_of_strided_views() -> None:
    """K and V side by side in one array, as some engines have them."""
    room = np.zeros((6, 2, 16, 64), np.float32)
    k, v = room[:, :, :, :32], room[:, :, :, 32:]
    cache = folio.KVCache.wrap([k], [v], layout="hnd")
    rows = random((3, 2, 32))
    cache.write(0, rows, -rows, [16, 17, 95])
    np.testing.assert_array_equal(k[1, :, 0], rows[0])
    np.testing.assert_array_equal(v[5, :, 15], -rows[2])
    assert np.count_nonzero(room) == 2 * rows.size


def test_wrap_of_native_memory(arrays: Arrays) -> None:
    """Bytes of the library's own format, as an engine that allocates by itself has them."""
    sizes = {"block_size": 16, "num_kv_heads": 2, "head_size": 32, "num_blocks": 4}
    shape = folio.cache_shape(**sizes, dtype="bf16", backend="cuda" if arrays.device == "cuda" else "cpu")
    zeros = aligned(shape.layer_bytes)
    memory = zeros if arrays.library == "numpy" else arrays.put(zeros)
    cache = folio.KVCache.wrap([memory], layout="native", dtype="bf16", context=arrays.context, **sizes)
    step = Step(arrays, [3], [3], dtype="bf16")
    cache.write(0, arrays.put(step.k), arrays.put(step.v), [0, 20, 63])
    got = gather(arrays, cache, 0, [0, 20, 63])
    np.testing.assert_array_equal(got[0], step.k)
    np.testing.assert_array_equal(got[1], step.v)
    assert np.count_nonzero(arrays.get(memory)) > 0


def aligned(nbytes: int) -> np.ndarray:
    room = np.zeros(nbytes + 64, np.int8)
    start = -room.ctypes.data % 64
    return room[start:start + nbytes]


def test_wrap_of_latents(arrays: Arrays) -> None:
    k = [arrays.put(np.zeros((4, 16, 1, 96), DTYPES["bf16"]))]
    cache = folio.KVCache.wrap(k, v_in_k=True, v_head_size=64, context=arrays.context)
    assert (cache.head_size, cache.v_head_size, cache.v_in_k) == (96, 64, True)
    rows = random((2, 1, 96), "bf16")
    cache.write(0, arrays.put(rows), None, [33, 0])
    np.testing.assert_array_equal(arrays.get(k[0])[2, 1], rows[0])
    np.testing.assert_array_equal(gather(arrays, cache, 0, [0])[1][0], rows[1][:, :64])
    assert cache.arrays()[1] is None


def test_wrapped_arrays_live_as_long_as_the_cache() -> None:
    k, v = ([np.zeros((4, 16, 2, 32), np.float32)] for _ in range(2))
    cache = folio.KVCache.wrap(k, v)
    rows = random((1, 2, 32))
    del k, v
    cache.write(0, rows, rows, [5])
    np.testing.assert_array_equal(cache.gather(0, [5])[0], rows)


@pytest.mark.parametrize("give, message", [
    (lambda a: ([], []), "k is empty"),
    (lambda a: ([a, a], [a]), "k has 2 layers, but v has 1"),
    (lambda a: ([a], None), "v is missing"),
    (lambda a: ([a[0]], [a]), r"k has shape \(16, 2, 32\)"),
    (lambda a: ([a], [a[:, :8]]), r"k has shape \(4, 16, 2, 32\), but v has \(4, 8, 2, 32\)"),
    (lambda a: ([a, a[:2]], [a, a]), r"k\[1\] has shape \(2, 16, 2, 32\)"),
    (lambda a: ([a[..., ::2]], [a]), "k has strides .* the last must be 1"),
    (lambda a: ([a], [a.astype(np.float16)]), "v has dtype float16, but k has float32"),
], ids=range(8))
def test_wrap_rejects(give: Any, message: str) -> None:
    with pytest.raises(folio.ArgumentError, match=message):
        folio.KVCache.wrap(*give(np.zeros((4, 16, 2, 32), np.float32)))


def test_wrap_rejects_layouts_and_missing_sizes() -> None:
    a = np.zeros((4, 16, 2, 32), np.float32)
    with pytest.raises(folio.ArgumentError, match="layout 'xpacked' cannot be wrapped here"):
        folio.KVCache.wrap([a], [a], layout="xpacked")
    with pytest.raises(folio.ArgumentError, match="needs block_size, num_kv_heads, head_size and num_blocks"):
        folio.KVCache.wrap([a], layout="native")
    with pytest.raises(folio.ArgumentError, match="leave v out"):
        folio.KVCache.wrap([a], [a], layout="native")
    with pytest.raises(folio.ArgumentError, match="so v must be left out"):
        folio.KVCache.wrap([a], [a], v_in_k=True)


def test_cache_shape() -> None:
    shape = folio.cache_shape(num_blocks=5, block_size=16, num_kv_heads=2, head_size=32, v_head_size=64, dtype="f16",
                              num_layers=3, layout="nhd", backend="cpu")
    assert shape.k == (5, 16, 2, 32) and shape.v == (5, 16, 2, 64)
    assert shape.layer_bytes >= 5 * 16 * 2 * 96 * 2 and shape.total_bytes == 3 * shape.layer_bytes
    with pytest.raises(folio.ArgumentError, match="layout 'nhwc' is not one of native, nhd"):
        folio.cache_shape(num_blocks=5, block_size=16, num_kv_heads=2, head_size=32, dtype="f16", layout="nhwc")


def test_copy_blocks(arrays: Arrays) -> None:
    caches = [folio.KVCache(arrays.context, num_blocks=4, block_size=16, num_kv_heads=2, head_size=32, dtype="bf16",
                            num_layers=2, layout=layout) for layout in ("native", "hnd")]
    rows = random((32, 2, 32), "bf16")
    for layer in range(2):
        caches[0].write(layer, arrays.put(rows), arrays.put(-rows), np.arange(32))
    caches[0].copy_blocks([(0, 3), (1, 2)])
    caches[0].copy_blocks(np.array([[3, 0]]), to=caches[1])  # into another layout
    for layer in range(2):
        np.testing.assert_array_equal(gather(arrays, caches[0], layer, np.arange(48, 64))[0], rows[:16])
        np.testing.assert_array_equal(gather(arrays, caches[0], layer, np.arange(32, 48))[1], -rows[16:])
        np.testing.assert_array_equal(gather(arrays, caches[1], layer, np.arange(16))[0], rows[:16])
    with pytest.raises(folio.ArgumentError, match="4"):
        caches[0].copy_blocks([(0, 4)])


def test_host_and_device_exchange_blocks(context: folio.Context) -> None:
    """Blocks go from a cache on the device to one in host memory and back, whatever the layouts."""
    torch = pytest.importorskip("torch")
    host = folio.Context("cpu")
    make = {"num_blocks": 2, "block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": "bf16"}
    there = folio.KVCache(context, **make)
    k, v = (torch.zeros(2, 16, 2, 64, dtype=torch.bfloat16, pin_memory=not context.on_host) for _ in range(2))
    here = folio.KVCache.wrap([k], [v], context=host)
    rows = random((16, 2, 64), "bf16")
    here.write(0, rows, -rows, np.arange(16))
    here.copy_blocks([(0, 1)], to=there)
    there.copy_blocks([(1, 1)], to=here)
    context.wait()
    np.testing.assert_array_equal(here.gather(0, np.arange(16, 32))[1], -rows)


def test_memory_that_the_device_cannot_access(context: folio.Context) -> None:
    """Host memory that is not pinned; some devices can access it."""
    make = {"num_blocks": 2, "block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": "bf16"}
    there, here = folio.KVCache(context, **make), folio.KVCache(folio.Context("cpu"), **make)
    try:
        here.copy_blocks([(0, 1)], to=there)
    except folio.UnsupportedError as error:
        assert "lies in host memory that the device cannot access" in str(error)
    context.wait()


def test_bad_writes_change_nothing(arrays: Arrays) -> None:
    cache = folio.KVCache(arrays.context, num_blocks=2, block_size=16, num_kv_heads=2, head_size=32, dtype="f32")
    rows = random((2, 2, 32))
    cache.write(0, arrays.put(rows), arrays.put(rows), [0, 1])
    for slots, message in (([0, 32], "32"), ([5, 5], "5"), ([0], "slots has 1 entries, but k has 2 rows"),
                           (None, "slots is missing")):
        with pytest.raises(folio.ArgumentError, match=message):
            cache.write(0, arrays.put(-rows), arrays.put(-rows), slots)
    with pytest.raises(folio.ArgumentError, match="1"):
        cache.write(1, arrays.put(-rows), arrays.put(-rows), [0, 1])  # there is one layer
    np.testing.assert_array_equal(gather(arrays, cache, 0, [0, 1])[0], rows)


@pytest.mark.parametrize("bad", [{"head_size": 33}, {"num_blocks": 0}, {"block_size": 5000}, {"dtype": "f64"},
                                 {"v_in_k": True, "v_head_size": 64}], ids=str)
def test_bad_caches(context: folio.Context, bad: dict) -> None:
    good = {"num_blocks": 2, "block_size": 16, "num_kv_heads": 2, "head_size": 32, "dtype": "f32"}
    with pytest.raises(folio.ArgumentError) as caught:
        folio.KVCache(context, **(good | bad))
    assert len(str(caught.value)) > 10


def test_torch_reads_native_memory_in_place(context: folio.Context) -> None:
    cache = folio.KVCache(context, num_blocks=2, block_size=16, num_kv_heads=2, head_size=32, dtype="bf16",
                          layout="hnd")
    view = torch.from_dlpack(cache.arrays()[0])
    assert view.shape == (2, 2, 16, 32) and view.device.type == context.place[0]
    del cache  # the view keeps it alive
    view.fill_(3.0)
    assert (view.float() == 3).all()
