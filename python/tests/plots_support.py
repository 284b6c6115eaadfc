"""Runs of the program `folio` that comes with the package, saved and loaded."""

from __future__ import annotations

import subprocess
import sysconfig
from pathlib import Path

from folio import plots

REPOSITORY = Path(__file__).resolve().parent.parent.parent
TRACES = REPOSITORY / "tests" / "data" / "traces"
FOLIO = str(Path(sysconfig.get_path("scripts")) / "folio")


def replay(folder: Path, *options: str, attention: bool = False) -> dict:
    """A replay's run as the package loads it; saved as run.json."""
    with open(folder / "run.json", "wb") as file:
        subprocess.run([FOLIO, "replay", "-o", "json", *([] if attention else ["--no-attention"]), *options], check=True,
                       stdout=file)
    return plots.load(str(folder / "run.json"))
