"""Channels to peers: with the credentials that the configuration or a command gives, and the bounds of links."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import grpc

from sow.v1 import types_pb2
from sow_replication import ports
from sow_replication.options import PeerOptions
from sow_server.config import Config, PeerConfig, PlacementConfig
from sow_server.config.kinds import is_loopback
from sow_server.regular_files import read_regular

KEEPALIVE_MS: Final = 10_000
"""A peer that is silent for this long is asked whether it is there."""


class Dialling:
    """Opens channels to peers. Owns the settings of peers that were added by command."""

    def __init__(self, config: Config) -> None:
        """Raises OSError where a certificate of the configuration cannot be read. A replaced one is used from the next
        start on."""
        size = config.limits.link_bytes_max
        self._options = (
            ("grpc.max_receive_message_length", size),
            ("grpc.max_send_message_length", size),
            ("grpc.keepalive_time_ms", KEEPALIVE_MS),
            ("grpc.keepalive_timeout_ms", 10_000),
            ("grpc.enable_retries", 0),
            # Replication has its own backoff: gRPC reconnects at once.
            ("grpc.min_reconnect_backoff_ms", 100),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1_000),
        )
        self._configured = {peer.name: credentials_of(peer) for peer in config.peers}
        self.added: Final[dict[str, PeerConfig]] = {}
        """Peers that were added by command, by name. Their files are read for each link."""

    def __call__(self, peer: PeerOptions) -> grpc.aio.Channel:
        """A channel to a peer. Raises Refused where a certificate cannot be read."""
        added = self.added.get(peer.name)
        try:
            shown = self._configured.get(peer.name) if added is None else credentials_of(added)
        except OSError as error:
            raise ports.Refused(
                types_pb2.ERROR_REASON_UNSPECIFIED, f"{error.filename}: cannot be read ({error.strerror})"
            ) from error
        return open_channel(peer.address, shown, self._options)


def open_channel(
    address: str, credentials: grpc.ChannelCredentials | None, options: Sequence[tuple[str, int]]
) -> grpc.aio.Channel:
    """A channel to another server; without credentials it speaks plain text."""
    if credentials is not None:
        return grpc.aio.secure_channel(address, credentials, options)
    # A connection to this machine needs no proxy, whatever http_proxy says; and a proxy would read its token.
    without_proxy = (*options, ("grpc.enable_http_proxy", 0))
    return grpc.aio.insecure_channel(address, without_proxy if is_loopback(address) else options)


def credentials_of(peer: PeerConfig | PlacementConfig) -> grpc.ChannelCredentials | None:
    """The credentials for TLS with other servers; None: plain text. Raises OSError."""
    if peer.ca is None:
        return None
    return grpc.ssl_channel_credentials(
        root_certificates=read_regular(peer.ca),
        private_key=None if peer.key is None else read_regular(peer.key),
        certificate_chain=None if peer.certificate is None else read_regular(peer.certificate),
    )
