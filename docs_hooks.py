"""Turn the pages of docs/ into a site: rewrite links that leave the folder, and generate parts of the reference.

The pages are written for GitHub as well, where `../examples` is a folder beside them. On the site such a link points to
the repository. Two pages of the reference are generated when the site is built, so that they always match the program:
`<!-- commands -->` and `<!-- configuration -->` become what `fedveil COMMAND --help` and the schema say.
"""

import contextlib
import functools
import io
import logging
import os
import posixpath
import re
import tomllib
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import griffe

ROOT = Path(__file__).parent
LOG = logging.getLogger("mkdocs.hooks.fedveil")
FENCE = re.compile(r"^( *)(`{3,}).*?^\1\2 *$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(\]\()([^)\s]+)")
SHARED = ("data", "model", "defence", "training", "privacy", "limits")  # sections of the configuration


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Rewrite a page; MkDocs calls this for every page."""
    if page.parent is None:  # a tab of its own, whose side menu would have one entry
        page.meta.setdefault("hide", ["navigation", "toc"] if page.is_homepage else ["navigation"])
    text, broken = absolute(generated(markdown), page.file.src_uri, config.repo_url)
    for target in broken:
        LOG.warning("%s links to %s, which is not in the repository", page.file.src_uri, target)
    return text


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Turn pages named in docstrings and flags, such as docs/hostile.md, into links."""

    def change(found: re.Match[str]) -> str:
        file = files.get_file_from_path(found[1])
        return f'<a href="{file.url_relative_to(page.file)}">{found[0]}</a>' if file else found[0]

    return re.sub(r"\bdocs/([\w/-]+\.md)", change, html) if page.file.src_uri.startswith("reference/") else html


def absolute(markdown: str, page: str, repository: str) -> tuple[str, list[str]]:
    """Return the page with links out of docs/ as addresses of the repository, and the broken links."""
    broken = []

    def change(found: re.Match[str]) -> str:
        target, _, anchor = found[2].partition("#")
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target))
        if ":" in found[2] or not target or path.startswith("docs/"):
            return found[0]
        if not (ROOT / path).exists():
            broken.append(found[2])
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"{found[1]}{repository}/{kind}/main/{path}" + (f"#{anchor}" if anchor else "")

    return outside_code(markdown, lambda text: LINK.sub(change, text)), broken


def outside_code(markdown: str, change: Any) -> str:
    """Apply a change to everything but the code blocks."""
    pieces, end = [], 0
    for block in FENCE.finditer(markdown):
        pieces += [change(markdown[end : block.start()]), block[0]]
        end = block.end()
    return "".join([*pieces, change(markdown[end:])])


def generated(markdown: str) -> str:
    """Insert the generated parts into a page."""
    for name, make in (("commands", commands), ("configuration", configuration)):
        if (mark := f"<!-- {name} -->") in markdown:
            markdown = markdown.replace(mark, make())
    return markdown


