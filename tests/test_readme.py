"""What the README shows runs, and prints what it claims."""

import contextlib
import io
import re
from pathlib import Path

import torch

import fedveil

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_first_python_block_ends_in_a_float32_rounding_error():
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL).group(1)
    assert len([line for line in code.splitlines() if line]) == 12
    printed = io.StringIO()
    with torch.random.fork_rng(), contextlib.redirect_stdout(printed):
        torch.manual_seed(0)
        exec(code, {})
    error = float(re.fullmatch(r"relative error (\S+)\n", printed.getvalue()).group(1))
    assert torch.finfo(torch.float32).eps / 100 < error < 1e-5


def test_the_second_python_block_trains():
    code = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[1]
    printed = io.StringIO()
    with torch.random.fork_rng(), contextlib.redirect_stdout(printed):
        torch.manual_seed(0)
        exec(code, {})
    assert float(printed.getvalue()) > 0.8


def test_links_and_names_in_the_readme_exist():
    for link in re.findall(r"\]\((docs/[^)#]+)", README):
        assert (ROOT / link).exists(), link
    for name in re.findall(r"fedveil\.(\w+)\(", README):
        assert name in fedveil.__all__
