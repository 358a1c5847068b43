"""Imports between packages point one way, and public names are those written down."""

import ast
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

import fedveil
from fedveil.models import mlp

SOURCE = Path(fedveil.__file__).parent
EVERYONE = {"checks", "errors", "files", "lookup", "plain_json", "progress", "signals", "wire"}
LEAVES = ("data", "models", "records", "report")
CORE = {"graph", "scheme", "privacy", "defences", "federation"}
BELOW = {
    **{leaf: set() for leaf in (*LEAVES, "graph", "secagg")},
    "data": {"records"},
    "scheme": {"graph"},
    "privacy": {"graph", "scheme"},
    "defences": {"graph", "scheme", "privacy"},
    "federation": {*CORE, "secagg", "records", "report"},
    "attacks": {*CORE, "secagg", "records"},
    "runs": {*CORE, *LEAVES},
    "callbacks": {*CORE},
    "flower": {*CORE, "secagg", "records"},
    "nvflare": {*CORE, "secagg", "records"},
    "studies": {*CORE, "attacks", "runs", *LEAVES},
    "cli": {*CORE, "attacks", "flower", "nvflare", "runs", "studies", "secagg", *LEAVES},
}


def imported(layer):
    """Folders and files of the package that a layer imports, or names as `package.module:name`."""
    home = SOURCE / layer
    files = home.rglob("*.py") if home.is_dir() else [home.with_suffix(".py")]
    found = set()
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.Constant) and re.fullmatch(r"fedveil(\.\w+)+:[\w.]+", str(node.value)):
                names = [node.value]  # code that is imported by its name
            found |= {name.split(".")[1] for name in names if name.startswith("fedveil.")}
    return found


@pytest.mark.parametrize("layer", BELOW)
def test_a_layer_imports_only_what_is_below_it(layer):
    assert imported(layer) <= {layer, *EVERYONE, *BELOW[layer]}


SECRET_MODULES = {f"fedveil.scheme.{name}" for name in ("perturbation", "recover", "transform")}
SECRET = {"Perturbation", "VeilSession", "Recovery", "perturb", "recover", "recover_each", "start"}  # of the scheme


@pytest.mark.parametrize("path", sorted((SOURCE / "attacks").rglob("*.py")), ids=lambda path: path.stem)
def test_attacks_cannot_reach_a_secret(path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = set()
        if isinstance(node, ast.ImportFrom):
            assert node.module not in SECRET_MODULES
            names = {alias.name for alias in node.names}
        elif isinstance(node, ast.Call):
            names = {getattr(node.func, "attr", getattr(node.func, "id", ""))}
        elif isinstance(node, ast.Name | ast.Attribute):
            names = {getattr(node, "attr", getattr(node, "id", ""))} - {"start"}  # of a slice
        assert not names & SECRET, f"line {node.lineno}"


CONCRETE = (
    "compression",
    "dbcl",
    "filtered",
    "flare_filters",
    "flower_mods",
    "plain",
    "ppdl",
    "private",
    "spn",
    "veil",
)


@pytest.mark.parametrize("layer", ["federation", "runs"])
def test_no_concrete_defence_is_imported(layer):
    for path in (SOURCE / layer).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("fedveil.defences"):
                names = {node.module.rpartition(".")[2], *(alias.name.lower() for alias in node.names)}
                assert not names & set(CONCRETE), f"{path.name}, line {node.lineno}"


def test_every_layer_has_its_place():
    ours = {path.stem for path in SOURCE.iterdir() if not path.name.startswith("_") and path.suffix in ("", ".py")}
    assert ours == {*BELOW, *EVERYONE}


def test_public_names_are_those_written_down_and_listing_them_imports_nothing():
    found = dir(fedveil)
    assert sorted(fedveil.__all__) == fedveil.__all__
    assert {*fedveil.__all__, "__version__", "data", "federation", "models", "scheme"} <= set(found)
    assert found == sorted(set(found))
    assert all(hasattr(fedveil, name) for name in found)
    assert all(getattr(fedveil, name).__name__ == name for name in fedveil.__all__)
    assert {name for name in vars(fedveil) if not name.startswith("_")} - {*BELOW, *EVERYONE} <= {"TYPE_CHECKING"}
    assert fedveil.__version__ == metadata.version("fedveil")
    assert fedveil.errors.FedveilError is fedveil.FedveilError  # packages need no import
    with pytest.raises(AttributeError, match="module 'fedveil' has no attribute 'moat'"):
        getattr(fedveil, "moat")  # noqa: B009
    code = "import sys, fedveil; names = dir(fedveil); print('Federation' in names, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]


def annotations(body):
    """Every annotation in the signature of a public function or the field of a public class, with its place."""
    for node in body:
        if isinstance(node, ast.FunctionDef) and (not node.name.startswith("_") or node.name.startswith("__")):
            every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            yield from ((node.name, a.annotation) for a in every if a.annotation)
            if node.returns:
                yield node.name, node.returns
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from annotations(node.body)
        elif isinstance(node, ast.AnnAssign):
            yield "field", node.annotation


@pytest.mark.parametrize("path", sorted((SOURCE / "studies").rglob("*.py")), ids=lambda path: path.stem)
def test_studies_say_what_they_take_and_return(path):
    for place, annotation in annotations(ast.parse(path.read_text()).body):
        names = {node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)}
        assert not names & {"Any", "object"}, f"{path.name}: {place}"


