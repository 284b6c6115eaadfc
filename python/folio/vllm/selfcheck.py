"""A small problem by Folio and by vLLM's own CPU operator: the start-up check of vLLM versions that are not known yet.

    python -m folio.vllm.selfcheck      prints the differences

Both get the same q, k, v, lengths and block tables, and each keeps its cache in a KV tensor of vLLM's shape. Tests and
the bench use it too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, Optional

import torch

from .builder import FolioBuilder
from .impl import FolioImpl

LIMITS = {torch.float32: 2e-5, torch.bfloat16: 2e-2}  # largest difference of numbers around 1
NAME = "layer"


@dataclass
class Problem:
    """One layer over one step. context[i] tokens of sequence i are in the cache already, queries[i] are new."""

    queries: list
    context: list
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 64
    block_size: int = 32
    dtype: torch.dtype = torch.float32
    kv_cache_dtype: str = "auto"
    options: dict = field(default_factory=dict)  # of the layer, as vLLM names them
    causal: Any = True  # bool, or a bool tensor [sequences]
    k_scale: float = 1.0
    v_scale: float = 1.0
    seed: int = 0
    device: str = "cpu"
    sequences: Optional[list] = None  # of (q, k, v) for all tokens of a sequence, or of more; None: random ones

    def random_sequence(self, length: int, seed: int) -> tuple:
        """(q, k, v) of all tokens of a sequence."""
        generator = torch.Generator().manual_seed(seed)
        return tuple(torch.randn(length, heads, self.head_size, generator=generator).to(self.dtype).to(self.device)
                     for heads in (self.num_heads, self.num_kv_heads, self.num_kv_heads))

    def __post_init__(self) -> None:
        lens = [q + c for q, c in zip(self.queries, self.context)]
        all_rows = [given or self.random_sequence(n, 1000 * self.seed + i)
                    for i, (given, n) in enumerate(zip(self.sequences or [None] * len(lens), lens))]
        self.q = torch.cat([rows[0][c:n] for rows, c, n in zip(all_rows, self.context, lens)])
        self.keys, self.values = ([rows[part][:n] for rows, n in zip(all_rows, lens)] for part in (1, 2))
        counts = [-(-n // self.block_size) for n in lens]
        self.num_blocks = sum(counts) + 1  # block 0 is vLLM's null block
        order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(self.seed))
        self.table = torch.zeros(len(lens), max(counts), dtype=torch.int32)
        begin = 0
        for i, n in enumerate(counts):
            self.table[i, :n] = order[begin:begin + n].int() + 1
            begin += n
        self.lens = torch.tensor(lens, dtype=torch.int32)
        self.starts = torch.tensor([0, *torch.tensor(self.queries).cumsum(0)], dtype=torch.int32)
        self.k, self.v = (torch.cat([x[c:] for x, c in zip(rows_, self.context)])
                          for rows_ in (self.keys, self.values))
        self.slots = torch.cat([self._slots(i, c, n) for i, (c, n) in enumerate(zip(self.context, lens))])

    def _slots(self, seq: int, begin: int, end: int) -> torch.Tensor:
        places = torch.arange(begin, end)
        return self.table[seq].long()[places // self.block_size] * self.block_size + places % self.block_size

    def kv_tensor(self) -> torch.Tensor:
        """Filled with NaN: what is read without having been written shows."""
        shape = (self.num_blocks, self.num_kv_heads, self.block_size, 2 * self.head_size)
        if self.kv_cache_dtype != "auto":
            return torch.full(shape, 0x7F, dtype=torch.uint8, device=self.device)
        return torch.full(shape, float("nan"), dtype=self.dtype, device=self.device)

    def cached(self) -> Optional[tuple]:
        """(k, v, slots) of the tokens that are in the cache already."""
        parts = [(k[:c], v[:c], self._slots(i, 0, c))
                 for i, (k, v, c) in enumerate(zip(self.keys, self.values, self.context)) if c]
        return tuple(torch.cat(x) for x in zip(*parts)) if parts else None


class Folio:
    """The problem by Folio's builder and layer."""

    def __init__(self, problem: Problem, metadata: Any = None) -> None:
        p = self.problem = problem
        self.impl = FolioImpl(p.num_heads, p.head_size, p.head_size ** -0.5, p.num_kv_heads,
                              kv_cache_dtype=p.kv_cache_dtype, **p.options)
        self.layer = SimpleNamespace(layer_name=NAME, dtype=p.dtype, _k_scale_float=p.k_scale,
                                     _v_scale_float=p.v_scale, impl=self.impl)
        config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={NAME: self.layer}),
                                 scheduler_config=SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=64),
                                 model_config=SimpleNamespace(max_model_len=256))
        self.builder = FolioBuilder(None, [NAME], config, torch.device(p.device))
        self.kv = p.kv_tensor()
        self.out = torch.full_like(p.q, float("nan"))
        self.common = (metadata or SimpleNamespace)(
            query_start_loc=p.starts.to(p.device), query_start_loc_cpu=p.starts, seq_lens=p.lens.to(p.device),
            num_reqs=len(p.queries), num_actual_tokens=len(p.q), max_query_len=max(p.queries),
            max_seq_len=int(p.lens.max()), block_table_tensor=p.table.to(p.device), slot_mapping=p.slots.to(p.device),
            causal=p.causal.to(p.device) if isinstance(p.causal, torch.Tensor) else p.causal)
        if cached := p.cached():
            k, v, slots = cached
            self.impl.do_kv_cache_update(self.layer, k, v, self.kv, slots)

    def build(self) -> Any:
        return self.builder.build(0, self.common)

    def forward(self, step: Any) -> torch.Tensor:
        p = self.problem
        return self.impl.forward(self.layer, p.q, p.k, p.v, self.kv, step, self.out)


