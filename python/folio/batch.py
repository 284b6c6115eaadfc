"""Batch: the sequences of one step. How many new tokens each has, how long it is, and in which blocks its keys are."""

from __future__ import annotations

import ctypes
from typing import Any, Iterable, Optional

import numpy as np

from . import _abi as abi
from ._arrays import address, host_array, required_array, starts_check, table_array
from ._library import Handle, check, choice, create, fill, handle_of, integer, lib, make
from ._run import run_of
from .attention import type_of
from .cache import KVCache
from .context import Context, given_or_default
from .errors import ArgumentError

_C_NAMES = {"slot_mapping": "slots", "cross_slot_mapping": "cross_slots"}
_ARRAYS = {"phases": np.int32, "causality": np.int32, "first_query_pos": np.int64, "first_key_pos": np.int64,
           "encoder_lens": np.int32, "encoder_new_lens": np.int32, "slot_mapping": np.int64,
           "cross_slot_mapping": np.int64}
_PHASES = {"auto": abi.FOLIO_PHASE_AUTO, "prefill": abi.FOLIO_PHASE_PREFILL, "decode": abi.FOLIO_PHASE_DECODE}


def causality(causal: Optional[bool]) -> int:
    return abi.FOLIO_CAUSAL_AUTO if causal is None else abi.FOLIO_CAUSAL_YES if causal else abi.FOLIO_CAUSAL_NO


