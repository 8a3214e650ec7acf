"""Each subcommand of `sow` in odd surroundings ends with a documented exit code and a sentence, never a traceback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import click
import pytest

from sow_cli.command import sow
from tests.support.oracles.examples import examples
from tests.support.oracles.odd_surroundings import STOPPED_AFTER_SECONDS
from tests.support.servers.interrupted import spread
from tests.support.servers.server import ServerProcess

if sys.platform == "win32":
    pytest.skip("forks", allow_module_level=True)

ROOT: Final = Path(__file__).parents[2]
CODES: Final = (0, 1, 2, 3, 4, 130, 143)
"""As docs/cli.md has them."""
VALUES: Final = {
    "topic": "orders",
    "topics": "orders",
    "name": "orders",
    "files": "records.ndjson",
    "file": "export.ndjson",
    "folder": "made-certificates",
    "keys": "1",
    "key": "1",
    "command": "true",
    "to": "earliest",
    "text": "/id = 1",
    "pattern": "orders.*",
    "peer": "elsewhere",
    "identity": "somebody",
    "action": "publish",
    "shell": "bash",
}
"""Values of the arguments that are required, by name."""
MORE: Final[dict[tuple[str, ...], list[str]]] = {
    ("subscribe",): ["--for", "50ms"],
    ("bench",): ["--for", "1s"],
    ("token", "new"): ["--out", "token"],
    ("console",): ["--listen", "127.0.0.1:0"],
    ("http",): ["--listen", "127.0.0.1:0"],
    ("replication", "add-peer"): ["127.0.0.1:1"],
    ("cells", "move"): ["--to", "b"],
    ("delete",): ["--key", "1"],
    ("due",): [],
}
ENDLESS: Final = {("console",), ("http",)}
"""Commands that run until they are stopped."""
FEW: Final = ["publish orders records.ndjson", "context list"]
"""Commands for the default run, one with a server and one without; all others are marked `long`."""
STOPPED: Final = [
    FEW[0], "subscribe orders --for 50ms", "topics", "get orders 1", "query orders", "status", "context list",
    "export orders out.csv", "load orders records.ndjson --force", "history orders 1", "durable list orders", "--help",
]  # fmt: skip
"""Commands that Ctrl-C ends at any point; those behind the first one are marked `long`."""
Case = dict[str, Any]


def leaves(group: click.Group, context: click.Context, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of each subcommand, with values for its required arguments."""
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        words = (*above, name)
        if isinstance(command, click.Group):
            yield from leaves(command, click.Context(command, parent=context, info_name=name), words)
            continue
        given = [
            VALUES[param.name or ""]
            for param in command.params
            if isinstance(param, click.Argument) and (param.required or param.name == "files")
        ]
        if words == ("lease",):
            given = ["orders", "--key", "1", "--", "true"]
        yield (*words, *given, *MORE.get(words, []))


ALL: Final = list(leaves(sow, click.Context(sow, info_name="sow")))


class Commands:
    """Owns the process that forks the commands."""

    def __init__(self, folder: Path, server: str) -> None:
        self.folder = folder
        path = os.pathsep.join([str(ROOT), *[str(ROOT / one) for one in ("proto", "clients")]])
        self.environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "TERM": "xterm",
            "SOW_PAGER": "",
            "SOW_SERVER": server,
            "GRPC_VERBOSITY": "NONE",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.oracles.odd_surroundings"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env=self.environment | {"PYTHONPATH": path},
        )

    def run(self, arguments: Sequence[str | bytes], **case: Any) -> Case:
        """One command; `environment` replaces variables, None removes them."""
        variables = {**self.environment, **case.pop("environment", {})}
        case["environment"] = {name: value for name, value in variables.items() if value is not None}
        case["arguments"] = [os.fsencode(one).hex() for one in arguments]
        if tuple(arguments)[:1] in ENDLESS:
            case.setdefault("stop_after", STOPPED_AFTER_SECONDS)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(case) + "\n")
        self.process.stdin.flush()
        found: Case = json.loads(self.process.stdout.readline())
        return found


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    folder = tmp_path_factory.mktemp("odd")
    folder.chmod(0o755)
    (folder / "records.ndjson").write_text('{"id": 1}\n')
    with ServerProcess(folder / "server", '[topics.orders]\nkey = ["/id"]\n') as server:
        made = Commands(folder, server.address)
        yield made
        assert made.process.stdin is not None
        made.process.stdin.close()
        made.process.wait(30)


