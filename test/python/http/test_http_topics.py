"""The routes of topics: subscriptions, and what a published message reaches."""

from datetime import datetime
from typing import Any

import httpx
import pytest
from clients import Connection
from served import ADMIN, SERVICE, Server, failure, new_name

PUBLISH = "/v1/queues/publish"
Names = tuple[str, str]


@pytest.fixture
def queues(sql: Connection) -> Names:
    names = new_name(), new_name()
    for name in names:
        sql.execute("select pgqueue.create_queue(%s)", [name])
    return names


@pytest.fixture
def topic(web: Server, queues: Names) -> str:
    """A topic to which both queues are subscribed, the first one twice."""
    topic = f"{queues[0]}.paid"
    for name, pattern in ((queues[0], topic), (queues[0], f"{queues[0]}.#"), (queues[1], f"{queues[0]}.*")):
        assert web.post(f"/v1/queues/{name}/subscribe", {"topic": pattern}).json() == {"subscribed": True}
    return topic


def claim(web: Server, queue: str) -> list[dict[str, Any]]:
    claimed: list[dict[str, Any]] = web.post(f"/v1/queues/{queue}/claim", {"max_messages": 10}).json()["messages"]
    return claimed


def test_a_queue_is_subscribed_listed_and_unsubscribed(web: Server, queues: Names, topic: str) -> None:
    path = f"/v1/queues/{queues[0]}"
    assert web.post(f"{path}/subscribe", {"topic": topic}).json() == {"subscribed": False}
    listed = web.get(f"{path}/list_subscriptions").json()["subscriptions"]
    assert [(each["topic"], each["queue_name"]) for each in listed] == [
        (f"{queues[0]}.#", queues[0]),
        (topic, queues[0]),
    ]
    assert all(datetime.fromisoformat(each["subscribed_at"]).tzinfo for each in listed)
    key = {"Idempotency-Key": new_name()}
    for _ in range(2):  # the second time by the stored response
        assert web.post(f"{path}/unsubscribe", {"topic": topic}, headers=key).json() == {"unsubscribed": True}
    assert web.post(f"{path}/unsubscribe", {"topic": topic}).json() == {"unsubscribed": False}
    assert len(web.get(f"{path}/list_subscriptions").json()["subscriptions"]) == 1


def test_a_published_message_reaches_each_subscribed_queue_once(web: Server, queues: Names, topic: str) -> None:
    """Also if the request is repeated. No number is rounded."""
    body, key = f'{{"topic": "{topic}", "payload": {{"n": 0.10000000000000000001}}}}', {"Idempotency-Key": new_name()}
    answers = [web.post(PUBLISH, body, headers=key) for _ in range(2)]
    assert [(each.status_code, each.json()) for each in answers] == [(201, {"count": 2})] * 2
    assert [each.headers.get("idempotent-replayed") for each in answers] == [None, "true"]
    for name in queues:
        answer = web.post(f"/v1/queues/{name}/claim", {"max_messages": 10})
        (message,) = answer.json()["messages"]
        assert '{"n": 0.10000000000000000001}' in answer.text
        assert message["headers"] == {"pgqueue.topic": topic}
    assert web.post(PUBLISH, {"topic": new_name(), "payload": 1}).json() == {"count": 0}


def test_a_message_is_published_with_the_arguments_of_sql(web: Server, queues: Names, sql: Connection) -> None:
    base, name = new_name(), queues[0]
    web.post(f"/v1/queues/{name}/subscribe", {"topic": base})
    message_id = "2f1c9d6e-5a37-4c1b-9d0e-8b6f0a7c3e51"
    more = {"headers": {"event": "paid"}, "expires_in_seconds": 3600, "message_id": message_id, "group_key": "group"}
    for content in ({"body": "AP8="}, {"payload": None}):
        assert web.post(PUBLISH, {"topic": "x", "base_topics": [base], **more, **content}).json() == {"count": 1}
    for message, (payload, body) in zip(claim(web, name), [(None, "AP8="), (None, None)], strict=True):
        assert (message["payload"], message["body"], message["message_id"]) == (payload, body, message_id)
        assert message["headers"] == {"event": "paid", "pgqueue.topic": "x", "pgqueue.group": "group"}
        assert message["expires_at"] > message["enqueued_at"]
    keyed = {"topic": base, "dedup_key": "one", "delay_seconds": 60, "base_topics": None, "priority": 7.0}
    for payload in (1, 2):
        assert web.post(PUBLISH, {**keyed, "payload": payload, "on_duplicate": "replace"}).json() == {"count": 1}
    rows = sql.execute(
        "select payload, headers ->> 'pgqueue.priority', due_at > now() from pgqueue.scheduled_messages"
        " where queue_name = %s",
        [name],
    ).fetchall()
    assert rows == [(2, "7", True)]


def test_a_user_publishes_only_with_the_access_to_all_queues_of_the_database(
    web: Server, queues: Names, topic: str
) -> None:
    """The answer does not tell which queues are subscribed, or whether any is."""
    made = web.run("token", "create", queues[0], "--allow", f"producer:{SERVICE}/{queues[0]}")
    token = {"Authorization": f"Bearer {made.out.strip()}"}
    web.until(lambda: web.http.get("/v1/queues", headers=token, auth=None).status_code == 200)

    def publish(to: str, database: str = web.site.databases[0], **more: Any) -> httpx.Response:
        return web.post(PUBLISH, {"topic": to, "payload": 1}, params={"database_name": database}, **more)

    refused = []
    for to in (topic, new_name()):
        refused += [publish(to, auth=("some", ADMIN[1])), publish(to, headers=token, auth=None)]
    assert {failure(each) for each in refused} == {(403, "forbidden", None)}
    assert len({each.text for each in refused}) == 1
    hidden = publish(topic, auth=("all-elsewhere", ADMIN[1]))
    assert failure(hidden) == (404, "database_not_found", "database_name")
    assert [claim(web, name) for name in queues] == [[], []]
    there = publish(topic, web.site.databases[1], auth=("all-elsewhere", ADMIN[1]))
    assert (there.status_code, there.json()) == (201, {"count": 0})
    assert web.post(PUBLISH, {"topic": topic, "payload": 1}, auth=("all-elsewhere", ADMIN[1])).status_code == 201


def test_a_message_over_a_limit_reaches_no_queue(web: Server, queues: Names, topic: str, sql: Connection) -> None:
    for name, value in (("payload", "x" * 262_143), ("headers", {"a": "x" * 65_536}), ("body", "AAAA" * 87_382)):
        answer = web.post(PUBLISH, ({"topic": topic} | ({} if name == "body" else {"payload": 1})) | {name: value})
        assert failure(answer) == (413, "payload_too_large", name)
    sql.execute("select pgqueue.alter_queue(%s, max_payload_bytes => 1024)", [queues[1]])
    assert failure(web.post(PUBLISH, {"topic": topic, "payload": "x" * 2000})) == (413, "payload_too_large", "payload")
    assert [claim(web, name) for name in queues] == [[], []]
    assert web.post(PUBLISH, {"topic": topic, "payload": "x" * 1000}).json() == {"count": 2}
