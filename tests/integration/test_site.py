"""`make docs`: the site builds without a fault, and asks no other server for anything."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.servers.server import ROOT

SECONDS_MAX = 300.0
# 5 s of CPU time. Links and anchors are checked by tests/unit/project/test_docs_site.py, too, and CI runs `make docs`.
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, check=False, capture_output=True, text=True, timeout=SECONDS_MAX
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    return folder


def test_no_page_loads_anything_from_another_server(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 60
    for page in pages:
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r'<(?:script|img|iframe|source)\b[^>]*\bsrc="([^"]+)"', text)
        loaded += re.findall(r'<link\b[^>]*\brel="(?:stylesheet|preload|preconnect|icon)"[^>]*\bhref="([^"]+)"', text)
        assert [address for address in loaded if address.startswith(("http", "//"))] == [], page


def test_a_citation_of_a_rule_is_a_link(site: Path) -> None:
    page = (site / "client.html").read_text(encoding="utf-8")
    assert 'rule <a href="rules.html#l21">L21</a>' in page
    assert 'id="l21"' in (site / "rules.html").read_text(encoding="utf-8")


def test_the_reference_has_docstrings_and_comments(site: Path) -> None:
    client = (site / "reference" / "python" / "client.html").read_text(encoding="utf-8")
    assert 'id="sow_client.Client.publish"' in client
    assert "Publishes one record" in client
    call = (site / "reference" / "rpc" / "sow.html").read_text(encoding="utf-8")
    assert 'href="sow.html#publishrequest"' in call or 'href="#publishrequest"' in call


def test_a_file_outside_of_the_pages_is_shown(site: Path) -> None:
    shown = site / "source" / "deploy" / "prometheus" / "sow.rules.yml.html"
    assert "SowDown" in shown.read_text(encoding="utf-8")
