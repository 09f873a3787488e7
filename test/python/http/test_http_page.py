"""The page in headless Chromium: by mouse, by keyboard, in narrow windows, in dark mode, and without scripts."""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
from playwright.sync_api import Browser, BrowserContext, Error, Page, expect, sync_playwright
from served import ADMIN, Server, Site, new_name, serving

import pgqueue
from pgqueue.http.page_rendering import sparkline

UNPACKED = Path(__file__).parents[3] / ".cache/chromium/chromium"
LIBRARIES = [str(path) for path in UNPACKED.parent.glob("root/usr/lib/*-linux-gnu")]
SHOTS = os.environ.get("PGQUEUE_TEST_SCREENSHOTS")
HOSTILE = "<script>document.title = 'taken'</script><img src=x onerror=\"document.title='taken'\">"


def chromium() -> str | None:
    """The Chromium of this machine, or the one that test/tools.py has unpacked."""
    return shutil.which("chromium") or (str(UNPACKED) if UNPACKED.exists() else None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = chromium()
    if path is None:
        assert not os.environ.get("CI"), "chromium is missing: make test-tools fetches it"
        pytest.skip("chromium is missing: make test-tools fetches it")
    with pytest.MonkeyPatch.context() as environment:
        # The Node of playwright needs libatomic, which came with Chromium if the machine lacks it.
        environment.setenv("LD_LIBRARY_PATH", ":".join(LIBRARIES))
        playwright = sync_playwright().start()
    browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
    yield browser
    browser.close()
    playwright.stop()


@pytest.fixture(scope="module")
def web(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("served")
    with serving(site.configuration(directory), directory) as web:
        web.create(new_name())  # installs pgqueue
        yield web


@pytest.fixture
def sql(web: Server, site: Site) -> Iterator[psycopg.Connection[Any]]:
    assert web.url
    with psycopg.connect(site.target, autocommit=True) as connection:
        yield connection


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
    sql.execute("select pgqueue.drop_queue(%s)", [name])


def context(browser: Browser, web: Server, **more: Any) -> BrowserContext:
    made = browser.new_context(base_url=web.url, http_credentials={"username": ADMIN[0], "password": ADMIN[1]}, **more)
    made.set_default_timeout(15_000)
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
    for line in ("Depth, from 0 to 9", "In a second", "Out a second", "Age in seconds"):
        expect(row(page, queue).locator(f'svg[aria-label*="{line}"] polyline')).to_have_count(1)
    shot(page, "queues")


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
    expect(letter).to_contain_text('"order_id": 1001')
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
@pytest.mark.parametrize("width", [320, 700, 1280])
def test_the_page_fits_narrow_windows_with_enough_contrast(
    browser: Browser, web: Server, queue: str, width: int, scheme: Any, sql: psycopg.Connection[Any]
) -> None:
    long = "a-name-as-long-as-it-may-be-" + "x" * 90 + new_name()[:10]
    sql.execute("select pgqueue.create_queue(%s)", [long])
    web.until(lambda: long in web.get("/metrics").text)
    opened = context(browser, web, viewport={"width": width, "height": 800}, color_scheme=scheme)
    page = opened.new_page()
    for path in ("/", None):
        if path:
            page.goto(path)
            expect(row(page, queue)).to_be_visible()
        else:
            page.get_by_role("link", name=queue, exact=True).click()
            expect(page.locator("article.letter")).to_be_visible()
        page.wait_for_load_state("load")  # includes its style sheet
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        for background, text in page.evaluate(CONTRAST):
            assert ratio(background, text) >= 4.5, (background, text)
        shot(page, f"{'queues' if path else 'queue'}-{width}-{scheme}")
    opened.close()
    sql.execute("select pgqueue.drop_queue(%s)", [long])


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
    expect(row(page, queue).locator('[data-label="Ready"]')).to_have_text("3", timeout=20_000)
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
    assert web.post("/queue/pause", params=place | {"database": HOSTILE}).text.count("<script>") == 0
    assert web.get("/v1/queues/gone/stats").json()["error"]["code"] == "queue_not_found"


def test_a_sparkline_leaves_out_points_of_a_level_stretch() -> None:
    """Hundreds of queues are drawn every two seconds for each open page."""
    drawn = [
        re.findall(r'<polyline points="([^"]*)"', sparkline(line, "Depth", "depth")) for line in ([3.0] * 90, STEPS)
    ]
    assert drawn == [["0,2.0 89,2.0"], ["0,26.0 2,26.0 3,2.0 5,2.0 6,26.0"]]


STEPS = [0.0, 0.0, 0.0, 6.0, 6.0, 6.0, 0.0]


def test_the_page_works_behind_a_path_prefix(web: Server, queue: str, site: Site) -> None:
    """Behind a proxy that strips a path prefix, no link may be relative to the root."""
    place = {"service": "pg-service-uuid", "database": site.databases[0], "name": queue}
    pages = [web.get(path, params=place) for path in ("/", "/page/queues", "/queue")]
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
    ],
)
def test_the_page_shows_any_headers(web: Server, site: Site, sql: psycopg.Connection[Any], headers: str) -> None:
    name = new_name()
    sql.execute("select pgqueue.create_queue(%s, max_attempts => 1)", [name])
    sql.execute("select pgqueue.enqueue(%s, '1', headers => %s)", [name, headers])
    sql.execute("select pgqueue.nack(%s, id, claim_token) from pgqueue.claim(%s)", [name, name])
    place = {"service": "pg-service-uuid", "database": site.databases[0], "name": name}
    answer = web.get("/queue", params=place)
    assert answer.status_code == 200
    assert 'class="letter"' in answer.text
    sql.execute("select pgqueue.drop_queue(%s)", [name])


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
    sql.execute("select pgqueue.drop_queue(%s)", [name])
