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
from typing import Any
from urllib.parse import urlencode

import httpx
import psycopg
import pytest
from browsers import OTHER_HOST
from clients import PATIENCE, drop
from playwright.sync_api import Browser, BrowserContext, Error, Page, expect
from psycopg.conninfo import conninfo_to_dict
from served import ADMIN, SERVICE, Server, Site, configuration, locked, new_name, serving

import pgqueue
from pgqueue.http import depth_history
from pgqueue.http.page_rendering import TEMPLATES, Row, pretty_json, sparkline
from pgqueue.http.throughput import Throughput
from pgqueue.message import QueueStats

SHOTS = os.environ.get("PGQUEUE_TEST_SCREENSHOTS")
expect.set_options(timeout=1000 * PATIENCE)
HOSTILE = "<script>document.title = 'taken'</script><img src=x onerror=\"document.title='taken'\">"


@pytest.fixture(scope="module")
def web(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("served")
    with serving(
        site.configuration(directory, users={"viewer": ["reader:*"], "sender": ["producer:*"]}), directory
    ) as web:
        web.create(new_name())  # installs pgqueue
        yield web


@pytest.fixture
def queue(sql: psycopg.Connection[Any], web: Server, site: Site) -> Iterator[str]:
    """A queue with two ready messages, and a dead letter with the failures that a consumer recorded."""
    name = new_name()
    sql.execute("select pgqueue.create_queue(%s, max_attempts => 2, backoff_base => '0')", [name])
    sql.execute("select pgqueue.enqueue(%s, jsonb_build_object('order_id', 1001, 'note', %s::text))", [name, HOSTILE])

    def fail(_delivery: pgqueue.Delivery) -> None:
        raise ValueError(f"card declined {HOSTILE}")

    with pgqueue.Consumer(site.target, name, fail) as consumer:
        web.until(lambda: consumer.stats.dead == 1)
    sql.execute("select pgqueue.enqueue_batch(%s, array['1', '2']::jsonb[])", [name])
    web.until(lambda: f'"{name}"' in web.get("/metrics").text)
    yield name
    drop(sql, name)


def context(browser: Browser, web: Server, user: str = ADMIN[0], **more: Any) -> BrowserContext:
    """A window of a user who has logged in."""
    made = browser.new_context(base_url=web.url, **more)
    made.set_default_timeout(1000 * PATIENCE)
    form = {"user": user, "password": ADMIN[1]}
    answer = httpx.post(f"{web.url}/login", data=form, trust_env=False, timeout=PATIENCE)
    made.add_cookies([{"name": name, "value": value, "url": web.url} for name, value in answer.cookies.items()])
    return made


@pytest.fixture
def page(browser: Browser, web: Server) -> Iterator[Page]:
    """A page that may request nothing from other hosts, and must log no error."""
    opened = context(browser, web)
    page = opened.new_page()
    complaints: list[str] = []
    page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda asked: None if asked.url.startswith((web.url, "data:")) else complaints.append(asked.url))
    yield page
    opened.close()
    assert complaints == []


def shot(page: Page, name: str) -> None:
    if SHOTS:
        page.screenshot(path=str(Path(SHOTS) / f"{name}.png"), full_page=True)


def row(page: Page, queue: str) -> Any:
    return page.locator(f'tr[data-queue="{queue}"]')


def test_the_page_shows_queues_with_figures_and_sparklines(
    page: Page, queue: str, sql: psycopg.Connection[Any]
) -> None:
    page.goto("/")
    expect(row(page, queue).locator('[data-label="Ready"]')).to_have_text("2")
    expect(row(page, queue).locator('[data-label="Dead"]')).to_have_text("1")
    sql.execute("select pgqueue.enqueue_batch(%s, array_fill('1'::jsonb, array[7]))", [queue])
    expect(row(page, queue).locator('[data-label="Ready"]')).to_have_text("9")  # without a reload
    for line in ("Depth, from 0 to 9", "In a second", "Age in seconds"):
        expect(row(page, queue).locator(f'svg[aria-label*="{line}"] polyline')).to_have_count(1)
    shot(page, "queues")


def test_the_lines_in_and_out_show_what_other_sessions_do(
    page: Page, web: Server, sql: psycopg.Connection[Any]
) -> None:
    busy, idle = new_name(), new_name()
    for name in (busy, idle):
        sql.execute("select pgqueue.create_queue(%s)", [name])
        web.until(lambda name=name: f'"{name}"' in web.get("/metrics").text)  # type: ignore[misc]
    page.goto("/")
    sql.execute("select pgqueue.enqueue_batch(%s, array_fill('1'::jsonb, array[50]))", [busy])
    sql.execute("select pgqueue.ack(%s, m.id, m.claim_token) from pgqueue.claim(%s, 40) m", [busy, busy])
    acknowledged = re.compile(f'^pgqueue_messages_acknowledged_total.*"{busy}".* 40.0$', re.MULTILINE)
    web.until(lambda: acknowledged.search(web.get("/metrics").text))
    for name, most in ((busy, "[1-9]"), (idle, "0$")):
        for label in ("In", "Out"):
            line = row(page, name).locator(f'[data-label="{label}"] svg')
            expect(line).to_have_attribute("aria-label", re.compile(f"^{label} a second, from 0 to {most}"))
    for name in (busy, idle):
        drop(sql, name)


