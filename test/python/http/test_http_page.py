"""The page in headless Chromium: by mouse, by keyboard, in narrow windows, in dark mode, and without scripts."""

import asyncio
import html
import os
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import httpx
import psycopg
import pytest
from browsers import OTHER_HOST, expect
from clients import PATIENCE
from psycopg.conninfo import conninfo_to_dict
from served import ADMIN, Server, Site, configuration, in_process, locked, new_name, serving

import pgqueue

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Locator, Page

SHOTS = os.environ.get("PGQUEUE_TEST_SCREENSHOTS")
HOSTILE = "<script>document.title = 'taken'</script><img src=x onerror=\"document.title='taken'\">"


@pytest.fixture
def name() -> str:
    """The name of a queue that the test creates."""
    return new_name()


@pytest.fixture
def at(web: Server, name: str) -> dict[str, str]:
    """The parameters of the pages of that queue."""
    return web.place(name)


def url(page: str, at: dict[str, str]) -> str:
    return f"{page}?{urlencode(at)}"


@pytest.fixture
def queue(sql: psycopg.Connection[Any], web: Server, name: str) -> str:
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
def filled(web: Server, queue: str) -> dict[str, str]:
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


def test_the_page_shows_queues_with_figures_and_sparklines(
    page: "Page", web: Server, name: str, sql: psycopg.Connection[Any]
) -> None:
    busy, idle = f"{name}-busy", f"{name}-idle"
    dead_letters(sql, busy, "declined")
    sql.execute("select pgqueue.create_queue(%s)", [idle])
    web.look(web.site.databases[0], idle)
    page.goto(f"/?find={name}")
    expect(row(page, busy).locator('[data-label="Ready"]')).to_have_text("0")
    sql.execute("select pgqueue.enqueue_batch(%s, array_fill('1'::jsonb, array[50]))", [busy])
    sql.execute("select pgqueue.ack(%s, m.id, m.claim_token) from pgqueue.claim(%s, 41) m", [busy, busy])
    for each, ready, dead, most in ((busy, "9", "1", "[1-9]"), (idle, "0", "0", "0$")):
        expect(row(page, each).locator('[data-label="Ready"]')).to_have_text(ready)  # without a reload
        expect(row(page, each).locator('[data-label="Dead"]')).to_have_text(dead)
        for label in ("In", "Out"):
            line = row(page, each).locator(f'[data-label="{label}"] svg')
            expect(line).to_have_attribute("aria-label", re.compile(f"^{label} a second, from 0 to {most}"))
    for drawn in ("Depth, from 0 to [59]", "^Age in seconds"):
        expect(row(page, busy).get_by_label(re.compile(drawn)).locator("polyline")).to_have_count(1)


def test_queues_are_found_and_sorted_where_there_are_many(web: Server, name: str, sql: psycopg.Connection[Any]) -> None:
    def queues(page: httpx.Response) -> list[str]:
        """Those of a page, and of the table with which its script replaces them."""
        (live,) = re.findall(r'data-live="([^"]*)"', page.text)
        shown, refreshed = (
            re.findall(r'data-queue="(.*?)"', each.text) for each in (page, web.get(f"/{html.unescape(live)}"))
        )
        assert shown == refreshed
        return shown

    names = [f"{name}-{number}" for number in range(21)]
    for each in names:
        sql.execute("select pgqueue.create_queue(%s)", [each])
    sql.execute("select pgqueue.enqueue_batch(%s, array['1', '2']::jsonb[])", [names[2]])
    sql.execute("select pgqueue.enqueue(%s, '1')", [names[1]])
    web.look(web.site.databases[0], names[0])
    form = re.findall(r'<form class="find".*?</form>', web.get("/").text, re.DOTALL)[0]
    assert re.findall(r' name="(.*?)"', form) == ["find", "sort"]
    found = web.get("/", params={"find": f"{name.upper()}-1", "sort": "ready_messages"})
    assert queues(found) == [names[1], *sorted(names[10:20])]
    paused = submit(web, found, f"Pause {names[1]}")
    assert f'aria-label="Resume {names[1]}"' in paused.text
    assert queues(paused) == queues(found)
    found = web.get("/", params={"find": name, "sort": "ready_messages"})
    assert queues(found) == [names[2], names[1], *sorted([names[0], *names[3:]])]
    assert "No queue is found." in web.get("/", params={"find": "<b>"}).text
    assert web.get("/", params={"sort": "claim_token"}).status_code == 422


def test_a_viewer_sees_everything_and_no_form_that_changes_something(web: Server, queue: str) -> None:
    table = web.get("/", params={"find": queue}, auth=("viewer", ADMIN[1]))
    messages = follow(web, table, queue, "viewer")
    assert "card declined" in messages.text
    for page in (table, messages, follow(web, messages, "Consumers", "viewer")):
        assert page.status_code == 200
        assert 'method="post"' not in page.text, page.url
        for text in ("Create a queue", "Health", "Settings", "Send", "Redrive", "Delete", "Purge", "Drop", "Pause"):
            assert not re.search(rf">\s*{text}", page.text), (page.url, text)


def test_a_browser_is_sent_to_the_log_in_form_and_back(browser: "Browser", web: Server, filled: dict[str, str]) -> None:
    place = url(web.url.replace("127.0.0.1", OTHER_HOST) + "/queue/consumers", filled)
    opened = browser.new_context()
    opened.set_default_timeout(1000 * PATIENCE)
    page = opened.new_page()
    page.goto(place)
    page.get_by_label("Name").fill("sender")
    page.get_by_label("Password").fill("wrong")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_have_text("name or password is wrong")
    page.get_by_label("Name").fill(ADMIN[0])
    page.get_by_label("Password").fill(ADMIN[1])
    page.get_by_role("button", name="Log in").click()
    expect(page).to_have_url(place)
    page.get_by_role("link", name="Queues").click()
    opened.clear_cookies()  # as when the session expires while the page is open
    expect(page).to_have_url(re.compile("/login"))
    opened.close()


def test_a_producer_sends_by_the_page_without_seeing_messages(
    web: Server, queue: str, at: dict[str, str], sql: psycopg.Connection[Any]
) -> None:
    table = web.get("/", params={"find": queue}, auth=("sender", ADMIN[1]))
    assert f'data-queue="{queue}"' in table.text
    assert 'href="queue?' not in table.text
    form = follow(web, table, f"Send a message to {queue}", "sender")
    sent = submit(web, form, "Send", "sender", payload='{"a": 1}')
    assert "Sent as message" in texts(sent, DONE)[0]
    assert texts(sent, "h1") == ["Queues"]
    # The same form can replace a dead letter, which only an administrator deletes.
    ((dead,),) = sql.execute("select id from pgqueue.dead_messages where queue_name = %s", [queue]).fetchall()
    replacing = {"payload": "1", "replaces": str(dead)}
    assert web.http.post(url("/queue/send", at), data=replacing, auth=("sender", ADMIN[1])).status_code == 403
    assert sql.execute("select dead_messages from pgqueue.stats(%s)", [queue]).fetchall() == [(1,)]


