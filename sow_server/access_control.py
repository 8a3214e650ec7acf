"""Access as the server runs it: the access file, the audit log, and the credentials that each listener asks for.

[1]  A reload that fails changes nothing; the log and the caller hear why (rule A2).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path
from typing import Final, Protocol

import structlog

from sow_server.access.audit import AuditLog, AuditObserver, NoAudit
from sow_server.access.authorizer import AccessObserver, Authorizer, Listener
from sow_server.access.credentials import Anonymous, BehindCertificates, Certificates, Prover, Tokens
from sow_server.access.file import load_access
from sow_server.access.model import ANONYMOUS, AccessFile
from sow_server.certificates import CertificateFault
from sow_server.config import Config, ConfigError, ListenerAuth, ListenerConfig
from sow_server.engine.catalog.topics import Topics
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.issuers import Issuers
from sow_server.placement import Places
from sow_server.revocations import Revocations

log = structlog.get_logger(__name__)

LOOK_SECONDS: Final = 1.0
"""How often expired credentials and new key files are looked for."""


class ControlObserver(AccessObserver, AuditObserver, Protocol):
    """Counts decisions, and the lines of the audit log (the metrics)."""


class AccessControlError(Exception):
    """The server cannot start: the access file, the audit log or a key file cannot be used."""


def read_access(config: Config) -> AccessFile | None:
    """The access file of a configuration; None: it has none. Raises AccessControlError."""
    path = config.access.file
    if path is None:
        return None
    try:
        file = load_access(path)
    except ConfigError as error:
        raise AccessControlError(str(error)) from error
    for name in dict.fromkeys((*config.replication.accept, *(peer.name for peer in config.peers))):
        if name not in file.peers:
            raise AccessControlError(
                f"{path}: [[peers]] has no {name}, which may send here: give its certificate or token_sha256"
            )
    return file


def check(config: Config) -> list[str]:
    """Checks the files that the access control reads, without a server; returns warnings, one line each. Raises
    AccessControlError."""
    file = read_access(config)
    if any(listener.auth is ListenerAuth.JWT for listener in config.listeners):
        jwt_prover(config)
    folder = config.access.audit.parent
    if file is not None and not folder.is_dir():
        raise AccessControlError(f"[access] audit: there is no directory {folder}")
    if file is None or ANONYMOUS in file.identities:
        return []
    return [
        f'{listener.listen} has auth = "none", and {config.access.file} has no identity "{ANONYMOUS}": every call '
        'there is refused; set auth = "token", for example'
        for listener in config.listeners
        if listener.auth is ListenerAuth.NONE
    ]


def jwt_prover(config: Config) -> tuple[Prover, Callable[[], None]]:
    """The prover of JWTs, and a function that reads its keys anew. Raises AccessControlError."""
    try:
        from sow_server.access import jwt
    except ImportError as error:
        raise AccessControlError(
            "auth = \"jwt\" needs the Python package PyJWT: pip install 'sow[jwt]', or in a checkout: '.[jwt]'"
        ) from error
    assert config.jwt is not None, "the relations of the configuration demand it"
    try:
        prover = jwt.Jwts(config.jwt)
    except jwt.KeysUnusable as error:
        raise AccessControlError(f"[access.jwt] jwks: {error}") from error
    return prover, prover.refresh


class AccessControl:
    """Owns the authorizer. Event loop only."""

    def __init__(
        self,
        config: Config,
        topics: Topics,
        observer: ControlObserver,
        readers: Executor,
        places: Places | None = None,
    ) -> None:
        """`places`: the cells of topics. Raises AccessControlError."""
        self._config = config
        self._readers = readers
        self._refreshed: list[Callable[[], None]] = []
        """Read key files anew that have changed."""
        self._unusable: list[str] = []
        """The causes for which key files cannot be used, as they were told last."""
        self._tasks: list[asyncio.Task[None]] = []
        self._reloading: asyncio.Task[None] | None = None
        self._one_reload = asyncio.Lock()
        self._one_refresh = asyncio.Lock()
        """Two at a time could end with the older file."""
        access = config.access
        file = read_access(config)
        try:
            audit = (
                NoAudit()
                if file is None
                else AuditLog(
                    access.audit,
                    bytes_max=access.audit_bytes_max,
                    files=access.audit_files,
                    now_micros=_now_micros,
                    observer=observer,
                )
            )
        except OSError as error:
            raise AccessControlError(f"[access] audit: {access.audit}: {error.strerror}") from error
        self.authorizer: Final = Authorizer(
            topics,
            file,
            audit,
            observer,
            now_micros=_now_micros,
            elapsed=time.monotonic,
            audit_reads=access.audit_reads,
            places=places,
        )

    def listener(self, config: ListenerConfig) -> Listener:
        """The listener that admits calls by its kind of credential. Raises AccessControlError."""
        return Listener(self.authorizer, self._prover(config))

    def _prover(self, config: ListenerConfig) -> Prover:
        certificates = None if config.client_ca is None else self._certificates(config.client_ca, config.revoked)
        if config.auth is ListenerAuth.NONE:
            return Anonymous()
        if config.auth is ListenerAuth.CERTIFICATE:
            assert certificates is not None, "the relations of the configuration demand it"
            return certificates
        prover: Prover = Tokens()
        if config.auth is ListenerAuth.JWT:
            prover, refresh = jwt_prover(self._config)
            self._refreshed.append(refresh)
        return prover if certificates is None else BehindCertificates(prover, certificates)

    def _certificates(self, client_ca: Path, revoked: Path | None) -> Certificates:
        try:
            issuers = Issuers(client_ca)
            revocations = None if revoked is None else Revocations(revoked, client_ca)
        except CertificateFault as error:
            raise AccessControlError(f"{error.key}: {error}") from error

        def fault(pem: bytes, chain: bytes) -> str:
            if not issuers.trust(pem, chain):
                return "is of an authority that has gone"
            return "is revoked" if revocations is not None and revocations.is_revoked(pem) else ""

        return Certificates(fault)

    async def reload(self) -> tuple[int, int]:
        """Reads the access file again ([1]); returns the number of identities, and of the calls that were ended. Raises
        StoreError."""
        path = self._config.access.file
        if path is None:
            log.warning("access_reload_refused", cause="there is no access file, see [access] file")
            raise StoreError(Reason.INVALID_ARGUMENT, "this server has no access file, see [access] file")
        async with self._one_reload:
            try:
                file = await asyncio.get_running_loop().run_in_executor(self._readers, load_access, path)
            except ConfigError as error:
                log.error("access_reload_failed", cause=str(error))
                raise StoreError(
                    Reason.INVALID_ARGUMENT, f"the access file has a fault, and nothing was changed: {error}"
                ) from error
            ended = self.authorizer.replace(file)
            await self._refresh()
            ended += self.authorizer.look()
        log.info("access_reloaded", identities=len(file.identities), peers=len(file.peers), ended_calls=ended)
        return len(file.identities), ended

    def reload_soon(self) -> None:
        """Reads the access file again (SIGHUP); without one, only the log tells of it."""
        self._reloading = asyncio.get_running_loop().create_task(self._reload_by_signal())

    async def _reload_by_signal(self) -> None:
        tell = self.authorizer.tell_signal
        tell("begin", "SIGHUP", {"decision": "allowed"})
        try:
            identities, ended = await self.reload()
        except StoreError as error:  # the log has it, or there is no access file
            tell("end", "SIGHUP", {"code": error.reason.name})
        else:
            tell("end", "SIGHUP", {"code": "OK", "identities": identities, "ended_calls": ended})

    def start(self) -> None:
        """From now on, ends calls whose credential expires, and reads changed key files."""
        self._tasks = [asyncio.create_task(self._look()), asyncio.create_task(self._read_keys())]

    def stop(self) -> None:
        """Stops, and closes the audit log."""
        for task in self._tasks:
            task.cancel()
        self.authorizer.close()

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self.authorizer.look()
            self.authorizer.forget_idle()

    async def _read_keys(self) -> None:
        # Apart from the looks: a file system that does not answer must not keep expired credentials in use.
        while self._refreshed:
            await asyncio.sleep(LOOK_SECONDS)
            await self._refresh()
            self.authorizer.look()

    async def _refresh(self) -> None:
        """Reads key files anew that have changed."""
        causes: list[str] = []
        async with self._one_refresh:
            for refresh in self._refreshed:
                try:
                    await asyncio.get_running_loop().run_in_executor(self._readers, refresh)
                except Exception as error:  # noqa: BLE001  # a key file that is being written, or broken: the old keys stay
                    causes.append(str(error))
        if causes != self._unusable:  # not once a second
            self._unusable = causes
            for cause in causes:
                log.error("keys_unusable", cause=cause)


def _now_micros() -> int:
    """Wall time: credentials expire by it, not by the guarded clock of the records."""
    return time.time_ns() // 1000
