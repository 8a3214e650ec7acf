"""`sow-server` in odd surroundings ends with a documented exit code and one sentence, never a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

if sys.platform == "win32":
    pytest.skip("files of Unix", allow_module_level=True)

ROOT: Final = Path(__file__).parents[2]
PROGRAM: Final = "import sys; from sow_server.__main__ import main; sys.exit(main())"
ACTIONS: Final = ("--check-config", "--print-config", "--check-ready")


def run(*arguments: str | bytes, **options: Any) -> tuple[int, str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "proto"), str(ROOT / "clients"), str(ROOT / "replication")])
    options.setdefault("stdout", subprocess.PIPE)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": path},
        stderr=subprocess.PIPE,
        timeout=60,
        check=False,
        **options,
    )
    said = done.stderr.decode(errors="backslashreplace")
    assert "Traceback" not in said, said
    assert "Exception ignored" not in said, said
    return done.returncode, said


@pytest.mark.parametrize(
    "action",
    ["--check-config", *[pytest.param(one, marks=pytest.mark.long) for one in (*ACTIONS[1:], "--accept-clock")]],
)
def test_a_deleted_folder_is_told_in_a_sentence(tmp_path: Path, action: str) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()

    def gone() -> None:
        os.chdir(folder)
        folder.rmdir()

    code, said = run(action, preexec_fn=gone)
    assert code == 2
    assert "the current folder" in said


@pytest.mark.parametrize("action", ["--print-config", pytest.param("--check-config", marks=pytest.mark.long)])
def test_a_full_disk_under_the_output_is_told(action: str) -> None:
    with Path("/dev/full").open("w") as full:
        code, said = run(action, stdout=full)
    assert code == 2
    assert "No space left" in said


@pytest.mark.parametrize("action", ["--print-config", pytest.param("--check-config", marks=pytest.mark.long)])
def test_outputs_may_be_closed(tmp_path: Path, action: str) -> None:
    code, _ = run(action, cwd=tmp_path, preexec_fn=lambda: os.close(1))
    assert code == 0


@pytest.mark.long
@pytest.mark.parametrize("option", ["--config", "--listen", "--data-dir", "--prune-interval"])
def test_arguments_that_are_no_utf8_are_told(tmp_path: Path, option: str) -> None:
    code, said = run(
        option, b"\xff\xfe", "--check-config" if option != "--data-dir" else "--accept-clock", cwd=tmp_path
    )
    assert code == 2
    assert said.startswith("sow-server: ")


@pytest.mark.long
@pytest.mark.parametrize("host", ["[::1", "[::1]:x", ":", "x", "", "localhost:99999", "a..b:1", f"{'a' * 64}.x:1"])
def test_an_address_that_cannot_be_is_told(tmp_path: Path, host: str) -> None:
    code, said = run("--insecure", "--listen", host, cwd=tmp_path)
    assert code == 2
    assert said.startswith("sow-server: ")
