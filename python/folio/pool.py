"""Pool and Sequence: who holds which blocks. Prefix cache, forks, swapping to host memory and disk."""

from __future__ import annotations

import ctypes
from functools import partial
from typing import Any, Callable, Optional, Sequence as Seq

import numpy as np

from . import _abi as abi
from ._arrays import address, required_array
from ._library import Handle, check, choice, create, fill, handle_of, integer, lib, make
from ._run import run_of
from .batch import _copy, _fields
from .cache import KVCache
from .context import Context, given_or_default
from .errors import ArgumentError
from .passport import Passport, key_of, passport_of

_TIERS = {"device": abi.FOLIO_TIER_DEVICE, "host": abi.FOLIO_TIER_HOST, "disk": abi.FOLIO_TIER_DISK}
_tier = partial(choice, "tier", _TIERS)
_TIER_NAMES = {value: name for name, value in _TIERS.items()}
_STATES = {abi.FOLIO_SEQUENCE_RESIDENT: "resident", abi.FOLIO_SEQUENCE_LEAVING: "leaving",
           abi.FOLIO_SEQUENCE_SWAPPED: "swapped", abi.FOLIO_SEQUENCE_COMING: "coming"}
_WIPES = {"forget": abi.FOLIO_WIPE_ON_FORGET, "free": abi.FOLIO_WIPE_ON_FREE, "salt": abi.FOLIO_WIPE_ON_SALT,
          "never": abi.FOLIO_WIPE_NEVER}
_POLICIES = {"recompute": abi.FOLIO_PREEMPT_RECOMPUTE, "swap": abi.FOLIO_PREEMPT_SWAP}
_EVENT = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.POINTER(abi.folio_cache_event))


def _tokens(ids: Any) -> tuple:
    given = required_array(ids, np.int32, "ids")
    return make(abi.folio_tokens, num_tokens=given.size, ids=address(given)), given


