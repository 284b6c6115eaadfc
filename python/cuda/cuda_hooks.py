"""Hatchling's hooks: builds libfolio_cuda.so with CMake and nvcc, and puts it into the wheel.

FOLIO_CUDA_ARCHITECTURES names the cards, such as 90-real; by default all from sm_80 on.
FOLIO_CUDA_BUILD_DIR names a CMake build folder to use again; by default it is a temporary one.
"""

import os
import shutil
import sys
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

PACKAGE = Path(__file__).resolve().parent
sys.path[:0] = [str(PACKAGE), str(PACKAGE.parent / "tools")]  # where sources.py is in an sdist, in the repository
import sources  # noqa: E402


class Metadata(MetadataHookInterface):
    def update(self, metadata):
        metadata["version"] = sources.version(PACKAGE)


class Build(sources.BuildHook):
    variable = "FOLIO_CUDA_BUILD_DIR"

    def add_library(self, folder, version, build_data):
        sources.build(PACKAGE, folder, "nvcc, a C11 compiler, make and xxHash's header (Debian, Ubuntu: "
                      "apt-get install nvidia-cuda-toolkit gcc g++ make libxxhash-dev)",
                      f"-DFOLIO_CUDA_ARCHITECTURES={os.environ.get('FOLIO_CUDA_ARCHITECTURES', '')}")
        library = folder / "wheel" / "libfolio_cuda.so"
        if version == "editable":
            shutil.copy(library, PACKAGE / "folio_cuda")
        else:
            build_data["force_include"][str(library)] = "folio_cuda/libfolio_cuda.so"
        build_data["tag"] = f"py3-none-{sources.platform_tag(library)}"
