"""Fixtures of all tests. A test that takes `device` or `context` runs on the CPU, and on a GPU where there is one.

FOLIO_TEST_CUDA=1 makes a missing GPU a failure. FOLIO_CUDA_LIBRARY names a libfolio_cuda.so.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import pytest

import folio


@functools.cache
def _context(device: str) -> folio.Context:
    return folio.Context("cuda" if device == "cuda" else "cpu")


@functools.cache
def _devices() -> list:
    if os.environ.get("FOLIO_TEST_CUDA") == "1":
        return ["cpu", "cuda"]
    try:
        _context("cuda")
    except folio.Error:
        return ["cpu"]
    return ["cpu", "cuda"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "arrays" in metafunc.fixturenames:
        kinds = [(library, device) for device in _devices() for library in ("numpy", "device", "torch")
                 if (library, device) != ("numpy", "cuda")]
        metafunc.parametrize("arrays", kinds, indirect=True, ids=lambda kind: "-".join(kind))
    elif "device" in metafunc.fixturenames:
        metafunc.parametrize("device", _devices(), scope="session")


@pytest.fixture
def context(device: str) -> folio.Context:
    """A context on the device; all tests share it."""
    return _context(device)


@pytest.fixture
def arrays(request: pytest.FixtureRequest) -> Any:
    """Arrays of each library that a device has: core_support.Arrays."""
    from core_support import Arrays

    library, device = request.param
    return Arrays(library, device, _context(device))


def pytest_report_header() -> str:
    return f"folio {folio.__version__} from {os.path.dirname(folio.__file__)}, devices: {', '.join(_devices())}"
