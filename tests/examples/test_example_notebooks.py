"""The notebooks in examples/ are their scripts, with outputs of a run."""

import pytest

pytest.importorskip("jupytext", reason="jupytext is not installed: pip install 'fedveil[dev]'")
pytest.importorskip("nbclient", reason="nbclient is not installed: pip install 'fedveil[dev]'")

from tests.examples.notebooks import NOTEBOOKS, executed, script, written
from tests.examples.test_example_scripts import EXAMPLES, ROOT, check, check_claims

MOST_BYTES = 200_000


def sources(notebook):
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def printed(notebook):
    """What its cells print, all in one text; an error stops a notebook before it is written."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_has_the_cells_of_its_script(name):
    assert sources(written(name)) == sources(script(name)), "write it again: python -m tests.examples.notebooks"
    assert {path.stem for path in EXAMPLES.glob("*.ipynb")} == set(NOTEBOOKS)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_shows_results_and_nothing_of_the_machine(name):
    path = EXAMPLES / f"{name}.ipynb"
    assert path.stat().st_size < MOST_BYTES
    assert not [word for word in ("/work", "/tmp", "/home", "/Users", str(ROOT)) if word in path.read_text()]
    check(name, printed(written(name)).splitlines()[-1])
    check_claims(name, printed(written(name)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Jupyter's own packages
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs(name, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    check(name, printed(executed(name, tmp_path)).splitlines()[-1])
    assert not list(tmp_path.iterdir())
