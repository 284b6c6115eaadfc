"""Pictures and pages of what the program `folio` saved with `-o json`.

`python -m folio plot` draws a run of `folio bench` as a roofline, and a replay's curves. `python -m folio report`
writes a replay as one page of HTML. They need matplotlib and jinja2: pip install 'folio-attention[plot]'.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


class RunError(Exception):
    """A file that is no saved run, or a run that has nothing to draw."""


def _printable(value: Any) -> Any:
    """The same with U+FFFD for characters that XML forbids."""
    if isinstance(value, str):
        return "".join(c if c.isprintable() else "\ufffd" for c in value)
    if isinstance(value, dict):
        return {key: _printable(of) for key, of in value.items()}
    return [_printable(of) for of in value] if isinstance(value, list) else value


def load(path: str) -> dict:
    """A saved run; "-" is standard input. Of a bench that was killed: the cases that were complete."""
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        raise RunError(f"{path}: {error.strerror}") from None
    text = data.decode("utf-8", "replace")
    last = text.rfind("\n    }")  # the end of a case, as folio writes it
    for whole in (text, text[:last] + "\n    }]}"):
        try:
            run = json.loads(whole)
        except ValueError:
            continue
        if isinstance(run, dict) and ("series" in run or "results" in run):
            return _printable(run)
    raise RunError(f"{path}: not a run saved by 'folio bench -o json' or 'folio replay -o json'")


def plot(run: dict, path: str, before: dict | None = None) -> None:
    """Draws a run to a file: SVG, which follows the reader's light or dark, or PNG.

    before: an earlier run of the bench, whose points are drawn too.
    """
    from . import look, replay, roofline

    if "series" in run:
        if before:
            raise RunError("a replay is not drawn beside an earlier one")
        picture = replay.draw_all(replay.Replay(run))
    else:
        picture = roofline.draw(run, before)
    if path.endswith(".png"):
        picture.figure.savefig(path, dpi=144)
    else:
        Path(path).write_text(look.svg(picture, alone=True), encoding="utf-8")


def report(run: dict, path: str) -> None:
    """Writes a replay as a page of HTML that loads no other file."""
    from . import page

    if "series" not in run:
        raise RunError("a page shows a run of 'folio replay -o json'; 'python -m folio plot' draws this one")
    Path(path).write_text(page.render(run), encoding="utf-8")
