"""The page in headless Chromium: by mouse, by keyboard, in narrow windows, in dark mode, and without scripts."""

import asyncio
import html
import os
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from functools import cache
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


@cache
def cookies(url: str, user: str) -> list[tuple[str, str]]:
    """The cookies of a user who has logged in."""
    form = {"user": user, "password": ADMIN[1]}
    return list(httpx.post(f"{url}/login", data=form, trust_env=False, timeout=PATIENCE).cookies.items())


def context(browser: "Browser", web: Server, user: str = ADMIN[0], **more: Any) -> "BrowserContext":
    """A window of a user who has logged in."""
    made = browser.new_context(base_url=web.url, **more)
    made.set_default_timeout(1000 * PATIENCE)
    made.add_cookies([{"name": name, "value": value, "url": web.url} for name, value in cookies(web.url, user)])
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


def texts(answer: httpx.Response, element: str) -> list[str]:
    """The texts of the elements of a page that begin so."""
    found = re.findall(rf"<{element}(?=[ >])[^>]*>(.*?)</{element.split()[0]}>", answer.text, re.DOTALL)
    return [html.unescape(re.sub(r"<[^>]*>", "", each)) for each in found]


PAYLOAD = 'pre class="payload"'


def shot(page: "Page", name: str) -> None:
    if SHOTS:
        page.screenshot(path=str(Path(SHOTS) / f"{name}.png"), full_page=True)


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
    shot(page, "queues")


def test_queues_are_found_and_sorted_where_there_are_many(
    page: "Page", web: Server, name: str, sql: psycopg.Connection[Any]
) -> None:
    prefix = name
    names = [f"{prefix}-{number}" for number in range(21)]
    for each in names:
        sql.execute("select pgqueue.create_queue(%s)", [each])
    sql.execute("select pgqueue.enqueue_batch(%s, array['1', '2']::jsonb[])", [names[2]])
    sql.execute("select pgqueue.enqueue(%s, '1')", [names[1]])
    web.look(web.site.databases[0], names[0])
    page.goto("/")
    page.get_by_label("Find").fill(f"{prefix.upper()}-1")
    page.get_by_label("Sort by").select_option("Ready")
    page.get_by_role("button", name="Show").click()
    links = page.locator("tbody th a")
    with page.expect_response("**/page/queues?*"):
        expect(links).to_have_text([names[1], *sorted([*names[10:20]])])
    expect(links).to_have_text([names[1], *sorted([*names[10:20]])])  # after a refresh, too
    page.get_by_label(f"Pause {names[1]}", exact=True).click()
    expect(row(page, names[1]).get_by_text("Paused")).to_be_visible()
    expect(links).to_have_count(11)
    page.get_by_label("Find").fill(prefix)
    page.get_by_role("button", name="Show").click()
    expect(links).to_have_text([names[2], names[1], *sorted([names[0], *names[3:]])])
    page.get_by_label("Find").fill("<b>")
    page.get_by_role("button", name="Show").click()
    expect(page.get_by_text("No queue is found.")).to_be_visible()
    assert web.get("/", params={"sort": "claim_token"}).status_code == 422


def test_a_viewer_sees_everything_and_no_form_that_changes_something(
    browser: "Browser", web: Server, queue: str, at: dict[str, str]
) -> None:
    seen = context(browser, web, "viewer", viewport={"width": 320, "height": 700}, color_scheme="dark")
    page = seen.new_page()
    page.goto(f"/?find={queue}")
    row(page, queue).get_by_role("link", name=queue).click()
    expect(page.get_by_text("card declined").first).to_be_visible()
    for path in (f"/?find={queue}", page.url, url("/queue/consumers", at), url("/queue", at)):
        page.goto(path)
        expect(page.get_by_text("viewer")).to_be_visible()
        assert page.locator("form[method=post]").count() == 1, path  # that which logs out
        for text in ("Create a queue", "Health", "Settings", "Send", "Redrive", "Delete", "Purge", "Drop", "Pause"):
            assert page.locator("main, nav").get_by_text(re.compile(f"^{text}")).count() == 0, (path, text)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), path
        shot(page, f"viewer-{'queue' if '/queue' in path else 'queues'}")
    page.get_by_role("button", name="Log out").click()
    expect(page).to_have_url(f"{web.url}/login")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    shot(page, "login")
    seen.close()
    cookies.cache_clear()  # this session has ended


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


