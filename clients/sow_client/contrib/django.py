"""A cache of Django on the server: `BACKEND = "sow_client.contrib.django.SowCache"`.

CACHES = {"default": {"BACKEND": "sow_client.contrib.django.SowCache", "LOCATION": "127.0.0.1:7450"}}

[1]  Values are pickled, as Django's other caches do, and signed with SECRET_KEY and their key. A value with another
     signature is read as if it were absent: to read a pickle of somebody else runs what he likes. With the option
     `"serializer": "json"` nothing is pickled.
[2]  `add` and `incr` are atomic among all programs: by a condition on the record, not by a lock.
[3]  The server decides how long a value lives.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final

from django.conf import settings
from django.core.cache.backends.base import DEFAULT_TIMEOUT, BaseCache
from django.utils.crypto import constant_time_compare, salted_hmac

from sow_client import NEVER, Client, ConditionFailed, InvalidArgument, NotFound, PermissionDenied, Record
from sow_client._reads import RECORDS_PER_REQUEST_MAX, chunks
from sow_client._records import Ttl
from sow_client.contrib._clients import blocking_client

SIGNATURE_BYTES: Final = 32
_SALT: Final = "sow_client.contrib.django"
_ABSENT: Final = object()


class SowCache(BaseCache):  # type: ignore[misc]  # Django has no annotations
    """The cache of a topic, which it has for itself. The topic is created at the first use."""

    def __init__(self, server: str, params: dict[str, Any]) -> None:
        """`server` is LOCATION, an address as for `Client`; empty: SOW_SERVER. OPTIONS may have the `topic` and the
        `serializer`, "pickle" or "json"."""
        super().__init__(params)
        options = params.get("OPTIONS") or {}
        self._server = server or None
        self._topic: str = options.get("topic", "django")
        self._serializer: str = options.get("serializer", "pickle")
        if self._serializer not in ("pickle", "json"):
            raise ValueError(f'OPTIONS: serializer {self._serializer!r} is neither "pickle" nor "json"')
        self._prepared = False

    def add(self, key: Any, value: Any, timeout: Any = DEFAULT_TIMEOUT, version: int | None = None) -> bool:
        key, ttl = self.make_and_validate_key(key, version), self._ttl(timeout)
        other = None  # the version of a value that another has made, which counts as absent ([1])
        while True:
            with suppress(ConditionFailed):
                if ttl is not None:
                    packed, absent = self._packed(key, value), other is None
                    self._client.publish(
                        self._topic, packed, key=key, ttl=ttl, only_if_absent=absent, only_if_version=other
                    )
                    return True
            record = self._client.get(self._topic, key)
            if record is not None and self._unpacked(key, record.payload) is not _ABSENT:
                return False
            if ttl is None:
                return True
            other = None if record is None else record.version

    def get(self, key: Any, default: Any = None, version: int | None = None) -> Any:
        return self.get_many([key], version).get(key, default)

    def set(self, key: Any, value: Any, timeout: Any = DEFAULT_TIMEOUT, version: int | None = None) -> None:
        self.set_many({key: value}, timeout, version)

    def touch(self, key: Any, timeout: Any = DEFAULT_TIMEOUT, version: int | None = None) -> bool:
        if (ttl := self._ttl(timeout)) is None:
            return self.delete(key, version)
        with suppress(NotFound):
            self._client.touch(self._topic, self.make_and_validate_key(key, version), ttl=ttl)
            return True
        return False

    def delete(self, key: Any, version: int | None = None) -> bool:
        return bool(self._client.sow_delete(self._topic, keys=[self.make_and_validate_key(key, version)]).deleted)

    def get_many(self, keys: Iterable[Any], version: int | None = None) -> dict[Any, Any]:
        named = {self.make_and_validate_key(key, version): key for key in keys}
        found = {named[record.key]: self._unpacked(record.key, record.payload) for record in self._records(list(named))}
        return {key: value for key, value in found.items() if value is not _ABSENT}

    def set_many(self, data: Any, timeout: Any = DEFAULT_TIMEOUT, version: int | None = None) -> list[Any]:
        ttl = self._ttl(timeout)
        if ttl is None:
            self.delete_many(data, version)
        else:
            named = {self.make_and_validate_key(key, version): value for key, value in data.items()}
            values = [self._packed(key, value) for key, value in named.items()]
            self._client.publish_many(self._topic, values, keys=list(named), ttl=ttl)
        return []  # a key that fails raises

    def delete_many(self, keys: Iterable[Any], version: int | None = None) -> None:
        named = [self.make_and_validate_key(key, version) for key in keys]
        for chunk in chunks(named, RECORDS_PER_REQUEST_MAX):
            self._client.sow_delete(self._topic, keys=chunk)

    def has_key(self, key: Any, version: int | None = None) -> bool:
        return self.get(key, _ABSENT, version) is not _ABSENT

    def incr(self, key: Any, delta: int = 1, version: int | None = None) -> Any:
        name = self.make_and_validate_key(key, version)
        while True:
            record = self._client.get(self._topic, name)
            if record is None or (value := self._unpacked(name, record.payload)) is _ABSENT:
                raise ValueError(f"Key {key!r} not found")
            value += delta
            with suppress(ConditionFailed):  # another has changed it meanwhile
                packed = self._packed(name, value)
                self._client.publish(self._topic, packed, key=name, keep_ttl=True, only_if_version=record.version)
                return value

    def clear(self) -> None:
        """Empties the topic."""
        self._client.sow_delete(self._topic, all=True)

    def _records(self, keys: list[str]) -> list[Record]:
        try:
            return self._client.get_many(self._topic, keys)
        except InvalidArgument as error:
            if error.reason != "REQUEST_TOO_LARGE" or len(keys) < 2:
                raise
        middle = len(keys) // 2  # one answer has a limit
        return self._records(keys[:middle]) + self._records(keys[middle:])

    @property
    def _client(self) -> Client:
        client = blocking_client(self._server)
        if not self._prepared:
            with suppress(PermissionDenied):  # who may not create topics uses one that is there
                client.create_topic(self._topic, exist_ok=True, message_type="binary", expiration="enabled")
            self._prepared = True
        return client

    def _ttl(self, timeout: Any) -> Ttl | None:
        """None: the value is over at once."""
        seconds = self.default_timeout if timeout is DEFAULT_TIMEOUT else timeout
        if seconds is None:
            return NEVER
        return float(seconds) if seconds > 0 else None

    def _packed(self, key: str, value: Any) -> bytes:
        if self._serializer == "json":
            return json.dumps(value).encode()
        pickled = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        return _signature(key, pickled, settings.SECRET_KEY) + pickled

    def _unpacked(self, key: str, payload: bytes) -> Any:
        """The value; `_ABSENT` where nobody who knows the secret has made it ([1])."""
        if self._serializer == "json":
            return json.loads(payload)
        signature, pickled = payload[:SIGNATURE_BYTES], payload[SIGNATURE_BYTES:]
        for secret in (settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS):
            if constant_time_compare(signature, _signature(key, pickled, secret)):
                return pickle.loads(pickled)
        return _ABSENT


def _signature(key: str, pickled: bytes, secret: str | bytes) -> bytes:
    # The length divides them: a key that somebody chose could end like the begin of a pickle.
    name = key.encode()
    signed = b"%d %b%b" % (len(name), name, pickled)
    return bytes(salted_hmac(_SALT, signed, secret, algorithm="sha256").digest())
