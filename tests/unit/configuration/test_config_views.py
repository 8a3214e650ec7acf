"""[views.NAME]: definitions of views in the configuration file (rules V1, K1)."""

from __future__ import annotations

import pytest

from sow_server.config import ConfigError, DeclaredView, load, render
from sow_server.engine.values.views import ViewDefinition
from tests.support.servers.configs import Write, write

__all__ = ["write"]  # a fixture

ORDERS = '[topics.orders]\nkey = ["/id"]\n'
POSITIONS = """[views.positions]
source = "orders"
where = "/open"
group_by = ["/account", "FLOOR(/ts / 60) AS minute"]
select = { qty = "SUM(/qty)", "odd name" = "MAX(/px)" }
index = ["/qty"]
retain_bytes = "1MiB"
"""


def test_a_view_is_read_and_printed_as_it_is(write: Write) -> None:
    found = load(write(ORDERS + POSITIONS + '[views."a.slim"]\nsource = "orders"\nselect = ["/a", "/b * 2 AS b"]\n'))
    definition = ViewDefinition(
        "orders",
        (("", "/account"), ("minute", "FLOOR(/ts / 60)")),
        (("qty", "SUM(/qty)"), ("odd name", "MAX(/px)")),
        "/open",
    )
    assert found.views == {
        "positions": DeclaredView(definition, {"index": ("/qty",), "retain_bytes": 2**20}),
        "a.slim": DeclaredView(ViewDefinition("orders", (), (("", "/a"), ("b", "/b * 2"))), {}),
    }
    assert load(write(render(found))) == found


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('[views.v]\nwhere = "/a"\n', "[views.v] source: is missing"),
        ('[views.v]\nsource = "t"\nselect = "COUNT(*) AS n"\n', "[views.v] select: expected expressions such as"),
        ('[views.v]\nsource = "t"\nselect = [1]\n', "all of them texts, found the integer 1"),
        ('[views.v]\nsource = "t"\nselect = { n = 1 }\n', "all of them texts, found the integer 1"),
        ('[views.v]\nsource = "t"\nwhere = "/a >"\n', "[views.v] where: "),
        ('[views.v]\nsource = "t"\nexpiration = "30s"\n', "[views.v] expiration: unknown key"),
        ('[views.v]\nsource = "t"\ngroup = ["/a"]\n', "[views.v] group: unknown key, did you mean group_by?"),
        ('[views._v]\nsource = "t"\n', "[views._v]: '_v' is no topic name"),
        ('[views.v]\nsource = "t"\n[topics.v]\n', "[views.v]: there is [topics.v] as well"),
        ("[views]\nv = 1\n", "expected the table [views.v]"),
    ],
)
def test_a_wrong_definition_is_refused_at_its_place(write: Write, text: str, fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(write(text))
    assert fault in str(caught.value)
