"""Bodies of requests: valid JSON, and what is refused before it reaches PostgreSQL."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import threading
import tracemalloc
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx
import psycopg
import pytest
import pytest_asyncio
from clients import PATIENCE
from served import ACCESSES, ADMIN, HASH, needs

if TYPE_CHECKING:
    from pgqueue._tasks import end_tasks
    from pgqueue.http import Limits, Service, Settings, User, create_app, memory
    from pgqueue.http.app import Application
    from pgqueue.http.databases import Databases
    from pgqueue.http.decoding import DEPTH_LIMIT, DIGITS_LIMIT, VALUES_LIMIT, decode
    from pgqueue.http.direct.structs import DirectMessage, body_of
    from pgqueue.http.edge import SMALL_BODY_LIMIT
    from pgqueue.http.errors import ApiError
    from pgqueue.http.page.rendering import message_ids
    from pgqueue.http.security.rights import parse_rights

    USERS = {
        ADMIN[0]: User(HASH),
        "nobody": User(HASH, parse_rights(["reader:x"])),
        "of-one-queue": User(HASH, parse_rights(["producer:s/d/q"])),
        **{f"the-{each}": User(HASH, parse_rights([f"{each}:*"])) for each in ACCESSES},
    }
    SETTINGS = Settings("", {"s": Service("s", "", ("d",))}, USERS, limits=Limits(request_seconds=600))

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),  # the application that the tests share belongs to an event loop
    pytest.mark.filterwarnings("ignore:The test .* is marked with '@pytest.mark.asyncio'"),  # those without a loop
]

# Errors of a server whose databases cannot be reached: every request that passes its checks gets 503.

DIRECT, MANAGED = "/v1/queues/q/enqueue", "/managed-services/s/queues/q/messages"


@pytest.fixture(scope="module")
def app() -> Application:
    """The application for all tests: to make its routes takes longer than most requests."""
    return create_app(SETTINGS, "controller")


@pytest_asyncio.fixture(loop_scope="module")
async def web(app: Application, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[httpx.AsyncClient]:
    def unreachable(*_: object, **__: object) -> None:
        raise psycopg.OperationalError

    monkeypatch.setattr(Databases, "target", unreachable)
    monkeypatch.setattr(Databases, "control", unreachable)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x", auth=ADMIN) as client:
        yield client
    await end_tasks([*app.state.context.background_tasks])  # They would open a pool, which no test closes.


async def refusal(web: httpx.AsyncClient, path: str, body: str | bytes, **headers: str) -> tuple[int, dict[str, Any]]:
    answer = await web.post(path, content=body, headers={"Content-Type": "application/json"} | headers)
    error = answer.json()["error"]
    assert set(error) == {"code", "message", "field", "value", "limit"}
    return answer.status_code, error


@pytest.mark.parametrize("number", ["1e131071", "1E-16382"])
async def test_a_body_with_too_many_digits_is_refused_before_postgresql_writes_them(
    web: httpx.AsyncClient, number: str
) -> None:
    for path in (DIRECT, MANAGED):
        text = f'{{"messages": [{{"payload": {{}}}}, {{"payload": {{"x": [{", ".join([number] * 10_000)}]}}}}]}}'
        status, error = await refusal(web, path, text)
        assert (status, error["code"], error["field"]) == (413, "body_too_large", "body")
        assert (error["value"], error["limit"]) == (f"over {DIGITS_LIMIT} digits", f"{DIGITS_LIMIT} digits")
        text = text.replace(number, f'"\\"{number}"')  # in a string
        assert (await refusal(web, path, text))[0] == 503


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ('{"max_messages": NaN}', "NaN"),
        ('{"messages": [{"payload": [-Infinity]}]}', "-Infinity"),
        ('{"messages": [{"payload": 1,}]}', "line 1 column 29"),
        ('{"messages": [{"payload": "\x01"}]}', "control character"),
        ('{"messages": [{"payload": ["\\"' + "1e131071, " * 10_000, "Unterminated string"),
        ("\ufeff\ufeff{}", "BOM"),
        ("[" * 100_000, "nested too deep"),
        (b'{"claimed_by": "\xff"}', "UTF-8"),
        ("{}".encode("utf-16"), "UTF-8"),
    ],
    ids=range(9),
)
async def test_invalid_json_is_refused_with_the_reason(web: httpx.AsyncClient, body: str | bytes, said: str) -> None:
    for path in (DIRECT, MANAGED, "/v1/queues/q/claim"):
        status, error = await refusal(web, path, body)
        assert (status, error["code"], error["field"]) == (400, "malformed_json", "body")
        assert said in error["message"]


async def test_a_long_field_name_is_shortened_in_the_error(web: httpx.AsyncClient) -> None:
    status, error = await refusal(web, DIRECT, f'{{"messages": [{{"payload": 1}}], "{"x" * 10_000}": 1}}')
    assert (status, error["field"]) == (422, "x" * 100 + "…")
    assert len(error["message"]) < 200


@pytest.mark.parametrize("filler", ["", '"' + "[{" * 40_000 + '", '], ids=["small", "large"])
async def test_json_is_refused_over_its_depth(web: httpx.AsyncClient, filler: str) -> None:
    for path in (DIRECT, MANAGED):
        for depth, expected in (
            (DEPTH_LIMIT, (503, "database_unavailable")),
            (DEPTH_LIMIT + 1, (400, "malformed_json")),
        ):
            inner = depth - 4  # the body, the list of messages, the message, and the payload
            payload = f'{{"x": [{filler}{"[" * (inner - 1)}{"]" * (inner - 1)}]}}'
            status, error = await refusal(web, path, f'{{"messages": [{{"payload": {payload}}}]}}')
            assert (status, error["code"]) == expected
    assert (error["field"], error["value"], error["limit"]) == ("body", "over 500 levels", "500 levels")


async def test_a_body_with_too_many_values_is_refused_before_it_is_parsed(web: httpx.AsyncClient) -> None:
    body = f'{{"messages": [{{"payload": [{"1e5," * VALUES_LIMIT}1]}}]}}'
    for path in (DIRECT, MANAGED):
        tracemalloc.start()
        try:
            status, error = await refusal(web, path, body)
            assert tracemalloc.get_traced_memory()[1] < 5 * len(body)
        finally:
            tracemalloc.stop()
        assert (status, error["code"], error["field"]) == (413, "body_too_large", "body")
        assert (error["value"], error["limit"]) == (f"over {VALUES_LIMIT} values", f"{VALUES_LIMIT} values")


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (f'{{"messages": [{{"body": "{"x" * 3_000_000}"}}]}}', 503),
        (f'{{"messages": [{{"payload": [1e5, "{chr(92) * 3_000_000}"]}}]}}', 503),
        (f'{{" - at `${".x" * 1_500_000}": 1}}', 422),
    ],
    ids=["base64", "escapes", "name"],
)
async def test_a_check_of_a_large_body_takes_little_memory(web: httpx.AsyncClient, body: str, status: int) -> None:
    tracemalloc.start()
    try:
        found, _ = await refusal(web, DIRECT, body)
        assert tracemalloc.get_traced_memory()[1] < 7 * len(body)
    finally:
        tracemalloc.stop()
    assert found == status


@pytest.mark.parametrize(
    ("end", "status", "code", "said"),
    [
        ("}]}", 503, "database_unavailable", "try again"),
        ("}]", 400, "malformed_json", "truncated"),
        ('}, {"payload": "\\ud800 and more"}]}', 422, "invalid", "Unicode"),
    ],
    ids=["valid", "truncated", "surrogate"],
)
async def test_a_large_body_is_not_copied_as_text(
    web: httpx.AsyncClient, end: str, status: int, code: str, said: str
) -> None:
    """A text that has a character outside of the basic plane takes four bytes for each character."""
    body = f'{{"messages": [{{"payload": "\U0001f600{"x" * 3_000_000}"{end}'.encode()
    tracemalloc.start()
    try:
        found, error = await refusal(web, DIRECT, body)
        assert tracemalloc.get_traced_memory()[1] < 4 * len(body)
    finally:
        tracemalloc.stop()
    assert (found, error["code"], said in error["message"]) == (status, code, True), error


VALUES = 40_000 * "1e5,"


@pytest.mark.parametrize(
    ("path", "body"),
    [(DIRECT, f'{{"messages": [{{"payload": [{VALUES}1]}}]}}'), ("/logout", "x=" + 40_000 * "%41")],
    ids=["json", "form"],
)
async def test_other_requests_are_answered_while_a_large_body_is_read(
    web: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, path: str, body: str
) -> None:
    """A thread counts and parses it."""
    begun, released = threading.Event(), threading.Event()

    class Held(ThreadPoolExecutor):
        def submit(self, function: Callable[..., Any], /, *arguments: Any, **more: Any) -> Future[Any]:
            def work() -> Any:
                begun.set()
                assert released.wait(PATIENCE)
                return function(*arguments, **more)

            return super().submit(work)

    kind = "application/x-www-form-urlencoded" if path == "/logout" else "application/json"
    with Held() as held:
        monkeypatch.setattr(memory, "_THREADS", held)
        async with asyncio.timeout(PATIENCE):
            large = asyncio.create_task(web.post(path, content=body, headers={"Content-Type": kind}))
            while not begun.is_set():
                assert not large.done()
                await asyncio.sleep(0.001)
            assert (await web.get("/healthz")).status_code == 200
            assert not large.done()
            released.set()
            assert (await large).status_code == (303 if path == "/logout" else 503)


def test_a_form_names_at_most_as_many_messages_as_a_request_of_the_api() -> None:
    assert message_ids("1," * 9_999 + "7") == [1] * 9_999 + [7]
    with pytest.raises(ApiError, match=r"id has 10001 messages; must be at most 10000 messages"):
        message_ids("1," * 10_000 + "1")


async def test_the_bodies_of_all_requests_share_a_limit_of_memory(
    web: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, released = asyncio.Event(), asyncio.Event()

    @asynccontextmanager
    async def waiting(*_: object, **__: object) -> AsyncIterator[None]:
        entered.set()
        await released.wait()
        if released.is_set():
            raise psycopg.OperationalError
        yield

    monkeypatch.setattr(Databases, "target", waiting)
    body = f'{{"messages": [{{"payload": "{"x" * 100_000}"}}]}}'
    one = len(body)
    monkeypatch.setattr(memory, "BODIES_LIMIT", one * 3 // 2)
    first = asyncio.create_task(refusal(web, DIRECT, body))
    await asyncio.wait_for(entered.wait(), PATIENCE)
    async with asyncio.timeout(PATIENCE):
        answer = await web.post(DIRECT, content=body, headers={"Content-Type": "application/json"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["field"]) == (503, "overloaded", "body")
    assert error["limit"] == f"{one * 3 // 2 * 4 // 5} bytes for requests of a user"
    assert answer.headers["Retry-After"] == "1"
    released.set()
    assert (await first)[1]["code"] == "database_unavailable"
    assert (await refusal(web, DIRECT, body))[1]["code"] == "database_unavailable"


async def test_a_response_that_exceeds_the_memory_is_refused_on_every_route(
    web: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(memory, "BODIES_LIMIT", 10_000)
    answer = await web.get("/openapi.json")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "overloaded")
    assert answer.headers["Retry-After"] == "1"
    assert not [each for each in caplog.records if each.levelname == "ERROR"]


async def test_a_path_is_that_of_a_route_as_it_stands(web: httpx.AsyncClient) -> None:
    assert [(await web.get(f"/openapi{end}")).status_code for end in (".json", "-json", ".json/")] == [200, 404, 404]


async def test_the_queue_of_tasks_is_hidden_from_the_page(web: httpx.AsyncClient) -> None:
    queue = SETTINGS.tasks.queue
    place = {"service": "s", "database": "d", "name": queue}
    for page in ("", "/schedules", "/settings", "/send", "/purge_queue", "/drop_queue"):
        assert (await web.get(f"/queue{page}", params=place)).status_code == 404, page
    assert (await web.post("/queue/drop_queue", params=place)).status_code == 404
    answer = await web.post("/create", data={"database": "s/d", "name": queue})
    assert answer.status_code == 422
    assert "is reserved" in answer.text


@pytest.mark.parametrize("path", [DIRECT, MANAGED])
async def test_half_of_a_surrogate_pair_is_named(web: httpx.AsyncClient, path: str) -> None:
    good = '{"payload": {}}, '
    status, error = await refusal(web, path, f'{{"messages": [{6 * good}{{"payload": {{"a": ["\\ud800"]}}}}]}}')
    assert (status, error["code"], error["field"]) == (422, "invalid", "messages[6].payload")
    assert error["limit"] == "a string of Unicode characters"


async def test_a_compressed_body_is_refused_with_the_remedy(web: httpx.AsyncClient) -> None:
    for headers in ({}, {"Content-Encoding": "gzip"}):
        status, error = await refusal(web, DIRECT, gzip.compress(b'{"messages": [{"payload": 1}]}'), **headers)
        assert (status, error["code"]) == (415, "unsupported_encoding")
        assert "without compression" in error["message"]


@pytest.mark.parametrize("headers", [{}, {"Idempotency-Key": "key"}], ids=["direct", "keyed"])
async def test_the_body_of_a_request_that_the_user_may_not_make_is_not_read(
    web: httpx.AsyncClient, headers: dict[str, str]
) -> None:
    read = False

    async def parts() -> AsyncIterator[bytes]:
        nonlocal read
        read = True
        yield b"{}"

    async def call(user: str, queue: str) -> tuple[int, bool]:
        nonlocal read
        read = False
        path = route.removeprefix("POST ").format(service_id="s", queue_name=queue)
        given = {"Content-Type": "application/json"} | headers
        answer = await web.post(path, content=parts(), headers=given, auth=(user, ADMIN[1]))
        return answer.status_code, read

    needed = needs()
    routes = [each for each in needed if re.match("POST /(v1|managed-services)/.*({queue_name}|/publish)", each)]
    assert len(routes) > 10
    for route in routes:
        assert await call("nobody", "q") == (403 if route.endswith("/publish") else 404, False), route
        if route.endswith("/publish"):
            assert await call("of-one-queue", "q") == (403, False)
        if "{queue_name}" in route:
            assert await call(ADMIN[0], "Q") == (404, False), route
        for access in ACCESSES:
            status, was_read = await call(f"the-{access}", "q")
            if access not in needed[route].accesses:
                assert (status, was_read) == (403, False), (route, access)
            else:
                assert status != 403, (route, access)


@pytest.mark.parametrize("path", ["/v1/queues/q/claim", "/managed-services/s/queues", MANAGED + "/x"])
async def test_only_routes_that_send_batches_take_large_bodies(web: httpx.AsyncClient, path: str) -> None:
    for length in (None, str(SMALL_BODY_LIMIT + 1)):  # chunked, and announced

        async def parts() -> AsyncIterator[bytes]:
            yield b" " * SMALL_BODY_LIMIT
            yield b" "

        given = {"Content-Type": "application/json"} | ({} if length is None else {"Content-Length": length})
        answer = await web.post(path, content=parts(), headers=given)
        if path != MANAGED + "/x" or length:  # without a route, a body is not read
            assert (answer.status_code, answer.json()["error"]["limit"]) == (413, "2097152 bytes")


@pytest.mark.parametrize("text", ["30.0", "3e1", "300E-1", "0.0", "-0", "-0.0", "0e5", "30.000000000000000000000"])
def test_an_integer_may_be_written_in_any_json_form(text: str) -> None:
    message = decode(DirectMessage, b'{"payload": 1, "delay_seconds": %b}' % text.encode())
    assert message.delay_seconds in (0, 30)


TOKEN = "00000000-0000-0000-0000-000000000000"
CLAIMED: dict[str, Any] = {"id": 1, "claim_token": TOKEN}
CREATE: dict[str, Any] = {"name": "q", "cron": "x"}
CREATE_QUEUE: dict[str, Any] = {"name": "q"}
PUBLISH, CLAIM_ANY, QUEUES = "/v1/queues/publish", "/v1/queues/claim_any", "/managed-services/s/queues"
BASE64 = "of the form ^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"
EITHER = "null if body is given: a message has exactly one of the two"
KNOWN = "one of payload, delay_seconds, headers, expires_in_seconds, message_id, body, dedup_key, on_duplicate"
NUL, WITHOUT_NUL = "x\0", r"of the form ^[^\x00]*$"
SHORT, LONG_KEY, WHOLE = "at least 1 characters long", "at most 255 characters long", "a whole number"
MOMENT = "a timestamp with an offset, such as 2026-01-31T12:00:00Z"
PLAIN: dict[str, Any] = {"payload": 1}
OBJECT: dict[str, Any] = {"payload": {}}
IN_BATCH = "messages[1]."
MANY = [f"q{number}" for number in range(101)]
NAMES = [([], "at least 1"), (MANY, "at most 100"), (["q", "q"], "each name"), ([None], "a string"), (None, "a list")]
TEXTS = [("enqueue", f"{IN_BATCH}dedup_key"), ("enqueue", f"{IN_BATCH}group_key"), (PUBLISH, "topic")]
# The verb or the path, the body without the field, the field, its least and its greatest value.
RANGES: list[tuple[str, dict[str, Any], str, int, int]] = [
    ("claim", {}, "max_messages", 1, 100),
    ("claim", {}, "wait_seconds", 0, 20),
    *((verb, rest, "visibility_timeout_seconds", 1, 43200) for verb, rest in (("claim", {}), ("extend", CLAIMED))),
    ("nack", CLAIMED, "delay_seconds", 0, 43200),
    ("ack", CLAIMED, "id", 1, 2**63 - 1),
    ("redrive", {}, "max_messages", 1, 100_000),
    ("create_schedule", CREATE, "priority", 0, 9),
    ("enqueue", PLAIN, f"{IN_BATCH}priority", 0, 9),
    ("enqueue", PLAIN, f"{IN_BATCH}expires_in_seconds", 0, 315_576_000),
    *((path, OBJECT, f"{IN_BATCH}delay_seconds", 0, 43200) for path in ("enqueue", MANAGED)),
    (QUEUES, CREATE_QUEUE, "visibility_timeout_seconds", 1, 43200),
    (QUEUES, CREATE_QUEUE, "max_attempts", 1, 100),
]
# The verb or the path, the body without the field, the field, a value that it may have, one that it may not, and how
# the limit begins that the error tells.
LIMITS: list[tuple[str, dict[str, Any], str, Any, Any, str]] = [
    *((path, rest, field, least, least - 1, f"at least {least}") for path, rest, field, least, _ in RANGES),
    *((path, rest, field, most, most + 1, f"at most {most}") for path, rest, field, _, most in RANGES),
    ("claim", {}, "claimed_by", "x" * 256, "x" * 257, "at most 256 characters long"),
    ("nack", CLAIMED, "error", "x" * 10_000, "x" * 10_001, "at most 10000 characters long"),
    ("claim", {}, "claimed_by", None, 1, "a string"),
    ("claim", {}, "claimed_by", "é", "\ud800", "a string of Unicode characters"),
    *((CLAIM_ANY, {}, "queue_names", ["q"], bad, limit) for bad, limit in NAMES),
    ("ack", CLAIMED, "id", 1, "1", WHOLE),
    *(("ack", CLAIMED, "claim_token", TOKEN, bad, "a UUID") for bad in ("token", "x" * 36, None)),
    ("ack_batch", {"claim_token": TOKEN}, "ids", [1], 1, "a list"),
    ("ack_batch", {"claim_token": TOKEN}, "ids", [1] * 100, [1] * 101, "at most 100 items long"),
    ("ack_claims", {}, "claims", [CLAIMED] * 100, [], "at least 1 items long"),
    *(("reschedule", {"id": 1}, "due_at", None, bad, MOMENT) for bad in ("2026-01-31T12:00:00", "soon", 1769857200)),
    ("redrive", {}, "ids", [1], [], "at least 1 items long"),
    ("redrive", {}, "ids", [1] * 10_000, [1] * 10_001, "at most 10000 items long"),
    ("purge_dead_messages", {}, "ids", [1], [0], "at least 1"),
    ("create_schedule", CREATE, "cron", "x" * 200, "x" * 201, "at most 200 characters long"),
    ("create_schedule", CREATE, "name", "x" * 255, "", SHORT),
    *(
        ("create_schedule", CREATE, field, "x", NUL, WITHOUT_NUL)
        for field in ("name", "cron", "time_zone", "group_key")
    ),
    ("create_schedule", CREATE, "group_key", None, "", SHORT),
    ("create_schedule", CREATE, "headers", {}, [], "a JSON object"),
    ("enqueue", {}, "messages", [PLAIN] * 100, [PLAIN] * 101, "at most 100 items long"),
    ("enqueue", {}, "messages", [PLAIN], [], "at least 1 items long"),
    ("enqueue", {}, "messages", [PLAIN], [1], "a JSON object"),
    ("enqueue", PLAIN, f"{IN_BATCH}headers", {}, [], "a JSON object"),
    ("enqueue", PLAIN, f"{IN_BATCH}unknown", None, 1, KNOWN),
    ("enqueue", {"body": "AA=="}, f"{IN_BATCH}payload", None, 1, EITHER),
    *(("enqueue", {}, f"{IN_BATCH}body", "AAA=", bad, BASE64) for bad in ("AA", "A\nAA", "AA==AA==")),
    ("enqueue", PLAIN, f"{IN_BATCH}dedup_key", "x" * 255, "x" * 256, LONG_KEY),
    ("enqueue", PLAIN, f"{IN_BATCH}on_duplicate", "replace", "skip", "keep or replace"),
    ("enqueue", PLAIN, f"{IN_BATCH}message_id", TOKEN, "order-1", "a UUID"),
    (PUBLISH, PLAIN, "topic", "x" * 255, "x" * 256, LONG_KEY),
    *((path, PLAIN, field, "x", "", SHORT) for path, field in TEXTS),
    *((path, PLAIN, field, "x", NUL, WITHOUT_NUL) for path, field in TEXTS),
    (PUBLISH, PLAIN, "topic", "x", None, "a string"),
    (PUBLISH, PLAIN | {"topic": "x"}, "base_topics", ["x"], [NUL], WITHOUT_NUL),
    (PUBLISH, PLAIN | {"topic": "x"}, "base_topics", ["x"] * 100, ["x"] * 101, "at most 100 items long"),
    (PUBLISH, PLAIN | {"topic": "x"}, "base_topics", None, [""], SHORT),
    (QUEUES, {}, "name", "a" * 128, "a" * 129, "at most 128 characters long"),
    (QUEUES, {}, "name", "z-_9", "Z", "of the form ^[a-z0-9_-]+$"),
    (QUEUES, {}, "name", "-", "", SHORT),
    *((QUEUES, CREATE_QUEUE, "max_attempts", 2, bad, WHOLE) for bad in (2.5, True, "4")),
    (QUEUES, CREATE_QUEUE, "dlq_enabled", False, "no", "true or false"),
    (QUEUES, CREATE_QUEUE, "max_attempt", None, 1, "one of name, database_name"),
    *((MANAGED, {}, f"{IN_BATCH}payload", {}, bad, "a JSON object") for bad in ("text", 1, None, [0])),
    (MANAGED, {}, "messages", [OBJECT] * 100, [OBJECT] * 101, "at most 100 items long"),
]


@pytest.mark.parametrize(("path", "rest", "field", "good", "bad", "limit"), LIMITS, ids=range(len(LIMITS)))
async def test_a_value_at_its_limit_is_accepted_and_one_beyond_is_named(
    web: httpx.AsyncClient, path: str, rest: dict[str, Any], field: str, good: Any, bad: Any, limit: str
) -> None:
    """A request with valid values gets 503: no database can be reached."""

    async def answer(value: Any) -> tuple[int, dict[str, Any]]:
        content = rest | {field.removeprefix(IN_BATCH): value}
        body = {"messages": [OBJECT, content]} if field.startswith(IN_BATCH) else content
        return await refusal(web, path if path.startswith("/") else f"/v1/queues/q/{path}", json.dumps(body))

    status, error = await answer(bad)
    assert (status, error["code"], error["limit"].startswith(limit)) == (422, "invalid", True), error
    assert error["field"].startswith(field)
    is_unknown = limit.startswith("one of")
    said = "unknown" if is_unknown else "invalid"
    assert error["message"] == f"{error['field']} is {said}; must be {error['limit']}"
    assert is_unknown or (await answer(good))[0] == 503


ID, LIST = f"a whole number from 1 to {2**63 - 1}", "a list of 1 to 100 items"


async def test_the_error_of_a_missing_argument_says_what_is_expected(web: httpx.AsyncClient) -> None:
    for method, path, body, field, limit in (
        ("POST", "/v1/queues/q/enqueue", "", "body", "a JSON object"),
        ("POST", "/v1/queues/q/enqueue", "{}", "messages", LIST),
        ("POST", "/v1/queues/q/ack", "{}", "id", ID),
        ("POST", "/v1/queues/q/ack", '{"id": 1}', "claim_token", "a UUID"),
        ("POST", "/v1/queues/q/ack_batch", "{}", "ids", LIST),
        ("POST", MANAGED, '{"messages": [{}]}', "messages[0].payload", "a JSON object"),
        ("POST", "/managed-services/s/queues", "{}", "name", "a string of the form ^[a-z0-9_-]+$"),
        ("GET", MANAGED, None, "task_id", "a UUID"),
    ):
        json_type = {"Content-Type": "application/json"}
        answer = await web.request(method, path, content=body, headers=json_type)
        assert answer.status_code == 422
        said = f"{field} is missing; must be {limit}"
        found = {"code": "invalid", "message": said, "field": field, "value": None, "limit": limit}
        assert answer.json()["error"] == found


@pytest.mark.parametrize("text", ["9007199254740993.0", "9.007199254740993e15", "9223372036854775807.0"])
def test_a_large_id_is_not_rounded(text: str) -> None:
    """As a float it would be rounded."""
    ack: Any = decode(body_of("ack"), f'{{"id": {text}, "claim_token": "{TOKEN}"}}'.encode())
    assert ack.id in (9007199254740993, 9223372036854775807)


@pytest.mark.parametrize("text", ["30.5", "1e131071", "1e-5", "9" * 5000], ids=len)
def test_a_number_that_is_no_integer_is_refused(text: str) -> None:
    with pytest.raises(ApiError, match="delay_seconds"):
        decode(DirectMessage, b'{"payload": 1, "delay_seconds": %b}' % text.encode())
