"""Numbers that no float holds, and floats in several forms, from one end of the server to the other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Final

import pytest

from sow_client import Client, InvalidArgument
from tests.support.oracles.access import GUARDED, client_of, grant, identity, write_access
from tests.support.servers.server import ServerProcess

BIG: Final = 89445006123456789012
NUMBERS: Final = (BIG - 1, BIG, BIG + 1, 2**64, 2**64 + 1, 2**63, 2**53 + 1, -BIG, 7)
"""Of each group all have one float."""
TOPICS: Final = {
    "plain": "",
    "indexed": 'index = ["/n"]\n',
    "flat": 'message_type = "nvfix"\n',
    "flat_indexed": 'message_type = "nvfix"\nindex = ["/n"]\n',
}
FILTERS: Final = {
    f"/n = {BIG}": [BIG],
    f"/n != {BIG}": [number for number in NUMBERS if number != BIG],
    f"/n < {BIG}": [number for number in NUMBERS if number < BIG],
    f"/n <= {BIG}": [number for number in NUMBERS if number <= BIG],
    f"/n > {BIG}": [BIG + 1],
    f"/n >= {BIG}": [BIG, BIG + 1],
    f"{BIG} > /n AND /n > 0": [number for number in NUMBERS if 0 < number < BIG],
    f"NOT /n = {BIG}": [number for number in NUMBERS if number != BIG],
    f"NOT /n != {BIG}": [BIG],
    f"/n IN ({BIG}, {2**64 + 1})": [BIG, 2**64 + 1],
    f"/n NOT IN ({BIG}, {2**64 + 1})": [number for number in NUMBERS if number not in (BIG, 2**64 + 1)],
    f"/n BETWEEN {BIG} AND {BIG}": [BIG],
    f"/n NOT BETWEEN {BIG} AND {BIG}": [number for number in NUMBERS if number != BIG],
    f"/n = -{BIG}": [-BIG],
    f"-/n = {BIG}": [-BIG],
    f"/n + 1 = {BIG}": [BIG - 1],
    f"/n - {BIG} = 1": [BIG + 1],
    f"/n * 10 = {BIG * 10}": [BIG],
    f"/n / 2 = {BIG // 2}": [BIG],
    f"/n % 10 = 2 AND ABS(/n) = {BIG}": [BIG],
    f"FLOOR(/n) = {BIG} AND CEIL(/n) = {BIG} AND ROUND(/n) = {BIG}": [BIG],
    f"ROUND(/n, -1) = {BIG // 10 * 10} AND /n > {BIG}": [BIG + 1],
    f"IF(/n = {BIG}, true, false)": [BIG],
    f"COALESCE(/n, 0) = {BIG}": [BIG],
    f"/n = {BIG}.0": [],  # a float, which is another number: 89445006123456790528
}
ACCESS: Final = (
    identity("desk", "desk")
    + grant("desk", "plain", "read publish delete", f'rows = "/n != {BIG}"')
    + grant("desk", "indexed", "read publish delete", f'rows = "/n = {BIG}"')
    + grant("desk", "flat", "read publish delete", f'rows = "/n NOT IN ({BIG}, 7)"')
    + grant("desk", "flat_indexed", "read publish delete", f'rows = "NOT /n BETWEEN {BIG} AND {BIG}"')
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("numbers")
    write_access(folder, ACCESS)
    topics = "".join(
        [f'[topics.{name}]\nkey = ["/id"]\nexpiration = "enabled"\n{more}' for name, more in TOPICS.items()]
    )
    with ServerProcess(folder, GUARDED + topics + '[topics.ids]\nkey = ["/id"]\nindex = ["/id"]\n') as made:
        yield made
        assert not made.faults()


@pytest.fixture
def root(server: ServerProcess) -> Iterator[Client]:
    with client_of(server, "root") as client:
        for topic in TOPICS:
            client.sow_delete(topic, all=True)
            client.publish_many(topic, [payload(topic, number) for number in NUMBERS])
        yield client


def payload(topic: str, number: int) -> bytes:
    if "flat" in topic:
        return f"id=k{number}\x01n={number}\x01".encode()
    return json.dumps({"id": f"k{number}", "n": number}).encode()


def found(client: Client, topic: str, text: str | None = None) -> list[int]:
    keys = [record.key for record in client.query(topic, text)]
    return sorted([int(key.removeprefix("k")) for key in keys], key=NUMBERS.index)


@pytest.mark.parametrize("topic", TOPICS)
def test_a_filter_tells_numbers_apart_that_have_one_float(root: Client, topic: str) -> None:
    assert {text: found(root, topic, text) for text in FILTERS} == FILTERS


@pytest.mark.parametrize("topic", TOPICS)
def test_an_order_tells_them_apart(root: Client, topic: str) -> None:
    keys = [record.key for record in root.query(topic, order_by="/n")]
    assert keys == [f"k{number}" for number in sorted(NUMBERS)]
    paged: list[str] = []
    token = ""
    while True:
        page = root.page(topic, order_by="/n DESC", page_size=2, page_token=token)
        paged += [record.key for record in page.records]
        token = page.next_page_token
        if not token:
            break
    assert paged == keys[::-1]


def test_the_rows_of_a_grant_tell_them_apart(server: ServerProcess, root: Client) -> None:
    """Story: with `rows = "/account != 89445006123456789012"` the caller saw that account."""
    others = [number for number in NUMBERS if number != BIG]
    with client_of(server, "desk") as desk:
        assert found(desk, "plain") == others
        assert found(desk, "indexed") == [BIG]
        assert found(desk, "flat") == [number for number in others if number != 7]
        assert found(desk, "flat_indexed") == others
        assert desk.get("plain", f"k{BIG}") is None
        assert desk.get("indexed", f"k{BIG + 1}") is None
        assert desk.sow_delete("plain", filter=f"/n = {BIG}").deleted == 0
        assert desk.sow_delete("indexed", filter="true").deleted == 1
    assert found(root, "plain") == [*NUMBERS]
    assert found(root, "indexed") == others


@pytest.mark.parametrize("topic", TOPICS)
def test_a_delete_and_a_restamp_take_the_record_that_is_meant(root: Client, topic: str) -> None:
    assert root.sow_delete(topic, filter=f"/n = {2**64 + 1}").deleted == 1
    assert root.sow_delete(topic, filter=f"/n > {BIG}").deleted == 1
    assert found(root, topic) == [number for number in NUMBERS if number not in (2**64 + 1, BIG + 1)]
    assert root.restamp(topic, "set", ttl="1h", filter=f"/n >= {BIG}").matched == 1
    assert found(root, topic, "@expire_time IS NOT NULL") == [BIG]


@pytest.mark.parametrize("topic", TOPICS)
@pytest.mark.parametrize("text", [f"/n = {BIG}", f"/n IN ({BIG}, 8)", f"/n > {BIG - 1} AND /n < {BIG + 1}"])
def test_a_subscription_tells_them_apart(root: Client, topic: str, text: str) -> None:
    with root.subscribe(topic, text, oof=True) as changes:
        root.publish_many(topic, [payload(topic, number) for number in NUMBERS])
        root.publish(topic, payload(topic, BIG).replace(str(BIG).encode(), str(BIG + 2).encode()))
        root.publish(topic, payload(topic, BIG))
        seen = iter(changes)
        assert next(seen).key == f"k{BIG}"
        assert next(seen).key == f"k{BIG}"


def test_keys_are_found_by_their_number(root: Client) -> None:
    """Story: `/id = 123456789012345678901234567890` found no key."""
    large = 123456789012345678901234567890
    root.publish_many("ids", [{"id": large}, {"id": large + 1}, {"id": 2**64 + 1}, {"id": 1.5}])
    for number in (large, large + 1, 2**64 + 1, 1.5):
        assert [record.key for record in root.query("ids", f"/id = {number}")] == [str(number)]
        assert [record.key for record in root.query("ids", f"/id IN ({number}, 3)")] == [str(number)]
        assert root.explain("ids", f"/id = {number}").access == "points"
        record = root.get("ids", number)
        assert record is not None
        assert record.data == {"id": number}
    assert root.count("ids", f"/id != {large}") == 3
    assert root.count("ids", f"/id > {large}") == 1


@pytest.mark.parametrize(
    ("one", "other", "key"),
    [
        ("1.2345678901234568e+20", "123456789012345680000", "123456789012345680000"),
        ("1.8014398509481988e+16", "18014398509481988", "18014398509481988"),
        ("1e23", "100000000000000000000000", "100000000000000000000000"),
        ("1e22", "10000000000000000000000.0", "10000000000000000000000"),
        ("-1.2345678901234568E20", "-123456789012345680000", "-123456789012345680000"),
        ("0.1", "0.10000000000000001", "0.1"),
        ("1", "1.0", "1"),
    ],
)
def test_one_float_in_two_forms_is_one_key(root: Client, one: str, other: str, key: str) -> None:
    """A number that Python writes with an exponent has none in JavaScript."""
    root.sow_delete("ids", all=True)
    for form in (one, other):
        root.publish("ids", f'{{"id":{form}}}')
        assert [record.key for record in root.query("ids")] == [key]
        for literal in (one, other, f"'{key}'"):
            assert [record.key for record in root.query("ids", f"/id = {literal}")] == [key]
            assert root.count("ids", f"/id NOT IN ({literal}, 3)") == 0
            assert root.count("ids", f"NOT /id != {literal} OR /id = 'x'") == 1
    assert root.get("ids", float(one)) is not None


def test_a_number_that_would_be_infinite_is_refused(root: Client) -> None:
    with pytest.raises(InvalidArgument) as refused:
        root.count("plain", f"/n = {'9' * 4301}")
    assert refused.value.reason == "FILTER_INVALID"
    assert "an integer of 4301 digits, more than the limit of 4300, at 5" in refused.value.message
    root.publish("plain", f'{{"id":"long","n":{"9" * 4300}}}')
    root.publish("plain", f'{{"id":"longer","n":{"9" * 4301}}}')
    assert [record.key for record in root.query("plain", f"/n > {'9' * 4299}8")] == ["long", "longer"]
    assert [record.key for record in root.query("plain", f"/n = {'9' * 4300}")] == ["long"]


def test_documents_go_in_and_come_out_with_all_digits(root: Client) -> None:
    document = {"id": "d", "n": 10**30, "list": [2**64 + 1, -(10**300)], "deep": {"n": 2**70}}
    root.publish("plain", document)
    record = root.get("plain", "d")
    assert record is not None
    assert record.data == document
    root.delta_publish("plain", {"id": "d", "deep": {"n": 2**70 + 1}})
    merged = root.get("plain", "d")
    assert merged is not None
    assert merged.data == {**document, "deep": {"n": 2**70 + 1}}
