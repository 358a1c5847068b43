"""Parse Markdown pages: prose without code, links, anchors, code blocks."""

import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SITE, REPOSITORY = "https://fedveil.github.io/fedveil/", "https://github.com/fedveil/fedveil/"
FENCE = re.compile(r"^( *)(`{3,})([^\n]*)\n(.*?)^\1\2 *$", re.DOTALL | re.MULTILINE)
ADDRESSES = ("http://", "https://", "mailto:")


def pages():
    """Return every page of the repository and of the site."""
    folders = [path for name in ("docs", "examples", "results") for path in sorted((ROOT / name).rglob("*.md"))]
    return [*sorted(ROOT.glob("*.md")), *folders]


def name_of(page):
    """Return the page's path inside the repository."""
    return page.relative_to(ROOT).as_posix()


@cache
def prose(page):
    """Return the page without its code blocks."""
    return FENCE.sub("", page.read_text())


def steps(page):
    """Yield the code blocks in order, each as (line number, language, code without the indentation of its fence)."""
    text = page.read_text()
    for block in FENCE.finditer(text):
        code = re.sub(rf"^{block[1]}", "", block[4], flags=re.MULTILINE)
        yield text.count("\n", 0, block.start()) + 2, block[3].split(" ")[0].strip("{."), code


def blocks(page, kind):
    """Return the code blocks of a language, each as (line number, code)."""
    return [(line, code) for line, language, code in steps(page) if language == kind]


def links(page):
    """Return the targets of links and images outside inline code."""
    text = re.sub(r"`[^`\n]+`", "", prose(page))
    return [*re.findall(r"\]\(([^)\s]+)\)", text), *re.findall(r'(?:src|href)="([^"]+)"', text)]


def slug(heading):
    """Return the anchor of a heading by GitHub's rule, which mkdocs.yml uses too."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)|<[^>]+>", r"\1", heading)
    text = re.sub(r"[^\w\- ]", "", text.strip().lower())
    return text.replace(" ", "-")


@cache
def anchors(page):
    """Return all anchors of a page."""
    text = prose(page)
    if "<!-- " in text and page.parent.name == "reference":
        import docs_hooks

        text = docs_hooks.generated(text)
    found = {slug(re.sub(r" *\{#.*\}$", "", title)) for title in re.findall(r"^#{1,6} +(.+?) *$", text, re.MULTILINE)}
    found |= set(re.findall(r"\{#([\w.-]+)\}", text)) | set(re.findall(r'\bid="([\w.-]+)"', text))
    return found | set(re.findall(r"^::: ([\w.]+)", text, re.MULTILINE))


def target_of(page, link):
    """Return the file a link points to and the anchor in it; None for external addresses."""
    address, _, anchor = link.partition("#")
    if address.startswith(SITE):
        return _published(address.removeprefix(SITE)), anchor
    if found := re.fullmatch(rf"{REPOSITORY}(?:blob|tree|edit)/main/(.+)", address):
        return ROOT / found[1], anchor
    if address.startswith(ADDRESSES):
        return None, anchor
    return ((page.parent / address).resolve() if address else page), anchor


def _published(path):
    """Return the file that the site serves at a path."""
    plain = ROOT / "docs" / path
    if plain.suffix:
        return plain
    for file in (plain / "index.md", plain / "README.md", plain.with_suffix(".md")):
        if file.exists():
            return file
    return plain.with_suffix(".md")
