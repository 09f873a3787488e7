"""OpenAPI: the schema is valid and correct, and every request that it allows gets a response that it describes."""

import json
import re
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from clients import PATIENCE
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import floats
from served import ADMIN, SERVICE, Server, needs, new_name

pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning", "default::pytest.PytestWarning")


@pytest.fixture(scope="module")
def routes() -> list[Any]:
    """The routes, which depend on no setting."""
    from pgqueue.http import Settings, create_app
    from pgqueue.http.security.users import hash_password

    services = {SERVICE: {"dsn": "", "databases": ["x"]}}
    users = {"admin": {"password_hash": hash_password("x")}}
    settings = Settings.of({"control_dsn": "", "services": services, "users": users})
    return list(create_app(settings, "controller").table.routes)


@pytest.fixture(scope="module")
def document(routes: list[Any]) -> dict[str, Any]:
    """The schema."""
    from pgqueue.http import operations

    return operations.document(routes)


@pytest.fixture(scope="module")
def struct_of(routes: list[Any]) -> Callable[[dict[str, Any]], Any]:
    """The struct of a content in the schema."""
    structs = {each.__name__: each for route in routes for each in (route.body, route.answer) if each}
    return lambda content: structs[content["application/json"]["schema"]["$ref"].rpartition("/")[2]]


@pytest.fixture
def orders(web: Server) -> str:
    """A managed queue."""
    name = new_name()
    web.create(name)
    return name


def test_the_schema_is_valid(web: Server) -> None:
    import schemathesis

    document = web.get("/openapi.json").json()
    loaded = schemathesis.openapi.from_dict(document)
    loaded.validate()
    assert document["components"]["securitySchemes"] == {
        each: {"type": "http", "scheme": each} for each in ("basic", "bearer")
    }
    described = {f"{method.upper()} {path}" for path, methods in document["paths"].items() for method in methods}
    routes = {route for route in needs() if re.match("[A-Z]+ /(v1|managed-services)/", route)}
    assert routes == {route for route in described if re.match("[A-Z]+ /(v1|managed-services)/", route)}
    paths = {path for path in document["paths"] if path.startswith("/managed-services")}
    base = "/managed-services/{service_id}/queues"
    assert paths == {base, f"{base}/{{queue_name}}", f"{base}/{{queue_name}}/messages", f"{base}/{{queue_name}}/stats"}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            names = {parameter["name"] for parameter in operation.get("parameters", [])}
            assert method == "post" or "Idempotency-Key" not in names, (path, method)
            assert "security" in operation or "413" in operation["responses"], (path, method)
            for status, response in operation["responses"].items():
                if int(status) >= 400:
                    body = response["content"]["application/json"]["schema"]
                    assert body == {"$ref": "#/components/schemas/ErrorBody"}, (path, method, status)


ROOT = Path(__file__).parents[3]
EXAMPLES = Path(__file__).with_name("examples.txt")  # the request and the response of every route
_EXAMPLE = re.compile(
    r"^(GET|POST|DELETE) (/\S+)\n(?:  ->  (.*?)\n)?  (\d{3}) (\{.*?\})(?=\n(?:\w|```)|\s*\Z)", re.MULTILINE | re.DOTALL
)


def test_bodies_have_the_fields_of_the_examples(document: dict[str, Any], struct_of: Callable[..., Any]) -> None:
    """Of every route in examples.txt, and of the three in the README."""
    readme = _EXAMPLE.findall((ROOT / "python/src/pgqueue/http/README.md").read_text())
    assert len(readme) == 3
    seen = set()
    for method, path, request, status, response in _EXAMPLE.findall(EXAMPLES.read_text()) + readme:
        operation = document["paths"][path][method.lower()]
        assert bool(request) == ("requestBody" in operation), (method, path)
        if request:
            msgspec.json.decode(request, type=struct_of(operation["requestBody"]["content"]))
        found = msgspec.json.decode(response, type=struct_of(operation["responses"][status]["content"]))
        assert all_names(json.loads(msgspec.json.encode(found))) <= all_names(json.loads(response)), (method, path)
        seen.add((method.lower(), path))
    routes = {(method, path) for path, methods in document["paths"].items() for method in methods}
    assert seen == routes - {("get", path) for path in ("/healthz", "/readyz", "/metrics")}


def all_names(value: Any) -> set[str]:
    if isinstance(value, list):
        return set().union(*map(all_names, value))
    return set(value).union(*map(all_names, value.values())) if isinstance(value, dict) else set()


def test_direct_routes_have_the_names_and_arguments_of_sql_functions(
    document: dict[str, Any], struct_of: Callable[..., Any]
) -> None:
    from pgqueue.http.direct import structs

    reference = (ROOT / "sql/REFERENCE.md").read_text()
    for path, methods in document["paths"].items():
        if not path.startswith("/v1/queues"):
            continue
        verb = path.removeprefix("/v1/queues").rpartition("/")[2] or "list_queues"
        found = re.search(rf"^### {verb}\n\n```text\n{verb}\((.*?)\) →", reference, re.MULTILINE | re.DOTALL)
        assert found, path
        arguments = set(re.findall(r"(\w+) [a-z]", found[1]))
        for operation in methods.values():
            # The queue of the path is no argument of the functions that find a schedule by its name.
            given = {each["name"] for each in operation.get("parameters", []) if each["in"] == "query"}
            if "requestBody" in operation:
                struct = struct_of(operation["requestBody"]["content"])
                given |= set((structs.DirectMessage if verb == "enqueue" else struct).__struct_fields__)
            given -= {"service_id", "database_name", "wait_seconds"}  # of HTTP only
            if "claims" in given:
                given = given - {"claims"} | {"ids", "claim_tokens"}
            assert {name.removesuffix("_seconds") for name in given} <= arguments, path