def test_queues_are_found_and_sorted_where_there_are_many(
    page: Page, web: Server, sql: psycopg.Connection[Any]
) -> None:
    prefix = new_name()
    names = [f"{prefix}-{number}" for number in range(21)]
    for name in names:
        sql.execute("select pgqueue.create_queue(%s)", [name])
    sql.execute("select pgqueue.enqueue_batch(%s, array['1', '2']::jsonb[])", [names[2]])
    sql.execute("select pgqueue.enqueue(%s, '1')", [names[1]])
    figures = re.compile(rf'^pgqueue_ready_messages.*"{names[2]}".* 2.0$', re.MULTILINE)
    web.until(lambda: figures.search(web.get("/metrics").text) and names[20] in web.get("/metrics").text)
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
    for name in names:
        drop(sql, name)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_viewer_sees_everything_and_no_form_that_changes_something(
    browser: Browser, web: Server, queue: str, site: Site, scheme: Any
) -> None:
    for width in (1200, 320):
        seen = context(browser, web, "viewer", viewport={"width": width, "height": 700}, color_scheme=scheme)
        page = seen.new_page()
        page.goto("/")
        row(page, queue).get_by_role("link", name=queue).click()
        place = {"service": SERVICE, "database": site.databases[0], "name": queue}
        expect(page.get_by_text("card declined").first).to_be_visible()
        paths = [page.url, *(f"{web.url}/{each}?{urlencode(place)}" for each in ("queue/consumers", "queue"))]
        for path in [f"{web.url}/", *paths]:
            page.goto(path)
            expect(page.get_by_text("viewer")).to_be_visible()
            assert page.locator("form[method=post]").count() == 1, path  # that which logs out
            for text in ("Create a queue", "Health", "Settings", "Send", "Redrive", "Delete", "Purge", "Drop", "Pause"):
                assert page.locator("main, nav").get_by_text(re.compile(f"^{text}")).count() == 0, (path, text)
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), path
            shot(page, f"viewer-{'queue' if 'queue' in path else 'queues'}-{width}-{scheme}")
        page.get_by_role("button", name="Log out").click()
        expect(page).to_have_url(f"{web.url}/login")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        shot(page, f"login-{width}-{scheme}")
        seen.close()


def test_a_browser_is_sent_to_the_log_in_form_and_back(browser: Browser, web: Server, queue: str, site: Site) -> None:
    url = web.url.replace("127.0.0.1", OTHER_HOST)
    opened = browser.new_context(base_url=url)
    opened.set_default_timeout(1000 * PATIENCE)
    page = opened.new_page()
    place = {"service": SERVICE, "database": site.databases[0], "name": queue}
    page.goto(f"/queue/consumers?{urlencode(place)}")
    page.get_by_label("Name").fill("sender")
    page.get_by_label("Password").fill("wrong")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_have_text("name or password is wrong")
    page.get_by_label("Name").fill(ADMIN[0])
    page.get_by_label("Password").fill(ADMIN[1])
    page.get_by_role("button", name="Log in").click()
    expect(page).to_have_url(f"{url}/queue/consumers?{urlencode(place)}")
    page.get_by_role("link", name="Queues").click()
    opened.clear_cookies()  # as when the session expires while the page is open
    expect(page).to_have_url(re.compile("/login"))
    opened.close()


def test_a_producer_sends_by_the_page_without_seeing_messages(browser: Browser, web: Server, queue: str) -> None:
    opened = context(browser, web, "sender")
    page = opened.new_page()
    page.goto("/")
    assert row(page, queue).get_by_role("link", name=queue, exact=True).count() == 0
    row(page, queue).get_by_role("link", name="Send").click()
    page.get_by_label("Payload").fill('{"a": 1}')
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_role("status").first).to_contain_text("Sent as message")
    expect(page.get_by_role("heading", name="Queues")).to_be_visible()
    opened.close()


def test_a_queue_is_paused_and_resumed(page: Page, queue: str, sql: psycopg.Connection[Any]) -> None:
    page.goto("/")
    page.get_by_role("button", name=f"Pause {queue}").click()
    expect(row(page, queue).locator(".state")).to_have_text("Paused")
    assert sql.execute("select pgqueue.claim(%s)", [queue]).fetchall() == []
    page.get_by_role("button", name=f"Resume {queue}").click()
    expect(row(page, queue).locator(".state")).to_have_text("Active")
    assert len(sql.execute("select pgqueue.claim(%s)", [queue]).fetchall()) == 1


def test_a_dead_letter_is_shown_with_error_headers_and_history(page: Page, queue: str) -> None:
    page.goto("/")
    page.get_by_role("link", name=queue, exact=True).click()
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
    expect(page).to_have_title(f"{queue} – pgqueue")  # no script in a message was run
    shot(page, "dead-letters")