class Pool(Handle):
    """The blocks of one or more caches.

    caches       one KVCache, or one for each layer group (the layers that see the same keys)
    windows      for each group the tokens that a token sees, itself included; 0 or None: all
    host_blocks  blocks of a tier in host memory; store_path, store_bytes: a tier in a file
    passport     what K and V are: a store's file with another passport is rejected
    store_key    16 to 64 secret bytes: frames of the file that were not made with them are not read
    wipe         when K, V and ids that nothing needs are overwritten with zeros: "forget", "free", "salt" (as "free",
                 and the prefix cache forgets a salt with its last sequence) or "never"
    on_event     called with a dict for each block that enters or leaves the prefix cache; must not call the pool
    """

    def __init__(self, caches: Any, *, windows: Optional[Seq[Optional[int]]] = None,
                 cross_cache: Optional[KVCache] = None, context: Optional[Context] = None, num_blocks: int = 0,
                 watermark: int = 0, check_invariants: bool = False, hash_key: int = 0, host_blocks: int = 0,
                 store_path: Optional[str] = None, store_bytes: int = 0, passport: Optional[Passport] = None,
                 on_event: Optional[Callable[[dict], None]] = None, stream: Optional[int] = None,
                 wipe: str = "forget", store_key: Optional[bytes] = None) -> None:
        self.caches = [caches] if isinstance(caches, KVCache) else list(caches)
        if not self.caches:
            raise ArgumentError("caches is empty")
        for i, cache in enumerate(self.caches):
            handle_of(cache, KVCache, f"caches[{i}]")
        self.context = self.caches[0].context if context is None else given_or_default(context)
        windows = list(windows) if windows is not None else [0] * len(self.caches)
        if len(windows) != len(self.caches):
            raise ArgumentError(f"windows has {len(windows)} entries, but there are {len(self.caches)} caches")
        groups = (abi.folio_layer_group * len(self.caches))(
            *[abi.folio_layer_group(w or 0, c._as_parameter_) for w, c in zip(windows, self.caches)])
        key, key_bytes = key_of(store_key)
        desc = make(abi.folio_pool_desc, num_blocks=num_blocks, num_layer_groups=len(self.caches),
                    layer_groups=ctypes.addressof(groups), watermark=watermark, hash_key=hash_key,
                    cross_cache=None if cross_cache is None else handle_of(cross_cache, KVCache, "cross_cache"),
                    flags=abi.FOLIO_POOL_CHECK if check_invariants else 0, host_blocks=host_blocks,
                    store_path=store_path.encode() if store_path else None, store_bytes=store_bytes,
                    passport=passport_of(passport), wipe=choice("wipe", _WIPES, wipe),
                    store_key=None if key is None else ctypes.addressof(key), store_key_bytes=key_bytes,
                    stream=stream if stream is not None else self.context.stream())
        callback = _EVENT(lambda _, event: on_event(_event(event.contents))) if on_event else None
        if callback:
            desc.on_event = ctypes.cast(callback, ctypes.c_void_p)
        super().__init__(create(lib.folio_pool_create, self.context, ctypes.byref(desc)), lib.folio_pool_destroy,
                         (self.context, self.caches, cross_cache, callback), at_exit=store_path is not None)
        self.num_groups = len(self.caches)
        self.block_size = self.caches[0].block_size

    def sequence(self, *, salt: int = 0, max_tokens: int = 0) -> "Sequence":
        """A new, empty sequence. It finds only prefix-cache entries of its own salt."""
        desc = make(abi.folio_sequence_desc, salt=salt, max_tokens=max_tokens)
        return Sequence(self, create(lib.folio_sequence_create, self, ctypes.byref(desc)))

    def stats(self) -> dict[str, Any]:
        """Counts of blocks, prefix-cache hits, evictions and moves between tiers."""
        return _fields(fill(lib.folio_pool_get_stats, self, abi.folio_pool_stats))

    def block_states(self, tier: str = "device") -> np.ndarray:
        """The state of each block: 0 free, 1 used, 2 shared, 3 cached."""
        stats = self.stats()
        states = np.empty(stats["num_blocks"] if tier == "device" else stats["host_blocks"], np.uint8)
        check(lib.folio_pool_get_block_states(self._as_parameter_, _tier(tier), 0, states.size, address(states)))
        return states

    def swap_out(self, tier: str, max_blocks: int) -> int:
        """Moves up to max_blocks cached blocks one tier down and waits. Returns how many went."""
        moved = ctypes.c_int64()
        check(lib.folio_pool_swap_out(self._as_parameter_, _tier(tier), integer(max_blocks, "max_blocks"), None,
                                      ctypes.byref(moved), None))
        return moved.value

    def forget(self) -> None:
        """Empties the prefix cache, for example for new weights."""
        check(lib.folio_pool_forget(self._as_parameter_))

    def check(self) -> None:
        """Raises InternalError if the pool's counts do not add up."""
        check(lib.folio_pool_check(self._as_parameter_))


