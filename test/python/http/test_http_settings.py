"""The configuration file with its passwords, and the options of `pgqueue serve`."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import commands
import httpx
import pytest
from clients import PATIENCE
from served import ADMIN, HASH, Site, in_process, new_name, serving

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette

    from pgqueue.http import Settings, SettingsError, server
    from pgqueue.http.errors import ApiError
    from pgqueue.http.security import users as passwords
    from pgqueue.http.security.users import Authenticator, hash_password

GOOD: dict[str, Any] = {
    "control_dsn": "dbname=control",
    "services": {"one": {"dsn": "host=h password=secret", "databases": ["a", "b"]}, "two": {"dsn": "dbname=c"}},
    "users": {"admin": {"password_hash": HASH}},
}


def test_a_configuration_file_defines_services_and_users() -> None:
    settings = Settings.of(GOOD)
    assert settings.services["one"].databases == ("a", "b")
    assert settings.services["two"].databases == ("c",)
    assert (settings.tasks.visibility_timeout_seconds, settings.limits.connections) == (30, 10)
    shown = repr(settings)
    assert "secret" not in shown
    assert HASH not in shown


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"control_dsn": 5}, "control_dsn: Expected `str | null`, got `int`"),
        ({"control_dsn": "host=h passwort=secret"}, "control_dsn: not a libpq DSN"),
        ({"control_dsn_env": "NOT_SET"}, "given twice"),
        ({"services": {}}, "services: none given"),
        ({"services": {"a/b": {"dsn": "dbname=x"}}}, "no slash"),
        ({"services": {"a": {"dsn": "host=x"}}}, "services.a.databases"),
        ({"services": {"a": {"databases": ["x"]}}}, "services.a.dsn: missing"),
        ({"services": {"a": {"dsn_env": "NOT_SET", "databases": ["x"]}}}, "environment variable NOT_SET is not set"),
        (
            {"services": {"a": {"dsn": "", "databases": ["x"], "database": 1}}},
            "services.a: Object contains unknown field `database`",
        ),
        ({"users": {}}, "users: none given"),
        ({"users": {"a:b": {"password_hash": HASH}}}, "no colon"),
        ({"users": {"a": {"password_hash": "secret"}}}, "--hash-password"),
        ({"users": {"a": {"password_hash": HASH.replace("16384", "16385")}}}, "--hash-password"),
        ({"users": {"a": {"password_hash": HASH[:-2]}}}, "--hash-password"),
        ({"users": {"a": {"password": "secret"}}}, "users.a: Object contains unknown field `password`"),
        ({"tasks": {"concurrency": 0}}, "tasks.concurrency: Expected `int` >= 1"),
        ({"tasks": {"concurrency": 101}}, "tasks.concurrency: Expected `int` <= 100"),
        ({"tasks": {"max_attempts": True}}, "tasks.max_attempts: Expected `int`, got `bool`"),
        ({"tasks": {"visibility_timeout_seconds": 43201}}, "<= 43200"),
        ({"limits": {"request_seconds": 0.5}}, "limits.request_seconds: Expected `float` >= 1"),
        ({"limits": {"client_connections": 9}}, "limits.client_connections: Expected `int` >= 10"),
        ({"limits": {"user_requests_per_second": 5}}, "limits.user_requests_per_second: Expected `int` <= 0"),
        ({"limits": {"requests": 1}}, "limits: Object contains unknown field `requests`"),
        ({"user": {}}, "Object contains unknown field `user`"),
        ({"services": {"a": "dbname=x"}}, "services.a: Expected `object`, got `str`"),
        ({"session_key": "short"}, "session_key: too short; must have at least 32"),
        ({"limits": {"session_seconds": 1}}, "limits.session_seconds: Expected `int` >= 60"),
        *(
            ({"users": {"u": {"password_hash": HASH, "allow": allow}}}, f"users.u.allow: {said}")
            for allow, said in (
                ("reader:*", "'reader:*' must be a list of strings"),
                (["write:*"], "'write:*' must be access:queue"),
                (["reader:"], "'reader:' must be access:queue"),
                (["reader:a*b"], "'reader:a*b' must be access:queue"),
                (["reader:/q"], "'reader:/q' must be access:queue"),
                (["reader:a*b/q"], "'reader:a*b/q' must be access:queue"),
                (["reader:none/*"], "'reader:none/*/*': there is no such service or database"),
            )
        ),
    ],
)
def test_an_invalid_setting_is_named(change: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(said)) as error:
        Settings.of(GOOD | change)
    assert "secret" not in str(error.value)


def test_settings_accept_their_limits() -> None:
    edges = {"tasks": {"concurrency": 100, "max_attempts": 100, "visibility_timeout_seconds": 43200}}
    assert Settings.of(GOOD | edges).tasks.concurrency == 100
    assert Settings.of(GOOD | {"session_key": "k" * 32}).session_key == "k" * 32
    assert Settings.of(GOOD).session_key != Settings.of(GOOD).session_key
    assert Settings.of(GOOD | {"limits": {"request_seconds": 1, "connections": 1000}}).limits.request_seconds == 1


def test_secrets_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_DSN", "dbname=from-there")
    monkeypatch.setenv("TEST_WORD", "word")
    given = {
        "control_dsn_env": "TEST_DSN",
        "services": {"a": {"dsn_env": "TEST_DSN"}},
        "users": {"u": {"password_env": "TEST_WORD"}},
    }
    settings = Settings.of(given)
    assert settings.control_dsn == "dbname=from-there"
    assert settings.services["a"].databases == ("from-there",)
    assert settings.users["u"].password_hash.startswith("scrypt:")


def basic(name: str, password: str) -> str:
    return httpx.BasicAuth(name, password)._auth_header


async def test_only_the_name_and_the_password_as_they_stand_authenticate() -> None:
    authenticator = Authenticator({"admin": HASH})
    given = [("ADMIN", "password"), ("nobody", "password"), *(("admin", f"password{end}") for end in (" ", "\0", "s"))]
    answers = [await authenticator.user(basic(*each)) for each in (*given, ("admin", "password"))]
    assert answers == [None] * len(given) + ["admin"]


HASHED_BEFORE = {name: HASH.replace(":16384:", ":1024:") for name in ("admin", "other")}  # not by this process


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The passwords that are hashed, in their order. `right` is the only right one."""
    seen: list[str] = []

    def matches(password: str, _hash: str) -> bool:
        seen.append(password)
        return password == "right"

    monkeypatch.setattr(passwords, "_matches", matches)
    return seen


