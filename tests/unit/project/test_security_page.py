"""docs/security.md: its configurations and its access file load, and its tables are complete.

tests/integration/test_security_page.py runs its commands.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sow_server.access.file import load_access
from sow_server.access.needs import GRANTABLE
from sow_server.access_control import check
from sow_server.config import load
from tests.support.oracles.access import grant, identity, write_private
from tests.support.servers.certificates import DAY, Authority

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "security.md").read_text(encoding="utf-8")
BLOCKS: list[str] = re.findall(r"```toml\n(.+?)```", PAGE, re.DOTALL)
ACCESS_FILES = [text for text in BLOCKS if text.startswith("# auth.toml")]
CONFIGURATIONS = [text for text in BLOCKS if text not in ACCESS_FILES]
PROGRAMS: list[str] = re.findall(r"```python\n(.+?)```", PAGE, re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the configurations name."""
    monkeypatch.chdir(tmp_path)
    authority = Authority(tmp_path, "ca")
    authority.issue("server")
    (tmp_path / "revoked.pem").write_bytes(authority.revocations([], due=365 * DAY))
    write_private(tmp_path / "auth.toml", identity("desk-eu", "trader-eu") + grant("trader-eu", "orders", "read"))
    for program in PROGRAMS:
        exec(compile(program, "docs/security.md", "exec"), {})
    return tmp_path


@pytest.mark.parametrize("text", CONFIGURATIONS, ids=lambda text: text.splitlines()[0])
def test_a_configuration_of_the_page_starts_a_server(text: str, folder: Path) -> None:
    path = folder / "sow.toml"
    path.write_text(text, encoding="utf-8")
    assert check(load(path)) == [], "and nothing of it is doubtful"


def test_there_is_one_configuration_for_each_kind_of_credential(folder: Path) -> None:
    kinds = []
    for text in CONFIGURATIONS:
        (folder / "sow.toml").write_text(text, encoding="utf-8")
        kinds += [listener.auth.value for listener in load(folder / "sow.toml").listeners]
    assert kinds == ["token", "certificate", "jwt"]


@pytest.mark.parametrize("text", ACCESS_FILES)
def test_an_access_file_of_the_page_loads(text: str, tmp_path: Path) -> None:
    """Story: its identity had a role that the file did not have."""
    path = tmp_path / "auth.toml"
    write_private(path, text)
    found = load_access(path)
    assert found.identities["spark"].limits.rpcs == 200
    assert found.peers["ldn-1"].topics == r"orders\..*"


def test_every_action_has_its_line() -> None:
    assert re.findall(r"^\| `([a-z-]+)` \| [a-z]", PAGE, re.MULTILINE) == [action.value for action in GRANTABLE]


def headings(page: Path) -> set[str]:
    found = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", one).lower().replace(" ", "-") for one in found}


def test_every_link_leads_somewhere() -> None:
    for file, place in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", PAGE):
        target = DOCS / (file or "security.md")
        assert target.exists(), file
        assert not place or place in headings(target), f"{file}#{place}"
