"""`fedveil help TOPIC`: the pages of the documentation, which the installed package contains."""

from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from fedveil.checks import check_choice

PACKAGE = Path(__file__).parents[1]
FOLDERS = (
    PACKAGE / "pages",
    PACKAGE.parents[1] / "docs",
)  # in an installed package (copied by setup.py), in a checkout
DIRECTIVE = "\n::: "  # marks generated reference pages, which are left out


def find_topics() -> dict[str, Path]:
    """Return the pages by topic: the name of the file or, if an earlier page has that name, its path."""
    root = next((folder for folder in FOLDERS if folder.is_dir()), FOLDERS[0])
    paths = sorted(root.rglob("*.md"), key=lambda path: (_order(path.relative_to(root)), path))
    topics: dict[str, Path] = {}
    for path in paths:
        if DIRECTIVE in path.read_text(encoding="utf-8"):
            continue
        name = path.relative_to(root).with_suffix("")
        if name.parent != Path() and name.name in ("README", "index"):
            name = name.parent
        topics[name.as_posix() if name.name in topics else name.name] = path
    return topics


def _order(path: Path) -> int:
    """Return 0 for top-level pages, 1 for how-to pages, and 2 for all others."""
    return 0 if path.parent == Path() else 1 if path.parts[0] == "how-to" else 2


def read_title(path: Path) -> str:
    """Return the title of a page."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return next((line.removeprefix("# ").replace("`", "") for line in lines if line.startswith("# ")), "")


def print_help(
    topic: Annotated[
        str | None,
        Positional,
        arg(metavar="[TOPIC]", help="page to print; by default, list all pages", help_behavior_hint=""),
    ] = None,
) -> None:
    """Print a page of the documentation, or list the topics."""
    topics = find_topics()
    if topic is None:
        for name, path in topics.items():
            print(f"{name:<22}{read_title(path)}")
        print("\n`fedveil help TOPIC` prints a page; `fedveil --help` lists the commands.")
        return
    check_choice("fedveil help", "topic", topic, topics)
    print(topics[topic].read_text(encoding="utf-8"))
