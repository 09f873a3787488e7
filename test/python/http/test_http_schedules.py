"""The routes that cancel messages, and those of schedules."""

from pathlib import Path
from typing import Any

import pytest
from clients import Connection
from served import DirectQueue, Server, failure, in_process, new_name


@pytest.fixture
def queue(web: Server, sql: Connection) -> DirectQueue:
    name = new_name()
    sql.execute("select pgqueue.create_queue(%s, priorities => true)", [name])
    return DirectQueue(web, name)


def schedules(queue: DirectQueue) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = queue.web.get(f"{queue.path}/list_schedules").json()["schedules"]
    return listed


def test_messages_are_cancelled_by_id_and_by_key(queue: DirectQueue) -> None:
    messages = [{"payload": 1}, {"payload": 2, "dedup_key": "order-2", "delay_seconds": 60}]
    first, _ = queue.post("enqueue", {"messages": messages}).json()["message_ids"]
    key = new_name()
    for _ in range(2):  # the second time by the stored response
        answer = queue.post("cancel", {"id": first}, key)
        assert (answer.status_code, answer.json()) == (200, {"cancelled": True})
    assert queue.post("cancel", {"id": first}).json() == {"cancelled": False}
    assert queue.post("cancel_by_key", {"dedup_key": "order-2"}).json() == {"cancelled": True}
    assert queue.post("cancel_by_key", {"dedup_key": "order-2"}).json() == {"cancelled": False}
    stats = queue.stats()
    assert (stats["ready_messages"], stats["scheduled_messages"]) == (0, 0)
    (sent,) = queue.post("enqueue", {"messages": [{"payload": 1}]}).json()["message_ids"]
    (claimed,) = queue.post("claim", {}).json()["messages"]
    assert queue.post("cancel", {"id": sent}).json() == {"cancelled": False}
    settled = queue.post("ack", {"id": sent, "claim_token": claimed["claim_token"]})
    assert settled.status_code == 200


def test_a_message_that_waits_is_rescheduled(queue: DirectQueue) -> None:
    (sent,) = queue.post("enqueue", {"messages": [{"payload": 1, "delay_seconds": 60}]}).json()["message_ids"]
    key = new_name()
    for _ in range(2):  # the second time by the stored response
        answer = queue.post("reschedule", {"id": sent, "due_at": "2026-01-31T12:00:00+01:00"}, key)
        assert (answer.status_code, answer.json()) == (200, {"rescheduled": True})
    assert queue.post("claim", {}).json()["messages"][0]["id"] == sent
    assert queue.post("reschedule", {"id": sent}).json() == {"rescheduled": False}
    assert queue.post("reschedule", {"id": sent, "due_at": "9999-01-01T00:00:00Z"}).status_code == 422


def test_a_schedule_is_created_altered_run_and_dropped(queue: DirectQueue, sql: Connection) -> None:
    name = f"{queue.name} nightly"
    settings = {"cron": "0 3 * * *", "payload": {"n": 1}, "headers": {"event": "tick"}, "time_zone": "Europe/Paris"}
    created = queue.post("create_schedule", {"name": name, **settings, "priority": 7})
    assert created.status_code == 201
    (schedule,) = schedules(queue)
    assert created.json() == {"next_at": schedule["next_at"]}
    assert schedule["next_at"].endswith("Z")
    assert schedule == {
        "name": name,
        "queue_name": queue.name,
        **settings,
        "headers": {"event": "tick", "pgqueue.priority": 7},
        "paused": False,
        "catch_up": True,
        "next_at": schedule["next_at"],
        "last_at": None,
    }
    again = queue.post("create_schedule", {"name": name, "cron": "@hourly", "if_not_exists": True})
    assert again.json() == created.json()
    assert schedules(queue) == [schedule]
    altered = queue.post("alter_schedule", {"name": name, "paused": True, "cron": "@hourly", "payload": [2]})
    assert (altered.status_code, altered.json()) == (200, {"next_at": None})
    (schedule,) = schedules(queue)
    assert (schedule["paused"], schedule["cron"], schedule["payload"]) == (True, "@hourly", [2])
    assert schedule["headers"] == {"event": "tick", "pgqueue.priority": 7}
    ran = queue.post("run_schedule", {"name": name})
    assert ran.status_code == 201
    (message,) = queue.post("claim", {}).json()["messages"]
    assert [message["id"]] == ran.json()["message_ids"]
    assert (message["payload"], message["headers"]["pgqueue.schedule"]) == ([2], name)
    assert queue.post("drop_schedule", {"name": name}).json() == {"dropped": True}
    assert schedules(queue) == []
    assert sql.execute("select count(*) from pgqueue.list_schedules(%s)", [queue.name]).fetchall() == [(0,)]


