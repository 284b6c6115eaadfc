"""Which arrays are taken, without a copy, and which are rejected: NumPy, DLPack, JAX, strides, devices."""

from __future__ import annotations

import ctypes
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import folio
import folio.flash_attn
import folio.flashinfer
from core_support import Arrays, Step
from folio import _abi as abi
from folio._arrays import array, dtype_of
from numpy_math import attention, check, random


@pytest.fixture
def numpy_step() -> Step:
    return Step(Arrays("numpy", "cpu", folio.Context("cpu")), [4, 1], [10, 20])


# --- a producer of DLPack made by hand ---


class DLTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
                ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
                ("lanes", ctypes.c_uint16), ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p),
                ("byte_offset", ctypes.c_uint64)]


class Managed(ctypes.Structure):
    _fields_ = [("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class Versioned(ctypes.Structure):
    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("context", ctypes.c_void_p),
                ("deleter", ctypes.c_void_p), ("flags", ctypes.c_uint64), ("tensor", DLTensor)]


new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype, new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
CAPSULE_END = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)


class Producer:
    """A NumPy array behind DLPack, old or with a version. Counts its capsules that are alive."""

    def __init__(self, value: np.ndarray, versioned: bool = True, flags: int = 0, offset: int = 0, kind: int = 1,
                 code: Any = None, lanes: int = 1, strides: bool = True) -> None:
        self.value, self.versioned, self.alive = value, versioned, 0
        shape = (ctypes.c_int64 * value.ndim)(*value.shape)
        steps = (ctypes.c_int64 * value.ndim)(*[s // value.itemsize for s in value.strides])
        codes = {"float32": (2, 32), "float16": (2, 16), "bfloat16": (4, 16), "float64": (2, 64), "int8": (0, 8)}
        tensor = DLTensor(value.ctypes.data - offset, kind, 0, value.ndim, *(code or codes[value.dtype.name]), lanes,
                          ctypes.addressof(shape), ctypes.addressof(steps) if strides else None, offset)
        self.struct = Versioned(1, 0, None, None, flags, tensor) if versioned else Managed(tensor)
        self.keep, self.kind = (shape, steps), kind
        self.end = CAPSULE_END(self._end)

    def _end(self, _: int) -> None:
        self.alive -= 1

    def __dlpack_device__(self) -> tuple:
        return self.kind, 0

    def __dlpack__(self, *, stream: Any = None, **options: Any) -> Any:
        if not self.versioned and "max_version" in options:
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        self.alive += 1
        name = b"dltensor_versioned" if self.versioned else b"dltensor"
        return new_capsule(ctypes.addressof(self.struct), name, ctypes.cast(self.end, ctypes.c_void_p))


@pytest.mark.parametrize("versioned", [True, False])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_dlpack_in(versioned: bool, dtype: str) -> None:
    q, k, v = (random((9, heads, 32), dtype, i) for i, heads in enumerate((4, 2, 2)))
    out = np.zeros_like(q)
    producers = [Producer(a, versioned, offset=64) for a in (q, k, v, out)]
    assert folio.attend(*producers[:3], out=producers[3]) is producers[3]
    check(out, attention(q, k, v)[0], dtype)
    assert [p.alive for p in producers] == [0, 0, 0, 0]  # each capsule was given back


def test_dlpack_without_strides_is_contiguous() -> None:
    q = random((5, 4, 32))
    check(folio.attend(*[Producer(q, strides=False)] * 3), attention(q, q, q)[0])


def test_dlpack_that_is_read_only() -> None:
    q = random((5, 4, 32))
    reader = Producer(q, flags=1)
    check(folio.attend(reader, reader, reader), attention(q, q, q)[0])  # reading is fine
    with pytest.raises(folio.ArgumentError, match="^out is read-only$"):
        folio.attend(reader, reader, reader, out=reader)


def test_dlpack_of_other_devices_and_types() -> None:
    q = random((5, 4, 32))
    with pytest.raises(folio.ArgumentError, match="DLPack device 10 is neither a CPU nor an NVIDIA GPU"):
        folio.attend(*[Producer(q, kind=10)] * 3)
    with pytest.raises(folio.ArgumentError, match=r"DLPack type \(code 5, 64 bits\) is not supported"):
        folio.attend(*[Producer(q, code=(5, 64))] * 3)
    with pytest.raises(folio.ArgumentError, match="is not supported"):
        folio.attend(*[Producer(q, lanes=2)] * 3)


def jax_on_cpu() -> Any:
    """jax.numpy; where there is a GPU, JAX would use that."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    return jax.numpy


def test_jax_arrays_are_read_and_never_written() -> None:
    jnp = jax_on_cpu()
    q, k, v = (random((9, heads, 32), seed=i) for i, heads in enumerate((4, 2, 2)))
    jq, jk, jv = map(jnp.asarray, (q, k, v))
    assert array(jq).data == jq.unsafe_buffer_pointer()  # no copy
    out = folio.attend(jq, jk, jv)
    assert type(out) is np.ndarray
    check(out, attention(q, k, v)[0])
    bf16 = [jnp.asarray(a, jnp.bfloat16) for a in (q, k, v)]
    check(folio.attend(*bf16), attention(*[np.asarray(a) for a in bf16])[0], "bf16")
    with pytest.raises(folio.ArgumentError, match="^out is read-only$"):
        folio.attend(jq, jk, jv, out=jnp.zeros((9, 4, 32)))


# --- zero copy ---


def test_arrays_are_taken_where_they_are(arrays: Arrays) -> None:
    value = arrays.put(random((6, 4, 32), "bf16"))
    a = array(value)
    where = {"numpy": lambda: value.ctypes.data, "torch": lambda: value.data_ptr(),
             "device": lambda: value._as_parameter_}[arrays.library]()
    assert (a.data, a.dtype, tuple(a.shape), tuple(a.strides)) == (where, "bfloat16", (6, 4, 32), (128, 32, 1))
    assert a.device == (arrays.device, 0)


def test_device_array_in_torch_and_back(context: folio.Context) -> None:
    """DLPack out: torch sees the same memory, and keeps it alive after the DeviceArray is gone."""
    value = random((6, 4, 32), "bf16")
    own = folio.DeviceArray.copy_of(context, value)
    tensor = torch.from_dlpack(own)
    assert tensor.data_ptr() == own._as_parameter_ and tensor.dtype == torch.bfloat16
    assert tensor.device.type == context.place[0]
    tensor[0] = 3.0
    if not context.on_host:
        torch.cuda.synchronize()
    changed = own.numpy()
    assert (changed[0] == 3).all()
    np.testing.assert_array_equal(changed[1:], value[1:])
    del own
    assert (tensor[1:].float().cpu().numpy() == value[1:].astype(np.float32)).all()


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "int8", "fp8_e4m3", "fp8_e5m2", "f64"])
def test_device_array_of_each_dtype(context: folio.Context, dtype: str) -> None:
    kind = folio.DeviceArray(context, (1,), dtype).dtype
    value = np.arange(12, dtype=np.float32).reshape(3, 4).astype(kind)
    own = folio.DeviceArray.copy_of(context, value)
    assert own.shape == (3, 4) and own.dtype == kind and own.nbytes == 12 * kind.itemsize
    np.testing.assert_array_equal(own.numpy(), value)
    assert kind.name in repr(own)
    assert torch.from_dlpack(own).element_size() == kind.itemsize


def test_capsules_that_nobody_takes_are_forgotten(context: folio.Context) -> None:
    from folio.device import _exported

    own = folio.DeviceArray(context, (4,), "f32")
    before = len(_exported)
    capsule = own.__dlpack__()
    assert len(_exported) == before + 1
    del capsule
    assert len(_exported) == before


def test_numpy_reads_a_cache_in_place() -> None:
    cache = folio.KVCache(folio.Context("cpu"), num_blocks=3, block_size=4, num_kv_heads=2, head_size=8, dtype="f32",
                          layout="nhd")
    k, v = (np.from_dlpack(a) for a in cache.arrays())
    assert k.shape == v.shape == (3, 4, 2, 8)
    rows = random((1, 2, 8))
    cache.write(0, rows, 2 * rows, [6])  # block 1, offset 2
    np.testing.assert_array_equal(k[1, 2], rows[0])
    np.testing.assert_array_equal(v[1, 2], 2 * rows[0])


# --- strides ---


@pytest.fixture
def views(arrays: Arrays) -> Arrays:
    """Arrays of those libraries that have views."""
    if arrays.library == "device":
        pytest.skip("a DeviceArray has no views")
    return arrays


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_fused_qkv(views: Arrays, dtype: str) -> None:
    """q, k and v as columns of one projection's result, heads joined or not."""
    qkv = random((21, (4 + 2 + 2) * 32), dtype)
    q, k, v = qkv[:, :128], qkv[:, 128:192], qkv[:, 192:]
    step = Step(views, [21], [21], dtype=dtype)
    plan = step.ready()
    expected = attention(q.reshape(21, 4, 32), k.reshape(21, 2, 32), v.reshape(21, 2, 32))[0]
    fused = views.put(qkv)
    out = plan.forward(fused[:, :128], fused[:, 128:192], fused[:, 192:], cache=step.cache)
    assert tuple(out.shape) == (21, 128)
    check(views.get(out).reshape(21, 4, 32), expected, dtype)
    wide = fused.reshape(21, 8, 32)
    check(views.get(plan.forward(wide[:, :4], wide[:, 4:6], wide[:, 6:], cache=step.cache)), expected, dtype)


@pytest.mark.parametrize("seqs, each", [(3, 2), (6, 1), (1, 6)], ids=str)
def test_rows_by_sequence(views: Arrays, seqs: int, each: int) -> None:
    """[seqs, rows, heads, size] with one stride between rows; others have none and are refused."""
    room = random((seqs, 2, 8, 32) if each == 1 else (seqs, each, 8, 32))
    rows = room[:, :each].reshape(seqs * each, 8, 32)
    step = Step(views, [each] * seqs, [each] * seqs)
    plan, fused = step.ready(), views.put(room)[:, :each]
    out = plan.forward(fused[:, :, :4], fused[:, :, 4:6], fused[:, :, 6:], cache=step.cache)
    assert tuple(out.shape) == (seqs, each, 4, 32)
    for i in range(seqs):
        part = rows[i * each:(i + 1) * each]
        check(views.get(out)[i], attention(part[:, :4], part[:, 4:6], part[:, 6:])[0])
    if seqs > 1 and each > 1:
        with pytest.raises(folio.ArgumentError, match=r"q has shape \(3, 2, 4, 32\); it must be \[tokens, 4, 32\]"):
            plan.forward(views.put(random((3, 3, 4, 32)))[:, :2], cache=step.cache)


def test_heads_before_tokens(views: Arrays) -> None:
    q, k, v = (random((heads, 9, 32), seed=heads) for heads in (4, 2, 2))
    out = views.put(np.zeros_like(q))
    folio.attend(*(views.put(a).swapaxes(0, 1) for a in (q, k, v)), out=out.swapaxes(0, 1), context=views.context)
    check(views.get(out).swapaxes(0, 1), attention(*(a.swapaxes(0, 1) for a in (q, k, v)))[0])


def test_strided_out(views: Arrays) -> None:
    q = random((5, 4, 32))
    room = views.put(np.full((5, 6, 40), 7, np.float32))
    folio.attend(*[views.put(q)] * 3, out=room[:, 1:5, :32], context=views.context)
    room = views.get(room)
    check(room[:, 1:5, :32], attention(q, q, q)[0])
    assert (room[:, 0] == 7).all() and (room[:, 5] == 7).all() and (room[:, :, 32:] == 7).all()


def test_expanded_bias(views: Arrays) -> None:
    """A dim that is repeated by a stride of 0 is broadcast."""
    step = Step(views, [3, 2], [20, 9])
    plan = step.ready()
    bias = np.zeros(20, np.float32)
    bias[0] = -np.inf  # nobody sees the first key
    wide = views.put(bias).expand(2, 4, 3, 20) if views.library == "torch" else np.broadcast_to(bias, (2, 4, 3, 20))
    out = plan.forward(*step.inputs(), cache=step.cache, bias=wide)
    check(views.get(out), step.expected(bias=np.broadcast_to(bias, (2, 4, 3, 20)))[0])


# --- rejected, with the sentence, and nothing written ---


def test_read_only_arrays_are_rejected() -> None:
    q = random((5, 4, 32))
    out = np.zeros_like(q)
    out.flags.writeable = False
    with pytest.raises(folio.ArgumentError, match="^out is read-only$"):
        folio.attend(q, q, q, out=out)
    frozen = np.zeros((4, 16, 2, 32), np.float32)
    frozen.flags.writeable = False
    with pytest.raises(folio.ArgumentError, match=r"^v\[0\] is read-only$"):
        folio.KVCache.wrap([np.zeros((4, 16, 2, 32), np.float32)], [frozen])


@pytest.mark.parametrize("change, message", [
    (lambda a: a[:, :3], r"q has shape \(5, 3, 32\); it must be \[tokens, 4, 32\] or \[tokens, 128\]"),
    (lambda a: a[0], r"q has shape \(4, 32\)"),
    (lambda a: a[..., ::-1], "the numbers of one head are -1 elements apart"),
    (lambda a: a[::-1], "q has strides .* must be positive"),
    (lambda a: np.repeat(a, 2, 2)[..., ::2], "the numbers of one head are 2 elements apart"),
    (lambda a: a.astype(np.int32), "q has dtype int32; it must be f32, f16 or bf16"),
    (lambda a: a.astype(">f4"), "bytes are in the order of other machines"),
    (lambda a: np.zeros(a.shape, [("a", np.float32), ("b", np.int8)])["a"], "strides .* are not multiples of its 4-byte"),
    (lambda a: a.tolist(), "list is not an array"),
    (lambda a: None, "NoneType is not an array"),
], ids=range(10))
def test_bad_arrays(numpy_step: Step, change: Any, message: str) -> None:
    plan = numpy_step.ready()
    q, k, v = numpy_step.inputs()
    out = np.full_like(q, 7)
    with pytest.raises(folio.ArgumentError, match=message):
        plan.forward(change(q), k, v, cache=numpy_step.cache, out=out)
    assert (out == 7).all()


def test_the_library_s_sentence_is_the_exception_s_text(numpy_step: Step) -> None:
    plan = numpy_step.ready()
    q, k, v = numpy_step.inputs()
    out = np.full_like(q, 7)
    with pytest.raises(folio.ArgumentError) as caught:
        plan.forward(q[:3], k, v, cache=numpy_step.cache, out=out)
    assert str(caught.value) and str(caught.value) == folio._library.lib.folio_last_error().decode()
    assert isinstance(caught.value, (folio.Error, ValueError)) and (out == 7).all()


def test_errors_have_python_s_kinds() -> None:
    kinds = {folio.ArgumentError: ValueError, folio.UnsupportedError: NotImplementedError,
             folio.OutOfMemoryError: MemoryError, folio.DeviceError: RuntimeError, folio.StoreError: OSError,
             folio.InternalError: RuntimeError, folio.TooLargeError: ValueError, folio.FullError: folio.Error}
    for kind, parent in kinds.items():
        assert issubclass(kind, folio.Error) and issubclass(kind, parent)
    from folio._library import _ERRORS

    statuses = {value for name, value in vars(abi).items() if name.startswith("FOLIO_ERR_")}
    assert statuses == set(_ERRORS) and set(_ERRORS.values()) == set(kinds)


def test_dtype_names() -> None:
    for names, value in ((["f32", "float32", np.float32, torch.float32, np.dtype("f4")], abi.FOLIO_F32),
                         (["bf16", "bfloat16", ml_dtypes.bfloat16, torch.bfloat16], abi.FOLIO_BF16),
                         (["f16", np.float16, torch.float16], abi.FOLIO_F16),
                         (["fp8_e4m3", "float8_e4m3fn", torch.float8_e4m3fn], abi.FOLIO_FP8_E4M3),
                         (["fp8_e5m2", ml_dtypes.float8_e5m2], abi.FOLIO_FP8_E5M2),
                         (["int8", np.int8], abi.FOLIO_INT8)):
        assert [dtype_of(name) for name in names] == [value] * len(names)
    for bad in ("f128", np.int32, torch.int64, object()):
        with pytest.raises(folio.ArgumentError, match="is not one of f32, f16, bf16"):
            dtype_of(bad)


def test_index_arrays_of_every_kind(numpy_step: Step) -> None:
    """Lists, other integer types, torch tensors; not floats, nor numbers that do not fit."""
    batch = folio.Batch(block_size=16)
    for lens in ([3, 4], np.int64([3, 4]), torch.tensor([3, 4]), np.uint8([3, 4]), Producer_of([3, 4])):
        batch.set_block_tables([[0], [1]], lens)
        assert batch.info()["max_seq_len"] == 4
    with pytest.raises(folio.ArgumentError, match="seq_lens has dtype float64"):
        batch.set_block_tables([[0], [1]], [3.0, 4.0])
    with pytest.raises(folio.ArgumentError, match="seq_lens has values outside of int32"):
        batch.set_block_tables([[0], [1]], [3, 2**40])
    with pytest.raises(folio.ArgumentError, match="seq_lens is missing"):
        batch.set_block_tables([[0], [1]], None)


def Producer_of(values: list) -> Any:
    jnp = jax_on_cpu()

    return jnp.asarray(values, jnp.int32)


def test_arrays_of_another_device_are_rejected(device: str) -> None:
    if device == "cuda":
        context = folio.Context("cuda")
        q = random((5, 4, 32))
        with pytest.raises(folio.ArgumentError, match="q is on cpu:0, but the context is on cuda:0"):
            folio.attend(q, q, q, context=context)
    else:
        meta = torch.empty(5, 4, 32, device="meta")
        with pytest.raises(folio.ArgumentError, match="q is on meta:0, but the context is on cpu:0"):
            folio.attend(meta, meta, meta, context=folio.Context("cpu"))


# --- memory of closed objects ---


def _view(source: Any, library: str) -> Any:
    return np.from_dlpack(source) if library == "numpy" else torch.from_dlpack(source)


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("last", ["object", "first view", "second view"])
@pytest.mark.parametrize("kind", ["array", "cache"])
def test_close_leaves_the_memory_of_views(library: str, last: str, kind: str) -> None:
    """The memory of a closed object is freed with the last view of it, in any order."""
    ctx = folio.Context("cpu")
    if kind == "array":
        owner: Any = folio.DeviceArray.copy_of(ctx, np.arange(1 << 20, dtype=np.float32))
        views = [_view(owner, library) for _ in range(2)]
    else:
        owner = folio.KVCache(ctx, num_blocks=64, block_size=16, num_kv_heads=8, head_size=64, dtype="f32")
        tokens = 64 * 16  # all of them: a cache begins with any numbers, NaN too
        owner.write(0, *[np.ones((tokens, 8, 64), np.float32)] * 2, list(range(tokens)))
        views = [_view(a, library) for a in owner.arrays(0)]
        sources = owner.arrays(0)
    end, want = owner._end, [v + 0 for v in views]
    with owner:
        pass  # closes it
    assert end.alive
    with pytest.raises(folio.ArgumentError, match="is closed"):
        _view(owner if kind == "array" else sources[0], library)
    ctx.close()
    if last != "object":
        owner = sources = None
    order = [1, 0] if last == "first view" else [0, 1]
    for left, i in enumerate(order):
        assert end.alive and bool((views[i] == want[i]).all())
        views[i] = None
    assert not end.alive


def test_close_without_views_frees_at_once() -> None:
    ctx = folio.Context("cpu")
    array_ = folio.DeviceArray(ctx, (3,), "f32")
    torch.from_dlpack(array_)  # gone again
    capsule = array_.__dlpack__()  # and one that nobody took
    del capsule
    array_.close()
    assert not array_._end.alive


def test_contexts_close_before_their_arrays() -> None:
    ctx = folio.Context("cpu")
    a, b = (folio.DeviceArray(ctx, (3,), "f32") for _ in range(2))
    ctx.close()
    assert ctx._end.alive
    a.close()
    assert ctx._end.alive
    del b
    assert not ctx._end.alive


# --- torch tensors whose memory is not their numbers ---


def test_negative_bit_is_rejected() -> None:
    """The memory of such a tensor holds the numbers with the other sign."""
    from folio.flash_attn import flash_attn_func

    x = torch.randn(4, 2, 64)
    negative = torch._neg_view(x)
    cache = folio.KVCache(num_blocks=2, num_kv_heads=2, head_size=64, dtype="f32")
    at = folio.Attention(num_heads=2, head_size=64)
    plan = folio.Plan(at, cache=cache, max_seqs=1, max_query_tokens=4, max_seq_len=32)
    batch = folio.Batch(cache=cache)
    batch.add(4, 4, [0])
    plan.update(batch)
    want = plan.forward(-x, x, x, cache=cache)
    for i in range(3):
        arguments = [x, x, x]
        arguments[i] = negative
        for call in (lambda *a: plan.forward(*a, cache=cache), folio.attend,
                     lambda *a: flash_attn_func(*[t[None] for t in a])):
            with pytest.raises(folio.ArgumentError, match="resolve_neg"):
                call(*arguments)
    with pytest.raises(folio.ArgumentError, match="resolve_neg"):
        plan.forward(x, x, x, cache=cache, out=negative)
    with pytest.raises(folio.ArgumentError, match="resolve_neg"):
        plan.forward(x, x, x, cache=cache, slopes=torch._neg_view(torch.ones(2)))
    with pytest.raises(folio.ArgumentError, match="resolve_neg"):
        plan.forward(x, x, x, cache=cache, bias=torch.randn(1, 1, 4, 4, dtype=torch.complex64).conj().imag)
    with pytest.raises(folio.ArgumentError, match="resolve_neg"):
        cache.write(0, negative, x, range(4))
    assert torch.equal(plan.forward(negative.resolve_neg(), x, x, cache=cache), want)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_sparse_tensors_are_rejected() -> None:
    x = torch.ones(4, 2, 64)
    for sparse in (x.to_sparse(), torch.eye(4).to_sparse_csr()):
        with pytest.raises(folio.ArgumentError, match="layout torch.sparse_"):
            folio.attend(sparse, x, x)


# --- read-only results ---


def test_read_only_lse(numpy_step: Step) -> None:
    plan = numpy_step.ready()
    lse = np.empty((5, 4), np.float32)
    lse.flags.writeable = False
    with pytest.raises(folio.ArgumentError, match="^lse is read-only$"):
        plan.forward(*numpy_step.inputs(), cache=numpy_step.cache, lse=lse)


# --- what another library may get wrong ---


def test_dlpack_of_another_version_is_rejected() -> None:
    producer = Producer(random((2, 2, 8)))
    producer.struct.major = 2
    with pytest.raises(folio.ArgumentError, match="version is 2.0; it must be 1.x"):
        array(producer)


def test_a_capsule_on_another_device_is_rejected() -> None:
    for versioned in (False, True):
        producer = Producer(random((2, 2, 8)), versioned)
        producer.struct.tensor.device_type = 2
        with pytest.raises(folio.ArgumentError, match="capsule is on device 2:0, but .* gives 1:0"):
            array(producer)
        assert producer.alive == 0


def test_no_capsule_is_rejected() -> None:
    producer = Producer(random((2, 2, 8)))
    for made in (None, new_capsule(ctypes.addressof(producer.struct), b"used_dltensor", None)):
        producer.__class__ = type("Odd", (Producer,), {"__dlpack__": lambda self, made=made, **_: made})
        with pytest.raises(folio.ArgumentError, match=r"Odd.__dlpack__\(\) gave no DLPack capsule"):
            array(producer)


@pytest.mark.parametrize("bad", [99, -1, "void", object])
def test_dtypes_that_are_none(bad: Any) -> None:
    with pytest.raises(folio.ArgumentError, match="dtype .* is not one of f32"):
        dtype_of(bad)


def test_elements_without_bytes_are_rejected() -> None:
    with pytest.raises(folio.ArgumentError, match=r"dtype \|V0, whose elements have no bytes"):
        array(np.zeros((2, 2, 8), "V0"))


def test_arrays_without_a_shape_are_named() -> None:
    q, rows = Producer(random((1, 1, 4, 32))), random((1, 16, 4, 32))
    for call in (lambda: folio.flash_attn.flash_attn_func(q, q, q),
                 lambda: folio.flash_attn.flash_attn_with_kvcache(q, rows, rows, cache_seqlens=3),
                 lambda: folio.flash_attn.flash_attn_with_kvcache(rows[:, :1], rows, rows, q, q, cache_seqlens=3)):
        with pytest.raises(TypeError, match="need a shape, which Producer has not"):
            call()
    with pytest.raises(TypeError, match="must be torch tensors"):
        folio.flashinfer.single_prefill_with_kv_cache(q, q, q)


# --- arrays that other threads change ---


def test_index_arrays_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = folio.KVCache(folio.Context("cpu"), num_blocks=3, block_size=4, num_kv_heads=2, head_size=8, dtype="f32")
    k, slots, pairs = random((3, 2, 8)), np.array([1, 2, 3]), np.array([[0, 1]])
    for name, call in (("folio_kv_cache_write", lambda: cache.write(0, k, k, slots)),
                       ("folio_kv_cache_gather", lambda: cache.gather(0, slots)),
                       ("folio_kv_cache_copy_blocks", lambda: cache.copy_blocks(pairs))):
        function = getattr(folio.cache.lib, name)

        def other_thread(*args: Any) -> int:
            slots[:], pairs[:] = 1 << 40, 1 << 40
            return function(*args)

        monkeypatch.setattr(folio.cache.lib, name, other_thread)
        call()
        monkeypatch.undo()
        slots[:], pairs[:] = [1, 2, 3], [[0, 1]]
    assert (cache.gather(0, slots)[0] == k).all()
