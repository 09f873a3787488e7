"""The transport of kombu: bindings, prefetch, acknowledgements, delays, options, lost connections."""

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from celeries import Collecting, broker_of, broker_url, drain, drain_all, shop
from clients import Connection as Session
from clients import wait_for
from hypothesis import given
from hypothesis import strategies as st
from kombu.asynchronous import Hub
from kombu.connection import Connection
from kombu.entity import Exchange, Queue
from kombu.exceptions import ChannelError
from kombu.messaging import Producer

import pgqueue
from pgqueue.contrib.celery import Transport, transaction_of
from pgqueue.contrib.celery import names as encoding

A_TEXT = st.text(st.one_of(st.sampled_from("aA_x4.-*#%é"), st.characters(codec="utf-8", exclude_categories=["Cs"])))


def send(broker: Connection, body: object, queue: Queue | None = None, **options: Any) -> None:
    declare = {} if queue is None else {"declare": [queue], "routing_key": queue.name}
    Producer(broker).publish(body, **(declare | options))


def bodies(messages: list[Any]) -> list[Any]:
    return sorted(message.payload for message in messages)


@given(st.lists(A_TEXT, min_size=2, max_size=2, unique=True))
def test_different_names_stay_different(texts: list[str]) -> None:
    queues = [encoding.queue_name("", text) for text in texts]
    assert queues[0] != queues[1]
    assert all(set(queue) <= set("abcdefghijklmnopqrstuvwxyz0123456789-_") for queue in queues)
    assert encoding.topic("direct", texts[0], texts[1]) != encoding.topic("direct", texts[1], texts[0])
    assert encoding.topic("topic", "e", texts[0]) != encoding.topic("topic", "e", texts[1])


def test_common_names_stay_as_they_are() -> None:
    names = [encoding.queue_name("app-", name) for name in ("celery", "high_priority-2", "Ä.b")]
    assert names == ["app-celery", "app-high_priority-2", "app-_xc3_x84_x2eb"]


@pytest.mark.parametrize(
    ("kind", "key", "expected"),
    [
        ("direct", "orders.new", ["exact"]),
        ("fanout", "ignored", ["any", "exact", "orders", "tail"]),
        ("topic", "orders.new", ["any", "exact", "orders", "tail"]),
        ("topic", "orders.new.late", ["any", "tail"]),
        ("topic", "", ["any"]),
    ],
)
def test_messages_reach_the_queues_that_other_processes_have_bound(
    database: str, name: str, kind: str, key: str, expected: list[str]
) -> None:
    exchange = Exchange(name, kind)
    keys = {"exact": "orders.new", "orders": "orders.*", "tail": "orders.#", "any": "#"}
    queues = [Queue(f"{name}-{one}", exchange, routing_key=pattern) for one, pattern in keys.items()]
    with broker_of(database) as binder, broker_of(database) as sender, broker_of(database) as reader:
        for queue in queues:
            queue(binder.default_channel).declare()
        send(sender, "hello", exchange=exchange, routing_key=key, declare=[exchange])
        found = [one for one, queue in zip(keys, queues, strict=True) if queue(reader.default_channel).get(no_ack=True)]
        queues[-1](binder.default_channel).unbind_from(exchange, routing_key="#")
        send(sender, "again", exchange=exchange, routing_key=key)
        assert queues[-1](reader.default_channel).get() is None
    assert sorted(found) == expected


def test_a_queue_that_was_dropped_is_bound_when_it_is_declared_again(
    database: str, name: str, connection: Session
) -> None:
    queue = Queue(name, Exchange(name, "direct"), routing_key="key")
    with broker_of(database) as broker:
        queue(broker.default_channel).declare()
        pgqueue.Queue(connection, name).drop_queue()
        queue(broker.default_channel).declare()
        send(broker, "hello", exchange=queue.exchange, routing_key="key")
        assert queue(broker.default_channel).get(no_ack=True)


