"""The time of a command, from the start of its process to its end: a person waits, and scripts make thousands."""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Final

from benchmarks.processes import TOPIC, SowServer
from benchmarks.rows import MILLISECONDS, Figure, Limit, Row, Target, ratio, ratio_range, take_turns
from benchmarks.setting import Setting
from sow_client import Client

TARGET: Final = Target(200.0, MILLISECONDS, at_least=False)
COMMAND_SECONDS: Final = 60
IMPORTS: Final = "import click, grpc, msgspec, google.protobuf.descriptor_pb2"


def get(setting: Setting) -> Iterator[Row]:
    """`sow get` of one record, and beside it a Python that only imports the libraries of the command."""
    rounds = setting.size(21, quick=7)
    with SowServer(setting.directory / "sow") as server:
        with Client(server.address) as client:
            client.publish(TOPIC, {"id": 1, "price": 9.5}, ttl="never")
        spent: dict[str, list[float]] = {}

        def process(name: str, *arguments: str) -> Callable[[], float]:
            def run() -> float:
                before = _cpu_seconds()
                begin = time.perf_counter()
                subprocess.run(
                    [sys.executable, *arguments],
                    check=True,
                    stdout=subprocess.DEVNULL,
                    timeout=COMMAND_SECONDS,
                    env={key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"},
                )
                milliseconds = (time.perf_counter() - begin) * 1000
                spent.setdefault(name, []).append((_cpu_seconds() - before) * 1000)
                return milliseconds

            return run

        command = ("-m", "sow_cli", "--server", server.address, "get", TOPIC, "1", "--format")
        contestants = {
            "pipe": process("pipe", *command, "ndjson"),
            "table": process("table", *command, "table"),
            "imports": process("imports", "-c", IMPORTS),
        }
        take_turns(1, contestants)  # bytecode is written, files are in memory
        spent.clear()
        setting.say(f"{rounds} rounds")
        took = take_turns(rounds, contestants)
    bare = statistics.median(took["imports"])
    for name, case in (("pipe", "as NDJSON"), ("table", "as a table")):
        ours = Figure(statistics.median(took[name]), MILLISECONDS)
        yield Row(
            f"sow get of one record, {case}: the whole process, {rounds} rounds",
            ours,
            judged=ours,
            target=TARGET,
            limits=(
                Limit("importing click, grpc, msgspec and protobuf", Figure(bare, MILLISECONDS), bare / ours.value),
            ),
            note=f"CPU {statistics.median(spent[name]):.0f} ms, {ratio(took[name], took['imports'])} the imports, "
            f"{ratio_range(took[name], took['imports'])}; machine: {setting.machine}",
        )


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
