"""Every example in a docstring runs and gives what it claims."""

import doctest
import importlib
from pathlib import Path

import pytest

import fedveil

SOURCE = Path(fedveil.__file__).parent
SHOWN = sorted(path.relative_to(SOURCE.parent) for path in SOURCE.rglob("*.py") if ">>>" in path.read_text())


@pytest.mark.parametrize("path", SHOWN, ids=str)
def test_examples_in_docstrings_are_right(path):
    if "flower" in path.parts:
        pytest.importorskip("flwr")
    names = path.with_suffix("").parts
    result = doctest.testmod(importlib.import_module(".".join(names).removesuffix(".__init__")))
    assert result.attempted
    assert not result.failed
