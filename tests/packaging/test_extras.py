"""The library imports what it declares and needs no extra; what needs one names the line that installs it."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SOURCE = ROOT / "src" / "fedveil"
IMPORTED_AS = {"scikit-learn": "sklearn", "pydantic": "pydantic pydantic_core", "pillow": "PIL", "flwr": "flwr click"}
ROOMS = {"flower": "flower", "nvflare": "nvflare"}  # folders that need an extra as a whole


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


def test_a_file_imports_only_what_every_user_has():
    for path, tree in FILES.items():
        extra = ROOMS.get(path.relative_to(SOURCE).parts[0])
        known = STANDARD | BASE | (modules(PROJECT["optional-dependencies"][extra]) if extra else set())
        assert set(imports(tree, top=True)) <= known, path


def test_whatever_is_imported_anywhere_is_declared_and_every_dependency_is_imported():
    users = {name: lines for name, lines in PROJECT["optional-dependencies"].items() if name not in ("dev", "docs")}
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
    expected = f" needs the package {package}, which is not installed.\n  Fix: pip install 'fedveil[{extra}]'\n"
    assert done.stderr.endswith(expected), done.stderr
