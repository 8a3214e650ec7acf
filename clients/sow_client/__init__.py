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

Names that are not in `__all__` are private, whatever module they are in. A docstring says all that its reader
needs. At its end it names the rules of docs/rules.md that have the exact promises, such as "Rules: P1, L2".
"""

from typing import TYPE_CHECKING, Final

from sow.version import __version__
from sow_client._access import AccessDecision, CallerSession, Identity
from sow_client._addresses import Prefer
from sow_client._changes import ChangesPlan, Pin
from sow_client._channel import Tls
from sow_client._exports import Export, ExportOf
from sow_client._failover import FailoverPublish, Instance
from sow_client._history import History, PastChange
from sow_client._inspection import (
    ActiveSubscription,
    ConfigSetting,
    ExpiryHorizon,
    Figures,
    KeptResult,
    LatencyFigures,
    LinkFigures,
    LogLevel,
    LogLine,
    TopicDue,
    TopicFigures,
)
from sow_client._keys import Key, share_of
from sow_client._loads import Load, LoadFigures, LoadInfo, LoadPart, LoadProgress
from sow_client._packed import PackedColumn, PackedRecords
from sow_client._payloads import MessageTypeName, PayloadForm
from sow_client._placement import (
    CellProblem,
    CellTrouble,
    PlacedTopics,
    Placement,
    PlacementReloaded,
    PreparedPlacement,
    SeparatedTopic,
    Stray,
)
from sow_client._publish_core import Ack, OpenedPublisher
from sow_client._publisher import Publisher
from sow_client._records import (
    EARLIEST,
    NEVER,
    Change,
    Deleted,
    DurabilityName,
    Page,
    Published,
    QueryFooter,
    QueryHeader,
    QueryPlan,
    Record,
    RecordBatch,
    Restamped,
    RestampMode,
    TouchOnlyName,
)
from sow_client._reports import (
    BackupMade,
    Browsed,
    ClockAccepted,
    Compacted,
    Difference,
    Durable,
    DurableConsumer,
    DurableFigures,
    EffectiveSetting,
    Gap,
    IncomingLink,
    IndexStatus,
    LinkTopic,
    OutgoingLink,
    Policy,
    Repaired,
    ReplicationStatus,
    Rewound,
    Status,
    Topic,
    TopicChecked,
    TopicStatistics,
    UnsoundRow,
    Verified,
    ViewDefinition,
    ViewStatus,
)
from sow_client._setting_values import (
    UNLIMITED,
    BacklogActionName,
    DurableSettings,
    DurableSettingsArguments,
    OnMissingName,
    TopicSettings,
    TopicSettingsArguments,
)
from sow_client._subscription import Subscription
from sow_client._tokens import Token
from sow_client._view import View
from sow_client.blocking import Client
from sow_client.blocking._consuming import DurableSubscription
from sow_client.blocking._following import LiveView
from sow_client.blocking._joining import JoinedSubscription
from sow_client.blocking._leasing import Lease
from sow_client.blocking._loading import LoadStager
from sow_client.blocking._reading import QueryResult
from sow_client.blocking._results import LiveResult
from sow_client.blocking._transactions import Transaction
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
    LeaseLost,
    LifetimeIgnoredWarning,
    NotFound,
    PermissionDenied,
    PublishFailed,
    Refusal,
    ReplicationUnavailable,
    ResourceExhausted,
    ResyncRequired,
    SowError,
    Unavailable,
)

if TYPE_CHECKING:
    from sow_client._aio_publisher import AsyncPublisher
    from sow_client._aio_subscription import AsyncSubscription
    from sow_client._aio_topics_publisher import AsyncTopicsPublisher
    from sow_client._topics_publisher import TopicsPublisher
    from sow_client.aio import AsyncClient
    from sow_client.aio._consuming import AsyncDurableSubscription
    from sow_client.aio._following import AsyncLiveView
    from sow_client.aio._joining import AsyncJoinedSubscription
    from sow_client.aio._leasing import AsyncLease
    from sow_client.aio._loading import AsyncLoadStager
    from sow_client.aio._reading import AsyncQueryResult
    from sow_client.aio._results import AsyncLiveResult
    from sow_client.aio._transactions import AsyncTransaction

_LATER: Final = {
    "AsyncClient": "sow_client.aio",
    "AsyncDurableSubscription": "sow_client.aio._consuming",
    "AsyncJoinedSubscription": "sow_client.aio._joining",
    "AsyncLease": "sow_client.aio._leasing",
    "AsyncLiveResult": "sow_client.aio._results",
    "AsyncLiveView": "sow_client.aio._following",
    "AsyncLoadStager": "sow_client.aio._loading",
    "AsyncQueryResult": "sow_client.aio._reading",
    "AsyncPublisher": "sow_client._aio_publisher",
    "AsyncSubscription": "sow_client._aio_subscription",
    "AsyncTopicsPublisher": "sow_client._aio_topics_publisher",
    "AsyncTransaction": "sow_client.aio._transactions",
    "TopicsPublisher": "sow_client._topics_publisher",
}
"""Names that are imported at their first use: a program has one of the two clients, and short ones start sooner."""


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    globals()[name] = found = getattr(import_module(_LATER[name]), name)
    return found


__all__ = [
    "EARLIEST",
    "NEVER",
    "UNLIMITED",
    "Aborted",
    "AccessDecision",
    "Ack",
    "ActiveSubscription",
    "AlreadyExists",
    "AsyncClient",
    "AsyncDurableSubscription",
    "AsyncJoinedSubscription",
    "AsyncLease",
    "AsyncLiveResult",
    "AsyncLiveView",
    "AsyncLoadStager",
    "AsyncPublisher",
    "AsyncQueryResult",
    "AsyncSubscription",
    "AsyncTopicsPublisher",
    "AsyncTransaction",
    "BacklogActionName",
    "BackupMade",
    "Browsed",
    "CallerSession",
    "Cancelled",
    "CellProblem",
    "CellTrouble",
    "Change",
    "ChangesPlan",
    "Client",
    "ClockAccepted",
    "Compacted",
    "ConditionFailed",
    "ConfigSetting",
    "DataLoss",
    "DeadlineExceeded",
    "Deleted",
    "Difference",
    "DurabilityName",
    "Durable",
    "DurableConsumer",
    "DurableFigures",
    "DurableSettings",
    "DurableSettingsArguments",
    "DurableSubscription",
    "EffectiveSetting",
    "ExpiryHorizon",
    "Export",
    "ExportOf",
    "FailedPrecondition",
    "FailoverPublish",
    "Figures",
    "Gap",
    "History",
    "Identity",
    "IncomingLink",
    "IndexStatus",
    "Instance",
    "InternalError",
    "InvalidArgument",
    "JoinedSubscription",
    "KeptResult",
    "Key",
    "LatencyFigures",
    "Lease",
    "LeaseLost",
    "LifetimeIgnoredWarning",
    "LinkFigures",
    "LinkTopic",
    "LiveResult",
    "LiveView",
    "Load",
    "LoadFigures",
    "LoadInfo",
    "LoadPart",
    "LoadProgress",
    "LoadStager",
    "LogLevel",
    "LogLine",
    "MessageTypeName",
    "NotFound",
    "OnMissingName",
    "OpenedPublisher",
    "OutgoingLink",
    "PackedColumn",
    "PackedRecords",
    "Page",
    "PastChange",
    "PayloadForm",
    "PermissionDenied",
    "Pin",
    "PlacedTopics",
    "Placement",
    "PlacementReloaded",
    "Policy",
    "Prefer",
    "PreparedPlacement",
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
    "Repaired",
    "ReplicationStatus",
    "ReplicationUnavailable",
    "ResourceExhausted",
    "RestampMode",
    "Restamped",
    "ResyncRequired",
    "Rewound",
    "SeparatedTopic",
    "SowError",
    "Status",
    "Stray",
    "Subscription",
    "Tls",
    "Token",
    "Topic",
    "TopicChecked",
    "TopicDue",
    "TopicFigures",
    "TopicSettings",
    "TopicSettingsArguments",
    "TopicStatistics",
    "TopicsPublisher",
    "TouchOnlyName",
    "Transaction",
    "Unavailable",
    "UnsoundRow",
    "Verified",
    "View",
    "ViewDefinition",
    "ViewStatus",
    "__version__",
    "share_of",
]