class Own:
    """The problem by vLLM's own operator, called as vLLM's CPU backend calls it."""

    def __init__(self, problem: Problem) -> None:
        from vllm import _custom_ops
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        p = self.problem = problem
        self.ops = _custom_ops
        self.isa = _get_attn_isa(p.dtype, p.block_size, p.head_size, p.kv_cache_dtype)
        kv = torch.zeros_like(p.kv_tensor())
        self.key_cache, self.value_cache = kv.view(*kv.shape[:2], 2 * p.block_size, -1).chunk(2, dim=2)
        self.out = torch.full_like(p.q, float("nan"))
        self.window = -1 if p.options.get("sliding_window") is None else p.options["sliding_window"]
        slopes = p.options.get("alibi_slopes")
        self.slopes = None if slopes is None else torch.tensor(slopes, dtype=torch.float32)
        self.dynamic: Optional[torch.Tensor] = p.causal.int() if isinstance(p.causal, torch.Tensor) else None
        self.causal = False if self.dynamic is not None else p.causal
        if cached := p.cached():
            self.write(*cached)

    def write(self, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        p = self.problem
        self.ops.cpu_attn_reshape_and_cache(k, v, self.key_cache, self.value_cache, slots, self.isa, p.k_scale,
                                            p.v_scale, p.kv_cache_dtype)

    def build(self) -> Any:
        p = self.problem
        return self.ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(p.queries), num_heads=p.num_heads, num_kv_heads=p.num_kv_heads, head_dim=p.head_size,
            seq_lens=p.lens, dtype=p.dtype, query_start_loc=p.starts, causal=self.causal,
            sliding_window_size=self.window, isa=self.isa, enable_kv_split=True, dynamic_causal=self.dynamic,
            kv_cache_dtype=p.kv_cache_dtype)

    def forward(self, step: Any) -> torch.Tensor:
        p = self.problem
        self.write(p.k, p.v, p.slots)
        self.ops.cpu_attention_with_kv_cache(
            query=p.q, key_cache=self.key_cache, value_cache=self.value_cache, output=self.out,
            query_start_loc=p.starts, seq_lens=p.lens, scale=p.head_size ** -0.5, causal=self.causal,
            alibi_slopes=self.slopes, sliding_window=self.window, block_table=p.table,
            softcap=p.options.get("logits_soft_cap") or 0.0, scheduler_metadata=step, s_aux=p.options.get("sinks"),
            dynamic_causal=self.dynamic, k_scale=p.k_scale, v_scale=p.v_scale, kv_cache_dtype=p.kv_cache_dtype)
        return self.out


def difference(problem: Problem, metadata: Any = None) -> float:
    """The largest difference of the two results."""
    own, folio = Own(problem), Folio(problem, metadata)
    return float((own.forward(own.build()).float() - folio.forward(folio.build()).float()).abs().max())


def problems() -> list:
    """Decodes, a prompt and a chunk of one, in f32 and bf16, without and with a window."""
    return [Problem(queries=[1, 40, 1, 9], context=[70, 0, 5, 33], dtype=dtype, options=options, seed=7)
            for dtype in LIMITS for options in ({}, {"sliding_window": 24})]


def run() -> float:
    """The largest difference over all problems; raises if one is larger than allowed."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from . import backend  # noqa: F401  vLLM's base classes are still there

    worst = 0.0
    for problem in problems():
        found = difference(problem, CommonAttentionMetadata)
        if not found <= LIMITS[problem.dtype]:
            raise ValueError(f"attention in {problem.dtype} with {problem.options or 'no options'} differs from vLLM's "
                             f"by {found:.1e}; the limit is {LIMITS[problem.dtype]:.0e}")
        worst = max(worst, found)
    return worst


def _can_import(package: str) -> bool:
    try:
        return bool(import_module(package))
    except Exception:  # packages for CUDA raise RuntimeError and OSError
        return False


def _check_install() -> None:
    """Ends the program with a sentence if vLLM cannot be imported."""
    try:
        import_module("vllm.v1.attention.backends.cpu_attn")  # vLLM imports its parts late
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        broken = [x for x in ("torchvision", "torchaudio", "torchcodec") if find_spec(x) and not _can_import(x)]
        if broken:
            reason += (f". The installed {', '.join(broken)} cannot be loaded beside torch {torch.__version__}; vLLM "
                       f"runs without: pip uninstall -y {' '.join(broken)}")
        raise SystemExit(f"selfcheck compares with vLLM, which cannot be imported: {reason}") from None


if __name__ == "__main__":
    _check_install()
    import vllm

    for case in problems():
        print(f"vLLM {vllm.__version__}: {case.dtype}, {case.options}: largest difference {difference(case):.1e}, "
              f"allowed {LIMITS[case.dtype]:.0e}")
