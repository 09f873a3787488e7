"""The managed routes: the contract of specification 004, its limits, and authentication."""

import base64
import json
import re
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg
import pytest
from clients import Connection, drop
from served import ADMIN, SERVICE, Server, configuration, in_process, new_name


@pytest.fixture(scope="module")
def queue(web: Server) -> str:
    name = new_name()
    web.create(name)
    return name


def refused(answer: Any, status: int, field: str | None = None, limit: str | None = None) -> dict[str, Any]:
    """The error of a response, which must have the common form."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"code", "message", "field", "value", "limit"}
    if field is not None:
        assert error["field"] == field
    if limit is not None:
        assert limit in error["limit"]
    return error


CREATE = """curl -u admin:password -X POST \\
https://api.foundrydb.com/managed-services/{service-id}/queues \\
-H "Content-Type: application/json" \\
-d '{
"name": "order-events",
"database_name": "defaultdb",
"visibility_timeout_seconds": 60,
"max_attempts": 5,
"dlq_enabled": true
}'"""
LIST = """curl -u admin:password \\
https://api.foundrydb.com/managed-services/{service-id}/queues"""
GET = """curl -u admin:password \\
https://api.foundrydb.com/managed-services/{service-id}/queues/order-events"""
ENQUEUE = """curl -u admin:password -X POST \\
https://api.foundrydb.com/managed-services/{service-id}/queues/order-events/messages \\
-H "Content-Type: application/json" \\
-d '{
"messages": [
{"payload": {"order_id": 1001, "event": "created"}},
{"payload": {"order_id": 1002, "event": "paid"}, "delay_seconds": 30}
]
}'"""
POLL_ENQUEUE = """curl -u admin:password \\
"https://api.foundrydb.com/managed-services/{service-id}/queues/order-events/messages?task_id=task-uuid\""""
STATS = """curl -u admin:password -X POST \\
https://api.foundrydb.com/managed-services/{service-id}/queues/order-events/stats"""
POLL_STATS = """curl -u admin:password \\
"https://api.foundrydb.com/managed-services/{service-id}/queues/order-events/stats?task_id=task-uuid\""""
DELETE = """curl -u admin:password -X DELETE \\
https://api.foundrydb.com/managed-services/{service-id}/queues/order-events"""

MOMENT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")


@pytest.mark.usefixtures("curl")
def test_the_examples_of_the_specification_run_as_printed(web: Server) -> None:
    """But for the address, the service, the database and the task."""

    def curl(example: str, task_id: str = "") -> tuple[int, Any]:
        text = example.replace("https://api.foundrydb.com", web.url)
        text = text.replace("{service-id}", SERVICE).replace("task-uuid", task_id)
        text = text.replace("defaultdb", web.site.databases[0])
        text = text.replace("curl ", "curl -sS -w '\\n%{http_code}' --noproxy '*' ", 1)
        done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True)
        body, _, status = done.stdout.rpartition("\n")
        return int(status), json.loads(body)

    def polled(example: str, task_id: str) -> Any:
        while (answer := curl(example, task_id))[0] == 202:
            assert answer[1]["status"] in ("pending", "running")
        assert answer[0] == 200
        return answer[1]

    status, created = curl(CREATE)
    assert status == 201
    expected = {
        "id": created["id"],
        "service_id": "pg-service-uuid",
        "name": "order-events",
        "database_name": web.site.databases[0],
        "visibility_timeout_seconds": 60,
        "max_attempts": 5,
        "dlq_enabled": True,
        "status": "Pending",
        "created_at": created["created_at"],
        "updated_at": created["updated_at"],
    }
    assert list(created.items()) == list(expected.items())
    assert MOMENT.fullmatch(created["created_at"])
    assert MOMENT.fullmatch(created["updated_at"])
    web.until(lambda: web.status("order-events") == "Active")

    status, listed = curl(LIST)
    of_it = [each for each in listed["queues"] if each["name"] == "order-events"]
    shown = expected | {"status": "Active"}
    for key in ("service_id", "created_at", "updated_at"):
        del shown[key]
    assert (status, list(listed), of_it) == (200, ["queues"], [shown])
    status, found = curl(GET)
    assert (status, found["id"], found["status"]) == (200, created["id"], "Active")

    status, task = curl(ENQUEUE)
    assert status == 202
    assert list(task) == ["task_id"]
    sent = polled(POLL_ENQUEUE, task["task_id"])
    assert list(sent) == ["task_id", "status", "result"]
    assert sent["status"] == "completed"
    (first, second) = sent["result"]["message_ids"]
    assert first < second

    status, task = curl(STATS)
    assert (status, list(task)) == (202, ["task_id"])
    stats = polled(POLL_STATS, task["task_id"])
    assert list(stats) == ["task_id", "status", "result"]
    assert stats["result"] | {"oldest_age_seconds": 0} == {
        "queue_name": "order-events",
        "ready_messages": 1,
        "inflight_messages": 0,
        "dead_messages": 0,
        "oldest_age_seconds": 0,
    }
    assert stats["result"]["oldest_age_seconds"] > 0

    status, deleted = curl(DELETE)
    assert (status, deleted["status"], deleted["id"]) == (202, "Deprovisioning", created["id"])
    web.until(lambda: web.status("order-events") is None)


