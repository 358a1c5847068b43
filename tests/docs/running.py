"""A page's code, run as a reader would: block by block, in a folder of its own."""

import contextlib
import os
import re
import runpy
import shlex
import sys
from pathlib import Path

import torch
from tests.docs.markdown import FENCE, ROOT, name_of

from fedveil.cli import main


def steps(page):
    """The blocks of Python and of shell in their order, each as (line of the page, kind, code)."""
    text = page.read_text()
    for block in FENCE.finditer(text):
        if block[3] in ("python", "sh", "toml", "yaml"):
            indent = len(block[1])
            code = "\n".join(line[indent:] for line in block[4].splitlines()) + "\n"
            yield text.count("\n", 0, block.start()) + 2, block[3], code


def file_of(code):
    """The name of the file that a block is to be saved as, if its first line is such a comment."""
    named = re.match(r"# ([\w/-]+\.(?:py|toml|yml))\n", code)
    return named and named[1]


@contextlib.contextmanager
def reader(folder):
    """A reader who sits in this folder: its modules are found, and gone afterwards."""
    before, known, path = Path.cwd(), set(sys.modules), list(sys.path)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            yield
    finally:
        os.chdir(before)
        sys.path[:] = path
        for name in set(sys.modules) - known:
            if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(folder)):
                del sys.modules[name]


def run_page(page, folder, left_out=()):
    """Run every block of a page; lines and blocks with one of the words in `left_out` are only looked at elsewhere."""
    names = {"__name__": "page"}
    with reader(folder):
        for line, kind, code in steps(page):
            run_block(f"{name_of(page)}:{line}", kind, code, names, left_out)
    return names


def run_block(where, kind, code, names, left_out=()):
    """Run one block: Python in the names of the page, or a file for later; commands of ours and scripts of the page."""
    if file := file_of(code):
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text(code)
    elif kind == "python":
        if not any(word in code for word in left_out):
            exec(compile(code, where, "exec"), names)
    elif kind == "sh":
        for command in code.replace("\\\n", " ").splitlines():
            words = shlex.split(command, comments=True)
            if words and not any(word in command for word in left_out):
                run_command(where, words)


def run_command(where, words):
    """A command of the library, or a script that the page has written."""
    if words[0] == "fedveil":
        assert main(words[1:]) == 0, f"{where}: {words}"
        return
    assert words[0] == "python", f"{where}: {words[0]} is not run by any test"
    before, sys.argv = sys.argv, words[1:]
    try:
        runpy.run_path(words[1], run_name="__main__")
    finally:
        sys.argv = before


__all__ = ["ROOT", "reader", "run_block", "run_page", "steps"]
