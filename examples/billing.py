"""A billing service that must not miss an order, and crashes. The server keeps its position: unacknowledged orders come
again.

    sow-server                                            # in one terminal
    .venv/bin/python -m examples.billing [HOST:PORT]      # in another
"""

from __future__ import annotations

import contextlib
import sys

from sow_client import EARLIEST, AlreadyExists, Client


def bill(client: Client, invoices: list[str], *, crash_at: str | None = None) -> None:
    """Writes an invoice for each paid order and acknowledges it, up to the order named `last`."""
    with client.durable("shop.orders", "billing", "/state = 'paid'", start=EARLIEST) as durable:
        for change in durable:
            if change.key == "last":
                durable.acknowledge(change)
                return
            invoices.append(change.key)
            print("invoice for", change.key)
            if change.key == crash_at:
                raise RuntimeError("a crash, after the invoice and before its acknowledgement")
            durable.acknowledge(change)


def main(server: str) -> None:
    """Two runs of the service: the first one crashes, the second continues where it was. Orders come in between."""
    invoices: list[str] = []
    with Client(server) as client:
        with contextlib.suppress(AlreadyExists):
            client.create_topic("shop.orders", key=["/id"])
        for order in ("o-1", "o-2", "o-3"):
            client.publish("shop.orders", {"id": order, "state": "paid"})
        client.publish("shop.orders", {"id": "o-4", "state": "open"})
        try:
            bill(client, invoices, crash_at="o-2")
        except RuntimeError as error:
            print("crashed:", error)

        client.publish("shop.orders", {"id": "o-4", "state": "paid"})  # no consumer is attached now
        client.publish("shop.orders", {"id": "last", "state": "paid"})
        left = client.describe_durable("shop.orders", "billing").figures
        print("waiting:", left and left.unacknowledged_entries, "entries")
        bill(client, invoices)
        left = client.describe_durable("shop.orders", "billing").figures
        print("waiting:", left and left.unacknowledged_entries, "entries")
    print("twice, as it was not acknowledged:", sorted({one for one in invoices if invoices.count(one) > 1}))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7450")