def test_settings_reach_the_queue_and_defaults_are_those_of_the_specification(web: Server, sql: Connection) -> None:
    given: dict[str, Any] = {"visibility_timeout_seconds": 61, "max_attempts": 7, "dlq_enabled": False}
    for settings, values in (({}, (30, 5, True)), (given, (61, 7, False))):
        name = new_name()
        web.create(name, **settings)
        made = web.get(f"{web.queues}/{name}").json()
        assert made["database_name"] == web.site.databases[0]
        assert tuple(made[each] for each in ("visibility_timeout_seconds", "max_attempts", "dlq_enabled")) == values
        row = sql.execute(
            "select extract(epoch from visibility_timeout)::int, max_attempts, dlq_enabled from pgqueue.queues"
            " where name = %s",
            [name],
        ).fetchone()
        assert row == values


def test_database_name_chooses_the_database(web: Server) -> None:
    name = new_name()
    web.create(name, database_name=web.site.databases[1])
    web.enqueue(name, {"n": 1})
    with psycopg.connect(web.site.other) as connection:
        assert connection.execute("select ready_messages from pgqueue.stats(%s)", [name]).fetchone() == (1,)
    with psycopg.connect(web.site.target) as connection:
        assert connection.execute("select 1 from pgqueue.queues where name = %s", [name]).fetchall() == []
    for hostile in ("postgres", "", "x; drop database", "host=elsewhere"):
        refused(web.post(web.queues, {"name": new_name(), "database_name": hostile}), 422, "database_name")


def test_a_payload_is_limited_to_256_kb(web: Server, queue: str) -> None:
    path = f"{web.queues}/{queue}/messages"

    def body(size: int) -> bytes:  # The payload has so many bytes in the form in which PostgreSQL writes it.
        payload = json.dumps({"x": "é" + "a" * (size - 11)}, ensure_ascii=False)
        return f'{{"messages": [{{"payload": {{}}}}, {{"payload": {payload}}}]}}'.encode()

    error = refused(web.post(path, body(262145)), 413, "messages[1].payload", "262144")
    assert error["value"] == "262145 bytes"
    task = web.task(path, web.post(path, body(262144)).json()["task_id"])
    sent = task["result"]["message_ids"][1]
    with psycopg.connect(web.site.target) as connection:
        row = connection.execute(
            "select octet_length(payload::text) from pgqueue.messages where queue_name = %s and id = %s", [queue, sent]
        ).fetchone()
    assert row == (262144,)


def test_a_payload_is_delivered_unchanged(web: Server, queue: str) -> None:
    text = '{"n": 1.10, "big": 12345678901234567890.12345, "e": 1E+400, "s": "\\u00e9\\ud83d\\ude00 \\\\u0000"}'
    path = f"{web.queues}/{queue}/messages"
    answer = web.post(path, f'{{"messages": [{{"payload": {text}}}]}}')
    (sent,) = web.task(path, answer.json()["task_id"])["result"]["message_ids"]
    with psycopg.connect(web.site.target) as connection:
        row = connection.execute(
            "select payload = %s::jsonb, payload ->> 'n' from pgqueue.messages where queue_name = %s and id = %s",
            [text, queue, sent],
        ).fetchone()
    assert row == (True, "1.10")


