"""The supervisor: starts the cells of a machine, starts one again that ended, and stops them all.

[1]  A cell that ends is started again after a pause that grows (`pauses`); the others go on.
[2]  A cell that refuses to start ends the whole, with its message, as long as not all cells have been ready once.
     Later, and where it was killed, it is started again like any other.
[3]  A cell starts only once no process uses its data directory. Cells of a supervisor that was killed may still stop.
[4]  SIGTERM and SIGINT stop all cells in order; the supervisor ends after the last one, however long that takes. SIGHUP
     goes to each cell that is ready, and to one that is starting as soon as it is, but not once all are to stop. Cells
     are in process groups of their own, so they get a terminal's signals through the supervisor alone.
[5]  `ready` is logged once, when all cells are.
[6]  No cell outlives the supervisor (`supervised`).
[7]  Processes that it inherits, as process 1 of a container does, are not left as dead ones: a cell that was killed
     leaves its reader processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from sow_server import logs
from sow_server.config import Config, ConfigError
from sow_server.config.file import read_text
from sow_server.engine.opening import claim_directory, in_use
from sow_server.signals import ignore_reloads
from sow_server.supervision import directories, placement_file
from sow_server.supervision.output import Lines, Output
from sow_server.supervision.pauses import Pauses

IN_USE_SECONDS_MAX: Final = 120.0
"""How long a cell waits for the end of another process that uses its data."""
LOOK_SECONDS: Final = 0.2
REAP_SECONDS: Final = 1.0
OUTPUT_SECONDS_MAX: Final = 1.0
"""How long the supervisor waits for the last lines of a cell that ended. A process of it may hold its output open."""
READ_BYTES: Final = 2**16
REFUSED: Final = 2
"""The exit code of a server that cannot start."""

log = structlog.get_logger(__name__)


class CannotStart(Exception):
    """A cell refuses to start: one message with the reason."""


@dataclass(frozen=True, slots=True)
class Starting:
    """All that starts a cell. `arguments`: of the server; `once`: further ones, for the first start alone."""

    name: str
    data_dir: Path
    arguments: tuple[str, ...]
    once: tuple[str, ...] = ()

    def options(self, starts: int) -> tuple[str, ...]:
        """The arguments of the server, after so many starts."""
        return self.arguments if starts else (*self.arguments, *self.once)


class ConfigFile:
    """The configuration file, as it was when the supervisor started (supervised [3])."""

    def __init__(self, path: Path, text: str) -> None:
        self._path = path
        self._text = text
        self._kept = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the supervisor runs
        self._kept.write(text.encode())
        self._kept.flush()
        self._told = text

    @property
    def descriptor(self) -> int:
        return self._kept.fileno()

    def tell_change(self) -> None:
        """Says in the log, once for each change, that the file is another one by now. A pipe cannot change."""
        if not self._path.is_file():
            return
        try:
            found = read_text(self._path)
        except ConfigError as error:
            found = str(error)
        if found not in (self._text, self._told):
            effect = "cells go on with the configuration of the start; it counts once all are restarted"
            log.warning("configuration_changed", cell="all", file=str(self._path), effect=effect)
        self._told = found


def run(
    cells: Mapping[str, Config], arguments: Sequence[str], once: Sequence[str], file: ConfigFile | None = None
) -> int:
    """Starts all cells and watches them until it is told to stop; returns the exit code. `arguments`: those of each
    cell; `once`: those of its first start alone. Raises CannotStart, ConfigError, OpenError."""
    first = next(iter(cells.values()))
    data_dir = first.server.data_dir.parent
    stream = logs.standard_error(cell="all")
    logs.configure(first.log, stream)
    claim = claim_directory(data_dir)
    try:
        directories.check_cells(data_dir, len(cells))
        placement_file.prepare(cells)
        starting = [
            Starting(name, config.server.data_dir, (*arguments, "--cell", name), tuple(once))
            for name, config in cells.items()
        ]
        return asyncio.run(_supervise(starting, Output(first.log, stream), file))
    finally:
        claim.release()


async def _supervise(starting: Sequence[Starting], output: Output, file: ConfigFile | None) -> int:
    return await Supervisor(starting, output, file).run()


class Supervisor:
    """Owns the processes of the cells."""

    def __init__(self, cells: Sequence[Starting], output: Output, file: ConfigFile | None = None) -> None:
        self.file: Final = file
        # The writing end is this process's alone; a descriptor that no child is given is closed in it ([6]).
        self._alive_read, self._alive = os.pipe()
        self._stopping = asyncio.Event()
        self._cells = tuple(_Cell(cell, self, output) for cell in cells)
        self._all_were_ready = False

    async def run(self) -> int:
        """Runs the cells until SIGTERM or SIGINT; returns the exit code. Raises CannotStart."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        tasks = [asyncio.create_task(cell.keep()) for cell in self._cells]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            self._stop_all()
            await asyncio.wait(tasks)
            in_order = [task.result() for task in tasks]
        finally:
            for cell in self._cells:
                cell.signal(signal.SIGKILL)  # where the supervisor itself failed: none may live on
        log.info("stopped", cell="all")
        return 0 if all(in_order) else REFUSED

    def _stop(self) -> None:
        if self._stopping.is_set():
            left = [cell.name for cell in self._cells if cell.runs]
            log.info("still_stopping", cell="all", cells=left)
            return
        ignore_reloads()
        log.info("stopping", cell="all")
        self._stop_all()

    def _stop_all(self) -> None:
        self._stopping.set()
        for cell in self._cells:
            cell.signal(signal.SIGTERM)

    def _reload(self) -> None:
        for cell in self._cells:
            cell.reload()

    def _reap(self) -> None:
        """Takes note of the end of processes that are not its own ([7])."""
        again = any(cell.starts for cell in self._cells)
        own = {cell.pid for cell in self._cells}
        while not again:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            if ended.si_pid in own:
                again = True  # asyncio awaits it, and it stands before the others until then
            else:
                os.waitpid(ended.si_pid, os.WNOHANG)
        asyncio.get_running_loop().call_later(REAP_SECONDS, self._reap)

    # -- for its cells ------------------------------------------------------------------------------------------------

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    @property
    def descriptor(self) -> int:
        """The end of the pipe that each cell gets ([6])."""
        return self._alive_read

    @property
    def is_first_start(self) -> bool:
        """True until all cells have been ready once ([2])."""
        return not self._all_were_ready

    async def pause(self, seconds: float) -> None:
        """Waits, or returns at once when all is to stop."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)

    def became_ready(self) -> None:
        """A cell is ready; tells it if all are, for the first time ([5])."""
        addresses = [cell.address for cell in self._cells]
        if self._all_were_ready or not all(addresses):
            return
        self._all_were_ready = True
        log.info("ready", cell="all", address=addresses[0], addresses=addresses, cells=len(addresses))


class _Cell:
    """One cell through its lives."""

    def __init__(self, starting: Starting, supervisor: Supervisor, output: Output) -> None:
        self._starting = starting
        self._supervisor = supervisor
        self._output = output
        self._pauses = Pauses()
        self._process: asyncio.subprocess.Process | None = None
        self._ready_since = 0.0
        self._reload_when_ready = False
        self._starts = 0
        self.starts = False
        """True while its process is being started."""
        self.address = ""
        """Its first address while it is ready; "" while it is not."""

    @property
    def name(self) -> str:
        return self._starting.name

    @property
    def pid(self) -> int | None:
        """That of its process; None: it has none."""
        return None if self._process is None else self._process.pid

    @property
    def runs(self) -> bool:
        return self._process is not None

    async def keep(self) -> bool:
        """Starts it again and again until all is to stop; returns True if it stopped in order. Raises CannotStart
        ([2])."""
        while await self._is_free():
            lines = Lines(self.name, self._output, self._is_ready)
            code = await self._live(lines)
            ready_seconds = time.monotonic() - self._ready_since if self.address else 0.0
            self.address = ""
            if self._supervisor.stopping:
                in_order = code in (0, -signal.SIGTERM)  # the signal ends a process that has hardly begun
                if not in_order:
                    log.error("cell_ended", cell=self.name, code=code, message=lines.trouble)
                return in_order
            if code == REFUSED and self._supervisor.is_first_start and not ready_seconds:
                raise CannotStart(f"{self.name}: {lines.trouble or 'refuses to start, see the log'}")
            pause = self._pauses.ended(ready_seconds)
            log.error("cell_ended", cell=self.name, code=code, message=lines.trouble, starts_again_in_seconds=pause)
            await self._supervisor.pause(pause)
        return True

    async def _is_free(self) -> bool:
        """Waits until no process uses its data ([3]). False: all is to stop. Raises CannotStart."""
        give_up = time.monotonic() + IN_USE_SECONDS_MAX
        told = False
        while not self._supervisor.stopping:
            try:
                used = in_use(self._starting.data_dir)
            except OSError:
                used = False  # the server says it better
            if not used:
                return True
            if not told:
                told = True
                log.warning("cell_waits", cell=self.name, data_dir=str(self._starting.data_dir), reason="in use")
            if time.monotonic() > give_up and self._supervisor.is_first_start:
                raise CannotStart(
                    f"{self.name}: {self._starting.data_dir}: another process is using this data directory"
                )
            await self._supervisor.pause(LOOK_SECONDS)
        return False

    async def _live(self, lines: Lines) -> int:
        """One life; returns the exit code."""
        self.starts = True
        try:
            self._process = await self._start()
        except OSError as error:  # too many processes, no memory: it may pass
            lines.trouble = f"cannot be started: {error.strerror}"
            return REFUSED
        finally:
            self.starts = False
        if self._supervisor.stopping:  # it came while the process was started
            self.signal(signal.SIGTERM)
        log.info("cell_started", cell=self.name, pid=self._process.pid)
        assert self._process.stdout is not None, "a pipe"
        reading = asyncio.create_task(_read(self._process.stdout, lines))
        code = await self._process.wait()
        self._process = None
        await asyncio.wait([reading], timeout=OUTPUT_SECONDS_MAX)
        reading.cancel()
        lines.end()
        return code

    async def _start(self) -> asyncio.subprocess.Process:
        descriptors = [self._supervisor.descriptor]
        options = [*self._starting.options(self._starts), "--supervised", str(descriptors[0])]
        file = self._supervisor.file
        if file is not None:
            descriptors.append(file.descriptor)
            options += ["--config-text", str(file.descriptor)]
            if self._starts:
                file.tell_change()
        self._starts += 1
        # The modules come from where this process has them. With -m alone they could come from the working directory.
        paths = os.pathsep.join(map(os.path.abspath, sys.path))
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "sow_server", *options),
            env=os.environ | {"PYTHONPATH": paths},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=descriptors,
            process_group=0,
        )

    def _is_ready(self, event: dict[str, object]) -> None:
        addresses = event.get("addresses")
        self.address = str(event.get("address"))
        self._ready_since = time.monotonic()
        log.info(
            "cell_ready",
            cell=self.name,
            address=self.address,
            addresses=addresses,
            instance=event.get("instance"),
            data_dir=event.get("data_dir"),
        )
        if self._reload_when_ready:
            self.reload()
        self._supervisor.became_ready()

    def signal(self, number: int) -> None:
        """Sends a signal to its process, if it runs."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def reload(self) -> None:
        """SIGHUP, once it is ready: before, it would end the process ([4])."""
        self._reload_when_ready = not self.address
        if self.address:
            self.signal(signal.SIGHUP)


async def _read(stream: asyncio.StreamReader, lines: Lines) -> None:
    while data := await stream.read(READ_BYTES):
        lines.feed(data)