SHARED_NAMES = {"Server", "Client", "Engine"}  # of flower and nvflare, as users write them


def test_class_names_are_unique():
    homes = {}
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name.lstrip("_"), []).append(path.relative_to(SOURCE).as_posix())
    assert {name: found for name, found in homes.items() if len(found) > 1 and name not in SHARED_NAMES} == {}


MUTABLE = ast.Dict | ast.List | ast.Set | ast.DictComp | ast.ListComp | ast.SetComp
REGISTRIES = {
    "defences/registry.py": {"_RECORDS"},
    "graph/calls.py": {"RULES"},
    "graph/guards.py": {"_CHECKED"},
    "graph/outputs.py": {"_ORIGINALS"},
}


def changed_names(tree):
    """Yield the names of containers that some function of a module changes."""
    methods = set(
        ["add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "setdefault", "update"]
    )
    for function in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]:
        for node in ast.walk(function):
            if isinstance(node, ast.Global):
                yield from node.names
            elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
                yield getattr(node.value, "id", None)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in methods:
                yield getattr(node.func.value, "id", None)


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_no_module_has_mutable_state_but_registries(path):
    tree = ast.parse(path.read_text())
    held = set()
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        call = getattr(getattr(value, "func", None), "id", "")
        if isinstance(value, MUTABLE) or call in {"dict", "list", "set", "defaultdict", "WeakSet", "WeakKeyDictionary"}:
            held |= {target.id for target in targets if isinstance(target, ast.Name)}
    assert held & set(changed_names(tree)) <= REGISTRIES.get(path.relative_to(SOURCE).as_posix(), set())


def body_lines(function):
    """The number of lines of a function's body, without its docstring."""
    first = function.body[1:] if ast.get_docstring(function) else function.body
    return first[-1].end_lineno - first[0].lineno + 1 if first else 0


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_files_have_at_most_400_lines_and_bodies_at_most_60(path):
    text = path.read_text()
    assert text.count("\n") <= 400
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    assert [function.name for function in functions if body_lines(function) > 60] == []


MAX_FILES = 16  # lower it when modules are merged; it must not grow


def trace_files(call):
    """The files of the package whose code runs in a call."""
    seen = set()

    def note(frame, event, _):
        path = Path(frame.f_code.co_filename)
        if event == "call" and SOURCE in path.parents:
            seen.add(str(path.relative_to(SOURCE)))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen


def test_a_veiled_round_in_one_process_passes_through_few_files():
    data = [(torch.randn(8, 6), torch.randint(0, 3, (8,))) for _ in range(3)]
    federation = fedveil.Federation(mlp(6, 3, hidden=8), data, "veil", batch_size=4)
    federation.step()  # what is made once
    found = trace_files(federation.step)
    assert {"federation/server.py", "scheme/recover.py"} <= found
    assert len(found) <= MAX_FILES, sorted(found)
