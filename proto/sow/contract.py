"""The version of the contract `sow.v1`, by which a client knows what a server would ignore.

A server passes over fields of a request that it does not know, as every protobuf program does. A client that needs one
asks the server for its version first. A release that adds fields to requests has the next version.
"""

from __future__ import annotations

from typing import Final

CONTRACT: Final = 3
"""That of this source. `DescribeInstance` tells it."""
UNDESCRIBED: Final = 1
"""That of servers that do not tell one: the first release."""