def test_a_dead_letter_is_redriven_after_confirmation(page: Page, queue: str, sql: psycopg.Connection[Any]) -> None:
    def dead() -> int:
        return sql.execute("select dead_messages from pgqueue.stats(%s)", [queue]).fetchall()[0][0]

    page.goto("/")
    page.get_by_role("link", name=queue, exact=True).click()
    page.get_by_role("link", name="Redrive all").click()
    expect(page.get_by_role("heading")).to_have_text(f"Redrive all dead letters of {queue}?")
    shot(page, "confirm")
    page.get_by_role("link", name="Cancel").click()
    assert dead() == 1
    page.locator("article.letter").get_by_role("link", name="Redrive").click()
    page.get_by_role("button", name="Redrive").click()
    expect(page.get_by_role("status")).to_have_text(["Redriven: 1 dead letter"])
    expect(page.get_by_text("No dead letters.")).to_be_visible()
    assert dead() == 0


def test_dead_letters_are_deleted_after_confirmation(page: Page, queue: str, sql: psycopg.Connection[Any]) -> None:
    page.goto("/")
    page.get_by_role("link", name=queue, exact=True).click()
    page.get_by_role("link", name="Delete all").click()
    expect(page.get_by_text("deletes them permanently")).to_be_visible()
    page.get_by_role("button", name="Delete").click()
    expect(page.get_by_role("status")).to_have_text(["Deleted: 1 dead letter"])
    assert sql.execute("select dead_messages, ready_messages from pgqueue.stats(%s)", [queue]).fetchall() == [(0, 2)]


def test_the_page_works_by_keyboard(page: Page, queue: str, sql: psycopg.Connection[Any]) -> None:
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

    page.goto("/")
    tab_to(f"Pause {queue}")
    with page.expect_response("**/page/queues"):
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


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_narrow_windows_with_enough_contrast(
    browser: Browser, web: Server, queue: str, scheme: Any, sql: psycopg.Connection[Any]
) -> None:
    long = "a-name-as-long-as-it-may-be-" + "x" * 90 + new_name()[:10]
    sql.execute("select pgqueue.create_queue(%s)", [long])
    web.until(lambda: long in web.get("/metrics").text)
    sql.execute("select pgqueue.subscribe(%s, %s)", ["orders." + "x" * 200, queue])
    sql.execute("select pgqueue.claim(%s, claimed_by => %s)", [queue, "worker-" + "x" * 100])
    opened = context(browser, web, viewport={"width": 320, "height": 800}, color_scheme=scheme)
    page = opened.new_page()
    page.goto("/")
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
            for background, text in page.evaluate(CONTRAST):
                assert ratio(background, text) >= 4.5, (background, text)
            shot(page, f"{path.lower().replace(' ', '-')}-{width}-{scheme}")
        page.set_viewport_size({"width": 320, "height": 800})
        page.goto("/")
    opened.close()
    drop(sql, long)


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


def test_the_page_works_without_scripts(
    browser: Browser, web: Server, queue: str, sql: psycopg.Connection[Any]
) -> None:
    opened = context(browser, web, java_script_enabled=False)
    page = opened.new_page()
    page.goto("/")
    row(page, queue).get_by_role("button", name="Pause").click()
    expect(row(page, queue).locator(".state")).to_have_text("Paused")
    sql.execute("select pgqueue.enqueue(%s, '1')", [queue])
    # the page reloads itself
    expect(row(page, queue).locator('[data-label="Ready"]')).to_have_text("3")
    opened.close()


def test_the_page_says_when_the_server_does_not_answer(browser: Browser, web: Server) -> None:
    opened = context(browser, web)
    page = opened.new_page()
    page.clock.install()
    page.goto("/")
    page.route("**/page/queues", lambda route: route.abort())
    page.clock.run_for(2000)
    expect(page.locator("#stale")).to_be_visible()
    page.unroute("**/page/queues")
    page.clock.run_for(2000)
    expect(page.locator("#stale")).to_be_hidden()
    opened.close()


def test_a_form_of_another_site_is_refused(
    browser: Browser, web: Server, queue: str, sql: psycopg.Connection[Any], site: Site
) -> None:
    """The browser sends the password with the request; the server refuses it."""
    opened = context(browser, web)
    page = opened.new_page()
    page.goto("/")
    where = f"service=pg-service-uuid&database={site.databases[0]}&name={queue}"
    form = f'<form method="post" action="{web.url}/queue/purge?{where}"><button>Win</button></form>'
    page.route("http://evil.example/", lambda route: route.fulfill(content_type="text/html", body=form))
    page.goto("http://evil.example/")
    with page.expect_response(f"{web.url}/**") as answer:
        page.get_by_role("button").click()
    assert answer.value.status == 403
    assert sql.execute("select dead_messages from pgqueue.stats(%s)", [queue]).fetchall() == [(1,)]
    page.route("http://evil.example/frame", lambda route: route.fulfill(body=f'<iframe src="{web.url}/"></iframe>'))
    page.goto("http://evil.example/frame")
    with pytest.raises((Error, AssertionError)):
        expect(page.frame_locator("iframe").locator("h1")).to_be_visible(timeout=1500)
    opened.close()


def test_unknown_queues_and_actions_of_the_page_are_errors(web: Server, queue: str, site: Site) -> None:
    place = {"service": "pg-service-uuid", "database": site.databases[0], "name": queue}
    assert web.get("/queue", params=place).status_code == 200
    for wrong in ({"service": "x"}, {"database": "x"}, {"name": "x"}, {"name": "'; --"}):
        assert web.get("/queue", params=place | wrong).status_code == 404
        assert web.post("/queue/purge", b"id=all", params=place | wrong).status_code == 404
    assert web.post("/queue/drop", params=place).status_code == 404
    assert web.get("/queue/confirm", params=place | {"action": "drop"}).status_code == 404
    assert web.post("/queue/purge", b"id=x", params=place).status_code == 422
    assert web.get("/queue", params=place | {"done": HOSTILE}).text.count("<script>") == 0


