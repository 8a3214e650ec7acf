"""The cache of Django on a real server (sow_client.contrib.django), and Django's own tests of a cache."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import django
import pytest
from django.conf import settings
from django.test import override_settings

from sow_client import Client
from sow_client.contrib.django import SowCache
from tests.support.servers.clocked_server import STORE_FILE
from tests.support.servers.forked_commands import PATHS
from tests.support.servers.server import ServerProcess

pytestmark = pytest.mark.slow

SDIST: Final = "django==5.2.19 --hash=sha256:ad03d8abc51dbff95ebf34b27123cf0c26a3b62db7ba0cd520783686362533d1"
DOWNLOAD_SECONDS: Final = 300
TESTS_OF_DJANGO: Final = """
import sys, unittest
import django
from django.conf import settings

address, tests = sys.argv[1:]
sys.path.insert(0, tests)
DATABASE = {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}
CACHE = {"BACKEND": "sow_client.contrib.django.SowCache", "LOCATION": address}
settings.configure(
    SECRET_KEY="of the tests", USE_TZ=False, INSTALLED_APPS=["cache"],
    DATABASES={"default": DATABASE, "other": DATABASE},
    DEFAULT_AUTO_FIELD="django.db.models.AutoField", CACHES={"default": CACHE},
)
django.setup()
from cache.tests import BaseCacheTests, caches_setting_for_tests
from django.test import TestCase, override_settings
from django.test.utils import setup_databases, setup_test_environment

# As Django itself does for Redis and Memcached, which make no room by themselves, either.
ALL = caches_setting_for_tests(base=CACHE, exclude={"cull", "zero_cull"})
SowCacheTests = override_settings(CACHES=ALL)(type("SowCacheTests", (BaseCacheTests, TestCase), {}))
setup_test_environment()
setup_databases(0, False)
unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(SowCacheTests))
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    if not settings.configured:
        settings.configure(SECRET_KEY="one", SECRET_KEY_FALLBACKS=[])
        django.setup()
    with ServerProcess(tmp_path_factory.mktemp("server"), start=False) as made:
        made.module = "tests.support.servers.clocked_server"
        made.start()
        yield made


@pytest.fixture
def cache(server: ServerProcess) -> SowCache:
    made = SowCache(server.address, {"TIMEOUT": 60, "OPTIONS": {"topic": "django"}})
    made.clear()
    return made


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    with server.client() as made:
        yield made


def tick(server: ServerProcess, seconds: int) -> None:
    file = server.config.parent / STORE_FILE
    before = int(file.read_text()) if file.exists() else 0
    beside = file.with_suffix(".new")
    beside.write_text(str(before + seconds))
    os.replace(beside, file)


def test_values_live_as_long_as_they_should(server: ServerProcess, cache: SowCache) -> None:
    cache.set("default", {"a": (1, 2)})
    cache.set("longer", 2, timeout=120)
    cache.set("forever", None, timeout=None)
    cache.set_many({"over": 1, "before": 2}, timeout=0)
    cache.set("renewed", 3, timeout=1)
    assert cache.touch("renewed", timeout=100)
    assert not cache.touch("nothing")
    assert cache.get_many(["default", "longer", "forever", "over"]) == {
        "default": {"a": (1, 2)},
        "longer": 2,
        "forever": None,
    }
    tick(server, 60)
    assert cache.get("default", "gone") == "gone"
    assert cache.get("forever", "gone") is None
    assert cache.get("renewed") == 3
    cache.set("renewed", 4, timeout=-1)
    assert not cache.has_key("renewed")
    assert cache.touch("longer", timeout=0)
    assert not cache.has_key("longer")


def test_add_and_incr_are_atomic_and_keep_the_lifetime(server: ServerProcess, cache: SowCache) -> None:
    with ThreadPoolExecutor(8) as threads:
        added = list(threads.map(lambda number: cache.add("first", number), range(8)))
        assert sorted(added) == [False] * 7 + [True]
        assert cache.get("first") == added.index(True)
        cache.set("count", 0, timeout=30)
        assert sorted(threads.map(lambda _: cache.incr("count", 2), range(24))) == list(range(2, 50, 2))
    assert cache.decr("count") == 47
    tick(server, 30)
    with pytest.raises(ValueError, match="'count' not found"):
        cache.incr("count")
    assert cache.add("count", 1, timeout=0)
    assert not cache.add("first", 1, timeout=0)


