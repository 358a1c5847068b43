"""What users install follows from pyproject.toml, and what needs an extra names the line that installs it."""

import ast
import re
import runpy
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
EXTRAS = PROJECT["optional-dependencies"]
SOURCE = ROOT / "src" / "fedveil"
IMPORTED_AS = {"scikit-learn": "sklearn", "pydantic": "pydantic pydantic_core", "pillow": "PIL", "flwr": "flwr click"}
ELSEWHERE = {"onnx"}  # extras that are not in the development environment
ROOMS = {"flower": "flower", "nvflare": "nvflare"}  # folders that need an extra as a whole
ROOMS |= {"defences/flare_filters.py": "nvflare", "defences/flower_mods.py": "flower"}  # and files


def modules(requirements):
    """The top-level modules that requirements install, for use in this library."""
    names = [re.match(r"[\w.-]+", requirement).group() for requirement in requirements]
    return {module for name in names for module in IMPORTED_AS.get(name, name.replace("-", "_")).split()}


def imports(node, *, top):
    """Names of top-level modules imported in a tree; with `top`, only those that are imported with the file itself."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield (child.module or "").partition(".")[0]
        elif isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            for other in child.orelse:
                yield from imports(ast.Module([other], []), top=top)
        elif not (top and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)):
            yield from imports(child, top=top)


FILES = {path: ast.parse(path.read_text()) for path in SOURCE.rglob("*.py")}
STANDARD = {*sys.stdlib_module_names, "fedveil"}
BASE = modules(PROJECT["dependencies"])


def test_imports_are_declared_those_of_every_file_are_installed_and_all_dependencies_are_used():
    for path, tree in FILES.items():
        own = path.relative_to(SOURCE)
        extra = ROOMS.get(own.parts[0], ROOMS.get(str(own)))
        known = STANDARD | BASE | (modules(EXTRAS[extra]) if extra else set())
        assert set(imports(tree, top=True)) <= known, path
    users = {name: lines for name, lines in EXTRAS.items() if name not in ("dev", "docs")}
    known = STANDARD | BASE | set().union(*map(modules, users.values()))
    found = {path: set(imports(tree, top=False)) for path, tree in FILES.items()}
    assert {path: names - known for path, names in found.items() if names - known} == {}
    assert set().union(*found.values()) >= BASE


ABSENT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name == {package!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
"""


@pytest.mark.parametrize(
    ("package", "extra", "line"),
    [
        ("flwr", "flower", "from fedveil.flower import Server"),
        ("nvflare", "nvflare", "import fedveil; fedveil.nvflare.Client"),
    ],
)
def test_an_engine_that_is_not_installed_is_named_with_its_extra(package, extra, line):
    code = ABSENT.format(package=package) + line
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    expected = f" needs the package {package}, which is not installed.\n  Fix: run pip install 'fedveil[{extra}]'\n"
    assert done.stderr.endswith(expected), done.stderr


def required(lines):
    """Requirements by name."""
    return {canonicalize_name(Requirement(line).name): Requirement(line) for line in lines}


def test_requirements_are_pinned_to_versions_that_are_installed_here_and_listed_once():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    for name, version in pins.items():
        assert Version(metadata.version(name)).public == version, name
    extras = {name: lines for name, lines in EXTRAS.items() if name not in ELSEWHERE}
    everyone = [line for lines in (PROJECT["dependencies"], *extras.values()) for line in lines]
    for name, requirement in required(everyone).items():
        assert name == "fedveil" or Version(pins[name]) in requirement.specifier, name
    dev = required(EXTRAS["dev"])
    assert dev["fedveil"].extras == extras.keys() - {"dev"}
    for extra in dev["fedveil"].extras:
        assert not dev.keys() & required(EXTRAS[extra]).keys()


def test_make_demo_installs_the_library_and_make_test_the_tools():
    for target, what in {"demo": ".", "test": "'.[dev]'"}.items():
        words = ["make", "--no-print-directory", "-n", target, "VENV=.new"]
        lines = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
        (install,) = [line for line in lines if "pip install" in line]
        assert install.endswith(f" -c constraints.txt -e {what}")


def test_every_file_of_the_package_is_package_data_or_python():
    patterns = PYPROJECT["tool"]["setuptools"]["package-data"]["fedveil"]
    others = {path for path in SOURCE.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert others == {path for pattern in patterns for path in SOURCE.glob(pattern)}
    assert SOURCE / "py.typed" in others


def test_links_of_the_readme_are_absolute_outside_of_the_repository():
    absolute = runpy.run_path(str(ROOT / "setup.py"))["absolute"]
    home, raw = PROJECT["urls"]["Source"] + "/blob/main/", "https://raw.githubusercontent.com/fedveil/fedveil/main/"
    assert absolute("[a](docs/a.md#b) ![p](docs/p.svg)") == f"[a]({home}docs/a.md#b) ![p]({raw}docs/p.svg)"
    assert absolute("[`a`](b.md) `[a](b)`") == f"[`a`]({home}b.md) `[a](b)`"
    assert absolute('<a href="b.md"><img src="p.svg"></a>') == f'<a href="{home}b.md"><img src="{raw}p.svg"></a>'
    same = "[a](#b) [c](https://d.e)\n```\n[a](b.md)\n```\n[m](mailto:x@y.z)"
    assert absolute(same) == same
    assert not re.search(r"\]\((?!https:|#)", absolute((ROOT / "README.md").read_text()))
