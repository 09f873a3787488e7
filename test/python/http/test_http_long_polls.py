"""Claims that wait for a message, and what becomes of messages that cannot be delivered."""

import asyncio
import base64
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from datetime import timedelta
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from clients import PATIENCE, Connection
from consumers import waits
from served import ADMIN, SERVICE, DirectQueue, Server, code_of, in_process, locked, new_name, waiters
from test_http_direct import queue

__all__ = ["queue"]


def test_claim_any_claims_from_several_queues_in_their_order(web: Server, sql: Connection) -> None:
    urgent, normal = (DirectQueue(web, new_name()) for _ in range(2))
    for each in urgent, normal:
        sql.execute("select pgqueue.create_queue(%s)", [each.name])
    names = [urgent.name, normal.name]

    def claim(**body: Any) -> list[tuple[str, Any, int]]:
        answer = web.post("/v1/queues/claim_any", {"queue_names": names} | body)
        assert answer.status_code == 200, answer.text
        assert all(
            DirectQueue(web, each["queue_name"]).post("ack", {"id": each["id"], "claim_token": each["claim_token"]})
            for each in answer.json()["messages"]
        )
        return [(each["queue_name"], each["payload"], each["attempt_count"]) for each in answer.json()["messages"]]

    normal.send(1, 2)
    urgent.send(3)
    assert claim(max_messages=2) == [(urgent.name, 3, 1), (normal.name, 1, 1)]
    assert claim(max_messages=2) == [(normal.name, 2, 1)]
    assert claim() == []
    urgent.send(5)
    key = {"Idempotency-Key": urgent.name}
    keyed = [web.post("/v1/queues/claim_any", {"queue_names": names}, headers=key).json() for _ in range(2)]
    assert keyed[0] == keyed[1]
    assert [each["payload"] for each in keyed[0]["messages"]] == [5]


def test_claim_any_names_the_queue_that_is_missing(queue: DirectQueue) -> None:
    for name in ("missing", "pgqueue-http-tasks", "Not a name"):
        answer = queue.web.post("/v1/queues/claim_any", {"queue_names": [queue.name, name], "wait_seconds": 1})
        assert code_of(answer, 404) == "queue_not_found"
        assert answer.json()["error"]["value"] == name


class Patient:
    """A direct queue of an application whose long polls do not look by themselves: only what wakes them does."""

    def __init__(self, queue: DirectQueue, looked: threading.Semaphore) -> None:
        self.queue = queue
        self._looked = looked

    @contextmanager
    def claiming(self, path: str, *names: str) -> Iterator[Callable[[], list[Any]]]:
        """A claim that waits during the block, in which it has looked in vain twice: before it listened, and after."""
        body = {"wait_seconds": 20} | ({"queue_names": names} if names else {})
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(self.queue.web.post, path, body)
            self.has_looked(2)
            yield lambda: [each["payload"] for each in waiting.result(PATIENCE).json()["messages"]]

    def has_looked(self, times: int) -> None:
        for _ in range(times):
            assert self._looked.acquire(timeout=PATIENCE)


@pytest.fixture
def patient(web: Server, queue: DirectQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Patient]:
    from pgqueue.http.direct import claims

    looked = threading.Semaphore(0)
    run_once = claims._claim_once

    async def run_and_tell(*arguments: Any) -> Any:
        answer = await run_once(*arguments)
        looked.release()
        return answer

    monkeypatch.setattr(claims, "_claim_once", run_and_tell)
    monkeypatch.setattr(claims, "_POLL_INTERVAL", timedelta(hours=1))
    with in_process(web.site.configuration(tmp_path, limits={"request_seconds": 600})) as application:
        yield Patient(DirectQueue(application, queue.name), looked)


def test_a_long_poll_is_woken_by_a_notification(patient: Patient, sql: Connection) -> None:
    """Also that of several queues, by a message in each of them."""
    name, other = patient.queue.name, new_name()
    sql.execute("select pgqueue.create_queue(%s)", [other])
    for path, names, to in (
        (f"/v1/queues/{name}/claim", (), name),
        ("/v1/queues/claim_any", (name, other), name),
        ("/v1/queues/claim_any", (name, other), other),
    ):
        with patient.claiming(path, *names) as claimed:
            sql.execute("select pgqueue.enqueue(%s, to_jsonb(%s::text))", [to, path])
            assert claimed() == [path]
        patient.has_looked(1)


def test_an_empty_long_poll_ends_after_its_wait_seconds(queue: DirectQueue) -> None:
    began = time.monotonic()
    assert queue.claim(wait_seconds=1) == []
    assert time.monotonic() - began > 0.9


