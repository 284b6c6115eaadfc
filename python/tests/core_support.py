"""What the core tests share: arrays of each library on each device, and steps of paged sequences. Not a test itself."""

from __future__ import annotations

from typing import Any, Optional

import numpy as np
import torch

import folio
from numpy_math import DTYPES, attention, random


class Arrays:
    """Arrays of one library on one device: "numpy" (CPU only), "torch", or "device": folio.DeviceArray."""

    def __init__(self, library: str, device: str, context: folio.Context) -> None:
        self.library, self.device, self.context = library, device, context

    def put(self, value: np.ndarray) -> Any:
        """A copy of a NumPy array as an array of this library."""
        value = np.ascontiguousarray(value)
        if self.library == "numpy":
            return value.copy()
        if self.library == "torch":
            bits = value.view(np.int16) if value.dtype == DTYPES["bf16"] else value
            tensor = torch.from_numpy(bits.copy()).to(self.device, copy=True)  # torch aligns to 64 bytes
            return tensor.view(torch.bfloat16) if value.dtype == DTYPES["bf16"] else tensor
        return folio.DeviceArray.copy_of(self.context, value)

    def get(self, value: Any) -> np.ndarray:
        """A copy of an array of this library as a NumPy array."""
        if self.library == "torch":
            tensor = value.cpu()
            if tensor.dtype == torch.bfloat16:
                return tensor.view(torch.int16).numpy().view(DTYPES["bf16"])
            return tensor.numpy().copy()
        return value.numpy() if isinstance(value, folio.DeviceArray) else value.copy()


class Step:
    """Sequences with random K and V in shuffled blocks of a cache, and their new rows."""

    def __init__(self, arrays: Arrays, query_lens: list, seq_lens: list, *, heads: int = 4, kv_heads: int = 2,
                 size: int = 32, v_size: Optional[int] = None, dtype: str = "f32", kv_dtype: Optional[str] = None,
                 block_size: int = 16, layout: str = "native", seed: int = 0, v_in_k: bool = False) -> None:
        self.arrays, self.query_lens, self.seq_lens = arrays, query_lens, seq_lens
        self.dtype, self.heads, self.kv_heads, self.size, self.v_size = dtype, heads, kv_heads, size, v_size or size
        rows, keys = sum(query_lens), sum(seq_lens)
        self.q = random((rows, heads, size), dtype, seed)
        self.k = random((keys, kv_heads, size), dtype, seed + 1)
        self.v = self.k[..., :self.v_size] if v_in_k else random((keys, kv_heads, self.v_size), dtype, seed + 2)
        self.v_in_k = v_in_k
        counts = [-(-n // block_size) for n in seq_lens]
        order = np.random.default_rng(seed).permutation(sum(counts) + 3).astype(np.int32)
        self.cache = folio.KVCache(arrays.context, num_blocks=len(order), block_size=block_size, num_kv_heads=kv_heads,
                                   head_size=size, v_head_size=self.v_size, dtype=kv_dtype or dtype, layout=layout,
                                   v_in_k=v_in_k)
        self.tables = np.split(order[:sum(counts)], np.cumsum(counts)[:-1])
        self.key_starts = np.cumsum([0, *seq_lens])
        self.query_starts = np.cumsum([0, *query_lens])
        if self.cache.dtype in DTYPES:  # NaN in every slot that nothing is written to
            rows = [np.full((len(order) * block_size, kv_heads, n), np.nan, DTYPES[dtype]) for n in (size, self.v_size)]
            self.cache.write(0, arrays.put(rows[0]), None if v_in_k else arrays.put(rows[1]),
                             np.arange(len(order) * block_size))

    def slots(self, i: int) -> np.ndarray:
        """The slots of all tokens of sequence i."""
        positions = np.arange(self.seq_lens[i])
        return self.tables[i][positions // self.cache.block_size].astype(np.int64) * self.cache.block_size \
            + positions % self.cache.block_size

    def write_context(self, **options: Any) -> None:
        """Stores the keys before the new ones, as earlier steps did."""
        for i, (new, length) in enumerate(zip(self.query_lens, self.seq_lens)):
            keys = slice(self.key_starts[i], self.key_starts[i] + length - new)
            v = None if self.v_in_k else self.arrays.put(self.v[keys])
            self.cache.write(0, self.arrays.put(self.k[keys]), v, self.slots(i)[:length - new], **options)

    def new(self, keys: np.ndarray) -> np.ndarray:
        """The rows of this step's tokens among those of all keys."""
        return np.concatenate([keys[self.key_starts[i + 1] - n:self.key_starts[i + 1]]
                               for i, n in enumerate(self.query_lens)])

    def batch(self, **options: Any) -> folio.Batch:
        batch = folio.Batch(cache=self.cache)
        for new, length, table in zip(self.query_lens, self.seq_lens, self.tables):
            batch.add(new, length, table, **options)
        return batch

    def plan(self, attention: folio.Attention, **options: Any) -> folio.Plan:
        return folio.Plan(attention, cache=self.cache, max_seqs=8, max_query_tokens=512, max_seq_len=1024, **options)

    def ready(self, batch: Optional[folio.Batch] = None, **options: Any) -> folio.Plan:
        """A plan for this step, with these options of its attention; the keys before the new ones are stored."""
        self.write_context()
        plan = self.plan(self.attention(**options))
        plan.update(self.batch() if batch is None else batch)
        return plan

    def attention(self, **options: Any) -> folio.Attention:
        return folio.Attention(self.arrays.context, num_heads=self.heads, num_kv_heads=self.kv_heads,
                               head_size=self.size, v_head_size=self.v_size, dtype=self.dtype,
                               kv_dtype=self.cache.dtype, v_in_k=self.v_in_k, **options)

    def inputs(self) -> tuple:
        """q, k and v of the new tokens, as arrays of the library."""
        v = None if self.v_in_k else self.arrays.put(self.new(self.v))
        return self.arrays.put(self.q), self.arrays.put(self.new(self.k)), v

    def expected(self, k: Any = None, v: Any = None, q: Any = None, bias: Any = None, **options: Any) -> tuple:
        """(out, lse) in float64. bias [seqs, heads, queries, keys], each dim at least as needed."""
        q, k, v = self.q if q is None else q, self.k if k is None else k, self.v if v is None else v
        results = []
        for i, (new, length) in enumerate(zip(self.query_lens, self.seq_lens)):
            rows, keys = (slice(starts[i], starts[i + 1]) for starts in (self.query_starts, self.key_starts))
            own = None if bias is None else bias[min(i, len(bias) - 1)][:, :new, :length]
            results.append(attention(q[rows], k[keys], v[keys], bias=own, **options))
        return tuple(np.concatenate(part) for part in zip(*results))
