"""The direct routes: the verbs of a queue in one round trip, and repeated requests."""

import base64
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
from clients import Connection
from psycopg.conninfo import make_conninfo
from served import SERVICE, DirectQueue, Server, code_of, configuration, in_process, locked, new_name

TOKEN = "00000000-0000-4000-8000-000000000000"


@pytest.fixture
def queue(web: Server, sql: Connection) -> DirectQueue:
    """A queue that was created by SQL: the direct routes need no registry."""
    name = new_name()
    sql.execute("select pgqueue.create_queue(%s, max_attempts => 2, backoff_base => '0')", [name])
    return DirectQueue(web, name)


def test_a_message_passes_through_every_direct_route(queue: DirectQueue) -> None:
    message = {"payload": {"n": 1}, "headers": {"event": "created"}}
    (sent,) = queue.post("enqueue", {"messages": [message]}).json()["message_ids"]
    (claimed,) = queue.claim(claimed_by="worker-1", visibility_timeout_seconds=60)
    assert {name: claimed[name] for name in ("id", "payload", "headers", "attempt_count", "claimed_by")} == {
        "id": sent, "payload": {"n": 1}, "headers": {"event": "created"}, "attempt_count": 1, "claimed_by": "worker-1",
    }  # fmt: skip
    held = {"id": sent, "claim_token": claimed["claim_token"]}
    assert queue.post("extend", held | {"visibility_timeout_seconds": 120}).json() == {"id": sent}
    assert queue.post("nack", held | {"delay_seconds": 0, "error": "declined"}).json() == {"id": sent}
    (again,) = queue.claim()
    assert (again["attempt_count"], again["last_error"]) == (2, "declined")
    held["claim_token"] = again["claim_token"]
    assert queue.post("nack", held | {"error": "declined again"}).json() == {"id": sent}
    (dead,) = queue.web.get(f"{queue.path}/browse_dead_messages").json()["dead_messages"]
    assert (dead["id"], dead["reason"], dead["last_error"]) == (sent, "attempts_exhausted", "declined again")
    assert queue.stats()["dead_messages"] == 1
    assert queue.post("redrive", {"ids": [sent]}).json() == {"count": 1}
    (last,) = queue.claim()
    assert queue.post("ack", {"id": sent, "claim_token": last["claim_token"]}).json() == {"id": sent}
    states = dict.fromkeys(("ready_messages", "inflight_messages", "scheduled_messages", "dead_messages"), 0)
    totals = {"enqueued_total": 1, "acknowledged_total": 1, "failed_total": 2, "dead_total": 1}
    others: dict[str, Any] = {"queue_name": queue.name, "oldest_age_seconds": None, "paused": False, "estimates": []}
    assert queue.stats() == states | totals | others


@pytest.mark.parametrize("verb", ["ack", "nack", "extend"])
def test_a_lost_claim_is_410(queue: DirectQueue, verb: str) -> None:
    queue.send(1)
    (message,) = queue.claim()
    assert code_of(queue.post(verb, {"id": message["id"], "claim_token": TOKEN}), 410) == "claim_lost"
    assert code_of(queue.post(verb, {"id": 10**15, "claim_token": TOKEN}), 410) == "claim_lost"
    assert queue.post(verb, {"id": message["id"], "claim_token": message["claim_token"]}).status_code == 200


def test_a_batch_is_acknowledged_and_counted(queue: DirectQueue) -> None:
    ids = queue.send(*range(100))
    claimed = queue.claim(max_messages=100)
    assert [each["id"] for each in claimed] == ids
    body = {"ids": ids, "claim_token": claimed[0]["claim_token"]}
    assert queue.post("ack_batch", body).json() == {"count": 100}
    assert queue.post("ack_batch", body).json() == {"count": 0}


def test_claims_of_different_tokens_are_settled_together(queue: DirectQueue) -> None:
    ids = queue.send(1, 2, 3)
    tokens = {each["id"]: each["claim_token"] for _ in ids for each in queue.claim()}

    def settle(verb: str, lost: int, **more: Any) -> None:
        body = {"claims": [{"id": each, "claim_token": TOKEN if each == lost else tokens[each]} for each in ids]}
        settled = [{"id": each, "settled": each != lost} for each in ids]
        assert queue.post(verb, body | more).json() == {"claims": settled}

    settle("extend_claims", ids[1], visibility_timeout_seconds=60)
    settle("nack_claims", ids[1], delay_seconds=0, error="it broke", headers={"n": 1})
    again = {each["id"]: each for each in queue.claim(max_messages=3)}
    assert [(again[each]["last_error"], again[each]["headers"]) for each in again] == [("it broke", {"n": 1})] * 2
    tokens |= {each: again[each]["claim_token"] for each in again}
    settle("ack_claims", ids[0])


