"""The distributions, and the wheel as a user has it: in a clean environment, outside of the checkout."""

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import fedveil

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow
OPTIONAL = ("flwr", "nvflare", "pillow", "dp-accounting", "httpx", "pandas", "tensorboard", "pytest", "ruff", "mkdocs")
EXTRAS = {
    "nvflare": ["fedveil", "flare-kit", "kit"],
    "images": ["fedveil", "train", "--data", "images", "--path", "pictures", "--epochs", "1"],
    "dp": ["fedveil", "train", "--data", "digits", "--epochs", "1", "--noise", "1"],
}


def run(words, where, code=0):
    """Run a command that does not know of the checkout."""
    known = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(list(map(str, words)), cwd=where, env=known, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def left_out(folder, names):
    """Of a checkout: what was built, and folders that are no part of a distribution."""
    made = {name for name in names if name == "__pycache__" or name.endswith(".egg-info")}
    other = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name not in ("src", "tests", "docs")}
    return made | (other if Path(folder) == ROOT else set())


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """A source distribution of a clean copy, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("built")
    shutil.copytree(ROOT, folder / "copy", ignore=left_out)
    run([sys.executable, "-m", "build", "--outdir", folder / "dist", folder / "copy"], folder)
    (source,), (wheel,) = (folder / "dist").glob("*.tar.gz"), (folder / "dist").glob("*.whl")
    return source, wheel


@pytest.fixture(scope="module")
def user(distributions, tmp_path_factory):
    """A new environment with the wheel and nothing else, and a folder to work in, in which its commands run."""
    folder = tmp_path_factory.mktemp("user")
    run([sys.executable, "-m", "venv", folder / "venv"], folder)
    bin = folder / "venv" / "bin"
    install = ["-m", "pip", "install", "--quiet", "--no-compile", "-c", ROOT / "constraints.txt", distributions[1]]
    run([bin / "python", *install], folder)
    (folder / "work").mkdir()
    yield lambda words, code=0: run([bin / words[0], *words[1:]], folder / "work", code)
    shutil.rmtree(folder / "venv")  # a gigabyte


def test_the_distributions_have_the_files_of_the_package_and_no_others(distributions):
    package = ROOT / "src" / "fedveil"
    ours = {path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    names = set(zipfile.ZipFile(distributions[1]).namelist())
    about = {name for name in names if ".dist-info/" in name}
    docs = ROOT / "docs"
    pages = {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")}
    assert names - about == {f"fedveil/{path.relative_to(package)}" for path in ours} | {
        f"fedveil/pages/{page}" for page in pages
    }
    assert {name.partition("/")[2] for name in about} == {
        *("METADATA", "RECORD", "WHEEL", "entry_points.txt", "top_level.txt", "licenses/LICENSE")
    }
    with tarfile.open(distributions[0]) as source:
        names = {name.partition("/")[2] for name in source.getnames()}
    assert {"LICENSE", "README.md", "CHANGELOG.md", "SECURITY.md", "pyproject.toml", "setup.py"} <= names
    assert {name for name in names if name.startswith("docs/") and name.endswith(".md")} == {f"docs/{p}" for p in pages}
    assert not [name for name in names if name.startswith(("tests", "benchmarks", "."))]


def test_metadata_has_the_licence_the_links_and_a_description_with_absolute_ones(distributions):
    wheel = zipfile.ZipFile(distributions[1])
    (name,) = [name for name in wheel.namelist() if name.endswith("/METADATA")]
    found = email.message_from_bytes(wheel.read(name))
    assert found["License-Expression"] == "Apache-2.0"
    assert found["Description-Content-Type"] == "text/markdown"
    assert len(found.get_all("Project-URL")) == 5
    text = found.get_payload(decode=True).decode()
    assert text.startswith((ROOT / "README.md").read_text().splitlines()[0])
    assert not re.search(r"\]\((?!https?:|#)", text)


def test_the_demo_and_a_run_work_outside_of_the_checkout_without_any_extra(user, tmp_path):
    assert user(["fedveil", "--version"]).stdout == f"{fedveil.__version__}\n"
    assert user(["fedveil", "help", "privacy"]).stdout == (ROOT / "docs/how-to/privacy.md").read_text() + "\n"
    where = user(["python", "-c", "import fedveil; print(fedveil.__file__)"]).stdout
    assert "/site-packages/fedveil/" in where
    installed = {line.partition("==")[0].lower() for line in user(["pip", "freeze"]).stdout.splitlines()}
    assert not installed & set(OPTIONAL)
    user(["pip", "check"])
    printed = user(["fedveil", "demo", "--out", tmp_path / "demo"]).stdout
    assert f"report: {tmp_path / 'demo' / 'report.html'}" in printed
    assert (tmp_path / "demo" / "report.html").stat().st_size > 10_000
    user(["fedveil", "train", "--data", "digits", "--epochs", "1", "--out", tmp_path / "run"])
    assert (tmp_path / "run" / "model.safetensors").exists()


@pytest.mark.parametrize("extra", EXTRAS)
def test_a_command_that_needs_an_extra_names_it(user, extra, tmp_path):
    for part in ("train", "test"):
        for label in ("a", "b"):
            (tmp_path / part / label).mkdir(parents=True)
            (tmp_path / part / label / "1.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    words = [tmp_path if word == "pictures" else word for word in EXTRAS[extra]]
    complaint = user(words, code=2).stderr
    assert f"Fix: run pip install 'fedveil[{extra}]'" in complaint
    assert "Traceback" not in complaint
