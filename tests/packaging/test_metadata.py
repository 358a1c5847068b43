"""What users install, and what they read about it, follows from pyproject.toml and the Makefile."""

import re
import runpy
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
EXTRAS = PROJECT["optional-dependencies"]


def required(lines):
    """Requirements by name."""
    return {canonicalize_name(Requirement(line).name): Requirement(line) for line in lines}


def test_every_requirement_is_pinned_to_a_version_that_it_allows_and_that_is_installed_here():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    for name, version in pins.items():
        assert Version(metadata.version(name)).public == version, name
    everyone = [line for lines in (PROJECT["dependencies"], *EXTRAS.values()) for line in lines]
    for name, requirement in required(everyone).items():
        assert name == "fedveil" or Version(pins[name]) in requirement.specifier, name


def test_dev_has_every_other_extra_and_none_of_its_tools_twice():
    dev = required(EXTRAS["dev"])
    assert dev["fedveil"].extras == EXTRAS.keys() - {"dev"}
    for extra in dev["fedveil"].extras:
        assert not dev.keys() & required(EXTRAS[extra]).keys()


def test_make_demo_installs_the_library_and_make_test_the_tools():
    for target, what in {"demo": ".", "test": "'.[dev]'"}.items():
        words = ["make", "--no-print-directory", "-n", target, "VENV=.new"]
        lines = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
        (install,) = [line for line in lines if "pip install" in line]
        assert install.endswith(f" -c constraints.txt -e {what}")


def test_every_file_of_the_package_is_package_data_or_python():
    source, patterns = ROOT / "src" / "fedveil", PYPROJECT["tool"]["setuptools"]["package-data"]["fedveil"]
    others = {path for path in source.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert others == {path for pattern in patterns for path in source.glob(pattern)}
    assert source / "py.typed" in others


def test_links_of_the_readme_are_absolute_outside_of_the_repository():
    absolute = runpy.run_path(str(ROOT / "setup.py"))["absolute"]
    home, raw = PROJECT["urls"]["Source"] + "/blob/main/", "https://raw.githubusercontent.com/fedveil/fedveil/main/"
    assert absolute("[a](docs/a.md#b) ![p](docs/p.svg)") == f"[a]({home}docs/a.md#b) ![p]({raw}docs/p.svg)"
    assert absolute("[`a`](b.md) `[a](b)`") == f"[`a`]({home}b.md) `[a](b)`"
    assert absolute('<a href="b.md"><img src="p.svg"></a>') == f'<a href="{home}b.md"><img src="{raw}p.svg"></a>'
    same = "[a](#b) [c](https://d.e)\n```\n[a](b.md)\n```\n[m](mailto:x@y.z)"
    assert absolute(same) == same
    assert not re.search(r"\]\((?!https:|#)", absolute((ROOT / "README.md").read_text()))