def test_a_dead_letter_is_shown_with_error_headers_and_history(
    page: "Page", web: Server, name: str, at: dict[str, str], sql: psycopg.Connection[Any]
) -> None:
    def fail(_delivery: pgqueue.Delivery) -> None:
        raise ValueError(f"card declined {HOSTILE}")

    sql.execute("select pgqueue.create_queue(%s, max_attempts => 2, backoff_base => '0')", [name])
    sql.execute("select pgqueue.enqueue(%s, jsonb_build_object('order_id', 1001, 'note', %s::text))", [name, HOSTILE])
    with pgqueue.Consumer(web.site.target, name, fail) as consumer:
        web.until(lambda: consumer.stats.dead == 1)
    page.goto(url("/queue", at))
    letter = page.locator("article.letter")
    expect(letter).to_have_count(1)
    expect(letter.locator("pre.error")).to_contain_text("ValueError: card declined <script>")
    expect(letter.locator("pre.payload")).to_contain_text(
        re.compile(r'^\{\s+"note": "<script>.*",\s+"order_id": 1001\s+\}$')
    )
    expect(letter).to_contain_text("attempts exhausted")
    expect(letter).to_contain_text("attempt 2 of 2")
    letter.locator("h3").click()  # a line until it is unfolded
    letter.get_by_text("History: 2 failed attempts").click()
    expect(letter.locator(".history li")).to_have_count(2)
    expect(letter.locator(".history li").first).to_contain_text("Attempt 1")
    expect(page).to_have_title(f"{name} – pgqueue")  # no script in a message was run


def test_dead_letters_are_redriven_and_deleted_after_confirmation(
    web: Server, name: str, at: dict[str, str], sql: psycopg.Connection[Any]
) -> None:
    def figures() -> list[tuple[int, int]]:
        return sql.execute("select dead_messages, ready_messages from pgqueue.stats(%s)", [name]).fetchall()

    ids = dead_letters(sql, name, "one", "two", "three")
    page = web.get("/queue", params=at)
    assert texts(follow(web, page, "Redrive all…"), "h1") == [f"Redrive all dead letters of {name}?"]
    assert figures() == [(3, 0)]
    page = submit(web, follow(web, page, f"Redrive {ids[0]}…"), "Redrive")
    assert texts(page, DONE) == ["Redriven: 1 dead letter"]
    assert figures() == [(2, 1)]
    asked = follow(web, page, "Delete all…")
    assert "This deletes them permanently." in asked.text
    page = submit(web, asked, "Delete")
    assert texts(page, DONE) == ["Deleted: 2 dead letters"]
    assert "No dead letters." in page.text
    assert figures() == [(0, 1)]


def test_the_page_works_by_keyboard(page: "Page", queue: str, sql: psycopg.Connection[Any]) -> None:
    def focused() -> str:
        return str(
            page.evaluate("document.activeElement.getAttribute('aria-label') || document.activeElement.innerText")
        )

    def tab_to(label: str) -> None:
        for _ in range(80):
            page.keyboard.press("Tab")
            if focused() == label:
                assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
                return
        raise AssertionError(f"{label!r} is not reached")

    page.goto(f"/?find={queue}")
    tab_to(f"Pause {queue}")
    with page.expect_response("**/page/queues?*"):
        pass  # the table was replaced
    expect(page.get_by_role("button", name=f"Pause {queue}")).to_be_focused()  # and the focus is restored
    page.keyboard.press("Enter")
    expect(row(page, queue).locator(".state")).to_have_text("Paused")
    assert sql.execute("select pgqueue.claim(%s)", [queue]).fetchall() == []
    tab_to(f"Resume {queue}")
    page.keyboard.press("Enter")
    expect(row(page, queue).locator(".state")).to_have_text("Active")
    assert len(sql.execute("select pgqueue.claim(%s)", [queue]).fetchall()) == 1
    tab_to(queue)
    page.keyboard.press("Enter")
    page.wait_for_url("**/queue?**")
    tab_to("Delete all…")
    page.keyboard.press("Enter")
    page.wait_for_url("**/confirm?**")
    expect(page.get_by_role("link", name="Cancel")).to_be_focused()
    page.keyboard.press("Enter")
    page.wait_for_url("**/queue?**")
    assert sql.execute("select dead_messages from pgqueue.stats(%s)", [queue]).fetchall() == [(1,)]


def test_the_page_fits_narrow_windows_with_enough_contrast(
    page: "Page", web: Server, queue: str, at: dict[str, str], sql: psycopg.Connection[Any]
) -> None:
    long = "a-name-as-long-as-it-may-be-" + "x" * 80 + queue
    sql.execute("select pgqueue.create_queue(%s)", [long])
    sql.execute("select pgqueue.subscribe(%s, %s)", ["orders." + "x" * 200, queue])
    sql.execute("select pgqueue.claim(%s, claimed_by => %s)", [queue, "worker-" + "x" * 100])
    sql.execute("select pgqueue.enqueue(%s, '1')", [long])
    for paused in (queue, long):  # which doctor() reports
        sql.execute("select pgqueue.pause_queue(%s)", [paused])
    web.look(web.site.databases[0], queue)
    page.emulate_media(reduced_motion="reduce")  # colours change at once
    for path, visible in (
        (f"/?find={queue}", "tr[data-queue]"),
        (url("/queue", at), "article.letter"),
        (url("/queue/consumers", at), "th[scope=row]"),
        (url("/queue/schedules", at), "th[scope=row]"),
        (url("/queue/settings", at), "label"),
        (url("/queue/send", at), "textarea"),
        (url("/queue/drop_queue", at), "label"),
        ("/create", "label"),
        ("/health", ".finding"),
    ):
        page.goto(path)  # with its style sheet
        expect(page.locator(visible).first).to_be_visible()
        for width in (1280, 700, 320):  # only the style sheet depends on the width, no script does
            page.set_viewport_size({"width": width, "height": 800})
            assert page.evaluate("document.documentElement.scrollWidth") <= width, path
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            for background, text in page.evaluate(CONTRAST):
                assert ratio(background, text) >= 4.5, (path, background, text)
            if SHOTS:
                page.screenshot(path=str(Path(SHOTS) / f"{path.strip('/').partition('?')[0]}-{scheme}.png"))
    page.emulate_media(color_scheme="light")
    page.set_viewport_size({"width": 1280, "height": 720})


# The pages by their links, and what each shows.
CONTRAST = """() => [...document.querySelectorAll('main *, header *')].filter(e => e.offsetWidth && [...e.childNodes]
    .some(n => n.nodeType === 3 && n.textContent.trim())).map(e => {
        let b = e;
        while (b && /rgba\\(0, 0, 0, 0\\)/.test(getComputedStyle(b).backgroundColor)) b = b.parentElement;
        return [getComputedStyle(b || document.body).backgroundColor, getComputedStyle(e).color];
    })"""


def ratio(one: str, other: str) -> float:
    """The contrast ratio of two colours, as WCAG defines it."""

    def luminance(colour: str) -> float:
        parts = [float(each) / 255 for each in colour[colour.index("(") + 1 : -1].split(",")[:3]]
        red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_the_page_says_when_the_server_does_not_answer(window: Window) -> None:
    page = window.page
    page.goto("/?find=nothing")
    page.route("**/page/queues?*", lambda route: route.abort())
    expect(page.locator("#stale")).to_be_visible()
    page.unroute("**/page/queues?*")
    expect(page.locator("#stale")).to_be_hidden()


