"""Every test has its own cache and no data folder; real files are used only where a test asks for them."""

import os
import shutil
from pathlib import Path

import pytest

REAL = Path(os.environ.get("FEDVEIL_DATA") or Path(__file__).resolve().parents[3] / "shared" / "data")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("FEDVEIL_CACHE", str(folder))
    monkeypatch.delenv("FEDVEIL_DATA", raising=False)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)  # pytest keeps tmp_path, and decoded images are large


@pytest.fixture
def real_data(monkeypatch):
    """Calls with a data set's name give its folder, or skip the test."""

    def folder(name):
        if not (REAL / name).is_dir():
            pytest.skip(f"no {name} in {REAL}")
        monkeypatch.setenv("FEDVEIL_DATA", str(REAL))
        return REAL / name

    return folder