def test_a_producer_sends_by_the_page_without_seeing_messages(browser: "Browser", web: Server, queue: str) -> None:
    opened = context(browser, web, "sender")
    page = opened.new_page()
    page.goto(f"/?find={queue}")
    assert row(page, queue).get_by_role("link", name=queue, exact=True).count() == 0
    row(page, queue).get_by_role("link", name="Send").click()
    page.get_by_label("Payload").fill('{"a": 1}')
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_role("status").first).to_contain_text("Sent as message")
    expect(page.get_by_role("heading", name="Queues")).to_be_visible()
    opened.close()


def test_a_queue_is_paused_and_resumed(page: "Page", queue: str, sql: psycopg.Connection[Any]) -> None:
    page.goto(f"/?find={queue}")
    page.get_by_role("button", name=f"Pause {queue}").click()
    expect(row(page, queue).locator(".state")).to_have_text("Paused")
    assert sql.execute("select pgqueue.claim(%s)", [queue]).fetchall() == []
    page.get_by_role("button", name=f"Resume {queue}").click()
    expect(row(page, queue).locator(".state")).to_have_text("Active")
    assert len(sql.execute("select pgqueue.claim(%s)", [queue]).fetchall()) == 1


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
    letter.get_by_text("History: 2 failed attempts").click()
    expect(letter.locator(".history li")).to_have_count(2)
    expect(letter.locator(".history li").first).to_contain_text("Attempt 1")
    expect(page).to_have_title(f"{name} – pgqueue")  # no script in a message was run
    shot(page, "dead-letters")


def test_dead_letters_are_redriven_and_deleted_after_confirmation(
    page: "Page", web: Server, name: str, sql: psycopg.Connection[Any]
) -> None:
    def figures() -> list[tuple[int, int]]:
        return sql.execute("select dead_messages, ready_messages from pgqueue.stats(%s)", [name]).fetchall()

    ids = dead_letters(sql, name, "one", "two", "three")
    web.look(web.site.databases[0], name)
    page.goto(f"/?find={name}")
    page.get_by_role("link", name=name, exact=True).click()
    page.get_by_role("link", name="Redrive all").click()
    expect(page.get_by_role("heading")).to_have_text(f"Redrive all dead letters of {name}?")
    shot(page, "confirm")
    page.get_by_role("link", name="Cancel").click()
    assert figures() == [(3, 0)]
    page.get_by_label(f"Redrive {ids[0]}…").click()
    page.get_by_role("button", name="Redrive").click()
    expect(page.get_by_role("status")).to_have_text(["Redriven: 1 dead letter"])
    assert figures() == [(2, 1)]
    page.get_by_role("link", name="Delete all").click()
    expect(page.get_by_text("deletes them permanently")).to_be_visible()
    page.get_by_role("button", name="Delete").click()
    expect(page.get_by_role("status")).to_have_text(["Deleted: 2 dead letters"])
    expect(page.get_by_text("No dead letters.")).to_be_visible()
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
    page: "Page", web: Server, queue: str, sql: psycopg.Connection[Any]
) -> None:
    long = "a-name-as-long-as-it-may-be-" + "x" * 80 + queue
    sql.execute("select pgqueue.create_queue(%s)", [long])
    sql.execute("select pgqueue.subscribe(%s, %s)", ["orders." + "x" * 200, queue])
    sql.execute("select pgqueue.claim(%s, claimed_by => %s)", [queue, "worker-" + "x" * 100])
    web.look(web.site.databases[0], queue)
    page.set_viewport_size({"width": 320, "height": 800})
    page.emulate_media(reduced_motion="reduce")  # colours change at once
    page.goto(f"/?find={queue}")
    for path, visible in PAGES.items():
        if path != "queues":
            page.get_by_role("link", name=path if path in ("Health", "Create a queue") else queue, exact=True).click()
        if path in ("Consumers", "Settings", "Send a message", "Drop…"):
            page.get_by_role("link", name=path, exact=True).click()
        expect(page.locator(visible).first).to_be_visible()
        page.wait_for_load_state("load")  # includes its style sheet
        for width in (320, 700, 1280):  # only the style sheet depends on the width, no script does
            page.set_viewport_size({"width": width, "height": 800})
            assert page.evaluate("document.documentElement.scrollWidth") <= width
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            for background, text in page.evaluate(CONTRAST):
                assert ratio(background, text) >= 4.5, (background, text)
            shot(page, f"{path.lower().replace(' ', '-')}-{scheme}")
        page.set_viewport_size({"width": 320, "height": 800})
        page.goto(f"/?find={queue}")
    page.emulate_media(color_scheme="light")
    page.set_viewport_size({"width": 1280, "height": 720})


