"""The pages of the metrics endpoint: metrics, life and readiness, for any request."""

from __future__ import annotations

import gzip
import random

import pytest
from prometheus_client import CollectorRegistry, Gauge, Metric

from sow_server.metrics_pages import MetricsPages, Readiness

TOKEN = "s3cret!"


class Endpoint:
    """Pages with one metric, and the readiness that they tell."""

    def __init__(self, token: str = "") -> None:
        self.registry = CollectorRegistry()
        Gauge("one", "A metric.", registry=self.registry).set(1)
        self.readiness = Readiness()
        self.pages = MetricsPages(self.registry, lambda: self.readiness.reason, token)

    def says(self, line: str, *headers: str) -> tuple[int, dict[str, str], bytes]:
        """Status, header fields and body of the answer to a request."""
        answer = self.pages.answer("\r\n".join([line, *headers, "", ""]).encode("latin-1"))
        head, _, body = answer.partition(b"\r\n\r\n")
        status, *fields = head.decode("latin-1").split("\r\n")
        version, code, _ = status.split(" ", 2)
        assert version == "HTTP/1.1"
        found = dict(field.split(": ", 1) for field in fields)
        assert found["Connection"] == "close"
        return int(code), found, body


def get(path: str) -> str:
    return f"GET {path} HTTP/1.1"


def test_the_metrics_are_those_of_the_registry() -> None:
    status, fields, body = Endpoint().says(get("/metrics"), "Host: x")
    assert status == 200
    assert fields["Content-Type"].startswith("text/plain; version=")
    assert fields["Content-Length"] == str(len(body))
    assert b"\none 1.0\n" in body


def test_a_scrape_chooses_metrics_form_and_compression() -> None:
    endpoint = Endpoint()
    Gauge("two", "Another one.", registry=endpoint.registry).set(2)
    status, fields, body = endpoint.says(
        get("/metrics?name[]=two"), "Accept: application/openmetrics-text; version=1.0.0", "Accept-Encoding: gzip"
    )
    assert status == 200
    assert fields["Content-Type"].startswith("application/openmetrics-text")
    text = gzip.decompress(body).decode()
    assert "two 2.0\n" in text
    assert "one 1.0\n" not in text


@pytest.mark.parametrize("path", ["/metrics", "/healthz", "/readyz"])
def test_head_has_the_fields_of_get_and_no_body(path: str) -> None:
    endpoint = Endpoint()
    endpoint.readiness.ready()
    status, fields, body = endpoint.says(get(path))
    assert (status, len(body)) == (200, int(fields["Content-Length"]))
    assert endpoint.says(f"HEAD {path} HTTP/1.1") == (200, fields, b"")


@pytest.mark.parametrize("path", ["/", "/metrics/", "/healthz/x", "//metrics/..", "*", "/%6Detrics", "/favicon.ico"])
def test_other_paths_are_not_found(path: str) -> None:
    status, _, body = Endpoint().says(get(path))
    assert status == 404
    assert body == b"there are /metrics, /healthz, /readyz\n"


@pytest.mark.parametrize("path", ["/metrics", "/healthz", "/readyz"])
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE", "PATCH", "get", "BREW"])
def test_other_methods_are_not_allowed(method: str, path: str) -> None:
    status, fields, _ = Endpoint(TOKEN).says(f"{method} {path} HTTP/1.1", "Content-Length: 3")
    assert status == 405
    assert fields["Allow"] == "GET, HEAD"


def test_a_body_that_is_announced_is_not_asked_for() -> None:
    """An answer `100 Continue` in front of the other one would invite a body that nobody reads."""
    assert Endpoint().says("POST /metrics HTTP/1.1", "Expect: 100-continue", "Content-Length: 3")[0] == 405


# --- the token -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_a_scrape_with_the_token_is_served(scheme: str) -> None:
    status, _, body = Endpoint(TOKEN).says(get("/metrics"), f"Authorization: {scheme} {TOKEN}")
    assert status == 200
    assert b"\none 1.0\n" in body