@pytest.mark.parametrize(
    ("payload", "status", "value", "limit"),
    [
        ('{"x": 1e131072}', 422, '{"x": 1e131072}', "JSON that PostgreSQL can store"),
        ('{"x": -1e-16384}', 422, '{"x": -1e-16384}', "JSON that PostgreSQL can store"),
        (f'{{"x": {"9" * 131073}}}', 422, f'{{"x": {"9" * 94}…', "JSON that PostgreSQL can store"),
        ('{"x": "\\\\\\u0000"}', 422, '{"x": "\\\\\\u0000"}', "JSON that PostgreSQL can store"),
        ('{"x": [1e131071, 1E131071]}', 413, "262155 bytes", "262144 bytes"),
    ],
    ids=range(5),
)
def test_the_message_that_postgresql_refuses_is_named(
    web: Server, queue: str, payload: str, status: int, value: str, limit: str
) -> None:
    good = '{"payload": {}}, '
    body = f'{{"messages": [{6 * good}{{"payload": {payload}}}]}}'
    for path in (f"/v1/queues/{queue}/enqueue", f"{web.queues}/{queue}/messages"):
        answer = web.post(path, body)
        error = answer.json()["error"]
        assert (answer.status_code, error["field"]) == (status, "messages[6].payload")
        assert (error["value"], error["limit"]) == (value, limit)


def test_unknown_resources_are_404(web: Server, queue: str) -> None:
    elsewhere = "/managed-services/another/queues"
    for answer in (web.get(elsewhere), web.post(elsewhere, {"name": "x"}), web.get(f"{elsewhere}/x")):
        refused(answer, 404, "service_id")
    missing = f"{web.queues}/{new_name()}"
    refused(web.get(missing), 404, "queue_name")
    refused(web.call("DELETE", missing), 404, "queue_name")
    refused(web.post(f"{missing}/messages", {"messages": [{"payload": {}}]}), 404, "queue_name")
    refused(web.post(f"{missing}/stats"), 404, "queue_name")
    task = web.post(f"{web.queues}/{queue}/stats").json()["task_id"]
    refused(web.get(f"{web.queues}/{queue}/messages", params={"task_id": task}), 404, "task_id")
    refused(web.get(f"{web.queues}/{queue}/stats", params={"task_id": "x"}), 422, "task_id", "a UUID")
    refused(web.get(f"{web.queues}/{queue}/stats"), 422, "task_id", "a UUID")
    refused(web.get("/nowhere"), 404)
    refused(web.call("PUT", web.queues), 405)


def test_the_location_of_a_new_queue_works_for_any_service_id(web: Server, tmp_path: Path) -> None:
    services = dict.fromkeys(("日本", "a b?c#d"), (web.site.target, web.site.databases))
    with in_process(configuration(tmp_path, web.site.control, services)) as other:
        for service in services:
            name = new_name()
            answer = other.post(f"/managed-services/{quote(service)}/queues", {"name": name})
            assert answer.status_code == 201
            assert other.get(answer.headers["location"]).json()["name"] == name


def test_a_name_is_free_after_its_queue_is_deleted(web: Server) -> None:
    name = new_name()
    web.create(name)
    refused(web.post(web.queues, {"name": name}), 409, "name")
    refused(web.post(web.queues, {"name": name, "database_name": web.site.databases[1]}), 409, "name")
    first = web.get(f"{web.queues}/{name}").json()["id"]
    assert web.call("DELETE", f"{web.queues}/{name}").json()["status"] == "Deprovisioning"
    web.until(lambda: web.status(name) is None)
    with psycopg.connect(web.site.target) as connection:
        assert connection.execute("select 1 from pgqueue.queues where name = %s", [name]).fetchall() == []
    with psycopg.connect(web.site.control) as connection:
        rows = connection.execute("select deleted_at is null from pgqueue_http.queues where id = %s", [first])
        assert rows.fetchall() == [(False,)]
    web.create(name)
    assert web.get(f"{web.queues}/{name}").json()["id"] != first


def test_only_active_queues_take_messages(web: Server) -> None:
    name = new_name()
    web.create(name)
    with psycopg.connect(web.site.control, autocommit=True) as connection:
        for status in ("Pending", "Provisioning", "Deprovisioning", "Failed"):
            connection.execute("update pgqueue_http.queues set status = %s where name = %s", [status, name])
            error = refused(
                web.post(f"{web.queues}/{name}/messages", {"messages": [{"payload": {}}]}), 409, "status", "Active"
            )
            assert error["value"] == status
            refused(web.post(f"{web.queues}/{name}/stats"), 409, "status")


def test_a_queue_created_by_sql_is_neither_adopted_nor_dropped(web: Server) -> None:
    name = new_name()
    with psycopg.connect(web.site.target, autocommit=True) as connection:
        connection.execute("select pgqueue.create_queue(%s)", [name])
        connection.execute("select pgqueue.enqueue(%s, '1')", [name])
        web.create(name, wait=False)
        web.until(lambda: web.status(name) == "Failed")
        assert "exists" in web.get(f"{web.queues}/{name}").json()["error_message"]
        listed = [each for each in web.get(web.queues).json()["queues"] if each["name"] == name]
        assert "exists" in listed[0]["error_message"]
        web.call("DELETE", f"{web.queues}/{name}")
        web.until(lambda: web.status(name) is None)
        assert connection.execute("select ready_messages from pgqueue.stats(%s)", [name]).fetchone() == (1,)


