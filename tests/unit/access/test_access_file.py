"""The access file: each fault names the file, the line, the table and the key; all of it or nothing (rule A2)."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sow_server.access.file import load_access
from sow_server.access.model import DEFAULT_EXPORTS, DEFAULT_LOADS, Limits
from sow_server.access.needs import Action
from sow_server.config import ConfigError
from sow_server.engine.values.model import MICROS
from sow_server.filters import print_filter
from tests.support.oracles.access_parts import access_of, sha256

DESK = f'[[identities]]\nname = "desk"\ntoken_sha256 = "{sha256("desk")}"\nroles = ["r"]\n'
PLAIN = DESK.replace('roles = ["r"]\n', "")
GRANT = "[[roles.r.grants]]\ntopics = 'orders'\nallow = ['read']\n"
SPARE = sha256("spare")

FAULTS = {
    # Text, with the fault on its last heading; the beginning of the message after the name of the file.
    "an unknown table": ("[identites]\n", ": identites: unknown key, did you mean identities?"),
    "a table that is a number": ("roles = 1\n", ": roles: expected the table [roles], found the integer 1"),
    "one identity without a list": ("[identities]\nname = 'x'\n", ": identities: expected tables, each under"),
    "a list of numbers": ("peers = [1]\n", ": peers: expected tables, each under the heading [[peers]]"),
    "no name": ("[[identities]]\njwt = 'a'\n", ":1: [identities[0]] name: is missing"),
    "a name with a slash": ("[[identities]]\nname = 'a/b'\njwt = 'a'\n", ":1: [identities[0]] name: expected 1 to 200"),
    "an empty name": ("[[identities]]\nname = ''\njwt = 'a'\n", ":1: [identities[0]] name: expected 1 to 200"),
    "an unknown key": (
        PLAIN + "[[identities]]\nnam = 'x'\n",
        ":4: [identities[1]] nam: unknown key, did you mean name?",
    ),
    "a key of the configuration": (
        "[[identities]]\ntoken_file = 'x'\n",
        ":1: [identities[0]] token_file: unknown key (known: ",
    ),
    "no credential": (
        "[[identities]]\nname = 'x'\n",
        ':1: [identities[0]]: "x" needs one of certificate, token_sha256',
    ),
    "two credentials": (
        PLAIN + f"[[identities]]\nname = 'x'\njwt = 'a'\ntoken_sha256 = '{SPARE}'\n",
        ':4: [identities[1]]: "x" needs one of certificate, token_sha256 and jwt, found token_sha256 and jwt',
    ),
    "a token instead of its digest": (
        "[[identities]]\nname = 'x'\ntoken_sha256 = 'secret'\n",
        ":1: [identities[0]] token_sha256: expected 64 hexadecimal digits",
    ),
    "a certificate's name without a type": (
        "[[identities]]\nname = 'x'\ncertificate = 'desk'\n",
        ":1: [identities[0]] certificate: expected a name with its type",
    ),
    "a word for a date": (DESK + "expires = '2027'\n", ":1: [identities[0]] expires: expected a date"),
    "a time without a zone": (DESK + "expires = 2027-01-01T00:00:00\n", ":1: [identities[0]] expires: the time has no"),
    "a time of day": (DESK + "expires = 07:00:00\n", ":1: [identities[0]] expires: expected a date such as"),
    "an unknown role": (
        DESK.replace('"r"', '"reeder"') + "[roles.reader]\n",
        ':1: [identities[0]] roles: "desk" has the unknown role "reeder", did you mean "reader"?',
    ),
    "a name twice": (
        DESK + GRANT + f"\n[[identities]]\nname = 'desk'\ntoken_sha256 = '{SPARE}'\n",
        ':9: [identities[1]] name: "desk" names two callers',
    ),
    "a peer with an identity's name": (
        DESK + GRANT + f"[[peers]]\nname = 'desk'\ntoken_sha256 = '{SPARE}'\n",
        ':8: [peers[0]] name: "desk" names two callers',
    ),
    "a credential twice": (
        DESK + GRANT + DESK.replace('"desk"', '"desk2"'),
        ':8: [identities[1]] token_sha256: "desk" and "desk2" have the same one',
    ),
    "a peer with an identity's credential": (
        DESK + GRANT + f"[[peers]]\nname = 'ldn'\ntoken_sha256 = '{sha256('desk')}'\n",
        ':8: [peers[0]] token_sha256: "desk" and "ldn" have the same one',
    ),
    "a nameless peer": ("[[peers]]\njwt = 'a'\n", ":1: [peers[0]] name: is missing"),
    "a peer named anonymous": ("[[peers]]\nname = 'anonymous'\n", ':1: [peers[0]]: "anonymous" needs one of'),
    "a peer with roles": (
        "[[peers]]\nname = 'x'\njwt = 'a'\nroles = []\n",
        ":1: [peers[0]] roles: unknown key (known:",
    ),
    "a peer's pattern": (
        "[[peers]]\nname = 'x'\njwt = 'a'\ntopics = '('\n",
        ':1: [peers[0]] topics: "(" is not an RE2',
    ),
    "a role that is a list": ("[[roles.r]]\n", ": roles.r: expected the table [roles.r], found an array"),
    "an unknown key of a role": ("[roles.r]\ngrant = []\n", ":1: [roles.r] grant: unknown key, did you mean grants?"),
    "one grant without a list": ("[roles.r.grants]\n", ": roles.r.grants: expected tables, each under the heading"),
    "a grant of nothing": (
        GRANT + "[[roles.r.grants]]\ntopics = 'x'\n",
        ":4: [roles.r.grants[1]] allow: is missing; a",
    ),
    "a grant without topics": (
        GRANT + "[[roles.r.grants]]\nallow = ['read', 'observe']\n",
        ":4: [roles.r.grants[1]] topics: is missing, and read needs it",
    ),
    "a grant's pattern": (
        "[[roles.r.grants]]\ntopics = '['\nallow = ['read']\n",
        ':1: [roles.r.grants[0]] topics: "[" is not an RE2',
    ),
    "an unknown action": (
        "[[roles.r.grants]]\ntopics = 'x'\nallow = ['raed']\n",
        ':1: [roles.r.grants[0]] allow: expected one of "read"',
    ),
    "the action of peers": (
        "[[roles.r.grants]]\ntopics = 'x'\nallow = ['replicate']\n",
        ':1: [roles.r.grants[0]] allow: expected one of "read"',
    ),
    "deny with rows": (
        "[[roles.r.grants]]\ntopics = 'x'\ndeny = ['read']\nrows = '/a = 1'\n",
        ":1: [roles.r.grants[0]] deny: cannot be combined with rows or hide",
    ),
    "deny with hide": (
        "[[roles.r.grants]]\ntopics = 'x'\ndeny = ['read']\nhide = ['/a']\n",
        ":1: [roles.r.grants[0]] deny: cannot be combined with rows or hide",
    ),
    "rows of an action on the server": (
        "[[roles.r.grants]]\nallow = ['operator']\nrows = '/a = 1'\n",
        ":1: [roles.r.grants[0]] rows: restricts actions on topics; operator is for the whole server",
    ),
    "hide of an action on the server": (
        "[[roles.r.grants]]\nallow = ['observe']\nhide = ['/a']\n",
        ":1: [roles.r.grants[0]] hide: restricts actions on topics; observe is for the whole server",
    ),
    "rows that do not parse": (GRANT + "rows = '/a ='\n", ":1: [roles.r.grants[0]] rows: expected"),
    "rows with a pattern that is none": (
        GRANT + "rows = \"/a LIKE '('\"\n",
        ":1: [roles.r.grants[0]] rows: expected a regular expression",
    ),
    "rows by the version": (
        GRANT + "rows = '@version > 1'\n",
        ":1: [roles.r.grants[0]] rows: @version changes without",
    ),
    "rows by the time of publish": (
        GRANT + "rows = '/a = 1 AND NOT @publish_time > 1'\n",
        ":1: [roles.r.grants[0]] rows: @publish_time changes without",
    ),
    "rows by the expire time": (
        GRANT + "rows = '/a IN (1) OR LENGTH(@expire_time) = 1'\n",
        ":1: [roles.r.grants[0]] rows: @expire_time changes without",
    ),
    "rows by now": (
        GRANT + "rows = '/a > NOW_MICROS() - 5'\n",
        ":1: [roles.r.grants[0]] rows: NOW_MICROS() changes without",
    ),
    "rows by size": (
        GRANT + "rows = 'MESSAGE_SIZE() < 5'\n",
        ":1: [roles.r.grants[0]] rows: MESSAGE_SIZE() does not say",
    ),
    "a path without a slash": (GRANT + "hide = ['iban']\n", ":1: [roles.r.grants[0]] hide: path 'iban' must begin"),
    "an empty path": (GRANT + "hide = ['']\n", ":1: [roles.r.grants[0]] hide: path '' must begin"),
    "an empty step": (GRANT + "hide = ['/a//b']\n", ":1: [roles.r.grants[0]] hide: path '/a//b' has an empty step"),
    "a path with a subscript": (
        GRANT + "hide = ['/lines[0]/iban']\n",
        ':1: [roles.r.grants[0]] hide: "/lines[0]/iban" has a subscript; leave it out',
    ),
    "a path with a star": (
        GRANT + "hide = ['/lines[*]']\n",
        ':1: [roles.r.grants[0]] hide: "/lines[*]" has a subscript',
    ),
    "a hide that is no list": (GRANT + "hide = '/a'\n", ":1: [roles.r.grants[0]] hide: expected paths such as"),
    "an unknown limit": (
        GRANT + "[roles.r.limits]\nexport = 1\n",
        ":4: [roles.r.limits] export: unknown key, did you mean exports?",
    ),
    "a negative limit": (
        GRANT + "[roles.r.limits]\nrpcs = -1\n",
        ":4: [roles.r.limits] rpcs: -1 is below the minimum, 0",
    ),
    "no bytes": (
        GRANT + "[roles.r.limits]\nbytes_in_flight = 0\n",
        ":4: [roles.r.limits] bytes_in_flight: 0B is below the minimum",
    ),
    "limits that are a list": (
        "[roles.r]\nlimits = []\n",
        ": roles.r.limits: expected the table [roles.r.limits], found",
    ),
    "no TOML": (DESK + "[[roles.r.grants]\n", ":5:"),
    "an integer of many digits": ("roles = " + "9" * 5000, ": has an integer of more than 64 bits"),
    "an integer of many digits in base 16": (
        "roles = 0x" + "f" * 5000,
        ": roles: expected the table [roles], found an integer of",
    ),
    "deep arrays": ("roles = " + "[" * 100_000, ": tables or arrays are nested too deeply"),
    "deep tables": ("roles = " + "{a=" * 100_000, ": tables or arrays are nested too deeply"),
    "deep rows": (GRANT + f"rows = '{'(' * 5_000}'\n", ":1: [roles.r.grants[0]] rows: "),
    "large rows": (GRANT + f"rows = '{'/a = 1 AND ' * 10_000}/a = 1'\n", ":1: [roles.r.grants[0]] rows: a filter of"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_told_with_its_file_line_table_and_key(tmp_path: Path, fault: str) -> None:
    text, message = FAULTS[fault]
    with pytest.raises(ConfigError) as caught:
        access_of(tmp_path, text)
    assert str(caught.value).startswith(f"{tmp_path / 'auth.toml'}{message}")


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o660, 0o602, 0o601])
def test_a_file_that_others_may_use_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "auth.toml"
    access_of(tmp_path, DESK + GRANT)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=rf"auth.toml holds a secret.*mode {mode:04o}.*chmod 600"):
        load_access(path)
    link = tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(ConfigError, match="holds a secret"):
        load_access(link)
    path.chmod(0o400)
    assert "desk" in load_access(link).identities


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_access(tmp_path / "absent")
    (tmp_path / "folder").mkdir(0o700)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_access(tmp_path / "folder")


def test_bytes_that_are_no_text_are_refused_with_their_line(tmp_path: Path) -> None:
    """Story: they raised UnicodeDecodeError, and `ReloadAccess` answered INTERNAL."""
    path = tmp_path / "auth.toml"
    path.touch(0o600)
    path.write_bytes(DESK.encode() + b'jwt = "\xff"')
    with pytest.raises(ConfigError, match=r"auth.toml:5: is not UTF-8"):
        load_access(path)


# --- meaning of a good file ----------------------------------------------------------------------------------------


def test_an_empty_file_names_nobody(tmp_path: Path) -> None:
    assert access_of(tmp_path, "") == access_of(tmp_path, "# nothing\n[roles]\n")


def test_a_good_file(tmp_path: Path) -> None:
    file = access_of(
        tmp_path,
        DESK
        + 'expires = 2027-01-01\n[[peers]]\nname = "ldn"\ncertificate = "URI:spiffe://bank/ldn"\ntopics = "o.*"\n'
        + GRANT
        + "rows = \"/region = 'eu' AND @key LIKE '^a' AND @topic = 't'\"\n"
        + "hide = ['/client/iban', '/[a b]', '/[x[0\\]]']\n"
        + "[roles.r.limits]\nrpcs = 0\nbytes_in_flight = '64MiB'\n",
    )
    desk, ldn = file.identities["desk"], file.peers["ldn"]
    (given,) = desk.roles[0].grants
    assert given.place == "auth.toml:10 roles.r.grants[0]"
    assert (given.allow, given.deny) == (frozenset({Action.READ}), frozenset())
    assert given.hide == (("client", "iban"), ("a b",), ("x[0]",))
    assert given.rows is not None
    assert print_filter(given.rows) == "/region = 'eu' AND @key LIKE '^a' AND @topic = 't'"
    assert (desk.limits.rpcs, desk.limits.bytes_in_flight, desk.limits.exports) == (0, 64 * 2**20, DEFAULT_EXPORTS)
    assert ldn.place == "auth.toml:6 peers[0]"
    assert [ldn.matches(name) for name in ("orders", "o", "xo")] == [True, True, False]


@pytest.mark.parametrize(
    ("written", "moment"),
    [
        ("2027-01-01", datetime.datetime(2027, 1, 1, tzinfo=datetime.UTC)),
        ("2027-01-01T00:00:00Z", datetime.datetime(2027, 1, 1, tzinfo=datetime.UTC)),
        ("2027-01-01T02:00:00+02:00", datetime.datetime(2027, 1, 1, tzinfo=datetime.UTC)),
        ("1969-12-31", datetime.datetime(1969, 12, 31, tzinfo=datetime.UTC)),
        (
            "0001-01-01T00:00:00+14:00",
            datetime.datetime(1, 1, 1, tzinfo=datetime.timezone(datetime.timedelta(hours=14))),
        ),
        ("9999-12-31", datetime.datetime(9999, 12, 31, tzinfo=datetime.UTC)),
    ],
)
def test_dates(tmp_path: Path, written: str, moment: datetime.datetime) -> None:
    file = access_of(tmp_path, DESK + f"expires = {written}\n" + GRANT)
    epoch = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    assert file.identities["desk"].credential.expire_micros == (moment - epoch).total_seconds() * MICROS


def test_anonymous_needs_no_credential_and_may_expire(tmp_path: Path) -> None:
    """Story: its date was read and ignored."""
    file = access_of(tmp_path, '[[identities]]\nname = "anonymous"\nexpires = 1970-01-02\n')
    assert file.identities["anonymous"].credential.expire_micros == 86_400 * MICROS


def test_the_largest_limit_of_several_roles_holds(tmp_path: Path) -> None:
    text = DESK.replace('["r"]', '["r", "s"]') + "[roles.r.limits]\nrpcs = 5\nloads = 1\n[roles.s.limits]\nrpcs = 7\n"
    limits = access_of(tmp_path, text).identities["desk"].limits
    assert (limits.rpcs, limits.loads, limits.exports) == (7, 1, DEFAULT_EXPORTS)
    assert access_of(tmp_path, DESK + "[roles.r]\n").identities["desk"].limits.loads == DEFAULT_LOADS


def test_a_role_without_limits_is_bounded_and_one_may_say_that_it_is_not(tmp_path: Path) -> None:
    """Story: a role without limits had none, so one identity could hold all that the server has."""
    plain = access_of(tmp_path, DESK + "[roles.r]\n").identities["desk"].limits
    assert plain == Limits()
    assert set(plain.named()) == {limit.name for limit in fields(Limits)}, "each has a default"
    both = DESK.replace('["r"]', '["r", "s"]') + "[roles.s.limits]\nrpcs = 7\n"
    limits = access_of(tmp_path, both + "[roles.r.limits]\nrpcs = 'unlimited'\nbacklog_bytes = 'unlimited'\n")
    desk = limits.identities["desk"].limits
    assert (desk.rpcs, desk.backlog_bytes, desk.subscriptions) == (None, None, Limits().subscriptions)
    assert "rpcs" not in desk.named()
    with pytest.raises(ConfigError, match='found the text "none"; "unlimited" is no limit'):
        access_of(tmp_path, DESK + "[roles.r.limits]\nrpcs = 'none'\n")


@pytest.mark.parametrize(
    ("heading", "line"),
    [
        ("[[roles.r.grants]]", 5),
        ("[[ roles . r . grants ]]  # comment ]]", 5),
        ('[["roles"."r"."grants"]]', 5),
        ("# [[roles.r.grants]]\n\n  [[roles.r.grants]]", 7),
    ],
)
def test_the_line_of_a_grant_is_found(tmp_path: Path, heading: str, line: int) -> None:
    file = access_of(tmp_path, DESK + GRANT.replace("[[roles.r.grants]]", heading))
    assert file.identities["desk"].roles[0].grants[0].place == f"auth.toml:{line} roles.r.grants[0]"


def test_a_grant_without_a_heading_has_no_line(tmp_path: Path) -> None:
    file = access_of(tmp_path, "roles.r.grants = [{topics = 'x', allow = ['read']}]\n" + DESK)
    assert file.identities["desk"].roles[0].grants[0].place == "auth.toml roles.r.grants[0]"


# --- hostile files ---------------------------------------------------------------------------------------------------


def toml(value: object) -> str:
    """A value as TOML, in one line."""
    match value:
        case bool():
            return str(value).lower()
        case dict():
            return "{" + ", ".join(f"{toml(str(key))} = {toml(one)}" for key, one in value.items()) + "}"
        case list():
            return "[" + ", ".join(map(toml, value)) + "]"
        case str():
            return json.dumps(value).replace("\x7f", "\\u007f")
        case datetime.date() | datetime.time():  # a datetime is a date
            return value.isoformat()
        case _:
            return str(value)


# Characters that JSON writes in a form that TOML reads: no surrogates, and no pairs of them.
texts = st.text(st.characters(max_codepoint=0xFFFF, exclude_categories=["Cs"]), max_size=5)
anything: st.SearchStrategy[object] = st.recursive(
    st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.sampled_from([float("inf"), -1.5])
    | texts
    | st.sampled_from(["desk", "r", ".*", "/a", "/a = 1", "read", "64MiB", SPARE, "URI:x", "anonymous"])
    | st.dates()
    | st.datetimes()
    | st.times(),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(texts, below, max_size=3),
    max_leaves=6,
)


def sometimes(usual: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    return st.one_of(*[usual] * 6, anything)


def table(**keys: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    """A table with some of these keys, and rarely one that is unknown."""
    known = st.fixed_dictionaries({}, optional={name: sometimes(kind) for name, kind in keys.items()})
    extra = st.one_of(*[st.just({})] * 6, st.dictionaries(texts, anything, max_size=1))
    return st.builds(lambda one, other: {**other, **one}, known, extra)


names: st.SearchStrategy[object] = st.sampled_from(["desk", "ldn", "anonymous", "x"])
patterns: st.SearchStrategy[object] = st.sampled_from([".*", "orders", "(", ""])
actions: st.SearchStrategy[object] = st.lists(st.sampled_from([action.value for action in Action]), max_size=3)
proofs: dict[str, st.SearchStrategy[object]] = {
    "certificate": st.sampled_from(["URI:spiffe://x", "CN:a", "x"]),
    "token_sha256": st.sampled_from([SPARE, sha256("desk"), "x"]),
    "jwt": st.sampled_from(["a", "b"]),
    "expires": st.dates() | st.datetimes(),
}
numbers: st.SearchStrategy[object] = st.integers(-1, 10)
grants = table(
    topics=patterns,
    allow=actions,
    deny=actions,
    rows=st.sampled_from(["", "/a = 1", "@version = 1", "/a LIKE '('", "/a = "]),
    hide=st.lists(st.sampled_from(["/a", "/a/b", "a", "/[", "/a[0]"]), max_size=2),
)
roles = table(
    grants=st.lists(grants, max_size=2),
    limits=table(rpcs=numbers, loads=numbers, bytes_in_flight=numbers | st.just("1MiB"), requests_per_second=numbers),
)
files = table(
    identities=st.lists(table(name=names, roles=st.lists(st.sampled_from(["r", "s"])), **proofs), max_size=3),
    peers=st.lists(table(name=names, topics=patterns, **proofs), max_size=2),
    roles=st.dictionaries(st.sampled_from(["r", "s"]) | texts, sometimes(roles), max_size=2),
)


def read_or_refused(folder: Path, text: str) -> bool:
    """Whether a file is read, or refused with its name. Everything but ConfigError is raised."""
    try:
        access_of(folder, text)
    except ConfigError as error:
        return str(error).startswith(str(folder / "auth.toml"))
    return True


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


@pytest.mark.slow
@given(files)
def test_any_value_in_any_place_is_read_or_refused(folder: Path, given_file: object) -> None:
    assert isinstance(given_file, dict)
    assert read_or_refused(
        folder, "".join(f"{toml(str(name))} = {toml(value)}\n" for name, value in given_file.items())
    )


@given(st.text(st.characters(exclude_categories=["Cs"])), st.integers(0, 300), st.integers(0, 20))
@example('"""', 0, 0)
@example("[[", 3, 0)
@example("\x00", 0, 0)
def test_a_damaged_file_is_read_or_refused(folder: Path, noise: str, at: int, cut: int) -> None:
    text = DESK + GRANT + "rows = '/a = 1'\nhide = ['/b']\n[roles.r.limits]\nrpcs = 1\n"
    assert read_or_refused(folder, text[:at] + noise + text[at + cut :])


@pytest.mark.slow
def test_a_large_file_is_read_in_time_that_grows_with_it(tmp_path: Path) -> None:
    entry: Callable[[int], str] = lambda n: f'[[identities]]\nname = "i{n}"\njwt = "{n}"\nroles = ["r"]\n'  # noqa: E731  # a line
    file = access_of(tmp_path, GRANT + "".join(map(entry, range(3_000))))
    assert len(file.identities) == 3_000
