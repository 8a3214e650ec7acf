"""The public names of `sow_client`, and that its two clients offer the same."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable

import pytest

import sow_client
from sow_client import (
    AsyncClient,
    AsyncDurableSubscription,
    AsyncLiveResult,
    AsyncLiveView,
    AsyncPublisher,
    AsyncSubscription,
    AsyncTopicsPublisher,
    AsyncTransaction,
    Client,
    DurableSubscription,
    LiveResult,
    LiveView,
    Publisher,
    Subscription,
    TopicsPublisher,
    Transaction,
)
from tests.support.servers.server import unmeasured

PUBLIC = {
    "AccessDecision",
    "CallerSession", "ActiveSubscription", "KeptResult", "ConfigSetting", "DurableConsumer",
    "ExpiryHorizon", "Figures", "LatencyFigures", "LinkFigures", "LogLevel", "LogLine", "TopicFigures",
    "History", "PastChange", "TopicDue",
    "Identity",
    "Key",
    "Token",
    "EARLIEST", "NEVER", "UNLIMITED", "Aborted", "Ack", "AlreadyExists", "AsyncClient", "AsyncDurableSubscription",
    "AsyncTopicsPublisher", "AsyncTransaction", "TopicsPublisher", "Transaction",
    "AsyncJoinedSubscription", "JoinedSubscription", "AsyncLease", "Lease", "LeaseLost", "LifetimeIgnoredWarning",
    "TouchOnlyName",
    "AsyncLoadStager", "AsyncPublisher", "AsyncQueryResult", "AsyncSubscription", "BacklogActionName", "BackupMade",
    "Browsed", "Cancelled", "Change", "ChangesPlan", "Client", "ClockAccepted", "Compacted", "ConditionFailed",
    "DataLoss",
    "DeadlineExceeded", "Deleted", "Difference", "DurabilityName", "Durable", "DurableFigures", "DurableSettings",
    "DurableSettingsArguments", "DurableSubscription", "EffectiveSetting", "Export", "ExportOf", "FailedPrecondition",
    "FailoverPublish", "Gap",
    "IncomingLink", "IndexStatus", "Instance", "InternalError", "InvalidArgument", "LinkTopic", "Load", "LoadFigures",
    "LoadInfo", "LoadPart", "LoadProgress", "LoadStager", "MessageTypeName", "NotFound", "OnMissingName",
    "OpenedPublisher", "OutgoingLink", "PackedColumn", "PackedRecords", "Page", "PayloadForm", "PermissionDenied",
    "CellProblem", "CellTrouble", "PlacedTopics", "Placement", "PlacementReloaded",
    "PreparedPlacement", "SeparatedTopic", "Stray",
    "Pin", "Policy", "Prefer",
    "PublishFailed", "Published", "Publisher", "QueryFooter", "QueryHeader", "QueryPlan", "QueryResult", "Record",
    "AsyncLiveResult", "AsyncLiveView", "LiveResult", "LiveView",
    "RecordBatch", "Refusal", "Repaired", "ReplicationStatus", "ReplicationUnavailable", "ResourceExhausted",
    "RestampMode", "Restamped", "ResyncRequired", "Rewound", "SowError", "Status", "Subscription", "Tls", "Topic",
    "TopicChecked", "TopicSettings", "TopicSettingsArguments", "TopicStatistics", "Unavailable", "UnsoundRow",
    "Verified", "View", "ViewDefinition", "ViewStatus", "__version__", "share_of",
}  # fmt: skip


def test_the_public_names_are_these_and_exist() -> None:
    assert set(sow_client.__all__) == PUBLIC
    assert sow_client.__all__ == sorted(sow_client.__all__, key=lambda name: (not name.isupper(), name))
    for name in sow_client.__all__:
        assert hasattr(sow_client, name)


def test_both_clients_have_the_same_methods_with_the_same_arguments() -> None:
    for blocking, asynchronous in (
        (Client, AsyncClient),
        (Publisher, AsyncPublisher),
        (TopicsPublisher, AsyncTopicsPublisher),
        (Subscription, AsyncSubscription),
        (DurableSubscription, AsyncDurableSubscription),
        (LiveResult, AsyncLiveResult),
        (LiveView, AsyncLiveView),
        (Transaction, AsyncTransaction),
    ):
        names = _public(blocking)
        assert names == _public(asynchronous)
        for name in names:
            one, other = getattr(blocking, name), getattr(asynchronous, name)
            if callable(one):
                assert _parameters(one) == _parameters(other), name


def _parameters(method: Callable[..., object]) -> list[str]:
    """As text; a function of the program gives its result, and in asyncio something to await."""
    given = inspect.signature(method).parameters.values()
    return [re.sub(r"Awaitable\[(\w+)\]", r"\1", str(parameter)) for parameter in given]


def test_every_public_method_has_a_docstring() -> None:
    for kind in (
        Client,
        AsyncClient,
        Publisher,
        AsyncPublisher,
        TopicsPublisher,
        AsyncTopicsPublisher,
        Subscription,
        AsyncSubscription,
        DurableSubscription,
        AsyncDurableSubscription,
        LiveResult,
        AsyncLiveResult,
        LiveView,
        AsyncLiveView,
        Transaction,
        AsyncTransaction,
    ):
        for name in _public(kind):
            assert inspect.getdoc(getattr(kind, name)), f"{kind.__name__}.{name}"


@pytest.mark.slow
def test_importing_the_client_loads_no_library_that_few_programs_need() -> None:
    """Arrow alone takes as long as the client."""
    script = (
        "import sys, sow_client; print(*sorted({name.partition('.')[0] for name in sys.modules}"
        " & {'pyarrow', 'pandas', 'polars', 'numpy', 'pydantic', 'html', 'click', 'rich'}),"
        " 'sow_client._frames' in sys.modules, 'sow_client._html' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment())
    assert done.stdout.split() == ["False", "False"]


def environment() -> dict[str, str]:
    return unmeasured() | {"PYTHONPATH": os.pathsep.join(sys.path)}


def _public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}
