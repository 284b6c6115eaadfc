"""What the build hooks of both packages share: the C sources, their version, CMake, a wheel's platform tag, and the
order in which Hatchling asks for them."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

CMAKE = "cmake>=3.22"
# Versions of glibc, 2.N, that have a manylinux tag; from 34 on all have.
GLIBC_STEPS = (17, 24, 26, 27, 28, 31, 34)


def root(package: Path) -> Path:
    """The folder of the C sources: csrc/ in an sdist, else the repository that `package` is a folder of."""
    places = [package / "csrc", *package.parents]
    for place in places:
        if (place / "include" / "folio" / "folio.h").exists():
            return place
    sys.exit(f"the C sources are neither in {places[0]} nor in a folder above it")


def version(package: Path) -> str:
    """The version in folio.h, which is that of the packages too."""
    header = (root(package) / "include" / "folio" / "folio.h").read_text(encoding="utf-8")
    return re.search(r'#define FOLIO_VERSION_STRING "([0-9.]+)"', header)[1]


def build_requirements() -> list[str]:
    """CMake from PyPI, where the system has none or an old one."""
    if not shutil.which("cmake"):
        return [CMAKE]
    text = subprocess.run(["cmake", "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"(\d+)\.(\d+)", text)
    return [] if found and (int(found[1]), int(found[2])) >= (3, 22) else [CMAKE]


def xxhash() -> str:
    """The path of xxHash's header. With it in an sdist, that needs nothing but compilers."""
    for place in ("/usr/local/include", "/usr/include"):
        if Path(place, "xxhash.h").exists():
            return str(Path(place, "xxhash.h"))
    sys.exit("xxhash.h is missing: install libxxhash-dev (Debian, Ubuntu) or xxhash-devel")


def build(source: Path, folder: Path, needs: str, *options: str) -> None:
    """Configures and builds the target `wheel`. CMake or the compiler say what fails."""
    if not sys.platform.startswith("linux"):
        sys.exit(f"Folio runs on Linux, and this is {sys.platform}")
    jobs = str(len(os.sched_getaffinity(0)))
    for command in (["cmake", "-G", "Unix Makefiles", "-S", source, "-B", folder, *options],
                    ["cmake", "--build", folder, "--parallel", jobs, "--target", "wheel"]):
        status = subprocess.run(command).returncode
        if status:
            sys.exit(f"{command[0]} failed with status {status}; see above. Building Folio needs {needs}")


def platform_tag(*files: Path) -> str:
    """manylinux with the newest version of glibc whose symbols the files use."""
    versions = [int(v) for file in files for v in re.findall(rb"GLIBC_2\.(\d+)", file.read_bytes())]
    if not versions:
        return f"linux_{platform.machine()}"  # another C library
    newest = max(versions)
    return f"manylinux_2_{next((step for step in GLIBC_STEPS if step >= newest), newest)}_{platform.machine()}"


class BuildHook(BuildHookInterface):
    """Builds in the CMake folder that `variable` names in the environment, or in a temporary one. An sdist gets
    xxHash's header, a wheel what add_library(folder, version, build_data) puts into it."""

    variable = ""
    temporary = None

    def dependencies(self):
        return [] if self.target_name == "sdist" else build_requirements()

    def initialize(self, version, build_data):
        if self.target_name == "sdist":
            build_data["force_include"][xxhash()] = "csrc/xxhash/xxhash.h"
            return
        given = os.environ.get(self.variable)
        self.temporary = None if given else tempfile.TemporaryDirectory()
        build_data["pure_python"] = False
        self.add_library(Path(given or self.temporary.name), version, build_data)

    def finalize(self, version, build_data, artifact_path):
        if self.temporary:
            self.temporary.cleanup()
