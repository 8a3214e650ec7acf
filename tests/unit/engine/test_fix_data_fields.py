"""Data fields of fix: they hold any bytes, also the separator, in every operation on a payload (rule K2)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sow.flat_fields import DATA_OF, FlatFields
from sow_server.engine.formats.paths import PathTree, path_tree
from sow_server.engine.formats.payloads import BadRecord, Projection
from sow_server.engine.formats.topic_formats import format_of, index_paths, key_paths
from sow_server.engine.values.errors import Reason
from sow_server.engine.values.keys import parse_path
from sow_server.engine.values.model import MessageType, TopicSettings

FIX = TopicSettings(key=("/55",), message_type=MessageType.FIX, separator=b"|")
RECORD = b"95=6|96=a|55=Z|55=ACME|44=1|"
form = format_of(FIX)


def key(payload: bytes, settings: TopicSettings = FIX) -> bytes | BadRecord:
    (found,) = format_of(settings).derive_keys(key_paths(settings))([payload])
    return found


@pytest.mark.parametrize("length", sorted(DATA_OF), ids=bytes.decode)
def test_a_key_is_never_taken_out_of_a_data_field(length: bytes) -> None:
    payload = b"8=FIX|%s=6|%s=a|55=Z|55=ACME|" % (length, DATA_OF[length])
    assert key(payload) == b"ACME"
    assert form.decode(payload)[DATA_OF[length].decode()] == "a|55=Z"
    assert form.decoder(["55", "44"])(payload) == {"55": "ACME"}


def test_nvfix_has_no_data_fields() -> None:
    nvfix = TopicSettings(key=("/55",), message_type=MessageType.NVFIX, separator=b"|")
    assert key(RECORD, nvfix) == b"Z"
    assert key(b"055=A|55=B|", nvfix) == b"B", "names are texts there"


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b"95=60|96=ab|55=A|", "tag 96 at byte 6 has 60 bytes by its length, tag 95, and no separator or end is"),
        (b"55=A|95=1|96=ab|", "tag 96 at byte 10 has 1 bytes by its length, tag 95, and no separator or end"),
        (b"95=x|96=ab|55=A|", "tag 95 at byte 0 is the length of tag 96, and 'x' is no number of bytes"),
        (b"95=-2|96=ab|55=A|", "and '-2' is no number of bytes"),
        (b"95=|96=ab|55=A|", "and '' is no number of bytes"),
        (b"95=" + b"9" * 5000 + b"|96=ab|55=A|", "is no number of bytes"),
        (b"95=2|55=A|96=ab|", "tag 95 at byte 0 is the length of tag 96, which does not follow it"),
        (b"95=2||96=ab|55=A|", "which does not follow it"),
        (b"55=A|95=2|", "tag 95 at byte 5 is the length of tag 96, which does not follow it"),
        (b"95=2|96=ab|5x=A|", "tag b'5x' at byte 11 is not a number"),
        (b"95=2|96=ab|nothing", "field b'nothing' at byte 11 is not name=value"),
    ],
)
def test_a_length_that_is_not_true_is_refused(payload: bytes, message: str) -> None:
    found = key(payload)
    assert isinstance(found, BadRecord)
    assert found.reason is Reason.PAYLOAD_MALFORMED
    assert message in found.message
    assert form.check(payload) == found


@pytest.mark.parametrize(
    ("payload", "document"),
    [
        (b"95=4|96=a|b", {"95": "4", "96": "a"}),
        (b"95=60|96=ab|55=A|", {"95": "60", "96": "ab", "55": "A"}),
        (b"95=2|55=A|96=a|44=2", {"95": "2", "55": "A", "96": "a", "44": "2"}),
    ],
)
def test_a_stored_length_that_is_not_true_is_read_as_a_plain_field(payload: bytes, document: dict[str, str]) -> None:
    """Records of earlier releases, and of peers, may have one: all readers see the same fields."""
    assert form.decode(payload) == document
    assert form.decoder(list(document))(payload) == document


@pytest.mark.parametrize("payload", [b"95=3|96=a|b", b"95=3|96=a|b|", b"095=003|0096=a|b|"])
def test_a_data_field_ends_at_a_separator_or_the_end(payload: bytes) -> None:
    assert form.check(payload) is None
    assert form.decode(payload)["96"] == "a|b"


def test_an_empty_data_field() -> None:
    assert form.decode(b"95=0|96=|55=A|") == {"95": "0", "96": "", "55": "A"}
    assert key(b"95=0|96=|55=A|") == b"A"


def test_a_tag_with_zeros_in_front_is_the_tag_without() -> None:
    assert key(b"8=F|055=ACME|55=B|") == b"ACME", "the first one counts"
    assert form.decode(b"0055=A|00=1|") == {"55": "A", "0": "1"}
    assert key(b"55=A|", TopicSettings(key=("/055",), message_type=MessageType.FIX, separator=b"|")) == b"A"
    settings = TopicSettings(index=("/055",), message_type=MessageType.FIX)
    assert index_paths(settings) == [("55",)]
    with pytest.raises(ValueError, match="is there twice"):
        index_paths(TopicSettings(index=("/055", "/55"), message_type=MessageType.FIX))
    assert form.project(b"055=A|44=1|", Projection(hidden=(("55",),))) == b"44=1|"
    assert form.project(b"55=A|44=1|", Projection(include=(("055",),))) == b"55=A|"


@pytest.mark.parametrize(
    ("projection", "left"),
    [
        (Projection(include=(("55",),)), b"55=ACME|"),
        (Projection(include=(("96",),)), b"95=6|96=a|55=Z|"),
        (Projection(include=(("95",),)), b"95=6|"),
        (Projection(exclude=(("96",), ("95",))), b"55=ACME|44=1|"),
        (Projection(exclude=(("95",),)), RECORD),
        (Projection(exclude=(("96",),)), b"95=6|55=ACME|44=1|"),
        (Projection(hidden=(("96",),)), b"95=6|55=ACME|44=1|"),
        (Projection(hidden=(("95",),)), b"55=ACME|44=1|"),
    ],
)
def test_a_selected_data_field_comes_with_its_length(projection: Projection, left: bytes) -> None:
    assert form.project(RECORD, projection) == left


def test_a_projection_makes_no_data_field_of_plain_ones() -> None:
    stored = b"95=9|55=A|96=xyz|44=12|"
    assert form.project(stored, Projection(exclude=(("55",),))) == b"96=xyz|44=12|"


def merge(base: bytes, delta: bytes, *unset: str) -> bytes | BadRecord:
    return form.merge(base, delta, path_tree([(name,) for name in unset]) if unset else PathTree())


def test_a_delta_replaces_a_data_field_with_its_length() -> None:
    assert merge(RECORD, b"95=3|96=|||") == b"95=3|96=||||55=ACME|44=1|"
    assert merge(RECORD, b"96=plain|") == b"96=plain|55=ACME|44=1|"
    assert merge(b"55=A|", b"95=3|96=x|y|") == b"55=A|95=3|96=x|y|"
    assert merge(b"55=A|96=old|44=1", b"95=3|96=x|y|") == b"55=A|95=3|96=x|y|44=1"
    assert merge(RECORD, b"055=B|") == b"95=6|96=a|55=Z|055=B|44=1|"
    assert merge(RECORD, RECORD) == RECORD
    assert merge(RECORD, b"44=2|", "96") == b"55=ACME|44=2|"


def test_a_delta_that_would_part_a_data_field_from_its_length_is_refused() -> None:
    found = merge(RECORD, b"44=2|", "95")
    assert isinstance(found, BadRecord)
    assert found.reason is Reason.PAYLOAD_MALFORMED
    assert "a length would not stand right before its data field" in found.message


def test_a_difference_holds_data_fields_whole() -> None:
    new = b"95=3|96=b|||55=ACME|44=1|"
    difference = form.difference(RECORD, new, [("55",)])
    assert difference.payload == b"95=3|96=b||" + b"|55=ACME|"
    assert difference.unset_paths == ()
    assert merge(RECORD, difference.payload) == new
    gone = form.difference(RECORD, b"55=ACME|44=1|", [("55",)])
    assert gone.unset_paths == ("/95", "/96")
    assert form.difference(RECORD, RECORD, [("55",)]).changed is False


def test_plain_payloads_take_the_short_way() -> None:
    flat = FlatFields(b"|", tags=True)
    assert flat.is_plain(b"8=FIX.4.4|35=D|55=ACME|5=0|1096=x|953=1|")
    assert not any(map(flat.is_plain, (b"95=1|96=a", b"8=F|95=1|96=a", b"055=A", b"8=F|055=A", b"8=1|1404=|1403=2")))


letters = st.sampled_from([b"", b"|", b"=", b"a", b"9", b"5", b"0", b"95=", b"96=", b"|95=3|96=", b"|55=", b"2", b"||"])


@given(st.lists(letters, max_size=24).map(b"".join))
def test_all_readers_see_the_same_fields(payload: bytes) -> None:
    """Also of payloads that no publish takes: stored ones of earlier releases, and of peers."""
    document = form.decode(payload)
    assert form.decoder(list(document))(payload) == document
    assert form.project(payload, Projection(exclude=(("none",),))) is not None
    items = FlatFields(b"|", tags=True).items(payload)
    joined = FlatFields(b"|", tags=True).joined(items)
    assert joined in (payload, payload.removesuffix(b"|"))
    if form.check(payload) is None:
        found = key(payload)
        assert found == str(document["55"]).encode() if document.get("55") else isinstance(found, BadRecord)
        projected = form.project(payload, Projection(exclude=(("none",),)))
        assert form.decode(projected) == document
        assert form.merge(payload, projected, PathTree()) == payload
        for name in document:
            rest = form.decode(form.project(payload, Projection(exclude=((name,),))))
            assert rest.items() <= document.items()
            alone = form.decode(form.project(payload, Projection(include=((name,),))))
            assert alone[name] == document[name]


@given(st.lists(letters, max_size=16).map(b"".join), st.lists(letters, max_size=16).map(b"".join))
def test_a_difference_gives_the_fields_of_the_new_record(old: bytes, new: bytes) -> None:
    if form.check(old) is not None or form.check(new) is not None:
        return
    difference = form.difference(old, new, [("55",)])
    unset = path_tree([parse_path(path) for path in difference.unset_paths])
    merged = form.merge(old, difference.payload, unset)
    assert not isinstance(merged, BadRecord), merged
    assert form.decode(merged) == form.decode(new)
