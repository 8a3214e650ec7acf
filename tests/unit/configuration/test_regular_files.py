"""Files of a configuration are regular ones: a pipe without a writer held each reload that came later."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import pytest

from sow_server.access.file import load_access
from sow_server.certificates import CertificateFault, read_file
from sow_server.config import ConfigError, load
from sow_server.config.options import token_in
from sow_server.placement import load_placement

READERS: list[Callable[[Path], object]] = [
    load_placement,
    load_access,
    token_in,
    lambda path: read_file("ca", path),
]


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("kind", ["pipe", "device", "link to a pipe"])
def test_a_file_that_is_no_regular_one_is_refused_at_once(
    tmp_path: Path, read: Callable[[Path], object], kind: str
) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    if kind == "device":
        path = Path("/dev/zero")
    if kind == "link to a pipe":
        (tmp_path / "link").symlink_to(path)
        path = tmp_path / "link"
    with pytest.raises((ConfigError, CertificateFault, OSError), match="it is no regular file"):
        read(path)


def test_the_configuration_itself_may_come_through_a_pipe(tmp_path: Path) -> None:
    """As with `sow-server --config <(…)`: it is read once."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = Thread(target=path.write_text, args=('[server]\ninstance = "nyc"\n',), daemon=True)
    writer.start()
    assert load(path).server.instance == "nyc"
    writer.join(10)
    assert not writer.is_alive()
