"""Each example runs, and its own checks pass. Pictures are pictures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def run(name: str, *arguments: str, folder: Path) -> str:
    done = subprocess.run([sys.executable, str(EXAMPLES / name), *arguments], capture_output=True, text=True,
                          cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name, line", [
    ("first.py", "token 19 averages v = 0 ... 19 through blocks 2 and 0: 9.5 (expected 9.5)"),
    ("encoder_decoder.py", "source of 21 tokens, 6 steps: off by"),
    ("latent.py", "a prompt of 30 tokens and 10 decodes: off by"),
    ("prefix.py", "139 tokens computed instead of 532; 6 blocks are shared"),
])
def test_example(name: str, line: str, tmp_path: Path) -> None:
    assert line in run(name, folder=tmp_path)


def test_decoder(device: str, tmp_path: Path) -> None:
    assert "the same tokens as without a cache" in run("decoder.py", device, folder=tmp_path)


def test_pictures(tmp_path: Path) -> None:
    import matplotlib.image

    run("pictures.py", str(tmp_path), folder=tmp_path)
    image = matplotlib.image.imread(tmp_path / "blocks.png")
    assert image.shape[0] > 400 and len({tuple(pixel) for row in image[::7] for pixel in row[::7]}) > 3


def test_every_example_is_run() -> None:
    here = Path(__file__).read_text()
    for example in EXAMPLES.glob("*.py"):
        assert f'"{example.name}"' in here, f"{example.name} is not in this file"