# The pages by their links, and what each shows.
PAGES = {
    "queues": "tr[data-queue]",
    "queue": "article.letter",
    "Consumers": "th[scope=row]",
    "Settings": "label",
    "Send a message": "textarea",
    "Drop…": "label",
    "Create a queue": "label",
    "Health": ".finding",
}
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


def test_the_page_says_when_the_server_does_not_answer(browser: "Browser", web: Server) -> None:
    opened = context(browser, web)
    page = opened.new_page()
    page.clock.install()
    page.goto("/?find=nothing")
    page.route("**/page/queues?*", lambda route: route.abort())
    page.clock.run_for(2000)
    expect(page.locator("#stale")).to_be_visible()
    page.unroute("**/page/queues?*")
    page.clock.run_for(2000)
    expect(page.locator("#stale")).to_be_hidden()
    opened.close()


def test_a_form_of_another_site_is_refused(
    browser: "Browser", web: Server, queue: str, at: dict[str, str], sql: psycopg.Connection[Any]
) -> None:
    """The browser sends the cookie with the request; the server refuses it. It shows no page in a frame."""
    opened = context(browser, web)
    page = opened.new_page()
    page.goto("/docs")
    form = f'<form method="post" action="{url(f"{web.url}/queue/purge", at)}"><button>Win</button></form>'
    page.route("http://evil.example/", lambda route: route.fulfill(content_type="text/html", body=form))
    page.goto("http://evil.example/")
    with page.expect_response(f"{web.url}/**") as answer:
        page.get_by_role("button").click()
    assert answer.value.status == 403
    assert sql.execute("select dead_messages from pgqueue.stats(%s)", [queue]).fetchall() == [(1,)]
    page.route("http://evil.example/frame", lambda route: route.fulfill(body=f'<iframe src="{web.url}/"></iframe>'))
    page.goto("http://evil.example/frame")

    def shown() -> str:
        page.wait_for_timeout(10)  # playwright learns of events meanwhile
        return "".join(frame.url.removeprefix("about:blank") for frame in page.frames[1:])

    assert web.until(shown).startswith("chrome-error:")
    opened.close()


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
    from pgqueue.http.page_rendering import sparkline

    drawn = [
        re.findall(r'<polyline points="([^"]*)"', sparkline(line, "Depth", "depth")) for line in ([3.0] * 90, STEPS)
    ]
    assert drawn == [["0,2.0 89,2.0"], ["0,26.0 2,26.0 3,2.0 5,2.0 6,26.0"]]


STEPS = [0.0, 0.0, 0.0, 6.0, 6.0, 6.0, 0.0]