def test_the_group_of_a_schedule_becomes_a_header_and_no_number_is_rounded(queue: DirectQueue) -> None:
    body = f'{{"name": "{queue.name}", "cron": "@daily", "payload": 0.10000000000000000001, "group_key": "backup"}}'
    answer = queue.post("create_schedule", body, new_name())
    assert answer.status_code == 201
    listed = queue.web.get(f"{queue.path}/list_schedules")
    assert '"payload":0.10000000000000000001,' in listed.text
    assert listed.json()["schedules"][0]["headers"] == {"pgqueue.group": "backup"}


def test_a_schedule_of_another_queue_is_not_found(queue: DirectQueue, sql: Connection) -> None:
    other = DirectQueue(queue.web, new_name())
    sql.execute("select pgqueue.create_queue(%s)", [other.name])
    name = f"{other.name} nightly"
    assert other.post("create_schedule", {"name": name, "cron": "@daily"}).status_code == 201
    before = schedules(other)
    for verb in ("alter_schedule", "drop_schedule", "run_schedule"):
        assert failure(queue.post(verb, {"name": name})) == (404, "schedule_not_found", "name")
        absent = queue.post(verb, {"name": f"{name} 2"})
        assert failure(absent) == (404, "schedule_not_found", "name")
    assert schedules(other) == before
    assert schedules(queue) == []
    assert failure(other.post("create_schedule", {"name": name, "cron": "@daily"})) == (409, "schedule_exists", "name")


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("cron", "0 3 * *", "five fields, such as 0 9 * * mon-fri, or a word such as @daily: it has 4 fields"),
        ("time_zone", "Berlin", "UTC, or the name of a region in pg_timezone_names, such as Europe/Paris"),
        ("name", "a\nb", "1 to 255 characters, without control characters"),
    ],
)
def test_an_invalid_setting_is_refused_with_its_limit(queue: DirectQueue, field: str, value: Any, limit: str) -> None:
    answer = queue.post("create_schedule", {"name": queue.name, "cron": "@daily", field: value})
    assert failure(answer) == (422, "invalid", field)
    assert answer.json()["error"]["limit"] == limit
    assert schedules(queue) == []


def test_contents_over_a_limit_are_refused(queue: DirectQueue) -> None:
    """Headers of 65,500 bytes exceed their limit together with those of the schedule."""
    for field, value in (
        ("payload", "x" * 262_144),
        ("headers", {"a": "x" * 65_536}),
        ("headers", {"a": "x" * 65_500}),
    ):
        answer = queue.post("create_schedule", {"name": queue.name, "cron": "@daily", field: value})
        assert failure(answer) == (413, "payload_too_large", field)
    assert queue.post("create_schedule", {"name": queue.name, "cron": "@daily", "payload": "x" * 262_142}).is_success


def test_a_schedule_whose_tick_a_transaction_has_taken_is_a_conflict(
    web: Server, queue: DirectQueue, sql: Connection, tmp_path: Path
) -> None:
    assert queue.post("create_schedule", {"name": queue.name, "cron": "@daily"}).is_success
    with in_process(web.site.configuration(tmp_path, limits={"database_seconds": 2})) as impatient, sql.transaction():
        sql.execute("select from pgqueue.scheduled_messages where queue_name = %s for update", [queue.name])
        answer = DirectQueue(impatient, queue.name).post("drop_schedule", {"name": queue.name})
    assert failure(answer) == (503, "transaction_conflict", None)
    assert queue.post("drop_schedule", {"name": queue.name}).json() == {"dropped": True}


def test_a_list_over_its_limit_is_refused(queue: DirectQueue, sql: Connection) -> None:
    sql.execute(
        "select pgqueue.create_schedule(%s || n, %s, '@daily', to_jsonb(repeat('x', 262142)))"
        " from generate_series(1, 32) as n",
        [queue.name, queue.name],
    )
    assert len(schedules(queue)) == 32
    sql.execute("select pgqueue.create_schedule(%s, %s, '@daily', '1')", [queue.name, queue.name])
    answer = queue.web.get(f"{queue.path}/list_schedules")
    assert failure(answer) == (413, "response_too_large", "queue_name")


def test_run_schedule_counts_as_a_sent_message(queue: DirectQueue) -> None:
    assert queue.post("create_schedule", {"name": queue.name, "cron": "@daily"}).is_success
    key = new_name()
    for _ in range(2):  # the second time by the stored response
        assert queue.post("run_schedule", {"name": queue.name}, key).status_code == 201
    assert queue.web.metric("pgqueue_http_messages_total", queue=queue.name, operation="enqueued") == 1
