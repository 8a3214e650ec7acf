"""Records are written to a file before replication drops them, for an operator to look at."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import structlog

from sow_server.engine.disk.backups import DROPPED, sync_directory
from sow_server.engine.replicas.merging import Dead

log = structlog.get_logger(__name__)

NAME_SHOWN: Final = 120
"""Characters of a topic's name in that of a file."""


class DroppedFiles:
    """Owns the folder `dropped` of the data directory."""

    def __init__(self, path: Path) -> None:
        self._folder = path / DROPPED

    def write(self, topic: str, source: str, dead: Sequence[Dead]) -> None:
        """Appends records to the file of a topic and a source, and syncs it."""
        if not dead:
            return
        self._folder.mkdir(mode=0o700, exist_ok=True)
        with (self._folder / _file_name(topic, source)).open("ab") as file:
            for record in dead:
                fields = {
                    "key": record.key.decode(errors="backslashreplace"),
                    "version": record.version,
                    "publish_time_micros": record.publish_time_micros,
                    "expire_time_micros": record.expire_time_micros,
                    "origin": record.origin,
                    "payload_base64": base64.b64encode(record.payload).decode(),
                }
                file.write(json.dumps(fields).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        sync_directory(self._folder)
        log.warning("dropped", topic=topic, source=source, records=len(dead), file=file.name)


def _file_name(topic: str, source: str) -> str:
    """The name of the file; file systems take 255 bytes."""
    if len(topic) > NAME_SHOWN:
        topic = f"{topic[:NAME_SHOWN]}-{hashlib.sha256(topic.encode()).hexdigest()[:16]}"
    return f"{topic}.from-{source}.ndjson"