def check(found: Case, *, speaks: bool = True) -> None:
    shown = f"{found['code']}: {found['out'][-300:]} {found['err']}"
    assert "Traceback" not in found["out"] + found["err"], shown
    assert "Exception ignored" not in found["err"], shown
    assert found["code"] in CODES, shown
    if speaks and found["code"] in (1, 2, 3, 4):
        assert found["err"].strip(), shown


def home(folder: Path, name: str, file: str, text: bytes) -> str:
    """A folder for XDG_CONFIG_HOME with one file."""
    path = folder / name / "sow" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text)
    path.chmod(0o600)
    return str(folder / name)


Situation = Callable[[Commands, tuple[str, ...]], Case]

SITUATIONS: Final[dict[str, Situation]] = {
    "unknown user without HOME": lambda sow, words: sow.run(words, user=54_321, environment={"HOME": None}),
    "deleted folder": lambda sow, words: sow.run(words, deleted_folder=True),
    "deleted folder, no HOME": lambda sow, words: sow.run(words, deleted_folder=True, environment={"HOME": None}),
    "argument that is no UTF-8": lambda sow, words: sow.run([*words, b"\xff\xfe"]),
    "values that are no UTF-8": lambda sow, words: sow.run(
        [b"or\xffders" if one in VALUES.values() else one for one in words]
    ),
    "variables that are no UTF-8": lambda sow, words: sow.run(words, environment={"SOW_SERVER": "\udcff:1"}),
    "stdout is closed": lambda sow, words: sow.run(words, closed=[1]),
    "stderr is closed": lambda sow, words: sow.run(words, closed=[2]),
    "all are closed": lambda sow, words: sow.run(words, closed=[0, 1, 2]),
    "stdout is full": lambda sow, words: sow.run(words, out="/dev/full"),
    "stderr is full": lambda sow, words: sow.run(words, err="/dev/full"),
    "both are full": lambda sow, words: sow.run(words, out="/dev/full", err="/dev/full"),
    "no TERM": lambda sow, words: sow.run(words, environment={"TERM": None}),
    "dumb terminal": lambda sow, words: sow.run(words, environment={"TERM": "dumb", "SOW_FORMAT": "table"}),
    "no columns": lambda sow, words: sow.run(words, environment={"COLUMNS": "0", "SOW_FORMAT": "table"}),
    "one column": lambda sow, words: sow.run(words, environment={"COLUMNS": "1", "SOW_FORMAT": "table"}),
    "columns are no number": lambda sow, words: sow.run(words, environment={"COLUMNS": "x", "SOW_FORMAT": "table"}),
    "HOME is a file": lambda sow, words: sow.run(words, environment={"HOME": "/dev/null"}),
    "context with a fault": lambda sow, words: sow.run(
        words, environment={"XDG_CONFIG_HOME": home(sow.folder, "fault", "context", b"\xff\x00\n")}
    ),
    "context that is not there": lambda sow, words: sow.run(words, environment={"SOW_CONTEXT": "prod"}),
    "context that is no TOML": lambda sow, words: sow.run(
        words,
        environment={
            "SOW_CONTEXT": "prod",
            "XDG_CONFIG_HOME": home(sow.folder, "toml", "contexts/prod.toml", b"server = \n"),
        },
    ),
    "format that is none": lambda sow, words: sow.run(words, environment={"SOW_FORMAT": "yaml"}),
    "token file that is a folder": lambda sow, words: sow.run(words, environment={"SOW_TOKEN_FILE": "/"}),
}
HOSTS: Final = (
    "a..b", "a..b:7450", ".", "..:1", f"{'a' * 64}.example:7450", "a" * 64, "[::1", "[::1]:x", "::1]", "[]:1", ":",
    ":1", "localhost:99999", "localhost:-1", "a b:1", "a,,b", ",", "bücher..example:1", "unix:", "dns:",
    "ipv4:", "é" * 70, "a\nb", "[fe80::1%nowhere]:1", "http://localhost:1",
)  # fmt: skip


