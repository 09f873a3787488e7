"""The page operates queues: forms, redriving and deleting, schedules, consumers, findings, and charts."""

import html
import re
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from browsers import expect
from clients import Connection
from pages import ALERT, DONE, PAYLOAD, Place, context, dead_letters, follow, name, queue, row, submit, texts, url
from served import ADMIN, Server

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


def test_errors_are_grouped_and_a_group_is_redriven(web: Server, name: str, at: Place, sql: Connection) -> None:
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


def test_the_page_works_without_scripts(browser: "Browser", web: Server, name: str, at: Place, sql: Connection) -> None:
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


def test_selected_ready_and_scheduled_messages_are_deleted(page: "Page", name: str, at: Place, sql: Connection) -> None:
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


def test_a_dead_letter_is_edited_and_retried(page: "Page", web: Server, name: str, at: Place, sql: Connection) -> None:
    (dead,) = dead_letters(sql, name, "ValueError: unknown SKU")
    page.goto(url("/queue/message", at | {"state": "dead", "id": str(dead)}))
    page.get_by_label(f"Edit and retry {dead}").click()
    expect(page.get_by_role("heading", name=f"Edit and retry dead letter {dead}")).to_be_visible()
    expect(page.locator('[name="dedup_key"]')).to_have_count(0)  # the dead letter itself can still have it
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


def test_a_message_is_sent(web: Server, name: str, at: Place, sql: Connection) -> None:
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
    web: Server, name: str, at: Place, sql: Connection
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


def test_an_invalid_message_is_not_sent_and_the_form_keeps_it(web: Server, filled: Place) -> None:
    forms: list[tuple[dict[str, str], str]] = [
        ({"payload": '{"a": '}, "PostgreSQL cannot store payload: invalid input syntax for type json"),
        ({"payload": ""}, "the payload is empty"),
        ({"payload": "[" * 5000}, "nested too deeply"),
        ({"payload": "1e131072"}, "PostgreSQL cannot store payload: value overflows"),
        ({"payload": "1", "headers": "[1]"}, "invalid headers"),
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
        status = 400 if "nested" in problem else 422  # as in the API
        assert (answer.status_code, problem in said, form["payload"] in text) == (status, True, True), (form, said)
        assert "<script>" not in answer.text.partition("<main")[2]


def test_a_queue_is_created_and_its_settings_are_changed(web: Server, name: str, sql: Connection) -> None:
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


def test_invalid_settings_are_explained(web: Server, queue: str, at: Place) -> None:
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
    settings = web.get("/queue/settings", params=at)
    answer = submit(web, settings, "Change", visibility_timeout="0.5")
    assert (answer.status_code, "invalid visibility_timeout" in answer.text) == (422, True)
    assert 'value="0.5"' in answer.text
    answer = submit(web, settings, "Change", max_attempts="")
    assert (answer.status_code, "Attempts is empty; it must have a value" in answer.text) == (422, True)


def test_a_queue_is_purged_and_dropped_after_its_name_was_typed(
    web: Server, name: str, at: Place, sql: Connection
) -> None:
    dead_letters(sql, name, "one", "two")
    sql.execute("select pgqueue.enqueue_batch(%s, '{1,2,3}')", [name])
    sql.execute("select pgqueue.claim(%s)", [name])
    sql.execute("select pgqueue.enqueue(%s, '4', delay => '1 h')", [name])
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
    asked = follow(web, purged, "Drop…")
    assert texts(asked, "h1") == [f"Drop {name}?"]
    assert texts(asked, "li") == ["1 ready message", "2 dead letters"]
    dropped = submit(web, asked, "Drop", typed=name)
    assert texts(dropped, DONE) == [f"{name} is dropped with 3 messages"]
    assert texts(dropped, "h1") == ["Queues"]
    assert sql.execute("select from pgqueue.queues q where q.name = %s", [name]).fetchall() == []


def test_a_queue_in_use_is_not_dropped_and_the_page_says_why(
    web: Server, name: str, at: Place, sql: Connection
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


def test_a_managed_queue_that_is_dropped_on_its_page_is_deleted(web: Server, at: Place, name: str) -> None:
    web.create(name)
    dropped = web.http.post(url("/queue/drop_queue", at), data={"typed": name})
    assert dropped.status_code == 303
    web.until(lambda: web.status(name) is None)


def test_findings_of_doctor_are_shown_with_their_remedies(web: Server, queue: str, sql: Connection) -> None:
    sql.execute("select pgqueue.pause_queue(%s)", [queue])
    health = follow(web, web.get("/"), "Health")
    findings = re.findall(r'<article class="finding.*?</article>', health.text, re.DOTALL)
    (finding,) = [each for each in findings if f">{queue}</a>" in each and "<h2>paused queue</h2>" in each]
    assert '<span class="state info">info</span>' in finding
    assert f'aria-label="Remedy">select pgqueue.resume_queue(&#39;{queue}&#39;);</pre>' in finding
    assert texts(follow(web, health, queue), "h1") == [queue]


def test_schedules_are_run_and_paused_and_topics_are_subscribed(
    web: Server, name: str, at: Place, sql: Connection
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


def test_charts_show_the_last_samples(web: Server, name: str, at: Place, sql: Connection) -> None:
    dead_letters(sql, name, "CardDeclined: order 1001 was declined", "HTTP 503 from the warehouse")
    web.look(web.site.databases[0], name)
    web.look(web.site.databases[0], name)
    page = web.get("/queue", params=at).text
    # The server may have looked before the messages were rejected.
    assert re.search('aria-label="Depth, from 0 to [0-2]"', page)
    assert page.count('data-clock="8"') == 5 * 3  # a chart has ticks at its begin, in its middle and at its end


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