def test_a_form_of_another_site_is_refused(
    window: Window, web: Server, queue: str, at: dict[str, str], sql: psycopg.Connection[Any]
) -> None:
    """A browser sends the request without the session, and shows no page of the server in a frame."""
    page = window.page.context.new_page()
    form = f'<form method="post" action="{url(f"{web.url}/queue/purge", at)}"><button>Win</button></form>'
    page.route("http://evil.example/", lambda route: route.fulfill(content_type="text/html", body=form))
    page.goto("http://evil.example/")
    with page.expect_response(f"{web.url}/**") as answer:
        page.get_by_role("button").click()
    assert (answer.value.status, "login" in answer.value.headers["location"]) == (303, True)
    assert sql.execute("select dead_messages from pgqueue.stats(%s)", [queue]).fetchall() == [(1,)]
    page.route("http://evil.example/frame", lambda route: route.fulfill(body=f'<iframe src="{web.url}/"></iframe>'))
    page.goto("http://evil.example/frame")

    def shown() -> str:
        page.wait_for_timeout(10)  # playwright learns of events meanwhile
        return "".join(frame.url.removeprefix("about:blank") for frame in page.frames[1:])

    assert web.until(shown).startswith("chrome-error:")
    page.close()


def test_unknown_queues_and_actions_of_the_page_are_errors(web: Server, queue: str) -> None:
    place = web.place(queue)
    assert web.get("/queue", params=place).status_code == 200
    for wrong in ({"service": "x"}, {"database": "x"}, {"name": "x"}, {"name": "'; --"}):
        assert web.get("/queue", params=place | wrong).status_code == 404
        assert web.post("/queue/purge", b"id=all", params=place | wrong).status_code == 404
    assert web.post("/queue/drop", params=place).status_code == 404
    assert web.get("/queue/confirm", params=place | {"action": "drop"}).status_code == 404
    assert web.post("/queue/purge", b"id=x", params=place).status_code == 422
    assert web.get("/queue", params=place | {"done": HOSTILE}).text.count("<script>") == 0


def test_errors_of_the_page_are_html_pages(web: Server) -> None:
    place = web.place("gone")
    for path, home in (("/queue", "./"), ("/queue/confirm?action=purge", "../")):
        answer = web.get(path, params=httpx.QueryParams(httpx.URL(path).query).merge(place))
        assert (answer.status_code, answer.headers["content-type"]) == (404, "text/html; charset=utf-8")
        assert "queue &#39;gone&#39; does not exist" in answer.text
        assert f'<a class="button" href="{home}">All queues</a>' in answer.text
    answer = web.get("/nothing/here", headers={"Accept": "text/html,*/*;q=0.8"})
    assert (answer.status_code, answer.headers["content-type"]) == (404, "text/html; charset=utf-8")
    assert "the path does not exist" in answer.text
    assert '<a class="button" href="../">All queues</a>' in answer.text
    assert web.post("/queue/pause", params=place | {"database": HOSTILE}).text.count("<script>") == 0
    assert web.get("/v1/queues/gone/stats").json()["error"]["code"] == "queue_not_found"


def test_a_sparkline_leaves_out_points_of_a_level_stretch() -> None:
    """Hundreds of queues are drawn every two seconds for each open page."""
    from pgqueue.http.page.rendering import sparkline

    drawn = [
        re.findall(r'<polyline points="([^"]*)"', sparkline(line, "Depth", "depth")) for line in ([3.0] * 90, STEPS)
    ]
    assert drawn == [["0,2.0 89,2.0"], ["0,26.0 2,26.0 3,2.0 5,2.0 6,26.0"]]


STEPS = [0.0, 0.0, 0.0, 6.0, 6.0, 6.0, 0.0]


def test_the_table_marks_each_estimated_figure() -> None:
    from pgqueue.http.page.rendering import TEMPLATES, Row
    from pgqueue.message import QueueStats

    stats = QueueStats("orders", 20_000, 1, 2, 30_000, 1.0, False, ["ready_messages", "dead_messages"])
    table = TEMPLATES.get_template("table.html").render(
        rows=[Row(("s", "d", "orders"), stats)], failing=[], control_fails=False, up=""
    )
    figures = re.findall(r'<td class="figure.*?data-label="(.*?)">(.*?)</td>', table)
    mark = '<abbr title="an estimate">≈</abbr> '
    assert figures == [("Ready", f"{mark}20,000"), ("In flight", "1"), ("Scheduled", "2"), ("Dead", f"{mark}30,000")]


def test_the_page_works_behind_a_path_prefix(web: Server, queue: str) -> None:
    """Behind a proxy that strips a path prefix, no link may be relative to the root."""
    place = web.place(queue)
    paths = (
        "/",
        "/page/queues",
        "/create",
        "/health",
        "/queue",
        "/queue/settings",
        "/queue/consumers",
        "/queue/schedules",
    )
    pages = [web.get(path, params=place) for path in paths]
    pages.append(web.get("/queue/confirm", params=place | {"action": "redrive"}))
    leads = [lead for page in pages for lead in re.findall(r'(?:href|src|action|data-live)="([^"]*)"', page.text)]
    assert len(leads) > 20
    assert not [lead for lead in leads if lead.startswith("/")]
    for form, target in (({"to": "queues"}, "../"), ({}, "../queue?")):
        answer = web.http.post("/queue/resume", params=place, data=form)
        assert answer.headers["location"].startswith(target)
        assert answer.next_request is not None
        assert web.http.send(answer.next_request, auth=ADMIN).status_code == 200


def test_a_form_without_valid_ids_deletes_nothing(web: Server, queue: str, sql: psycopg.Connection[Any]) -> None:
    place = web.place(queue)
    forms: list[dict[str, Any]] = [
        {"content": b""},
        {"data": {"id": ""}},
        {"data": {"id": ["1", "x"]}},
        {"files": {"id": (None, "1")}},
        {"content": b"&".join([b"id=1"] * 10_001)},
        {"json": {"id": 1}},
    ]
    for form in forms:
        for action in ("purge", "redrive"):
            assert web.http.post(f"/queue/{action}", params=place, **form).status_code == 422
    assert web.http.post("/queue/purge", params=place | {"id": "1"}).status_code == 422
    assert sql.execute("select dead_messages from pgqueue.stats(%s)", [queue]).fetchall() == [(1,)]
    assert web.http.post("/queue/purge", params=place, data={"id": "all"}).status_code == 303
    assert sql.execute("select dead_messages from pgqueue.stats(%s)", [queue]).fetchall() == [(0,)]


def test_the_page_shows_any_headers(web: Server, name: str, at: dict[str, str], sql: psycopg.Connection[Any]) -> None:
    sql.execute("select pgqueue.create_queue(%s, max_attempts => 1)", [name])
    for headers in (
        '{"pgqueue.failures": [{"attempt": {}, "failed_at": [], "exception_type": null}, 1], "a": 1}',
        '{"pgqueue.failures": {}}',
        '{"a": ' + "[" * 900 + "]" * 900 + "}",
        '{"a": ' + "[" * 5000 + "]" * 5000 + "}",
        '{"a": ' + "9" * 5000 + "}",
        '"no object"',
    ):
        sql.execute("select pgqueue.enqueue(%s, '1')", [name])
        sql.execute("update pgqueue.messages set headers = %s where queue_name = %s", [headers, name])  # plain SQL
        sql.execute("select pgqueue.nack(%s, id, claim_token) from pgqueue.claim(%s)", [name, name])
    answer = web.get("/queue", params=at)
    assert (answer.status_code, answer.text.count('class="letter"')) == (200, 6)


def dead_letters(sql: psycopg.Connection[Any], name: str, *errors: str) -> list[int]:
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


