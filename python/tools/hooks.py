"""Hatchling's hooks. Wheel: builds the C library with CMake, makes folio/_abi.py from it, and puts both into the
wheel. Sdist: adds xxHash's header. Metadata: the version is that of folio.h.

FOLIO_BUILD_DIR names a CMake build folder to use again; by default it is a temporary one.
"""

import shutil
import subprocess
import sys
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

PACKAGE = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PACKAGE / "tools"))
import sources  # noqa: E402


class Metadata(MetadataHookInterface):
    def update(self, metadata):
        metadata["version"] = sources.version(PACKAGE)
        metadata["optional-dependencies"] = {"cuda": [f"folio-attention-cuda=={metadata['version']}"],
                                             "plot": ["jinja2>=3.1", "matplotlib>=3.8"]}


class Build(sources.BuildHook):
    variable = "FOLIO_BUILD_DIR"

    def add_library(self, folder, version, build_data):
        sources.build(PACKAGE, folder, "a C11 compiler, make and xxHash's header (Debian, Ubuntu: "
                      "apt-get install gcc make libxxhash-dev)")
        made = folder / "wheel"
        subprocess.run([sys.executable, PACKAGE / "tools" / "generate_abi.py", made / "folio", made / "_abi.py"],
                       check=True)
        libraries = [made / "libfolio.so", made / "libfolio_openmp.so"]
        for file in [*libraries, made / "_abi.py"]:
            if version == "editable":
                shutil.copy(file, PACKAGE / "folio")
            else:
                build_data["force_include"][str(file)] = f"folio/{file.name}"
        build_data["shared_scripts"][str(made / "folio")] = "folio"
        build_data["tag"] = f"py3-none-{sources.platform_tag(*libraries, made / 'folio')}"
