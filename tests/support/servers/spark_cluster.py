"""Spark clusters of processes on this machine, for tests: a master and two workers, or Spark's own `local-cluster`.

[1]  Nothing is written outside the folder that is given: Spark's home is there, with links to what PySpark has.
[2]  Every process is ended, by its id, whatever becomes of the test.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import pyspark

from tests.support.servers.server import ROOT, free_port, until

LOCAL: Final = "local-cluster[2,1,1024]"
START_SECONDS: Final = 180.0
END_SECONDS: Final = 900.0
SOURCES: Final = [ROOT, *(ROOT / name for name in ("proto", "clients", "spark_connector"))]
JAVA: Final = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
CONFIGURATION: Final = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.memory": "1g",
    "spark.driver.extraJavaOptions": JAVA,
    "spark.executor.memory": "1g",
    "spark.executor.extraJavaOptions": JAVA,
    "spark.python.authenticate.socketTimeout": "60s",
    "spark.sql.shuffle.partitions": "2",
    "spark.task.maxFailures": "8",
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.quantile": "0.25",
    "spark.speculation.multiplier": "1.2",
    "spark.speculation.minTaskRuntime": "500ms",
}
"""Tasks are repeated, and slow ones run twice at a time."""


class Job:
    """A driver, with the processes that it has started."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self._log = log
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
            )

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def kill9(self) -> None:
        """Kills the driver: its program and its JVM at once."""
        if self.runs:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(30)

    def succeeds(self) -> bool:
        """Waits for its end."""
        until(lambda: not self.runs, END_SECONDS, "a job of Spark to end")
        return self._process.wait() == 0

    def ends_well(self) -> None:
        assert self.succeeds(), self.log[-5_000:]


class SparkCluster:
    """A master and two workers, each in a process of its own; with `local`, processes of executors alone."""

    def __init__(self, folder: Path, *, local: bool = False) -> None:
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self._jobs: list[Job] = []
        home, origin = folder / "home", Path(pyspark.__file__).parent
        home.mkdir(parents=True)
        for name in ("bin", "jars"):
            (home / name).symlink_to(origin / name)
        self._environment = os.environ | {
            "SPARK_HOME": str(home),
            "SPARK_LOCAL_DIRS": str(folder / "local"),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": JAVA,
            "PYSPARK_PYTHON": sys.executable,
            "PYSPARK_DRIVER_PYTHON": sys.executable,
            "PYTHONPATH": os.pathsep.join([*map(str, SOURCES), os.environ.get("PYTHONPATH", "")]),
        }
        self._submit, self._class = str(home / "bin" / "spark-submit"), str(home / "bin" / "spark-class")
        self.url = LOCAL
        self.speculates = not local
        """Whether slow tasks run twice: all executors of `local-cluster` are on one host."""
        if not local:
            try:
                self._start()
            except BaseException:
                self.__exit__(None, None, None)
                raise

    def _start(self) -> None:
        port = str(free_port())
        self.url = f"spark://127.0.0.1:{port}"
        log = self._folder / "master.log"
        deploy = "org.apache.spark.deploy"
        self._daemon(log, f"{deploy}.master.Master", "--host", "127.0.0.1", "--port", port, "--webui-port", "0")
        for number in range(2):
            # Hosts of different names: Spark runs the second attempt at a slow task on another host only.
            more = ("--host", f"127.0.0.{number + 1}", "-c", "1", "-m", "1g", "-d", str(self._folder / f"work{number}"))
            self._daemon(
                self._folder / f"worker{number}.log", f"{deploy}.worker.Worker", *more, "--webui-port", "0", self.url
            )
        until(
            lambda: log.read_text(errors="replace").count("Registering worker") == 2, START_SECONDS, "Spark's workers"
        )

    def _daemon(self, log: Path, name: str, *arguments: str) -> None:
        with log.open("wb") as file:
            self._processes.append(
                subprocess.Popen(
                    [self._class, name, *arguments], env=self._environment, stdout=file, stderr=file, cwd=self._folder
                )
            )

    def submit(self, program: Path, *arguments: str, **settings: str) -> Job:
        """Starts a driver. `settings` are Spark's, with `__` for a dot."""
        chosen = CONFIGURATION | {name.replace("__", "."): value for name, value in settings.items()}
        command = [self._submit, "--master", self.url]
        for name, value in chosen.items():
            command += ["--conf", f"{name}={value}"]
        log = self._folder / f"job{len(self._jobs)}.log"
        self._jobs.append(Job([*command, str(program), *arguments], self._environment, log))
        return self._jobs[-1]

    def executors(self) -> list[int]:
        """The executors of its jobs."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if b"CoarseGrainedExecutorBackend" not in (entry / "cmdline").read_bytes():
                    continue
                environment = (entry / "environ").read_bytes()
            except OSError:
                continue  # it has ended
            if str(self._folder).encode() in environment:
                found.append(int(entry.name))
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for job in self._jobs:
            job.kill9()
        for process in self._processes:
            process.kill()
            process.wait(30)
        for pid in self.executors():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
