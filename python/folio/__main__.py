"""python -m folio [--json]: what is installed here, and what it can use."""

from __future__ import annotations

import argparse
import json
import os
import sys
from importlib import metadata
from importlib.util import find_spec
from typing import Optional

from . import Context, Error, __version__, backend_info, backends
from ._library import lib

# package: the modules of folio that work with it
INTEGRATIONS = {"torch": ["folio.torch", "folio.flash_attn", "folio.flashinfer"],
                "transformers": ["folio.transformers"], "vllm": ["folio.vllm"], "jax": [], "cupy": [], "folio_cuda": []}
USES = {"folio_cuda": "the CUDA backend"}  # others: their arrays


def _version(package: str) -> Optional[str]:
    """The version of a package that can be imported; None if it cannot. Imports nothing."""
    if find_spec(package) is None:
        return None
    try:
        return metadata.version("folio-attention-cuda" if package == "folio_cuda" else package)
    except metadata.PackageNotFoundError:
        return "unknown"


def _backend(name: str) -> dict:
    info = backend_info(name)
    result = {"name": name, "available": info.available}
    if not info.available:
        return result | {"reason": info.reason}
    try:
        with Context(name) as context:
            return result | {"device": info.device, "level": context.level, "levels": info.levels,
                             "threads": context.num_threads, "kernels": context.num_kernels}
    except Error as error:
        return result | {"available": False, "reason": str(error)}


def about() -> dict:
    packages = {}
    for package, modules in INTEGRATIONS.items():
        packages[package] = {"version": _version(package), "modules": [m for m in modules if find_spec(m)]}
    return {"version": __version__, "library": os.path.realpath(lib._name), "python": sys.version.split()[0],
            "backends": [_backend(name) for name in backends()], "packages": packages}


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _print(facts: dict) -> None:
    print(f"folio {facts['version']}, Python {facts['python']}")
    print(f"library   {facts['library']}")
    for b in facts["backends"]:
        if b["available"]:
            print(f"backend   {b['name']}: {b['device']}" + (f", level {b['level']}" if b["level"] else "")
                  + f", {_count(b['threads'], 'thread')}, {_count(b['kernels'], 'attention kernel')}")
        else:
            print(f"backend   {b['name']}: not available: {b['reason']}")
    for name, package in facts["packages"].items():
        if package["version"] is None:
            print(f"package   {name}: not installed" + (f" ({USES[name]})" if name in USES else ""))
        else:
            uses = ", ".join(package["modules"]) or USES.get(name, "its arrays, through DLPack")
            print(f"package   {name} {package['version']}: {uses}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m folio", description="Says what is installed here.")
    parser.add_argument("--json", action="store_true", help="the same as JSON")
    facts = about()
    if parser.parse_args().json:
        print(json.dumps(facts, indent=2))
    else:
        _print(facts)


if __name__ == "__main__":
    main()
