"""folio.vllm's builder and layer with the metadata of a real run in vLLM (tests/data/vllm_steps.json), on CPUs and GPUs.

vLLM itself is not needed. On a GPU this is what stands for the backend CUSTOM, which has not run inside vLLM.
"""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
import folio  # noqa: E402
import torch_math  # noqa: E402

from folio.vllm.builder import FolioBuilder  # noqa: E402
from folio.vllm.impl import FolioImpl  # noqa: E402

RECORD = json.loads((Path(__file__).parent / "data" / "vllm_steps.json").read_text())
BLOCK_SIZE, NUM_BLOCKS = RECORD["block_size"], RECORD["num_blocks"]
HEADS, KV_HEADS, SIZE = 8, 2, 64
MAX_LEN = 256


class Rig:
    """Two layers of one KV cache group in tensors of vLLM's shape, and a plain copy of their K and V."""

    def __init__(self, device: str, dtype, options: tuple = ({}, {}), kv_cache_dtype: str = "auto") -> None:
        self.device, self.dtype = torch.device(device, 0 if device == "cuda" else None), dtype
        stored = torch.uint8 if kv_cache_dtype != "auto" else dtype
        self.layers = [SimpleNamespace(
            layer_name=f"layers.{i}", dtype=dtype, _k_scale_float=0.3, _v_scale_float=1.7,
            impl=FolioImpl(HEADS, SIZE, SIZE ** -0.5, KV_HEADS, kv_cache_dtype=kv_cache_dtype, **options[i]),
            # each page has room behind it, as where vLLM pads pages
            kv=torch.full((NUM_BLOCKS, KV_HEADS * BLOCK_SIZE * 2 * SIZE + 128), 0x7F if stored == torch.uint8 else torch.nan,
                          dtype=stored, device=self.device)) for i in range(2)]
        self.plain = [torch.full((2, NUM_BLOCKS * BLOCK_SIZE, KV_HEADS, SIZE), torch.nan, dtype=torch.float64)
                      for _ in self.layers]
        config = SimpleNamespace(
            compilation_config=SimpleNamespace(static_forward_context={x.layer_name: x for x in self.layers}),
            scheduler_config=SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=96),
            model_config=SimpleNamespace(max_model_len=MAX_LEN))
        self.builder = FolioBuilder(None, [x.layer_name for x in self.layers], config, self.device)

    def pages(self, layer) -> torch.Tensor:
        used = layer.kv[:, :KV_HEADS * BLOCK_SIZE * 2 * SIZE]
        return used.unflatten(1, (KV_HEADS, BLOCK_SIZE, 2 * SIZE))

    def metadata(self, step: dict) -> SimpleNamespace:
        # vLLM's table has room for the longest sequence; the record leaves out columns that no sequence uses
        room = [row + [0] * (MAX_LEN // BLOCK_SIZE - len(row)) for row in step["block_table"]]
        on = {name: torch.tensor(values, dtype=torch.int32, device=self.device)
              for name, values in (step | {"block_table": room}).items()
              if name in ("query_start_loc", "seq_lens", "block_table")}
        return SimpleNamespace(
            query_start_loc=on["query_start_loc"], query_start_loc_cpu=on["query_start_loc"].cpu(), seq_lens=on["seq_lens"],
            block_table_tensor=on["block_table"], num_reqs=len(step["seq_lens"]), causal=step["causal"],
            slot_mapping=torch.tensor(step["slot_mapping"], dtype=torch.int64, device=self.device),
            num_actual_tokens=step["num_actual_tokens"], max_query_len=step["max_query_len"], max_seq_len=step["max_seq_len"])

    def run(self, step: dict, number: int, expected) -> None:
        """One step of both layers. expected(impl, q, k, v) is the output of one sequence."""
        metadata = self.builder.build(0, self.metadata(step))
        for i, layer in enumerate(self.layers):
            generator = torch.Generator().manual_seed(1000 * i + number)
            fused = torch.randn(len(step["slot_mapping"]), HEADS + 2 * KV_HEADS, SIZE, generator=generator).to(self.dtype)
            fused = fused.to(self.device)  # as a fused QKV projection leaves them
            q, k, v = fused.split([HEADS, KV_HEADS, KV_HEADS], 1)
            out = torch.full((len(q), HEADS, SIZE), torch.nan, dtype=self.dtype, device=self.device)
            layer.impl.forward(layer, q, k, v, self.pages(layer), metadata, out)
            behind = layer.kv[:, KV_HEADS * BLOCK_SIZE * 2 * SIZE:]
            assert (behind.isnan() if behind.is_floating_point() else behind == 0x7F).all()  # nothing beside the pages
            slots = torch.tensor(step["slot_mapping"])
            self.plain[i][:, slots] = torch.stack([k, v]).double().cpu()
            for seq, length in enumerate(step["seq_lens"]):
                begin, end = step["query_start_loc"][seq:seq + 2]
                table = torch.tensor(step["block_table"][seq])
                places = (table[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()[:length]
                keys, values = self.plain[i][:, places]
                torch_math.check(out[begin:end], expected(layer.impl, q[begin:end], keys, values), f"seq {seq} of step {number}")


def by_options(impl, q, k, v):
    slopes = None if impl.alibi_slopes is None else torch.tensor(impl.alibi_slopes)
    window = (-1, -1) if impl.sliding_window < 0 else (impl.sliding_window - 1, 0)
    return torch_math.attention(q, k, v, window=window, soft_cap=impl.logits_soft_cap, slopes=slopes, sinks=impl.sinks)[0]


def test_the_record_has_all_kinds_of_steps():
    lens = [[b - a for a, b in zip(s["query_start_loc"], s["query_start_loc"][1:])] for s in RECORD["steps"]]
    assert any(max(x) > 1 and min(x) == 1 for x in lens)  # prompts and decodes in one step
    assert any(set(x) == {1} for x in lens)
    assert any(n > 1 and length > n for x, s in zip(lens, RECORD["steps"]) for n, length in zip(x, s["seq_lens"]))  # chunks
    assert RECORD["steps"][0]["block_table"][0][0] != 0  # block 0 is vLLM's null block


@pytest.mark.parametrize("dtype", torch_math.DTYPES, ids=str)
def test_recorded_steps(device, dtype):
    rig = Rig(device, dtype, ({}, {"sliding_window": 40}))
    assert rig.builder.numbers == {"layers.0": 0, "layers.1": 1}
    for number, step in enumerate(RECORD["steps"]):
        rig.run(step, number, by_options)


def test_options(device):
    sinks = torch.linspace(-2, 2, HEADS, device=device)
    rig = Rig(device, torch.bfloat16, ({"sinks": sinks, "sliding_window": 33}, {"logits_soft_cap": 5.0}))
    for number, step in enumerate(RECORD["steps"]):
        rig.run(step, number, by_options)


def test_alibi(device):
    slopes = [2.0 ** -(i + 1) for i in range(HEADS)]
    rig = Rig(device, torch.float32, ({"alibi_slopes": slopes}, {}))
    for number, step in enumerate(RECORD["steps"]):
        rig.run(step, number, by_options)


def test_fp8(device):
    def stored(impl, q, k, v):
        return by_options(impl, q, (k.float() / 0.3).to(torch.float8_e4m3fn).double() * 0.3,
                          (v.float() / 1.7).to(torch.float8_e4m3fn).double() * 1.7)

    rig = Rig(device, torch.float32, kv_cache_dtype="fp8")
    for number, step in enumerate(RECORD["steps"]):
        rig.run(step, number, stored)


def test_causality_of_each_request(device):
    step = dict(RECORD["steps"][0])
    causal = torch.arange(len(step["seq_lens"]), device=device) % 2 == 1
    step["causal"] = causal
    flags = iter(2 * causal.tolist())
    Rig(device, torch.float32).run(step, 0, lambda impl, q, k, v: torch_math.attention(q, k, v, causal=next(flags))[0])


def test_layers_without_a_cache(device):
    """Encoder-only attention: each row sees all rows of its own request."""
    rig = Rig(device, torch.float32, ({"attn_type": "encoder_only"}, {"attn_type": "encoder"}))
    step = dict(RECORD["steps"][0])
    starts = step["query_start_loc"]
    step["seq_lens"] = [b - a for a, b in zip(starts, starts[1:])]
    metadata = rig.builder.build(0, rig.metadata(step))
    q, k, v = (torch.randn(starts[-1], n, SIZE, device=rig.device) for n in (HEADS, KV_HEADS, KV_HEADS))
    out = torch.empty_like(q)
    for layer in rig.layers:
        layer.impl.forward(layer, q, k, v, torch.tensor([]), metadata, out.fill_(torch.nan))
        for a, b in zip(starts, starts[1:]):
            torch_math.check(out[a:b], torch_math.attention(q[a:b], k[a:b], v[a:b], causal=False)[0])


def test_cross_attention(device):
    """The encoder's K and V are written in the first step, and later steps read them."""
    rig = Rig(device, torch.float32, ({"attn_type": "encoder_decoder"}, {"attn_type": "encoder_decoder"}))
    lens, tables = [50, 33, 7], [[3, 1], [2, 5], [4, 0]]
    keys, values = ([torch.randn(n, KV_HEADS, SIZE) for n in lens] for _ in range(2))
    slots = torch.cat([torch.tensor([t[j // BLOCK_SIZE] * BLOCK_SIZE + j % BLOCK_SIZE for j in range(n)])
                       for n, t in zip(lens, tables)])
    for number, queries in enumerate(([4, 1, 2], [1, 1, 1])):
        starts = torch.tensor([0, *torch.tensor(queries).cumsum(0)], dtype=torch.int32)
        metadata = rig.builder.build(0, SimpleNamespace(
            num_actual_tokens=sum(queries), max_query_len=max(queries), max_seq_len=max(lens),
            query_start_loc=starts.to(rig.device), query_start_loc_cpu=starts, causal=False,
            seq_lens=torch.tensor(lens, dtype=torch.int32, device=rig.device),
            block_table_tensor=torch.tensor(tables, dtype=torch.int32, device=rig.device), slot_mapping=None))
        metadata.slot_mapping = slots.to(rig.device) if number == 0 else torch.empty(0, dtype=torch.int64)
        q = torch.randn(sum(queries), HEADS, SIZE, device=rig.device)
        k, v = ((torch.cat(x).to(rig.device) if number == 0 else None) for x in (keys, values))
        for layer in rig.layers:
            out = torch.full_like(q, torch.nan)
            layer.impl.forward(layer, q, k, v, rig.pages(layer), metadata, out)
            for i, (a, b) in enumerate(zip(starts.tolist(), starts.tolist()[1:])):
                torch_math.check(out[a:b], torch_math.attention(q[a:b], keys[i], values[i], causal=False)[0])


def test_a_layer_that_shares_keys(device):
    """It writes nothing, and reads what the layer before it has written."""
    rig = Rig(device, torch.float32, ({}, {"kv_sharing_target_layer_name": "layers.0"}))
    step = RECORD["steps"][0]
    metadata = rig.builder.build(0, rig.metadata(step))
    q, k, v = (torch.randn(len(step["slot_mapping"]), n, SIZE, device=rig.device) for n in (HEADS, KV_HEADS, KV_HEADS))
    outs = [torch.empty_like(q), torch.empty_like(q)]
    for layer, rows, out in zip(rig.layers, (k, torch.full_like(k, torch.nan)), outs):
        layer.impl.forward(layer, q, rows, v, rig.pages(rig.layers[0]), metadata, out)
    assert torch.equal(*outs)


def test_warm_up_and_refusals(device):
    rig = Rig(device, torch.float32)
    layer, out = rig.layers[0], torch.full((3, HEADS, SIZE), 5.0, device=rig.device)
    assert layer.impl.forward(layer, out, out, out, rig.pages(layer), None, out) is out and (out == 5.0).all()
    with pytest.raises(NotImplementedError, match="quantize the output"):
        layer.impl.forward(layer, out, out, out, rig.pages(layer), None, out, output_scale=out)


def test_a_step_beyond_the_limits(device):
    """The plan grows: vLLM's wrappers may make more sequences than max_num_seqs."""
    rig = Rig(device, torch.float32)
    rig.builder.vllm_config.scheduler_config.max_num_seqs = 1
    rig.builder.vllm_config.scheduler_config.max_num_batched_tokens = 2
    for number, step in enumerate(RECORD["steps"][:4]):
        rig.run(step, number, by_options)


@pytest.mark.parametrize("bad, words", [
    ({"kv_cache_dtype": "int8_per_token_head"}, "'int8_per_token_head' is not one of auto"),
    ({"head_size": 20}, "head_size 20 is not a multiple of 8"),
    ({"head_size": 584}, r"head_size 584 is not a multiple of 8 in \[8, 576\]")])
def test_layers_that_it_does_not_have(bad, words):
    with pytest.raises(folio.UnsupportedError, match="Folio: .*" + words):
        FolioImpl(**({"num_heads": HEADS, "head_size": SIZE, "scale": 1.0, "num_kv_heads": KV_HEADS} | bad))


class Ranks:
    """The group of vLLM for decode context parallelism, whose ranks are threads here."""

    def __init__(self, count: int) -> None:
        self.parts, self.barrier = [None] * count, threading.Barrier(count, timeout=60)

    def of(self, rank: int) -> SimpleNamespace:
        def all_gather(x, dim):
            self.parts[rank] = x
            self.barrier.wait()
            result = torch.cat(self.parts, dim)
            self.barrier.wait()
            return result
        return SimpleNamespace(all_gather=all_gather)


def new_layer(monkeypatch, world_size: int, rank: int, group, **options) -> FolioImpl:
    """A layer whose rank vLLM has set before __init__."""
    monkeypatch.setattr(FolioImpl, "dcp_world_size", world_size)
    impl = FolioImpl(HEADS // 2, SIZE, SIZE ** -0.5, 1, **options)
    impl.dcp_world_size, impl.dcp_rank, impl.dcp_group = world_size, rank, lambda: group
    return impl


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world_size, interleave", [(2, 1), (3, 4), (2, 16)])
def test_decode_context_parallel(device, monkeypatch, world_size, interleave, dtype):
    """Prompts, chunks and decodes, whose tokens go to the ranks in turn, against float64 over all tokens."""
    heads, ranks, width, results = HEADS // 2, Ranks(world_size), 8, {}
    steps = [[(7, 0), (1, 0), (40, 0)], [(1, 7), (5, 1), (30, 40), (3, 0)], [(1, 8), (1, 6), (1, 70), (1, 3)]]
    rnd = torch.Generator().manual_seed(5)
    keys = [[torch.randn(100, 1, SIZE, generator=rnd).to(dtype) for _ in range(4)] for _ in range(2)]
    queries = [torch.randn(sum(n for n, _ in step), world_size * heads, SIZE, generator=rnd).to(dtype)
               for step in steps]
    impls = [new_layer(monkeypatch, world_size, rank, ranks.of(rank), logits_soft_cap=3.0)
             for rank in range(world_size)]

    def run(rank: int) -> None:
        layer = SimpleNamespace(layer_name="layer", dtype=dtype, impl=impls[rank])
        config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={"layer": layer}),
                                 parallel_config=SimpleNamespace(cp_kv_cache_interleave_size=interleave))
        builder = FolioBuilder(None, ["layer"], config, torch.device(device, 0 if device == "cuda" else None))
        kv = torch.full((1 + 4 * width, 1, 16, 2 * SIZE), torch.nan, dtype=dtype, device=device)
        table = 1 + torch.randperm(4 * width, generator=torch.Generator().manual_seed(rank)).int().view(4, width)
        for number, step in enumerate(steps):
            positions = [torch.arange(old, old + new) for new, old in step]
            slots = []
            for i, at in enumerate(positions):
                local = at // (interleave * world_size) * interleave + at % interleave
                place = table[i][local // 16] * 16 + local % 16
                slots.append(torch.where(at // interleave % world_size == rank, place, -1))
            starts = torch.tensor([0] + [new for new, _ in step]).cumsum(0).int()
            common = SimpleNamespace(
                query_start_loc=starts.to(device), query_start_loc_cpu=starts, causal=True,
                seq_lens=torch.tensor([sum(x) for x in step], dtype=torch.int32, device=device),
                block_table_tensor=table[:len(step)].to(device), slot_mapping=torch.cat(slots).to(device),
                num_actual_tokens=int(starts[-1]), max_query_len=40, max_seq_len=100)
            k, v = (torch.cat([x[i][at] for i, at in enumerate(positions)]).to(device) for x in keys)
            q = queries[number][:, rank * heads:(rank + 1) * heads].to(device)
            out = torch.full((len(q) + 2, heads, SIZE), torch.nan, dtype=dtype, device=device)  # rows that vLLM pads
            impls[rank].forward(layer, q, k, v, kv, builder.build(0, common), out)
            assert out[len(q):].isnan().all()
            results[rank, number] = out[:len(q)].cpu()

    with ThreadPoolExecutor(world_size) as pool:
        list(pool.map(run, range(world_size)))
    for (rank, number), out in results.items():
        begin = 0
        for i, (new, old) in enumerate(steps[number]):
            q = queries[number][begin:begin + new, rank * heads:(rank + 1) * heads]
            expected = torch_math.attention(q, keys[0][i][:old + new], keys[1][i][:old + new], soft_cap=3.0)[0]
            error = (out[begin:begin + new].double() - expected).abs().max()
            limit = 3e-6 if dtype == torch.float32 else 2e-2
            assert error < limit, f"rank {rank}, step {number}, seq {i}: {error:.1e}"
            begin += new


@pytest.mark.parametrize("options", [{"sliding_window": 8}, {"alibi_slopes": [0.5] * 4}, {"kv_cache_dtype": "fp8"}])
def test_decode_context_parallel_refused(monkeypatch, options):
    with pytest.raises(folio.UnsupportedError, match="leave --decode-context-parallel-size at 1"):
        new_layer(monkeypatch, 2, 0, None, **options)
