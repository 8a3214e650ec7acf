"""The possible kinds of the values of functions and of metadata. Pure."""

from __future__ import annotations

from typing import Final

from sow_server.filters.tree import Function, MetadataName, ValueKinds

ANY: Final = ValueKinds.NULL | ValueKinds.BOOLEAN | ValueKinds.NUMBER | ValueKinds.TEXT | ValueKinds.OTHER
MAYBE_NUMBER: Final = ValueKinds.NUMBER | ValueKinds.NULL
MAYBE_TEXT: Final = ValueKinds.TEXT | ValueKinds.NULL
MAYBE_BOOLEAN: Final = ValueKinds.BOOLEAN | ValueKinds.NULL
METADATA: Final = {
    MetadataName.KEY: ("key", ValueKinds.TEXT),
    MetadataName.VERSION: ("version", ValueKinds.NUMBER),
    MetadataName.PUBLISH_TIME: ("publish_time_micros", ValueKinds.NUMBER),
    MetadataName.EXPIRE_TIME: ("expire_time_micros", MAYBE_NUMBER),
    MetadataName.TOPIC: ("topic", ValueKinds.TEXT),
    MetadataName.SEQUENCE: ("sequence", ValueKinds.NUMBER),
    MetadataName.ORIGIN: ("origin", ValueKinds.TEXT),
}
RESULTS: Final = {
    Function.LENGTH: MAYBE_NUMBER,
    Function.LOWER: MAYBE_TEXT,
    Function.UPPER: MAYBE_TEXT,
    Function.TRIM: MAYBE_TEXT,
    Function.CONCAT: MAYBE_TEXT,
    Function.SUBSTR: MAYBE_TEXT,
    Function.REPLACE: MAYBE_TEXT,
    Function.ABS: MAYBE_NUMBER,
    Function.ROUND: MAYBE_NUMBER,
    Function.FLOOR: MAYBE_NUMBER,
    Function.CEIL: MAYBE_NUMBER,
    Function.COALESCE: ANY,
    Function.INSTR: MAYBE_NUMBER,
    Function.REVERSE: MAYBE_TEXT,
    Function.DATE_MICROS: MAYBE_NUMBER,
    Function.FORMAT_TIME: MAYBE_TEXT,
}
