"""python -m folio: what is installed here, and what it can use; pictures and pages of saved runs."""

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
    packages = {package: {"version": _version(package), "modules": [m for m in modules if find_spec(m)]}
                for package, modules in INTEGRATIONS.items()}
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


HELP = """\
Without a command, says what is installed here and what it can use.

Pictures of what the program `folio` measured, which need the extra "plot" (pip install 'folio-attention[plot]'):

    folio bench -o json > bench.json        a benchmark
    python -m folio plot bench.json         draws bench.svg: the cases under the machine's ceilings, a roofline
    python -m folio plot new.json --before old.json    with the points of an earlier run

    folio replay -o json > replay.json      a trace of requests, served
    python -m folio report replay.json      writes replay.html: figures, curves and tables on one page
    python -m folio plot replay.json        draws replay.svg: the curves alone

SVG and pages follow the reader's light or dark mode. A file whose name ends with .png is a PNG.
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m folio", description=HELP,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="what is installed here, as JSON")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, suffix, told in (("plot", "svg", "draw a saved run of folio bench or folio replay"),
                               ("report", "html", "make a page of a saved run of folio replay")):
        command = commands.add_parser(name, help=told, description=f"{told[0].upper()}{told[1:]}.")
        command.add_argument("run", metavar="run.json", help="saved with -o json; - is standard input")
        command.add_argument("-o", "--output", metavar="FILE", help=f"default: the same name with .{suffix}")
        command.set_defaults(suffix=suffix)
        if name == "plot":
            command.add_argument("--before", metavar="old.json", help="an earlier run of folio bench, drawn too")
    return parser


def _draw(options: argparse.Namespace) -> str:
    """Does a command; what went wrong, in a sentence, or nothing."""
    from . import plots

    if options.run == "-" and not options.output:
        return "a run from standard input needs -o FILE"
    path = options.output or os.path.splitext(options.run)[0] + "." + options.suffix
    try:
        run = plots.load(options.run)
        if options.command == "plot":
            plots.plot(run, path, plots.load(options.before) if options.before else None)
        else:
            plots.report(run, path)
    except plots.RunError as error:
        return str(error)
    except OSError as error:
        return f"{path}: {error.strerror}"
    except ModuleNotFoundError as error:
        if error.name not in ("matplotlib", "jinja2"):
            raise
        return f"{error.name} is not installed: pip install 'folio-attention[plot]'"
    print(path)
    return ""


def main() -> int:
    options = _parser().parse_args()
    if options.command:
        wrong = _draw(options)
        if wrong:
            print(f"python -m folio {options.command}: {wrong}", file=sys.stderr)
        return 1 if wrong else 0
    facts = about()
    if options.json:
        print(json.dumps(facts, indent=2))
    else:
        _print(facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