def test_contents_over_a_limit_are_refused(queue: DirectQueue, sql: Connection) -> None:
    bodies = [base64.b64encode(b"x" * size).decode() for size in (262_144, 262_145)]
    for field, fits, exceeds in (
        ("payload", {"payload": "x" * 262_142}, {"payload": "x" * 262_143}),
        ("body", {"body": bodies[0]}, {"body": bodies[1]}),
        ("headers", {"payload": 1, "headers": {"x": "y" * 60_000}}, {"payload": 1, "headers": {"x": "y" * 70_000}}),
    ):
        assert queue.post("enqueue", {"messages": [fits]}).status_code == 201
        answer = queue.post("enqueue", {"messages": [exceeds]})
        assert code_of(answer, 413) == "payload_too_large"
        assert answer.json()["error"]["field"] == f"messages[0].{field}"
    assert code_of(queue.post("enqueue", {"messages": [{"payload": 1}] * 101}), 422) == "invalid"
    sql.execute("select pgqueue.alter_queue(%s, max_payload_bytes => 10)", [queue.name])
    for large in ({"payload": "x" * 20}, {"body": bodies[0][:20]}):
        answer = queue.post("enqueue", {"messages": [{"payload": 1}, large]})
        assert code_of(answer, 413) == "payload_too_large"
        assert answer.json()["error"]["field"] == f"messages[1].{next(iter(large))}"


def test_enqueue_takes_the_arguments_of_the_sql_function(queue: DirectQueue, sql: Connection) -> None:
    """One message is sent by another statement than a batch, and so is a batch of plain messages."""
    body = base64.b64encode(b"\x00\xff").decode()
    full = {"body": body, "expires_in_seconds": 60, "message_id": TOKEN, "headers": {"event": "created"}}
    for messages in (
        [full],
        [full, {"payload": 1}, {"payload": None, "body": ""}, {"payload": 2.50, "expires_in_seconds": 30.0}],
    ):
        ids = queue.post("enqueue", {"messages": messages}).json()["message_ids"]
        claimed = queue.claim(max_messages=100)
        assert [each["id"] for each in claimed] == ids == sorted(ids)
        first = claimed[0]
        assert [first[name] for name in ("payload", "body", "message_id", "headers")] == [
            None, body, TOKEN, {"event": "created"},
        ]  # fmt: skip
        lifetimes = sql.execute(
            "select extract(epoch from expires_at - enqueued_at)::int from pgqueue.messages where id = any (%s)"
            " order by id",
            [ids],
        ).fetchall()
        assert [seconds for (seconds,) in lifetimes] == [60, None, None, 30][: len(messages)]
        assert [(each["payload"], each["body"]) for each in claimed[1:]] == [(1, None), (None, ""), (2.5, None)][
            : len(messages) - 1
        ]


def test_a_message_with_a_key_is_sent_once(queue: DirectQueue) -> None:
    def send(*messages: dict[str, Any]) -> list[int]:
        ids: list[int] = queue.post("enqueue", {"messages": list(messages)}).json()["message_ids"]
        return ids

    (first,) = send({"payload": 1, "dedup_key": "k"})
    second, other = send({"payload": 2, "dedup_key": "k"}, {"payload": 3, "dedup_key": None})
    assert (second, send({"payload": 4, "dedup_key": "k", "on_duplicate": "replace"})) == (first, [first])
    assert [(each["id"], each["payload"]) for each in queue.claim(max_messages=100)] == [(first, 4), (other, 3)]