def test_a_queue_that_sql_has_made_in_place_of_that_of_the_server_stays(web: Server) -> None:
    name = new_name()
    web.create(name)
    with psycopg.connect(web.site.target, autocommit=True) as connection:
        drop(connection, name)
        connection.execute("select pgqueue.create_queue(%s)", [name])
        connection.execute("select pgqueue.enqueue(%s, '1')", [name])
        web.call("DELETE", f"{web.queues}/{name}")
        web.until(lambda: web.status(name) is None)
        assert connection.execute("select ready_messages from pgqueue.stats(%s)", [name]).fetchone() == (1,)


def test_a_queue_that_was_dropped_by_sql_fails_its_tasks_and_can_be_deleted(web: Server) -> None:
    name = new_name()
    web.create(name)
    with psycopg.connect(web.site.target, autocommit=True) as connection:
        drop(connection, name)
    path = f"{web.queues}/{name}/messages"
    task = web.task(path, web.post(path, {"messages": [{"payload": {}}]}).json()["task_id"])
    assert task["status"] == "failed"
    assert name in task["error_message"]
    assert "result" not in task
    web.call("DELETE", f"{web.queues}/{name}")
    web.until(lambda: web.status(name) is None)


def test_requests_without_credentials_are_refused(web: Server) -> None:
    assert web.get(web.queues).status_code == 200  # the right password is remembered from now on

    def refuses(authorization: str | None, method: str, path: str) -> None:
        headers = {} if authorization is None else {b"Authorization": authorization.encode("latin-1")}
        answer = web.http.send(web.http.build_request(method, path, headers=headers), auth=None)
        refused(answer, 401)
        assert answer.headers["www-authenticate"].startswith("Basic realm=")

    given = [b"admin", b"admin:", b"admin:Password", b"admin:password\x00", b"root:password", b":", b"\xff:\xff"]
    encoded = ["Basic " + base64.b64encode(each).decode() for each in given]
    for authorization in ("", "Basic", "Basic !!!", "Basic \xe9", "Bearer token", "Basic " + "A" * 5000, *encoded):
        refuses(authorization, "GET", web.queues)
        refuses(authorization, "POST", "/v1/queues/x/claim")  # is served beside the other routes
    for path in ("/", web.queues, "/metrics", "/openapi.json", "/nowhere"):
        refuses(None, "GET", path)
    for path in (web.queues, "/v1/queues/x/claim"):
        refuses(None, "POST", path)
    assert web.http.send(web.http.build_request("GET", "/healthz"), auth=None).text == "ok\n"


@pytest.mark.parametrize("hostile", ["'; drop table q; --", "../../etc", "a%00b", "{}", "Größe", "a" * 129, "%ff%fe"])
def test_a_hostile_name_is_404(web: Server, hostile: str) -> None:
    for answer in (
        web.get(f"{web.queues}/{hostile}"),
        web.call("DELETE", f"{web.queues}/{hostile}"),
        web.post(f"{web.queues}/{hostile}/stats"),
        web.get(f"/managed-services/{hostile}/queues"),
        web.get(f"/v1/queues/{hostile}/stats"),
        web.get("/v1/queues/x/stats", params={"service_id": hostile}),
        web.get("/v1/queues/x/stats", params={"database_name": hostile}),
        web.post(f"/v1/queues/{hostile}/claim", {}),
    ):
        assert answer.status_code in (404, 405), answer.text
    refused(web.post(web.queues, {"name": hostile}), 422, "name")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://["}, 403),
        ({"Origin": "http://evil.{host}"}, 403),
        ({"Origin": "http://{host}"}, 202),
        ({"Sec-Fetch-Site": "same-origin", "Origin": "https://behind.a.proxy"}, 202),
        ({"Sec-Fetch-Site": "none"}, 202),
        ({}, 202),
    ],
)
def test_another_site_cannot_use_the_password_of_a_browser(
    web: Server, queue: str, headers: dict[str, str], status: int
) -> None:
    sent = {name: value.format(host=web.url.partition("://")[2]) for name, value in headers.items()}
    assert web.post(f"{web.queues}/{queue}/stats", headers=sent).status_code == status


def test_the_output_of_the_server_contains_no_password(web: Server) -> None:
    said = web.command.err + web.command.out
    assert ADMIN[1] not in said