def test_errors_of_the_page_are_html_pages(web: Server, site: Site) -> None:
    place = {"service": "pg-service-uuid", "database": site.databases[0], "name": "gone"}
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
    drawn = [
        re.findall(r'<polyline points="([^"]*)"', sparkline(line, "Depth", "depth")) for line in ([3.0] * 90, STEPS)
    ]
    assert drawn == [["0,2.0 89,2.0"], ["0,26.0 2,26.0 3,2.0 5,2.0 6,26.0"]]


STEPS = [0.0, 0.0, 0.0, 6.0, 6.0, 6.0, 0.0]


def test_the_table_marks_each_estimated_figure() -> None:
    stats = QueueStats("orders", 20_000, 1, 2, 30_000, 1.0, False, ["ready_messages", "dead_messages"])
    table = TEMPLATES.get_template("table.html").render(
        rows=[Row(("s", "d", "orders"), stats)], failing=[], control_fails=False, up=""
    )
    figures = re.findall(r'<td class="figure.*?data-label="(.*?)">(.*?)</td>', table)
    mark = '<abbr title="an estimate">≈</abbr> '
    assert figures == [("Ready", f"{mark}20,000"), ("In flight", "1"), ("Scheduled", "2"), ("Dead", f"{mark}30,000")]


def test_the_page_works_behind_a_path_prefix(web: Server, queue: str, site: Site) -> None:
    """Behind a proxy that strips a path prefix, no link may be relative to the root."""
    place = {"service": "pg-service-uuid", "database": site.databases[0], "name": queue}
    paths = ("/", "/page/queues", "/create", "/health", "/queue", "/queue/settings", "/queue/consumers", "/queue/send")
    pages = [web.get(path, params=place) for path in paths]
    pages.append(web.get("/queue/confirm", params=place | {"action": "redrive"}))
    leads = [lead for page in pages for lead in re.findall(r'(?:href|src|action|data-live)="([^"]*)"', page.text)]
    assert len(leads) > 20
    assert not [lead for lead in leads if lead.startswith("/")]
    for form, target in (({"to": "queues"}, "../"), ({}, "../queue?")):
        answer = web.http.post("/queue/resume", params=place, data=form)
        assert answer.headers["location"].startswith(target)
        assert web.http.get(str(answer.next_request.url)).status_code == 200


@pytest.mark.parametrize(
    "form",
    [
        {"content": b""},
        {"data": {"id": ""}},
        {"data": {"id": ["1", "x"]}},
        {"files": {"id": (None, "1")}},
        {"content": b"&".join([b"id=1"] * 10_001)},
        {"json": {"id": 1}},
    ],
)
def test_a_form_without_valid_ids_deletes_nothing(
    web: Server, queue: str, site: Site, sql: psycopg.Connection[Any], form: Any
) -> None:
    place = {"service": "pg-service-uuid", "database": site.databases[0], "name": queue}
    for action in ("purge", "redrive"):
        assert web.http.post(f"/queue/{action}", params=place, **form).status_code == 422
    assert web.http.post("/queue/purge", params=place | {"id": "1"}).status_code == 422
    assert sql.execute("select dead_messages from pgqueue.stats(%s)", [queue]).fetchall() == [(1,)]
    assert web.http.post("/queue/purge", params=place, data={"id": "all"}).status_code == 303
    assert sql.execute("select dead_messages from pgqueue.stats(%s)", [queue]).fetchall() == [(0,)]


@pytest.mark.parametrize(
    "headers",
    [
        '{"pgqueue.failures": [{"attempt": {}, "failed_at": [], "exception_type": null}, 1], "a": 1}',
        '{"pgqueue.failures": {}}',
        '{"a": ' + "[" * 900 + "]" * 900 + "}",
        '{"a": ' + "[" * 5000 + "]" * 5000 + "}",
        '{"a": ' + "9" * 5000 + "}",
        '"no object"',
    ],
)
def test_the_page_shows_any_headers(web: Server, site: Site, sql: psycopg.Connection[Any], headers: str) -> None:
    name = new_name()
    sql.execute("select pgqueue.create_queue(%s, max_attempts => 1)", [name])
    sql.execute("select pgqueue.enqueue(%s, '1')", [name])
    sql.execute("update pgqueue.messages set headers = %s where queue_name = %s", [headers, name])  # plain SQL
    sql.execute("select pgqueue.nack(%s, id, claim_token) from pgqueue.claim(%s)", [name, name])
    place = {"service": "pg-service-uuid", "database": site.databases[0], "name": name}
    answer = web.get("/queue", params=place)
    assert answer.status_code == 200
    assert 'class="letter"' in answer.text
    drop(sql, name)


