"""The notebooks in examples/, made from their scripts and run: `python -m tests.examples.notebooks` writes them.

A notebook is committed with its outputs, so that readers on the web see results.
"""

import jupytext
import nbformat
from nbclient import NotebookClient
from tests.examples.test_example_scripts import EXAMPLES

NOTEBOOKS = ("image_classification", "audit_own_defence")


def script(name):
    """The notebook that jupytext makes of a script."""
    found = jupytext.read(EXAMPLES / f"{name}.py", fmt="py:percent")
    for number, cell in enumerate(found.cells):
        cell["id"] = f"cell-{number}"  # jupytext draws others every time
    found.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return found


def executed(name, folder):
    """The same, with the outputs of a run in some folder."""
    notebook = script(name)
    client = NotebookClient(notebook, kernel_name="python3", timeout=300, record_timing=False)
    client.execute(cwd=str(folder))
    notebook.metadata["language_info"] = {"name": "python"}  # without this machine's version
    return notebook


def written(name):
    """The notebook in the repository."""
    return nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)


if __name__ == "__main__":
    for name in NOTEBOOKS:
        nbformat.write(executed(name, EXAMPLES), EXAMPLES / f"{name}.ipynb")
