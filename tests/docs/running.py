"""Run the code of a page as a reader would: block by block, in an empty folder."""

import contextlib
import os
import re
import runpy
import shlex
import sys
from pathlib import Path

import torch
from tests.docs.markdown import name_of, steps

from fedveil.cli import main


def file_of(code):
    """Return the file name in a block's first line, if that is a comment with a file name."""
    named = re.match(r"# ([\w/-]+\.(?:py|toml|yml))\n", code)
    return named and named[1]


@contextlib.contextmanager
def reader(folder):
    """Work in this folder and import its modules; forget them afterwards."""
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
    """Run every block of a page, except lines and blocks that contain one of the words in `left_out`."""
    names = {"__name__": "page"}
    with reader(folder):
        for line, kind, code in steps(page):
            run_block(f"{name_of(page)}:{line}", kind, code, names, left_out)
    return names


def run_block(where, kind, code, names, left_out=()):
    """Run one block: execute Python in the page's namespace, save a named file, or run fedveil and scripts."""
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
    """Run a fedveil command, or a script that the page has saved."""
    if words[0] == "fedveil":
        assert main(words[1:]) == 0, f"{where}: {words}"
        return
    assert words[0] == "python", f"{where}: {words[0]} is not run by any test"
    before, sys.argv = sys.argv, words[1:]
    try:
        runpy.run_path(words[1], run_name="__main__")
    finally:
        sys.argv = before
