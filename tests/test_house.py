"""The house keeps its order: arrows between folders point one way, public names are those written down."""

import ast
from pathlib import Path

import pytest

import fedveil

SOURCE = Path(fedveil.__file__).parent
EVERYONE = {"checks", "errors", "files", "lookup"}  # what every room may use
LEAVES = ("data", "models", "report")
BELOW = {
    **{leaf: set() for leaf in LEAVES},
    "graph": set(),
    "scheme": {"graph"},
    "defences": {"graph", "scheme"},
    "federation": {"graph", "scheme", "defences"},
    "attacks": {"graph", "scheme", "defences", "federation"},
    "runs": {"graph", "scheme", "defences", "federation", *LEAVES},
    "flower": {"graph", "scheme", "defences", "federation"},
    "studies": {"graph", "scheme", "defences", "federation", "attacks", "runs", *LEAVES},
    "cli": {"graph", "scheme", "defences", "federation", "attacks", "runs", "studies", *LEAVES},
}


def imported(layer):
    """Folders and files of the package that a layer imports."""
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
            found |= {name.split(".")[1] for name in names if name.startswith("fedveil.")}
    return found


@pytest.mark.parametrize("layer", BELOW)
def test_a_layer_imports_only_what_is_below_it(layer):
    assert imported(layer) <= {layer, *EVERYONE, *BELOW[layer]}


def test_attacks_cannot_reach_a_secret():
    for path in (SOURCE / "attacks").rglob("*.py"):
        names = {node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)}
        assert "scheme.secret" not in path.read_text()
        assert not names & {"Secret", "draw_secret", "recover"}, path


def test_every_layer_has_its_place():
    ours = {path.stem for path in SOURCE.iterdir() if not path.name.startswith("_") and path.suffix in ("", ".py")}
    assert ours == {*BELOW, *EVERYONE}


def test_public_names_are_those_written_down():
    assert sorted(fedveil.__all__) == fedveil.__all__
    modules = {*BELOW, *EVERYONE}
    assert {name for name in vars(fedveil) if not name.startswith("_")} - modules == set(fedveil.__all__)
