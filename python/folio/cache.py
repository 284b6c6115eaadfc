"""KVCache: K and V of all layers in fixed-size blocks, in the library's memory or in arrays of the caller."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple, Optional, Sequence

import numpy as np

from . import _abi as abi
from ._arrays import DTYPE_NAMES, Array, address, array, dtype_of, is_contiguous, numpy_dtype, own_array
from ._library import Handle, check, choice, create, handle_of, integer, lib, make, text
from ._run import empty, place_check, run_of, tensor
from .context import Context, given_or_default
from .device import ArrayView
from .errors import ArgumentError
from .passport import Passport, key_of, passport_of

LAYOUTS = {text(lib.folio_layout_name(i)): i for i in range(abi.FOLIO_NUM_LAYOUTS)}


class Shape(NamedTuple):
    """What a layer of a cache looks like in memory."""

    k: tuple
    v: tuple
    layer_bytes: int
    total_bytes: int
    alignment: int
    layout_id: str
    layout_version: int


def _desc(num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int,
          v_head_size: Optional[int], dtype: Any, layout: str, v_in_k: bool) -> Any:
    return make(abi.folio_kv_cache_desc, num_blocks=num_blocks, num_layers=num_layers, block_size=block_size,
                num_kv_heads=num_kv_heads, k_head_size=head_size, v_head_size=v_head_size or 0,
                dtype=dtype_of(dtype), layout=choice("layout", LAYOUTS, layout), v_in_k=int(v_in_k))


def cache_shape(*, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, dtype: Any,
                num_layers: int = 1, v_head_size: Optional[int] = None, layout: str = "native", v_in_k: bool = False,
                backend: str = "auto") -> Shape:
    """The shape and the bytes that such a cache has on a backend. Makes nothing."""
    desc = _desc(num_layers, num_blocks, block_size, num_kv_heads, head_size, v_head_size, dtype, layout, v_in_k)
    shape = make(abi.folio_kv_cache_shape)
    check(lib.folio_kv_cache_get_shape(backend.encode(), ctypes.byref(desc), ctypes.byref(shape)))
    return Shape(tuple(shape.k.dims[:shape.k.num_dims]), tuple(shape.v.dims[:shape.v.num_dims]), shape.layer_bytes,
                 shape.total_bytes, shape.alignment, text(shape.layout_id), shape.layout_version)


class KVCache(Handle):
    """K and V of num_layers layers in num_blocks blocks of block_size tokens.

    The library chooses the layout that its kernels read fastest ("native"), unless another is named. With v_in_k
    (latent attention) only K is stored, and V is its first v_head_size numbers.
    """

    def __init__(self, context: Optional[Context] = None, *, num_blocks: int, block_size: int = 16, num_kv_heads: int,
                 head_size: int, dtype: Any, num_layers: int = 1, v_head_size: Optional[int] = None,
                 layout: str = "native", v_in_k: bool = False) -> None:
        self.context = given_or_default(context)
        desc = _desc(num_layers, num_blocks, block_size, num_kv_heads, head_size, v_head_size, dtype, layout, v_in_k)
        handle = create(lib.folio_kv_cache_create, self.context, ctypes.byref(desc))
        super().__init__(handle, lib.folio_kv_cache_destroy, self.context)
        self._describe()

    def _describe(self) -> None:
        view = self._view(0)
        desc = ctypes.cast(view.desc, ctypes.POINTER(abi.folio_kv_cache_desc)).contents
        self.num_blocks, self.num_layers = int(desc.num_blocks), int(desc.num_layers)
        self.block_size, self.num_kv_heads = int(desc.block_size), int(desc.num_kv_heads)
        self.head_size, self.v_head_size = int(desc.k_head_size), int(desc.v_head_size or desc.k_head_size)
        self.v_in_k = bool(desc.v_in_k)
        self.dtype, self.layout = DTYPE_NAMES[desc.dtype], text(lib.folio_layout_name(desc.layout))

    def _view(self, layer: int) -> Any:
        view = make(abi.folio_kv_cache_view)
        check(lib.folio_kv_cache_get_view(self._as_parameter_, integer(layer, "layer"), ctypes.byref(view)))
        return view

    def arrays(self, layer: int = 0) -> tuple:
        """(K, V) of a layer as they lie in memory, without a copy: an ArrayView each, for torch.from_dlpack() or
        np.from_dlpack(), which makes read-only arrays. V is None with v_in_k."""
        view = self._view(layer)
        kind = dtype_of(self.dtype)

        def part(data: Any, a: Any) -> Optional[ArrayView]:
            if not a.num_dims:
                return None
            return ArrayView(data, kind, tuple(a.dims[:a.num_dims]), tuple(a.strides[:a.num_dims]), self.context, self)

        return part(view.k, view.k_array), part(view.v, view.v_array)

    @classmethod
    def wrap(cls, k: Sequence[Any], v: Optional[Sequence[Any]] = None, *, context: Optional[Context] = None,
             layout: str = "nhd", block_size: Optional[int] = None, num_kv_heads: Optional[int] = None,
             head_size: Optional[int] = None, v_head_size: Optional[int] = None, dtype: Any = None,
             num_blocks: Optional[int] = None, v_in_k: bool = False) -> "KVCache":
        """A cache in the caller's arrays, one of K and one of V for each layer, without a copy.

        layout "nhd": [blocks, block_size, kv_heads, head_size]; "hnd": [blocks, kv_heads, block_size, head_size];
        both with any strides, if the last is 1. "native": one array k per layer, whose bytes hold K and V in the
        library's own format; then block_size, num_kv_heads, head_size, num_blocks (and dtype, if k has another) say
        what it holds. If the first dim of k is the block, blocks may lie apart. v_in_k: K holds V, as its first
        v_head_size numbers, and v is left out.
        """
        arrays = [array(a) for a in k]
        if not arrays:
            raise ArgumentError("k is empty; it must have an array for each layer")
        values = [array(a) for a in v] if v is not None else None
        ctx = given_or_default(context, arrays[0].device)
        for name, group in (("k", arrays), ("v", values or [])):
            for i, a in enumerate(group):
                if not a.writable:
                    raise ArgumentError(f"{name}[{i}] is read-only")
        if values is not None and len(values) != len(arrays):
            raise ArgumentError(f"k has {len(arrays)} layers, but v has {len(values)}")
        if layout == "native":
            self = cls._native(ctx, arrays, values, (num_blocks, block_size, num_kv_heads, head_size), v_head_size,
                               dtype, v_in_k)
        elif layout in ("nhd", "hnd"):
            self = cls._rows(ctx, arrays, values, layout, v_head_size, v_in_k)
        else:
            raise ArgumentError(f'layout {layout!r} cannot be wrapped here; use "nhd", "hnd" or "native"')
        self._keep = (ctx, [a.owner for a in arrays], [a.owner for a in values or []])
        return self

    @classmethod
    def _rows(cls, context: Context, k: list, v: Optional[list], layout: str, v_head_size: Optional[int],
              v_in_k: bool) -> "KVCache":
        if (v is None) != v_in_k:
            raise ArgumentError("v_in_k: K holds V, so v must be left out" if v_in_k else "v is missing")
        strides: list[Any] = []
        for name, group in (("k", k), ("v", v or [])):
            first = _same(group, name) if group else k[0]
            if len(first.shape) != 4:
                raise ArgumentError(f"{name} has shape {tuple(first.shape)}; it must have 4 dims")
            block, x, y, _ = first.strides
            strides.append((block, x, y) if layout == "nhd" else (block, y, x))
        blocks, x, y, _ = k[0].shape
        if v and tuple(v[0].shape[:3]) != (blocks, x, y):
            raise ArgumentError(f"k has shape {tuple(k[0].shape)}, but v has {tuple(v[0].shape)}")
        return cls._strided(context, k, v or [], (blocks, x, y) if layout == "nhd" else (blocks, y, x), strides[0],
                            strides[1], v[0].shape[3] if v else v_head_size, v_in_k)

    @classmethod
    def _strided(cls, context: Context, k: list, v: list, counts: tuple[int, int, int], k_strides: tuple,
                 v_strides: tuple, v_size: Optional[int], v_in_k: bool = False) -> "KVCache":
        """A cache in arrays of the caller, one of each layer, which it does not keep alive. counts: blocks, tokens of
        a block, heads; strides: elements from one of these to the next."""
        desc = _desc(len(k), *counts, k[0].shape[-1], v_size, k[0].dtype, "strided", v_in_k)
        memory = make(abi.folio_kv_memory)
        for name, group, strides in (("k", k, k_strides), ("v", v, v_strides)):
            for a in group[:1]:
                if a.dtype != k[0].dtype:
                    raise ArgumentError(f"{name} has dtype {a.dtype}, but k has {k[0].dtype}")
                if a.strides[-1] != 1:
                    raise ArgumentError(f"{name} has strides {tuple(a.strides)}; the last must be 1")
                extent = sum((n - 1) * s for n, s in zip(counts, strides)) + a.shape[-1] if all(counts) else 0
                setattr(memory, f"{name}_bytes", extent * _itemsize(a))
                setattr(memory, f"{name}_strides", abi.folio_kv_strides(*strides))
        return cls._wrapped(context, desc, memory, k, v)

    @classmethod
    def _native(cls, context: Context, k: list, v: Optional[list], sizes: tuple[Any, Any, Any, Any],
                v_head_size: Optional[int], dtype: Any, v_in_k: bool) -> "KVCache":
        """sizes: num_blocks, block_size, num_kv_heads, head_size."""
        first = _same(k, "k")
        if v is not None:
            raise ArgumentError('layout "native" holds K and V in one array: leave v out')
        if None in sizes:
            raise ArgumentError('layout "native" needs block_size, num_kv_heads, head_size and num_blocks')
        desc = _desc(len(k), *sizes, v_head_size, dtype or first.dtype, "native", v_in_k)
        extent = sum((n - 1) * s for n, s in zip(first.shape, first.strides)) + 1 if all(first.shape) else 0
        memory = make(abi.folio_kv_memory, k_bytes=extent * _itemsize(first))
        if len(first.shape) > 1 and first.shape[0] == sizes[0]:
            if not is_contiguous(first._replace(shape=first.shape[1:], strides=first.strides[1:])):
                raise ArgumentError(f"k has shape {tuple(first.shape)} and strides {tuple(first.strides)}; the numbers "
                                    "of a block must be contiguous")
            memory.k_strides.block = first.strides[0] * _itemsize(first) // lib.folio_dtype_size(desc.dtype)
        return cls._wrapped(context, desc, memory, k, [])

    @classmethod
    def _wrapped(cls, context: Context, desc: Any, memory: Any, k: list, v: list) -> "KVCache":
        pointers = [(ctypes.c_void_p * len(group))(*[a.data for a in group]) for group in (k, v)]
        for name, group, bases in zip("kv", (k, v), pointers):
            for i, a in enumerate(group):
                place_check(context, a, f"{name}[{i}]")
            if group:
                setattr(memory, name, ctypes.addressof(bases))
        self = cls.__new__(cls)
        self.context = context
        Handle.__init__(self, create(lib.folio_kv_cache_wrap, context, ctypes.byref(desc), ctypes.byref(memory)),
                        lib.folio_kv_cache_destroy, context)
        self._describe()
        return self

    def write(self, layer: int, k: Any, v: Any, slots: Any, *, k_scale: float = 0.0, v_scale: float = 0.0,
              stream: Optional[int] = None) -> None:
        """Stores rows of k and v in slots (block * block_size + offset) of a layer. Slot -1 is skipped."""
        ctx = self.context
        index = own_array(slots, np.int64, "slots")
        kt, ka = tensor(ctx, k, "k", self.num_kv_heads, self.head_size)
        fields = make(abi.folio_kv_write, k=kt, slots=address(index), k_scale=k_scale, v_scale=v_scale)
        if index.size != kt.tokens:
            raise ArgumentError(f"slots has {index.size} entries, but k has {kt.tokens} rows")
        if v is not None:
            fields.v, va = tensor(ctx, v, "v", self.num_kv_heads, self.v_head_size)
        check(lib.folio_kv_cache_write(self._as_parameter_, integer(layer, "layer"), ctypes.byref(fields),
                                       run_of(ctx, k, stream)))

    def gather(self, layer: int, slots: Any, *, dtype: Any = None, k_scale: float = 0.0, v_scale: float = 0.0,
               like: Any = None, stream: Optional[int] = None) -> tuple:
        """(k, v) of slots as rows [n, kv_heads, head_size], dequantised. Slot -1 gives zeros."""
        ctx = self.context
        index = own_array(slots, np.int64, "slots")
        kind = dtype_of(dtype or (self.dtype if self.dtype in ("f32", "f16", "bf16") else "f32"))
        k = empty(ctx, (index.size, self.num_kv_heads, self.head_size), kind, like)
        v = empty(ctx, (index.size, self.num_kv_heads, self.v_head_size), kind, like)
        fields = make(abi.folio_kv_gather, slots=address(index), num_slots=index.size, k_scale=k_scale, v_scale=v_scale,
                      k=tensor(ctx, k, "k", self.num_kv_heads, self.head_size)[0],
                      v=tensor(ctx, v, "v", self.num_kv_heads, self.v_head_size)[0])
        check(lib.folio_kv_cache_gather(self._as_parameter_, integer(layer, "layer"), ctypes.byref(fields),
                                        run_of(ctx, like, stream)))
        return k, v

    def copy_blocks(self, pairs: Any, to: Optional["KVCache"] = None, *, stream: Optional[int] = None) -> None:
        """Copies whole blocks of all layers. pairs: (from, to) of each; into another cache if `to` is given."""
        index = own_array(pairs, np.int64, "pairs")
        if index.size and (index.ndim != 2 or index.shape[1] != 2):
            raise ArgumentError(f"pairs has shape {index.shape}; it must be [n, 2]: (from, to) of each")
        target = self._as_parameter_ if to is None else handle_of(to, KVCache, "to")
        check(lib.folio_kv_cache_copy_blocks(self._as_parameter_, target, address(index), index.size // 2,
                                             run_of(self.context, None, stream)))

    def export_blocks(self, blocks: Any, num_tokens: int, *, passport: Optional[Passport] = None,
                      key: Optional[bytes] = None, layout: str = "native", stream: Optional[int] = None) -> bytearray:
        """K and V of these blocks, in the order of their tokens, as bytes that say what they are: docs/kv-format.md.

        The blocks hold num_tokens tokens; what lies behind them in the last block does not leave. With key, 16 to 64
        secret bytes, only import_blocks with the same key takes the bytes. layout "native" is the fastest, but differs
        between CPUs and GPUs; all caches take the others, such as "nhd".
        """
        fields, keep = _blocks(blocks, num_tokens, passport, key)
        fields.layout = choice("layout", LAYOUTS, layout)
        run, size = run_of(self.context, None, stream), ctypes.c_size_t()

        def call(data: Any, capacity: int) -> None:
            check(lib.folio_kv_cache_export(self._as_parameter_, ctypes.byref(fields), data, capacity,
                                            ctypes.byref(size), run))

        call(None, 0)
        result = bytearray(size.value)
        call((ctypes.c_char * len(result)).from_buffer(result), len(result))
        return result

    def import_blocks(self, data: Any, blocks: Any, num_tokens: int, *, passport: Optional[Passport] = None,
                      key: Optional[bytes] = None, stream: Optional[int] = None) -> None:
        """Reads what export_blocks made, from bytes or any other buffer, into blocks of this cache.

        Everything is verified before anything is written: counts of blocks and tokens, every field of the passport
        and of the cache's geometry, and the checksum or seal of every block. The buffer must not change meanwhile.
        """
        try:
            given = np.frombuffer(data, np.uint8)
        except (TypeError, ValueError, BufferError) as error:
            raise ArgumentError(f"data is {type(data).__name__}; it must be a contiguous buffer in host memory: "
                                f"{error}") from None
        fields, keep = _blocks(blocks, num_tokens, passport, key)
        check(lib.folio_kv_cache_import(self._as_parameter_, ctypes.byref(fields), address(given), given.size,
                                        run_of(self.context, None, stream)))

    def __repr__(self) -> str:
        return (f"<folio.KVCache {self.num_layers} layers, {self.num_blocks} blocks of {self.block_size} tokens, "
                f"{self.num_kv_heads} kv heads of {self.head_size}, {self.dtype}, {self.layout}>")


def _blocks(blocks: Any, num_tokens: int, passport: Optional[Passport], key: Optional[bytes]) -> tuple:
    """A folio_kv_blocks, and what it points to."""
    index, (secret, key_bytes) = own_array(blocks, np.int64, "blocks"), key_of(key)
    if index.ndim != 1:
        raise ArgumentError(f"blocks has shape {index.shape}; it must have 1 dim")
    fields = make(abi.folio_kv_blocks, blocks=address(index), num_blocks=index.size, passport=passport_of(passport),
                  num_tokens=integer(num_tokens, "num_tokens", 0, 2**63 - 1), key_bytes=key_bytes,
                  key=None if secret is None else ctypes.addressof(secret))
    return fields, (index, secret, passport)


def _itemsize(a: Array) -> int:
    return 1 if a.dtype == "uint8" else numpy_dtype(dtype_of(a.dtype)).itemsize


def _same(arrays: list, name: str) -> Array:
    """The first array, once all others are seen to have its shape, strides and dtype."""
    first = arrays[0]
    for i, a in enumerate(arrays):
        if (tuple(a.shape), tuple(a.strides), a.dtype) != (tuple(first.shape), tuple(first.strides), first.dtype):
            raise ArgumentError(f"{name}[{i}] has shape {tuple(a.shape)}, strides {tuple(a.strides)} and dtype "
                                f"{a.dtype}; {name}[0] has {tuple(first.shape)}, {tuple(first.strides)} and "
                                f"{first.dtype}")
    return first