def test_dead_letters_are_paged(page: Page, sql: psycopg.Connection[Any], web: Server) -> None:
    name = new_name()
    sql.execute("select pgqueue.create_queue(%s, max_attempts => 1)", [name])
    sql.execute("select pgqueue.enqueue_batch(%s, array_fill('1'::jsonb, array[25]))", [name])
    sql.execute("select pgqueue.nack(%s, id, claim_token) from pgqueue.claim(%s, 25)", [name, name])
    web.until(lambda: name in web.get("/metrics").text)
    page.goto("/")
    page.get_by_role("link", name=name, exact=True).click()
    expect(page.locator("article.letter")).to_have_count(20)
    page.get_by_role("link", name="Next").click()
    expect(page.locator("article.letter")).to_have_count(5)
    page.get_by_role("link", name="First").click()
    expect(page.locator("article.letter")).to_have_count(20)
    drop(sql, name)


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


@pytest.fixture
def name(sql: psycopg.Connection[Any]) -> Iterator[str]:
    """The name of a queue that the test creates."""
    name = new_name()
    yield name
    drop(sql, name)


@pytest.fixture
def at(site: Site, name: str) -> dict[str, str]:
    """The parameters of the pages of that queue."""
    return {"service": "pg-service-uuid", "database": site.databases[0], "name": name}


def url(page: str, at: dict[str, str]) -> str:
    return f"{page}?{httpx.QueryParams(at)}"


def test_messages_of_every_state_are_shown(
    page: Page, name: str, at: dict[str, str], sql: psycopg.Connection[Any]
) -> None:
    sql.execute("select pgqueue.create_queue(%s, archive_for => '1 day')", [name])
    for number in (1, 2, 3):
        sql.execute("select pgqueue.enqueue(%s, jsonb_build_object('number', %s::int))", [name, number])
    acked = "select pgqueue.ack(%s, m.id, m.claim_token) from pgqueue.claim(%s, claimed_by => 'worker-1') m"
    sql.execute(acked, [name, name])
    sql.execute("select pgqueue.claim(%s, claimed_by => 'worker-2')", [name])
    sql.execute("select pgqueue.enqueue(%s, body => 'plain text', delay => '1 h')", [name])
    page.goto(url("/queue", at))
    letter = page.locator("article.letter")
    for state, payload, fact in (
        ("Ready", '"number": 3', "attempt 0 of 5"),
        ("In flight", '"number": 2', "held by worker-2"),
        ("Scheduled", "plain text", "Body, 10 bytes"),
        ("Archived", '"number": 1', "last held by worker-1"),
    ):
        page.get_by_role("link", name=state, exact=True).click()
        expect(page.get_by_role("heading", name=f"{state} messages")).to_be_visible()
        expect(letter).to_have_count(1)
        expect(letter).to_contain_text(payload)
        expect(letter).to_contain_text(fact)
    page.get_by_role("link", name="Dead", exact=True).click()
    expect(page.get_by_text("No dead letters.")).to_be_visible()


def test_messages_are_searched_by_id_header_payload_and_error(
    page: Page, name: str, at: dict[str, str], sql: psycopg.Connection[Any]
) -> None:
    ids = dead_letters(sql, name, "Timeout: no answer", "Declined: 100% <b>", "Timeout: host down")
    page.goto(url("/queue", at))
    headings = page.locator("article.letter h3")
    for fields, found in (
        ({"Id": str(ids[1])}, [ids[1]]),
        ({"Header": "tenant", "Value of the header": "globex"}, [ids[1]]),
        ({"Header": "region"}, []),
        ({"Payload, a JSON path": "$.order_id >= 1002"}, ids[1:]),
        ({"Payload, a JSON path": '$.items[*] ? (@.sku == "A-1001")'}, ids[:1]),
        ({"Error contains": "TIMEOUT"}, [ids[0], ids[2]]),
        ({"Error contains": "100% <b>"}, [ids[1]]),
        ({"Error contains": "timeout", "Payload, a JSON path": "$.order_id == 1003"}, ids[2:]),
    ):
        page.get_by_text("Search", exact=True).first.click()
        for label, text in fields.items():
            page.get_by_label(label, exact=True).fill(text)
        page.get_by_role("button", name="Search").click()
        expect(page.locator(".looked")).to_contain_text(f"{len(found)} message")
        expect(headings).to_have_text([str(each) for each in found])
        page.get_by_role("link", name="Show all").click()
        expect(headings).to_have_count(3)


def test_a_long_payload_is_cut_in_the_list_and_whole_on_its_own_page(
    page: Page, name: str, at: dict[str, str], sql: psycopg.Connection[Any]
) -> None:
    sql.execute("select pgqueue.create_queue(%s)", [name])
    sql.execute("select pgqueue.enqueue(%s, jsonb_build_array(repeat('a', 50000), 'the end'))", [name])
    page.goto(url("/queue", at))
    expect(page.locator("pre.payload")).to_have_text(re.compile("^.{3000,4100}…$", re.DOTALL))
    page.get_by_role("link", name="The whole payload").click()
    expect(page.locator("pre.payload")).to_have_text(re.compile('"the end"\\s*\\]$'))