class Sequence(Handle):
    """One request's tokens: match a prefix, reserve slots, run the step, commit. From Pool.sequence()."""

    def __init__(self, pool: Pool, handle: int) -> None:
        super().__init__(handle, lib.folio_sequence_destroy, pool)
        self.pool = pool

    @property
    def _as_parameter_(self) -> int:
        if self._handle and not self.pool._handle:
            raise ArgumentError("the Pool of this Sequence is closed")
        return self._handle or self._closed()

    def match(self, ids: Any) -> int:
        """Takes the longest cached prefix of these token ids, in whole blocks. Returns its length."""
        tokens, keep = _tokens(ids)
        matched = ctypes.c_int64()
        check(lib.folio_sequence_match(self._as_parameter_, ctypes.byref(tokens), ctypes.byref(matched), None))
        return matched.value

    def reserve(self, n: int, *, admit: bool = False) -> np.ndarray:
        """Slots [groups, n] for n more tokens; all or nothing. Raises FullError if there are too few blocks."""
        slots = np.empty((self.pool.num_groups, integer(n, "n", 0)), np.int64)
        check(lib.folio_sequence_reserve(self._as_parameter_, n, abi.FOLIO_RESERVE_ADMIT if admit else 0,
                                         address(slots)))
        return slots

    def reserve_encoder(self, n: int) -> np.ndarray:
        """Slots [n] for the encoder tokens that cross attention will read."""
        slots = np.empty(integer(n, "n", 0), np.int64)
        check(lib.folio_sequence_reserve_encoder(self._as_parameter_, n, 0, address(slots)))
        return slots

    def commit(self, ids: Any = None) -> None:
        """Says that K and V of the first len(ids) tokens are written; full blocks enter the prefix cache. None: all
        tokens are written, and nothing enters the prefix cache."""
        if ids is None:
            check(lib.folio_sequence_commit(self._as_parameter_, None))
        else:
            tokens, keep = _tokens(ids)
            check(lib.folio_sequence_commit(self._as_parameter_, ctypes.byref(tokens)))

    def truncate(self, length: int) -> None:
        """Keeps the first `length` tokens, as after rejected drafts."""
        check(lib.folio_sequence_truncate(self._as_parameter_, integer(length, "length")))

    def fork(self) -> "Sequence":
        """A second sequence with the same tokens. Blocks are shared until one of the two writes to them."""
        return Sequence(self.pool, create(lib.folio_sequence_fork, self))

    def table(self, layer_group: int = 0) -> np.ndarray:
        """A copy of the block table of a group."""
        blocks, count = ctypes.c_void_p(), ctypes.c_int64()
        check(lib.folio_sequence_get_table(self._as_parameter_, integer(layer_group, "layer_group"),
                                           ctypes.byref(blocks), ctypes.byref(count)))
        return _copy(blocks.value, count.value, np.int32)

    def release_window(self) -> None:
        """Releases blocks of windowed groups that no later token can see."""
        check(lib.folio_sequence_release_window(self._as_parameter_))

    def swap_out(self, tier: str = "host", *, stream: Optional[int] = None) -> None:
        """Moves the sequence to host memory or to the file, and waits."""
        check(lib.folio_sequence_swap_out(self._as_parameter_, _tier(tier),
                                          run_of(self.pool.context, None, stream), None))

    def swap_in(self, *, stream: Optional[int] = None) -> None:
        """Brings a swapped sequence back, and waits."""
        check(lib.folio_sequence_swap_in(self._as_parameter_, run_of(self.pool.context, None, stream), None))

    def preempt(self, policy: str = "recompute", *, stream: Optional[int] = None) -> None:
        """Takes the sequence's blocks away: "recompute" drops K and V, "swap" moves them to a lower tier."""
        check(lib.folio_sequence_preempt(self._as_parameter_, choice("policy", _POLICIES, policy),
                                         run_of(self.pool.context, None, stream), None))

    def resume(self, ids: Any = None, *, stream: Optional[int] = None) -> int:
        """Brings a preempted sequence back. Returns how many tokens need not be computed again."""
        computed = ctypes.c_int64()
        tokens, keep = _tokens(ids) if ids is not None else (None, None)
        check(lib.folio_sequence_resume(self._as_parameter_, ctypes.byref(tokens) if tokens else None,
                                        ctypes.byref(computed), run_of(self.pool.context, None, stream), None))
        return computed.value

    def info(self) -> dict[str, Any]:
        """len, committed_len, matched_len, num_blocks, state and tier."""
        info = _fields(fill(lib.folio_sequence_get_info, self, abi.folio_sequence_info))
        info["state"], info["tier"] = _STATES[info["state"]], _TIER_NAMES[info["tier"]]
        return info

    def __len__(self) -> int:
        return self.info()["len"]


def _event(event: Any) -> dict:
    ids = _copy(event.token_ids, event.num_tokens, np.int32) if event.token_ids else None
    return {"kind": "stored" if event.kind == abi.FOLIO_EVENT_STORED else "removed", "tier": _TIER_NAMES[event.tier],
            "layer_group": event.layer_group, "block": event.block, "hash": tuple(event.hash),
            "parent": tuple(event.parent), "salt": event.salt, "token_ids": ids, "hash_id": event.hash_id}
