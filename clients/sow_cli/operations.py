"""The operation that a line asks for, in a field of it: its record is published, or that of its key removed (P11)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import click

from sow_cli.lines import BadLine, Item, Parse, keyed_by
from sow_cli.row_records import Target
from sow_client import PayloadForm

PUTS: Final = ("put", "c", "create", "u", "update", "r", "read", "insert", "upsert", "sow")
REMOVALS: Final = ("delete", "d", "expire", "oof")

Operations = Callable[[bytes], bool]
"""True if a document, or a line, is a removal. Raises BadLine."""


def operations(field: str, form: PayloadForm) -> Operations:
    """Reads the operation from `field`, a name or a path such as `/a/b`. Raises ValueError."""
    read: Parse = keyed_by(field, form)
    known = frozenset(PUTS + REMOVALS)

    def removes(line: bytes) -> bool:
        try:
            value = read(line).key or ""
        except BadLine as bad:
            if bad.reason == "PAYLOAD_MALFORMED":
                raise
            raise BadLine("INVALID_ARGUMENT", bad.message) from bad
        if value not in known:
            told = f"{', '.join(PUTS)} (publish), {', '.join(REMOVALS)} (remove)"
            raise BadLine("INVALID_ARGUMENT", f"field {field} is {value[:40]!r}, and none of {told}")
        return value in REMOVALS

    return removes


def operations_of(field: str | None, target: Target, *, of_lines: bool) -> Operations | None:
    """As --op-field wants it: of lines, which are JSON, or of documents. None: it was not given. Raises a usage
    error."""
    if field is None:
        return None
    form = PayloadForm() if of_lines else PayloadForm(target.message_type, target.separator)
    try:
        return operations(field, form)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--op-field") from error


def marked(item: Item, removes: Operations) -> Item | BadLine:
    """The item as a removal, if its document is one."""
    try:
        return item._replace(removes=True, expire_time_micros=None) if removes(item.data) else item
    except BadLine as bad:
        return bad
