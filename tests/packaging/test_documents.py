"""What the repository says about itself is true: licence, citation, changelog, contributing, templates, workflow."""

import hashlib
import importlib
import importlib.util
import re
import tomllib
from pathlib import Path

import pytest
import yaml

import fedveil
from fedveil.cli.commands import COMMANDS

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
APACHE = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"  # of apache.org/licenses/LICENSE-2.0.txt


def text_of(name):
    return (ROOT / name).read_text()


def resolved(name):
    """The object that a dotted name leads to."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError as error:
            if not ".".join(parts[:cut]).startswith(error.name):
                raise
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(name)


def test_the_licence_is_apache_2_to_the_letter():
    words = text_of("LICENSE").split()
    assert " ".join(words[:6]) == "Apache License Version 2.0, January 2004"
    assert "APPENDIX:" in words
    assert hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest() == APACHE
    assert PROJECT["license"] == "Apache-2.0"
    assert PROJECT["license-files"] == ["LICENSE"]


def test_the_citation_names_this_version_and_the_paper():
    cited = yaml.safe_load(text_of("CITATION.cff"))
    assert {"cff-version", "message", "title", "authors"} <= cited.keys()  # required by CFF 1.2.0
    assert cited["cff-version"] == "1.2.0"
    assert cited["version"] == PROJECT["version"] == fedveil.__version__
    assert cited["license"] == PROJECT["license"]
    assert cited["repository-code"] == PROJECT["urls"]["Source"]
    assert cited["url"] == PROJECT["urls"]["Documentation"]
    (paper,) = cited["references"]
    assert {"type", "title", "authors"} <= paper.keys()
    assert paper["title"] in " ".join(text_of("README.md").split())
    assert all(author.keys() == {"given-names", "family-names"} for author in paper["authors"])


def test_the_changelog_begins_with_this_version():
    versions = re.findall(r"^## \[(.+?)\] - (\S+)$", text_of("CHANGELOG.md"), re.MULTILINE)
    assert versions[0][0] == PROJECT["version"]
    for version, date in versions:
        assert date == "unreleased" or re.fullmatch(r"\d{4}-\d\d-\d\d", date)
        assert f"\n[{version}]: " in text_of("CHANGELOG.md")
    assert PROJECT["urls"]["Changelog"].endswith("/CHANGELOG.md")


NAMED = sorted(set(re.findall(r"`(fedveil(?:\.\w+)+)[`(]", CONTRIBUTING)))
PLACES = sorted(
    {place for place in re.findall(r"`([\w./-]+/[\w./-]*)`", CONTRIBUTING) if "NAME" not in place}
    | set(re.findall(r"\]\(([^):]+)\)", CONTRIBUTING))
)


def test_contributing_names_much():
    assert len(NAMED) > 20
    assert len(PLACES) > 30


@pytest.mark.parametrize("name", NAMED)
def test_a_name_in_contributing_is_there(name):
    assert resolved(name) is not None


@pytest.mark.parametrize("place", PLACES)
def test_a_path_in_contributing_is_there(place):
    if place in ("site/", ".venv/bin/pre-commit"):  # made by a command on the page
        return
    assert (ROOT / place).exists()


@pytest.mark.parametrize(
    "document", ["CONTRIBUTING.md", ".github/pull_request_template.md", ".github/workflows/ci.yml"]
)
def test_targets_and_commands_that_a_document_names_exist(document):
    text = text_of(document)
    assert (wanted := set(re.findall(r"\bmake ([a-z-]+)", text)))
    assert wanted <= TARGETS
    assert set(re.findall(r"`fedveil ([a-z-]+)", text)) <= COMMANDS.keys()


def test_tables_that_the_recipe_of_a_rule_names_are_in_its_tests():
    for table in ("ELEMENTWISE", "CHANNELS", "SEQUENCES"):
        assert f"`{table}`" in CONTRIBUTING
        assert f"\n{table} = {{" in text_of("tests/graph/test_rules.py")


def test_the_order_of_the_house_in_contributing_is_the_one_that_is_checked():
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


def python_versions():
    found = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line)]
    return sorted(found, key=lambda version: int(version.partition(".")[2]))


def test_the_workflow_runs_every_python_that_is_promised():
    assert WORKFLOW["jobs"]["test"]["strategy"]["matrix"]["python"] == python_versions()
    assert PROJECT["requires-python"] == f">={python_versions()[0]}"
    assert "without being run on GitHub" in text_of(".github/workflows/ci.yml").splitlines()[0]


def test_the_workflow_runs_every_test_at_night():
    assert WORKFLOW[True]["schedule"]  # YAML 1.1 reads "on" as true
    nightly = [job for job in WORKFLOW["jobs"].values() if "== 'schedule'" in job.get("if", "")]
    assert [step["run"] for job in nightly for step in job["steps"] if "run" in step][-1] == "make test-all"
    others = [job for job in WORKFLOW["jobs"].values() if job not in nightly]
    assert all("!= 'schedule'" in job["if"] for job in others)


def test_the_workflow_uses_tools_and_paths_that_there_are():
    steps = [step for job in WORKFLOW["jobs"].values() for step in job["steps"]]
    lines = [line for step in steps for line in step.get("run", "").splitlines()]
    tools = {line.partition(" -m ")[2].split()[0] for line in lines if " -m " in line}
    assert {line.split()[0] for line in lines} == {"make", ".venv/bin/python"}
    assert all(importlib.util.find_spec(tool) for tool in tools)
    assert {"lint", "test", "demo", "docs"} <= {line.split()[1] for line in lines if line.startswith("make ")}
    caches = [step["with"]["cache-dependency-path"].split() for step in steps if "setup-python" in step.get("uses", "")]
    assert all((ROOT / path).exists() for paths in caches for path in paths)


def test_hooks_are_tools_of_the_set_up_and_no_tests():
    hooks = [hook for repo in yaml.safe_load(text_of(".pre-commit-config.yaml"))["repos"] for hook in repo["hooks"]]
    tools = {hook["entry"].split()[0] for hook in hooks}
    assert tools == {".venv/bin/ruff", ".venv/bin/mypy"}
    pinned = text_of("constraints.txt")
    assert all(f"\n{Path(tool).name}==" in pinned for tool in tools)


@pytest.mark.parametrize("form", ["bug", "feature"])
def test_an_issue_form_has_what_github_asks_for(form):
    found = yaml.safe_load(text_of(f".github/ISSUE_TEMPLATE/{form}.yml"))
    assert found.keys() >= {"name", "description", "body"}
    fields = [field for field in found["body"] if field["type"] != "markdown"]
    assert all(field["attributes"]["label"] for field in fields)
    assert len({field["id"] for field in fields}) == len(fields)
