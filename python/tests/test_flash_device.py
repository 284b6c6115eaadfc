"""The GPU's way through folio.flash_attn, run on the CPU: lengths and tables are made by torch operators and never read
on the host. A stand-in for Plan.update_device fills a batch from them, with the library's rules for device arrays."""

from __future__ import annotations

import functools
import weakref

import numpy as np
import pytest
import test_flash_attn as flash
import torch

import folio
from folio import _abi as abi
from folio import _oneshot
from folio.attention import Geometry
from folio.flash_attn import _calls as module
from folio.flash_attn import _device as steps


class Elsewhere:
    """The CPU's context, but index arrays must not be read through it."""

    def __init__(self, context):
        self._context, self.on_host = context, False

    def __getattr__(self, name):
        return getattr(self._context, name)


class DevicePlan:
    """A _oneshot.Planned whose plan has update_device() on the host: itself."""

    def __init__(self, at, block_size, num_blocks, seqs, tokens, query_len, longest, stream):
        self.block_size, self.longest, self.query_len = block_size, longest, query_len
        self.plan, self.step = self, None
        self._plan = plan = folio.Plan(
            at, block_size=block_size, num_blocks=num_blocks, max_seqs=seqs + 1,  # one of padding
            max_query_tokens=tokens, max_seq_len=longest, context=at.context._context)
        self._handle, self.context = plan._handle, plan.context

    def update_device(self, *, seq_lens, block_tables, query_start, num_query_tokens, stream, causality_per_seq,
                      first_query_pos=None, first_key_pos=None):
        assert seq_lens.dtype == torch.int32 and (block_tables is None or block_tables.dtype == torch.int32)
        if block_tables is not None:  # room for the longest sequence, as an update from device arrays asks for
            assert block_tables.stride(0) >= -(-self.longest // self.block_size) and block_tables.stride(1) == 1
        assert query_start is not None or num_query_tokens == seq_lens.shape[0]
        starts = np.arange(seq_lens.shape[0] + 1) if query_start is None else query_start.numpy()
        assert np.diff(starts).max() <= self.query_len
        lens = seq_lens.numpy()
        assert (np.diff(starts)[lens > 0] <= lens[lens > 0]).all(), "more queries than keys: a GPU empties the sequence"
        pad = num_query_tokens - int(starts[-1])
        self.batch = folio.Batch(self._plan.context, block_size=self.block_size)
        for i, n in enumerate(lens):
            rows = int(starts[i + 1] - starts[i])
            if n == 0:
                self.batch.add(rows, padding=True)
                continue
            where = {} if first_query_pos is None else {"first_query_pos": int(first_query_pos[i]),
                                                        "first_key_pos": int(first_key_pos[i])}
            causal = causality_per_seq is None or causality_per_seq[i] != abi.FOLIO_CAUSAL_NO
            table = None if block_tables is None else block_tables[i, : -(-int(n) // self.block_size)].numpy()
            self.batch.add(rows, int(n), table, causal=causal, **where)
        if pad:
            self.batch.add(pad, padding=True)
        self._plan.update(self.batch)


def on_gpu(request):
    return getattr(request.node, "callspec", None) and request.node.callspec.params.get("device") == "cuda"


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, request):
    if on_gpu(request):
        return
    context = Elsewhere(folio.default_context())
    monkeypatch.setattr(steps, "on_gpu", lambda x: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(module, "default_context", lambda place: context)
    monkeypatch.setattr(module, "Rotary", lambda context, **options: folio.Rotary(context._context, **options))
    monkeypatch.setattr(_oneshot, "device_plan", DevicePlan)
    monkeypatch.setattr(_oneshot, "host_forward", None)  # a call of it fails
    monkeypatch.setattr(_oneshot, "attention", functools.cache(_attention))


def _attention(context, geometry):
    at = folio.Attention(context._context, **geometry._asdict())
    at.context = context
    return at


class Repeated:
    """A function with q, k and v first. It runs as the layers of two steps, each with K and V of its own: in the second
    step the second layer is found again, and has the same result."""

    def __init__(self, monkeypatch, name):
        self.function, self.found, self.calls, again = getattr(flash, name), 0, 0, steps.again

        def counted(*given):
            result = again(*given)
            self.found += result is not None
            return result

        monkeypatch.setattr(steps, "again", counted)
        monkeypatch.setattr(flash, name, self)

    def __call__(self, q, k, v, /, *rest, **options):
        self.calls += 1
        first, second = [[torch.empty_like(x) for x in (k, v)] for _ in range(2)]
        if "qv" in options:  # k and v are slices of one tensor
            first, second = ([x[..., v.shape[-1]:], x[..., :v.shape[-1]]] for x in
                             (k.new_empty((*k.shape[:-1], k.shape[-1] + v.shape[-1])) for _ in range(2)))
        for _ in range(2):
            for x in (*rest, *options.values()):
                if isinstance(x, torch.Tensor) and x.dtype == torch.int32:
                    x.add_(0)  # another step
            for layer in (first, second):
                layer[0].copy_(k)
                layer[1].copy_(v)
                result = self.function(q, *layer, *rest, **options)
        k.copy_(second[0])
        v.copy_(second[1])
        return result


@pytest.fixture
def repeated(monkeypatch, request):
    plans = {}
    _oneshot.kept.layers.clear()
    if not on_gpu(request):
        monkeypatch.setattr(_oneshot, "device_plan",
                            lambda *key: plans.get(key) or plans.setdefault(key, DevicePlan(*key)))
    return functools.partial(Repeated, monkeypatch)


@pytest.mark.parametrize("new", [0, 1, 3], ids=["read", "one", "three"])
@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
def test_with_kvcache_again(repeated, device, new, paged):
    run = repeated("flash_attn_with_kvcache")
    for options in flash.OPTIONS:
        flash.test_with_kvcache(device, options, new, paged)
    assert run.found >= run.calls > 0


@pytest.mark.parametrize("k_lens", [flash.LONGER, flash.SHORTER], ids=["longer", "shorter"])
def test_varlen_paged_again(repeated, device, k_lens):
    run = repeated("flash_attn_varlen_func")
    for options in flash.OPTIONS:
        flash.test_varlen_paged(device, options, k_lens)
    assert run.found >= run.calls > 0


@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
def test_with_kvcache_cases_again(repeated, device, paged):
    run = repeated("flash_attn_with_kvcache")
    for case in flash.CACHED:
        if "behind" not in case:
            flash.check_case(device, paged, case, True)
    assert run.found


def test_other_lengths_and_tables_again(repeated, device):
    """A layer is found in each step. Its arrays are those of the step."""
    torch.manual_seed(4)
    q, pages = torch.randn(2, 1, 4, 64, device=device), flash.Pages(device, [12, 16], 4)
    function, calls = flash.flash_attn_with_kvcache, repeated("flash_attn_with_kvcache")
    for i, (lens, width) in enumerate([([9, 12], 3), ([3, 9], 3), ([12, 16], 4), ([1, 2], 4), ([5, 12], 3)]):
        before = calls.found
        out = function(q, pages.k, pages.v, cache_seqlens=flash.ints(lens, device),
                       block_table=pages.table[:, :width].contiguous(), causal=True)
        assert (calls.found > before) == (i in (1, 3))  # of the same shape
        for j, n in enumerate(lens):
            flash.check(out[j], flash.attention(q[j], pages.keys[j][:n], pages.values[j][:n])[0])


def test_other_dtypes_and_shapes_again(repeated, device):
    """Strides and index arrays stay the same."""
    run, pages = repeated("flash_attn_with_kvcache"), flash.Pages(device, [12, 16], 4, spare=1)
    call = functools.partial(run.function, cache_seqlens=flash.ints([12, 16], device), block_table=pages.table)
    q, k = torch.randn(2, 1, 4, 64, device=device), torch.randn(3, 1, 2, 64, device=device)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for _ in range(2):
            out = call(q.to(dtype), pages.k, pages.v)
            want = [flash.attention(q[i].to(dtype), pages.keys[i], pages.values[i])[0] for i in range(2)]
            flash.check(out[:, 0], torch.cat(want))
    for _ in range(2):
        call(q, pages.k, pages.v, k[:2], k[:2])
    for new in (k, torch.randn(2, 1, 1, 64, device=device)):
        with pytest.raises(folio.ArgumentError):
            call(q, pages.k, pages.v, new, new)
    assert run.found == 4


def test_rotary_of_another_pairing_again(repeated, device):
    """The step is that of the layer before, the layer is not."""
    pages, tables = [flash.Pages(device, [8, 8], 4, spare=1) for _ in range(2)], torch.rand(2, 16, 32, device=device).unbind()
    q, k = torch.randn(2, 1, 4, 64, device=device), torch.randn(2, 1, 2, 64, device=device)
    function, lens = repeated("flash_attn_with_kvcache").function, flash.ints([8, 8], device)
    out = [function(q, pages[i].k, pages[i].v, k, k, *tables, lens, block_table=pages[0].table, rotary_interleaved=pairs)
           for i, pairs in ((0, True), (1, False), (0, False), (0, True))]
    assert torch.equal(out[0], out[3]) and not torch.equal(out[0], out[2])


def test_tensors_of_inference_mode(repeated, device):
    """Layers are found again; each updates the plan."""
    with torch.inference_mode():
        test_other_lengths_and_tables_again(repeated, device)


def test_another_stream(repeated, monkeypatch):
    """A layer is found again on its own stream only, also by a plan that a graph has taken."""
    q, pages, lens = torch.randn(2, 1, 4, 64), flash.Pages("cpu", [12, 16], 4), flash.ints([9, 12], "cpu")
    streams, current = [], [5]
    at = _attention(module.default_context(None), Geometry(4, 2, 64, 64, "f32", "f32", None, None, None))
    plan = DevicePlan(at, 4, pages.k.shape[0], 2, 2, 1, 16, None)
    monkeypatch.setattr(steps, "run_of", lambda context, like, stream: streams.append(stream))
    monkeypatch.setattr(_oneshot, "device_plan", lambda *key: plan)
    monkeypatch.setattr(folio.Context, "stream", lambda self: current[0])
    for current[0], plan.step in ((5, None), (5, None), (6, None), (6, None), (7, False), (7, False)):
        flash.flash_attn_with_kvcache(q, pages.k, pages.v, cache_seqlens=lens, block_table=pages.table)
    assert streams == [5, 6, 7, 7]


@pytest.mark.parametrize("rows", [1, 3])
def test_strides_again(repeated, device, rows):
    """q, k and v are slices: with several rows they have no single stride, and are copied."""
    torch.manual_seed(3)
    run, pages = repeated("flash_attn_with_kvcache"), flash.Pages(device, [7, 4], 4, spare=rows)
    lens = flash.ints([7, 4], device)
    for dense in ((), (1, 2), (0, 2), (0, 1)):
        wide = torch.randn(2, rows + 1, 8, 64, device=device)
        q, k, v = (x[:, 1:].contiguous() if i in dense else x[:, 1:] for i, x in enumerate(wide.split([4, 2, 2], 2)))
        for _ in range(2):  # also with new values at the same place
            wide.normal_()
            out = flash.flash_attn_with_kvcache(q, pages.k, pages.v, k, v, cache_seqlens=lens, block_table=pages.table,
                                                causal=True)
            for i, n in enumerate((7, 4)):
                flash.check(out[i], flash.attention(q[i], torch.cat([pages.keys[i], k[i]]),
                                                    torch.cat([pages.values[i], v[i]]))[0])
    assert run.found >= run.calls == 8 if rows == 1 else not run.found


@pytest.mark.parametrize("options", flash.OPTIONS, ids=str)
@pytest.mark.parametrize("k_lens", [flash.SAME, flash.LONGER, flash.SHORTER], ids=["same", "longer", "shorter"])
def test_varlen(options, k_lens):
    flash.test_varlen("cpu", options, k_lens)


@pytest.mark.parametrize("options", flash.OPTIONS, ids=str)
@pytest.mark.parametrize("k_lens", [flash.LONGER, flash.SHORTER], ids=["longer", "shorter"])
def test_varlen_paged(options, k_lens):
    flash.test_varlen_paged("cpu", options, k_lens)


@pytest.mark.parametrize("options", flash.OPTIONS, ids=str)
@pytest.mark.parametrize("lens", [(5, 5), (3, 11), (7, 2)], ids=str)
def test_fixed(options, lens):
    flash.test_fixed("cpu", options, lens)


@pytest.mark.parametrize("new", [0, 1, 3], ids=["read", "one", "three"])
@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
def test_with_kvcache(new, paged):
    for options in flash.OPTIONS:
        flash.test_with_kvcache("cpu", options, new, paged)


@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
def test_with_kvcache_more_new_tokens_than_queries(paged):
    flash.test_with_kvcache_more_new_tokens_than_queries("cpu", paged)


def test_others():
    flash.test_varlen_dtypes_and_groups("cpu", torch.float32, (8, 2))
    flash.test_varlen_of_fused_qkv("cpu")
    flash.test_varlen_writes_into_out_and_returns_probs_as_none("cpu")
    flash.test_keys_far_apart_in_one_long_row("cpu")
    flash.test_fixed_of_slices("cpu")
    flash.test_with_kvcache_batch_index_and_one_length("cpu")
    flash.test_with_kvcache_rows_of_several_blocks("cpu")
    flash.test_changed_lengths_and_tables_are_seen("cpu")
    flash.test_empty_batches_and_no_keys("cpu")


@pytest.mark.parametrize("case", flash.CACHED)
@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
def test_with_kvcache_cases(case, paged):
    flash.check_case("cpu", paged, case, True)


@pytest.mark.parametrize("k_lens", [flash.SAME, flash.LONGER], ids=["same", "longer"])
def test_latent_heads(k_lens):
    for paged in (False, True):
        flash.test_latent_heads("cpu", paged, k_lens)


def test_one_row_of_slopes_for_all():
    """As expand() makes it; other rows would have to be read."""
    slopes, q, k = torch.rand(4), torch.randn(3, 2, 4, 64), torch.randn(3, 5, 2, 64)
    out = flash.flash_attn_func(q, k, k, causal=True, alibi_slopes=slopes.expand(3, 4))
    assert torch.equal(out, flash.flash_attn_func(q, k, k, causal=True, alibi_slopes=slopes))
    with pytest.raises(folio.UnsupportedError, match="a row for each sequence; that is supported on the host"):
        flash.flash_attn_func(q, k, k, causal=True, alibi_slopes=slopes.expand(3, 4).clone())


def test_heads_of_other_sizes():
    for sizes in ((59, 59), (40, 59), (59, 40)):
        flash.test_heads_of_other_sizes("cpu", sizes, True)


def test_layers_of_a_step_share_an_update(monkeypatch):
    """A plan is updated once for the layers of a step, and again as soon as anything may have changed."""
    plans, updates, layers = {}, [], [flash.Pages("cpu", [12, 12], 4) for _ in range(3)]
    update = DevicePlan.update_device
    monkeypatch.setattr(_oneshot, "device_plan", lambda *key: plans.setdefault(key[1:], DevicePlan(*key)))
    monkeypatch.setattr(DevicePlan, "update_device", lambda self, **given: updates.append(1) or update(self, **given))
    q, table = torch.randn(2, 4, 64), layers[0].table
    lens, starts = torch.tensor([9, 12], dtype=torch.int32), torch.tensor([0, 1, 2], dtype=torch.int32)

    def run(layer, used, varlen=False):
        pages = layers[layer]
        out = (flash.flash_attn_varlen_func(q, pages.k, pages.v, starts, None, 1, 12, block_table=table, seqused_k=used)
               if varlen else flash.flash_attn_with_kvcache(q[:, None], pages.k, pages.v, cache_seqlens=used,
                                                            block_table=table)[:, 0])
        for i, n in enumerate(used):
            kept = [x[table[i].long()].flatten(0, 1)[:n] for x in (pages.k, pages.v)]
            flash.check(out[i:i + 1], flash.attention(q[i:i + 1], *kept)[0])

    def count(*calls, **options):
        before = len(updates)
        for layer, used in calls:
            run(layer, used, **options)
        return len(updates) - before

    for varlen in (False, True):
        assert count((0, lens), (1, lens), (2, lens), varlen=varlen) == 1
        assert count((0, lens), (1, lens), (2, lens), varlen=varlen) == 1  # another step: changed by others than torch?
        lens -= 2
        assert count((1, lens), (2, lens), varlen=varlen) == 1
        lens.numpy()[:] += 1  # which torch does not see
        assert count((1, lens), (0, lens), varlen=varlen) == 1
        table[:, :2] = table[:, :2].flip(0).clone()
        assert count((2, lens), varlen=varlen) == 1
        lens.data = torch.tensor([3, 4], dtype=torch.int32)
        assert count((0, lens), varlen=varlen) == 1
        assert count((1, lens.clone()), (2, lens.clone()), varlen=varlen) == 2
        made = lens.clone()
        assert count((0, made), varlen=varlen) == 1
        reference = weakref.ref(made)
        del made
        assert reference() is not None  # or another tensor could get its id
        with torch.inference_mode():
            made = lens.clone()
            assert count((0, made), (1, made), (2, made), varlen=varlen) == 3
        for plan in plans.values():
            plan.step = False  # a CUDA graph has it
        assert count((0, lens), (1, lens), varlen=varlen) == 2
        plans.clear()
        lens = torch.tensor([9, 12], dtype=torch.int32)
