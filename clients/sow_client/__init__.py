"""The Python client of sow: `Client` (blocking) and `AsyncClient`, two thin shells over one pure core.

    with Client("127.0.0.1:7450") as client:
        client.publish("orders", {"id": 1, "price": 9.5}, ttl="30s")
        for record in client.query("orders"):
            print(record.key, record.data, record.expire_time)

What is not named in `__all__` is private, whatever module it is in.
"""

from sow_client._channel import Tls
from sow_client._publisher import Ack, AsyncPublisher, Publisher
from sow_client._records import (
    NEVER,
    ClockAccepted,
    Compacted,
    Deleted,
    Page,
    Published,
    QueryFooter,
    QueryHeader,
    Record,
    RecordBatch,
    Status,
    Topic,
    TopicSettings,
    TopicStatistics,
)
from sow_client.aio import AsyncClient, AsyncQueryResult
from sow_client.client import Client, QueryResult
from sow_client.errors import (
    Aborted,
    AlreadyExists,
    Cancelled,
    ConditionFailed,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    InternalError,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    PublishFailed,
    Refusal,
    ResourceExhausted,
    SowError,
    Unavailable,
)

__all__ = [
    "NEVER",
    "Aborted",
    "Ack",
    "AlreadyExists",
    "AsyncClient",
    "AsyncPublisher",
    "AsyncQueryResult",
    "Cancelled",
    "Client",
    "ClockAccepted",
    "Compacted",
    "ConditionFailed",
    "DataLoss",
    "DeadlineExceeded",
    "Deleted",
    "FailedPrecondition",
    "InternalError",
    "InvalidArgument",
    "NotFound",
    "Page",
    "PermissionDenied",
    "PublishFailed",
    "Published",
    "Publisher",
    "QueryFooter",
    "QueryHeader",
    "QueryResult",
    "Record",
    "RecordBatch",
    "Refusal",
    "ResourceExhausted",
    "SowError",
    "Status",
    "Tls",
    "Topic",
    "TopicSettings",
    "TopicStatistics",
    "Unavailable",
]