def test_messages_of_every_state_are_shown(
    web: Server, name: str, at: dict[str, str], sql: psycopg.Connection[Any]
) -> None:
    sql.execute("select pgqueue.create_queue(%s, archive_for => '1 day')", [name])
    for number in (1, 2, 3):
        sql.execute("select pgqueue.enqueue(%s, jsonb_build_object('number', %s::int))", [name, number])
    acked = "select pgqueue.ack(%s, m.id, m.claim_token) from pgqueue.claim(%s, claimed_by => 'worker-1') m"
    sql.execute(acked, [name, name])
    sql.execute("select pgqueue.claim(%s, claimed_by => 'worker-2')", [name])
    sql.execute("select pgqueue.enqueue(%s, body => 'plain text', delay => '1 h')", [name])
    links = texts(web.get("/queue", params=at), "a")
    for state, payload, fact in (
        ("Ready", '"number": 3', "attempt 0 of 5"),
        ("In flight", '"number": 2', "held by worker-2"),
        ("Scheduled", "plain text", "Body, 10 bytes"),
        ("Archived", '"number": 1', "last held by worker-1"),
    ):
        assert state in links
        answer = web.get("/queue", params=at | {"state": state.lower().replace(" ", "")})
        assert f"{state} messages" in texts(answer, "h2")
        (letter,) = texts(answer, "article")
        assert payload in letter
        assert fact in letter
    assert "No dead letters." in web.get("/queue", params=at | {"state": "dead"}).text


def test_messages_are_searched_by_id_header_payload_and_error(
    web: Server, name: str, at: dict[str, str], sql: psycopg.Connection[Any]
) -> None:
    ids = dead_letters(sql, name, "Timeout: no answer", "Declined: 100% <b>", "Timeout: host down")
    searches: list[tuple[dict[str, str], list[int]]] = [
        ({"id": str(ids[1])}, [ids[1]]),
        ({"header": "tenant", "header_value": "globex"}, [ids[1]]),
        ({"header": "region"}, []),
        ({"path": "$.order_id >= 1002"}, ids[1:]),
        ({"path": '$.items[*] ? (@.sku == "A-1001")'}, ids[:1]),
        ({"error": "TIMEOUT"}, [ids[0], ids[2]]),
        ({"error": "100% <b>"}, [ids[1]]),
        ({"error": "timeout", "path": "$.order_id == 1003"}, ids[2:]),
    ]
    for given, found in searches:
        answer = web.get("/queue", params=at | given)
        assert f"{len(found)} message" in texts(answer, 'p class="looked" role="status"')[0]
        assert re.findall(r'<h3 id="letter-(\d+)"', answer.text) == [str(each) for each in found], given
    (form,) = re.findall(r'<form method="get" action="queue">.*?</form>', answer.text, re.DOTALL)
    assert {"id", "header", "header_value", "path", "error"} <= {*re.findall(r' name="(.*?)"', form)}
    shown = follow(web, answer, "Show all")
    assert len(re.findall(r'<h3 id="letter-(\d+)"', shown.text)) == 3


def test_a_long_payload_is_cut_in_the_list_and_a_body_that_is_text_is_shown_as_text(
    web: Server, name: str, at: dict[str, str], sql: psycopg.Connection[Any]
) -> None:
    sql.execute("select pgqueue.create_queue(%s)", [name])
    xml = '<?xml version="1.0"?>\n<Order>\n  <Name>Zoë 👩\u200d👧</Name>\n</Order>'
    long = "a" + "ü" * 3000 + "."  # The list shows 4000 bytes, the last of which is half a character.
    bodies = (xml, '\ufeff{"order_id":1006}', long, "{name}, [1]", b"\x00\xffbinary", "\x1b[31mred")
    for body in bodies:
        sent = body if isinstance(body, bytes) else body.encode()
        sql.execute("select pgqueue.enqueue(%s, body => %s)", [name, sent])
    answer = web.get("/queue", params=at)
    shown = ["00 ff 62 69 6e 61 72 79", "1b 5b 33 31 6d 72 65 64"]
    assert texts(answer, PAYLOAD) == [xml, '{\n  "order_id": 1006\n}', "a" + "ü" * 1999 + "…", "{name}, [1]", *shown]
    assert texts(answer, "h4")[0] == f"Body, {len(xml.encode())} bytes"
    assert "Send a copy" not in answer.text  # a form cannot send bytes
    sql.execute("select pgqueue.enqueue(%s, jsonb_build_array(repeat('a', 50000), 'the end'))", [name])
    answer = web.get("/queue", params=at)
    assert re.fullmatch(".{3000,4100}…", texts(answer, PAYLOAD)[-1], re.DOTALL)
    whole = re.findall(r'<a href="(queue/message[^"]*)">The whole payload', answer.text)
    for link, end in zip(whole, (re.escape(long), r'.*"the end"\s*\]'), strict=True):
        (text,) = texts(web.get(f"/{html.unescape(link)}"), PAYLOAD)
        assert re.fullmatch(end, text, re.DOTALL)


def test_an_invalid_json_path_is_explained(web: Server, filled: dict[str, str]) -> None:
    for path in ("$.", "$ ? (", "'; select 1; --", "<script>", '$ ? (@ like_regex "(")', "(" * 20_000):
        answer = web.get("/queue", params=filled | {"state": "ready", "path": path})
        assert answer.status_code == 422, path
        assert "The payload filter is not a JSON path: " in answer.text
        assert "<script>" not in answer.text.partition("<main")[2]
    assert web.get("/queue", params=filled | {"path": "lax $"}).status_code == 200


def test_a_search_looks_at_a_limited_number_of_messages_at_a_time(
    web: Server, name: str, at: dict[str, str], sql: psycopg.Connection[Any]
) -> None:
    sql.execute("select pgqueue.create_queue(%s)", [name])
    sql.execute(
        "select count(*) from pgqueue.enqueue_batch(%s, array(select to_jsonb(n) from generate_series(1, 10050) n))",
        [name],
    )
    answer = web.get("/queue", params=at | {"path": "$ == 10050"})
    looked = 'p class="looked" role="status"'
    assert texts(answer, looked) == ["0 messages on this page; looked at 10,000 messages."]
    (link,) = re.findall(r'href="([^"]*)">Search further</a>', answer.text)
    answer = web.get(f"/{html.unescape(link)}")
    assert texts(answer, looked) == ["1 message on this page; looked at 50 messages."]
    assert texts(answer, PAYLOAD) == ["10050"]


def test_a_search_takes_a_limited_time(web: Server, filled: dict[str, str]) -> None:
    with locked(web.site.target, "lock table pgqueue.archived_messages"):
        answer = web.get("/queue", params=filled | {"state": "archived"})
    assert answer.status_code == 503
    assert "The search took too long and was ended." in answer.text


def test_errors_are_grouped_and_a_group_is_redriven(
    web: Server, name: str, at: dict[str, str], sql: psycopg.Connection[Any]
) -> None:
    declined = [f"CardDeclined: order {number} was declined\nat line {number % 7}" for number in range(1001, 1024)]
    dead_letters(sql, name, *declined, "HTTP 503 from the warehouse", "HTTP 404 from the warehouse", "")
    page = web.get("/queue", params=at)
    groups = re.findall(r'<li><b class="figure">(\d+)</b><a [^>]*>(.*?)</a>', page.text)
    assert groups[0] == ("23", "CardDeclined: order … was declined")
    assert sorted(groups[1:]) == [
        ("1", each) for each in ("HTTP 404 from the warehouse", "HTTP 503 from the warehouse", "attempts exhausted")
    ]
    page = follow(web, page, groups[0][1])
    assert page.text.count("<article") == 20
    page = follow(web, page, "Next")
    assert page.text.count("<article") == 3
    page = follow(web, page, "First")
    assert page.text.count("<article") == 20
    asked = follow(web, page, "Redrive all found…")
    assert texts(asked, "h1") == [f"Redrive 23 dead letters of {name}?"]
    page = submit(web, asked, "Redrive")
    assert texts(page, DONE) == ["Redriven: 23 dead letters"]
    assert page.text.count("<article") == 3
    assert sql.execute("select ready_messages, dead_messages from pgqueue.stats(%s)", [name]).fetchall() == [(23, 3)]


