"""Records by key, queries, counts and groups.

[1]  An answer that breaks off is seen: its transfer ends without its end, so a client knows that records are missing.
[2]  A write is answered once the server has acknowledged it.
"""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from email.utils import format_datetime
from functools import partial
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from sow_client import AsyncClient, InvalidArgument, NotFound, Record, RecordBatch
from sow_client._keys import key_text
from sow_client._payloads import Encoded, PayloadForm, encoded_in
from sow_client._publish_columns import PAYLOAD_BYTES_MAX
from sow_client._records import NEVER_MICROS, datetime_of
from sow_http.arguments import Arguments, body, key_field, media_type, version_of, wrong_type
from sow_http.problems import Refused, answer

ROWS_MAX: Final = 1_000
"""Records in one message of the server, and so in one piece of an answer."""
TYPES: Final[Mapping[str, str]] = {
    "json": "application/json",
    "msgpack": "application/msgpack",
    "fix": "text/plain; charset=utf-8",
    "nvfix": "text/plain; charset=utf-8",
}
"""The type of a payload, by the message type of its topic; others: application/octet-stream."""
_ACCEPTED: Final[Mapping[str, PayloadForm | None]] = {
    "application/json": PayloadForm("json"),
    "application/msgpack": PayloadForm("msgpack"),
    "application/octet-stream": None,
    "text/plain": None,
}
METADATA: Final[Mapping[str, Callable[[RecordBatch], list[object]]]] = {
    "key": lambda batch: list(batch.keys),
    "version": lambda batch: list(batch.versions),
    "publish_time": lambda batch: [_time(micros) for micros in batch.publish_times_micros],
    "expire_time": lambda batch: [_time(micros) for micros in batch.expire_times_micros],
    "sequence": lambda batch: list(batch.sequences),
    "origin": lambda batch: list(batch.origins),
}


# ---- one record ----


async def get(request: Request, client: AsyncClient) -> Response:
    """The payload of a record, as published."""
    Arguments(request, ())
    topic, key = request.path_params["topic"], request.path_params["key"]
    record = await client.get(topic, key)
    if record is None:
        raise NotFound(f"there is no live record {key!r} in {topic!r}", reason="RECORD_NOT_FOUND")
    headers = _headers(record.version, record.expire_time_micros)
    headers["X-Sow-Publish-Time"] = str(_time(record.publish_time_micros))
    if request.headers.get("if-none-match") == headers["ETag"]:
        return Response(status_code=304, headers=headers)
    content = TYPES.get(record.form.message_type, "application/octet-stream")
    return Response(record.payload, 200, headers, content)


async def delete(request: Request, client: AsyncClient) -> Response:
    """Deletes a record."""
    Arguments(request, ())
    topic, key, version = request.path_params["topic"], request.path_params["key"], version_of(request, "If-Match")
    done = await client.sow_delete(topic, keys=[key], only_if_versions=None if version is None else [version])
    if done.deleted:
        return Response(status_code=204)
    if version is not None:
        raise Refused(412, f"there is no live record {key!r} at version {version}", reason="CONDITION_FAILED")
    raise NotFound(f"there is no live record {key!r} in {topic!r}", reason="RECORD_NOT_FOUND")


async def write(request: Request, client: AsyncClient, *, merges: bool) -> Response:
    """Publishes the body as the record of the key, or merges its fields into that."""
    arguments = Arguments(request, ("ttl",))
    topic, key = request.path_params["topic"], request.path_params["key"]
    kind = media_type(request)
    if kind not in _ACCEPTED:
        raise wrong_type(kind, _ACCEPTED)
    absent = request.headers.get("if-none-match")
    if absent not in (None, "*"):
        raise Refused(400, f"If-None-Match: {absent!r} is not *", field="If-None-Match")
    version = version_of(request, "If-Match")
    payload = await body(request, PAYLOAD_BYTES_MAX)
    form = _ACCEPTED[kind]
    # The server refuses a payload that says of itself that it is of another type than its topic.
    data: bytes | Encoded = payload if form is None else encoded_in(form)(payload)
    publish = partial(
        client.delta_publish if merges else client.publish,
        topic,
        data,
        ttl=arguments.text("ttl"),
        only_if_absent=absent is not None,
        only_if_version=version,
    )
    try:
        done = await publish(key=key)
    except InvalidArgument as error:
        if error.reason != "KEY_NOT_ALLOWED":
            raise
        # The topic has key fields, so nothing was written.
        _agrees((await client.describe_topic(topic)).settings.key, form or PayloadForm(), payload, key)
        done = await publish()
    told = {"key": done.key, "version": done.version, "expire_time": _time(done.expire_time_micros)}
    headers = _headers(done.version, done.expire_time_micros)
    return answer(told | {"bookmark": done.bookmark}, headers=headers)


def _agrees(fields: Sequence[str], form: PayloadForm, payload: bytes, key: str) -> None:
    """Raises Refused where the document has another key than the address. A field that is missing is left to the
    server, which says so."""
    try:
        document = form.document(payload)
    except RecursionError:
        raise Refused(400, "payload: is nested too deep", reason="PAYLOAD_MALFORMED", field="payload") from None
    values = [value for field in fields if (value := key_field(document, field)) is not None]
    if len(values) == len(fields) and (found := key_text(tuple(values) if len(values) > 1 else values[0])) != key:
        raise Refused(400, f"key: the document has the key {found!r}, and the address {key!r}", field="key")


def _headers(version: int, expire_micros: int | None) -> dict[str, str]:
    headers = {"ETag": f'"{version}"'}
    if expire_micros is not None:
        headers["Expires"] = format_datetime(datetime_of(expire_micros).replace(microsecond=0), usegmt=True)
        headers["X-Sow-Expire-Time"] = str(_time(expire_micros))
    return headers


