"""`sow-server --check-ready`: asks the running server of a configuration whether it is ready, for health checks."""

from __future__ import annotations

import http.client
import ssl
import threading
from typing import Final

from sow_server.config import MetricsConfig, split_address

ANSWER_SECONDS_MAX: Final = 3.0
_EVERY_ADDRESS: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def why_not_ready(settings: MetricsConfig, seconds: float = ANSWER_SECONDS_MAX) -> str:
    """The reason why the server with this [metrics] table is not ready; "": it is ready. `seconds`: for all of it.

    It is asked on this machine, so its certificate, which has another name, is not checked."""
    answers: list[str] = []
    # A timeout of a socket bounds each read. An answer that comes byte by byte would take as long as it likes.
    asking = threading.Thread(target=lambda: answers.append(_ask(settings, seconds)), daemon=True)
    asking.start()
    asking.join(seconds)
    return answers[0] if answers else f"no whole answer from {settings.listen} within {seconds:g} s"


def _ask(settings: MetricsConfig, seconds: float) -> str:
    host, port = split_address(settings.listen)
    host = _EVERY_ADDRESS.get(host, host)
    connection = (
        http.client.HTTPConnection(host, port, timeout=seconds)
        if settings.certificate is None
        else http.client.HTTPSConnection(host, port, timeout=seconds, context=_trusting())
    )
    try:
        connection.request("GET", "/readyz")
        answer = connection.getresponse()
        said = answer.read().decode(errors="replace").strip()
    except (OSError, http.client.HTTPException) as error:
        return f"no answer from {settings.listen} ({str(error) or type(error).__name__})"
    finally:
        connection.close()
    return "" if answer.status == http.HTTPStatus.OK else said or f"HTTP status {answer.status}"


def _trusting() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
