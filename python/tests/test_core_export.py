"""Blocks as bytes: export_blocks, import_blocks and Passport. docs/kv-format.md has a writer of its own, which is run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import folio

KEY = bytes(range(32))
MAKE: dict = {"num_blocks": 5, "block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": "bf16", "num_layers": 2}


def filled(seed: int, **options: Any) -> folio.KVCache:
    """A cache on the CPU with other numbers in every slot."""
    cache = folio.KVCache(folio.Context("cpu"), **(MAKE | options))
    n = cache.num_blocks * cache.block_size
    rng = np.random.default_rng(seed)
    for layer in range(cache.num_layers):
        k, v = (rng.standard_normal((n, cache.num_kv_heads, cache.head_size), np.float32) for _ in range(2))
        cache.write(layer, k, v, np.arange(n))
    return cache


def rows(cache: folio.KVCache, layer: int, blocks: list, num_tokens: int) -> np.ndarray:
    slots = [b * cache.block_size + i for b in blocks for i in range(cache.block_size)][:num_tokens]
    return np.stack([x.astype(np.float32) for x in cache.gather(layer, slots)])


@pytest.mark.parametrize("buffer", [bytes, bytearray, memoryview, lambda x: np.frombuffer(x, np.uint8).copy(),
                                    lambda x: np.frombuffer(b"x" + x, np.uint8)[1:]])
@pytest.mark.parametrize("layout", ["native", "nhd", "hnd"])
def test_there_and_back(layout: str, buffer: Any) -> None:
    passport = folio.Passport("m", k_scales=0.5, v_scales=[0.25])
    there, here = filled(1), filled(2)
    before = rows(here, 0, [1, 4], 32)
    data = there.export_blocks([3, 0], 20, passport=passport, key=KEY, layout=layout)
    assert isinstance(data, bytearray)
    here.import_blocks(buffer(bytes(data)), np.array([2, 0]), 20, passport=passport, key=KEY)
    for layer in range(2):
        np.testing.assert_array_equal(rows(here, layer, [2, 0], 20), rows(there, layer, [3, 0], 20))
    assert not rows(here, 1, [0], 16)[:, 4:].any()  # slots behind the tokens
    np.testing.assert_array_equal(rows(here, 0, [1, 4], 32), before)


def test_other_devices_take_it(context: folio.Context) -> None:
    there, here = filled(1), folio.KVCache(context, **MAKE)
    data = there.export_blocks([3, 0], 20, layout="nhd")
    here.import_blocks(data, [4, 1], 20)
    assert here.export_blocks([4, 1], 20, layout="nhd") == data


def rotary(**fields: Any) -> folio.Rotary:
    return folio.Rotary(folio.Context("cpu"), **({"num_dims": 8, "num_positions": 4, "theta": 5e5} | fields))


@pytest.mark.parametrize("there, here, words", [
    (folio.Passport("a"), folio.Passport("b"), 'model is "a" there and "b" here'),
    (folio.Passport("é"), None, r'model is "\?\?" there and "" here'),
    (folio.Passport(rotary=rotary()), folio.Passport(), "rotary is given there and none here"),
    (folio.Passport(rotary=rotary()), folio.Passport(rotary=rotary(theta=1e4)),
     "rotary.theta is 500000 there and 10000 here"),
    (folio.Passport(rotary=rotary(frequencies=[1, 2, 3, 4])), folio.Passport(rotary=rotary(frequencies=[1, 2, 3, 5])),
     "the hash of rotary's frequencies begins with"),
    (folio.Passport(k_scales=0.5), folio.Passport(k_scales=np.float32(0.25)), r"k_scales\[0\] is 0.5 there and 0.25"),
    (folio.Passport(v_scales=[1, 2, 3]), folio.Passport(v_scales=[1, 2, 4]), "the hash of v_scales begins with"),
])
def test_another_passport_is_refused(there: Any, here: Any, words: str) -> None:
    cache = filled(1)
    data = cache.export_blocks([0, 1], 32, passport=there)
    before = cache.export_blocks(range(5), 80)
    with pytest.raises(folio.ArgumentError, match=words):
        cache.import_blocks(data, [2, 3], 32, passport=here)
    assert cache.export_blocks(range(5), 80) == before
    cache.import_blocks(data, [2, 3], 32, passport=there)
    assert cache.export_blocks(range(5), 80) != before


def test_bad_arguments() -> None:
    cache = filled(1)
    data = cache.export_blocks([0], 16, key=KEY)
    for call, words in (
            (lambda: cache.import_blocks(data, [1], 16, key=KEY[1:]), "sealed with another key"),
            (lambda: cache.import_blocks(data, [1], 16), "here there is none"),
            (lambda: cache.import_blocks(data, [1], 15, key=KEY), "num_tokens is 16 there and 15 here"),
            (lambda: cache.import_blocks(data[:-1], [1], 16, key=KEY), "but its header says"),
            (lambda: cache.import_blocks(data, [1, 2], 32, key=KEY), "num_blocks is 1 there and 2 here"),
            (lambda: cache.import_blocks(data, [5], 16, key=KEY), r"blocks\[0\] = 5 is outside"),
            (lambda: cache.import_blocks("text", [1], 16), "data is str; it must be a contiguous buffer"),
            (lambda: cache.import_blocks(np.zeros(100, np.uint8)[::2], [1], 16), "must be a contiguous buffer"),
            (lambda: cache.import_blocks(b"", [1], 16), "data"),
            (lambda: cache.export_blocks([0], 0), "1 blocks of 16 tokens hold 1 to 16"),
            (lambda: cache.export_blocks([0], 1.5), "num_tokens is 1.5"),
            (lambda: cache.export_blocks([[0]], 16), "it must have 1 dim"),
            (lambda: cache.export_blocks([0], 16, key=b"short"), "key_bytes is 5"),
            (lambda: cache.export_blocks([0], 16, key="text"), "a key is str"),
            (lambda: cache.export_blocks([0], 16, layout="strided"), "layout strided"),
            (lambda: cache.export_blocks([0], 16, layout="odd"), "layout 'odd' is not one of native"),
            (lambda: cache.export_blocks([0], 16, passport="m"), "it must be a folio.Passport"),
            (lambda: folio.Passport("m" * 256) and cache.export_blocks([0], 16, passport=folio.Passport("m" * 256)),
             "256 bytes"),
            (lambda: folio.Passport("a\0b"), "null"),
            (lambda: folio.Passport(rotary="llama"), "rotary"),
            (lambda: folio.Passport(k_scales=[1, 2], v_scales=[1]), "k_scales has 2 numbers, but v_scales has 1"),
            (lambda: cache.export_blocks([0], 16, passport=folio.Passport(k_scales=-1)), r"k_scales\[0\] is -1")):
        with pytest.raises(folio.ArgumentError, match=words):
            call()
