"""Configuration files of a test, and the messages with which they are refused.

`write` is a fixture for test modules to import.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sow_server.config import ConfigError, Overrides, load

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a configuration file and returns its path."""

    def written(text: str) -> Path:
        path = tmp_path / "sow.toml"
        path.write_text(text, encoding="utf-8")
        path.chmod(0o600)  # it may have a token (rule X5)
        return path

    return written


def refusal(path: Path | None, overrides: Overrides | None = None) -> str:
    """The message with which a configuration is refused, without the folder of the file."""
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    return str(caught.value).replace(f"{path.parent}/" if path else "\0", "")
