"""The Python code of the pages runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent.parent


@pytest.mark.parametrize("page", ["docs/python.md", "docs/kv-format.md", "python/README.md"])
def test_code_of_the_page_runs(page: str) -> None:
    """All blocks of a page, in order, in one namespace."""
    text = (REPOSITORY / page).read_text()
    names: dict = {"__name__": "page"}
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
    assert blocks
    for code in blocks:
        exec(compile(code, page, "exec"), names)
