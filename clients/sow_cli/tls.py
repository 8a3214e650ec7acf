"""`sow tls init`: an authority of one's own for a trial, with certificates for a server and its clients.

[1]  No file is overwritten. If one cannot be written, those before it are removed again.
[2]  Keys are their owner's alone from the first byte on (0600, rule X5).
"""

from __future__ import annotations

import importlib.util
import ipaddress
import os
import re
import shlex
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import click

from sow.durations import parse_micros
from sow_cli import arguments

_LOCAL: Final = ("localhost", "127.0.0.1", "::1")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_HOST: Final = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63})*")
_CLOCKS: Final = timedelta(minutes=5)
"""How far the clock of another machine may be behind this one's."""


def _host(text: str) -> str:
    """A name or an address of a server."""
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        if _HOST.fullmatch(text) is None or text.replace(".", "").isdigit():
            raise click.BadParameter(f"{text!r} is neither a host name nor an address; it has no port") from None
    return text


def _client(text: str) -> str:
    """The name of a client, which is also that of its files."""
    if _NAME.fullmatch(text) is None or text.lower() in ("ca", "server"):
        raise click.BadParameter(f"{text!r}: expected 1 to 64 of letters, digits and ._@-, and neither ca nor server")
    return text


def _validity(text: str) -> timedelta:
    found = timedelta(microseconds=parse_micros(arguments.duration(text)))
    if not timedelta(minutes=1) <= found <= timedelta(days=3650):
        raise click.BadParameter(f"{text} is not between 1m and 3650d")
    return found


@click.group(short_help="Make certificates for a trial.")
def tls() -> None:
    """Certificates for a trial."""


@tls.command(short_help="Make an authority, and certificates of a server and of clients.")
@click.argument("folder", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--host", "hosts", metavar="NAME", multiple=True, type=_host,
    help="Another name or address of the server; repeatable.",
)  # fmt: skip
@click.option(
    "--client", "clients", metavar="NAME", multiple=True, type=_client, default=("client",), show_default=True,
    help="A client, whose certificate has the name CN:NAME; repeatable.",
)  # fmt: skip
@click.option(
    "--valid", metavar="DURATION", default="90d", show_default=True, type=_validity, help="How long they are valid."
)
def init(folder: Path, hosts: tuple[str, ...], clients: tuple[str, ...], valid: timedelta) -> None:
    """Make ca.pem, server.pem and a certificate for each client in the folder DIR, each with its key beside it, and
    print the lines that start a server and a command with them. Nothing is overwritten.

    This is for trials: whoever reads ca.key can make clients that the server accepts.

    \b
    Examples:
      sow tls init certs
      sow tls init certs --host sow.example.com --client desk --client ops
    """
    if importlib.util.find_spec("cryptography") is None:
        raise click.ClickException("`sow tls init` needs cryptography; install it: pip install 'sow[server]'")
    begin = datetime.now(UTC).replace(microsecond=0)
    files = _issued((*_LOCAL, *hosts), clients, begin - _CLOCKS, begin + valid)
    _write(folder, files)
    path = {name: shlex.quote(str(folder / name)) for name in files}
    first = (*hosts, "localhost")[0]
    # In quotation marks, as zsh takes brackets for a pattern.
    server, every = (
        (shlex.quote(f"[{first}]:7450"), "'[::]:7450'") if ":" in first else (f"{first}:7450", "0.0.0.0:7450")
    )
    click.echo(
        f"# For a trial, until {begin + valid:%Y-%m-%d %H:%M} UTC. Whoever reads {path['ca.key']} can make clients.\n"
        "# The server, which accepts only clients with a certificate of this authority:\n"
        f"{f'SOW_SERVER_LISTEN={every} ' if hosts else ''}SOW_SERVER_TLS_CERTIFICATE={path['server.pem']} \\\n"
        f"    SOW_SERVER_TLS_KEY={path['server.key']} SOW_SERVER_TLS_CLIENT_CA={path['ca.pem']} sow-server\n"
        "# A command, in another terminal:\n"
        f"sow --server {server} --tls-ca {path['ca.pem']} \\\n"
        f"    --tls-cert {path[f'{clients[0]}.pem']} --tls-key {path[f'{clients[0]}.key']} status"
    )


def _issued(hosts: tuple[str, ...], clients: tuple[str, ...], begin: datetime, end: datetime) -> dict[str, bytes]:
    """The content of each file, by its name."""
    # Here, as it belongs to an extra, and other commands start without it.
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    def general(host: str) -> x509.GeneralName:
        try:
            return x509.IPAddress(ipaddress.ip_address(host))
        except ValueError:
            return x509.DNSName(host)

    files: dict[str, bytes] = {}
    signer = ec.generate_private_key(ec.SECP256R1())
    signer_id = x509.SubjectKeyIdentifier.from_public_key(signer.public_key())
    # Another name for each authority: whoever has two of them in a bundle finds the right one.
    ca_name = f"sow trial {signer_id.digest.hex()[:16]}"
    for name in ("ca", "server", *dict.fromkeys(clients)):
        is_ca = name == "ca"
        key = signer if is_ca else ec.generate_private_key(ec.SECP256R1())
        extensions: list[tuple[x509.ExtensionType, bool]] = [
            (x509.BasicConstraints(is_ca, 0 if is_ca else None), True),
            # It signs data, or, as an authority, certificates and lists of revoked ones.
            (x509.KeyUsage(not is_ca, False, False, False, False, is_ca, is_ca, False, False), True),
            (x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False),
            (x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(signer_id), False),
        ]
        if name == "server":  # it may also be the peer, so the client, of another one
            usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
            extensions.append((x509.SubjectAlternativeName([general(host) for host in dict.fromkeys(hosts)]), False))
        else:
            usages = [ExtendedKeyUsageOID.CLIENT_AUTH]
        if not is_ca:
            extensions.append((x509.ExtendedKeyUsage(usages), False))
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, ca_name if is_ca else name)])
        issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, ca_name)])
        serial = x509.random_serial_number()
        builder = x509.CertificateBuilder(issuer, subject, key.public_key(), serial, begin, end)
        for extension, is_critical in extensions:
            builder = builder.add_extension(extension, is_critical)
        files[f"{name}.pem"] = builder.sign(signer, SHA256()).public_bytes(Encoding.PEM)
        files[f"{name}.key"] = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return files


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    """Writes new files ([1], [2]). Raises UsageError."""
    written: list[Path] = []
    file = folder
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for file in (folder / name for name in files):
            mode = 0o600 if file.suffix == ".key" else 0o644
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            written.append(file)
            with open(descriptor, "wb") as out:
                out.write(files[file.name])
    except OSError as error:
        for done in written:
            done.unlink(missing_ok=True)
        kept = "; nothing is overwritten" if isinstance(error, FileExistsError) else ""
        raise click.UsageError(f"{file}: {error.strerror}{kept}") from error
