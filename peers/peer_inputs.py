"""peer_inputs.py: what the peers are given, and what they must make of it."""

import math
from dataclasses import dataclass

import torch

TYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16,
         "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
# Absolute, for outputs below 1: several times the rounding of the type, and less than a key counts.
TOLERANCE = {"f32": 1e-4, "f16": 4e-3, "bf16": 1e-2}


class Refused(Exception):
    """This peer cannot run this case; the text says why."""


@dataclass
class Case:
    """One batch: kinds of (count, query_len, seq_len), rows and keys in their order."""

    case: str
    kinds: list
    dtype: str
    kv_dtype: str
    heads: int
    kv_heads: int
    head_size: int
    block_size: int
    alibi: bool = False
    sinks: bool = False
    window: int = 0  # keys that a row sees, its own among them; 0: all
    soft_cap: float = 0.0
    full: bool = False  # rows see the keys after them too
    seed: int = 1

    @property
    def sequences(self):
        return [(q, s) for count, q, s in self.kinds for _ in range(count)]

    @property
    def scale(self):
        return 1 / math.sqrt(self.head_size)

    @property
    def torch_type(self):
        return TYPES[self.dtype]

    @property
    def has_options(self):
        return self.alibi or self.sinks or self.window > 0 or self.soft_cap > 0 or self.full

    def small(self):
        """The same kinds of sequences, short: what the outputs are checked on."""
        kinds = []
        for count, q, s in self.kinds:
            short = min(q, 45)
            kinds.append((min(count, 2), short, short + min(s - q, 37)))
        window = min(self.window, 19)
        return Case(**{**vars(self), "kinds": kinds, "window": window})


class Inputs:
    """q [rows, heads, D]; k, v [keys, kv_heads, D], uniform in [-1, 1) as Folio's are. They lie on
    torch's default device."""

    def __init__(self, case):
        random = torch.Generator(torch.get_default_device()).manual_seed(case.seed)
        rows = sum(q for q, _ in case.sequences)
        keys = sum(s for _, s in case.sequences)

        def draw(*shape):
            return torch.rand(*shape, generator=random).mul_(2).sub_(1).to(case.torch_type)

        self.q = draw(rows, case.heads, case.head_size)
        # Numbers that the cache holds exactly: rounding is no part of the comparison.
        kv_type = TYPES.get(case.kv_dtype, case.torch_type)
        self.k, self.v = (draw(keys, case.kv_heads, case.head_size).to(kv_type)
                          .to(case.torch_type) for _ in range(2))
        self.slopes = torch.tensor([2.0 ** (-8 * (h + 1) / case.heads) for h in range(case.heads)])
        self.sinks = torch.linspace(-1, 1, case.heads)
        self.random = random

    def shuffled_tables(self, case, block_size):
        """A block table [blocks] per sequence, the blocks of all in random order."""
        counts = [-(-s // block_size) for _, s in case.sequences]
        order = torch.randperm(sum(counts), generator=self.random).to(torch.int32)
        return list(torch.split(order, counts))

    def slots(self, case, tables, block_size):
        """Of every key, block * block_size + offset."""
        each = []
        for table, (_, s) in zip(tables, case.sequences):
            at = torch.arange(s)
            each.append(table.long()[at // block_size] * block_size + at % block_size)
        return torch.cat(each)


def formula(case, inputs):
    """The attention of docs/numerics.md in double precision -> [rows, heads, D]."""
    outs, row, key = [], 0, 0
    group = case.heads // case.kv_heads
    stored = inputs.k.double(), inputs.v.double()
    for q_len, s_len in case.sequences:
        q = inputs.q[row:row + q_len].double().transpose(0, 1)
        k, v = (x[key:key + s_len].transpose(0, 1).repeat_interleave(group, 0) for x in stored)
        s = case.scale * q @ k.transpose(1, 2)
        if case.soft_cap > 0:
            s = case.soft_cap * torch.tanh(s / case.soft_cap)
        back = torch.arange(s_len - q_len, s_len)[:, None] - torch.arange(s_len)[None, :]
        if case.alibi:
            s = s - inputs.slopes.double()[:, None, None] * back.abs()
        hidden = (back < 0) | (back >= case.window if case.window > 0 else back < 0)
        if not case.full:
            s = s.masked_fill(hidden, -math.inf)
        if case.sinks:
            sink = inputs.sinks.double()[:, None, None].expand(-1, q_len, 1)
            s = torch.cat([s, sink], 2)
        p = torch.softmax(s, 2)[:, :, :s_len]
        outs.append((p @ v).transpose(0, 1))
        row, key = row + q_len, key + s_len
    return torch.cat(outs)
