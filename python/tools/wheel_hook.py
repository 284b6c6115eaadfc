"""Builds the C library with CMake, makes folio/_abi.py from it, and puts both into the wheel.

FOLIO_BUILD_DIR names a CMake build folder to use again; by default it is a temporary one.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).resolve().parent.parent


def platform_tag(*files):
    """manylinux with the newest version of glibc whose symbols the files use."""
    versions = [int(v) for file in files for v in re.findall(rb"GLIBC_2\.(\d+)", file.read_bytes())]
    return f"manylinux_2_{max(versions)}_{platform.machine()}"


class WheelHook(BuildHookInterface):
    def initialize(self, version, build_data):
        given = os.environ.get("FOLIO_BUILD_DIR")
        self.temporary = None if given else tempfile.TemporaryDirectory()
        build = Path(given or self.temporary.name)
        subprocess.run(["cmake", "-G", "Unix Makefiles", "-S", ROOT, "-B", build], check=True)
        subprocess.run(["cmake", "--build", build, "--parallel", str(os.cpu_count()), "--target", "wheel"], check=True)
        made = build / "wheel"
        subprocess.run([sys.executable, ROOT / "tools" / "generate_abi.py", made / "folio", made / "_abi.py"], check=True)
        libraries = [made / "libfolio.so", made / "libfolio_openmp.so"]
        for file in [*libraries, made / "_abi.py"]:
            if version == "editable":
                shutil.copy(file, ROOT / "folio")
            else:
                build_data["force_include"][str(file)] = f"folio/{file.name}"
        build_data["shared_scripts"][str(made / "folio")] = "folio"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_tag(*libraries, made / 'folio')}"

    def finalize(self, version, build_data, artifact_path):
        if self.temporary:
            self.temporary.cleanup()
