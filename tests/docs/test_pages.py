"""Links resolve, every page is in the menu, code parses, pages stay short; the site builds and loads nothing else."""

import ast
import os
import re
import subprocess
import sys

import pytest
from tests.docs.markdown import ROOT, anchors, blocks, links, name_of, pages, target_of

pytest.importorskip("griffe", reason="the site's tools are not installed: pip install 'fedveil[docs]'")


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_links_lead_to_files_and_anchors_that_exist(page):
    lost = []
    for link in links(page):
        file, anchor = target_of(page, link)
        if file is None:
            continue
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            lost.append(link)
    assert not lost


def test_every_page_is_in_the_menu_and_the_menu_has_only_pages():
    menu = (ROOT / "mkdocs.yml").read_text().split("\nnav:")[1]
    named = re.findall(r"([\w/-]+\.md)$", menu, re.MULTILINE)
    assert len(named) == len(set(named))
    assert set(named) == {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}


def test_hand_written_pages_have_at_most_45000_words():
    """A generated page starts with a comment that says so; measurements belong in results/."""
    texts = [path.read_text() for path in (ROOT / "docs").rglob("*.md")]
    assert sum(len(text.split()) for text in texts if not text.startswith("<!-- generated")) <= 45_000


def test_pages_that_code_and_messages_name_exist():
    sources = [path for name in ("src", "examples", "benchmarks") for path in (ROOT / name).rglob("*.*")]
    named = {
        (path.name, found)
        for path in sources
        if path.suffix in (".py", ".toml", ".html", ".sh")
        for found in re.findall(r"\bdocs/[\w/-]+\.md", path.read_text())
    }
    assert len(named) > 20
    assert not {(name, found) for name, found in named if not (ROOT / found).exists()}


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_python_blocks_are_python(page):
    for line, code in blocks(page, "python"):
        try:
            ast.parse(code)
        except SyntaxError as error:
            pytest.fail(f"{name_of(page)}:{line + (error.lineno or 1) - 1}: {error.msg}")


@pytest.mark.slow
def test_the_site_builds_strictly_and_loads_nothing_from_elsewhere(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert not re.search(r"WARNING|ERROR", done.stderr), done.stderr
    built = sorted((tmp_path / "site").rglob("*.html"))
    assert len(built) > len(list((ROOT / "docs").rglob("*.md"))) - 1
    for page in built:
        loaded = re.findall(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=[\"']?([^\"' >]+)", page.read_text())
        loaded += re.findall(
            r"<link\b[^>]*\brel=\"(?:stylesheet|preconnect|icon)\"[^>]*\bhref=\"([^\"]+)", page.read_text()
        )
        assert not [address for address in loaded if re.match(r"(https?:)?//", address)], page
        assert "<!-- commands" not in page.read_text()
        assert "data-md-component=source" not in page.read_text().replace('"', "")