def test_a_message_that_no_queue_gets_is_dropped_unless_it_is_a_task(database: str, name: str) -> None:
    with broker_of(database) as broker:
        send(broker, "a reply to a client that is gone", routing_key=name)
        with pytest.raises(pgqueue.QueueNotFound):
            send(broker, "a task", routing_key=name, headers={"task": "shop.add"})
        with pytest.raises(ChannelError, match="no queue"):
            Queue(name)(broker.default_channel).queue_declare(passive=True)


def test_at_most_the_prefetch_count_is_held_and_what_is_held_is_released_without_an_attempt(
    database: str, name: str, connection: Session
) -> None:
    queue, stored = Queue(name), pgqueue.Queue(connection, name)
    with broker_of(database) as broker:
        for number in range(5):
            send(broker, number, queue)
        with Collecting(broker, queue, prefetch=2) as consumer:
            drain_all(broker)
            assert bodies(consumer.messages) == [0, 1]
            consumer.messages[0].ack()
            drain(broker, lambda: len(consumer.messages) == 3)
            assert stored.stats().inflight_messages == 2
        consumer.messages[1].ack(multiple=True)  # Those that were delivered before it, too: none.
    assert [(m.attempt_count, bytes(m.body or b"")) for m in stored.browse()] == [(0, b"2"), (0, b"3"), (0, b"4")]


def test_a_consumer_that_began_before_its_event_loop_gets_messages(database: str, name: str) -> None:
    queue = Queue(name)
    hub = Hub()
    with broker_of(database) as broker, Collecting(broker, queue, prefetch=1) as consumer:
        send(broker, "x", queue)
        broker.register_with_event_loop(hub)
        wait_for(lambda: hub.run_once() or consumer.messages)
        hub.close()
        consumer.messages[0].ack()


def test_a_requeued_message_is_redelivered_and_a_rejected_one_is_a_dead_letter(
    database: str, name: str, connection: Session
) -> None:
    queue = Queue(name)
    with broker_of(database) as broker, Collecting(broker, queue) as consumer:
        send(broker, "x", queue)
        drain(broker, lambda: len(consumer.messages) == 1)
        consumer.messages[0].requeue()
        drain(broker, lambda: len(consumer.messages) == 2)
        consumer.messages[1].requeue()
        drain(broker, lambda: len(consumer.messages) == 3)
        assert [message.delivery_info["redelivered"] for message in consumer.messages] == [False, True, True]
        consumer.messages[2].reject()
        stored = pgqueue.Queue(connection, name)
        assert wait_for(stored.browse_dead_messages)[0].reason == "rejected"


def test_a_claim_is_extended_for_as_long_as_a_message_is_held(database: str, name: str, connection: Session) -> None:
    queue, stored = Queue(name), pgqueue.Queue(connection, name)
    with broker_of(database, visibility_timeout=15) as broker, Collecting(broker, queue) as consumer:
        send(broker, "x", queue)
        drain(broker, lambda: consumer.messages)
        [held] = stored.browse("inflight")
        # This thread does nothing meanwhile.
        later = held.visible_at + timedelta(seconds=2)
        [extended] = wait_for(lambda: [each for each in stored.browse("inflight") if each.visible_at > later])
        assert extended.attempt_count == 1
        consumer.messages[0].ack()
        wait_for(lambda: not stored.browse("inflight"))


def test_an_acknowledgement_survives_the_loss_of_all_connections(
    database: str, name: str, connection: Session, caplog: pytest.LogCaptureFixture
) -> None:
    queue, stored = Queue(name), pgqueue.Queue(connection, name)
    with broker_of(database) as broker, Collecting(broker, queue) as consumer:
        send(broker, "x", queue)
        drain(broker, lambda: consumer.messages)
        session = broker.transport.session
        reachable, session.conninfo = session.conninfo, "host=/nowhere"
        connection.execute(
            "select pg_terminate_backend(pid, 60000) from pg_stat_activity"
            " where application_name = 'celery' and datname = current_database()"
        )
        consumer.messages[0].ack()
        wait_for(lambda: session._connection is None)  # The thread has tried.
        session.conninfo = reachable
        wait_for(lambda: not stored.browse("inflight"))
        with pytest.raises(psycopg.OperationalError):
            broker.drain_events(timeout=60)
        assert isinstance(psycopg.OperationalError(), broker.connection_errors)
    assert "claims had ended" not in caplog.text