class Batch(Handle):
    """One step's sequences. Fill it by add() or add_sequences(), or from arrays by set_*()."""

    def __init__(self, context: Optional[Context] = None, *, block_size: int = 0, cache: Optional[KVCache] = None,
                 decode_query_len: int = 0) -> None:
        given = None if cache is None else handle_of(cache, KVCache, "cache")
        self.context = given_or_default(context) if context is not None or cache is None else cache.context
        desc = make(abi.folio_batch_desc, block_size=block_size, decode_query_len=decode_query_len, cache=given)
        super().__init__(create(lib.folio_batch_create, self.context, ctypes.byref(desc)), lib.folio_batch_destroy,
                         self.context)

    def clear(self) -> None:
        lib.folio_batch_clear(self._as_parameter_)

    def add(self, query_len: int, seq_len: int = 0, block_table: Any = None, *, slots: Any = None,
            causal: Optional[bool] = None, phase: str = "auto", padding: bool = False,
            first_query_pos: Optional[int] = None, first_key_pos: Optional[int] = None, encoder_len: int = 0,
            encoder_new_len: int = 0, cross_block_table: Any = None, cross_slots: Any = None) -> None:
        """Appends a sequence: query_len new tokens, seq_len cached and new ones, in the blocks of its table."""
        table = _list(block_table, np.int32, "block_table")
        cross = _list(cross_block_table, np.int32, "cross_block_table")
        given, cross_given = _list(slots, np.int64, "slots"), _list(cross_slots, np.int64, "cross_slots")
        for name, array, of, count in (("slots", given, "query_len", query_len),
                                       ("cross_slots", cross_given, "encoder_new_len", encoder_new_len)):
            if array is not None and array.size != count:
                raise ArgumentError(f"{name} has {array.size} entries, but {of} is {count}")
        seq = make(abi.folio_batch_seq, query_len=query_len, seq_len=seq_len, padding=int(padding),
                   phase=choice("phase", _PHASES, phase), causality=causality(causal), block_table=address(table),
                   num_blocks=0 if table is None else table.size, slots=address(given), encoder_len=encoder_len,
                   encoder_new_len=encoder_new_len, cross_block_table=address(cross),
                   num_cross_blocks=0 if cross is None else cross.size, cross_slots=address(cross_given))
        if first_query_pos is not None or first_key_pos is not None:
            seq.positions_given = 1
            first = seq_len - query_len if first_query_pos is None else first_query_pos
            seq.first_query_pos = integer(first, "first_query_pos", -2**63, 2**63 - 1)
            seq.first_key_pos = integer(first_key_pos or 0, "first_key_pos", -2**63, 2**63 - 1)
        check(lib.folio_batch_add(self._as_parameter_, ctypes.byref(seq)))

    def _step(self, num_seqs: int, query_start: Any, seq_lens: Any, options: dict) -> tuple:
        """folio_step without tables, and the NumPy arrays that it points to."""
        keep: dict[str, Any] = {"query_start": host_array(query_start, np.int32, "query_start"),
                                "seq_lens": host_array(seq_lens, np.int32, "seq_lens")}
        for name, value in options.items():
            if name not in _ARRAYS:
                raise TypeError(f"{name} is not an array of a batch: {', '.join(_ARRAYS)}")
            keep[name] = host_array(value, _ARRAYS[name], name)
        starts, new = keep["query_start"], keep.get("encoder_new_lens")
        rows = int(starts[-1]) if starts is not None and num_seqs else num_seqs
        sizes = {"query_start": num_seqs + 1, "slot_mapping": rows,
                 "cross_slot_mapping": None if new is None else int(new.sum())}
        for name, value in keep.items():
            size = sizes.get(name, num_seqs)
            if value is not None and size is not None and value.size != size:
                raise ArgumentError(f"{name} has {value.size} entries; it must have {size}")
        return make(abi.folio_step, num_seqs=num_seqs,
                    **{_C_NAMES.get(name, name): address(value) for name, value in keep.items()}), keep

    def set_block_tables(self, block_tables: Any, seq_lens: Any, query_start: Any = None, *,
                         cross_block_tables: Any = None, **options: Any) -> None:
        """Replaces all sequences. block_tables [seqs, blocks] (None: no cache; lists may differ in length), seq_lens
        [seqs], query_start [seqs + 1] (None: one token each). Options are further arrays of a step: phases, causality,
        slot_mapping, first_query_pos, first_key_pos, encoder_lens, encoder_new_lens, cross_slot_mapping."""
        lens = required_array(seq_lens, np.int32, "seq_lens")
        step, keep = self._step(lens.size, query_start, lens, options)
        tables = table_array(block_tables, "block_tables", lens.size)
        cross = table_array(cross_block_tables, "cross_block_tables", lens.size)
        step.table, step.cross_table = rows_table(tables), rows_table(cross)
        check(lib.folio_batch_set(self._as_parameter_, ctypes.byref(step)))

    def set_csr(self, indptr: Any, indices: Any, last_block_len: Any = None, *, query_start: Any = None,
                seq_lens: Any = None, **options: Any) -> None:
        """The same from CSR: sequence i has blocks indices[indptr[i] : indptr[i + 1]], and last_block_len[i] tokens
        in the last of them, as in FlashInfer."""
        starts, blocks = required_array(indptr, np.int32, "indptr"), required_array(indices, np.int32, "indices")
        last = host_array(last_block_len, np.int32, "last_block_len")
        num_seqs = starts_check(starts, "indptr", blocks.size, "indices").size - 1
        if last is not None and last.size != num_seqs:
            raise ArgumentError(f"last_block_len has {last.size} entries; it must have {num_seqs}")
        step, keep = self._step(num_seqs, query_start, seq_lens, options)
        step.table = abi.folio_table(kind=abi.FOLIO_TABLE_CSR, indices=address(blocks), start=address(starts),
                                     last_block_len=address(last), num_indices=blocks.size)
        check(lib.folio_batch_set(self._as_parameter_, ctypes.byref(step)))

    def set_slots(self, indptr: Any, slots: Any, *, query_start: Any = None, seq_lens: Any = None,
                  **options: Any) -> None:
        """The same from lists of slots, for block size 1: key j of sequence i is in slots[indptr[i] + j]."""
        starts, keys = required_array(indptr, np.int32, "indptr"), required_array(slots, np.int64, "slots")
        num_seqs = starts_check(starts, "indptr", keys.size, "slots").size - 1
        step, keep = self._step(num_seqs, query_start, seq_lens, options)
        step.table = abi.folio_table(kind=abi.FOLIO_TABLE_SLOTS, index_bytes=8, indices=address(keys),
                                     start=address(starts), num_indices=keys.size)
        check(lib.folio_batch_set(self._as_parameter_, ctypes.byref(step)))

    def add_sequences(self, sequences: Iterable[Any], layer_group: int = 0, *, stream: Optional[int] = None) -> None:
        """Appends sequences of a pool: their reserved but not committed tokens are the rows of this step."""
        from .pool import Sequence  # which imports this module

        handles = [handle_of(s, Sequence, f"sequences[{i}]") for i, s in enumerate(sequences)]
        array = (ctypes.c_void_p * len(handles))(*handles)
        check(lib.folio_batch_add_sequences(self._as_parameter_, integer(layer_group, "layer_group"), array,
                                            len(handles), run_of(self.context, None, stream)))

    def info(self) -> dict[str, Any]:
        """Counts: num_seqs, num_query_tokens, num_prefills, num_decodes, max_seq_len and so on."""
        return _fields(fill(lib.folio_batch_get_info, self, abi.folio_batch_info))

    def view(self, type: str = "decoder", phase: str = "auto") -> dict:
        """The sequences of one phase as one attention type sees them, as NumPy arrays (copies)."""
        view = make(abi.folio_batch_view)
        check(lib.folio_batch_get_view(self._as_parameter_, type_of(type), choice("phase", _PHASES, phase),
                                       ctypes.byref(view)))
        n, rows = view.num_seqs, view.num_query_tokens
        sizes = {"seqs": (n, np.int64), "query_rows": (n, np.int64), "query_lens": (n, np.int32),
                 "query_start": (n + 1, np.int64), "last_rows": (n, np.int64), "positions": (rows, np.int64),
                 "key_lens": (n, np.int32), "key_start": (n + 1, np.int64), "context_lens": (n, np.int32),
                 "slot_mapping": (view.num_new_tokens, np.int64), "table_start": (n + 1, np.int64)}
        result = {name: getattr(view, name) for name in ("num_seqs", "num_query_tokens", "num_new_tokens",
                                                         "max_query_len", "max_key_len")}
        for name, (size, kind) in sizes.items():
            given = getattr(view, name) or not size
            result[name] = _copy(getattr(view, name), size, kind) if given else None
        starts = result["table_start"]
        result["blocks"] = None if starts is None else _copy(view.blocks, int(starts[-1]), np.int32)
        return result


def _list(value: Any, dtype: Any, name: str) -> Optional[np.ndarray]:
    """A flat array."""
    result = host_array(value, dtype, name)
    if result is not None and result.ndim != 1:
        raise ArgumentError(f"{name} has shape {result.shape}; it must have one dim")
    return result


def rows_table(table: Optional[np.ndarray]) -> Any:
    """Block tables [seqs, blocks] as folio_step has them."""
    if table is None:
        return abi.folio_table()
    return abi.folio_table(kind=abi.FOLIO_TABLE_ROWS, indices=address(table), row_stride=table.shape[1])


def _fields(struct: Any) -> dict:
    return {name: getattr(struct, name) for name, _ in struct._fields_ if name != "struct_size"}


def _copy(pointer: Optional[int], size: int, kind: Any) -> np.ndarray:
    if not pointer:
        return np.empty(0, kind)
    bytes_ = ctypes.string_at(pointer, size * np.dtype(kind).itemsize)
    return np.frombuffer(bytes_, kind).copy()