@pytest.mark.parametrize(
    ("setting", "argument", "headers"),
    [
        ("group_limit => 1", {"group_key": "customer-17"}, {"pgqueue.group": "customer-17"}),
        ("priorities => true", {"priority": 9}, {"pgqueue.priority": 9}),
        ("priorities => true", {"priority": 9.0}, {"pgqueue.priority": 9}),
    ],
    ids=range(3),
)
def test_a_message_has_a_group_or_a_priority(
    web: Server, sql: Connection, setting: str, argument: dict[str, Any], headers: dict[str, Any]
) -> None:
    queue = DirectQueue(web, new_name())
    sql.execute(f"select pgqueue.create_queue(%s, {setting})".encode(), (queue.name,))
    messages = [{"payload": number, **argument} for number in range(2)]
    assert queue.post("enqueue", {"messages": messages}).status_code == 201
    claimed = queue.claim(max_messages=2)
    assert (claimed[0]["payload"], claimed[0]["headers"]) == (0, headers)
    assert len(claimed) == (1 if "group_key" in argument else 2)


def test_nack_merges_headers_into_those_of_the_message(queue: DirectQueue) -> None:
    queue.post("enqueue", {"messages": [{"payload": 1, "headers": {"event": "created", "n": 1}}]})
    (claimed,) = queue.claim()
    settled = {"id": claimed["id"], "claim_token": claimed["claim_token"], "delay_seconds": 0}
    assert code_of(queue.post("nack", settled | {"headers": [1]}), 422) == "invalid"
    for headers in ('{"a": 1e131072}', '{"a": "\\u0000"}'):
        answer = queue.post("nack", f'{json.dumps(settled)[:-1]}, "headers": {headers}}}')
        assert code_of(answer, 422) == "invalid"
        assert answer.json()["error"]["field"] == "headers"
    for depth in (300, 400, 500, 900, 100_000):  # Python can read some of these, but not write them
        nested = f'{{"a": {"[" * depth}{"]" * depth}}}'
        answer = queue.post("nack", f'{json.dumps(settled | {"claim_token": TOKEN})[:-1]}, "headers": {nested}}}')
        assert answer.status_code in (400, 410)
    text = json.dumps(settled)[:-1] + ', "headers": {"n": 1.10, "é": [true, null, 12345678901234567890123]}}'
    assert queue.post("nack", text).status_code == 200
    answer = queue.post("claim", {})
    assert answer.json()["messages"][0]["headers"]["event"] == "created"
    assert '"n": 1.10' in answer.text  # no number passes through a float
    assert '"é": [true, null, 12345678901234567890123]' in answer.text


def test_claimed_by_and_error_are_stored_without_invalid_characters(queue: DirectQueue) -> None:
    queue.send(1)
    (claimed,) = queue.claim(claimed_by="a\0b")
    assert claimed["claimed_by"] == "ab"
    settled = {"id": claimed["id"], "claim_token": claimed["claim_token"], "delay_seconds": 0, "error": "c\0d"}
    assert queue.post("nack", settled).status_code == 200
    assert queue.claim()[0]["last_error"] == "cd"


def test_any_json_passes_unchanged(queue: DirectQueue) -> None:
    text = '[1.10, 1e400, null, "\\u00e9", {"a": {}}]'
    body = f'{{"messages": [{{"payload": {text}}}, {{"payload": null}}, {{"payload": false}}]}}'
    assert queue.post("enqueue", body).status_code == 201
    answer = queue.post("claim", {"max_messages": 3})
    assert '"payload":[1.10, 1' in answer.text
    assert [each["payload"] for each in answer.json()["messages"][1:]] == [None, False]


def test_timestamps_beyond_python_become_the_first_or_the_last(queue: DirectQueue, sql: Connection) -> None:
    sql.execute(
        "insert into pgqueue.messages (queue_name, payload, max_attempts, enqueued_at, expires_at)"
        " values (%(name)s, '1', 1, '-infinity', 'infinity'), (%(name)s, '2', 1, '0044-03-15 BC', '20000-01-01')",
        {"name": queue.name},
    )
    claimed = queue.claim(max_messages=2)
    for each in claimed:
        assert (each["enqueued_at"], each["expires_at"]) == ("0001-01-01T00:00:00Z", "9999-12-31T23:59:59.999999Z")
        assert queue.post("nack", {"id": each["id"], "claim_token": each["claim_token"]}).status_code == 200
    dead = queue.web.get(f"{queue.path}/browse_dead_messages").json()["dead_messages"]
    assert [each["expires_at"] for each in dead] == ["9999-12-31T23:59:59.999999Z"] * 2
    assert queue.web.get("/queue", params=queue.web.place(queue.name)).text.count("sent <time") == 2


