"""Logs: one stream of events with fields on standard error. The standard library's loggers write to it, too.

    [1]  Every line has `time` (UTC), `level`, `event` and `logger`; the rest are the event's own fields.
    [2]  The last lines are kept for people who may see them (rule X10).
    [3]  On a terminal the lines are for people, otherwise each line is a JSON object; `[log] format` overrides that.
    [4]  A reader that does not read holds nobody up. Lines beyond a bound are dropped, and told as `log_lines_dropped`.

Modules log with `structlog.get_logger(__name__).info("event_name", field=…)`: an event is a name, not a sentence.
The event `ready` (field `address`) means that the server answers. Programs that start a server wait for it.
"""

from __future__ import annotations

import logging
import sys
from typing import Final, Protocol

import msgspec
import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from sow_server.config import LogConfig
from sow_server.patient_stream import PatientStream
from sow_server.services.log_tail import LogTail

_FIRST: Final = ("time", "level", "event", "logger")
_decode_event: Final = msgspec.json.Decoder(dict[str, object]).decode
_QUIET: Final = ("apscheduler",)
"""Libraries that log every run of every job at level info."""
log = structlog.get_logger(__name__)


class Stream(Protocol):
    """The stream of a log."""

    def isatty(self) -> bool: ...

    def write(self, text: str, /) -> object: ...

    def flush(self) -> object: ...


def standard_error(**fields: object) -> Stream:
    """Standard error, for which nothing waits ([4]). `fields`: those of the line about dropped ones."""
    try:
        sys.stderr.fileno()
    except (OSError, ValueError):
        return sys.stderr
    return PatientStream(sys.stderr, lambda lines: log.error("log_lines_dropped", lines=lines, **fields))


def configure(config: LogConfig, stream: Stream | None = None, *, tail: LogTail | None = None) -> None:
    """Sets up structlog and the root logger; may be called again. `stream`: standard error. `tail` gets each line,
    too ([2])."""
    stream = stream or standard_error()
    level = logging.getLevelNamesMapping()[config.level.upper()]
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
        structlog.processors.StackInfoRenderer(),
    ]
    last: list[Processor] = (
        [console_renderer(stream)]
        if is_console(config, stream)
        else [structlog.processors.format_exc_info, _in_order, structlog.processors.JSONRenderer(default=str)]
    )
    handler = logging.StreamHandler(stream)
    handler.addFilter(_is_news)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder()],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    if tail is not None:
        keeping = _Keeping(tail)
        keeping.addFilter(_is_news)
        lines: list[Processor] = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
        keeping.setFormatter(
            structlog.stdlib.ProcessorFormatter(
                foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder()],
                processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *lines],
            )
        )
        root.addHandler(keeping)
    root.setLevel(level)
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(level, logging.WARNING) if level > logging.DEBUG else level)
    logging.captureWarnings(True)
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.stdlib.LoggerFactory(),
        # Loggers live as long as their modules; caching would keep the first configuration for good.
        cache_logger_on_first_use=False,
    )


def is_console(config: LogConfig, stream: Stream) -> bool:
    """True if the lines are for people ([3])."""
    return config.format == "console" or (config.format == "auto" and stream.isatty())


def console_renderer(stream: Stream) -> Processor:
    """Writes events for people."""
    return structlog.dev.ConsoleRenderer(colors=stream.isatty(), timestamp_key="time")


class _Keeping(logging.Handler):
    """Gives each line to the tail."""

    def __init__(self, tail: LogTail) -> None:
        super().__init__()
        self._tail = tail

    def emit(self, record: logging.LogRecord) -> None:
        try:
            event = _decode_event(self.format(record))
        except Exception:  # noqa: BLE001  # as every handler: a line that cannot be kept must not fail its writer
            self.handleError(record)
            return
        self._tail.add(round(record.created * 1e6), event)


def _is_news(record: logging.LogRecord) -> bool:
    """False for the traceback that gRPC logs for every client that goes away during an answer."""
    error = record.exc_info[1] if record.exc_info else None
    return not (record.name == "grpc._cython.cygrpc" and type(error).__name__ == "ExecuteBatchError")


def _in_order(logger: WrappedLogger, name: str, event: EventDict) -> EventDict:
    """Puts the fields that every line has first."""
    return {key: event.pop(key) for key in _FIRST if key in event} | dict(event)
