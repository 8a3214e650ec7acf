"""Documents without the fields that a reader does not need."""

from __future__ import annotations

import json

import pytest

from sow_server.engine.values.errors import StoreError
from sow_server.services.wire import narrowing
from sow_server.services.wire.narrowing import narrower

PAD = "x" * 400


def narrowed(names: tuple[str, ...], *documents: bytes) -> list[bytes]:
    narrow = narrower(names)
    assert narrow is not None
    return list(narrow(documents))


def test_kept_fields_have_their_published_bytes() -> None:
    document = b'{"pad": "%s", "price" : 1.50, "leg":{"px": [1, 2e0]}, "note":"\\u00e9", "none":null}' % PAD.encode()
    assert narrowed(("leg", "missing", "none", "note", "price"), document) == [
        b'{"leg":{"px": [1, 2e0]},"none":null,"note":"\\u00e9","price":1.50}'
    ]


def test_a_field_may_be_called_anything() -> None:
    names = ("f1", "class", "a b", "/", "__init__")
    document = json.dumps({"pad": PAD} | dict.fromkeys(names, 7)).encode()
    assert json.loads(narrowed(names, document)[0]) == dict.fromkeys(names, 7)


def test_a_name_that_is_written_with_escapes_is_the_same_field() -> None:
    document = b'{"pad": "%s", "pr\\u0069ce": 1}' % PAD.encode()
    assert narrowed(("price",), document) == [b'{"price":1}']


def test_the_last_of_several_values_counts_as_in_every_other_reader() -> None:
    document = b'{"price": 1, "pad": "%s", "price": 2}' % PAD.encode()
    assert narrowed(("price",), document) == [b'{"price":2}']


def test_a_document_that_cannot_be_taken_apart_stays_whole() -> None:
    odd = b'{"price": 1, "pad": '
    good = b'{"price": 1, "pad": "%s"}' % (PAD.encode() * 2)
    assert narrowed(("price",), odd, good) == [odd, b'{"price":1}']


@pytest.mark.parametrize("names", [(), ("é",), ("",), ('"',), ("\\",), ("\n",)])
def test_documents_stay_whole_for_names_that_are_not_looked_for(names: tuple[str, ...]) -> None:
    assert narrower(names) is None


def test_a_batch_stays_as_it_is_unless_it_shrinks_enough() -> None:
    small = [b'{"price": 1, "pad": "%d"}' % number for number in range(100)]
    assert narrowed(("price",), *small) == small
    large = [b'{"price": 1, "pad": "%s"}' % PAD.encode()] * 100
    assert narrowed(("price",), *large) == [b'{"price":1}'] * 100
    assert narrowed(("pad", "price"), *large) == large
    assert narrowed(("price",)) == []


def test_a_request_names_a_bounded_number_of_fields() -> None:
    assert narrowing.fields(["b", "a", "b"]) == ("a", "b")
    with pytest.raises(StoreError, match="101 are more than the limit of 100"):
        narrowing.fields([str(number) for number in range(101)])
    assert narrowing.fields(["x" * 5_000, "y" * 5_001]) == (), "all: such names are not worth keeping"