class Blocks(griffe.Extension):
    """Render examples and drawn trees in docstrings as code; mkdocstrings takes `>>>` for quotations."""

    EXAMPLE = re.compile(r"^( *)>>> .*(?:\n\1\S.*)*", re.MULTILINE)
    TREE = re.compile(r"^\S+(?:\n *[├│└].*)+", re.MULTILINE)

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite a docstring; Griffe calls this for every object."""
        if obj.docstring:
            text = self.EXAMPLE.sub(r"\1```pycon\n\g<0>\n\1```", obj.docstring.value)
            obj.docstring.value = self.TREE.sub(r"```text\n\g<0>\n```", text)


class Flag(NamedTuple):
    """A flag or a positional argument in the help of a command."""

    names: str
    value: str
    text: str
    default: str

    @property
    def row(self) -> str:
        """Return the row of a table."""
        choices = re.findall(r",(?=,)|,$|[^,]+", self.value[1:-1]) if self.value.startswith("{") else []
        shown = self.names if choices else f"{self.names} {self.value}".strip()
        text = escaped(self.text) + (f" ({', '.join(map(code, choices))})" if choices else "")
        default = self.default if self.default == "required" else code(self.default)
        return f"| {code(shown)} | {text} | {default} |"


def code(text: str) -> str:
    """Format text as code inside a table."""
    return f"`{text}`".replace("|", "\\|") if text else ""


def escaped(text: str) -> str:
    """Escape text inside a table."""
    return re.sub(r"([|*_<\[\]])", r"\\\1", text)


@functools.cache
def help_of(*words: str) -> str:
    """Return what a command prints with --help."""
    from fedveil.cli import main

    printed = io.TextIOWrapper(io.BytesIO(), "utf-8")  # boxes are drawn only where they can be encoded
    with mock.patch.dict(os.environ, {"COLUMNS": "100"}), contextlib.redirect_stdout(printed):
        assert main([*words, "--help-all"]) == 0, words
    printed.seek(0)
    return re.sub(r"\x1b\[[0-9;]*m", "", printed.read())


def flags_of(text: str) -> dict[str, list[Flag]]:
    """Parse the flags of a help text, by the title of their box."""
    found: dict[str, list[list[str]]] = {}
    for line in text.splitlines():
        if title := re.match(r"╭─ (.*?) ─*╮", line):
            rows = found.setdefault(title[1].removesuffix(" options"), [])
        elif line.startswith("│ ─"):  # what was above describes the section
            rows.clear()
        elif line.startswith("│") and line.strip("│ "):  # a text that fills its line is followed by an empty one
            inner = line[2:-1].rstrip()
            deep = len(inner) - len(inner.lstrip())
            if deep:  # continuation of the text
                rows[-1][1] += f" {inner.strip()}"
            elif rows and not inner.startswith("-") and rows[-1][0].count("{") > rows[-1][0].count("}"):
                rows[-1][0] += inner  # continuation of a list of choices
            else:
                names, _, rest = re.sub(r" {2,}", "\0", inner, count=1).partition("\0")
                rows.append([names, rest])
    return {title: [_flag(*row) for row in rows if "--help" not in row[0]] for title, rows in found.items()}


def _flag(names: str, text: str) -> Flag:
    default = re.search(r" ?\((?:default: (.*)|(required))\)$", text)
    if default:
        text = text[: default.start()]
    shown = "" if not default or default[1] in ("None", "False", "", None) else default[1].replace(", ", ",")
    names, _, value = names.strip().partition(" ") if names.startswith("-") and ", -" not in names else (names, "", "")
    return Flag(names, value, text.strip(), "required" if default and default[2] else shown)


def table(flags: list[Flag]) -> str:
    """Format flags as a table."""
    return "\n".join(["| flag | meaning | default |", "|---|---|---|", *(flag.row for flag in flags)])


def commands() -> str:
    """Return a section for every command: summary, example, its own flags, and where its defaults differ."""
    from fedveil.cli.commands import ATTACKS, COMMANDS

    train = flags_of(help_of("train"))
    usual = {flag.names: flag.default for part in SHARED for flag in train[part]}
    parts = []
    for name, (_, summary, example) in COMMANDS.items():
        parts += [f"## fedveil {name}", f"{summary[0].upper()}{summary[1:]}.", f"```sh\nfedveil {name} {example}\n```"]
        if name == "attack":
            for attack, (_, about) in sorted(ATTACKS.items()):
                parts += [f"### fedveil attack {attack}", f"{about[0].upper()}{about[1:]}."]
                parts += described(flags_of(help_of(name, attack)), usual)
        else:
            parts += described(flags_of(help_of(name)), usual)
        if name == "audit":
            parts += ["### fedveil audit --weights", "Audit a trained model of any kind."]
            parts += described(flags_of(help_of(name, "--weights", "FILE")), usual)
    return "\n\n".join(parts)


def described(groups: dict[str, list[Flag]], usual: dict[str, str]) -> list[str]:
    """Describe the flags of one command: its own as a table, those of the configuration by reference."""
    own = [flag for title, flags in groups.items() if title not in SHARED for flag in flags]
    found = [table(own)] if own else []
    if "training" in groups:
        shared = [flag for title in SHARED for flag in groups[title]]
        others = [code(f"{flag.names} {flag.default}") for flag in shared if flag.default != usual[flag.names]]
        text = "Every key of the [configuration](configuration.md) is a flag of this command"
        found.append(f"{text}, with other defaults for {', '.join(others)}." if others else f"{text}.")
    return found


def configuration() -> str:
    """Return a section for every section of run.toml: keys, types, defaults and meaning."""
    from fedveil.runs.settings import Config

    schema = Config.model_json_schema()
    parts = []
    for section, of in schema["properties"].items():
        model = schema["$defs"][of["$ref"].rpartition("/")[2]]
        rows = [
            f"| {code(key)} | {kind(field)} | {code(shown(field.get('default')))} | {escaped(field['description'])} |"
            for key, field in model["properties"].items()
        ]
        head = ["| key | type | default | meaning |", "|---|---|---|---|"]
        parts += [f"## \\[{section}\\]", model["description"], "\n".join([*head, *rows])]
    return "\n\n".join(parts)


def kind(field: dict[str, Any]) -> str:
    """Return the type of a key, with its bounds."""
    names = {"string": "text", "integer": "integer", "number": "number", "boolean": "true or false"}
    bounds = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    options = [option for option in field.get("anyOf", [field]) if option.get("type") != "null"]
    found = []
    for option in options:
        if "enum" in option:
            found.append(", ".join(map(code, option["enum"])))
        elif "const" in option:
            found.append(code(option["const"]))
        elif option["type"] == "array":
            found.append("list of text")
        else:
            limits = [f"{sign}\u00a0{option[name]:g}" for name, sign in bounds.items() if name in option]
            found.append(", ".join([names[option["type"]], *limits]))
    return " or ".join(found)


def shown(value: Any) -> str:
    """Format a default as TOML; return an empty string for None."""
    if value is None:
        return ""
    text = {True: "true", False: "false"}.get(value) if isinstance(value, bool) else None
    text = text or (f'"{value}"' if isinstance(value, str) else f"{value}")
    tomllib.loads(f"key = {text}")
    return text