def test_versions_prefixes_and_deletion(server: ServerProcess, cache: SowCache) -> None:
    other = SowCache(server.address, {"KEY_PREFIX": "shop", "OPTIONS": {"topic": "django"}})
    cache.set("a", 1)
    cache.set("a", 2, version=2)
    other.set("a", 3)
    assert [cache.get("a"), cache.get("a", version=2), other.get("a")] == [1, 2, 3]
    assert cache.incr_version("a", 4) == 5
    assert [cache.get("a"), cache.get("a", version=5)] == [None, 1]
    assert cache.delete("a", version=5)
    assert not cache.delete("a", version=5)
    cache.delete_many(["a", "b"], version=2)
    cache.delete_many([])
    assert not cache.has_key("a", version=2)
    other.clear()
    assert other.get("a") is None


def test_a_pickle_of_somebody_else_is_never_loaded(cache: SowCache, client: Client, tmp_path: Path) -> None:
    """Whoever may write to the topic does not thereby run code in the program that reads it."""

    class Harm:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "harmed",)

    harm = pickle.dumps(Harm())
    cache.set("known", 1)
    (known,) = client.query("django")
    for payload in (harm, bytes(32) + harm, known.payload[:32] + harm, b"", known.payload[:-1]):
        client.publish("django", payload, key=":1:known")
        assert cache.get("known", "absent") == "absent"
        assert cache.get_many(["known"]) == {}
        assert not cache.has_key("known")
        with pytest.raises(ValueError, match="not found"):
            cache.incr("known")
        assert cache.add("known", 2, timeout=0), "it counts as absent"
        assert cache.add("known", 2)
        assert not cache.add("known", 3)
        assert cache.get("known") == 2
    client.publish("django", known.payload, key=":1:other")
    assert cache.get("other") is None, "a value belongs to its key"
    assert not (tmp_path / "harmed").exists()


def test_many_and_large_values_take_several_requests(cache: SowCache, client: Client) -> None:
    large = {f"large-{number}": bytes(1_000_000) for number in range(20)}
    cache.set_many(large)
    assert cache.get_many(large) == large
    client.publish_many("django", [b"{}"] * 10_001, keys=[f":1:{number}" for number in range(10_001)])
    cache.delete_many([*large, *range(10_001)])
    assert client.count("django") == 0


@pytest.mark.filterwarnings("ignore::django.core.cache.CacheKeyWarning")
def test_a_key_that_holds_a_pickle_does_not_make_it_one_of_ours(
    cache: SowCache, client: Client, tmp_path: Path
) -> None:
    """Key and pickle were signed with a zero byte between them. Whoever could choose a key, and write to the topic,
    moved the end of the key into the value."""
    harm = f"cpathlib\nPath.touch\n(cpathlib\nPath\n(S'{tmp_path / 'harmed'}'\ntRtR."
    cache.set(f"user\0{harm}", 1)
    (known,) = client.query("django")
    signature, pickled = known.payload[:32], known.payload[32:]
    for between in (b"", b"\0", b" "):
        client.publish("django", signature + harm.encode() + between + pickled, key=":1:user")
        assert cache.get("user", "absent") == "absent"
    assert not (tmp_path / "harmed").exists()


def test_a_new_secret_key_takes_the_values_of_the_one_before(cache: SowCache) -> None:
    cache.set("a", 1)
    with override_settings(SECRET_KEY="two"):
        assert cache.get("a") is None
    with override_settings(SECRET_KEY="two", SECRET_KEY_FALLBACKS=[settings.SECRET_KEY]):
        assert cache.get("a") == 1


def test_with_json_nothing_is_pickled(server: ServerProcess, client: Client) -> None:
    cache = SowCache(server.address, {"OPTIONS": {"topic": "plain", "serializer": "json"}})
    cache.set("a", {"b": (1, None)})
    assert cache.get("a") == {"b": [1, None]}
    cache.set("a", 1)
    assert cache.incr("a") == 2
    assert [record.payload for record in client.query("plain")] == [b"2"]
    with pytest.raises(TypeError, match="set is not JSON serializable"):
        cache.set("a", {1})
    with pytest.raises(ValueError, match="serializer 'yaml' is neither"):
        SowCache(server.address, {"OPTIONS": {"serializer": "yaml"}})


@pytest.mark.long
def test_the_tests_of_django_pass(server: ServerProcess, tmp_path: Path) -> None:
    (tmp_path / "wanted.txt").write_text(SDIST)
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:", "-r", "wanted.txt"]
    got = subprocess.run(pip, cwd=tmp_path, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS, check=False)
    if got.returncode:
        pytest.skip(f"no sdist of Django: {got.stderr.strip().splitlines()[-1]}")
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (tests,) = tmp_path.glob("*/tests")
    ran = subprocess.run(
        [sys.executable, "-c", TESTS_OF_DJANGO, server.address, str(tests)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, PATHS))},
        capture_output=True,
        text=True,
        timeout=DOWNLOAD_SECONDS,
        check=False,
    )
    assert "Ran 54 tests" in ran.stderr, ran.stderr
    assert ran.stderr.endswith("OK (skipped=3)\n"), ran.stderr
