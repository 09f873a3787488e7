"""Users of the HTTP service: what they may do and see, their tokens, their sessions, and what is recorded of them."""

import asyncio
import hashlib
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psycopg
import pytest
from clients import PATIENCE
from served import ACCESSES, ADMIN, PROXY, SERVICE, Server, configuration, in_process, needs, new_name, rights

TASK = "2f1c9d6e-5a37-4c1b-9d0e-8b6f0a7c3e51"  # there is none
ROOT = Path(__file__).parents[3]
LIMITED = tuple(f"the-{access}" for access in ACCESSES)  # users with an access to queues that begin with order-


@pytest.fixture(scope="module", autouse=True)
def orders(web: Server) -> None:
    """Two managed queues, of which users with limited rights see one."""
    web.create("order-1")
    web.create("invoice-1")


def test_direct_routes_need_the_accesses_of_their_sql_functions() -> None:
    rows = re.findall(r"\('\{([\w,]+)\}'[^']*'\{([^}]*)\}'", (ROOT / "sql/grants.sql").read_text())
    matrix = {verb: accesses for accesses, verbs in rows for verb in re.findall(r"\w+", verbs)}
    found = needs()
    verbs = {route: route.rpartition("/")[2] for route in found if route.startswith(("GET /v1", "POST /v1"))}
    assert len(set(verbs.values()) & set(matrix)) > 20
    for route, verb in verbs.items():
        if verb in matrix:
            assert set(found[route].accesses) == set(matrix[verb].split(",")) & set(ACCESSES), route


def call(web: Server, user: str, route: str, database: str, queue: str) -> httpx.Response:
    """Call a route for a queue. What is allowed fails for another reason, so that it changes nothing."""
    method, path = route.split()
    path = path.format(service_id=SERVICE, queue_name=queue, action="nothing", file="style.css")
    more: dict[str, Any] = {}
    if path.startswith("/managed-services") and method == "POST":
        is_batch = path.endswith("/messages")
        more["json"] = {"messages": [{"payload": {}}]} if is_batch else {"name": queue, "database_name": database}
    elif path.startswith("/managed-services"):
        more["params"] = {"task_id": TASK}
    elif path.startswith("/v1/") and method == "POST":
        more["json"] = {"queue_names": [queue]} if path.endswith("/claim_any") else {}
    elif method == "POST":
        more["data"] = {"database": f"{SERVICE}/{database}", "name": queue, "max_attempts": "x", "typed": "x"}
    if path.startswith("/v1/"):
        more["params"] = {"database_name": database}
    elif path.startswith("/queue"):
        more["params"] = {"service": SERVICE, "database": database, "name": queue}
    return web.call(method, path, auth=(user, ADMIN[1]), **more)


def code(answer: httpx.Response) -> str:
    if answer.headers["content-type"] != "application/json":
        return "forbidden" if "the user lacks the access" in answer.text else "page"
    body = answer.json()
    return str(body["error"]["code"]) if "error" in body else ""


def test_a_user_may_call_exactly_what_an_access_allows(web: Server) -> None:
    database = web.site.databases[0]
    users = {name: allow for name, allow in rights(web.site).items() if name in (*LIMITED, "elsewhere", "none")}
    for route, need in needs().items():
        creates = route in ("POST /managed-services/{service_id}/queues", "POST /create")
        own = "order-1" if creates else "order-none"  # exists, so it is not created again
        for user, allow in users.items():
            may = any(each.partition(":")[0] in need.accesses for each in allow)
            if need.of != "queue":
                answer = call(web, user, route, database, "order-none")
                is_free = need.of == "nothing" or (need.of == "some" and may)
                if need.of == "database" or route == "GET /health":  # need an access to all queues of a database
                    is_free = user == "elsewhere"
                assert (answer.status_code != 403) == is_free, (route, user, answer.text)
                assert is_free or code(answer) == "forbidden"
                continue
            if user in LIMITED:
                answer = call(web, user, route, database, own)
                if may:
                    assert code(answer) != "forbidden", (route, user, answer.text)
                    assert answer.status_code in (404, 409, 422), (route, user, answer.text)
                else:
                    assert (answer.status_code, code(answer)) == (403, "forbidden"), (route, user, answer.text)
            if user in LIMITED and not may:  # is refused before the queue is looked for, as a user without rights
                continue
            hidden = [call(web, user, route, database, queue) for queue in ("invoice-1", "invoice-2")]
            expected = 404
            if creates and user in LIMITED:  # the user sees the database, but may not create a queue of this name
                expected = 403
            elif creates and user == "elsewhere" and route.startswith("POST /managed"):  # the database is in the body
                expected = 422
            for answer in hidden:
                assert answer.status_code == expected, (route, user, answer.text)
                assert user not in LIMITED or not creates or code(answer) == "forbidden"
            there, absent = hidden  # the answers do not tell which of the two exists
            assert there.text.replace("invoice-1", "") == absent.text.replace("invoice-2", ""), (route, user)


