"""What the repository says about itself is true: licence, citation, changelog, contributing, workflow."""

import hashlib
import pydoc
import re
import tomllib
from pathlib import Path

import yaml

import fedveil
from fedveil.cli.commands import COMMANDS

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
APACHE = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"  # of apache.org/licenses/LICENSE-2.0.txt
NAMED = sorted(set(re.findall(r"`(fedveil(?:\.\w+)+)[`(]", CONTRIBUTING)))
PLACES = sorted(
    {place for place in re.findall(r"`([\w./-]+/[\w./-]*)`", CONTRIBUTING) if "NAME" not in place}
    | set(re.findall(r"\]\(([^):]+)\)", CONTRIBUTING))
)


def text_of(name):
    return (ROOT / name).read_text()


def test_licence_citation_and_changelog_are_those_of_this_version():
    assert hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest() == APACHE
    cited = yaml.safe_load(text_of("CITATION.cff"))
    assert {"cff-version", "message", "title", "authors"} <= cited.keys()  # required by CFF 1.2.0
    assert cited["version"] == PROJECT["version"] == fedveil.__version__
    assert cited["license"] == PROJECT["license"] == "Apache-2.0"
    assert cited["references"][0]["title"] in " ".join(text_of("README.md").split())
    versions = re.findall(r"^## \[(.+?)\] - (\S+)$", text_of("CHANGELOG.md"), re.MULTILINE)
    assert versions[0][0] == PROJECT["version"]
    assert all(date == "unreleased" or re.fullmatch(r"\d{4}-\d\d-\d\d", date) for _, date in versions)


def test_names_and_paths_in_contributing_are_there():
    assert [name for name in NAMED if pydoc.locate(name) is None] == []
    made = {"site/", ".venv/bin/pre-commit"}  # by a command on the page
    assert {place for place in PLACES if not (ROOT / place).exists()} <= made


def test_targets_and_commands_that_a_document_names_exist():
    for document in ("CONTRIBUTING.md", ".github/pull_request_template.md", ".github/workflows/ci.yml"):
        wanted = set(re.findall(r"\bmake ([a-z-]+)", text_of(document)))
        assert wanted
        assert wanted <= TARGETS
        assert set(re.findall(r"`fedveil ([a-z-]+)", text_of(document))) <= COMMANDS.keys()


def test_the_order_of_packages_in_contributing_is_the_one_that_is_checked():
    from tests.test_house import BELOW

    rows, leaves = re.search(r"```\n(graph <- .+)\nleaves[^:]*: (.+)\n```", CONTRIBUTING).groups()
    below = set()
    for row in rows.split(" <- "):
        layers = set(row.split(", "))
        for layer in layers:
            assert BELOW[layer] - set(leaves.split(", ")) <= below | layers, layer
        below |= layers
    assert below | set(leaves.split(", ")) == set(BELOW)
    assert all(not BELOW[leaf] for leaf in leaves.split(", "))


def test_the_workflow_runs_every_python_that_is_promised():
    workflow = yaml.safe_load(text_of(".github/workflows/ci.yml"))
    found = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line)]
    assert workflow["jobs"]["test"]["strategy"]["matrix"]["python"] == found
    assert PROJECT["requires-python"] == f">={found[0]}"
