"""Client certificates whose authority has gone (rules A6, N3)."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from structlog.testing import capture_logs

from sow_server import issuers
from sow_server.certificates import CHECK_SECONDS, CertificateFault
from sow_server.issuers import Issuers
from tests.support.servers.certificates import DAY, Authority, replace


class World:
    """Two authorities with a client each, their file, and a clock."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.one, self.two = Authority(folder, "one"), Authority(folder, "two", end=10 * DAY)
        self.first, self.second = self.one.issue("first").pem, self.two.issue("second", end=400 * DAY).pem
        self.file = folder / "clients.pem"
        self.seconds = 0.0
        self.later = timedelta()
        self.holds(self.one, self.two)
        self.issuers = Issuers(self.file, now=lambda: datetime.now(UTC) + self.later, monotonic=lambda: self.seconds)

    def holds(self, *authorities: Authority) -> None:
        """Replaces the file."""
        replace(self.file, b"".join(one.file.read_bytes() for one in authorities))

    def trusted(self) -> list[bool]:
        """Whether the two clients are, a second later."""
        self.seconds += CHECK_SECONDS
        return [self.issuers.trust(self.first, b""), self.issuers.trust(self.second, b"")]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_an_authority_that_goes_takes_its_own_certificates_alone(world: World) -> None:
    """Story: who had connected before its authority was taken out of the file kept its connection, and all of its
    streams."""
    assert world.trusted() == [True, True]
    world.holds(world.two)
    assert world.issuers.trust(world.first, b""), "the file is looked at once a second"
    assert world.trusted() == [False, True]
    world.holds(world.one)
    assert world.trusted() == [True, False]
    world.holds(world.one, world.two)
    assert world.trusted() == [True, True]


def test_an_authority_that_expires_goes_as_well(world: World) -> None:
    assert world.trusted() == [True, True]
    world.later = 11 * DAY
    assert world.trusted() == [True, False]


def test_an_authority_of_the_same_name_is_another_one(world: World) -> None:
    assert world.trusted() == [True, True]
    (world.folder / "again").mkdir()
    world.holds(Authority(world.folder / "again", "one"), world.two)
    assert world.trusted() == [False, True]


def test_an_unusable_file_changes_nothing_and_is_told(world: World) -> None:
    world.file.write_bytes(b"nothing")
    with capture_logs() as logs:
        assert world.trusted() == [True, True]
        assert world.trusted() == [True, True]
    assert [line["event"] for line in logs] == ["authorities_unusable"]
    with pytest.raises(CertificateFault):
        Issuers(world.file)


def test_a_certificate_is_good_by_the_certificates_that_came_with_it(world: World) -> None:
    between = world.one.signs(Authority(world.folder, "between"))
    client = between.issue("client").pem
    chain = client + between.file.read_bytes()
    world.seconds += CHECK_SECONDS
    assert world.issuers.trust(client, chain)
    assert not world.issuers.trust(client, client), "without them nothing leads to an authority"
    world.holds(world.two)
    world.seconds += CHECK_SECONDS
    assert not world.issuers.trust(client, chain)
    world.holds(between)  # the one in between may be trusted by itself
    world.seconds += CHECK_SECONDS
    assert world.issuers.trust(client, chain)


def test_a_certificate_of_a_client_vouches_for_nobody(world: World) -> None:
    """A client of an authority that stays has signed another certificate with its key."""
    leaf = world.two.signs(Authority(world.folder, "leaf"), may_issue=False)
    client = leaf.issue("client").pem
    assert not world.issuers.trust(client, client + leaf.file.read_bytes())


def test_bytes_that_are_no_certificate_are_not_trusted(world: World) -> None:
    for pem, chain in ((b"", b""), (b"x", b""), (world.first, b"-----BEGIN CERTIFICATE-----\nAAAA\n")):
        assert not world.issuers.trust(pem, chain) or chain


def test_a_file_that_keeps_the_authority_costs_no_signature(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """issuers [3]"""
    assert world.trusted() == [True, True]
    asked: list[x509.Certificate] = []
    monkeypatch.setattr(issuers, "_has_issued", lambda issuer, certificate: asked.append(certificate))
    world.holds(world.two, world.one, Authority(world.folder, "third"))
    assert world.trusted() == [True, True]
    assert asked == []
    world.holds(world.two)
    for _ in range(5):
        assert world.trusted() == [False, True]
    assert len(asked) == 1, "looked for once in each set of authorities"


def test_only_so_many_are_remembered(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    assert issuers.CACHED_MAX <= 100_000
    monkeypatch.setattr(issuers, "CACHED_MAX", 3)
    for number in range(20):
        assert not world.issuers.trust(b"x", b"%d" % number)
    assert len(world.issuers._behind) <= 3