def test_the_docs_page_shows_every_route_and_loads_nothing_from_another_host(
    web: Server, document: dict[str, Any]
) -> None:
    answer = web.get("/docs")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    for path, methods in document["paths"].items():
        for method in methods:
            assert f"<code>{method.upper()} {path}</code>" in answer.text
    assert re.findall(r"(?:src|href)=.?(?:https?:)?//", answer.text) == []
    assert web.call("GET", "/docs", auth=None).status_code == 401


def test_head_is_answered_like_get_without_the_body(web: Server, orders: str) -> None:
    queue = f"{web.queues}/{orders}"
    for path in ("/healthz", "/readyz", "/", "/static/style.css", "/openapi.json", queue, f"/v1/queues/{orders}/stats"):
        got, protocol = web.get(path), web.call("HEAD", path)
        assert (protocol.status_code, protocol.content) == (got.status_code, b"") == (200, b""), path
        for name in ("content-type", "x-frame-options", *(["content-length"] if path != "/" else [])):
            assert protocol.headers[name] == got.headers[name], (path, name)
    assert web.call("HEAD", "/metrics").status_code == 200
    assert web.call("HEAD", f"{queue}-not").status_code == 404
    assert web.call("HEAD", f"/v1/queues/{orders}/claim").status_code == 405
    assert web.call("HEAD", queue, auth=None).status_code == 401
    counted = 'pgqueue_http_request_seconds_count{method="HEAD",route="/healthz",status="200"}'
    assert counted in web.get("/metrics").text


def within(value: Any) -> Any:
    """The generator uses floats, for which the largest id equals the next number, which is not an id."""
    if isinstance(value, list):
        return [within(each) for each in value]
    return 2**63 - 1 if isinstance(value, (int, float)) and float(value) == 2.0**63 else value


LONG = pytest.mark.long(part="http")


@pytest.mark.parametrize(
    ("mode", "examples"),
    [("positive", 1), pytest.param("positive", 50, marks=LONG), pytest.param("negative", 12, marks=LONG)],
)
def test_every_response_matches_the_schema(
    web: Server, document: dict[str, Any], orders: str, mode: str, examples: int
) -> None:
    """For each operation, with generated requests that the schema allows (positive) or refuses (negative). The
    example of the short run is always the same, the simplest one.
    """
    import schemathesis
    from schemathesis import GenerationMode
    from schemathesis.specs.openapi.checks import ignored_auth

    is_valid = mode == "positive"
    api = schemathesis.openapi.from_dict(document)
    api.config.update(base_url=web.url)
    # PostgreSQL stores no NUL in JSON, which a schema cannot express.
    api.config.generation.update(allow_x00=not is_valid)
    # Nor which messages are claimed, and with which tokens.
    api.config.checks.positive_data_acceptance.expected_statuses = [
        *("2xx", "3xx", "401", "403", "404", "409", "410", "429", "5xx")
    ]
    exploring = settings(
        max_examples=examples, derandomize=examples == 1, deadline=None, suppress_health_check=list(HealthCheck)
    )

    def explore(method: str, path: str) -> None:
        @exploring
        @given(case=api[path][method].as_strategy(generation_mode=GenerationMode(mode)), chance=floats(0, 1))
        def run(case: Any, chance: float) -> None:
            if is_valid and isinstance(case.body, dict):
                case.body |= {name: within(value) for name, value in case.body.items()}
                if isinstance(case.body.get("due_at"), str):  # a schema cannot say that it is near
                    case.body["due_at"] = datetime.now(UTC).isoformat()
                if path.endswith("_schedule"):  # nor which names, expressions and time zones are valid
                    valid = {"name": "nightly", "cron": "@daily", "time_zone": "UTC"}
                    case.body |= {name: value for name, value in valid.items() if isinstance(case.body.get(name), str)}
                if path.endswith(("/publish", "subscribe")):  # nor which topics
                    topics = {"topic": "orders.paid", "base_topics": ["orders"]}
                    case.body |= {name: value for name, value in topics.items() if case.body.get(name) is not None}
                case.body.pop("wait_seconds", None)  # no message is sent: waiting would only take time
                case.body.pop("database_name", None)  # a schema cannot say which databases exist
            if is_valid and "Idempotency-Key" in (case.headers or {}):
                case.headers["Idempotency-Key"] = new_name()  # a schema cannot say which keys were used
            if case.path_parameters and chance < 0.7:  # otherwise nearly all responses would be 404
                known = {"service_id": SERVICE, "queue_name": orders}
                case.path_parameters |= {name: known[name] for name in case.path_parameters}
            case.call_and_validate(auth=ADMIN, timeout=PATIENCE, excluded_checks=[ignored_auth])  # it asks again

        run()

    operations = [(method, path) for path, methods in document["paths"].items() for method in methods]
    for method, path in sorted(operations, key=lambda each: each[0] == "delete"):  # which deletes the queue
        # Any query string is valid for the list of queues.
        if is_valid or (document["paths"][path][method].get("parameters") and path != "/v1/queues"):
            explore(method, path)
