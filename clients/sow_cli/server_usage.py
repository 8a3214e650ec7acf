"""CPU time and memory of the server: of its process if it is on this machine, otherwise from its metrics.

[1]  Nothing is guessed: a server that is not found has no figures.
[2]  A process counts with its children, which are its reader processes. Metrics have the server's process alone.
"""

from __future__ import annotations

import http.client
import ipaddress
import math
import re
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

SECONDS_MAX: Final = 10.0
"""The wait for the metrics page."""
_LISTENS: Final = "0A"
_PROC: Final = Path("/proc")


@dataclass(frozen=True, slots=True)
class Usage:
    """The use of a server until now."""

    cpu_seconds: float
    """User and system time since its start."""
    memory_bytes: int
    """Resident memory."""


class Meter(Protocol):
    """A server's use of its machine."""

    def read(self) -> Usage | None:
        """The use until now. None: it cannot be told."""


class NoMeter:
    """The server is elsewhere, and its metrics are not known."""

    def read(self) -> Usage | None:
        return None


class MetricsUnreadable(Exception):
    """The metrics page does not answer, or has no figures of a process."""


class MetricsPage:
    """The metrics of a server (docs/metrics.md)."""

    def __init__(self, url: str, token: str = "", context: ssl.SSLContext | None = None) -> None:
        self._request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
        self._context = context

    def read(self) -> Usage:
        """Raises MetricsUnreadable."""
        try:
            with urllib.request.urlopen(self._request, timeout=SECONDS_MAX, context=self._context) as answer:
                page = answer.read().decode("utf-8", "replace")
        except http.client.HTTPException as error:
            # The port of gRPC, say. The text of the error would be bytes of its answer.
            raise MetricsUnreadable(f"{self._request.full_url}: the answer is not HTTP, or is cut off") from error
        except (OSError, ValueError) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            raise MetricsUnreadable(f"{self._request.full_url}: {reason}") from error
        try:
            return usage_of_page(page)
        except MetricsUnreadable as error:
            raise MetricsUnreadable(f"{self._request.full_url}: {error}") from error


def usage_of_page(page: str) -> Usage:
    """The figures of a metrics page. Raises MetricsUnreadable if it has none."""
    found = {}
    for name in ("process_cpu_seconds_total", "process_resident_memory_bytes"):
        sample = re.search(rf"^{name} (\S+)$", page, re.MULTILINE)
        if sample is None:
            raise MetricsUnreadable(f"no {name}: is it the metrics page of sow-server?")
        try:
            found[name] = float(sample[1])
        except ValueError:
            found[name] = math.nan
        if not math.isfinite(found[name]):
            raise MetricsUnreadable(f"{name}: {sample[1]!r} is no figure")
    return Usage(found["process_cpu_seconds_total"], int(found["process_resident_memory_bytes"]))


class LocalProcess:
    """A process of this machine and its children, on Linux."""

    def __init__(self, pid: int, proc: Path = _PROC) -> None:
        self._pid = pid
        self._proc = proc

    def read(self) -> Usage | None:
        """None once the process has ended."""
        cpu_seconds, memory_bytes = 0.0, 0
        try:
            for pid in (self._pid, *children(self._pid, self._proc)):
                cpu_seconds += time.clock_gettime(_cpu_clock(pid))
                resident = re.search(
                    r"^VmRSS:\s+(\d+) kB$", (self._proc / str(pid) / "status").read_text(), re.MULTILINE
                )
                memory_bytes += int(resident[1]) * 1024 if resident else 0
        except OSError:
            return None
        return Usage(cpu_seconds, memory_bytes)


def local_meter(server: str, proc: Path = _PROC) -> Meter:
    """The process that listens at this address, if the address is of the loopback and the process is this user's."""
    host, _, port = server.rpartition(":")
    if not port.isdecimal() or not _is_loopback(host.strip("[]")):
        return NoMeter()
    sockets = set(listening_sockets(int(port), proc))
    holders = [pid for pid in _processes(proc) if sockets & set(_sockets_of(pid, proc))]
    # A child may hold a socket of its parent.
    of_children = {child for pid in holders for child in children(pid, proc)}
    servers = [pid for pid in holders if pid not in of_children]
    return LocalProcess(servers[0], proc) if len(servers) == 1 else NoMeter()


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listening_sockets(port: int, proc: Path = _PROC) -> Iterator[str]:
    """The numbers of the sockets that listen at this port, as the links of /proc/PID/fd show them."""
    for table in ("tcp", "tcp6"):
        try:
            lines = (proc / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == _LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                yield fields[9]


def children(pid: int, proc: Path = _PROC) -> list[int]:
    """The children of a process."""
    found = []
    for other in _processes(proc):
        try:
            stat = (proc / str(other) / "stat").read_text()
        except OSError:
            continue
        # The name, in parentheses, may have spaces and parentheses; the state and the parent follow it.
        if int(stat.rpartition(")")[2].split()[1]) == pid:
            found.append(other)
    return found


def _processes(proc: Path) -> Iterator[int]:
    try:
        yield from (int(entry.name) for entry in proc.iterdir() if entry.name.isdecimal())
    except OSError:
        return


def _sockets_of(pid: int, proc: Path) -> Iterator[str]:
    try:
        for link in (proc / str(pid) / "fd").iterdir():
            target = re.fullmatch(r"socket:\[(\d+)\]", str(link.readlink()))
            if target is not None:
                yield target[1]
    except OSError:  # another user's, or it has ended
        return


def _cpu_clock(pid: int) -> int:
    """The clock of the CPU time of a process on Linux (MAKE_PROCESS_CPUCLOCK with CPUCLOCK_SCHED)."""
    return (~pid << 3) | 2
