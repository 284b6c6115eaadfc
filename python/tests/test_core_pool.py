"""Pool and Sequence: prefixes, forks, windows, tiers, preemption. What attention reads afterwards is checked too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import folio
from core_support import Arrays
from numpy_math import attention, check

HEADS, SIZE, BLOCK = 2, 32, 16


def row_of(ids: Any, salt: int = 0) -> np.ndarray:
    """K and V of token ids [n], by ids and position: [n, HEADS, SIZE]. A prefix has the same rows everywhere."""
    ids = np.asarray(ids)
    x = np.arange(len(ids))[:, None] * 0.37 + ids[:, None] * 1.9 + np.arange(HEADS * SIZE)[None] * 0.11 + salt
    return np.sin(x).reshape(len(ids), HEADS, SIZE).astype(np.float32)


class Engine:
    """A pool over one cache, and steps that compute what is not cached."""

    def __init__(self, arrays: Arrays, num_blocks: int = 16, window: int = 0, **options: Any) -> None:
        self.arrays = arrays
        self.cache = folio.KVCache(arrays.context, num_blocks=num_blocks, block_size=BLOCK, num_kv_heads=HEADS,
                                   head_size=SIZE, dtype="f32")
        self.pool = folio.Pool(self.cache, windows=[window], check_invariants=True, **options)
        self.window = (window - 1, 0) if window else (-1, -1)
        at = folio.Attention(arrays.context, num_heads=HEADS, head_size=SIZE, window=self.window if window else None)
        self.plan = folio.Plan(at, cache=self.cache, max_seqs=8, max_query_tokens=512, max_seq_len=512)
        self.batch = folio.Batch(arrays.context)

    def run(self, ids: list, sequence: folio.Sequence) -> np.ndarray:
        """Computes the tokens of ids that the sequence does not have, and compares with float64."""
        have = sequence.info()["committed_len"]
        sequence.reserve(len(ids) - have)
        self.batch.clear()
        self.batch.add_sequences([sequence])
        self.plan.update(self.batch)
        rows = row_of(ids)
        q, k, v = (self.arrays.put(a[have:]) for a in (2 * rows, rows, -rows))
        out = self.arrays.get(self.plan.forward(q, k, v, cache=self.cache))
        check(out, attention(2 * rows[have:], rows, -rows, window=self.window)[0])
        sequence.commit(ids)
        return out


@pytest.fixture
def engine(arrays: Arrays) -> Engine:
    return Engine(arrays)


def test_prefixes_are_shared(engine: Engine) -> None:
    ids = list(range(40))
    first = engine.pool.sequence()
    assert first.match(ids) == 0
    engine.run(ids, first)
    second = engine.pool.sequence()
    assert second.match(ids + [99]) == 32  # whole blocks
    assert second.table().tolist() == first.table().tolist()[:2]
    engine.run(ids + [99], second)
    stats = engine.pool.stats()
    assert stats["num_shared"] == 2 and stats["hit_tokens"] == 32 and stats["num_sequences"] == 2
    states = engine.pool.block_states()
    assert np.bincount(states, minlength=4).tolist() == [12, 2, 2, 0]  # free, used, shared, cached
    first.close()
    second.close()
    assert engine.pool.stats()["num_used"] == 0 and (engine.pool.block_states() == 3).sum() == 2
    engine.pool.check()


def test_a_salt_keeps_prefixes_apart(engine: Engine) -> None:
    ids = list(range(32))
    engine.run(ids, engine.pool.sequence(salt=1))
    assert engine.pool.sequence(salt=2).match(ids) == 0
    assert engine.pool.sequence(salt=1).match(ids) == 32
    engine.pool.forget()
    assert engine.pool.sequence(salt=1).match(ids) == 0


def test_forks_copy_when_they_write(engine: Engine) -> None:
    ids = list(range(20))
    first = engine.pool.sequence()
    engine.run(ids, first)
    second = first.fork()
    assert second.table().tolist() == first.table().tolist() and len(second) == 20
    engine.run(ids + [1], first)
    engine.run(ids + [2], second)
    assert second.table()[0] == first.table()[0] and second.table()[1] != first.table()[1]
    engine.run(ids + [1, 5], first)  # still its own tokens


def test_truncate_and_go_on(engine: Engine) -> None:
    sequence = engine.pool.sequence()
    engine.run(list(range(30)), sequence)
    sequence.truncate(18)
    assert len(sequence) == sequence.info()["committed_len"] == 18
    engine.run(list(range(18)) + [77, 78], sequence)


def test_commit_without_ids_enters_nothing(engine: Engine) -> None:
    sequence = engine.pool.sequence()
    sequence.reserve(32)
    sequence.commit()
    assert sequence.info()["committed_len"] == 32 and engine.pool.sequence().match(list(range(32))) == 0


def test_slots_of_a_reserve(engine: Engine) -> None:
    sequence = engine.pool.sequence(max_tokens=64)
    slots = sequence.reserve(20)
    assert slots.shape == (1, 20)
    table = sequence.table()
    np.testing.assert_array_equal(slots[0], table[np.arange(20) // BLOCK] * BLOCK + np.arange(20) % BLOCK)


def test_full_and_too_large(arrays: Arrays) -> None:
    engine = Engine(arrays, num_blocks=4, watermark=1)
    first = engine.pool.sequence()
    first.reserve(48)
    second = engine.pool.sequence()
    with pytest.raises(folio.FullError, match="block"):
        second.reserve(17)
    with pytest.raises(folio.FullError):
        second.reserve(16, admit=True)  # would go below the watermark
    with pytest.raises(folio.TooLargeError):
        second.reserve(100)
    second.reserve(16)
    assert engine.pool.stats()["num_free"] == 0


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_swap_out_and_in(arrays: Arrays, tmp_path: Path, tier: str) -> None:
    engine = Engine(arrays, host_blocks=8, store_path=str(tmp_path / "store"), store_bytes=1 << 20,
                    passport=folio.Passport("test"))
    ids = list(range(40))
    sequence = engine.pool.sequence()
    engine.run(ids, sequence)
    sequence.swap_out(tier)
    assert (sequence.info()["state"], sequence.info()["tier"]) == ("swapped", tier)
    assert engine.pool.stats()["num_used"] == 0
    with pytest.raises(folio.ArgumentError):
        sequence.reserve(1)
    other = engine.pool.sequence()
    engine.run(list(range(500, 700)), other)  # overwrites the blocks
    other.close()
    engine.pool.forget()
    sequence.swap_in()
    assert (sequence.info()["state"], sequence.info()["tier"]) == ("resident", "device")
    engine.run(ids + [3], sequence)
    assert (tmp_path / "store").exists()


@pytest.mark.parametrize("policy", ["recompute", "swap"])
def test_preempt_and_resume(arrays: Arrays, policy: str) -> None:
    engine = Engine(arrays, host_blocks=8)
    ids = list(range(40))
    sequence = engine.pool.sequence()
    engine.run(ids, sequence)
    sequence.preempt(policy)
    assert engine.pool.stats()["num_used"] == 0
    computed = sequence.resume(ids)
    assert computed == (32 if policy == "recompute" else 40)  # the prefix cache has whole blocks
    engine.run(ids + [3], sequence)
    with pytest.raises(folio.ArgumentError, match="policy 'drop' is not one of recompute, swap"):
        sequence.preempt("drop")


def test_cached_blocks_go_down_and_come_back(arrays: Arrays) -> None:
    engine = Engine(arrays, host_blocks=8)
    ids = list(range(40))
    engine.run(ids, engine.pool.sequence())
    assert engine.pool.swap_out("host", 8) == 2
    assert (engine.pool.block_states("host") == 3).sum() == 2 and (engine.pool.block_states() == 3).sum() == 0
    sequence = engine.pool.sequence()
    assert sequence.match(ids) == 32
    engine.run(ids + [1], sequence)
    assert engine.pool.stats()["blocks_in"] == 2
    with pytest.raises(folio.ArgumentError, match="tier 'tape' is not one of device, host, disk"):
        engine.pool.swap_out("tape", 1)


def test_a_store_outlives_its_pool(arrays: Arrays, tmp_path: Path) -> None:
    options = {"store_path": str(tmp_path / "store"), "store_bytes": 1 << 20, "hash_key": 7}
    ids = list(range(40))
    rotary = folio.Rotary(arrays.context, num_dims=SIZE, num_positions=8)
    engine = Engine(arrays, passport=folio.Passport("m", rotary=rotary), **options)
    sequence = engine.pool.sequence()
    engine.run(ids, sequence)
    sequence.close()
    assert engine.pool.swap_out("disk", 8) == 2
    engine.pool.close()
    with pytest.raises(folio.ArgumentError, match='model is "m" there and "another" here'):
        Engine(arrays, passport=folio.Passport("another", rotary=rotary), **options)
    with pytest.raises(folio.ArgumentError, match="rotary is given there and none here"):
        Engine(arrays, passport=folio.Passport("m"), **options)
    with pytest.raises(folio.ArgumentError, match="it must be a folio.Passport"):
        Engine(arrays, passport="m", **options)
    again = Engine(arrays, passport=folio.Passport("m", rotary=rotary), **options)
    sequence = again.pool.sequence()
    assert sequence.match(ids) == 32
    again.run(ids + [1], sequence)


def test_a_store_has_the_key_it_was_made_with(arrays: Arrays, tmp_path: Path) -> None:
    path = tmp_path / "store"
    options = {"store_path": str(path), "store_bytes": 1 << 20, "hash_key": 7, "wipe": "never"}
    ids = list(range(40))
    engine = Engine(arrays, store_key=bytes(range(32)), **options)
    sequence = engine.pool.sequence()
    engine.run(ids, sequence)
    sequence.close()
    assert engine.pool.swap_out("disk", 8) == 2
    engine.pool.close()
    for key, words in ((None, "with a store key, here there is none"), (bytes(32), "another store key"),
                       (b"short", "store_key_bytes is 5")):
        with pytest.raises(folio.ArgumentError, match=words):
            Engine(arrays, store_key=key, **options)
    again = Engine(arrays, store_key=bytes(range(32)), **options | {"wipe": "forget"})
    sequence = again.pool.sequence()
    assert sequence.match(ids) == 32
    sequence.close()
    assert any(path.read_bytes()[4096:])
    again.pool.forget()
    assert not any(path.read_bytes()[4096:])
    with pytest.raises(folio.ArgumentError, match="wipe 'often' is not one of forget, free, salt, never"):
        Engine(arrays, wipe="often")


def test_windows_release_blocks(arrays: Arrays) -> None:
    engine = Engine(arrays, window=20)
    ids = list(range(70))
    sequence = engine.pool.sequence()
    engine.run(ids, sequence)
    sequence.release_window()
    assert sequence.table().tolist()[:3] == [-1, -1, -1] and engine.pool.stats()["num_used"] == 2
    engine.run(ids + [5], sequence)


def test_events(arrays: Arrays) -> None:
    events: list = []
    engine = Engine(arrays, num_blocks=3, on_event=events.append)
    ids = list(range(32))
    sequence = engine.pool.sequence(salt=9)
    engine.run(ids, sequence)
    assert [e["kind"] for e in events] == ["stored", "stored"]
    assert events[0]["token_ids"].tolist() == ids[:16] and events[1]["parent"] == events[0]["hash"]
    assert events[0]["salt"] == 9 and events[0]["tier"] == "device"
    sequence.close()
    engine.pool.sequence().reserve(48)  # evicts both
    assert [e["kind"] for e in events[2:]] == ["removed", "removed"]


def test_encoder_tokens_and_groups(arrays: Arrays) -> None:
    """Two layer groups and a cross cache in one pool."""
    ctx = arrays.context
    make = {"num_blocks": 12, "block_size": BLOCK, "num_kv_heads": HEADS, "head_size": SIZE, "dtype": "f32"}
    full, local, cross = (folio.KVCache(ctx, **make) for _ in range(3))
    pool = folio.Pool([full, local], windows=[None, 4], cross_cache=cross, check_invariants=True)
    at = [folio.Attention(ctx, num_heads=HEADS, head_size=SIZE, window=w) for w in (None, (3, 0))]
    sequence = pool.sequence()
    encoder_slots = sequence.reserve_encoder(18)
    slots = sequence.reserve(20)
    assert slots.shape == (2, 20) and encoder_slots.shape == (18,) and pool.num_groups == 2
    ids = np.arange(20)
    rows, encoder = row_of(ids), row_of(np.arange(100, 118))
    for group, cache in enumerate((full, local)):
        plan = folio.Plan(at[group], types=[["decoder"] if group else ["decoder", "encoder_decoder"]], cache=cache,
                          cross_cache=None if group else cross, max_seqs=1, max_query_tokens=20, max_seq_len=20,
                          max_encoder_tokens=18)
        batch = folio.Batch(ctx)
        batch.add_sequences([sequence], group)
        plan.update(batch)
        window = (3, 0) if group else (-1, -1)
        out = plan.forward(*map(arrays.put, (rows, rows, -rows)), cache=cache)
        check(arrays.get(out), attention(rows, rows, -rows, window=window)[0])
        if not group:
            out = plan.forward(*map(arrays.put, (rows, encoder, -encoder)), cache=cross, type="encoder_decoder")
            check(arrays.get(out), attention(rows, encoder, -encoder, causal=False)[0])
    sequence.commit(ids)
    assert sequence.table(1).tolist() != sequence.table(0).tolist() and sequence.table(-1).size == 2
    assert sequence.info()["encoder_len"] == 18


def test_bad_pools(arrays: Arrays) -> None:
    cache = folio.KVCache(arrays.context, num_blocks=4, num_kv_heads=2, head_size=32, dtype="f32")
    with pytest.raises(folio.ArgumentError, match="caches is empty"):
        folio.Pool([])
    with pytest.raises(folio.ArgumentError, match="windows has 2 entries, but there are 1 caches"):
        folio.Pool(cache, windows=[0, 4])
    with pytest.raises(folio.ArgumentError):
        folio.Pool(cache, num_blocks=5)
    with pytest.raises(folio.StoreError):
        folio.Pool(cache, store_path="/nonexistent/store", store_bytes=1 << 20)


def test_a_stale_batch_is_rejected(engine: Engine) -> None:
    sequence = engine.pool.sequence()
    sequence.reserve(4)
    engine.batch.add_sequences([sequence])
    sequence.commit()
    with pytest.raises(folio.ArgumentError):
        engine.plan.update(engine.batch)