def test_a_queue_of_a_process_that_is_gone_is_dropped_although_it_gets_messages(
    database: str, connection: Session
) -> None:
    events = [Queue(f"celeryev.{uuid4()}", expires=60) for _ in range(3)]
    with broker_of(database) as broker:
        for queue in events[:2]:
            send(broker, "event", queue)
    [gone, used] = [encoding.queue_name("", queue.name) for queue in events[:2]]
    connection.execute(
        "update pgqueue.messages set enqueued_at = enqueued_at - interval '301 s' where queue_name = %s", [gone]
    )
    with broker_of(database) as broker:
        events[2](broker.default_channel).declare()
    names = {info.name for info in pgqueue.Queues(connection).list_queues()}
    assert used in names
    assert gone not in names


def task(eta: datetime | None, **properties: Any) -> dict[str, Any]:
    return {"headers": {"task": "shop.add", "id": str(uuid4()), "eta": eta and eta.isoformat()}, **properties}


@pytest.mark.parametrize(
    ("options", "seconds", "state"),
    [
        ({}, 3600, "scheduled"),
        ({}, 30, "ready"),
        ({"native_delay": 10}, 30, "scheduled"),
        ({"native_delay": None}, 3600, "ready"),
    ],
)
def test_the_database_holds_a_task_until_its_eta_if_that_is_far(
    database: str, name: str, connection: Session, options: Any, seconds: int, state: str
) -> None:
    with broker_of(database, **options) as broker:
        sent = task(datetime.now(UTC) + timedelta(seconds=seconds))
        send(broker, [], Queue(name), **sent)
    [message] = pgqueue.Queue(connection, name).browse(state)
    assert str(message.message_id) == sent["headers"]["id"]


def test_only_messages_that_are_no_tasks_expire_in_the_queue(database: str, name: str, connection: Session) -> None:
    queue = Queue(name)
    with broker_of(database) as broker:
        send(broker, "reply", queue, expiration=60)
        send(broker, "task", queue, expiration=60, **task(None))
    times = [m.expires_at and (m.expires_at - m.enqueued_at).seconds for m in pgqueue.Queue(connection, name).browse()]
    assert times == [60, None]


def test_tasks_are_sent_in_the_transaction_of_the_caller(database: str, name: str, connection: Session) -> None:
    stored = pgqueue.Queue(connection, name)
    with (
        shop(database, task_default_queue=name, result_backend=None) as app,
        app.connection_for_write() as broker,
        psycopg.connect(database) as caller,
    ):
        app.send_task("shop.add", ("\0", "\ud800"), connection=broker)  # PostgreSQL stores them in bodies only
        with transaction_of(caller):
            app.send_task("shop.add", (3, 4), connection=broker)
        assert stored.stats().ready_messages == 1
        caller.rollback()
        assert stored.stats().ready_messages == 1
        with transaction_of(caller):
            app.send_task("shop.add", (5, 6), connection=broker)
        caller.commit()
        assert stored.stats().ready_messages == 2
        not_connected: Any = None
        with pytest.raises(TypeError, match="is None before"), transaction_of(not_connected):
            app.send_task("shop.add", (7, 8), connection=broker)


def test_sql_can_send_a_task(database: str, name: str, connection: Session) -> None:
    queue, sender = Queue(name), pgqueue.Queue(connection, name)
    with broker_of(database) as broker, Collecting(broker, queue) as consumer:
        identity, headers = uuid4(), {"headers": {"task": "shop.add"}}
        # Celery would end at what is no task.
        for payload, given_headers in (({"order_id": 1}, headers), ("x", headers), ("y", {"headers": [1]})):
            sender.enqueue(payload, headers=given_headers)
        sender.enqueue([[1, 2], {}, {}], headers=headers, message_id=identity)
        drain(broker, lambda: consumer.messages and sender.stats().dead_messages == 3)
        [message] = consumer.messages
        assert (message.payload, message.headers) == ([[1, 2], {}, {}], {"task": "shop.add", "id": str(identity)})
        assert message.properties["correlation_id"] == str(identity)
        message.ack()


