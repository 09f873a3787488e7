"""pgqueue.contrib.django, in the project python/examples/django_shop."""

import html
import json
import logging
import pickle
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from decimal import Decimal
from functools import partial
from io import StringIO
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import psycopg
import pytest
from clients import PATIENCE, value, wait_for
from psycopg.types.json import Jsonb
from shops import Shop, handled, shop

import pgqueue
from pgqueue.testing import drain

if TYPE_CHECKING:
    from django.apps import apps
    from django.core.management import CommandError, call_command
    from django.core.serializers.json import DjangoJSONEncoder
    from django.db import DatabaseError, connection, connections, transaction
    from django.db.migrations.state import ProjectState
    from django.test import Client
    from django.test.utils import CaptureQueriesContext

    from pgqueue.contrib.django import consumer, queue, queues
    from pgqueue.contrib.django.operations import AlterQueue, CreatePgqueue, CreateQueue, DropQueue

__all__ = ["shop"]

NOW = timedelta(0)


@pytest.fixture(autouse=True)
def empty(shop: Shop) -> Iterator[None]:
    for alias in shop.dsns:
        with shop.connect(alias) as beside:
            beside.execute("truncate shop_order cascade")
            orders = pgqueue.Queue(beside, "orders")
            orders.purge_queue()
            orders.purge_dead_messages()
            orders.alter_queue(max_attempts=3)
    yield
    shop.router.write_to = None
    connections.close_all()


def new_order(pieces: int = 1, using: str = "default") -> Any:
    """Create an order and send its message, in one transaction."""
    with transaction.atomic(using):
        order = apps.get_model("shop", "Order").objects.using(using).create(article="pencils", pieces=pieces)
        queue("orders", using).enqueue({"order_id": order.id})
    return order


def shipments(using: str = "default") -> int:
    return int(apps.get_model("shop", "Shipment").objects.using(using).count())


def ship(delivery: pgqueue.Delivery) -> None:
    """The handler of the example, which can be imported when the apps are loaded."""
    from shop import handlers

    handlers.ship(delivery)


@contextmanager
def failing(*aliases: str) -> Iterator[None]:
    """Blocks of `atomic()` that end by an exception."""
    with suppress(KeyError), ExitStack() as blocks:
        for alias in aliases or ("default",):
            blocks.enter_context(transaction.atomic(alias))
        yield
        raise KeyError


# The client


def test_row_and_message_commit_together_or_not_at_all() -> None:
    with failing():
        new_order()
    assert (queue("orders").peek(), apps.get_model("shop", "Order").objects.count()) == (0, 0)
    with transaction.atomic():
        new_order()
        with failing():  # a savepoint
            new_order()
    assert (queue("orders").peek(), apps.get_model("shop", "Order").objects.count()) == (1, 1)


def test_the_aliases_are_independent_databases() -> None:
    with failing("default", "other"):
        new_order()
        new_order(using="other")
    with failing():
        new_order(using="other")
    assert (queue("orders").peek(), queue("orders", "other").peek()) == (0, 1)


def test_values_are_those_of_pgqueue_and_not_of_django() -> None:
    orders = queue("orders")
    with transaction.atomic():
        orders.enqueue({"price": 1.5}, headers={"a": 1}, delay=NOW)
        orders.enqueue(body=b"%s \0")
        assert orders.enqueue_copy([{"n": 1}, {"n": 2}]) == 2
    first, second, *others = orders.claim(10)
    assert (first.payload, first.headers, second.body) == ({"price": 1.5}, {"a": 1}, b"%s \0")
    assert [message.payload for message in others] == [{"n": 1}, {"n": 2}]
    dumps = partial(json.dumps, cls=DjangoJSONEncoder)
    exact = queue("orders", json_dumps=dumps, json_loads=partial(json.loads, parse_float=Decimal))
    exact.enqueue_batch([Decimal("0.1"), 0.1])
    assert [message.payload for message in exact.claim(2)] == ["0.1", Decimal("0.1")]
    assert "orders" in [info.name for info in queues().list_queues()]