def flood(authenticator: Authenticator, names: Sequence[str], number: int) -> list[asyncio.Task[str | None]]:
    return [
        asyncio.create_task(authenticator.user(basic(name, f"wrong{number}"), "192.0.2.1"))
        for number in range(number)
        for name in names
    ]


async def test_a_flood_of_passwords_delays_another_client_by_a_limited_number(hashed: list[str]) -> None:
    authenticator = Authenticator(HASHED_BEFORE)
    guessing = flood(authenticator, ["admin", "nobody", "somebody"], passwords._MOST_WAITING)
    await asyncio.sleep(0)  # the tasks start
    assert await authenticator.user(basic("admin", "right"), "192.0.2.2") == "admin"
    assert hashed.index("right") <= passwords._MOST_WAITING
    assert "admin" not in await asyncio.gather(*guessing, return_exceptions=True)


async def test_one_client_has_a_limited_number_of_passwords_verified(hashed: list[str]) -> None:
    number = passwords._MOST_WAITING + 10
    authenticator = Authenticator(HASHED_BEFORE)
    results = await asyncio.gather(*flood(authenticator, ["admin"], number), return_exceptions=True)
    refused = [each for each in results if isinstance(each, ApiError)]
    assert len(hashed) + len(refused) == number
    assert refused
    assert {(each.status, each.code, each.field, each.headers["Retry-After"]) for each in refused} == {
        (429, "too_many_logins", "Authorization", "1")
    }


async def test_a_password_is_hashed_once_for_parallel_requests_and_then_remembered(hashed: list[str]) -> None:
    authenticator = Authenticator(HASHED_BEFORE)
    for _ in range(2):
        answers = await asyncio.gather(*(authenticator.user(basic("admin", "right")) for _ in range(100)))
        assert set(answers) == {"admin"}
        assert hashed == ["right"]
    assert await authenticator.user(basic("other", "right")) == "other"
    assert hashed == ["right", "right"]


async def test_a_password_that_the_server_has_hashed_needs_no_turn(hashed: list[str]) -> None:
    """As the password of an environment variable."""
    assert await Authenticator({"admin": hash_password("password")}).user(basic("admin", "password")) == "admin"
    assert hashed == []


@pytest.mark.usefixtures("hashed")
async def test_failed_logins_are_logged_without_the_password(caplog: pytest.LogCaptureFixture) -> None:
    authenticator = Authenticator(HASHED_BEFORE)
    assert await authenticator.user(basic("a\nb" + 200 * "x", "secret"), "192.0.2.1") is None
    assert await authenticator.user(basic("admin", "secret"), "2001:db8::1") is None
    assert await authenticator.user("") is None
    assert [each.getMessage() for each in caplog.records] == [
        f"failed log-in from 192.0.2.1 as 'a\\nb{97 * 'x'}…'",
        "failed log-in from 2001:db8::1 as 'admin'",
    ]
    assert {each.levelname for each in caplog.records} == {"WARNING"}


async def test_the_password_of_an_unknown_user_is_hashed_too(hashed: list[str]) -> None:
    """So the time of an answer does not tell which users there are."""
    authenticator = Authenticator(HASHED_BEFORE)
    for name in ("admin", "nobody"):
        assert await authenticator.user(basic(name, f"wrong for {name}")) is None
    assert hashed == ["wrong for admin", "wrong for nobody"]


