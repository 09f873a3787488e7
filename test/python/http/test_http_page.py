"""The page in headless Chromium: by mouse, by keyboard, in narrow windows, in dark mode, and without scripts."""

import html
import re
from typing import TYPE_CHECKING, Any

import httpx
import psycopg
from browsers import OTHER_HOST, expect
from clients import PATIENCE, Connection
from pages import DONE, HOSTILE, PAYLOAD, Place, Window, dead_letters, follow, name, queue, row, submit, texts, url
from served import ADMIN, Server, locked

import pgqueue

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


def test_the_page_shows_queues_with_figures_and_sparklines(
    page: "Page", web: Server, name: str, sql: Connection
) -> None:
    busy, idle = f"{name}-busy", f"{name}-idle"
    dead_letters(sql, busy, "declined")
    sql.execute("select pgqueue.create_queue(%s)", [idle])
    web.look(web.site.databases[0], idle)
    page.goto(f"/?find={name}")
    expect(row(page, busy).locator('[data-label="Ready"]')).to_have_text("0")
    sql.execute("select pgqueue.enqueue_batch(%s, array_fill('1'::jsonb, array[50]))", [busy])
    sql.execute("select pgqueue.ack(%s, m.id, m.claim_token) from pgqueue.claim(%s, 41) m", [busy, busy])
    for each, ready, dead, most in ((busy, "9", "1", "(?!0$)"), (idle, "0", "0", "0$")):
        expect(row(page, each).locator('[data-label="Ready"]')).to_have_text(ready)  # without a reload
        expect(row(page, each).locator('[data-label="Dead"]')).to_have_text(dead)
        for label in ("In", "Out"):
            line = row(page, each).locator(f'[data-label="{label}"] svg')
            expect(line).to_have_attribute("aria-label", re.compile(f"^{label} a second, from 0 to {most}"))
    for drawn in ("Depth, from 0 to [59]", "^Age in seconds"):
        expect(row(page, busy).get_by_label(re.compile(drawn)).locator("path")).to_have_count(1)


def test_queues_are_found_and_sorted_where_there_are_many(web: Server, name: str, sql: Connection) -> None:
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
    for seen in (table, messages, follow(web, messages, "Schedules and topics", "viewer")):
        assert seen.status_code == 200
        assert 'method="post"' not in seen.text, seen.url
        for text in ("Create a queue", "Health", "Settings", "Send", "Redrive", "Delete", "Purge", "Drop", "Pause"):
            assert not re.search(rf">\s*{text}", seen.text), (seen.url, text)


def test_a_browser_is_sent_to_the_log_in_form_and_back(browser: "Browser", web: Server, filled: Place) -> None:
    place = url(web.url.replace("127.0.0.1", OTHER_HOST) + "/queue/schedules", filled)
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
    web: Server, queue: str, at: Place, sql: Connection
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
    page: "Page", web: Server, name: str, at: Place, sql: Connection
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


def test_the_page_works_by_keyboard(page: "Page", queue: str, sql: Connection) -> None:
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
    page: "Page", web: Server, queue: str, at: Place, sql: Connection
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
    page.emulate_media(color_scheme="light")
    page.set_viewport_size({"width": 1280, "height": 720})


# The background and the colour of each text.
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


def test_a_form_of_another_site_is_refused(window: Window, web: Server, queue: str, at: Place, sql: Connection) -> None:
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


def test_errors_of_the_page_are_html_pages(web: Server) -> None:
    place = web.place("gone")
    for path, home in (("/queue", "./"), ("/queue/confirm?action=purge", "../")):
        answer = web.get(path, params=httpx.QueryParams(httpx.URL(path).query).merge(place))
        assert (answer.status_code, answer.headers["content-type"]) == (404, "text/html; charset=utf-8")
        assert "there is no queue &#39;gone&#39;" in answer.text
        assert f'<a class="button" href="{home}">All queues</a>' in answer.text
    answer = web.get("/nothing/here", headers={"Accept": "text/html,*/*;q=0.8"})
    assert (answer.status_code, answer.headers["content-type"]) == (404, "text/html; charset=utf-8")
    assert "the path does not exist" in answer.text
    assert '<a class="button" href="../">All queues</a>' in answer.text
    for action in ("/queue/drop", "/queue/confirm?action=drop"):
        method = "GET" if "?" in action else "POST"
        params = httpx.QueryParams(httpx.URL(action).query).merge(place)
        assert web.call(method, action, params=params).status_code == 404
    assert web.post("/queue/pause", params=place | {"database": HOSTILE}).text.count("<script>") == 0
    assert web.get("/", params={"done": HOSTILE}).text.count("<script>") == 0
    assert web.get("/v1/queues/gone/stats").json()["error"]["code"] == "queue_not_found"