def test_the_table_marks_each_estimated_figure() -> None:
    from pgqueue.http.page_rendering import TEMPLATES, Row
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
    paths = ("/", "/page/queues", "/create", "/health", "/queue", "/queue/settings", "/queue/consumers", "/queue/send")
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
    page: "Page", web: Server, name: str, at: dict[str, str], sql: psycopg.Connection[Any]
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
    page.goto(url("/queue", at))
    page.get_by_text("Search", exact=True).first.click()
    page.get_by_label("Error contains", exact=True).fill("timeout")
    page.get_by_label("Payload, a JSON path", exact=True).fill("$.order_id == 1003")
    page.get_by_role("button", name="Search").click()
    headings = page.locator("article.letter h3")
    expect(headings).to_have_text([str(ids[2])])
    page.get_by_role("link", name="Show all").click()
    expect(headings).to_have_count(3)


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
    page: "Page", name: str, at: dict[str, str], sql: psycopg.Connection[Any]
) -> None:
    declined = [f"CardDeclined: order {number} was declined\nat line {number % 7}" for number in range(1001, 1024)]
    dead_letters(sql, name, *declined, "HTTP 503 from the warehouse", "HTTP 404 from the warehouse", "")
    page.goto(url("/queue", at))
    groups = page.locator(".groups li")
    expect(groups).to_have_count(4)
    expect(groups.first).to_contain_text("23CardDeclined: order … was declined")
    for error in ("HTTP 404 from the warehouse", "HTTP 503 from the warehouse", "attempts exhausted"):
        expect(groups.filter(has_text=error)).to_contain_text(f"1{error}")
    shot(page, "errors")
    page.get_by_role("link", name="CardDeclined: order … was declined").click()
    letters = page.locator("article.letter")
    expect(letters).to_have_count(20)
    page.get_by_role("link", name="Next").click()
    expect(letters).to_have_count(3)
    page.get_by_role("link", name="First").click()
    expect(letters).to_have_count(20)
    page.get_by_role("link", name="Redrive all found…").click()
    expect(page.get_by_role("heading")).to_have_text(f"Redrive 23 dead letters of {name}?")
    page.get_by_role("button", name="Redrive").click()
    expect(page.get_by_role("status")).to_have_text(["Redriven: 23 dead letters"])
    expect(letters).to_have_count(3)
    assert sql.execute("select ready_messages, dead_messages from pgqueue.stats(%s)", [name]).fetchall() == [(23, 3)]
    page.get_by_label("All on this page").check()
    page.get_by_role("button", name="Redrive selected…").click()
    expect(page.get_by_role("heading")).to_have_text(f"Redrive 3 dead letters of {name}?")


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
    letters.get_by_role("checkbox").check()
    page.get_by_role("button", name="Delete selected…").click()
    page.get_by_role("button", name="Delete").click()
    expect(page.get_by_text("No scheduled messages.")).to_be_visible()
    found = "select ready_messages, inflight_messages, scheduled_messages from pgqueue.stats(%s)"
    assert sql.execute(found, [name]).fetchall() == [(1, 1, 0)]


def test_a_dead_letter_is_edited_and_retried(
    page: "Page", web: Server, name: str, at: dict[str, str], sql: psycopg.Connection[Any]
) -> None:
    (dead,) = dead_letters(sql, name, "ValueError: unknown SKU")
    page.goto(url("/queue", at))
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


def test_a_message_is_sent(page: "Page", name: str, at: dict[str, str], sql: psycopg.Connection[Any]) -> None:
    sql.execute("select pgqueue.create_queue(%s)", [name])
    page.goto(url("/queue", at))
    page.get_by_role("link", name="Send a message").click()
    page.get_by_label("Payload, as JSON").fill('{"order_id": 1001, "total": 12345678901234567890.10}')
    page.get_by_label("Headers, a JSON object").fill('{"tenant": "acme"}')
    page.get_by_label("Delay (s)").fill("90.5")
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_role("status")).to_contain_text("Sent as message")
    expect(page.locator("article.letter")).to_contain_text('"total": 12345678901234567890.10')
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
        ({"payload": "1e131072"}, "has a number that PostgreSQL cannot store"),
        ({"payload": "1", "headers": "[1]"}, "the headers are not a JSON object"),
        ({"payload": "1", "delay": "soon"}, "Delay (s) is invalid: soon; must be a number"),
        ({"payload": "1", "delay": "-5"}, "invalid delay"),
        ({"payload": "1", "delay": "1e99"}, "Delay (s) is invalid"),
        ({"payload": "1", "priority": "high"}, "Priority is invalid: high; must be a whole number"),
        ({"payload": "1", "priority": "10"}, "invalid priority"),
        ({"payload": "1", "dedup_key": "k" * 256}, "invalid dedup_key"),
        ({"payload": '"\\u0000"'}, "PostgreSQL cannot store this"),
    ]
    for form, problem in forms:
        answer = web.http.post(url("/queue/send", filled), data=form | {"copy_of": "'\"<script>"})
        text = html.unescape(answer.text)
        said = text.partition('role="alert"')[2].partition("</p>")[0]
        assert (answer.status_code, problem in said, form["payload"] in text) == (422, True, True), (form, said)
        assert "<script>" not in answer.text.partition("<main")[2]