def test_a_body_that_is_text_is_shown_as_text(
    page: Page, name: str, at: dict[str, str], sql: psycopg.Connection[Any]
) -> None:
    sql.execute("select pgqueue.create_queue(%s)", [name])
    xml = '<?xml version="1.0"?>\n<Order>\n  <Name>Zoë 👩\u200d👧</Name>\n</Order>'
    long = "a" + "ü" * 3000 + "."  # The list shows 4000 bytes, the last of which is half a character.
    bodies = (xml, '\ufeff{"order_id":1006}', long, "{name}, [1]", b"\x00\xffbinary", "\x1b[31mred")
    for body in bodies:
        sent = body if isinstance(body, bytes) else body.encode()
        sql.execute("select pgqueue.enqueue(%s, body => %s)", [name, sent])
    page.goto(url("/queue", at))
    shown = ["00 ff 62 69 6e 61 72 79", "1b 5b 33 31 6d 72 65 64"]
    texts = page.locator("pre.payload").all_text_contents()
    assert texts == [xml, '{\n  "order_id": 1006\n}', "a" + "ü" * 1999 + "…", "{name}, [1]", *shown]
    expect(page.locator("article.letter h4").first).to_have_text(f"Body, {len(xml.encode())} bytes")
    expect(page.get_by_role("link", name="Send a copy")).to_have_count(0)  # a form cannot send bytes
    page.get_by_role("link", name="The whole payload").click()
    expect(page.locator("pre.payload")).to_have_text(long)


def test_an_invalid_json_path_is_explained(web: Server, queue: str, at: dict[str, str]) -> None:
    for path in ("$.", "$ ? (", "'; select 1; --", "<script>", '$ ? (@ like_regex "(")', "(" * 20_000):
        answer = web.get("/queue", params=at | {"name": queue, "state": "ready", "path": path})
        assert answer.status_code == 422, path
        assert "The payload filter is not a JSON path: " in answer.text
        assert "<script>" not in answer.text.partition("<main")[2]
    assert web.get("/queue", params=at | {"name": queue, "path": "lax $"}).status_code == 200


def test_a_search_looks_at_a_limited_number_of_messages_at_a_time(
    page: Page, name: str, at: dict[str, str], sql: psycopg.Connection[Any]
) -> None:
    sql.execute("select pgqueue.create_queue(%s)", [name])
    sql.execute(
        "select count(*) from pgqueue.enqueue_batch(%s, array(select to_jsonb(n) from generate_series(1, 10050) n))",
        [name],
    )
    page.goto(url("/queue", at | {"path": "$ == 10050"}))
    expect(page.locator(".looked")).to_have_text("0 messages on this page; looked at 10,000 messages.")
    page.get_by_role("link", name="Search further").click()
    expect(page.locator(".looked")).to_have_text("1 message on this page; looked at 50 messages.")
    expect(page.locator("article.letter pre.payload")).to_have_text("10050")


def test_a_search_takes_a_limited_time(web: Server, queue: str, at: dict[str, str], site: Site) -> None:
    with locked(site.target, "lock table pgqueue.archived_messages"):
        answer = web.get("/queue", params=at | {"name": queue, "state": "archived"})
    assert answer.status_code == 503
    assert "The search took too long and was ended." in answer.text


