"""The Python client of sow: `Client` (blocking) and `AsyncClient`, two thin shells over one pure core.

    with Client("127.0.0.1:7450") as client:
        client.publish("orders", {"id": 1, "price": 9.5}, ttl="30s")
        for record in client.query("orders", "/price > 9"):
            print(record.key, record.data, record.expire_time)
        for change in client.sow_and_subscribe("orders", "/price > 9", oof=True):
            print(change.op, change.key, change.record)
        with client.durable("orders", "billing") as durable:
            for change in durable:
                durable.acknowledge(change)

What is not named in `__all__` is private, whatever module it is in.
"""

from sow_client._channel import Tls
from sow_client._durable import AsyncDurableSubscription, DurableSubscription
from sow_client._publisher import Ack, AsyncPublisher, Publisher
from sow_client._records import (
    EARLIEST,
    NEVER,
    UNLIMITED,
    BacklogActionName,
    Change,
    ClockAccepted,
    Compacted,
    Deleted,
    DurabilityName,
    Durable,
    DurableFigures,
    DurableSettings,
    DurableSettingsArguments,
    EffectiveSetting,
    Gap,
    IndexStatus,
    MessageTypeName,
    OnMissingName,
    Page,
    Policy,
    Published,
    QueryFooter,
    QueryHeader,
    QueryPlan,
    Record,
    RecordBatch,
    Restamped,
    RestampMode,
    Rewound,
    Status,
    Topic,
    TopicSettings,
    TopicSettingsArguments,
    TopicStatistics,
)
from sow_client._subscription import AsyncSubscription, Subscription
from sow_client._view import View
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
    ResyncRequired,
    SowError,
    Unavailable,
)

__all__ = [
    "EARLIEST",
    "NEVER",
    "UNLIMITED",
    "Aborted",
    "Ack",
    "AlreadyExists",
    "AsyncClient",
    "AsyncDurableSubscription",
    "AsyncPublisher",
    "AsyncQueryResult",
    "AsyncSubscription",
    "BacklogActionName",
    "Cancelled",
    "Change",
    "Client",
    "ClockAccepted",
    "Compacted",
    "ConditionFailed",
    "DataLoss",
    "DeadlineExceeded",
    "Deleted",
    "DurabilityName",
    "Durable",
    "DurableFigures",
    "DurableSettings",
    "DurableSettingsArguments",
    "DurableSubscription",
    "EffectiveSetting",
    "FailedPrecondition",
    "Gap",
    "IndexStatus",
    "InternalError",
    "InvalidArgument",
    "MessageTypeName",
    "NotFound",
    "OnMissingName",
    "Page",
    "PermissionDenied",
    "Policy",
    "PublishFailed",
    "Published",
    "Publisher",
    "QueryFooter",
    "QueryHeader",
    "QueryPlan",
    "QueryResult",
    "Record",
    "RecordBatch",
    "Refusal",
    "ResourceExhausted",
    "RestampMode",
    "Restamped",
    "ResyncRequired",
    "Rewound",
    "SowError",
    "Status",
    "Subscription",
    "Tls",
    "Topic",
    "TopicSettings",
    "TopicSettingsArguments",
    "TopicStatistics",
    "Unavailable",
    "View",
]
