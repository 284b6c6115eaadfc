"""The package itself: its version, its types, its errors when the library is not there, `python -m folio`."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import folio

SOURCE = Path(__file__).resolve().parent.parent
REPOSITORY = SOURCE.parent


def run(*command: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, cwd="/")


def test_version_is_that_of_the_header() -> None:
    header = (REPOSITORY / "include" / "folio" / "folio.h").read_text()
    assert re.search(r'FOLIO_VERSION_STRING "(.*)"', header)[1] == folio.__version__
    sys.path.insert(0, str(SOURCE / "tools"))
    import sources

    assert sources.version(SOURCE) == sources.version(SOURCE / "cuda") == folio.__version__


def test_licence_is_the_repository_s() -> None:
    for copy in (SOURCE / "LICENSE", SOURCE / "cuda" / "LICENSE"):
        assert copy.read_text() == (REPOSITORY / "LICENSE").read_text()


def test_licences_of_what_is_linked_are_named() -> None:
    vendored = REPOSITORY / "src" / "vendor" / "blake2" / "COPYING"
    assert (SOURCE / "licenses" / "blake2.txt").read_text() == vendored.read_text()
    for folder, names in ((SOURCE, ("BSD-2-Clause", "CC0-1.0")),
                          (SOURCE / "cuda", ("LicenseRef-NVIDIA-CUDA-Toolkit-EULA",))):
        given = re.search(r'^license = "(.*)"', (folder / "pyproject.toml").read_text(), re.M)[1]
        assert given.split(" AND ") == ["Apache-2.0", *names]
        assert 'license-files = ["LICENSE", "licenses/*.txt"]' in (folder / "pyproject.toml").read_text()
    assert "cudart_static" in (SOURCE / "cuda" / "licenses" / "nvidia-cuda-runtime.txt").read_text()


def test_names_of_the_package_exist_and_have_docs() -> None:
    assert len(folio.__all__) == len(set(folio.__all__))
    for name in folio.__all__:
        thing = getattr(folio, name)
        assert name == "__version__" or thing.__doc__, name


def mypy(*arguments: str) -> subprocess.CompletedProcess:
    folder = str(Path(folio.__file__).parent.parent)
    installed = "site-packages" in folder  # where mypy looks by itself
    return run(sys.executable, "-m", "mypy", "--cache-dir", "/dev/null", *arguments,
               **({} if installed else {"MYPYPATH": folder}))


def test_types() -> None:
    """The package passes mypy, by the rules of pyproject.toml."""
    done = mypy("--config-file", str(SOURCE / "pyproject.toml"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no issues found" in done.stdout


def test_types_of_results(tmp_path: Path) -> None:
    """Numbers and names of objects have their types for mypy."""
    (tmp_path / "user.py").write_text("""import folio

def use(cache: folio.KVCache, plan: folio.Plan, at: folio.Attention, context: folio.Context, pool: folio.Pool) -> None:
    reveal_type((cache.num_blocks, cache.num_layers, cache.block_size, cache.num_kv_heads, cache.head_size))
    reveal_type((cache.v_head_size, plan.workspace_size, at.num_heads, context.num_threads, context.num_kernels))
    reveal_type((pool.num_groups, folio.DeviceArray(context, (1,), "f32").nbytes, cache.dtype, cache.layout))
    with cache as same:
        reveal_type(same)
""")
    done = mypy("--ignore-missing-imports", "--follow-imports", "silent", str(tmp_path / "user.py"))
    kinds = re.findall(r'Revealed type is "(.*)"', done.stdout)
    assert kinds == ["tuple[int, int, int, int, int]"] * 2 + ["tuple[int, int, str, str]", "folio.cache.KVCache"], done


def test_main_says_what_is_here() -> None:
    done = run(sys.executable, "-m", "folio")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"folio {folio.__version__}, Python")
    assert "backend   cpu: " in done.stdout and "backend   reference: " in done.stdout

    facts = json.loads(run(sys.executable, "-m", "folio", "--json").stdout)
    assert facts["version"] == folio.__version__
    assert Path(facts["library"]).name == "libfolio.so"
    by_name = {b["name"]: b for b in facts["backends"]}
    assert set(by_name) == set(folio.backends())
    with folio.Context("cpu") as context:
        assert by_name["cpu"]["level"] == context.level
        assert by_name["cpu"]["kernels"] == len(context.kernels()) > 0
        assert by_name["cpu"]["threads"] == context.num_threads
    assert by_name["cuda"]["available"] or len(by_name["cuda"]["reason"]) > 10
    assert facts["packages"]["torch"]["version"] == __import__("torch").__version__


def test_backend_info() -> None:
    cpu, reference = folio.backend_info("cpu"), folio.backend_info("reference")
    assert cpu.available and cpu.reason == "" and cpu.level in cpu.levels
    assert cpu.features.keys() == reference.features.keys() and "sliding_window" in cpu.features
    assert all(isinstance(reason, str) for reason in cpu.features.values())
    with pytest.raises(folio.ArgumentError, match="'?tpu'?"):
        folio.backend_info("tpu")


def failing_import(**environment: str) -> str:
    done = run(sys.executable, "-c", "import folio", **environment)
    assert done.returncode == 1
    return done.stderr.strip().splitlines()[-1]


def test_a_library_that_is_missing_is_named(tmp_path: Path) -> None:
    line = failing_import(FOLIO_LIBRARY=str(tmp_path / "libfolio.so"))
    assert line.startswith("ImportError: the library of folio cannot be loaded: ")
    assert str(tmp_path) in line and "FOLIO_LIBRARY" in line


def test_a_library_that_is_none_of_ours_is_named() -> None:
    line = failing_import(FOLIO_LIBRARY="libm.so.6")
    assert line == "ImportError: libm.so.6 is not libfolio: it has no folio_version"


def compile_library(folder: Path, source: str) -> str:
    (folder / "lib.c").write_text(source)
    path = folder / "lib.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", path, folder / "lib.c"], check=True)
    return str(path)


def test_a_library_of_another_version_is_named(tmp_path: Path) -> None:
    path = compile_library(tmp_path, 'const char *folio_version(void) { return "0.2.9"; }')
    line = failing_import(FOLIO_LIBRARY=path)
    assert line.startswith(f"ImportError: {path} is version 0.2.9 without folio_")
    assert line.endswith(f"this package was made for version {folio.__version__}")


def test_a_source_folder_that_is_not_built_says_so(tmp_path: Path) -> None:
    shutil.copytree(SOURCE / "folio", tmp_path / "folio", ignore=shutil.ignore_patterns("*.so", "_abi.py", "*.pyc"))
    line = failing_import(PYTHONPATH=str(tmp_path))
    assert "is the source folder of folio" in line and "pip install" in line