def test_a_queue_is_created_and_its_settings_are_changed(page: "Page", name: str, sql: psycopg.Connection[Any]) -> None:
    page.goto(f"/?find={name}")
    page.get_by_role("link", name="Create a queue").first.click()
    page.get_by_label("Name").fill(name)
    page.get_by_label("Attempts").fill("7")
    page.get_by_label("Archive for (days)").fill("30")
    page.get_by_label("Rate limit").fill("5")
    page.get_by_role("button", name="Create").click()
    expect(page.get_by_role("status")).to_have_text([f"{name} is created"])
    settings = "select max_attempts, visibility_timeout::text, archive_for::text, dlq_enabled, dedicated, rate_limit"
    got = f"{settings} from pgqueue.get_queue(%s)"
    assert sql.execute(got, [name]).fetchall() == [(7, "00:00:30", "30 days", True, False, 5)]
    page.get_by_role("link", name="Settings").click()
    expect(page.get_by_label("Attempts")).to_have_value("7")
    page.get_by_label("Visibility timeout (s)").fill("90")
    page.get_by_label("Archive for (days)").fill("")
    page.get_by_label("Rate limit").fill("")
    page.get_by_label("Keep dead letters").uncheck()
    page.get_by_role("button", name="Change").click()
    expect(page.get_by_role("status")).to_have_text(["The settings are changed"])
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
    browser: "Browser", web: Server, name: str, at: dict[str, str], sql: psycopg.Connection[Any]
) -> None:
    dead_letters(sql, name, "one", "two")
    sql.execute("select pgqueue.enqueue_batch(%s, '{1,2,3}')", [name])
    sql.execute("select pgqueue.claim(%s)", [name])
    sql.execute("select pgqueue.enqueue(%s, '4', delay => '1 h')", [name])
    sql.execute("select pgqueue.subscribe('orders.#', %s)", [name])
    sql.execute("select pgqueue.stream_open(%s, 'warehouse', 'spark-1')", [name])
    opened = context(browser, web, java_script_enabled=False)
    page = opened.new_page()
    page.goto(url("/queue", at))
    page.get_by_role("link", name="Purge…").click()
    expect(page.get_by_role("heading")).to_have_text(f"Purge {name}?")
    expect(page.get_by_role("listitem")).to_have_text(
        ["2 ready messages", "1 message in flight", "1 scheduled message"]
    )
    expect(page.get_by_role("link", name="Cancel")).to_be_visible()
    page.get_by_label("Name of the queue").fill("another")
    page.get_by_role("button", name="Purge").click()
    expect(page.get_by_role("alert")).to_have_text(f"the typed name is 'another'; type {name} to confirm")
    figures = "select ready_messages + inflight_messages + scheduled_messages, dead_messages from pgqueue.stats(%s)"
    assert sql.execute(figures, [name]).fetchall() == [(4, 2)]
    page.get_by_label("Name of the queue").fill(name)
    page.get_by_role("button", name="Purge").click()
    expect(page.get_by_role("status")).to_have_text("Purged: 4 messages")
    assert sql.execute(figures, [name]).fetchall() == [(0, 2)]
    sql.execute("select pgqueue.enqueue(%s, '5')", [name])
    sql.execute("select pgqueue.expose_transport(%s, table_name => %s)", [name, name])
    page.get_by_role("link", name="Drop…").click()
    expect(page.get_by_role("heading")).to_have_text(f"Drop {name}?")
    expect(page.get_by_role("listitem")).to_have_text(
        [
            "1 ready message",
            "2 dead letters",
            "the stream warehouse",
            "1 subscription",
            f'the relation "{name}" of expose_transport',
        ]
    )
    page.get_by_label("Name of the queue").fill(name)
    page.get_by_role("button", name="Drop").click()
    expect(page.get_by_role("status")).to_have_text(f"{name} is dropped with 3 messages")
    expect(page.get_by_role("heading")).to_have_text("Queues")
    opened.close()
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
    page: "Page", queue: str, sql: psycopg.Connection[Any]
) -> None:
    sql.execute("select pgqueue.pause_queue(%s)", [queue])
    page.goto(f"/?find={queue}")
    page.get_by_role("link", name="Health").click()
    finding = page.locator(".finding").filter(has_text=queue).filter(has_text="paused queue")
    expect(finding.locator(".state")).to_have_text("info")
    expect(finding.get_by_label("Remedy")).to_have_text(f"select pgqueue.resume_queue('{queue}');")
    finding.get_by_role("link", name=queue).click()
    expect(page.get_by_role("heading", level=1)).to_have_text(queue)