def test_the_page_works_without_scripts(
    browser: "Browser", web: Server, name: str, at: dict[str, str], sql: psycopg.Connection[Any]
) -> None:
    ids = dead_letters(sql, name, "one", "two", "three")
    web.look(web.site.databases[0], name)
    opened = context(browser, web, java_script_enabled=False)
    page = opened.new_page()
    page.goto(f"/?find={name}")
    row(page, name).get_by_role("button", name="Pause").click()
    expect(row(page, name).locator(".state")).to_have_text("Paused")
    sql.execute("select pgqueue.enqueue(%s, '1')", [name])
    expect(row(page, name).locator('[data-label="Ready"]')).to_have_text("1")  # the page reloads itself
    page.goto(url("/queue", at | {"state": "dead"}))
    page.get_by_role("button", name="Delete selected…").click()
    expect(page.get_by_role("alert")).to_have_text("no message is selected: select at least one")
    page.go_back()
    for each in ids[:2]:
        page.get_by_label(f"Select {each}", exact=True).check()
    page.get_by_role("button", name="Delete selected…").click()
    expect(page.get_by_role("heading")).to_have_text(f"Delete 2 dead letters of {name}?")
    page.get_by_role("button", name="Delete").click()
    expect(page.get_by_role("status")).to_have_text("Deleted: 2 dead letters")
    expect(page.locator("article.letter h3")).to_have_text([str(ids[2])])
    opened.close()


def test_selected_ready_and_scheduled_messages_are_deleted(
    page: "Page", name: str, at: dict[str, str], sql: psycopg.Connection[Any]
) -> None:
    sql.execute("select pgqueue.create_queue(%s)", [name])
    sql.execute("select pgqueue.enqueue_batch(%s, '{1,2,3}')", [name])
    sql.execute("select pgqueue.enqueue(%s, '4', delay => '1 h')", [name])
    page.goto(url("/queue", at))
    letters = page.locator("article.letter")
    for each in ("1", "3"):
        letters.filter(has=page.locator("pre", has_text=each)).get_by_role("checkbox").check()
    page.get_by_role("button", name="Delete selected…").click()
    expect(page.get_by_role("heading")).to_have_text(f"Delete 2 messages of {name}?")
    sql.execute("select pgqueue.claim(%s)", [name])  # a consumer takes the first one meanwhile
    page.get_by_role("button", name="Delete").click()
    expect(page.get_by_role("status")).to_have_text("Deleted: 1 message; 1 left the state meanwhile")
    expect(letters.locator("pre.payload")).to_have_text(["2"])
    page.get_by_role("link", name="Scheduled", exact=True).click()
    page.get_by_label("All on this page").check()
    page.get_by_role("button", name="Delete selected…").click()
    page.get_by_role("button", name="Delete").click()
    expect(page.get_by_text("No scheduled messages.")).to_be_visible()
    found = "select ready_messages, inflight_messages, scheduled_messages from pgqueue.stats(%s)"
    assert sql.execute(found, [name]).fetchall() == [(1, 1, 0)]


def test_a_dead_letter_is_edited_and_retried(
    page: "Page", web: Server, name: str, at: dict[str, str], sql: psycopg.Connection[Any]
) -> None:
    (dead,) = dead_letters(sql, name, "ValueError: unknown SKU")
    page.goto(url("/queue/message", at | {"state": "dead", "id": str(dead)}))
    page.get_by_label(f"Edit and retry {dead}").click()
    expect(page.get_by_role("heading", name=f"Edit and retry dead letter {dead}")).to_be_visible()
    payload = page.get_by_label("Payload, as JSON")
    expect(payload).to_have_value(re.compile('"total": 19.90,'))
    payload.fill(payload.input_value().replace("A-1001", "B-1001"))
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_role("status")).to_contain_text(f"dead letter {dead} is deleted")
    expect(page.locator("article.letter")).to_contain_text('"sku": "B-1001"')
    found = "select payload #>> '{items,0,sku}', payload ->> 'total', headers ->> 'tenant' from pgqueue.browse(%s)"
    assert sql.execute(found, [name]).fetchall() == [("B-1001", "19.90", "acme")]
    # A dead letter that is gone is not sent a second time.
    answer = web.http.post(url("/queue/send", at), data={"payload": "1", "replaces": str(dead)})
    assert (answer.status_code, "is not there any more" in answer.text) == (409, True)
    assert sql.execute("select ready_messages, dead_messages from pgqueue.stats(%s)", [name]).fetchall() == [(1, 0)]


def test_a_message_is_sent(web: Server, name: str, at: dict[str, str], sql: psycopg.Connection[Any]) -> None:
    sql.execute("select pgqueue.create_queue(%s)", [name])
    form = follow(web, web.get("/queue", params=at), "Send a message")
    payload = '{"order_id": 1001, "total": 12345678901234567890.10}'
    sent = submit(web, form, "Send", payload=payload, headers='{"tenant": "acme"}', delay="90.5")
    assert "Sent as message" in texts(sent, DONE)[0]
    assert '"total": 12345678901234567890.10' in texts(sent, PAYLOAD)[0]
    ((seconds, headers),) = sql.execute(
        "select extract(epoch from visible_at - enqueued_at)::float8, headers from pgqueue.browse(%s, 'scheduled')",
        [name],
    ).fetchall()
    assert (round(seconds, 1), headers) == (90.5, {"tenant": "acme"})


def test_a_message_is_sent_with_a_key_and_a_priority_or_a_group(
    web: Server, name: str, at: dict[str, str], sql: psycopg.Connection[Any]
) -> None:
    """The form has the fields that the settings of the queue allow."""
    for setting, field, other, value, headers in (
        ("priorities => true", "priority", "group_key", "7", {"pgqueue.priority": 7}),
        ("group_limit => 1", "group_key", "priority", "customer 5", {"pgqueue.group": "customer 5"}),
    ):
        queue = f"{name}-{field.partition('_')[0]}"
        sql.execute(f"select pgqueue.create_queue(%s, {setting})".encode(), [queue])
        place = url("/queue/send", at | {"name": queue})
        form = web.get(place).text
        assert (f'name="{field}"' in form, f'name="{other}"' in form) == (True, False)
        for payload in "12":
            sent = web.http.post(place, data={"payload": payload, "dedup_key": "invoice-9", field: value})
            assert (sent.status_code, "has+the+key+invoice-9" in sent.headers["location"]) == (303, True)
        assert sql.execute("select payload, headers from pgqueue.browse(%s)", [queue]).fetchall() == [(1, headers)]


def test_the_form_for_a_dead_letter_takes_no_key(web: Server, filled: dict[str, str]) -> None:
    dead = (
        web.http.get(url("/queue", filled | {"state": "dead"}))
        .text.partition("state=dead&amp;id=")[2]
        .partition('"')[0]
    )
    form = web.http.get(url("/queue/send", filled | {"state": "dead", "id": dead})).text
    assert ('name="replaces"' in form, 'name="dedup_key"' in form) == (True, False)
    assert 'name="dedup_key"' in web.http.get(url("/queue/send", filled)).text