def test_the_routes_work_with_any_encoding_and_style_of_a_database(server: str, tmp_path: Path) -> None:
    """The target and the control database have the encoding. The server has its own broker, so no other agent takes its
    tasks.
    """
    made = new_name()
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(
            f"create database \"{made}\" encoding 'LATIN1' lc_collate 'C' lc_ctype 'C' template template0"
        )
        for setting in ("datestyle = 'SQL, DMY'", "intervalstyle = 'sql_standard'", "timezone = '<+3>-3:30'"):
            connection.execute(f'alter database "{made}" set {setting}')
        try:
            # the settings in a DSN have no effect, either
            dsn = make_conninfo(server, dbname=made, client_encoding="latin1")
            with in_process(configuration(tmp_path, dsn, {SERVICE: (dsn, [made])})) as web:
                name = new_name()
                web.create(name)
                queue = DirectQueue(web, name)
                queue.send("é")
                (message,) = queue.claim()
                assert message["payload"] == "é"
                assert message["visible_at"].endswith("Z")
                assert web.get("/queue", params={"service": SERVICE, "database": made, "name": name}).status_code == 200
                assert code_of(queue.post("enqueue", {"messages": [{"payload": "☃"}]}), 422) == "invalid"
        finally:
            connection.execute(f'drop database "{made}" with (force)')


def test_dead_letters_are_sent_to_another_queue_by_its_admins(queue: DirectQueue, web: Server, sql: Connection) -> None:
    (sent,) = queue.send(1)
    sql.execute("select pgqueue.reject(%s, id, claim_token) from pgqueue.claim(%s)", [queue.name, queue.name])
    answer = queue.post("redrive", {"to_queue": "nowhere"})
    assert (code_of(answer, 404), "nowhere" in answer.text) == ("queue_not_found", True)
    other = DirectQueue(web, new_name())
    sql.execute("select pgqueue.create_queue(%s)", [other.name])
    assert queue.post("redrive", {"to_queue": other.name}).json() == {"count": 1}
    (message,) = other.claim()
    assert message["headers"]["pgqueue.dead_letter"]["id"] == sent


@pytest.mark.parametrize(
    ("verb", "body"),
    [("enqueue", {"messages": [{"payload": 1}]}), ("claim", {"wait_seconds": 20}), ("redrive", {}), ("stats", None)],
)
def test_unknown_resources_are_404(queue: DirectQueue, verb: str, body: Any) -> None:
    for name in (new_name(), "pgqueue-http-tasks"):
        answer = queue.web.call("GET" if body is None else "POST", f"/v1/queues/{name}/{verb}", body)
        assert code_of(answer, 404) == "queue_not_found"
        assert (answer.json()["error"]["field"], answer.json()["error"]["value"]) == ("queue_name", name)


def test_a_repeated_request_with_a_key_takes_effect_once(queue: DirectQueue) -> None:
    key, body = new_name(), {"messages": [{"payload": 1}]}
    first, second = queue.post("enqueue", body, key), queue.post("enqueue", body, key)
    assert (first.status_code, first.json()) == (second.status_code, second.json())
    assert "idempotent-replayed" not in first.headers
    assert second.headers["idempotent-replayed"] == "true"
    assert queue.stats()["ready_messages"] == 1
    assert queue.post("enqueue", body, new_name()).json() != first.json()


@pytest.mark.parametrize("payloads", [[1, 2], ["é" * 120_000] * 9], ids=["small", "large"])
def test_a_repeated_claim_with_a_key_returns_the_same_messages(queue: DirectQueue, payloads: list[Any]) -> None:
    key, body = new_name(), {"max_messages": 9}
    assert queue.post("claim", body, key).json() == {"messages": []}  # an empty response is not stored
    queue.send(*payloads)
    first, second = queue.post("claim", body, key), queue.post("claim", body, key)
    assert [each["payload"] for each in first.json()["messages"]] == payloads
    assert first.text == second.text
    held = {"id": first.json()["messages"][0]["id"], "claim_token": first.json()["messages"][0]["claim_token"]}
    key = new_name()
    assert queue.post("ack", held, key).status_code == 200
    assert queue.post("ack", held, key).status_code == 200
    assert queue.post("ack", held).status_code == 410


