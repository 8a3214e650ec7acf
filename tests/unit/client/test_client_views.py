"""Views as Python values: the request of one, and its definition in an answer (rules V1, V6)."""

from __future__ import annotations

import pytest

from sow.v1 import admin_pb2, sow_pb2
from sow_client import ViewDefinition, ViewStatus
from sow_client._admin import create_request, create_view_request, topic
from sow_client._contract import needed
from sow_client._grouping import Expressions
from sow_client.errors import InvalidArgument


def named(*pairs: tuple[str, str]) -> list[sow_pb2.NamedExpression]:
    return [sow_pb2.NamedExpression(name=name, expression=text) for name, text in pairs]


def request(source: str = "orders", select: Expressions = "COUNT(*) AS n") -> admin_pb2.CreateTopicRequest:
    return create_view_request("positions", source, None, None, select, {})


def test_a_view_is_a_topic_with_a_definition_and_settings() -> None:
    made = create_view_request(
        "positions", "orders", "/open", ["/account", "FLOOR(/ts) AS t"], {"qty": "SUM(/qty)"}, {"index": ("/qty",)}
    )
    assert made == admin_pb2.CreateTopicRequest(
        name="positions",
        settings=admin_pb2.TopicSettings(index=["/qty"]),
        view=admin_pb2.ViewDefinition(
            source="orders",
            group_by=named(("", "/account"), ("t", "FLOOR(/ts)")),
            select=named(("qty", "SUM(/qty)")),
            where="/open",
        ),
    )


def test_a_definition_comes_back_in_the_form_in_which_it_was_given() -> None:
    made = create_view_request("v", "orders", "/open", "/account, FLOOR(/ts) AS t", {"n": "COUNT(*)"}, {})
    status = admin_pb2.ViewStatus(complete=True, records_read=7, groups=2, ungrouped=1)
    found = topic(admin_pb2.Topic(name="v", view=made.view, view_status=status))
    assert found.view == ViewDefinition("orders", ("/account", "FLOOR(/ts) AS t"), ("COUNT(*) AS n",), "/open")
    assert found.view_status == ViewStatus(complete=True, records_read=7, groups=2, ungrouped=1)
    again = found.view
    assert create_view_request("v", again.source, again.where, again.group_by, again.select, {}).view == made.view


def test_a_topic_is_no_view_and_one_of_a_hidden_source_is() -> None:
    assert not topic(admin_pb2.Topic(name="t")).is_view
    hidden = topic(admin_pb2.Topic(name="t", view_status=admin_pb2.ViewStatus()))
    assert (hidden.is_view, hidden.view) == (True, None)


def test_an_older_server_is_not_asked_for_a_view() -> None:
    """It would make an ordinary topic."""
    needs = needed(request())
    assert needs is not None
    assert (needs.field, needs.contract) == ("view", 3)
    assert needed(create_request("t", None, {})) is None


def test_a_view_without_a_source_or_with_an_empty_expression_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="source: names no topic"):
        request(source="")
    with pytest.raises(InvalidArgument, match="select: an expression is empty"):
        request(select="COUNT(*) AS n,")
