"""Why no secure connection was made: the causes that gRPC names as problems of TLS, and a look where it names none.

[1]  Looking sends nothing but a handshake: no token and no request. It happens only after gRPC has failed, and
     where the cause leaves open whether TLS is at fault.
"""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Mapping
from typing import Final

from sow_client._channel import ADDRESS, Tls, proxy_variable
from sow_client._statuses import is_open_to_doubt

LOOK_SECONDS_MAX: Final = 1.0
"""The longest time for each step of the handshake."""


def looked(server: str, tls: Tls | None, cause: str, *, variables: Mapping[str, str] = os.environ) -> str:
    """The problem of TLS, a name of `_statuses.TLS_PROBLEMS`, because of which a server at HOST:PORT has ended the
    connection; empty: it is none, or nobody can tell. It may take some seconds."""
    match = ADDRESS.fullmatch(server)
    if match is None or not match["port"] or not is_open_to_doubt(cause) or proxy_variable(server, variables):
        return ""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # gRPC has verified it, or will
    context.set_alpn_protocols(["h2"])
    host = match["host"].strip("[]")
    try:
        if tls is not None and tls.certificate is not None and tls.key is not None:
            context.load_cert_chain(tls.certificate, tls.key)
        with (
            socket.create_connection((host, int(match["port"])), LOOK_SECONDS_MAX) as plain,
            context.wrap_socket(plain, server_hostname=host) as secure,
        ):
            if tls is None:
                return "tls_required"
            # With TLS 1.3 the server judges the client's certificate after the client's handshake. gRPC's server says
            # nothing then, and would else begin to speak HTTP/2.
            if secure.recv(1):
                return ""
    except ssl.SSLError as error:
        if "ALERT" not in (error.reason or ""):
            return ""
        if tls is None:
            return "tls_required"
    except (OSError, ValueError):
        return ""
    return "client_certificate_required" if tls.certificate is None else "client_certificate_refused"