def test_a_key_cannot_be_reused_for_another_request(queue: DirectQueue) -> None:
    key = new_name()
    assert queue.post("enqueue", {"messages": [{"payload": 1}]}, key).status_code == 201
    answer = queue.post("enqueue", {"messages": [{"payload": 2}]}, key)
    assert code_of(answer, 422) == "idempotency_key_reused"
    for bad in ("", "x" * 256, "ä".encode(), "a b"):
        headers = {"Idempotency-Key": bad}
        assert queue.web.post(f"{queue.path}/claim", {}, headers=headers).status_code == 422
    assert queue.post("claim", {}, "x" * 255).status_code == 200


def test_a_failed_request_is_not_stored_under_its_key(web: Server, sql: Connection) -> None:
    name, key, body = new_name(), new_name(), {"messages": [{"payload": 1}]}
    assert DirectQueue(web, name).post("enqueue", body, key).status_code == 404
    sql.execute("select pgqueue.create_queue(%s)", [name])
    assert DirectQueue(web, name).post("enqueue", body, key).status_code == 201


def test_of_concurrent_requests_with_a_key_one_takes_effect(queue: DirectQueue) -> None:
    key, body = new_name(), {"messages": [{"payload": 1}]}
    gate = threading.Barrier(8)

    def send() -> Any:
        gate.wait()
        return queue.post("enqueue", body, key).json()

    with ThreadPoolExecutor(8) as threads:
        answers = [each.result() for each in [threads.submit(send) for _ in range(8)]]
    assert len({json.dumps(answer) for answer in answers}) == 1
    assert queue.stats()["ready_messages"] == 1


def test_a_request_that_waits_too_long_for_its_key_is_409(web: Server, queue: DirectQueue, tmp_path: Path) -> None:
    key = new_name()
    insert = "insert into pgqueue_http.effects (scope, key, fingerprint) values ('user:admin', %s, '')"
    queue.post("claim", {}, new_name())  # creates the table of stored responses
    with (
        in_process(web.site.configuration(tmp_path, limits={"database_seconds": 2})) as hasty,
        locked(web.site.target, insert, key),
    ):
        answer = DirectQueue(hasty, queue.name).post("enqueue", {"messages": [{"payload": 1}]}, key)
    assert code_of(answer, 409) == "idempotency_key_in_use"


def test_a_repeated_managed_request_with_a_key_takes_effect_once(web: Server) -> None:
    name, key = new_name(), new_name()
    headers = {"Idempotency-Key": key}
    first, second = (web.post(web.queues, {"name": name}, headers=headers) for _ in range(2))
    assert first.status_code == second.status_code == 201
    assert first.json() == second.json()
    web.until(lambda: web.status(name) == "Active")
    path = f"{web.queues}/{name}/messages"
    headers = {"Idempotency-Key": new_name()}
    tasks = {web.post(path, {"messages": [{"payload": {}}]}, headers=headers).json()["task_id"] for _ in range(3)}
    assert len(tasks) == 1
    (task,) = tasks
    web.task(path, task)
    with psycopg.connect(web.site.target) as connection:
        assert connection.execute("select ready_messages from pgqueue.stats(%s)", [name]).fetchone() == (1,)
    web.call("DELETE", f"{web.queues}/{name}")
    web.until(lambda: web.status(name) is None)
    assert web.post(path, {"messages": [{"payload": {}}]}, headers=headers).json() == {"task_id": task}


def test_metrics_count_requests_and_messages(queue: DirectQueue, web: Server) -> None:
    queue.send(1, 2, 3)
    (message, _) = queue.claim(max_messages=2)
    queue.post("ack", {"id": message["id"], "claim_token": message["claim_token"]})

    for operation, number in (("enqueued", 3), ("claimed", 2), ("acked", 1)):
        assert web.metric("pgqueue_http_messages_total", queue=queue.name, operation=operation) == number
    web.look(web.site.databases[0], queue.name)
    web.until(lambda: web.metric("pgqueue_ready_messages", queue=queue.name) == 1)  # an older look can end later
    assert web.metric("pgqueue_inflight_messages", queue=queue.name) == 1
    assert web.metric("pgqueue_oldest_age_seconds", queue=queue.name) is not None
    assert web.metric("pgqueue_http_request_seconds_count", route="/v1/queues/{queue_name}/claim") is not None