def test_an_invalid_message_is_not_sent_and_the_form_keeps_it(web: Server, filled: dict[str, str]) -> None:
    forms: list[tuple[dict[str, str], str]] = [
        ({"payload": '{"a": '}, "the field payload is not JSON"),
        ({"payload": ""}, "the payload is empty"),
        ({"payload": "[" * 5000}, "the field payload is nested too deeply"),
        ({"payload": "1e131072"}, "PostgreSQL cannot store payload: value overflows"),
        ({"payload": "1", "headers": "[1]"}, "the headers are not a JSON object"),
        ({"payload": "1", "delay": "soon"}, "Delay (s) is invalid: soon; must be a number"),
        ({"payload": "1", "delay": "-5"}, "invalid delay"),
        ({"payload": "1", "delay": "1e99"}, "Delay (s) is invalid"),
        ({"payload": "1", "priority": "high"}, "Priority is invalid: high; must be a whole number"),
        ({"payload": "1", "priority": "10"}, "invalid priority"),
        ({"payload": "1", "dedup_key": "k" * 256}, "invalid dedup_key"),
        ({"payload": '"\\u0000"'}, "PostgreSQL cannot store payload"),
    ]
    for form, problem in forms:
        answer = web.http.post(url("/queue/send", filled), data=form | {"copy_of": "'\"<script>"})
        text = html.unescape(answer.text)
        said = text.partition('role="alert"')[2].partition("</p>")[0]
        assert (answer.status_code, problem in said, form["payload"] in text) == (422, True, True), (form, said)
        assert "<script>" not in answer.text.partition("<main")[2]


def test_a_queue_is_created_and_its_settings_are_changed(web: Server, name: str, sql: psycopg.Connection[Any]) -> None:
    settings = "select max_attempts, visibility_timeout::text, archive_for::text, dlq_enabled, dedicated, rate_limit"
    got = f"{settings} from pgqueue.get_queue(%s)"
    given = {"name": name, "max_attempts": "7", "archive_for": "30", "rate_limit": "5"}
    place = f"{web.place(name)['service']}/{web.site.databases[0]}"
    made = submit(web, follow(web, web.get("/health"), "Create a queue"), "Create", database=place, **given)
    assert texts(made, DONE) == [f"{name} is created"]
    assert sql.execute(got, [name]).fetchall() == [(7, "00:00:30", "30 days", True, False, 5)]
    form = follow(web, made, "Settings")
    changed = submit(web, form, "Change", visibility_timeout="90", archive_for="", rate_limit="", dlq_enabled=None)
    assert texts(changed, DONE) == ["The settings are changed"]
    assert sql.execute(got, [name]).fetchall() == [(7, "00:01:30", None, False, False, None)]


def test_invalid_settings_are_explained(web: Server, queue: str, at: dict[str, str]) -> None:
    database = f"{at['service']}/{at['database']}"
    for form, status, problem in (
        ({"name": "Orders!"}, 422, "invalid queue_name"),
        ({"name": queue}, 409, "exists"),
        ({"name": "x", "max_attempts": "many"}, 422, "Attempts is invalid: many; must be a whole number"),
        ({"name": "x", "max_attempts": "101"}, 422, "invalid max_attempts"),
        ({"name": "x", "max_attempts": "9" * 30}, 422, "invalid max_attempts"),
        ({"name": "x", "visibility_timeout": "nan"}, 422, "Visibility timeout (s) is invalid: nan"),
        ({"name": "x", "backoff_factor": "nan"}, 422, "invalid backoff_factor"),
    ):
        answer = web.http.post("/create", data=form | {"database": database})
        assert (answer.status_code, problem in html.unescape(answer.text)) == (status, True), (form, answer.text)
    answer = web.http.post(url("/queue/settings", at), data={"visibility_timeout": "0.5"})
    assert (answer.status_code, "invalid visibility_timeout" in answer.text) == (422, True)
    assert 'value="0.5"' in answer.text
    answer = web.http.post(url("/queue/settings", at), data={"max_attempts": ""})
    assert (answer.status_code, "is empty; it must have a value" in answer.text) == (422, True)


def test_a_queue_is_purged_and_dropped_after_its_name_was_typed(
    web: Server, name: str, at: dict[str, str], sql: psycopg.Connection[Any]
) -> None:
    dead_letters(sql, name, "one", "two")
    sql.execute("select pgqueue.enqueue_batch(%s, '{1,2,3}')", [name])
    sql.execute("select pgqueue.claim(%s)", [name])
    sql.execute("select pgqueue.enqueue(%s, '4', delay => '1 h')", [name])
    sql.execute("select pgqueue.subscribe('orders.#', %s)", [name])
    sql.execute("select pgqueue.stream_open(%s, 'warehouse', 'spark-1')", [name])
    asked = follow(web, web.get("/queue", params=at), "Purge…")
    assert texts(asked, "h1") == [f"Purge {name}?"]
    assert texts(asked, "li") == ["2 ready messages", "1 message in flight", "1 scheduled message"]
    refused = submit(web, asked, "Purge", typed="another")
    assert texts(refused, ALERT) == [f"the typed name is 'another'; type {name} to confirm"]
    figures = "select ready_messages + inflight_messages + scheduled_messages, dead_messages from pgqueue.stats(%s)"
    assert sql.execute(figures, [name]).fetchall() == [(4, 2)]
    purged = submit(web, refused, "Purge", typed=name)
    assert texts(purged, DONE) == ["Purged: 4 messages"]
    assert sql.execute(figures, [name]).fetchall() == [(0, 2)]
    sql.execute("select pgqueue.enqueue(%s, '5')", [name])
    sql.execute("select pgqueue.expose_transport(%s, table_name => %s)", [name, name])
    asked = follow(web, purged, "Drop…")
    assert texts(asked, "h1") == [f"Drop {name}?"]
    assert texts(asked, "li") == [
        "1 ready message",
        "2 dead letters",
        "the stream warehouse",
        "1 subscription",
        f'the relation "{name}" of expose_transport',
    ]
    dropped = submit(web, asked, "Drop", typed=name)
    assert texts(dropped, DONE) == [f"{name} is dropped with 3 messages"]
    assert texts(dropped, "h1") == ["Queues"]
    assert sql.execute("select from pgqueue.queues q where q.name = %s", [name]).fetchall() == []


def test_a_queue_in_use_is_not_dropped_and_the_page_says_why(
    web: Server, name: str, at: dict[str, str], sql: psycopg.Connection[Any]
) -> None:
    sql.execute("select pgqueue.create_queue(%s)", [name])
    with psycopg.connect(web.site.target) as other:
        other.execute("select pgqueue.enqueue(%s, '1')", [name])
        busy = web.http.post(url("/queue/drop_queue", at), data={"typed": name})
    assert busy.status_code == 409
    text = html.unescape(busy.text)
    assert f"queue '{name}' is busy: drop_queue could not obtain a lock" in text
    assert "Nothing was changed." in text
    assert f'value="{name}"' in text
    sql.execute("select pgqueue.expose_transport(%s, table_name => %s)", [name, name])
    sql.execute(f'create view "{name}-view" as select id from "{name}"')
    used = web.http.post(url("/queue/drop_queue", at), data={"typed": name})
    assert (used.status_code, f"view public.{name}-view depends on" in used.text.replace("&#34;", "")) == (409, True)
    sql.execute(f'drop view "{name}-view"')
    for verb in ("drop_queue", "purge_queue"):
        for typed in ({}, {"typed": name.upper()}):
            assert web.http.post(url(f"/queue/{verb}", at), data=typed).status_code == 422
        assert web.get(f"/queue/{verb}", params=at | {"name": "gone"}).status_code == 404
        assert web.http.post(url(f"/queue/{verb}", at | {"name": "gone"}), data={"typed": "gone"}).status_code == 404
    assert sql.execute("select count(*) from pgqueue.queues q where q.name = %s", [name]).fetchone() == (1,)