def test_roles_that_may_not_create_queues_use_those_that_exist(database: str, name: str, connection: Session) -> None:
    role = name.replace("-", "_")
    pgqueue.Queue(connection, name).create_queue()
    connection.execute(f"create role {role} login")
    for access in ("producer", "consumer"):
        pgqueue.Queue(connection, name).grant_access(role, access)
    dsn = psycopg.conninfo.make_conninfo(database, user=role)
    with broker_of(dsn) as broker, pytest.raises(psycopg.errors.InsufficientPrivilege):
        send(broker, "x", Queue(name))
    with broker_of(dsn, create_queues=False) as broker, Collecting(broker, Queue(name)) as consumer:
        send(broker, "x", Queue(name))
        drain(broker, lambda: consumer.messages)
        consumer.messages[0].ack()
        with pytest.raises(ChannelError, match="create_queues"):
            send(broker, "x", Queue(f"{name}-other"))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"priority_steps": [0, 9]}, "unknown transport option of pgqueue: 'priority_steps'"),
        ({"visibility_timeout": "1h"}, "invalid visibility_timeout: '1h'; must be a number from 1 to 43200"),
        ({"visibility_timeout": 0}, "invalid visibility_timeout: 0"),
        ({"create_queues": "no"}, "invalid create_queues"),
        ({"queue_name_prefix": "A"}, "invalid queue_name_prefix"),
    ],
)
def test_options_without_effect_are_refused_by_name(database: str, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        broker_of(database, **options).connect()


def test_queue_arguments_and_settings_without_effect_are_refused_by_name(database: str, name: str) -> None:
    with broker_of(database) as broker:
        for arguments in ({"max_length": 5}, {"message_ttl": 5.0}, {"queue_arguments": {"x-overflow": "drop-head"}}):
            with pytest.raises(ValueError, match=r"x-max-length|x-message-ttl|x-overflow"):
                Queue(name, **arguments)(broker.default_channel).declare()
    with pytest.raises(ValueError, match="sslmode"):
        Connection(broker_url(database), ssl=True).connect()


def test_the_next_broker_of_a_list_is_used_if_one_cannot_be_reached(database: str, name: str) -> None:
    dead = "pgqueue://nobody@localhost:1/none"
    with pytest.raises(ValueError, match="pgqueue://first,second/database"):
        Connection([dead, f"{dead}?sslmode=require"]).connect()
    with Connection([dead, broker_url(database)]) as broker:
        broker.ensure_connection(max_retries=3, interval_start=0, interval_step=0)
        send(broker, "x", Queue(name))
        assert Queue(name)(broker.default_channel).get(no_ack=True).payload == "x"


def test_a_statement_that_a_time_limit_has_interrupted_does_not_hinder_the_next(database: str, name: str) -> None:
    with broker_of(database) as broker:
        broker.ensure_connection()
        broker.transport.session._connection.pgconn.send_query(b"select pg_sleep(600)")  # Nobody reads its result.
        send(broker, "x", Queue(name))


def test_the_transport_can_be_named_by_its_module(database: str) -> None:
    url = broker_url(database).replace("pgqueue://", "postgresql://")
    with Connection(url, transport="pgqueue.contrib.celery:Transport") as broker:
        assert isinstance(broker.transport, Transport)
        broker.connect()
    # Passwords are not shown.
    assert Transport.as_uri("pgqueue://me:secret@host:5432/db") == "pgqueue://me:**@host:5432/db"
    assert Connection("pgqueue://me:secret@host/db").as_uri() == "pgqueue://me:**@host/db"
    assert Transport.as_uri("pgqueue://host/db?password=secret&user=me") == "pgqueue://host/db?password=**&user=me"