def _time(micros: int | None) -> str | None:
    """A time as the command writes it; None: never."""
    if micros is None or micros == NEVER_MICROS:
        return None
    return datetime_of(micros).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


# ---- many records ----

QUERY: Final = {
    "filter": "a condition, such as /price > 10",
    "params": 'a JSON object: the values of the names in the filter, {"x": 1} for :x',
    "order_by": "one or more of /price, /price DESC, @expire_time, with commas",
    "select": "fields to return, as paths with commas",
    "top": "at most so many records",
    "skip": "leave the first ones out",
    "metadata": f"members to add as _NAME, with commas: {', '.join(METADATA)}",
    "format": "json: an array; ndjson: a document a line. Default: as Accept says, else json",
}
GROUPS: Final = {
    "group_by": "expressions, such as /desk",
    "aggregate": "expressions, such as COUNT(*) AS n, SUM(/qty) AS qty",
    "having": "a condition over the results, such as /n > 10",
    **{name: QUERY[name] for name in ("filter", "params", "order_by", "top", "skip", "format")},
}
COUNT: Final = {name: QUERY[name] for name in ("filter", "params")}


async def query(request: Request, client: AsyncClient) -> Response:
    """The live records that match, of one instant."""
    return await _answered(request, client, Arguments(request, QUERY))


async def groups(request: Request, client: AsyncClient) -> Response:
    """A result for each group of the records that match."""
    arguments = Arguments(request, GROUPS)
    if not arguments.text("group_by") and not arguments.text("aggregate"):
        raise Refused(400, "aggregate: give group_by, aggregate, or both", field="aggregate")
    return await _answered(request, client, arguments)


async def count(request: Request, client: AsyncClient) -> Response:
    """The number of live records that match."""
    arguments = Arguments(request, COUNT)
    topic = request.path_params["topic"]
    found = await client.count(topic, arguments.text("filter"), arguments.parameters())
    return answer({"count": found})


async def topics(request: Request, client: AsyncClient) -> Response:
    """The topics that the caller may see."""
    Arguments(request, ())
    told = [
        {
            "name": topic.name,
            "message_type": topic.settings.message_type,
            "key": list(topic.settings.key),
            "expiration": str(topic.settings.expiration),
            "is_view": topic.is_view,
        }
        for topic in await client.topics()
    ]
    return answer({"topics": told})


async def _answered(request: Request, client: AsyncClient, arguments: Arguments) -> Response:
    accepts = "ndjson" if "application/x-ndjson" in request.headers.get("accept", "") else "json"
    lines = arguments.one_of("format", ("json", "ndjson"), accepts) == "ndjson"
    wanted = arguments.texts("metadata") or []
    for name in wanted:
        if name not in METADATA:
            raise Refused(400, f"metadata: {name!r} is none of {', '.join(METADATA)}", field="metadata")
    found = client.query(
        request.path_params["topic"],
        arguments.text("filter"),
        arguments.parameters(),
        order_by=arguments.texts("order_by"),
        select=arguments.texts("select"),
        skip_n=arguments.number("skip") or 0,
        top_n=arguments.number("top"),
        group_by=arguments.texts("group_by"),
        aggregate=arguments.texts("aggregate"),
        having=arguments.text("having"),
        batch_size=ROWS_MAX,
    )
    batches = aiter(found.batches())
    first = await anext(batches, None)  # a refusal is an answer of its own, so it comes before the first byte
    assert found.header is not None, "a query has its header before its first batch, and at its end"
    headers = {"X-Sow-Bookmark": found.header.bookmark, "X-Sow-As-Of": str(_time(found.header.as_of_micros))}
    begin, between, end = (b"", b"\n", b"\n") if lines else (b"[", b",\n", b"]\n")

    async def sent() -> AsyncGenerator[bytes, None]:
        async with found:  # ends the server's work where the client goes away
            batch, lead = first, begin
            while batch is not None:
                if made := rows(batch, wanted):
                    yield lead + between.join(made)
                    lead = between
                batch = await anext(batches, None)
            yield end if lead is between else begin + end.lstrip(b"\n")

    return StreamingResponse(sent(), 200, headers, "application/x-ndjson" if lines else TYPES["json"])


def rows(batch: RecordBatch, metadata: list[str]) -> list[bytes]:
    """The records of a batch as JSON objects, each on one line."""
    made = [one_line(batch.form, payload) for payload in batch.payloads]
    if not metadata:
        return made
    columns = zip(*(METADATA[name](batch) for name in metadata), strict=True)
    names = [f"_{name}" for name in metadata]
    return [_with(row, dict(zip(names, values, strict=True))) for row, values in zip(made, columns, strict=True)]


def _with(row: bytes, members: dict[str, object]) -> bytes:
    """Behind the fields of the document, so that no field of the same name takes their place."""
    inside = row.strip()[1:-1].strip()
    return b"{" + inside + (b"," if inside else b"") + msgspec.json.encode(members)[1:]


def one_line(form: PayloadForm, payload: bytes) -> bytes:
    """The payload as a JSON object without line breaks. One without fields is base64, under the name `payload`."""
    found = form.json(payload)
    if found is None:
        return msgspec.json.encode({"payload": base64.b64encode(payload).decode()})
    return msgspec.json.format(found, indent=-1) if b"\n" in found or b"\r" in found else found


def shown(record: Record) -> bytes:
    """A record in an event: its key, its version, its expire time and its document."""
    head = {"key": record.key, "version": record.version}
    if (expires := record.expire_time_micros) is not None:
        head["expire_time"] = str(_time(expires))
    return msgspec.json.encode(head)[:-1] + b',"data":' + one_line(record.form, record.payload) + b"}"