def test_a_managed_queue_that_is_dropped_on_its_page_is_deleted(web: Server, at: dict[str, str], name: str) -> None:
    web.create(name)
    dropped = web.http.post(url("/queue/drop_queue", at), data={"typed": name})
    assert dropped.status_code == 303
    web.until(lambda: web.status(name) is None)


def test_findings_of_doctor_are_shown_with_their_remedies(
    web: Server, queue: str, sql: psycopg.Connection[Any]
) -> None:
    sql.execute("select pgqueue.pause_queue(%s)", [queue])
    health = follow(web, web.get("/"), "Health")
    findings = re.findall(r'<article class="finding.*?</article>', health.text, re.DOTALL)
    (finding,) = [each for each in findings if f">{queue}</a>" in each and "<h2>paused queue</h2>" in each]
    assert '<span class="state info">info</span>' in finding
    assert f'aria-label="Remedy">select pgqueue.resume_queue(&#39;{queue}&#39;);</pre>' in finding
    assert texts(follow(web, health, queue), "h1") == [queue]


def test_consumers_and_streams_are_shown(
    web: Server, name: str, at: dict[str, str], sql: psycopg.Connection[Any]
) -> None:
    sql.execute("select pgqueue.create_queue(%s)", [name])
    sql.execute("select pgqueue.enqueue_batch(%s, array_fill('1'::jsonb, array[4]))", [name])
    sql.execute("select pgqueue.stream_open(%s, 'warehouse', 'spark-1')", [name])
    began, go_on = threading.Semaphore(0), threading.Event()

    def work(_delivery: pgqueue.Delivery) -> None:
        began.release()
        go_on.wait(PATIENCE)

    with pgqueue.Consumer(web.site.target, name, work, concurrency=3, claimed_by="worker-<b>"):
        for _ in range(3):
            assert began.acquire(timeout=PATIENCE)
        page = follow(web, web.get("/queue", params=at), "Consumers")
        go_on.set()
    rows = {texts(each, "th")[0]: each for each in re.findall("<tr>.*?</tr>", page.text, re.DOTALL)}
    assert re.search('data-label="Messages">[34]<', rows["worker-<b>"])
    assert rows["worker-<b>"].count("<time ") == 3
    assert "postgres" in rows[f"pgqueue {name}"]
    assert "spark-1" in rows["warehouse"]
    assert "No message is in flight." in web.get("/queue/consumers", params=at).text


def test_schedules_are_run_and_paused_and_topics_are_subscribed(
    web: Server, name: str, at: dict[str, str], sql: psycopg.Connection[Any]
) -> None:
    sql.execute("select pgqueue.create_queue(%s)", [name])
    sql.execute("select pgqueue.create_schedule(%s, %s, '0 3 * * *', '{\"total\": 1.10}')", [f"{name}-nightly", name])
    page = follow(web, web.get("/queue", params=at), "Schedules and topics")
    assert ("0 3 * * *" in page.text, '"total": 1.10' in html.unescape(page.text)) == (True, True)
    page = submit(web, page, f"Run now {name}-nightly")
    assert "Sent as message" in texts(page, DONE)[0]
    assert sql.execute("select payload ->> 'total' from pgqueue.browse(%s)", [name]).fetchall() == [("1.10",)]
    paused = "select paused from pgqueue.list_schedules(%s)"
    for action, expected in (("Pause", True), ("Resume", False)):
        page = submit(web, page, f"{action} {name}-nightly")
        assert sql.execute(paused, [name]).fetchall() == [(expected,)]
    page = submit(web, page, "Subscribe", topic="orders.#")
    assert texts(page, DONE) == [f"{name} is subscribed to orders.#"]
    page = submit(web, page, "Unsubscribe orders.#")
    assert "The queue is subscribed to no topic." in page.text
    # What a user may not do has no button, and a schedule of another queue is not found.
    page = web.get("/queue/schedules", params=at, auth=("viewer", ADMIN[1]))
    assert (page.status_code, "<form" in page.text.partition("<main")[2]) == (200, False)
    form = {"schedule": f"{name}-nightly", "topic": "a"}
    for action in ("run_schedule", "pause_schedule", "subscribe", "unsubscribe"):
        refused = web.http.post(url(f"/queue/{action}", at), data=form, auth=("viewer", ADMIN[1]))
        assert refused.status_code == 403, action
    sql.execute("select pgqueue.create_queue(%s)", [f"{name}-other"])
    for action in ("run_schedule", "pause_schedule", "resume_schedule"):
        assert web.http.post(url(f"/queue/{action}", at | {"name": f"{name}-other"}), data=form).status_code == 404


def test_the_sessions_of_consumers_show_their_last_statement(
    web: Server, name: str, at: dict[str, str], sql: psycopg.Connection[Any]
) -> None:
    """An idle consumer is seen as long as it lives."""
    sql.execute("select pgqueue.create_queue(%s)", [name])

    def moments() -> list[datetime]:
        """Since when there are sessions, and when the last statement ran; empty if there is no session."""
        section = web.get("/queue/consumers", params=at).text.partition('id="sessions"')[2].partition("</section>")[0]
        found = re.findall(r'data-label="(?:Since|Last statement)"><time datetime="(.*?)">', section)
        return [datetime.fromisoformat(each) for each in found]

    begun = sql.execute("select clock_timestamp()").fetchall()[0][0]
    with pgqueue.Consumer(web.site.target, name, lambda _: None, peek_delay=timedelta(milliseconds=100)):
        web.until(moments)
        for _ in range(2):
            now = sql.execute("select clock_timestamp()").fetchall()[0][0]
            since, last = web.until(lambda now=now: (found := moments())[1] >= now and found)  # type: ignore[misc]
            assert begun <= since < last
    web.until(lambda: moments() == [])


def test_charts_show_an_hour_and_a_day(
    web: Server, name: str, at: dict[str, str], sql: psycopg.Connection[Any]
) -> None:
    dead_letters(sql, name, "CardDeclined: order 1001 was declined", "HTTP 503 from the warehouse")
    place = (at["service"], at["database"], name)
    for _ in range(2):  # a new queue is drawn from its samples
        web.look(web.site.databases[0], name)
    young = web.get("/queue", params=at).text
    assert 'data-clock="8"' in young
    # The server may have looked before the messages were rejected.
    assert re.search('aria-label="Depth, from 0 to [0-2]"', young)
    with psycopg.connect(web.site.control, autocommit=True) as control:
        record_history(control, place)
    hour, day = (web.get("/queue", params=at | {"range": each}) for each in ("hour", "day"))
    lines = re.findall(r'<svg[^>]*aria-label="([^"]*)">(.*?)</svg>', hour.text, re.DOTALL)
    for label, parts in (("Depth, from 0 to 1[0-9]{2}", 1), ("Out a second", 2)):  # a gap where it is unknown
        (drawn,) = [each for name, each in lines if re.match(label, name)]
        assert drawn.count("<polyline") == parts
    assert "A gap: not recorded, or unknown." in hour.text
    assert "Last day" in texts(day, "h2")
    points = re.findall(r'aria-label="Depth.*?points="(.*?)"', day.text, re.DOTALL)[0]
    assert points.startswith("0,")  # a chart begins with the first quarter that is recorded
    assert int(points.split()[-1].partition(",")[0]) in (90, 91)  # of 96; one can end meanwhile
    assert hour.text.count("data-clock") == 5 * 3  # a chart has ticks at its begin, in its middle and at its end


