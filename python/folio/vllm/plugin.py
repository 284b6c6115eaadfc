"""The entry point: registers Folio with vLLM. vLLM calls it in each of its processes, before it chooses a backend.

Nothing of vLLM or torch is imported until register() is called. It never raises: if anything is wrong, one line in
the log says what, and vLLM uses its own attention.
"""

from __future__ import annotations

import logging
import os
import sys

from .. import __version__
from . import TESTED_VERSIONS

log = logging.getLogger("vllm.folio")  # a child of vLLM's logger has its level and its handler


def register() -> None:
    """Registers Folio as vLLM's attention, unless FOLIO_VLLM is 0."""
    try:
        _say(logging.INFO, _register())
    except Exception as error:  # vLLM has to start, whatever is wrong here
        reason = " ".join(str(error).split())
        if not isinstance(error, Refused):
            reason = f"{type(error).__name__}: {reason}"
        _say(logging.WARNING, f"Folio {__version__} is not used, but vLLM's own attention: {reason}")


def _say(level: int, line: str) -> None:
    """One line in vLLM's log; on stderr in a process whose log vLLM has not set up yet."""
    if logging.getLogger("vllm").handlers:
        log.log(level, line)
    else:
        print(line, file=sys.stderr)


class Refused(Exception):
    """Folio does not register itself. The text says why."""


def _register() -> str:
    """Registers the backend. Returns the line for the log."""
    switch = os.environ.get("FOLIO_VLLM", "1").strip()
    if switch == "0":
        return f"Folio {__version__} is not used, but vLLM's own attention: FOLIO_VLLM is 0"
    if switch not in ("", "1"):
        raise Refused(f"FOLIO_VLLM is {switch!r}; it must be 0 or 1")
    import vllm
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from . import backend  # fails here, not when vLLM resolves the name, if vLLM's classes have changed

    version = vllm.__version__.split("+")[0]
    if current_platform.is_cpu():
        checked = _check(version)
        register_backend(AttentionBackendEnum.CPU_ATTN, backend.path(backend.CPUBackend))
        backend.leave_others(type(current_platform))
        return (f"Folio {__version__} is vLLM's CPU_ATTN ({checked}). Models with latent attention (DeepSeek) keep "
                "vLLM's CPU_MLA or AMX_MLA. FOLIO_VLLM=0 switches Folio off")
    if current_platform.is_cuda():
        register_backend(AttentionBackendEnum.CUSTOM, backend.path(backend.CUDABackend))
        return (f"Folio {__version__} is vLLM's backend CUSTOM (vLLM {version}; not tested inside vLLM on GPUs); "
                "choose it by --attention-backend CUSTOM")
    raise Refused(f"vLLM runs on {current_platform.device_type}, Folio on CPUs and NVIDIA GPUs")


def _check(version: str) -> str:
    """How far this version of vLLM is known; raises if Folio and vLLM's own operator differ with it."""
    if version in TESTED_VERSIONS:
        return f"tested with vLLM {version}"
    from . import selfcheck

    tested = ", ".join(TESTED_VERSIONS)
    try:
        error = selfcheck.run()
    except Exception as problem:
        raise Refused(f"it was tested with vLLM {tested}, and the self-check with vLLM {version} failed: "
                      f"{type(problem).__name__}: {problem}") from problem
    return f"tested with vLLM {tested}; with vLLM {version} the self-check passed, largest difference {error:.1e}"