@pytest.mark.parametrize(("host", "warned"), [("127.0.0.1", False), ("0.0.0.0", True)])
async def test_the_server_warns_where_passwords_pass_a_network_without_tls(
    caplog: pytest.LogCaptureFixture, host: str, warned: bool
) -> None:
    app: Any = Starlette()
    config = uvicorn.Config(app, host, 0, lifespan="off", log_config=None)
    config.load()
    listening = server._Server(app, config, lambda _host, _port: None)
    listening.lifespan = config.lifespan_class(config)
    await listening.startup()
    await listening.shutdown()
    assert ("reached without TLS" in caplog.text) == warned


def serve(*words: str, stdin: bytes = b"", **variables: str) -> commands.Done:
    return commands.in_process("host=/nowhere", "serve", *words, stdin=stdin, **variables)


def test_password_hashes_are_salted_and_usable_in_the_file() -> None:
    done = serve("--hash-password", stdin=b"password\n")
    assert done.status == 0
    assert done.out != serve("--hash-password", stdin=b"password\n").out
    settings = Settings.of(GOOD | {"users": {"admin": {"password_hash": done.out.strip()}}})
    assert settings.users["admin"].allow is None
    hashes = {"admin": settings.users["admin"].password_hash}
    assert asyncio.run(Authenticator(hashes).user(basic("admin", "password"))) == "admin"


def test_a_password_that_is_not_utf8_or_empty_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    not_unicode = os.fsdecode(b"\xff")
    assert serve("--hash-password", stdin=b"\xff\n") == (2, "", "pgqueue: the password is not valid UTF-8\n")
    assert serve("--hash-password", stdin=b"\n") == (2, "", "pgqueue: the password is empty\n")
    assert serve(PGQUEUE_PASSWORD=not_unicode) == (2, "", "pgqueue: PGQUEUE_PASSWORD is not valid UTF-8\n")
    monkeypatch.setenv("TEST_PASSWORD", not_unicode)
    with pytest.raises(SettingsError, match=r"users\.admin\.password_env: .* not valid UTF-8"):
        Settings.of(GOOD | {"users": {"admin": {"password_env": "TEST_PASSWORD"}}})


def test_an_unusable_configuration_file_ends_serve_with_an_error(tmp_path: Path) -> None:
    bad = tmp_path / "bad.toml"
    bad.write_text("control_dsn = ")
    done = serve("--config", str(bad))
    assert done.status == 2
    assert "bad.toml is not TOML" in done.err
    assert serve("--config", str(tmp_path / "none.toml")).status == 1


def test_without_a_file_serve_uses_the_given_database(empty_database: Callable[[], str], tmp_path: Path) -> None:
    words = ("serve", "--dsn", empty_database(), "--port", "0")
    with commands.running(*words, directory=tmp_path) as command:
        url = command.wait_for(lambda: re.search(r"serves (http://[^/\s]+)/", command.err))[1]
        password = re.search(r"user admin, password (\S+)", command.err)
        assert password is not None
        with httpx.Client(base_url=url, auth=("admin", password[1]), trust_env=False, timeout=PATIENCE) as client:
            name = new_name()
            command.wait_for(lambda: client.get("/readyz").status_code == 200)
            assert client.post("/managed-services/local/queues", json={"name": name}).status_code == 201
            path = f"/managed-services/local/queues/{name}"
            command.wait_for(lambda: client.get(path).json()["status"] == "Active")
        command.signal(signal.SIGINT)
        assert command.end().status == 0


def test_tasks_are_pending_while_no_agent_runs(empty_database: Callable[[], str], tmp_path: Path) -> None:
    config = Site(empty_database).configuration(tmp_path)
    with in_process(config, "controller") as web:
        name, other = new_name(), new_name()
        web.create(name, wait=False)
        with serving(config, tmp_path, role="agent") as agent:
            agent.until(lambda: web.status(name) == "Active")
            agent.command.signal(signal.SIGTERM)
            assert agent.command.end().status == 0
        web.create(other, wait=False)
        task = web.post(f"{web.queues}/{name}/stats").json()["task_id"]
        answer = web.get(f"{web.queues}/{name}/stats", params={"task_id": task})
        assert (answer.status_code, answer.json()) == (202, {"task_id": task, "status": "pending"})
        assert web.status(other) == "Pending"


@pytest.mark.long(part="http")
def test_a_port_that_is_in_use_is_the_only_thing_reported(empty_database: Callable[[], str], tmp_path: Path) -> None:
    config = Site(empty_database).configuration(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = str(used.getsockname()[1])
        done = commands.run("serve", "--config", str(config), "--port", port, TEST_PASSWORD=ADMIN[1])
    said = f"pgqueue: cannot listen on 127.0.0.1:{port}: Address already in use\n"
    assert (done.status, done.err) == (1, said + "hint: Choose another address with --host and --port.\n")
    unknown = commands.run("serve", "--config", str(config), "--host", "nowhere.invalid", TEST_PASSWORD=ADMIN[1])
    assert unknown.status == 1
    assert unknown.err.startswith("pgqueue: cannot listen on nowhere.invalid:8080: ")
    assert unknown.err.count("\n") == 2