def test_a_long_poll_returns_due_messages_although_the_clocks_differ(
    web: Server, queue: DirectQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's clock is a minute behind that of the database, which says when a message is due."""
    real = time.time
    with in_process(web.site.configuration(tmp_path)) as behind:
        monkeypatch.setattr(time, "time", lambda: real() - 60)
        behind_queue = DirectQueue(behind, queue.name)
        assert behind_queue.post("enqueue", {"messages": [{"payload": 1, "delay_seconds": 1}]}).status_code == 201
        assert len(behind_queue.claim(wait_seconds=20)) == 1


def test_a_long_poll_ends_before_the_time_limit_of_its_request(web: Server, queue: DirectQueue, tmp_path: Path) -> None:
    with in_process(web.site.configuration(tmp_path, limits={"request_seconds": 5})) as hasty:
        # A first claim that takes long leaves too little time for the poll, which is answered by 503 then.
        hasty.until(lambda: DirectQueue(hasty, queue.name).post("claim", {"wait_seconds": 20}).status_code == 200)


def test_a_waiting_long_poll_has_no_open_transaction(queue: DirectQueue, sql: Connection) -> None:
    with ThreadPoolExecutor(30) as threads:
        waiting = [threads.submit(queue.claim, wait_seconds=20) for _ in range(30)]
        queue.web.until(lambda: waits(sql, queue.name))
        idle = "select from pg_stat_activity where datname = current_database() and state like 'idle in transaction%'"
        queue.web.until(lambda: not sql.execute(idle).fetchall())  # a sweep of the server can have one for a moment
        # Thirty requests wait; there are ten connections, and other requests are served.
        assert queue.stats()["ready_messages"] == 0
        sql.execute("select pgqueue.enqueue_batch(%s, array_fill('1'::jsonb, array[30]))", [queue.name])
        assert sum(len(each.result(PATIENCE)) for each in waiting) == 30


def test_a_long_poll_continues_when_the_listening_connection_is_lost(patient: Patient, sql: Connection) -> None:
    with patient.claiming(f"/v1/queues/{patient.queue.name}/claim") as claimed:
        listening = "datname = current_database() and query ~ '^(un)?listen '"
        ended = sql.execute(f"select pg_terminate_backend(pid, 5000) from pg_stat_activity where {listening}".encode())
        assert ended.fetchall()
        patient.has_looked(1)  # which it does when it listens again
        sql.execute("select pgqueue.enqueue(%s, '3')", [patient.queue.name])
        assert claimed() == [3]


CLAIM = "%from pgqueue.claim($1%"  # not the claim of an agent, which has named arguments


@contextmanager
def asked(web: Server, path: str, body: Any, key: str = "") -> Iterator[None]:
    """A request whose client disconnects at the end of the block, whatever its state is."""
    secret = base64.b64encode(":".join(ADMIN).encode()).decode()
    headers = {"Authorization": f"Basic {secret}", "Content-Type": "application/json"}
    with closing(HTTPConnection(web.url.removeprefix("http://"))) as connection:
        connection.request("POST", path, json.dumps(body), headers | ({"Idempotency-Key": key} if key else {}))
        yield
    assert web.get("/healthz").status_code == 200  # The server has read the end of the connection before this request.


@pytest.mark.parametrize(("wait_seconds", "path"), [(0, None), (20, None), (0, "/v1/queues/claim_any")])
def test_messages_claimed_for_a_disconnected_client_are_released(
    queue: DirectQueue, sql: Connection, wait_seconds: int, path: str | None
) -> None:
    """The client disconnects while a lock delays its claim; the messages already exist."""
    sql.execute("select pgqueue.create_queue(%s)", [empty := f"{queue.name}-empty"])
    body = {"queue_names": [empty, queue.name]} if path else {}
    sent = queue.send(1, 2)
    with (
        locked(queue.web.site.target, "lock table pgqueue.messages in access exclusive mode"),
        asked(queue.web, path or f"{queue.path}/claim", body | {"max_messages": 2, "wait_seconds": wait_seconds}),
    ):
        queue.web.until(lambda: waiters(queue.web.site.target, "%pgqueue.claim_any(%" if path else CLAIM))
    of_queue = f'queue="{queue.name}",service="{SERVICE}"'
    queue.web.until(lambda: f'operation="released",{of_queue}}} 2.0' in queue.web.get("/metrics").text)
    claimed = queue.claim(max_messages=2)  # The attempt of the other claim is not counted.
    assert [(each["id"], each["attempt_count"]) for each in claimed] == [(each, 1) for each in sent]


def test_messages_claimed_with_a_key_stay_claimed_after_a_disconnect(queue: DirectQueue) -> None:
    (sent,), key = queue.send(1), new_name()
    assert queue.post("redrive", {}, new_name()).json() == {"count": 0}  # creates the table of stored responses
    with (
        locked(queue.web.site.target, "lock table pgqueue.messages in access exclusive mode"),
        asked(queue.web, f"{queue.path}/claim", {}, key),
    ):
        queue.web.until(lambda: waiters(queue.web.site.target, CLAIM))
    queue.web.until(lambda: queue.stats()["inflight_messages"] == 1)
    assert [each["id"] for each in queue.post("claim", {}, key).json()["messages"]] == [sent]


def test_messages_claimed_for_a_timed_out_request_are_released(web: Server, queue: DirectQueue, tmp_path: Path) -> None:
    (sent,) = queue.send(1)
    limits = {"request_seconds": 3, "database_seconds": 60}
    with in_process(web.site.configuration(tmp_path, limits=limits)) as hasty:
        with locked(web.site.target, "lock table pgqueue.messages in access exclusive mode"):
            assert code_of(DirectQueue(hasty, queue.name).post("claim", {}), 503) == "timeout"
        (claimed,) = web.until(queue.claim)
        assert (claimed["id"], claimed["attempt_count"]) == (sent, 1)


def test_a_claim_that_waits_for_its_turn_ends_with_its_request(web: Server, queue: DirectQueue, tmp_path: Path) -> None:
    with in_process(web.site.configuration(tmp_path, limits={"request_seconds": 1})) as hasty:
        context = hasty.app.state.context
        hasty.portal.call(context.databases._large.acquire)
        try:
            assert code_of(DirectQueue(hasty, queue.name).post("claim", {"max_messages": 9}), 503) == "timeout"
            hasty.until(lambda: not context.background_tasks)
        finally:
            hasty.portal.call(context.databases._large.release)


@pytest.mark.parametrize("path", ["/v1/queues/{}/claim", "/v1/queues/claim_any"])
def test_messages_whose_response_exceeds_the_memory_are_released(
    web: Server, queue: DirectQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    from pgqueue.http import memory

    (sent,) = queue.send("é" * 100_000)
    monkeypatch.setattr(memory, "BODIES_LIMIT", 200_000)
    with in_process(web.site.configuration(tmp_path)) as small:
        body = {"queue_names": [queue.name]} if path.endswith("any") else {}
        assert code_of(small.post(path.format(queue.name), body), 503) == "overloaded"
    # The server has waited for the release before it stopped.
    (claimed,) = queue.claim()
    assert (claimed["id"], claimed["attempt_count"]) == (sent, 1)


def test_the_first_claim_of_a_queue_waits_for_large_ones(web: Server, queue: DirectQueue, tmp_path: Path) -> None:
    sent = queue.send(*range(20))
    with in_process(web.site.configuration(tmp_path)) as fresh, ThreadPoolExecutor() as others:
        turn, there = fresh.app.state.context.databases._large, DirectQueue(fresh, queue.name)
        fresh.portal.call(turn.acquire)
        claiming = others.submit(there.claim, max_messages=9)
        fresh.until(lambda: claiming.done() or turn._waiters)
        assert not claiming.done()
        fresh.portal.call(turn.release)
        assert [each["id"] for each in claiming.result(PATIENCE)] == sent[:9]
        fresh.portal.call(turn.acquire)
        assert len(there.claim(max_messages=9)) == 9  # The answer was small, so this claim waits for no other.
        fresh.portal.call(turn.release)


def test_a_stopping_server_releases_undelivered_messages_first(
    web: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pgqueue.http import Settings, create_app

    monkeypatch.setenv("TEST_PASSWORD", ADMIN[1])
    app = create_app(Settings.load(web.site.configuration(tmp_path)))
    context = app.state.context
    seen: list[str] = []
    close = context.databases.close

    async def give_back() -> None:
        await asyncio.wait({task for task in asyncio.all_tasks() if task.get_name() == "pgqueue agent"})
        for _ in range(1000):  # turns of the event loop, in which a task that does not wait continues
            await asyncio.sleep(0)
        seen.append("given back")

    async def closed() -> None:
        seen.append("databases closed")
        await close()

    async def run() -> None:
        async with app.router.lifespan_context(app):
            context.run_in_background(give_back())

    monkeypatch.setattr(context.databases, "close", closed)
    asyncio.run(run())
    assert seen == ["given back", "databases closed"]