@pytest.mark.parametrize(
    "headers",
    [
        (),
        ("Authorization: Bearer",),
        ("Authorization: Bearer ",),
        (f"Authorization: {TOKEN}",),
        (f"Authorization: Basic {TOKEN}",),
        (f"Authorization: Bearer {TOKEN}x",),
        (f"Authorization: Bearer {TOKEN[:-1]}",),
        (f"Authorization: Bearer {TOKEN.upper()}",),
        (f"Authorization: Bearer x {TOKEN}",),
        ("Authorization: Bearer \xff\x80",),
        (f"Authorization: Bearer wrong\r\nAuthorization: Bearer {TOKEN}",),
    ],
)
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_a_scrape_without_the_token_gets_nothing(method: str, headers: tuple[str, ...]) -> None:
    """X6."""
    status, fields, body = Endpoint(TOKEN).says(f"{method} /metrics HTTP/1.1", *headers)
    assert status == 401
    assert fields["WWW-Authenticate"] == 'Bearer realm="sow metrics"'
    assert b"one" not in body
    assert TOKEN.encode() not in body


def test_life_and_readiness_need_no_token() -> None:
    endpoint = Endpoint(TOKEN)
    endpoint.readiness.ready()
    assert endpoint.says(get("/healthz"))[0] == 200
    assert endpoint.says(get("/readyz"))[0] == 200


# --- readiness -------------------------------------------------------------------------------------------------------


def test_readiness_follows_the_server_and_life_does_not() -> None:
    """X6."""
    endpoint = Endpoint()
    seen = [endpoint.says(get("/readyz"))]
    for step in (
        endpoint.readiness.ready,
        lambda: endpoint.readiness.failed("DISK_FULL"),
        endpoint.readiness.stopping,
    ):
        step()
        seen.append(endpoint.says(get("/readyz")))
        assert endpoint.says(get("/healthz"))[::2] == (200, b"ok\n")
    assert [(status, body) for status, _, body in seen] == [
        (503, b"starting\n"),
        (200, b"ready\n"),
        (503, b"the store has failed: DISK_FULL\n"),
        (503, b"stopping\n"),
    ]


# --- anything else ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("\xff\x00", 400),
        ("GET http://[ HTTP/1.1", 400),
        ("GET /metrics HTTP/x", 400),
        ("GET /metrics HTTP/2.0", 505),
        ("GET /metrics and more HTTP/1.1", 400),
        ("GET http://elsewhere/healthz HTTP/1.1", 200),
        ("GET /healthz HTTP/1.0", 200),
    ],
)
def test_a_request_that_is_none_is_refused(line: str, expected: int) -> None:
    assert Endpoint().says(line)[0] == expected


def test_too_many_fields_are_refused() -> None:
    assert Endpoint().says(get("/healthz"), *[f"X-{number}: 1" for number in range(500)])[0] == 431


def test_a_refusal_repeats_nothing_of_the_request() -> None:
    for line in ("<script>", "<script> /metrics", "GET /metrics HTTP/<script>", "GET /<script> HTTP/1.1"):
        answer = Endpoint().pages.answer(f"{line}\r\n\r\n".encode())
        assert answer
        assert b"script" not in answer


def test_any_bytes_get_an_answer_or_none(seed: int) -> None:
    """X6: no bytes raise an exception."""
    draw = random.Random(seed)
    pages = Endpoint(TOKEN).pages
    whole = f"GET /metrics?x=1 HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\nAccept: text/plain\r\n\r\n".encode()
    for _ in range(2000):
        head = bytearray(whole)
        for _ in range(draw.randrange(1, 6)):
            place = draw.randrange(len(head))
            if draw.random() < 0.5:
                head[place] = draw.randrange(256)
            else:
                del head[place : place + draw.randrange(1, 9)]
        answer = pages.answer(bytes(head))
        assert answer == b"" or answer.startswith(b"HTTP/1.1 "), bytes(head)


def test_a_scrape_that_fails_is_an_error_without_details() -> None:
    class Broken:
        def collect(self) -> list[Metric]:
            raise RuntimeError("for the test")

    endpoint = Endpoint()
    endpoint.registry.register(Broken())
    status, _, body = endpoint.says(get("/metrics"))
    assert (status, body) == (500, b"")
