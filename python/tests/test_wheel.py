"""What is delivered: the wheel's tag, size and contents; the sdist, and a wheel made from it in an empty folder.

FOLIO_WHEEL names the wheel that was installed; without it one is built.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import folio

SOURCE = Path(__file__).resolve().parent.parent
EXAMPLES = SOURCE / "examples"


def run(*command: object, **environment: str) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, env=os.environ | environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build_wheel(source: Path, folder: Path) -> Path:
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    given = os.environ.get("FOLIO_WHEEL")
    return Path(given) if given else build_wheel(SOURCE, tmp_path_factory.mktemp("wheel"))


def check_wheel(wheel: Path) -> None:
    shown = " ".join(run(sys.executable, "-m", "auditwheel", "show", wheel).split())
    tag = re.search(r'consistent with the following platform tag: "(\w+)"', shown)[1]
    assert wheel.name == f"folio_attention-{folio.__version__}-py3-none-{tag}.whl"
    assert tag.startswith("manylinux_2_")
    assert wheel.stat().st_size < 10e6
    names = set(zipfile.ZipFile(wheel).namelist())
    info = f"folio_attention-{folio.__version__}"
    assert {"folio/libfolio.so", "folio/libfolio_openmp.so", "folio/_abi.py", "folio/py.typed", "folio/__main__.py",
            f"{info}.data/scripts/folio", f"{info}.dist-info/licenses/LICENSE",
            f"{info}.dist-info/licenses/licenses/blake2.txt", f"{info}.dist-info/licenses/licenses/xxhash.txt"} <= names
    assert {n for n in names if not n.startswith(("folio/", info))} == set()
    assert {n for n in names if n.endswith(".so")} == {"folio/libfolio.so", "folio/libfolio_openmp.so"}


def test_wheel(wheel: Path) -> None:
    check_wheel(wheel)


def test_wheel_has_every_module(wheel: Path) -> None:
    modules = {str(p.relative_to(SOURCE)) for p in (SOURCE / "folio").glob("**/*.py")}
    assert modules <= set(zipfile.ZipFile(wheel).namelist()) | {"folio/_abi.py"}


def test_installed_program(wheel: Path, tmp_path: Path) -> None:
    """The program in the wheel runs by itself and says the package's version."""
    zipfile.ZipFile(wheel).extract(f"folio_attention-{folio.__version__}.data/scripts/folio", tmp_path)
    program = next(tmp_path.glob("*/scripts/folio"))
    program.chmod(0o755)
    assert run(program, "--version").strip() == f"folio {folio.__version__}"


@pytest.mark.slow
def test_sdist_builds_by_itself(tmp_path: Path) -> None:
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", tmp_path / "sdist", SOURCE)
    archive = next((tmp_path / "sdist").glob("*.tar.gz"))
    names = {name.partition("/")[2] for name in tarfile.open(archive).getnames()}
    assert {"LICENSE", "README.md", "csrc/CMakeLists.txt", "csrc/xxhash/xxhash.h", "csrc/cli/main.c",
            "csrc/include/folio/folio.h", "tools/hooks.py"} <= names
    assert not [n for n in names if n.endswith((".so", "/_abi.py")) or n.startswith("cuda/")]
    empty = tmp_path / "empty"
    empty.mkdir()
    wheel = build_wheel(archive, empty)
    check_wheel(wheel)
    site = tmp_path / "site"
    run(sys.executable, "-m", "pip", "install", "--no-deps", "--target", site, wheel)
    assert str(site) in run(sys.executable, "-m", "folio", PYTHONPATH=str(site))
    assert run(site / "bin" / "folio", "--version").strip() == f"folio {folio.__version__}"
