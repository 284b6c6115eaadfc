"""Batch: the forms of a step's arrays, counts and views. Plan limits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import folio
from core_support import Arrays, Step
from numpy_math import check


def same_view(a: folio.Batch, b: folio.Batch) -> None:
    first, second = a.view(), b.view()
    assert first.keys() == second.keys()
    for name, value in first.items():
        np.testing.assert_array_equal(value, second[name], err_msg=name)


def test_four_forms_of_one_step() -> None:
    """add, block tables, CSR and slots give the same batch."""
    by_add = folio.Batch(block_size=16)
    by_add.add(2, 20, [7, 3])
    by_add.add(1, 5, [0])
    tables = folio.Batch(block_size=16)
    tables.set_block_tables([[7, 3, 99], [0, 99, 99]], [20, 5], [0, 2, 3])
    csr = folio.Batch(block_size=16)
    csr.set_csr([0, 2, 3], [7, 3, 0], [4, 5], query_start=[0, 2, 3])
    lens = folio.Batch(block_size=16)
    lens.set_csr([0, 2, 3], [7, 3, 0], query_start=[0, 2, 3], seq_lens=[20, 5])
    for batch in (tables, csr, lens):
        same_view(by_add, batch)


def test_slots_form(arrays: Arrays) -> None:
    step = Step(arrays, [2, 1], [6, 4], block_size=1)
    batch = folio.Batch(block_size=1)
    batch.set_slots([0, 6, 10], np.concatenate(step.tables).astype(np.int64), query_start=[0, 2, 3])
    plan = step.ready(batch)
    check(arrays.get(plan.forward(*step.inputs(), cache=step.cache)), step.expected()[0])


def test_info_and_views() -> None:
    batch = folio.Batch(block_size=16, decode_query_len=2)
    batch.add(5, 5, [0])
    batch.add(2, 40, [1, 2, 3])
    batch.add(3, padding=True)
    batch.add(1, 17, [4, 5], phase="prefill")
    info = batch.info()
    counts = {"num_seqs": 4, "num_query_tokens": 11, "num_prefills": 2, "num_prefill_tokens": 6, "num_decodes": 1,
              "num_decode_tokens": 2, "num_padding": 1, "num_padding_tokens": 3, "max_query_len": 5, "max_seq_len": 40}
    assert {name: info[name] for name in counts} == counts
    decodes = batch.view(phase="decode")
    assert decodes["seqs"].tolist() == [1] and decodes["query_rows"].tolist() == [5]
    assert decodes["positions"].tolist() == [38, 39] and decodes["slot_mapping"].tolist() == [54, 55]
    everything = batch.view()
    assert everything["key_lens"].tolist() == [5, 40, 0, 17] and everything["last_rows"].tolist() == [4, 6, 9, 10]
    assert everything["blocks"].tolist() == [0, 1, 2, 3, 4, 5]
    encoder = batch.view("encoder_only")
    assert encoder["slot_mapping"] is None and encoder["blocks"] is None
    batch.clear()
    assert batch.info()["num_seqs"] == 0


def test_slot_mapping_and_phases_of_arrays() -> None:
    batch = folio.Batch(block_size=16)
    batch.set_block_tables([[2], [3]], [4, 4], slot_mapping=[-1, 50], phases=[1, 2])
    assert batch.view()["slot_mapping"].tolist() == [-1, 50] and batch.info()["num_prefills"] == 1
    batch.set_block_tables([[2], [3]], [4, 4], [0, 2, 4], encoder_lens=[3, 5], encoder_new_lens=[3, 5],
                           cross_block_tables=[[8], [9]])
    assert batch.view("encoder_decoder")["slot_mapping"].tolist() == [128, 129, 130, 144, 145, 146, 147, 148]


@pytest.mark.parametrize("call, message", [
    (lambda b: b.add(3, 2, [0]), "3"),
    (lambda b: b.add(1, 20, [0]), "20|block"),
    (lambda b: b.add(1, 1, [0], slots=[1, 2]), "slots has 2 entries, but query_len is 1"),
    (lambda b: b.add(1, 1, [0], encoder_len=2, encoder_new_len=2, cross_slots=[1]), "cross_slots has 1 entries"),
    (lambda b: b.add(1, 1, [0], phase="later"), "phase 'later' is not one of"),
    (lambda b: b.set_block_tables([[0]], [1, 2]), r"block_tables has shape \(1, 1\); it must be \[2, blocks\]"),
    (lambda b: b.set_block_tables([[0]], [1], [0]), "query_start has 1 entries; it must have 2"),
    (lambda b: b.set_block_tables([[0]], [1], slot_mapping=[1, 2]), "slot_mapping has 2 entries; it must have 1"),
    (lambda b: b.set_csr([0, 3], [1, 2], [4]), "end at most at 2, the number of indices"),
    (lambda b: b.set_csr([0, 2, 1], [1, 2], [4, 4]), "never decrease"),
    (lambda b: b.set_csr([0, 1], [1], [4, 5]), "last_block_len has 2 entries; it must have 1"),
    (lambda b: b.view("both"), "attention type 'both' is not one of decoder, encoder"),
], ids=range(12))
def test_bad_steps(call: Any, message: str) -> None:
    batch = folio.Batch(block_size=16)
    with pytest.raises(folio.ArgumentError, match=message):
        call(batch)


def test_unknown_arrays_are_named() -> None:
    with pytest.raises(TypeError, match="slot_maping is not an array of a batch: phases"):
        folio.Batch(block_size=16).set_block_tables([[0]], [1], slot_maping=[0])


def test_limits_of_a_plan(arrays: Arrays) -> None:
    step = Step(arrays, [3, 2], [20, 9])
    at = step.attention()
    for limits, message in (({"max_seqs": 1}, "2"), ({"max_query_tokens": 4}, "5"), ({"max_seq_len": 16}, "20")):
        given = {"max_seqs": 4, "max_query_tokens": 8, "max_seq_len": 32} | limits
        with pytest.raises(folio.ArgumentError, match=message):
            folio.Plan(at, cache=step.cache, **given).update(step.batch())
    plan = step.plan(at)
    bad = folio.Batch(cache=step.cache)
    bad.add(1, 1, [step.cache.num_blocks])
    plan.update(step.batch())
    with pytest.raises(folio.ArgumentError, match=str(step.cache.num_blocks)):
        plan.update(bad)
    step.write_context()  # the plan still serves the batch before
    check(arrays.get(plan.forward(*step.inputs(), cache=step.cache)), step.expected()[0])


def test_a_batch_that_changed_is_rejected(arrays: Arrays) -> None:
    step = Step(arrays, [3], [20])
    plan, batch = step.plan(step.attention()), step.batch()
    with pytest.raises(folio.ArgumentError):
        plan.forward(*step.inputs(), cache=step.cache)  # never updated
    plan.update(batch)
    batch.clear()
    with pytest.raises(folio.ArgumentError):
        plan.forward(*step.inputs(), cache=step.cache)


def test_bad_plans(context: folio.Context) -> None:
    at = folio.Attention(context, num_heads=4, head_size=32, window=(3, 0))
    limits = {"max_seqs": 1, "max_query_tokens": 1, "max_seq_len": 1}
    with pytest.raises(folio.ArgumentError, match="attentions is empty"):
        folio.Plan([], **limits)
    with pytest.raises(folio.ArgumentError, match="types has 2 entries, but there are 1 attentions"):
        folio.Plan(at, types=["decoder", "encoder"], **limits)
    with pytest.raises(folio.UnsupportedError, match="window"):
        folio.Plan(at, types="encoder_decoder", **limits)
    with pytest.raises(folio.ArgumentError, match="max_seqs"):
        folio.Plan(at, max_seqs=0, max_query_tokens=1, max_seq_len=1)


def test_updates_from_arrays_on_the_device(arrays: Arrays) -> None:
    import torch

    if arrays.device == "cpu":
        with pytest.raises(folio.Error):
            step = Step(arrays, [1], [5])
            step.plan(step.attention()).update_device(seq_lens=np.int32([5]), block_tables=np.int32([[0]]))
        return
    step = Step(arrays, [1, 1], [20, 9])
    step.write_context()
    plan = folio.Plan(step.attention(), cache=step.cache, max_seqs=2, max_query_tokens=2, max_seq_len=32)
    tables = np.zeros((2, 2), np.int32)
    for row, table in zip(tables, step.tables):
        row[:len(table)] = table
    plan.update_device(seq_lens=torch.tensor([20, 9], dtype=torch.int32, device="cuda"),
                       block_tables=torch.from_numpy(tables).cuda())
    check(arrays.get(plan.forward(*step.inputs(), cache=step.cache)), step.expected()[0])
    plan.findings()


def test_the_first_bad_write(arrays: Arrays) -> None:
    """Each of k, v and out (by q); after it was returned, an update forgets it."""
    step = Step(arrays, [3, 1], [20, 9])
    plan = step.plan(step.attention(), note_bad=True)
    given = step.q, step.new(step.k), step.new(step.v)
    for number, (what, row, head) in enumerate([("v", 3, 1), ("k", 1, 0), ("out", 2, 3)]):
        step.write_context()
        plan.update(step.batch())
        arrays.context.wait()
        assert plan.bad_write() is None
        values = [x.copy() for x in given]
        values[("out", "k", "v").index(what)][row, head, 7] = np.inf if number else np.nan
        arrays.get(plan.forward(*map(arrays.put, values), cache=step.cache))
        bad = plan.bad_write()
        assert bad == folio.BadWrite(what, layer=0, seq=row // 3, position=(17 + row) if row < 3 else 8, head=head,
                                     step=number + 1, attention=0, type="decoder")
        assert plan.bad_write() == bad
    plan.update(step.batch())
    with pytest.raises(folio.ArgumentError, match="FOLIO_PLAN_NOTE_BAD"):
        step.plan(step.attention()).bad_write()
