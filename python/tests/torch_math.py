"""numpy_math.py for torch tensors: what the tests of torch's interfaces compare with. Not a test itself."""

from __future__ import annotations

from typing import Any

import numpy_math
import torch

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def _numpy(x: Any) -> Any:
    return None if x is None else x.double().cpu().numpy()


def attention(q, k, v, *, slopes=None, sinks=None, first_pos=None, **options):
    """(out, lse) of one sequence in float64; see numpy_math.attention. Row i is at position first_pos + i."""
    out, lse = numpy_math.attention(*map(_numpy, (q, k, v)), slopes=_numpy(slopes), sinks=_numpy(sinks),
                                    first_query=first_pos, **options)
    return torch.from_numpy(out), torch.from_numpy(lse)


def check(out, expected, name: str = "out") -> None:
    """out within the bound of its dtype; equal where not finite."""
    numpy_math.check(_numpy(out), _numpy(expected), ("f32", "f16", "bf16")[DTYPES.index(out.dtype)], name=name)