def record_history(control: psycopg.Connection[Any], place: tuple[str, str, str], scale: float = 1) -> None:
    """Fill the charts of a queue: 50 minutes with a gap in what goes out, and 90 quarters of an hour."""
    for minutes, points in ((1, 50), (15, 90)):
        control.execute(
            "insert into pgqueue_http.depth_history select %s, %s, %s, %s,"
            " date_bin(make_interval(mins => %s), now(), '2000-01-01 00:00+00') - n * make_interval(mins => %s),"
            " %s * (60 + (40 * sin(n / 6.0))::int + n %% 7), greatest(26 - n, 0) / 5,"
            " 2 + abs(sin(n / 9.0)) * 8, 12 + 5 * sin(n / 8.0), case when n <> 20 then 11 + 6 * cos(n / 8.0) end"
            " from generate_series(0, %s) n on conflict do nothing",
            [*place, minutes, minutes, minutes, scale, points],
        )


def test_the_server_records_each_queue(site: Site, name: str, tmp_path: Path) -> None:
    """A server records when it starts, and then each minute. The rate is null if there was only one sample."""
    recorded = "from pgqueue_http.depth_history where queue_name = %s and minutes = 1"
    found = f"select depth, dead, coalesce(outgoing, 0) {recorded}"
    with psycopg.connect(site.target, autocommit=True) as sql:
        sql.execute("create extension pgqueue")
        dead_letters(sql, name, "declined")
        sql.execute("select pgqueue.enqueue_batch(%s, array['1', '2']::jsonb[])", [name])
    with (
        in_process(site.configuration(tmp_path)) as application,
        psycopg.connect(site.control, autocommit=True) as control,
    ):
        application.until(lambda: control.execute(found, [name]).fetchall() == [(2, 1, 0.0)])


def test_the_history_is_bounded(web: Server, name: str) -> None:
    """The quarter of an hour is summarized, what was recorded twice is kept once, and what is old is deleted."""
    from pgqueue.http import depth_history

    quarter = "date_bin('15 min', now(), '2000-01-01 00:00+00')"
    insert = (
        "insert into pgqueue_http.depth_history select 's', 'd', %s, %s, {at}, 10 * n, n, n, n, nullif(n, 2)"
        " from generate_series(1, 3) n"
    )

    async def record() -> list[tuple[Any, ...]]:
        """In one transaction, in which the time is the same, and which the server of the run waits for."""
        async with await psycopg.AsyncConnection.connect(web.site.control) as connection:
            await connection.execute("lock table pgqueue_http.depth_history in share row exclusive mode")
            await connection.execute("delete from pgqueue_http.depth_history where minutes = 15")
            for minutes, begin in (
                (1, f"{quarter} + n * interval '1 s'"),
                (1, "now() - interval '76 min' - n * interval '1 min'"),
                (15, "now() - interval '25 h' - n * interval '15 min'"),
            ):
                await connection.execute(insert.format(at=begin).encode(), [name, minutes])
            for depth in (7, 8):
                await depth_history.record(connection, [("s", "d", name, depth, 1, 2.0, 3.0, None)])
            kept = await connection.execute(
                "select minutes, depth, dead, outgoing from pgqueue_http.depth_history where queue_name = %s"
                " order by minutes desc, depth",
                [name],
            )
            rows = await kept.fetchall()
            await connection.rollback()
            return rows

    with ThreadPoolExecutor() as pool:  # Playwright's event loop runs in this thread
        kept = pool.submit(asyncio.run, record()).result()
    assert kept == [(15, 17, 3, 2.0), (1, 7, 1, None), (1, 10, 1, 1.0), (1, 20, 2, None), (1, 30, 3, 3.0)]


@pytest.mark.parametrize(
    ("text", "indented"),
    [
        (
            '{"a": 1.10, "b": [1, {}], "c": [], "d": "x: {[,]}\\" "}',
            '{|  "a": 1.10,|  "b": [|    1,|    {}|  ],|  "c": [],|  "d": "x: {[,]}\\" "|}',
        ),
        ("12345678901234567890", "12345678901234567890"),
        ('{"a": {"cut', '{|  "a": {|    "cut'),
        ('["\\\\", "\\"", "cut\\', '[|  "\\\\",|  "\\"",|  "cut\\'),
    ],
)
def test_json_is_indented_and_keeps_its_numbers(text: str, indented: str) -> None:
    from pgqueue.http.page.rendering import pretty_json

    assert pretty_json(text, 1000).split("\n") == indented.split("|")
    assert len(pretty_json("[" * 100_000, 1000)) == 1001


if SHOTS:  # only then, as it proves nothing

    def test_the_screenshots_of_the_readme_are_written(
        browser: "Browser", empty_database: Callable[[], str], tmp_path: Path
    ) -> None:
        control, shop = empty_database(), empty_database()
        database = str(conninfo_to_dict(shop)["dbname"])
        config = configuration(tmp_path, control, {"shop": (shop, [database])})
        with serving(config, tmp_path) as web, psycopg.connect(shop, autocommit=True) as sql:
            web.http.post("/create", data={"database": f"shop/{database}", "name": "invoices", "dlq_enabled": "on"})
            sql.execute("select pgqueue.create_queue('emails', dedicated => true)")
            declined = [f"CardDeclined: order {number} was declined\nretry later" for number in range(1001, 1006)]
            dead_letters(sql, "orders", *declined, "HTTP 503 from the warehouse")
            with psycopg.connect(control, autocommit=True) as connection:
                record_history(connection, ("shop", database, "orders"))
            opened = context(browser, web, viewport={"width": 1200, "height": 900})
            page = opened.new_page()
            page.goto("/")
            for number in range(1, 40):
                sql.execute(
                    "select pgqueue.enqueue_batch(%s, array_fill('1'::jsonb, array[%s]))", ["orders", 1 + number % 3]
                )
                sql.execute(
                    "select pgqueue.enqueue_batch('emails', array_fill('1'::jsonb, array[%s]))", [2 + number % 5]
                )
                sql.execute("select pgqueue.receive('emails', %s)", [1 + number % 6])
                sql.execute("select pgqueue.claim('orders', 1, '1 h', 'worker-1')") if number % 4 == 0 else None
                page.wait_for_timeout(400)
            expect(row(page, "emails").locator('[data-label="Out"] polyline')).to_have_count(1)
            page.screenshot(
                path=str(Path(SHOTS or "") / "page-queues.png"), clip={"x": 0, "y": 0, "width": 1200, "height": 380}
            )
            page.get_by_role("link", name="orders", exact=True).click()
            page.screenshot(path=str(Path(SHOTS or "") / "page-queue.png"))
            opened.close()
            phone = context(browser, web, viewport={"width": 390, "height": 844}, color_scheme="dark")
            page = phone.new_page()
            page.goto(url("/queue", {"service": "shop", "database": database, "name": "orders"}))
            page.get_by_role("heading", name="Dead letters").scroll_into_view_if_needed()
            page.evaluate("document.querySelector('.states').scrollIntoView()")
            page.screenshot(path=str(Path(SHOTS or "") / "page-phone.png"))
            phone.close()