def test_errors_are_grouped_and_a_group_is_redriven(
    page: Page, name: str, at: dict[str, str], sql: psycopg.Connection[Any]
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
    expect(page.locator("article.letter")).to_have_count(20)
    page.get_by_role("link", name="Redrive all found…").click()
    expect(page.get_by_role("heading")).to_have_text(f"Redrive 23 dead letters of {name}?")
    page.get_by_role("button", name="Redrive").click()
    expect(page.get_by_role("status")).to_have_text(["Redriven: 23 dead letters"])
    expect(page.locator("article.letter")).to_have_count(3)
    assert sql.execute("select ready_messages, dead_messages from pgqueue.stats(%s)", [name]).fetchall() == [(23, 3)]


def test_selected_dead_letters_are_deleted_without_scripts(
    browser: Browser, web: Server, name: str, at: dict[str, str], sql: psycopg.Connection[Any]
) -> None:
    ids = dead_letters(sql, name, "one", "two", "three")
    opened = context(browser, web, java_script_enabled=False)
    page = opened.new_page()
    page.goto(url("/queue", at))
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
    page: Page, name: str, at: dict[str, str], sql: psycopg.Connection[Any]
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


def test_all_messages_of_a_page_are_selected_at_once(
    page: Page, name: str, at: dict[str, str], sql: psycopg.Connection[Any]
) -> None:
    dead_letters(sql, name, "one", "two", "three")
    page.goto(url("/queue", at))
    page.get_by_label("All on this page").check()
    page.get_by_role("button", name="Redrive selected…").click()
    expect(page.get_by_role("heading")).to_have_text(f"Redrive 3 dead letters of {name}?")


def test_a_dead_letter_is_edited_and_retried(
    page: Page, web: Server, name: str, at: dict[str, str], sql: psycopg.Connection[Any]
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


def test_a_message_is_sent(page: Page, name: str, at: dict[str, str], sql: psycopg.Connection[Any]) -> None:
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


def test_a_message_is_sent_with_a_key_and_a_priority(
    page: Page, name: str, at: dict[str, str], sql: psycopg.Connection[Any]
) -> None:
    sql.execute("select pgqueue.create_queue(%s, priorities => true)", [name])
    for payload in "12":
        page.goto(url("/queue/send", at))
        page.get_by_label("Payload, as JSON").fill(payload)
        page.get_by_text("More").click()
        expect(page.get_by_label("Group")).to_have_count(0)
        page.get_by_label("Deduplication key").fill("invoice-9")
        page.get_by_label("Priority").fill("7")
        page.get_by_role("button", name="Send").click()
        expect(page.get_by_role("status")).to_contain_text("has the key invoice-9")
    found = sql.execute("select payload, headers from pgqueue.browse(%s)", [name]).fetchall()
    assert found == [(1, {"pgqueue.priority": 7})]


def test_a_message_is_sent_with_a_group(
    page: Page, name: str, at: dict[str, str], sql: psycopg.Connection[Any]
) -> None:
    sql.execute("select pgqueue.create_queue(%s, group_limit => 1)", [name])
    page.goto(url("/queue/send", at))
    page.get_by_label("Payload, as JSON").fill("1")
    page.get_by_text("More").click()
    expect(page.get_by_label("Priority")).to_have_count(0)
    page.get_by_label("Group").fill("customer 5")
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_role("status")).to_contain_text("Sent as message")
    found = sql.execute("select headers from pgqueue.browse(%s)", [name]).fetchall()
    assert found == [({"pgqueue.group": "customer 5"},)]


def test_the_form_for_a_dead_letter_takes_no_key(web: Server, queue: str, at: dict[str, str]) -> None:
    at = at | {"name": queue}
    dead = web.http.get(url("/queue", at | {"state": "dead"})).text.partition("state=dead&amp;id=")[2].partition('"')[0]
    form = web.http.get(url("/queue/send", at | {"state": "dead", "id": dead})).text
    assert ('name="replaces"' in form, 'name="dedup_key"' in form) == (True, False)
    assert 'name="dedup_key"' in web.http.get(url("/queue/send", at)).text


@pytest.mark.parametrize(
    ("form", "problem"),
    [
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
    ],
)
def test_an_invalid_message_is_not_sent_and_the_form_keeps_it(
    web: Server, queue: str, at: dict[str, str], form: dict[str, str], problem: str
) -> None:
    answer = web.http.post(url("/queue/send", at | {"name": queue}), data=form | {"copy_of": "'\"<script>"})
    assert answer.status_code == 422
    text = html.unescape(answer.text)
    assert problem in text.partition('role="alert"')[2].partition("</p>")[0]
    assert form["payload"] in text
    assert "<script>" not in answer.text.partition("<main")[2]


def test_a_queue_is_created_and_its_settings_are_changed(page: Page, name: str, sql: psycopg.Connection[Any]) -> None:
    page.goto("/")
    page.get_by_role("link", name="Create a queue").click()
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


def test_invalid_settings_are_explained(web: Server, queue: str, at: dict[str, str], site: Site) -> None:
    at = at | {"name": queue}
    database = f"pg-service-uuid/{site.databases[0]}"
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
    browser: Browser, web: Server, name: str, at: dict[str, str], sql: psycopg.Connection[Any]
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
    web: Server, name: str, at: dict[str, str], sql: psycopg.Connection[Any], site: Site
) -> None:
    sql.execute("select pgqueue.create_queue(%s)", [name])
    with psycopg.connect(site.target) as other:
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


def test_findings_of_doctor_are_shown_with_their_remedies(page: Page, queue: str, sql: psycopg.Connection[Any]) -> None:
    sql.execute("select pgqueue.pause_queue(%s)", [queue])
    page.goto("/")
    page.get_by_role("link", name="Health").click()
    finding = page.locator(".finding").filter(has_text=queue).filter(has_text="paused queue")
    expect(finding.locator(".state")).to_have_text("info")
    expect(finding.get_by_label("Remedy")).to_have_text(f"select pgqueue.resume_queue('{queue}');")
    finding.get_by_role("link", name=queue).click()
    expect(page.get_by_role("heading", level=1)).to_have_text(queue)


def test_consumers_streams_and_subscriptions_are_shown(
    page: Page, name: str, at: dict[str, str], sql: psycopg.Connection[Any], site: Site
) -> None:
    sql.execute("select pgqueue.create_queue(%s)", [name])
    sql.execute("select pgqueue.enqueue_batch(%s, array_fill('1'::jsonb, array[4]))", [name])
    sql.execute("select pgqueue.subscribe('orders.#', %s)", [name])
    sql.execute("select pgqueue.stream_open(%s, 'warehouse', 'spark-1')", [name])
    began, go_on = threading.Semaphore(0), threading.Event()

    def work(_delivery: pgqueue.Delivery) -> None:
        began.release()
        go_on.wait(PATIENCE)

    with pgqueue.Consumer(site.target, name, work, concurrency=3, claimed_by="worker-<b>"):
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
    web: Server, name: str, at: dict[str, str], sql: psycopg.Connection[Any], site: Site
) -> None:
    """An idle consumer is seen as long as it lives."""
    sql.execute("select pgqueue.create_queue(%s)", [name])

    def moments() -> list[datetime]:
        """Since when there are sessions, and when the last statement ran; empty if there is no session."""
        section = web.get("/queue/consumers", params=at).text.partition('id="sessions"')[2].partition("</section>")[0]
        found = re.findall(r'data-label="(?:Since|Last statement)"><time datetime="(.*?)">', section)
        return [datetime.fromisoformat(each) for each in found]

    begun = sql.execute("select clock_timestamp()").fetchall()[0][0]
    with pgqueue.Consumer(site.target, name, lambda _: None, peek_delay=timedelta(milliseconds=100)):
        web.until(moments)
        for _ in range(2):
            now = sql.execute("select clock_timestamp()").fetchall()[0][0]
            since, last = web.until(lambda now=now: (found := moments())[1] >= now and found)  # type: ignore[misc]
            assert begun <= since < last
    web.until(lambda: moments() == [])