@pytest.mark.parametrize("situation", SITUATIONS)
def test_few_commands_in_all_surroundings(commands: Commands, situation: str) -> None:
    if situation.startswith("unknown user") and os.getuid():
        pytest.skip("becoming another user needs root")
    for words in FEW:
        check(SITUATIONS[situation](commands, tuple(words.split())), speaks=False)


@pytest.mark.long
@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("words", ALL, ids=" ".join)
def test_all_commands_in_all_surroundings(commands: Commands, situation: str, words: tuple[str, ...]) -> None:
    if situation.startswith("unknown user") and os.getuid():
        pytest.skip("becoming another user needs root")
    found = SITUATIONS[situation](commands, words)
    check(found, speaks="closed" not in situation and "full" not in situation)


# gRPC takes "dns:" for a name, and the command waits for the longest time of a connection.
@pytest.mark.parametrize("host", [pytest.param(one, marks=[pytest.mark.long] * (one == "dns:")) for one in HOSTS])
def test_a_host_that_cannot_be_is_told_in_a_sentence(commands: Commands, host: str) -> None:
    """An empty or long label of a name was a traceback of the codec for names."""
    check_host(commands, host)


@pytest.mark.long
@pytest.mark.parametrize("host", HOSTS)
def test_a_host_that_cannot_be_is_told_beside_another_one(commands: Commands, host: str) -> None:
    check_host(commands, f"{host},127.0.0.1:1")


def check_host(commands: Commands, server: str) -> None:
    found = commands.run(["--server", server, "topics"])
    check(found)
    assert found["code"] in (2, 3), found


@pytest.mark.parametrize("words", [pytest.param(one, marks=[pytest.mark.long] * (one != FEW[0])) for one in STOPPED])
def test_ctrl_c_at_any_point_ends_in_order(commands: Commands, words: str) -> None:
    """Some points of all, and many in the long run. They are counted from the first line of `main` on: the start of
    the interpreter is not ours, nor are the imports before in the script that an installer makes."""
    whole = commands.run(words.split(), interrupt_at=0)
    assert whole["code"] == 0 or "RECORD_NOT_FOUND" in whole["err"], whole
    for point in spread(whole["points"], examples(150))[1:]:
        found = commands.run(words.split(), interrupt_at=point)
        if found["points"] < point:
            assert found["code"] == whole["code"], "it had fewer points this time"
            continue
        check_interrupted(found, f"point {point} of {whole['points']}")


def check_interrupted(found: Case, where: str) -> None:
    check(found, speaks=False)
    shown = f"{where}: {found}"
    assert found["code"] == 130, shown
    assert len(found["err"].splitlines()) <= 1, shown
    assert "Aborted" not in found["err"], shown


@pytest.mark.long
@pytest.mark.parametrize("words", STOPPED)
def test_ctrl_c_at_any_time_ends_in_order(commands: Commands, words: str) -> None:
    """As above, by time: a signal also ends a wait in C."""
    for step in range(12):
        found = commands.run(words.split(), stop_after=step * 0.008, signal=signal.SIGINT)
        if found["code"] != 0 and "RECORD_NOT_FOUND" not in found["err"]:  # it was done before
            check_interrupted(found, f"step {step}")
