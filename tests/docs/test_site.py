"""The site builds without a warning and loads nothing from other servers."""

import os
import re
import subprocess
import sys

import pytest
from tests.docs.markdown import ROOT

pytest.importorskip("mkdocs", reason="the site's tools are not installed: pip install 'fedveil[docs]'")


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
