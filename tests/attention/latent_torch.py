"""Latent attention (v_in_k) against PyTorch in float64: DeepSeek's shape with 16 and 128 query heads over one kv head,
prompts, chunks and decodes, with window, sinks, soft cap, and caches of each type. On the reference and on the cpu.

usage: latent_torch.py LIBRARY [SEED]
"""

import math
import os
import sys

import cffi
import torch

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "api", "clients"))
import cffi_client  # noqa: E402

K_SIZE, V_SIZE, TOKENS, BLOCK = 576, 512, 24, 16
STEPS = {"prompt": [TOKENS], "chunks": [11, 8, 5], "decodes": [TOKENS - 3, 1, 1, 1]}
OPTIONS = [{}, {"window": 9}, {"sinks": True}, {"soft_cap": 2.0}, {"window": 15, "sinks": True, "soft_cap": 5.0}]
FLOATS = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
FP8 = {"fp8_e4m3": (torch.float8_e4m3fn, 448.0), "fp8_e5m2": (torch.float8_e5m2, 57344.0)}
# Of max|out|. The reference's out is rounded to the type of q; the cpu's kernels are judged by the reference elsewhere.
SHARES = {("reference", "f32"): 1e-6, ("reference", "bf16"): 2.0**-8, ("cpu", "f32"): 1e-5, ("cpu", "bf16"): 2.0**-6}


def stored(x, dtype, scale):
    """What a cache gives back for rows x."""
    if dtype in FLOATS:
        return x.to(FLOATS[dtype]).double()
    if dtype in FP8:
        kind, largest = FP8[dtype]
        return (x / scale).clamp(-largest, largest).to(kind).double() * float(scale)
    by = x.abs().amax(dim=-1, keepdim=True) / 127.0
    return torch.round(x / by).double() * by.double()


def attend(q, rows, first, case, sinks):
    """Rows of queries from position `first` on over all keys, in float64."""
    n = q.shape[0]
    keys = rows[: first + n]
    score = torch.einsum("nhd,kd->hnk", q.double(), keys) / math.sqrt(K_SIZE)
    if case.get("soft_cap"):
        score = case["soft_cap"] * torch.tanh(score / case["soft_cap"])
    distance = first + torch.arange(n)[:, None] - torch.arange(first + n)[None, :]
    seen = (distance >= 0) & (distance < case.get("window", TOKENS))
    score = score.masked_fill(~seen, -math.inf)
    if sinks is not None:
        score = torch.cat([score, sinks.double()[:, None, None].expand(-1, n, 1)], dim=2)
    weights = torch.softmax(score, dim=2)[:, :, : first + n]
    return torch.einsum("hnk,kd->nhd", weights, keys[:, :V_SIZE])


def tensor(f, x):
    dtype = {torch.float32: f.lib.FOLIO_F32, torch.bfloat16: f.lib.FOLIO_BF16}[x.dtype]
    return {"data": f.ffi.cast("void *", x.data_ptr()), "dtype": dtype, "tokens": x.shape[0]}


def run(f, ctx, case, generator):
    """The largest error of a case's steps, as a share of max|out|."""
    lib, heads, kind = f.lib, case["heads"], FLOATS[case["q"]]
    q = (torch.rand(TOKENS, heads, K_SIZE, generator=generator) * 4 - 2).to(kind)
    k = (torch.rand(TOKENS, 1, K_SIZE, generator=generator) * 4 - 2).to(kind)
    sinks = torch.rand(heads, generator=generator) * 4 - 2 if case.get("sinks") else None
    scale = torch.tensor(0.25)
    cache = f.create("kv_cache", ctx, f.struct(
        "folio_kv_cache_desc", num_layers=1, num_blocks=5, block_size=BLOCK, num_kv_heads=1, k_head_size=K_SIZE,
        v_head_size=V_SIZE, dtype=getattr(lib, "FOLIO_" + case["kv"].upper()),
        layout=getattr(lib, "FOLIO_LAYOUT_" + case["layout"].upper()), v_in_k=1))
    rows = stored(k[:, 0].float(), case["kv"], scale)
    table = f.ffi.new("int32_t[]", [4, 1])
    worst, first = 0.0, 0
    for n in STEPS[case["steps"]]:
        some_q, some_k = q[first: first + n].contiguous(), k[first: first + n].contiguous()
        out = torch.full((n, heads, V_SIZE), math.nan, dtype=kind)
        length = f.ffi.new("int32_t *", first + n)
        attention = f.struct(
            "folio_attention_desc", num_heads=heads, soft_cap=case.get("soft_cap", 0.0), windowed="window" in case,
            window_left=case.get("window", 1) - 1)
        step = f.struct("folio_step", num_seqs=1, seq_lens=length,
                        table={"kind": lib.FOLIO_TABLE_ROWS, "indices": table, "row_stride": 2})
        tensors = f.struct("folio_tensors", q=tensor(f, some_q), k=tensor(f, some_k), out=tensor(f, out),
                           k_scale=float(scale) if case["kv"] in FP8 else 0.0)
        if sinks is not None:
            tensors.sinks = f.ffi.cast("float *", sinks.data_ptr())
        f.must(lib.folio_attend(ctx, attention, lib.FOLIO_ATTENTION_DECODER, step, cache, 0, tensors, f.ffi.NULL))
        want = attend(some_q, rows, first, case, sinks)
        error = (out.double() - want).abs().max() / want.abs().max()
        worst, first = max(worst, float(error.nan_to_num(math.inf))), first + n
    lib.folio_kv_cache_destroy(cache)
    return worst


def cases():
    for heads in (16, 128):
        for steps in STEPS:
            for number, options in enumerate(OPTIONS):
                for kv in ("f32", "fp8_e4m3", "fp8_e5m2", "int8") if number == 0 else ("f32", "fp8_e4m3"):
                    layout = ("native", "nhd", "hnd")[number % 3]
                    yield dict(options, heads=heads, steps=steps, q="f32", kv=kv, layout=layout)
            for kv in ("bf16", "fp8_e4m3"):
                yield {"heads": heads, "steps": steps, "q": "bf16", "kv": kv, "layout": "native"}


def main():
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    ffi = cffi.FFI()
    ffi.cdef(cffi_client.declarations("include"))
    f = cffi_client.Folio(ffi, ffi.dlopen(sys.argv[1]))
    torch.set_num_threads(1)
    count, worst = 0, {}
    for backend in ("reference", "cpu"):
        name = ffi.new("char[]", backend.encode())
        ctx = f.create("context", f.struct("folio_context_desc", backend=name, num_threads=2))
        for number, case in enumerate(cases()):
            share = run(f, ctx, case, torch.Generator().manual_seed(seed * 1000 + number))
            if not share <= SHARES[backend, case["q"]]:
                sys.exit(f"latent attention on {backend} is off by {share:.2g} of max|out|: {case}, seed {seed}")
            worst[backend, case["q"]] = max(worst.get((backend, case["q"]), 0.0), share)
            count += 1
        f.lib.folio_context_destroy(ctx)
    print(f"latent attention: {count} cases agree with PyTorch {torch.__version__}; errors of max|out|: " +
          ", ".join(f"{b} {q} {e:.1e}" for (b, q), e in worst.items()))


main()