def test_redrive_needs_admin_access_to_both_queues(web: Server) -> None:
    path, database = "/v1/queues/order-none/redrive", {"database_name": web.site.databases[0]}
    for queue in ("order-1", "invoice-1"):
        answer = web.post(path, {"to_queue": queue}, params=database, auth=("the-admin", ADMIN[1]))
        assert code(answer) == "queue_not_found"
    assert ("order-none" in answer.text, "invoice-1" in answer.text) == (False, True)


def test_lists_and_figures_show_only_what_the_user_sees(web: Server) -> None:
    def seen(user: str, path: str) -> str:
        return web.get(path, auth=(user, ADMIN[1])).text

    for name in ("invoice-1", "order-1"):
        web.look(web.site.databases[0], name)
    web.until(lambda: "invoice-1" in seen("admin", "/") and "order-1" in seen("admin", "/"))
    for path in ("/", "/page/queues", "/v1/queues", web.queues):
        assert ("order-1" in seen("the-reader", path), "invoice-1" in seen("the-reader", path)) == (True, False), path
    listed = json.loads(seen("elsewhere", "/v1/queues"))["queues"]
    with psycopg.connect(web.site.other) as connection:  # the only database that this user sees
        there = connection.execute("select array_agg(name::text) from pgqueue.queues").fetchone()
    assert there is not None
    assert {each["name"] for each in listed} <= set(there[0])
    assert web.site.databases[0] not in seen("elsewhere", "/v1/queues?database_name=none")
    answer = web.get("/v1/queues", auth=("none", ADMIN[1]))
    assert (answer.status_code, code(answer)) == (403, "forbidden")
    task = web.post(path := f"{web.queues}/order-1/stats").json()  # of a managed queue in the other database
    assert web.get(path, params=task, auth=("the-reader", ADMIN[1])).is_success
    assert web.get(path, params=task, auth=("elsewhere", ADMIN[1])).status_code == 404


def test_a_pattern_is_a_name_or_the_begin_of_names() -> None:
    from pgqueue.http.security.rights import Right

    for text, place, covered in (
        ("reader:*", ("shop", "main", "q"), True),
        ("reader:order-*", ("shop", "main", "order-1"), True),
        ("reader:order-*", ("shop", "main", "orders"), False),
        ("reader:order", ("shop", "main", "order-1"), False),
        ("reader:shop/*", ("shop-2", "main", "q"), False),
        ("reader:shop*/q", ("shop-2", "main", "q"), True),
        ("reader:shop/main/*", ("shop", "other", "q"), False),
        ("reader:shop/a/b/q", ("shop", "a/b", "q"), True),  # a database may have a slash in its name
        ("reader:order-*", ("shop", "main", "*"), False),  # that is all queues
    ):
        right = Right.parse(text)
        assert right.covers(*place) is covered, text
        assert Right.parse(str(right)) == right


def test_the_same_idempotency_key_of_another_user_is_another_key(web: Server) -> None:
    name = "order-1"
    sent = [
        web.post(
            f"/v1/queues/{name}/enqueue",
            {"messages": [{"payload": 1}]},
            auth=(user, ADMIN[1]),
            headers={"Idempotency-Key": "once"},
        )
        for user in ("admin", "the-producer", "admin")
    ]
    assert [each.status_code for each in sent] == [201] * 3
    assert sent[0].json() == sent[2].json() != sent[1].json()


