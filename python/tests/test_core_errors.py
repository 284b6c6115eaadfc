"""Arguments of the wrong kind: one sentence of folio.ArgumentError, whatever is passed."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from typing import Any, Callable

import numpy as np
import pytest
import torch

import folio
from folio.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

X = np.ones((1, 2, 64), np.float32)


class Objects:
    """One of each."""

    def __init__(self) -> None:
        self.cache = folio.KVCache(num_blocks=8, num_kv_heads=2, head_size=64, dtype="f32")
        self.attention = folio.Attention(num_heads=2, head_size=64)
        self.plan = folio.Plan(self.attention, cache=self.cache, max_seqs=4, max_query_tokens=32, max_seq_len=64)
        self.batch = folio.Batch(cache=self.cache)
        self.batch.add(1, 1, [0])
        self.plan.update(self.batch)
        self.pool = folio.Pool(self.cache)
        self.sequence = self.pool.sequence()

    def forward(self, **options: Any) -> Any:
        return self.plan.forward(X, X, X, **{"cache": self.cache, **options})


CASES: dict[str, tuple[Callable[[Objects], Any], str]] = {
    "layer": (lambda o: o.forward(layer=1.5), r"^layer is 1\.5; it must be an integer"),
    "large layer": (lambda o: o.forward(layer=2**32), "^layer = 4294967296 is outside"),
    "cache": (lambda o: o.forward(cache="x"), "^cache is str 'x'; it must be a folio.KVCache"),
    "attention": (lambda o: o.forward(attention=0.5), r"^attention is 0\.5"),
    "attention below 0": (lambda o: o.forward(attention=-1), "^attention -1 is outside"),
    "num_heads": (lambda o: folio.Attention(num_heads=2**32 + 4, head_size=64), "^num_heads = 4294967300 is outside"),
    "positions": (lambda o: o.forward(positions=[0]), "^positions are given without rotary"),
    "lse": (lambda o: o.forward(lse=np.empty((1, 2))), "^lse has dtype float64"),
    "repeated lse": (lambda o: o.forward(lse=torch.empty(1, 1).expand(1, 2)), "^lse has strides"),
    "slopes": (lambda o: o.forward(slopes=np.zeros(3, np.float32)), "^slopes has dtype float32 and shape"),
    "repeated heads": (lambda o: o.plan.forward(X, torch.ones(1, 1, 64).expand(1, 2, 64), X, cache=o.cache),
                       "^k has strides"),
    "repeated tokens": (lambda o: folio.attend(X.repeat(3, 0), torch.ones(1, 2, 64).expand(3, 2, 64), X.repeat(3, 0)),
                        "^k has strides"),
    "a part's lse": (lambda o: folio.merge_states([(X, X[..., 0]), (X, torch.ones(1, 1).expand(1, 2))]),
                     "^lse of part 1 has strides"),
    "a part elsewhere": (lambda o: folio.merge_states([(X, torch.empty(1, 2, device="meta"))]), "^lse of part 0 is on meta"),
    "workspace": (lambda o: o.forward(workspace=X), "^workspace is ndarray"),
    "rotary": (lambda o: o.forward(rotary=3), "^rotary is int 3; it must be a folio.Rotary"),
    "k_scale": (lambda o: o.forward(k_scale="x"), "^k_scale is 'x'"),
    "batch": (lambda o: o.plan.update(None), "^batch is NoneType None; it must be a folio.Batch"),
    "context": (lambda o: folio.attend(X, X, X, context="cpu"), "^context is str 'cpu'; it must be a folio.Context"),
    "context of an attention": (lambda o: folio.Attention("cpu", num_heads=2, head_size=64), "^context is str"),
    "context of a cache": (lambda o: folio.KVCache("cpu", num_blocks=1, num_kv_heads=1, head_size=8, dtype="f32"),
                           "^context is str"),
    "context of a batch": (lambda o: folio.Batch("cpu"), "^context is str"),
    "attentions": (lambda o: folio.Plan([3], max_seqs=1, max_query_tokens=1, max_seq_len=1), r"^attentions\[0\] is"),
    "backend": (lambda o: folio.Context(3), "^backend is 3"),
    "threads": (lambda o: folio.Context(threads=1.5), r"^threads is 1\.5"),
    "window": (lambda o: folio.Attention(num_heads=2, head_size=64, window=(1,)), r"^window is \(1,\)"),
    "window of attend": (lambda o: folio.attend(X, X, X, window=3), "^window is 3; it must be"),
    "window_size": (lambda o: flash_attn_func(X[None], X[None], X[None], window_size=3), "^window_size is 3"),
    "k of attend": (lambda o: folio.attend(X, X[0, 0], X), r"^k has shape \(64,\)"),
    "head_size": (lambda o: folio.Attention(num_heads=2, head_size=64.0), r"^head_size is 64\.0"),
    "reserve": (lambda o: o.sequence.reserve(-1), r"^n = -1 is outside \[0, "),
    "reserve of half a token": (lambda o: o.sequence.reserve(0.5), r"^n is 0\.5"),
    "truncate": (lambda o: o.sequence.truncate("x"), "^length is 'x'"),
    "three in a pair": (lambda o: o.cache.copy_blocks([(0, 1, 2)]), r"^pairs has shape \(1, 3\); it must be \[n, 2\]"),
    "four in a pair": (lambda o: o.cache.copy_blocks([(0, 1, 2, 3)]), r"^pairs has shape \(1, 4\)"),
    "seq_len": (lambda o: o.batch.add(1, 20.0, [0, 1]), r"^seq_len is 20\.0; it must be an integer"),
    "position": (lambda o: o.batch.add(1, 1, [0], first_query_pos=0.5), r"^first_query_pos is 0\.5"),
    "a table with two dims": (lambda o: o.batch.add(1, 20, [[0, 1]]), r"^block_table has shape \(1, 2\)"),
    "bools": (lambda o: o.batch.add(1, 1, [True]), "^block_table has dtype bool"),
    "text": (lambda o: o.batch.add(1, 1, "x"), "^block_table has dtype"),
    "uneven slots": (lambda o: o.cache.write(0, X, X, [[1], [2, 3]]), "^slots has rows of different lengths"),
    "sequences": (lambda o: o.batch.add_sequences([3]), r"^sequences\[0\] is int 3; it must be a folio.Sequence"),
    "flash table": (lambda o: flash_attn_with_kvcache(X[None], X[None], X[None], block_table=np.zeros(1, np.int32)),
                    r"^block_table has shape \(1,\)"),
    "varlen table": (lambda o: flash_attn_varlen_func(X, X[None], X[None], np.array([0, 1], np.int32), None, 1, 1,
                                                      block_table=[0], seqused_k=np.ones(1, np.int32)),
                     "^block_table has shape"),
    "cu_seqlens_q": (lambda o: flash_attn_varlen_func(X, X, X, None, np.array([0, 1], np.int32)), "^cu_seqlens_q is"),
    "tensor with a gradient": (lambda o: o.batch.add(1, 1, torch.zeros(1, requires_grad=True)),
                               "^block_table cannot be read"),
}


@pytest.mark.parametrize("name", CASES)
def test_wrong_arguments(name: str) -> None:
    call, sentence = CASES[name]
    with pytest.raises(folio.ArgumentError, match=sentence):
        call(Objects())


def test_unknown_fields_of_a_rotary() -> None:
    with pytest.raises(TypeError, match="no argument 'thetta'"):
        folio.Rotary(num_dims=8, num_positions=8, thetta=3.0)


def test_tables_of_different_lengths() -> None:
    """They are filled up with -1; a sequence that needs such an entry is rejected."""
    o = Objects()
    o.batch.set_block_tables([[1], [2, 3]], [3, 20])
    assert o.batch.view()["blocks"].tolist() == [1, 2, 3]
    o.plan.update(o.batch)
    o.batch.set_block_tables([[1], [2, 3]], [20, 20])
    with pytest.raises(folio.ArgumentError, match="-1|NO_BLOCK"):
        o.plan.update(o.batch)
    every = np.ones((8 * 16, 2, 64), np.float32)
    o.cache.write(0, every, every, np.arange(8 * 16))
    q = np.ones((2, 2, 64), np.float32)
    options = {"cache": o.cache, "seq_lens": [3, 20], "query_start": [0, 1, 2]}
    assert np.array_equal(folio.attend(q, q, q, block_tables=[[1], [2, 3]], **options),
                          folio.attend(q, q, q, block_tables=[[1, -1], [2, 3]], **options))


def test_empty_lists_are_taken() -> None:
    o = Objects()
    o.cache.copy_blocks([])
    o.batch.clear()
    o.plan.update(o.batch)


def test_sequences_of_a_closed_pool() -> None:
    o = Objects()
    o.sequence.reserve(3)
    o.pool.close()
    for call in (lambda: o.sequence.reserve(1), o.sequence.info, lambda: o.batch.add_sequences([o.sequence])):
        with pytest.raises(folio.ArgumentError, match="^the Pool of this Sequence is closed$"):
            call()
    o.sequence.close()  # which is still allowed


def test_objects_are_not_copied() -> None:
    """A second object would end the same memory; another process does not have it."""
    o = Objects()
    context = folio.Context("reference")
    for one in (context, o.cache, o.attention, o.plan, o.batch, o.pool, o.sequence):
        for copy_of in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match=f"^a {type(one).__name__} cannot be copied or pickled"):
                copy_of(one)


def test_bias_may_be_larger_than_the_batch() -> None:
    """By folio_bias, a dim is 1 or at least what the batch needs."""
    o = Objects()
    bias = np.zeros((3, 2, 5, 40), np.float32)
    assert np.array_equal(o.forward(bias=bias), o.forward())


def test_missing_cuda_library_names_the_package() -> None:
    code = ("import sys; sys.modules['folio_cuda'] = None\nimport folio\n"
            "try:\n    folio.Context('cuda')\nexcept folio.UnsupportedError as error:\n    print(error)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/", timeout=120,
                          env={"PATH": "/usr/bin:/bin"})
    assert "folio-attention-cuda" in done.stdout or "was not found" not in done.stdout, done.stdout + done.stderr


def test_selfcheck_without_vllm() -> None:
    code = ("import sys, runpy; sys.modules['vllm'] = None; sys.argv = ['selfcheck']\n"
            "runpy.run_module('folio.vllm.selfcheck', run_name='__main__')")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/", timeout=120)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.startswith("selfcheck compares with vLLM")
