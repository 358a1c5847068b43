"""The generated reference has every command, flag and key; the pages of the API have every public name."""

import re
from importlib import import_module

import pytest
from tests.docs.markdown import ROOT

pytest.importorskip("griffe", reason="the site's tools are not installed: pip install 'fedveil[docs]'")

import docs_hooks

import fedveil
from fedveil.cli.commands import COMMANDS
from fedveil.runs.settings import SECTION_OF

UNDOCUMENTED = {"Inputs", "one_tensor"}  # a type alias, and an internal helper
REFERENCE = ROOT / "docs" / "reference"


def test_the_command_line_has_every_command_with_every_flag_of_its_own():
    text = docs_hooks.commands()
    for name in COMMANDS:
        section = re.split(rf"^## fedveil {name}$", text, flags=re.MULTILINE)[1].split("\n## ")[0]
        if name == "attack":
            continue
        named = set(re.findall(r"--[a-z][\w-]*", docs_hooks.help_of(name).split("╭─ data options")[0]))
        shown = set(re.findall(r"--[a-z][\w-]*", "".join(re.findall(r"^\|.*\n", section, re.MULTILINE))))
        assert named - {"--help"} <= shown | set(COMMANDS[name][2].split()), name
    assert re.search(r"\| `--seeds INT` \| .+ \| `3` \|", text)
    assert "with other defaults for" in text.split("## fedveil audit")[1]


def test_the_configuration_has_every_key_with_its_default():
    rows = re.findall(r"^\| `(\w+)` \|.*$", docs_hooks.configuration(), re.MULTILINE)
    assert sorted(rows) == sorted(SECTION_OF)
    assert "| `lr` | number, >\u00a00 | `0.001` |" in docs_hooks.configuration()


@pytest.mark.parametrize(
    "package", ["fedveil", *(f"fedveil.{name}" for name in ("data", "defences", "flower", "nvflare"))]
)
def test_every_public_name_is_documented(package):
    asked = {name for page in REFERENCE.glob("*.md") for name in re.findall(r"^::: ([\w.]+)", page.read_text(), re.M)}
    ours = {name.rpartition(".")[2] for name in asked if name.startswith(package)}
    ours |= set(vars(fedveil.errors)) if package == "fedveil" else set()  # their page lists the whole module
    assert set(import_module(package).__all__) - UNDOCUMENTED <= ours


def test_links_out_of_the_folder_lead_to_the_repository():
    page = "[a](../examples) [b](../SECURITY.md#x) [c](maths.md) [d](https://x.y) [e](#f)\n```\n[g](../examples)\n```\n"
    wanted = page.replace("[a](..", "[a](https://r/tree/main").replace("[b](..", "[b](https://r/blob/main")
    found = docs_hooks.absolute(page + "[h](../no-such-file)", "threat-model.md", "https://r")
    assert found == (wanted + "[h](https://r/blob/main/no-such-file)", ["../no-such-file"])
    text, _ = docs_hooks.absolute("[a](../../examples)", "attacks/x.md", "https://r")
    assert text == "[a](https://r/tree/main/examples)"