def by_token(web: Server, token: str, path: str, method: str = "GET", **more: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {token}"}
    return web.http.send(web.http.build_request(method, path, headers=headers, **more), auth=None)


def make_token(web: Server, name: str, *words: str) -> str:
    done = web.run("token", "create", name, *words)
    assert done.status == 0, done.err
    return done.out.strip()


def test_a_token_may_do_what_its_user_and_its_own_rights_allow(web: Server) -> None:
    name = new_name()
    token = make_token(web, name, "--user", "the-producer", "--allow", f"producer:{SERVICE}/order-2")
    web.until(lambda: by_token(web, token, "/v1/queues").status_code == 200)
    assert by_token(web, token, "/v1/queues/order-1/stats").status_code == 404  # beyond the token
    wide = make_token(web, new_name(), "--user", "the-producer", "--allow", "admin:*", "--allow", "producer:*")
    web.until(lambda: by_token(web, wide, "/v1/queues/order-1/stats").status_code == 200)
    assert by_token(web, wide, "/v1/queues/invoice-1/stats").status_code == 404  # beyond the user
    assert by_token(web, wide, "/v1/queues/order-1/redrive", "POST", json={}).status_code == 403
    for broken in (token[:-1], token + "x", "pgq_", "x" * 5000):
        assert by_token(web, broken, "/v1/queues").status_code == 401
    with psycopg.connect(web.site.control) as connection:
        stored = connection.execute("select t::text from pgqueue_http.tokens t").fetchall()
    assert token not in str(stored)
    listed = web.run("token", "list")
    assert name in listed.out
    assert token not in web.command.err + listed.out
    again = web.run("token", "create", name)
    assert (again.status, f"there is a token '{name}'" in again.err) == (1, True)


def test_a_token_ends_when_it_expires_or_is_revoked(web: Server) -> None:
    revoked, expired, orphaned = new_name(), new_name(), new_name()
    tokens = [make_token(web, name) for name in (revoked, expired, orphaned)]
    for token in tokens:
        web.until(lambda token=token: by_token(web, token, "/v1/queues").status_code == 200)  # type: ignore[misc]
    done = web.run("token", "revoke", revoked)
    assert done.status == 0, done.err
    with psycopg.connect(web.site.control) as connection:
        lifetime = "select distinct expires_at - created_at from pgqueue_http.tokens where name = any(%s)"
        assert connection.execute(lifetime, [[expired, orphaned]]).fetchall() == [(timedelta(days=90),)]
        connection.execute("update pgqueue_http.tokens set expires_at = now() where name = %s", [expired])
        connection.execute("update pgqueue_http.tokens set user_name = 'gone' where name = %s", [orphaned])
    for token in tokens:
        web.until(lambda token=token: by_token(web, token, "/v1/queues").status_code == 401)  # type: ignore[misc]
    again = web.run("token", "revoke", revoked)
    assert again.status == 3
    make_token(web, revoked, "--user", "the-producer")
    assert web.run("token", "create", revoked).status == 1
    with psycopg.connect(web.site.control) as connection:
        role = connection.info.user
        rows = connection.execute(
            "select user_name, act, place, status from pgqueue_http.audit"
            " where token_name = %s and address = 'command line' order by at",
            [revoked],
        ).fetchall()
    assert rows == [
        (role, "token create", "user admin", 201),
        (role, "token revoke", "user admin", 200),
        (role, "token revoke", "", 404),
        (role, "token create", "user the-producer", 201),
        (role, "token create", "user admin", 409),
    ]


async def test_known_tokens_hold_while_the_control_database_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    from pgqueue.http.security import tokens as tokens_module

    for name in ("_REFRESH_SECONDS", "_RETRY_SECONDS"):
        monkeypatch.setattr(tokens_module, name, 0.0)
    rows = [("t", "ann", hashlib.sha256(b"pgq_x").digest(), None, 60.0)]
    down = True

    class Connection:
        async def execute(self, _: str) -> Any:
            return self

        async def fetchall(self) -> list[Any]:
            return rows

    @asynccontextmanager
    async def connect() -> AsyncIterator[Any]:
        if down:
            raise OSError
        yield Connection()

    tokens = tokens_module.Tokens(connect)
    with pytest.raises(OSError):  # noqa: PT011 - it has no message
        await tokens.find("pgq_x")
    down = False
    assert await tokens.find("pgq_x") is not None
    down = True
    assert await tokens.find("pgq_x") is not None
    assert await tokens.find("pgq_y") is None
    down, rows = False, [(*rows[0][:4], 0.0)]
    assert await tokens.find("pgq_x") is None, "it has expired since it was read"
    rows = []
    assert await tokens.find("pgq_x") is None


def test_a_wrong_token_command_says_what_is_wrong(web: Server) -> None:
    for words, said in (
        (["--user", "nobody"], "there is no user 'nobody'"),
        (["--allow", "reader:none/*"], "there is no such service or database"),
        (["--expires", "4000d"], "--expires must be from"),
    ):
        done = web.run("token", "create", "x", *words)
        assert (done.status, said in done.err) == (2, True), done.err


@pytest.fixture
def browser(web: Server) -> Iterator[httpx.Client]:
    """A client with cookies, and without a password of its own."""
    with httpx.Client(base_url=web.url, timeout=PATIENCE, trust_env=False, headers={"Accept": "text/html"}) as client:
        yield client


def log_in(browser: httpx.Client, user: str = ADMIN[0], **more: Any) -> httpx.Response:
    return browser.post("/login", data={"user": user, "password": ADMIN[1]} | more)


def test_a_log_in_begins_a_session_and_a_log_out_ends_it(browser: httpx.Client, web: Server) -> None:
    wanted = browser.get("/queue", params={"service": SERVICE, "name": "order-1"})
    assert (wanted.status_code, wanted.headers["cache-control"]) == (303, "no-store")
    form = browser.get(wanted.headers["location"])
    to = re.search(r'name="to" value="([^"]+)"', form.text)
    assert to is not None
    browser.cookies.set("pgqueue", "chosen-by-somebody-else")
    answer = log_in(browser, to=to[1].replace("&amp;", "&"))
    assert answer.status_code == 303
    assert answer.headers["location"] == f"./queue?service={SERVICE}&name=order-1"
    given = answer.headers["set-cookie"]
    assert "chosen-by-somebody-else" not in given
    assert {"HttpOnly", "SameSite=Lax", "Path=/"} <= set(given.split("; "))
    assert "Secure" not in given
    page = browser.get("/")
    assert "Log out" in page.text
    for path in ("/v1/queues", web.queues):  # a session is for the page alone
        assert browser.get(path).status_code == 401
    cookie = given.partition(";")[0]
    assert browser.post("/logout").headers["location"] == "login"
    browser.cookies.clear()
    assert browser.get("/", headers={"Cookie": cookie}).status_code == 303  # the old cookie is of no use


def test_no_other_site_can_use_a_session(browser: httpx.Client, web: Server) -> None:
    log_in(browser)
    posts = [each.split()[1].replace("{action}", "pause") for each in needs() if each.startswith("POST ")]
    pages = [path for path in posts if not path.startswith(("/v1", "/managed"))]
    assert "/logout" in pages
    for path in pages:
        for header in (
            {"Sec-Fetch-Site": "cross-site"},
            {"Sec-Fetch-Site": "same-site"},
            {"Origin": "http://x.example"},
        ):
            answer = browser.post(path, params=web.place("order-1"), data={"typed": "order-1"}, headers=header)
            assert (answer.status_code, "another site" in answer.text) == (403, True), (path, header)


def test_a_cookie_is_secure_under_tls_and_no_other_site_can_log_in(browser: httpx.Client) -> None:
    proxied = {"X-Forwarded-Proto": "https"}
    given = browser.post("/login", data={"user": ADMIN[0], "password": ADMIN[1]}, headers=proxied).headers["set-cookie"]
    assert given.startswith("__Host-pgqueue=")
    assert "Secure" in given.split("; ")
    value = given.partition(";")[0].partition("=")[2]
    assert browser.get("/", headers=proxied | {"Cookie": f"__Host-pgqueue={value}"}).status_code == 200
    assert browser.get("/", headers=proxied | {"Cookie": f"pgqueue={value}"}).status_code == 303
    for header in ({"Sec-Fetch-Site": "cross-site"}, {"Origin": "https://elsewhere.example"}):
        answer = browser.post("/login", data={"user": ADMIN[0], "password": ADMIN[1]}, headers=header)
        assert (answer.status_code, "set-cookie" in answer.headers) == (403, False)


def test_a_wrong_password_begins_no_session_and_is_logged(browser: httpx.Client, web: Server) -> None:
    for user, password in ((ADMIN[0], "wrong"), ("nobody", ADMIN[1]), ("", "")):
        answer = browser.post("/login", data={"user": user, "password": password})
        assert (answer.status_code, "set-cookie" in answer.headers) == (401, False)
        assert "name or password is wrong" in answer.text
    web.until(lambda: "failed log-in from" in web.command.err)
    assert browser.post("/login", content=b"x" * 20_000).status_code == 413


def test_a_log_in_leads_to_no_other_site() -> None:
    from pgqueue.http.security.admission import safe_target

    for to in ("queue?service=a&name=b", "health", "queue/message?id=1", "", "?done=x"):
        assert safe_target(to) == to
    for to in (
        "//evil.example", "/\\evil.example", "https://evil.example", "https:evil.example", "\\evil", "..//evil",
        "queue/../..//evil", "javascript:x", "queue\r\nSet-Cookie: a=b", "queue?a=\n", "queue?" + "x" * 2000,
    ):  # fmt: skip
        assert safe_target(to) == "", to


def test_a_session_ends_with_its_time_and_with_its_key() -> None:
    from pgqueue.http.security.admission import Sessions

    scope: dict[str, Any] = {"type": "http", "scheme": "http", "headers": []}
    sessions = Sessions("key", 60)

    def cookie(given: str) -> dict[str, Any]:
        return scope | {"headers": [(b"cookie", given.partition(";")[0].encode())]}

    now = cookie(sessions.begin(scope, "ann"))
    found = sessions.find(now)
    assert found is not None
    assert found.user == "ann"
    assert Sessions("other", 60).find(now) is None
    assert Sessions("key", -1).find(now) is None  # older than it may be
    assert sessions.find(cookie("pgqueue=" + "x" * 100)) is None
    again = sessions.find(cookie(sessions.begin(now, "ann")))
    assert again is not None
    assert again.id != found.id


def test_the_address_of_a_client_is_that_which_a_trusted_proxy_reports(web: Server) -> None:
    for client, address in (("127.0.0.1", "127.0.0.1"), (PROXY, "203.0.113.7")):
        name = new_name()
        transport = httpx.HTTPTransport(local_address=client)
        with httpx.Client(base_url=web.url, auth=ADMIN, transport=transport, timeout=PATIENCE) as sender:
            sender.post(f"/v1/queues/{name}/redrive", headers={"X-Forwarded-For": "198.51.100.1, 203.0.113.7"}, json={})

        def addresses(name: str = name) -> list[tuple[Any, ...]]:
            with psycopg.connect(web.site.control) as connection:
                found = "select address from pgqueue_http.audit where place like %s"
                return connection.execute(found, [f"%/{name}"]).fetchall()

        assert web.until(addresses) == [(address,)]


async def test_acts_that_cannot_be_stored_yet_do_not_fill_the_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While the control database does not answer, acts wait, and those above a limit are only logged."""
    from pgqueue.http.security import admission

    monkeypatch.setattr(admission, "_MOST_WAITING", 3)
    stored: list[int] = []
    answers, tasks = asyncio.Event(), set()

    class Connection:
        async def execute(self, _: str, record: dict[str, Any]) -> None:
            await answers.wait()
            stored.append(record["status"])

    @asynccontextmanager
    async def control() -> AsyncIterator[Connection]:
        yield Connection()

    connect: Any = control
    audit = admission.Audit(connect, lambda work: tasks.add(asyncio.create_task(work)))
    caller = SimpleNamespace(administers=True, name="", token=None, place=())
    monkeypatch.setattr(admission, "current", lambda: caller)
    for status in range(5):
        audit.note({"type": "http", "method": "POST", "path": "/"}, status)
    assert [each.levelname for each in caplog.records] == ["WARNING", "WARNING"]
    answers.set()
    await asyncio.gather(*tasks)
    assert stored == [0, 1, 2]


def test_the_server_works_with_the_rights_that_the_chapter_grants(
    empty_database: Callable[[], str], tmp_path: Path
) -> None:
    chapter = (ROOT / "python/src/pgqueue/http/README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```text\n(create role pgqueue_serve.*?)```", chapter, re.DOTALL)
    role = f"serve_{new_name()[2:]}"
    make, schema, of_control, of_service = block.replace("pgqueue_serve", role).split("\n\n")
    control, target = empty_database(), empty_database()
    database = str(psycopg.conninfo.conninfo_to_dict(target)["dbname"])
    with psycopg.connect(control, autocommit=True) as one, psycopg.connect(target, autocommit=True) as other:
        one.execute(make.encode())
        try:
            for connection, grants in ((one, of_control), (other, of_service)):
                connection.execute("create extension pgqueue")
                connection.execute(schema.encode())
                connection.execute(grants.encode())
            as_role = (psycopg.conninfo.make_conninfo(each, user=role, password="…") for each in (control, target))
            config = configuration(tmp_path, next(as_role), {SERVICE: (next(as_role), [database])})
            with in_process(config) as web:
                web.create("shop-orders", max_attempts=1)
                assert len(web.enqueue("shop-orders", {"n": 1})) == 1
                path = "/v1/queues/shop-orders"
                sent = {"messages": [{"payload": 2}]}
                for _ in range(2):
                    answer = web.post(f"{path}/enqueue", sent, headers={"Idempotency-Key": "one"})
                    assert answer.status_code == 201, answer.text
                claimed = web.post(f"{path}/claim", {"max_messages": 9, "wait_seconds": 1}).json()["messages"]
                assert [each["payload"] for each in claimed] == [{"n": 1}, 2]
                for verb, each in zip(("ack", "nack"), claimed, strict=True):
                    body = {"id": each["id"], "claim_token": each["claim_token"]}
                    assert web.post(f"{path}/{verb}", body).status_code == 200
                assert web.post(f"{path}/redrive", {}).json() == {"count": 1}
                assert web.post(f"{path}/create_schedule", {"name": "daily", "cron": "@daily"}).status_code == 201
                assert web.post(f"{path}/run_schedule", {"name": "daily"}).status_code == 201
                place = {"service": SERVICE, "database": database, "name": "shop-orders"}
                for page in ("/", "/queue"):
                    assert web.get(page, params=place).status_code == 200
                assert web.get("/readyz").status_code == 200
                assert web.call("DELETE", f"{web.queues}/shop-orders").status_code in (200, 202, 204)
                web.until(lambda: web.status("shop-orders") is None)
                assert web.post(web.queues, {"name": "other"}).status_code == 201
                web.until(lambda: web.status("other") == "Failed")
        finally:
            for connection in (one, other):
                connection.execute(f"drop owned by {role}".encode())
            one.execute(f"drop role {role}".encode())


def test_administrative_acts_are_recorded(web: Server) -> None:
    name = new_name()
    token = make_token(web, name)
    place = f"{SERVICE}/{web.site.databases[0]}/order-1"
    web.until(lambda: by_token(web, token, "/v1/queues").status_code == 200)
    for to in ({}, {"to_queue": "order-none"}):
        by_token(web, token, "/v1/queues/order-1/redrive", "POST", json=to)
    web.post("/v1/queues/order-1/purge_dead_messages", {}, auth=("the-producer", ADMIN[1]))
    web.post("/v1/queues/order-1/enqueue", {"messages": [{"payload": 1}]})  # is none
    form = {"payload": "1", "replaces": "1"}
    web.http.post("/queue/send", params=web.place("order-1"), data=form, auth=("the-producer", ADMIN[1]))
    # An act that another access allows, too, is administrative if the user has no other one.
    acts = {
        "cancel": ({"id": 1}, 200),
        "cancel_by_key": ({"dedup_key": "1"}, 200),
        "reschedule": ({"id": 1}, 200),
        "run_schedule": ({"name": name}, 404),
        "subscribe": ({"topic": name}, 200),
        "unsubscribe": ({"topic": name}, 200),
    }
    for user in ("admin", "the-producer", "the-consumer", "the-reader", "the-admin"):
        for act, (body, _) in acts.items():
            web.post(f"/v1/queues/order-1/{act}", body, auth=(user, ADMIN[1]))
    web.post(f"{web.queues}/order-1/stats", auth=("the-admin", ADMIN[1]))  # changes nothing

    def rows() -> list[tuple[Any, ...]]:
        with psycopg.connect(web.site.control) as connection:
            return connection.execute(
                "select user_name, token_name, act, place, status from pgqueue_http.audit"
                " where token_name = %s or act <> 'POST redrive' and place = %s and user_name <> 'admin'",
                [name, place],
            ).fetchall()

    expected = {
        ("admin", name, "POST redrive", place, 200),
        ("admin", name, "POST redrive", place, 404),
        ("the-producer", None, "POST purge_dead_messages", place, 403),
        ("the-producer", None, "POST send", place, 403),
    } | {("the-admin", None, f"POST {act}", place, status) for act, (_, status) in acts.items()}
    web.until(lambda: expected <= set(rows()))
    lines = [json.loads(line) for line in web.command.err.splitlines() if '"pgqueue.audit"' in line]
    logged = {(each["user"], each["token"], each["act"], each["place"], each["status"]) for each in lines}
    assert expected <= logged
    assert not any("enqueue" in each["act"] or "stats" in each["act"] for each in lines)
    assert {each["user"] for each in lines if each["act"].removeprefix("POST ") in acts} == {"the-admin"}
    assert token not in web.command.err
