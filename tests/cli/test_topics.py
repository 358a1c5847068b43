"""`fedveil help` prints the pages of the documentation, and messages name topics that exist."""

import ast
import re
from pathlib import Path

import fedveil
from fedveil.cli import main
from fedveil.cli.topics import find_topics

SOURCE = Path(fedveil.__file__).parent
DOCS = Path(__file__).parents[2] / "docs"


def test_every_page_that_is_text_is_a_topic_and_is_printed(capsys):
    topics = find_topics()
    text = {path for path in DOCS.rglob("*.md") if "\n::: " not in path.read_text()}
    assert set(topics.values()) == text
    assert topics["privacy"] == DOCS / "how-to/privacy.md"
    assert topics["defences/privacy"] == DOCS / "defences/privacy.md"
    assert topics["defences"] == DOCS / "defences/README.md"
    assert main(["help"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.split("\n\n")[0].splitlines()]
    assert listed == list(topics)
    assert main(["help", "hostile"]) == 0
    assert capsys.readouterr().out == topics["hostile"].read_text() + "\n"


def test_an_unknown_topic_is_refused(capsys):
    assert main(["help", "hostil"]) == 2
    assert "hostile" in capsys.readouterr().err


def messages(path):
    """The strings of a module that are not docstrings."""
    tree = ast.parse(path.read_text())
    bare = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and id(n) not in bare]


def test_messages_name_topics_and_not_files_that_an_installed_package_does_not_have():
    texts = [str(text) for path in SOURCE.rglob("*.py") for text in messages(path)]
    texts += [(SOURCE / "studies" / "texts.toml").read_text()]
    named = {name for text in texts for name in re.findall(r"fedveil help ([a-z][\w/-]*)", text)}
    assert len(named) > 5
    assert named <= find_topics().keys()
    assert not [text for text in texts if re.search(r"\bdocs/[\w/-]+\.md", text)]