def test_a_sparkline_has_gaps_and_leaves_out_points_of_a_level_stretch() -> None:
    """Hundreds of queues are drawn every two seconds for each open page."""
    from pgqueue.http.page.rendering import sparkline

    drawn = [
        re.findall(r'<path d="([^"]*)"', sparkline(line, "Depth", "depth"))
        for line in ([3.0] * 90, [0.0, 0.0, 0.0, 6.0, 6.0, 6.0, 0.0], [6.0, None, 0.0, 6.0])
    ]
    assert drawn == [["M0 2.0h0L89 2.0"], ["M0 26.0h0L2 26.0L3 2.0L5 2.0L6 26.0"], ["M0 2.0h0M2 26.0h0L3 2.0"]]


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
    paths = ("/", "/page/queues", "/create", "/health", "/queue", "/queue/settings", "/queue/schedules")
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


def test_a_form_without_valid_ids_deletes_nothing(web: Server, queue: str, sql: Connection) -> None:
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


def test_of_many_recorded_failures_the_last_ones_are_shown(web: Server, name: str, at: Place, sql: Connection) -> None:
    """A producer can send thousands with each message, and the page shows twenty messages."""
    sql.execute("select pgqueue.create_queue(%s)", [name])
    failures = {"pgqueue.failures": [{"attempt": number} for number in range(3000)]}
    given = [name, psycopg.types.json.Jsonb(failures)]
    sql.execute("select pgqueue.enqueue(%s, '1', headers => %s) from generate_series(1, 20)", given)
    shown = web.get("/queue", params=at | {"state": "ready"}).text
    assert shown.count("<b>Attempt") == 20 * 20
    assert shown.count("<b>Attempt 2999</b>") == shown.count("<b>Attempt 2980</b>") == 20


def test_the_page_shows_any_headers(web: Server, name: str, at: Place, sql: Connection) -> None:
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


def test_messages_of_every_state_are_shown(web: Server, name: str, at: Place, sql: Connection) -> None:
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


def test_messages_are_searched_by_id_payload_and_error(web: Server, name: str, at: Place, sql: Connection) -> None:
    ids = dead_letters(sql, name, "Timeout: no answer", "Declined: 100% <b>", "Timeout: host down")
    searches: list[tuple[dict[str, str], list[int]]] = [
        ({"id": str(ids[1])}, [ids[1]]),
        ({"path": "$.order_id >= 1002"}, ids[1:]),
        ({"path": '$.items[*] ? (@.sku == "A-1001")'}, ids[:1]),
        ({"group": "Declined: 100% <b>"}, [ids[1]]),
        ({"group": "Timeout: host down", "path": "$.order_id == 1001"}, []),
    ]
    for given, found in searches:
        answer = web.get("/queue", params=at | given)
        assert f"{len(found)} message" in texts(answer, 'p class="looked" role="status"')[0]
        assert re.findall(r'<h3 id="letter-(\d+)"', answer.text) == [str(each) for each in found], given
    (form,) = re.findall(r'<form method="get" action="queue">.*?</form>', answer.text, re.DOTALL)
    assert {"id", "path"} <= {*re.findall(r' name="(.*?)"', form)}
    shown = follow(web, answer, "Show all")
    assert len(re.findall(r'<h3 id="letter-(\d+)"', shown.text)) == 3


def test_a_long_payload_is_cut_in_the_list_and_a_body_that_is_text_is_shown_as_text(
    web: Server, name: str, at: Place, sql: Connection
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


def test_an_invalid_json_path_is_explained(web: Server, filled: Place) -> None:
    for path in ("$.", "$ ? (", "'; select 1; --", "<script>", '$ ? (@ like_regex "(")', "(" * 20_000):
        answer = web.get("/queue", params=filled | {"state": "ready", "path": path})
        assert answer.status_code == 422, path
        assert "The payload filter is not a JSON path: " in answer.text
        assert "<script>" not in answer.text.partition("<main")[2]
    assert web.get("/queue", params=filled | {"path": "lax $"}).status_code == 200


def test_a_search_looks_at_a_limited_number_of_messages_at_a_time(
    web: Server, name: str, at: Place, sql: Connection
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


def test_a_search_takes_a_limited_time(web: Server, filled: Place) -> None:
    with locked(web.site.target, "lock table pgqueue.archived_messages"):
        answer = web.get("/queue", params=filled | {"state": "archived"})
    assert answer.status_code == 503
    assert "The search took too long and was ended." in answer.text
