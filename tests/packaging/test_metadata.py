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


def pins():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def test_every_requirement_is_pinned_to_a_version_that_it_allows():
    everyone = [line for lines in (PROJECT["dependencies"], *EXTRAS.values()) for line in lines]
    for name, requirement in required(everyone).items():
        if name != "fedveil":
            assert Version(pins()[name]) in requirement.specifier, name


def test_pins_are_what_is_installed_here():
    for name, version in pins().items():
        assert Version(metadata.version(name)).public == version, name


def test_dev_has_every_other_extra_and_each_of_its_tools_once():
    dev = required(EXTRAS["dev"])
    assert len(dev) == len(EXTRAS["dev"])
    assert dev["fedveil"].extras == EXTRAS.keys() - {"dev"}
    for extra in dev["fedveil"].extras:
        assert not dev.keys() & required(EXTRAS[extra]).keys()


def closure(requirements):
    """Everything that requirements install here, by the metadata of what is installed."""
    found, left = set(), list(requirements)
    while left:
        requirement = left.pop()
        name = canonicalize_name(requirement.name)
        if name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        found.add(name)
        left += map(Requirement, metadata.requires(name) or ())
    return found


def commands(target):
    """What make would run for a target in a new clone."""
    words = ["make", "--no-print-directory", "-n", target, "VENV=.new"]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()


def test_make_demo_installs_the_library_and_no_tool():
    (install,) = [line for line in commands("demo") if "pip install" in line]
    assert install.endswith(" -c constraints.txt -e .")
    installed = closure(required(PROJECT["dependencies"]).values())
    tools = {name for lines in EXTRAS.values() for name in required(lines)}
    assert {"torch", "scipy", "sympy"} <= installed
    assert not installed & tools


def test_make_test_installs_the_tools():
    lines = commands("test")
    (install,) = [line for line in lines if "pip install" in line]
    assert install.endswith(" -c constraints.txt -e '.[dev]'")
    assert any("pytest" in line and "not slow" in line for line in lines)


def test_every_file_of_the_package_is_package_data_or_python():
    source, patterns = ROOT / "src" / "fedveil", PYPROJECT["tool"]["setuptools"]["package-data"]["fedveil"]
    others = {path for path in source.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert others == {path for pattern in patterns for path in source.glob(pattern)}
    assert source / "py.typed" in others


def test_urls_are_the_five_that_users_look_for():
    assert list(PROJECT["urls"]) == ["Homepage", "Documentation", "Source", "Issues", "Changelog"]
    assert not [line for line in PROJECT["classifiers"] if line.startswith("License")]  # the expression says it


def test_links_of_the_readme_are_absolute_outside_of_the_repository():
    absolute = runpy.run_path(str(ROOT / "setup.py"))["absolute"]
    home, raw = (
        "https://github.com/fedveil/fedveil/blob/main/",
        "https://raw.githubusercontent.com/fedveil/fedveil/main/",
    )
    assert absolute("[a](docs/a.md#b) ![p](docs/p.svg)") == f"[a]({home}docs/a.md#b) ![p]({raw}docs/p.svg)"
    assert absolute("[`a`](b.md) `[a](b)`") == f"[`a`]({home}b.md) `[a](b)`"
    assert absolute('<a href="b.md"><img src="p.svg"></a>') == f'<a href="{home}b.md"><img src="{raw}p.svg"></a>'
    same = "[a](#b) [c](https://d.e)\n```\n[a](b.md)\n```\n[m](mailto:x@y.z)"
    assert absolute(same) == same
    readme = (ROOT / "README.md").read_text()
    assert re.search(r"\]\((?!https:|#)", readme)
    assert not re.search(r"\]\((?!https:|#)", absolute(readme))
