"""`dir(fedveil)` lists what there is, and imports none of it."""

import subprocess
import sys

import fedveil


def test_completion_finds_public_names_and_packages_without_importing_them():
    found = dir(fedveil)
    assert {*fedveil.__all__, "__version__", "data", "federation", "models", "scheme"} <= set(found)
    assert found == sorted(set(found))
    assert all(hasattr(fedveil, name) for name in found)
    code = "import sys, fedveil; names = dir(fedveil); print('Federation' in names, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]
