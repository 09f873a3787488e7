"""Pages of `pgqueue serve` for tests: queues that they show, a window of Chromium, and what a page contains."""

import html
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import httpx
import pytest
from clients import PATIENCE, Connection
from served import ADMIN, Server, new_name

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Locator, Page

Place = dict[str, str]  # the parameters of a page
HOSTILE = "<script>document.title = 'taken'</script><img src=x onerror=\"document.title='taken'\">"


@pytest.fixture
def name() -> str:
    """The name of a queue that the test creates."""
    return new_name()


@pytest.fixture
def at(web: Server, name: str) -> Place:
    """The parameters of the pages of that queue."""
    return web.place(name)


def url(page: str, at: Place) -> str:
    return f"{page}?{urlencode(at)}"


@pytest.fixture
def queue(sql: Connection, web: Server, name: str) -> str:
    """A queue with two ready messages and a dead letter, which the page shows."""
    sql.execute("select pgqueue.create_queue(%s, max_attempts => 2, backoff_base => '0')", [name])
    sql.execute("select pgqueue.enqueue(%s, jsonb_build_object('order_id', 1001, 'note', %s::text))", [name, HOSTILE])
    for _ in range(2):
        sql.execute(
            "select pgqueue.nack(%s, m.id, m.claim_token, error => %s) from pgqueue.claim(%s) m",
            [name, f"ValueError: card declined {HOSTILE}", name],
        )
    sql.execute("select pgqueue.enqueue_batch(%s, array['1', '2']::jsonb[])", [name])
    web.look(web.site.databases[0], name)
    return name


@pytest.fixture
def filled(web: Server, queue: str) -> Place:
    """The parameters of the pages of this queue."""
    return web.place(queue)


def context(browser: "Browser", web: Server, **more: Any) -> "BrowserContext":
    """A window of an administrator who has logged in."""
    made = browser.new_context(base_url=web.url, **more)
    made.set_default_timeout(1000 * PATIENCE)
    form = {"user": ADMIN[0], "password": ADMIN[1]}
    given = httpx.post(f"{web.url}/login", data=form, trust_env=False, timeout=PATIENCE).cookies
    made.add_cookies(
        [{"name": name, "value": value, "url": web.url, "sameSite": "Lax"} for name, value in given.items()]
    )
    return made


class Window:
    """The window in which an administrator works, and what it complained about: a window costs a second of processor
    time.
    """

    def __init__(self, page: "Page", web: Server) -> None:
        self.page = page
        self.complaints: list[str] = []
        page.on("console", lambda said: self.complain(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.complain(str(error)))
        page.on("request", lambda asked: None if asked.url.startswith((web.url, "data:")) else self.complain(asked.url))

    def complain(self, text: str) -> None:
        self.complaints.append(text)


@pytest.fixture(scope="module")
def window(browser: "Browser", web: Server) -> Iterator[Window]:
    opened = context(browser, web)
    yield Window(opened.new_page(), web)
    opened.close()


@pytest.fixture
def page(window: Window) -> "Iterator[Page]":
    """A page that may request nothing from other hosts, and must log no error."""
    window.complaints.clear()
    yield window.page
    assert window.complaints == []


def texts(page: httpx.Response | str, element: str) -> list[str]:
    """The texts of the elements of a page, or of a part of it, that begin so."""
    text = page if isinstance(page, str) else page.text
    found = re.findall(rf"<{element}(?=[ >])[^>]*>(.*?)</{element.split()[0]}>", text, re.DOTALL)
    return [html.unescape(re.sub(r"<[^>]*>", "", each)) for each in found]


def follow(web: Server, answer: httpx.Response, link: str, user: str = ADMIN[0]) -> httpx.Response:
    """Follow a link of a page, as a browser does without scripts."""
    (path,) = {*re.findall(rf"""<a [^>]*?href="([^"]*)"(?:[^>]* aria-label="{link}"|[^>]*>{link}</a>)""", answer.text)}
    return web.http.get(answer.url.join(html.unescape(path)), auth=(user, ADMIN[1]))


def submit(
    web: Server, answer: httpx.Response, button: str, user: str = ADMIN[0], **values: str | None
) -> httpx.Response:
    """Send the form that has a button, with what its fields contain except for some values; None unchecks a box."""
    forms = re.findall(r"<form .*?</form>", answer.text, re.DOTALL)
    (form,) = [each for each in forms if f">{button}</button>" in each or f'aria-label="{button}"' in each]
    fields: dict[str, str | None] = {}
    for field in re.findall(r"<input [^>]*>", form):
        given = dict(re.findall(r'(\w+)="([^"]*)"', field))
        if "name" in given and (given.get("type") != "checkbox" or " checked" in field):
            fields[given["name"]] = html.unescape(given.get("value", "on"))
    for field, options in re.findall(r'<select name="(\w+)">(.*?)</select>', form, re.DOTALL):
        chosen = re.search(r'<option(?: value="([^"]*)")?[^>]* selected>([^<]*)', options)
        fields[field] = html.unescape(chosen[1] or chosen[2]) if chosen else None
    data = {name: value for name, value in (fields | values).items() if value is not None}
    action = html.unescape(form.partition('action="')[2].partition('"')[0])
    return web.http.post(answer.url.join(action), data=data, auth=(user, ADMIN[1]), follow_redirects=True)


PAYLOAD, DONE, ALERT = 'pre class="payload"', 'p class="done" role="status"', 'p class="alarm" role="alert"'


def row(page: "Page", queue: str) -> "Locator":
    return page.locator(f'tr[data-queue="{queue}"]')


def dead_letters(sql: Connection, name: str, *errors: str) -> list[int]:
    """Make a queue with a dead letter for each error; returns their ids."""
    sql.execute("select pgqueue.create_queue(%s, max_attempts => 1)", [name])
    ids = []
    for number, error in enumerate(errors, 1001):
        payload = f'{{"order_id": {number}, "total": 19.90, "items": [{{"sku": "A-{number}", "quantity": 2}}]}}'
        headers = f'{{"tenant": "{"acme" if number % 2 else "globex"}"}}'
        sql.execute("select pgqueue.enqueue(%s, %s::jsonb, headers => %s)", [name, payload, headers])
        ((dead,),) = sql.execute(
            "select m.id from pgqueue.claim(%s, claimed_by => 'worker-1') m, lateral"
            " pgqueue.nack(%s, m.id, m.claim_token, error => %s) n where n",
            [name, name, error],
        ).fetchall()
        ids.append(dead)
    return ids