def test_consumers_streams_and_subscriptions_are_shown(
    page: "Page", web: Server, name: str, at: dict[str, str], sql: psycopg.Connection[Any]
) -> None:
    sql.execute("select pgqueue.create_queue(%s)", [name])
    sql.execute("select pgqueue.enqueue_batch(%s, array_fill('1'::jsonb, array[4]))", [name])
    sql.execute("select pgqueue.subscribe('orders.#', %s)", [name])
    sql.execute("select pgqueue.stream_open(%s, 'warehouse', 'spark-1')", [name])
    began, go_on = threading.Semaphore(0), threading.Event()

    def work(_delivery: pgqueue.Delivery) -> None:
        began.release()
        go_on.wait(PATIENCE)

    with pgqueue.Consumer(web.site.target, name, work, concurrency=3, claimed_by="worker-<b>"):
        for _ in range(3):
            assert began.acquire(timeout=PATIENCE)
        page.goto(url("/queue", at))
        page.get_by_role("link", name="Consumers").click()
        held = page.get_by_role("row").filter(has_text="worker-<b>")
        expect(held.locator('[data-label="Messages"]')).to_have_text(re.compile("^[34]$"))
        expect(held.locator("time")).to_have_count(3)
        expect(page.get_by_role("row").filter(has_text=f"pgqueue {name}")).to_contain_text("postgres")
        go_on.set()
    expect(page.get_by_role("row").filter(has_text="warehouse")).to_contain_text("spark-1")
    expect(page.get_by_role("row").filter(has_text="orders.#")).to_be_visible()
    page.reload()
    expect(page.get_by_text("No message is in flight.")).to_be_visible()


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
    assert points[:2] in ("5,", "4,")  # of the 96 quarters the first five are not recorded; one can end meanwhile


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
    found = "select depth, dead, coalesce(outgoing, 0) from pgqueue_http.depth_history where queue_name = %s"
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
    """Quarters of an hour are summarized, what was recorded twice is kept once, and what is old is deleted."""
    from pgqueue.http import depth_history
    from pgqueue.http.throughput import Throughput
    from pgqueue.message import QueueStats

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
                (1, f"{quarter} - n * interval '1 min'"),
                (1, "now() - interval '76 min' - n * interval '1 min'"),
                (15, "now() - interval '25 h' - n * interval '15 min'"),
            ):
                await connection.execute(insert.format(at=begin).encode(), [name, minutes])
            for depth in (7, 8):
                stats = QueueStats(name, depth, 0, 0, 1, 2.0, False, [])
                row = depth_history.recorded_row(("s", "d", name), stats, Throughput(3.0))
                await depth_history.record(connection, [row])
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
    assert kept == [(15, 20, 3, 2.0), (1, 7, 1, None), (1, 10, 1, 1.0), (1, 20, 2, None), (1, 30, 3, 3.0)]


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
    from pgqueue.http.page_rendering import pretty_json

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
