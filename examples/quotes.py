"""A quote board. The feed publishes only changed fields, and the board receives only those. A quote that is not renewed
for four seconds is stale and leaves the board by itself.

    sow-server                                            # in one terminal
    .venv/bin/python -m examples.quotes [HOST:PORT]       # in another
"""

from __future__ import annotations

import contextlib
import sys
import threading

from sow_client import AlreadyExists, Client, View

STALE_AFTER = "4s"


def feed(client: Client) -> None:
    """Some news from the market. Every update renews the quote's life."""
    client.delta_publish("quotes", {"symbol": "ACME", "bid": 99.5})
    client.delta_publish("quotes", {"symbol": "ACME", "size": {"bid": 300}}, unset=["/note"])
    client.delta_publish("quotes", {"symbol": "PEAR", "bid": 48.0})  # no longer matches the board's filter
    client.sow_delete("quotes", filter="/venue = 'XPAR'")


def main(server: str) -> None:
    """Shows the messages and the resulting board, until the board is empty."""
    with Client(server) as client:
        with contextlib.suppress(AlreadyExists):
            client.create_topic("quotes", key=["/symbol"], expiration=STALE_AFTER)
        size = {"bid": 100, "ask": 200}
        client.publish(
            "quotes", {"symbol": "ACME", "venue": "XNYS", "bid": 99.0, "ask": 101.0, "size": size, "note": "!"}
        )
        client.publish("quotes", {"symbol": "FIRM", "venue": "XPAR", "bid": 70.0, "ask": 71.0, "size": size})
        client.publish("quotes", {"symbol": "PEAR", "venue": "XNYS", "bid": 51.0, "ask": 52.0, "size": size})

        board = View()
        # First the present records, then the changes: nothing is missing in between, and nothing comes twice.
        with client.sow_and_subscribe("quotes", "/bid > 50", delta=True, oof=True) as changes:
            for change in changes:
                board.apply(change)
                sent = change.record.payload.decode() if change.record else ""
                print(f"{change.op:12} {change.key:4} {change.reason or '':7} {sent}")
                if change.op == "snapshot_end":
                    threading.Thread(target=feed, args=[client]).start()
                elif change.op == "put":
                    print(f"{'':12} so now it is {board[change.key].data}")
                if board.complete and not board:
                    break
    print("the board is empty")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7450")