def test_errors_are_those_of_pgqueue_and_of_django() -> None:
    missing = queue("missing")
    with transaction.atomic():
        for kind in (pgqueue.QueueNotFound, DatabaseError):
            with pytest.raises(kind, match="missing") as caught, transaction.atomic():
                missing.enqueue(1)
        with pytest.raises(pgqueue.QueueNotFound), transaction.atomic():
            missing.enqueue_copy([1])
        new_order()
    error = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(error, pgqueue.QueueNotFound)
    assert isinstance(error, DatabaseError)
    assert (str(error), error.sqlstate) == (str(caught.value), "PQ001")
    with pytest.raises(psycopg.DataError, match=r"payloads\[1\]"):
        queue("orders").enqueue_batch([1, "\0"])
    with pytest.raises(TypeError, match="payload: "):
        queue("orders").enqueue(Decimal(1))
    with transaction.atomic():
        with pytest.raises(pgqueue.QueueNotFound):
            missing.enqueue(1)
        with pytest.raises(DatabaseError, match="aborted"):
            queue("orders").enqueue(1)
        transaction.set_rollback(True)
    assert queue("orders").peek() == 1


def test_django_sees_the_statements(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[str] = []

    def wrapper(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        seen.append(sql)
        return execute(sql, params, many, context)

    caplog.set_level(logging.DEBUG, "django.db.backends")
    with CaptureQueriesContext(connection) as queries, connection.execute_wrapper(wrapper):
        queue("orders").enqueue({"order_id": 7})
    assert len(queries) == len(seen) == 1
    assert '{"order_id": 7}' in queries[0]["sql"]
    assert "pgqueue.enqueue(" in seen[0]
    assert "pgqueue.enqueue(" in caplog.text


# Consumers


@pytest.mark.parametrize("mode", ["lease", "receive"])
def test_the_work_of_the_handler_and_the_acknowledgement_are_one_transaction(mode: Any, shop: Shop) -> None:
    committed: list[int] = []
    attempts: list[int] = []

    def handle(delivery: pgqueue.Delivery) -> None:
        attempts.append(delivery.attempt)
        ship(delivery)
        transaction.on_commit(lambda: committed.append(shipments()))
        with failing():  # a savepoint
            ship(delivery)
        assert delivery.connection is connection.connection
        with shop.connect() as beside:
            assert value(beside, "select count(*) from shop_shipment") == 0
        if len(attempts) == 1:
            raise pgqueue.Retry(after=NOW)
        with pytest.raises(RuntimeError, match="durable"), transaction.atomic(durable=True):
            pass

    new_order()
    handled(consumer("orders", handle, mode=mode))
    assert (attempts, shipments()) == ([1, 2], 1)
    assert wait_for(lambda: committed) == [1]  # on_commit was called once, after the commit
    assert queue("orders").stats().inflight_messages == 0


def test_a_handler_that_fails_leaves_nothing() -> None:
    called: list[int] = []

    def swallow(delivery: pgqueue.Delivery) -> None:
        transaction.on_commit(lambda: called.append(1))
        ship(delivery)
        with pytest.raises(DatabaseError):
            queue("missing").enqueue(1)

    def mark(delivery: pgqueue.Delivery) -> None:
        transaction.on_commit(lambda: called.append(2))
        ship(delivery)
        transaction.set_rollback(True)

    queue("orders").alter_queue(max_attempts=1)
    for handler, error in ((ship, "do not fit"), (swallow, "aborted"), (mark, "rollback")):
        new_order(pieces=101 if handler is ship else 1)
        handled(consumer("orders", handler))
        letter = queue("orders").browse_dead_messages()[-1]
        assert error in (letter.last_error or "")
        assert (shipments(), called) == (0, [])


def test_a_decision_without_an_exception_keeps_the_work_and_its_hooks() -> None:
    called: list[int] = []

    def handle(delivery: pgqueue.Delivery) -> None:
        ship(delivery)
        transaction.on_commit(lambda: called.append(shipments()))
        delivery.reject("enough")

    new_order()
    handled(consumer("orders", handle))
    assert shipments() == 1
    assert wait_for(lambda: called) == [1]


def test_a_policy_works_in_the_transaction_of_its_decision() -> None:
    committed: list[int] = []

    def fail(_: pgqueue.Delivery) -> None:
        raise ValueError

    def decide(failure: pgqueue.Failure) -> pgqueue.Reject:
        assert failure.connection is connection.connection
        ship(failure.delivery)
        transaction.on_commit(lambda: committed.append(shipments()))
        if failure.delivery.message.payload["order_id"] == late.id:
            raise RuntimeError
        return pgqueue.Reject("too large")

    queue("orders").alter_queue(max_attempts=1)
    order, late = new_order(), new_order()
    handled(consumer("orders", fail, on_failure=decide), 2)
    assert (order.shipments.count(), late.shipments.count()) == (1, 0)
    assert wait_for(lambda: committed) == [1]
    assert len(queue("orders").browse_dead_messages()) == 2


def test_a_batch_is_one_transaction() -> None:
    sizes: list[int] = []

    def handle(deliveries: list[pgqueue.Delivery]) -> None:
        sizes.append(len(deliveries))
        for delivery in deliveries:
            ship(delivery)

    queue("orders").alter_queue(max_attempts=1)
    for pieces in (1, 101, 1):
        new_order(pieces)
    handled(consumer("orders", handle, batch_size=3, concurrency=1), 3)
    assert (sizes, shipments()) == ([3, 1, 1, 1], 2)
    assert len(queue("orders").browse_dead_messages()) == 1


def test_a_handler_whose_connection_breaks_is_called_again_for_the_same_attempt(shop: Shop) -> None:
    attempts: list[int] = []
    called: list[str] = []

    def handle(delivery: pgqueue.Delivery) -> None:
        attempts.append(delivery.attempt)
        order.shipments.create()
        if len(attempts) == 1:
            transaction.on_commit(lambda: called.append("of the transaction that was rolled back"))
            with shop.connect() as beside:
                pid = connection.connection.info.backend_pid
                beside.execute("select pg_terminate_backend(%s, 60000)", [pid])

    order = new_order()
    handled(consumer("orders", handle))
    assert (attempts, shipments(), called) == ([1, 1], 1, [])


def test_an_asynchronous_handler_has_the_transaction() -> None:
    from django_handlers import ship_async

    new_order()
    handled(consumer("orders", ship_async))
    assert shipments() == 1


def test_without_a_transaction_the_handler_has_the_connection_of_its_thread(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def handle(delivery: pgqueue.Delivery) -> None:
        assert delivery.connection is None
        with transaction.atomic():
            ship(delivery)
        pids.append(connections["default"].connection.info.backend_pid)
        with shop.connect() as beside:
            assert value(beside, "select count(*) from shop_shipment") == len(pids)
            beside.execute("select pg_terminate_backend(%s, 60000)", pids[-1:])  # The connection breaks while idle.

    pids: list[int] = []
    monkeypatch.setitem(connections.settings["default"], "CONN_MAX_AGE", None)
    new_order()
    new_order()
    handled(working := consumer("orders", handle, transactional=False, concurrency=1), 2)
    assert working.stats.failed == 0


@pytest.mark.parametrize("before", [True, False])
def test_a_handler_that_closes_the_connection_is_told_so(before: bool, caplog: pytest.LogCaptureFixture) -> None:
    def handle(delivery: pgqueue.Delivery) -> None:
        if before:
            connections["default"].close()
        ship(delivery)
        connections["default"].close()

    queue("orders").alter_queue(max_attempts=1)
    new_order()
    handled(consumer("orders", handle))
    (dead,) = queue("orders").browse_dead_messages()
    assert (dead.last_error or "").startswith(
        "RuntimeError: the handler has closed the connection of its transaction: connection.close() must not"
    )
    assert (shipments(), [record for record in caplog.records if record.name == "pgqueue.django"]) == (0, [])


def test_a_handler_that_writes_by_another_connection_is_warned_of(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    def read_elsewhere(delivery: pgqueue.Delivery) -> None:
        ship(delivery)
        shipments("other")

    def write(alias: str, _: pgqueue.Delivery) -> None:
        apps.get_model("shop", "Order").objects.using(alias).create(article="pens")
        connections[alias].close()

    texts = []
    for made in (
        consumer("orders", read_elsewhere),
        consumer("orders", partial(write, "other")),
        pgqueue.Consumer(shop.dsns["default"], "orders", partial(write, "default"), transactional=True),
    ):
        caplog.clear()
        new_order()
        handled(made)
        texts.append([record.getMessage() for record in caplog.records if record.name == "pgqueue.django"])
    assert texts[0] == []
    remedies = "Only what it writes to database 'default', on its own thread, does", "Use manage.py pgqueue_work"
    for found, alias, remedy in zip(texts[1:], ("other", "default"), remedies, strict=True):
        assert len(found) == 1
        assert f"of queue 'orders' writes by another connection, that of database '{alias}'" in found[0]
        assert remedy in found[0]


def test_the_check_names_models_that_are_written_elsewhere(shop: Shop, capsys: pytest.CaptureFixture[str]) -> None:
    call_command("check", databases=["default"])
    assert "pgqueue" not in capsys.readouterr().err
    shop.router.write_to = "other"
    call_command("check", databases=["default"])
    assert re.search(
        r"\(pgqueue.W001\) Models are written to other databases than 'default': .*", capsys.readouterr().err
    )


# The command


def test_a_worker_ends_when_its_queue_is_empty(caplog: pytest.LogCaptureFixture) -> None:
    queue("orders").alter_queue(max_attempts=2)  # the retry is due within a minute
    new_order()
    new_order(101)
    call_command("pgqueue_work", "orders", "shop.handlers:ship", "--until-empty", "--log-level", "warning")
    assert (shipments(), queue("orders").stats().dead_messages, queue("orders").peek()) == (1, 1, 0)
    assert {record.levelname for record in caplog.records if record.name.startswith("pgqueue")} <= {"WARNING", "ERROR"}
    logging.getLogger("pgqueue").setLevel(logging.NOTSET)


def test_a_consumer_is_refused_where_it_would_see_nothing() -> None:
    with transaction.atomic():
        new_order()
        with pytest.raises(transaction.TransactionManagementError, match="in tests use TransactionTestCase"):
            drain(consumer("orders", ship))
        transaction.set_rollback(True)


def test_options_and_handlers_of_the_command_are_checked() -> None:
    for words, error in (
        (["orders", "shop.handlers:ship", "--backend", "default"], "invalid --backend: it is for tasks"),
        (["--backend", "third"], "invalid --backend: 'third'; must be an alias of TASKS"),
        (["--backend", "other"], "invalid queue: none; TASKS['other'] names no QUEUES"),
        (["--mode", "lease"], "invalid --mode: it is for a handler"),
        (["missing", "shop.handlers:ship"], "queue 'missing' does not exist; the operation CreateQueue"),
        (["orders", "shop.handlers"], "must be MODULE:HANDLER"),
        (["orders", "shop.handler:ship"], "there is no module 'shop.handler'"),
        (["orders", "shop.handlers:send"], "has no 'send'"),
        (["orders", "shop.handlers:ship", "--database", "third"], "must be an alias of DATABASES: default, other"),
        (["orders", "shop.handlers:ship", "--visibility-timeout", "soon"], "is not a duration"),
        (["orders", "shop.handlers:ship", "--visibility-timeout", "1ms"], "must be from 1 s to 43200 s"),
        (["orders", "shop.handlers:ship", "--prefetch", "2"], "not with transactional"),
        (["orders", "shop.handlers:ship", "--mode", "receive", "--no-transaction"], "invalid --no-transaction"),
    ):
        with pytest.raises(CommandError, match=re.escape(error)):
            call_command("pgqueue_work", *words, stderr=(output := StringIO()))
        assert output.getvalue() == ""


# Migrations


def migrated(operation: Any, alias: str = "default", backwards: bool = False, **how: Any) -> list[str]:
    """Run an operation, or undo it. Returns the statements if it only collects them."""
    state = ProjectState()
    with connections[alias].schema_editor(**how) as editor:
        run = operation.database_backwards if backwards else operation.database_forwards
        run("shop", editor, state, state)
    return list(editor.collected_sql) if editor.collect_sql else []


def test_operations_create_alter_and_drop_a_queue() -> None:
    parcels = queue("parcels")
    timeout = timedelta(minutes=2)
    migrated(CreateQueue("parcels", visibility_timeout="2 min", max_attempts=7))
    assert (parcels.get_queue().visibility_timeout, parcels.get_queue().max_attempts) == (timeout, 7)
    alter = AlterQueue("parcels", max_attempts=9, reverse={"max_attempts": 7})
    migrated(AlterQueue("parcels", visibility_timeout=timeout))
    migrated(alter)
    assert (parcels.get_queue().visibility_timeout, parcels.get_queue().max_attempts) == (timeout, 9)
    migrated(alter, backwards=True)
    assert parcels.get_queue().max_attempts == 7
    drop = DropQueue("parcels", reverse={"max_attempts": 3})
    migrated(drop)
    with pytest.raises(pgqueue.QueueNotFound):
        parcels.get_queue()
    migrated(drop, backwards=True)
    assert parcels.get_queue().max_attempts == 3
    migrated(CreateQueue("parcels"), backwards=True)
    with pytest.raises(pgqueue.QueueNotFound):
        parcels.get_queue()
    settings = {"max_attempts": 9, "reverse": {"max_attempts": 7}}
    assert (*alter.deconstruct(),) == ("AlterQueue", ("parcels",), settings)
    assert not AlterQueue("parcels", max_attempts=9).reversible
    assert not DropQueue("parcels").reversible


def test_a_migration_is_refused_before_it_runs_if_a_setting_is_unknown() -> None:
    for operation, settings in ((CreateQueue, {"retries": 3}), (AlterQueue, {"dedicated": True})):
        with pytest.raises(TypeError, match=rf"invalid setting '{next(iter(settings))}' of .*max_attempts"):
            operation("parcels", **settings)


def test_operations_show_their_statements_and_obey_the_routers() -> None:
    (statement,) = migrated(CreateQueue("parcels", max_attempts=7), collect_sql=True)
    assert re.search(r"pgqueue.create_queue\('parcels'::text, max_attempts => 7::int\);$", statement)
    only = CreateQueue("parcels", hints={"only": "other"})
    migrated(only)
    migrated(only, "other")
    assert "parcels" not in [info.name for info in queues().list_queues()]
    migrated(only, "other", backwards=True)
    assert "parcels" not in [info.name for info in queues("other").list_queues()]


def test_pgqueue_is_installed_once_and_can_be_removed(shop: Shop) -> None:
    new_order(using="other")
    migrated(CreatePgqueue(), "other")  # changes nothing
    assert queue("orders", "other").peek() == 1
    migrated(CreatePgqueue(), "other", backwards=True)
    with pytest.raises(pgqueue.NotInstalled), transaction.atomic("other"):
        queue("orders", "other").peek()
    with pytest.raises(DatabaseError):
        queue("orders", "other").peek()
    with shop.connect("other") as beside:
        pgqueue.install(beside)
        beside.execute("create view watched as select name from pgqueue.queues")
        with pytest.raises(DatabaseError, match="depend on it: view watched"):
            migrated(CreatePgqueue(), "other", backwards=True)
        beside.execute("drop view watched")
    migrated(CreatePgqueue(), "other", backwards=True)
    migrated(CreatePgqueue(), "other")
    queue("orders", "other").create_queue(max_attempts=3)


# Operation


def test_dead_letters_are_no_rows_of_a_dump() -> None:
    out = StringIO()
    call_command("dumpdata", "pgqueue", stdout=out)
    assert out.getvalue().strip() == "[]"  # Django 6 ends the line


def test_the_health_check_tells_what_is_wrong(shop: Shop) -> None:
    client = Client()
    assert client.get("/health/").json()["queues"]["orders"]["ready"] == 0
    new_order()
    with shop.connect() as beside:
        beside.execute("update pgqueue.messages set enqueued_at = enqueued_at - interval '2 minutes'")
    answer = client.get("/health/")
    assert (answer.status_code, answer.json()["status"]) == (503, "error")
    assert "a ready message of queue orders was sent 1" in answer.json()["errors"][0]
    queue("orders").purge_queue()
    assert client.get("/health/").status_code == 200
    queue("orders").drop_queue()
    try:
        answer = client.get("/health/")
    finally:
        queue("orders").create_queue()
    assert (answer.status_code, "orders" in answer.json()["errors"][0]) == (503, True)


def test_the_health_check_answers_without_a_database(monkeypatch: pytest.MonkeyPatch) -> None:
    connections.close_all()
    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", True)
    monkeypatch.setitem(connections.settings["default"], "HOST", "/nowhere")
    answer = Client().get("/health/")
    assert (answer.status_code, answer.json()["errors"]) == (503, ["OperationalError"])


@pytest.fixture
def letters() -> list[int]:
    """The ids of three dead letters, with an expensive, a cheap and a binary content."""
    orders = queue("orders")
    orders.enqueue(Jsonb('{"price": 12345678901234567890.5}', str), headers={"tenant": "blue"})
    orders.enqueue({"price": 1})
    orders.enqueue(body=b"\0")
    found = orders.claim(3)
    failures = {"pgqueue.failures": [{"attempt": 1, "exception_type": "CostError"}]}
    for message in found:
        orders.reject(message.id, message.claim_token, f"error of {message.id}", failures)
    return [message.id for message in found]


class Clerk:
    """A user of the admin with the given permissions, whose browser sends the forms that it gets."""

    def __init__(self, *permissions: str) -> None:
        users = apps.get_model("auth", "User").objects
        users.filter(username="clerk").delete()
        user = users.create_user("clerk", is_staff=True)
        own = apps.get_model("auth", "Permission").objects.filter(content_type__app_label="pgqueue")
        user.user_permissions.set(own.filter(codename__in=[f"{name}_deadletter" for name in permissions]))
        self._client = Client(enforce_csrf_checks=True)
        self._client.force_login(user)

    def get(self, address: str = "/admin/pgqueue/deadletter/") -> Any:
        return self._client.get(address)

    def post(self, address: str = "/admin/pgqueue/deadletter/?queue=orders", token: str = "", **fields: Any) -> Any:
        """The page after a form was sent, with the token of this browser."""
        found = re.search(r'name="csrfmiddlewaretoken" value="(\w+)"', self.get().content.decode())
        fields["csrfmiddlewaretoken"] = token or (found[1] if found else "")
        return self._client.post(address, fields, follow=True)


def text(page: Any) -> str:
    return html.unescape(re.sub(r"\s+", " ", re.sub("<[^>]*>", "", page.content.decode())))


def test_the_admin_finds_dead_letters(letters: list[int]) -> None:
    clerk = Clerk("view")
    assert "Queues with dead letters: orders (3)" in text(clerk.get())
    found = {"": letters, "BLUE": letters[:1], f"error of {letters[1]}": letters[1:2], "no such": []}
    for searched, expected in found.items():
        page = clerk.get(f"/admin/pgqueue/deadletter/?queue=orders&q={searched}").content.decode()
        assert [int(each) for each in re.findall(r'name="ids" value="(\d+)"', page)] == expected
    letter = text(clerk.get(f"/admin/pgqueue/deadletter/default/orders/{letters[0]}/"))
    assert "12345678901234567890.5" in letter
    assert 'Failures 1. CostError: Headers{ "tenant": "blue" }' in letter
    assert clerk.get(f"/admin/pgqueue/deadletter/default/orders/{letters[2]}/").status_code == 200
    for address in (f"default/orders/{letters[2] + 1}", f"third/orders/{letters[0]}", f"default/missing/{letters[0]}"):
        assert clerk.get(f"/admin/pgqueue/deadletter/{address}/").status_code == 404


def test_the_admin_has_pages_of_dead_letters() -> None:
    orders = queue("orders")
    orders.enqueue_batch(list(range(60)))
    for message in orders.claim(60):
        orders.reject(message.id, message.claim_token)
    clerk = Clerk("view")
    ids: list[str] = []
    for search in ("", "&q=rejected"):
        address: str | None = f"?queue=orders{search}"
        while address:
            page = clerk.get(f"/admin/pgqueue/deadletter/{address}").content.decode()
            ids += re.findall(r'name="ids" value="(\d+)"', page)
            found = re.search(r'href="/admin/pgqueue/deadletter/(\?[^"]*after=\d+)"', page)
            address = found and found[1].replace("&amp;", "&")
    assert len(ids) == 120
    assert len(set(ids)) == 60


def test_the_admin_sends_dead_letters_again_and_deletes_them(letters: list[int]) -> None:
    clerk = Clerk("view", "change", "delete")
    assert "No dead letter is selected" in text(clerk.post(action="redrive"))
    assert "1 dead letter sent again" in text(clerk.post(action="redrive", ids=[letters[1]]))
    assert "Delete 1 dead letter of queue orders?" in text(clerk.post(action="delete", ids=[letters[2]]))
    assert len(queue("orders").browse_dead_messages()) == 2
    assert "1 dead letter deleted" in text(clerk.post(action="delete", ids=[letters[2]], confirmed="yes"))
    address = f"/admin/pgqueue/deadletter/default/orders/{letters[0]}/"
    assert "This is no JSON" in text(clerk.post(address, action="edit", payload="{"))
    new = '{"price": 22345678901234567890.25}'
    assert "Sent as message" in text(clerk.post(address, action="edit", payload=new))
    assert "No queue has dead letters" in text(clerk.get())
    one, other = queue("orders", json_loads=bytes.decode).claim(2)
    assert one.id == letters[1]
    assert [other.payload, other.headers] == [new, '{"tenant": "blue"}']
    new_order()
    (message,) = queue("orders").claim()
    queue("orders").reject(message.id, message.claim_token)
    clerk.post(action="redrive_all")
    log = list(apps.get_model("admin", "LogEntry").objects.values_list("change_message", flat=True))
    assert len([line for line in log if "of queue orders" in line]) == 4
    assert any("all 1 sent again, of queue orders" in line for line in log)


def test_the_admin_does_not_edit_a_task_whose_result_would_be_lost() -> None:
    orders, task_id = queue("orders"), uuid4()
    letter = orders.enqueue({"task": "shop.tasks.add"}, message_id=task_id)
    orders.create_result(letter, task_id)
    (message,) = orders.claim()
    orders.reject(letter, message.claim_token)
    clerk = Clerk("view", "change")
    address = f"/admin/pgqueue/deadletter/default/orders/{letter}/"
    assert "<textarea" not in clerk.get(address).content.decode()
    assert clerk.post(address, action="edit", payload="1").status_code == 403


def test_the_admin_obeys_permissions_and_tokens(letters: list[int]) -> None:
    address = f"/admin/pgqueue/deadletter/default/orders/{letters[0]}/"
    assert Clerk().get().status_code == 403
    reader = Clerk("view")
    for page in (reader.get(address), reader.get("/admin/pgqueue/deadletter/?queue=orders")):
        assert "<button" not in page.content.decode().partition('id="content-main"')[2]
    for action in ("redrive", "redrive_all", "delete", "edit"):
        assert reader.post(address, action=action, payload="1").status_code == 403
        assert reader.post(action=action, ids=letters).status_code in (403, 404)
    sender = Clerk("view", "change")
    assert sender.post(action="delete", ids=letters, confirmed="yes").status_code == 403
    assert sender.post(action="redrive", ids=letters, token="x" * 64).status_code == 403
    assert len(queue("orders").browse_dead_messages()) == 3
    assert "3 dead letters sent again" in text(sender.post(action="redrive_all"))


# The example


def test_the_tests_of_the_example_pass(shop: Shop) -> None:
    with shop.manage("test", "--noinput", "-v0") as tests:
        assert tests.wait(PATIENCE) == 0
