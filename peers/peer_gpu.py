"""peer_gpu.py: the peers on a GPU, and how their time is taken. Importing it makes the GPU torch's default device:
inputs and the check are made there. The classes are as those of peer_ops.py.
"""

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from peer_inputs import Refused
from peer_ops import refuse_other_kv, split_kinds

torch.set_default_device("cuda")


class Timer:
    """Seconds of the GPU between two events, as Folio's are taken: cold, other numbers were read into the L2 cache before."""

    IDLE_CYCLES = 2_000_000  # about a millisecond, in which the host gets ahead of the GPU

    def __init__(self):
        l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
        self.other = torch.empty(max(256 << 20, 4 * l2_bytes), dtype=torch.uint8)
        self.start, self.stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def time(self, run, warm, dirty):
        if warm:
            run()
        elif dirty:
            self.other.zero_()
        else:
            self.other.view(torch.int64).sum()
        torch.cuda._sleep(self.IDLE_CYCLES)
        self.start.record()
        run()
        self.stop.record()
        self.stop.synchronize()
        return 1e-3 * self.start.elapsed_time(self.stop)


class TorchFlash:
    """scaled_dot_product_attention by FlashAttention-2, a call per kind of sequence; K and V contiguous."""

    name = "torch_flash"
    package = "torch"
    backend = SDPBackend.FLASH_ATTENTION

    def __init__(self, threads):
        pass

    def prepare(self, case, inputs):
        if case.alibi or case.sinks or case.window > 0 or case.soft_cap > 0:
            raise Refused("no ALiBi, window, sinks or soft cap here")
        refuse_other_kv(case)
        if case.dtype == "f32":
            raise Refused("no kernel for it")
        if any(q_len not in (1, s_len) for _, q_len, s_len in case.kinds):
            raise Refused("is_causal takes a chunk for the first rows of its sequence")
        torch.cuda.empty_cache()
        q, k, v = split_kinds(case, inputs)
        k, v = ([x.transpose(1, 2) for x in of] for of in (k, v))
        outs = [None] * len(q)

        def run():
            # enable_gqa is as fast as heads of a group as rows, and at a batch of 1 cuDNN is five times as fast with
            # it; expanded heads cost decodes two to four times as much. Seen with PyTorch 2.11, cuDNN 9.19.
            with sdpa_kernel(self.backend):
                for i, (_, q_len, _) in enumerate(case.kinds):
                    outs[i] = F.scaled_dot_product_attention(
                        q[i], k[i], v[i], is_causal=q_len > 1 and not case.full, enable_gqa=True)

        return run, lambda: torch.cat([x.transpose(1, 2).flatten(0, 1) for x in outs])


class TorchCudnn(TorchFlash):
    """The same by cuDNN."""

    name = "torch_cudnn"
    backend = SDPBackend.CUDNN_ATTENTION

    @property
    def version(self):
        number = torch.backends.cudnn.version()
        cudnn = f"{number // 10000}.{number // 100 % 100}.{number % 100}"
        return f"{torch.__version__.split('+')[0]}/{cudnn}"


PEERS = (TorchFlash, TorchCudnn)