def test_charts_show_an_hour_and_a_day(
    page: Page, name: str, at: dict[str, str], sql: psycopg.Connection[Any], site: Site
) -> None:
    dead_letters(sql, name, "CardDeclined: order 1001 was declined", "HTTP 503 from the warehouse")
    place = ("pg-service-uuid", site.databases[0], name)
    with psycopg.connect(site.control, autocommit=True) as control:
        record_history(control, place)
    page.goto(url("/queue", at))
    depth, out = page.locator("figure").filter(has_text="Depth"), page.locator("figure").filter(has_text="Out")
    expect(depth.locator("polyline")).to_have_count(1)
    expect(depth.locator("svg")).to_have_attribute("aria-label", re.compile("^Depth, from 0 to 1[0-9]{2}$"))
    expect(out.locator("polyline")).to_have_count(2)  # a gap where it is unknown
    expect(page.locator(".charts .facts")).to_have_text(re.compile("A gap: not recorded, or unknown\\.$"))
    page.get_by_role("link", name="Day", exact=True).click()
    expect(page.get_by_role("heading", name="Last day")).to_be_visible()
    points = depth.locator("polyline").first.get_attribute("points") or ""
    assert points.startswith("5,")  # of the 96 quarters the first five are not recorded


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


def test_the_server_records_each_queue(site: Site, queue: str, tmp_path: Path, web: Server) -> None:
    """A server records when it starts, and then each minute. The rate is null if there was only one sample."""
    found = "select depth, dead, coalesce(outgoing, 0) from pgqueue_http.depth_history where queue_name = %s"
    with (
        serving(site.configuration(tmp_path), tmp_path),
        psycopg.connect(site.control, autocommit=True) as control,
    ):
        # The other server may have recorded the queue before, while the fixture filled it.
        web.until(lambda: (2, 1, 0.0) in control.execute(found, [queue]).fetchall())


@pytest.mark.usefixtures("web")
def test_the_history_is_bounded(site: Site) -> None:
    """Quarters of an hour are summarized, what was recorded twice is kept once, and what is old is deleted."""
    name, quarter = new_name(), "date_bin('15 min', now(), '2000-01-01 00:00+00')"
    insert = (
        "insert into pgqueue_http.depth_history select 's', 'd', %s, %s, {at}, 10 * n, n, n, n, nullif(n, 2)"
        " from generate_series(1, 3) n"
    )

    async def record() -> None:
        async with await psycopg.AsyncConnection.connect(site.control, autocommit=True) as connection:
            for depth in (7, 8):
                stats = QueueStats(name, depth, 0, 0, 1, 2.0, False, [])
                row = depth_history.recorded_row(("s", "d", name), stats, Throughput(3.0))
                await depth_history.record(connection, [row])

    with psycopg.connect(site.control, autocommit=True) as control:
        control.execute("delete from pgqueue_http.depth_history where minutes = 15")
        control.execute(insert.format(at=f"{quarter} - n * interval '1 min'"), [name, 1])
        control.execute(insert.format(at="now() - interval '76 min' - n * interval '1 min'"), [name, 1])
        control.execute(insert.format(at="now() - interval '25 h' - n * interval '15 min'"), [name, 15])
        with ThreadPoolExecutor() as pool:  # Playwright's event loop runs in this thread
            pool.submit(asyncio.run, record()).result()
        kept = control.execute(
            "select minutes, depth, dead, outgoing from pgqueue_http.depth_history where queue_name = %s"
            " order by minutes desc, depth",
            [name],
        ).fetchall()
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
    assert pretty_json(text, 1000).split("\n") == indented.split("|")
    assert len(pretty_json("[" * 100_000, 1000)) == 1001


if SHOTS:  # only then, as it proves nothing

    def test_the_screenshots_of_the_readme_are_written(
        browser: Browser, empty_database: Callable[[], str], tmp_path: Path
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
                path=str(Path(SHOTS) / "page-queues.png"), clip={"x": 0, "y": 0, "width": 1200, "height": 380}
            )
            page.get_by_role("link", name="orders", exact=True).click()
            page.screenshot(path=str(Path(SHOTS) / "page-queue.png"))
            opened.close()
            phone = context(browser, web, viewport={"width": 390, "height": 844}, color_scheme="dark")
            page = phone.new_page()
            page.goto(url("/queue", {"service": "shop", "database": database, "name": "orders"}))
            page.get_by_role("heading", name="Dead letters").scroll_into_view_if_needed()
            page.evaluate("document.querySelector('.states').scrollIntoView()")
            page.screenshot(path=str(Path(SHOTS) / "page-phone.png"))
            phone.close()
