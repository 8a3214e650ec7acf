"""A session store. A session lives for two seconds after its last use, and an id is given out once. If two requests
change a session at once, neither change is lost. A subscriber hears when a session has ended.

    sow-server                                            # in one terminal
    .venv/bin/python -m examples.sessions [HOST:PORT]     # in another
"""

from __future__ import annotations

import contextlib
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from sow_client import AlreadyExists, Client, ConditionFailed


def sign_in(client: Client, session: str, user: str) -> bool:
    """Begins a session. False if a live session has this id."""
    try:
        client.publish("shop.sessions", {"id": session, "user": user, "cart": []}, only_if_absent=True)
    except ConditionFailed:
        return False
    return True


def add_to_cart(client: Client, session: str, item: str) -> None:
    """Reads, changes, and writes the session, and repeats this if another writer was quicker. It also renews the
    session."""
    while (record := client.get("shop.sessions", session)) is not None and isinstance(record.data, dict):
        changed = {**record.data, "cart": [*record.data["cart"], item]}
        with contextlib.suppress(ConditionFailed):
            client.publish("shop.sessions", changed, only_if_version=record.version)
            return
    raise LookupError(f"session {session} has ended")


def main(server: str) -> None:
    """Alice goes shopping, Bob leaves."""
    with Client(server) as client:
        with contextlib.suppress(AlreadyExists):
            client.create_topic("shop.sessions", key=["/id"], expiration="2s")
        with client.subscribe("shop.sessions", oof=True) as changes:
            print("alice signs in:", sign_in(client, "s-1", "alice"), "- bob:", sign_in(client, "s-2", "bob"))
            print("mallory signs in with alice's id:", sign_in(client, "s-1", "mallory"))
            with ThreadPoolExecutor() as requests:  # each item is a separate request, all at once
                list(requests.map(add_to_cart, [client] * 4, ["s-1"] * 4, ["bread", "milk", "tea", "jam"]))
            for _ in range(6):
                time.sleep(0.5)
                client.touch("shop.sessions", "s-1")  # she looks around: two more seconds
            for change in changes:
                if change.op == "oof" and change.previous:
                    print("ended:", change.reason, change.previous.data)
                    if change.key == "s-1":
                        break


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7450")
