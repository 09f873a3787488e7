// Replaces the table of queues with the one that the server renders, every two seconds while the page is visible, and
// selects all messages of a page, and shows times in the viewer's time zone. Without scripts, the table reloads itself instead.
"use strict";

const live = document.querySelector("[data-live]");
const stale = document.getElementById("stale");

async function refresh() {
    if (document.hidden) return;
    try {
        const answer = await fetch(live.dataset.live, {signal: AbortSignal.timeout(10000)});
        if (answer.status === 401) location.reload();  // the session has ended
        if (!answer.ok) throw new Error(answer.status);
        const html = await answer.text();
        const focused = live.contains(document.activeElement) ? document.activeElement.dataset.key : null;
        live.innerHTML = html;
        if (focused) live.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus({preventScroll: true});
        stale.hidden = true;
    } catch {
        stale.hidden = false;
    }
}

for (const time of document.querySelectorAll("time")) {
    const at = new Date(time.dateTime), text = at.toLocaleString("sv-SE");  // year-month-day, and 24 hours
    time.title = time.textContent;
    time.textContent = "clock" in time.dataset ? text.slice(11, 11 + Number(time.dataset.clock)) : text;
}

async function keepFresh() {
    for (;;) {
        await new Promise((done) => setTimeout(done, 2000));
        await refresh();
    }
}

if (live) {
    keepFresh();
    document.addEventListener("visibilitychange", refresh);
}

for (const all of document.querySelectorAll("[data-select-all]")) {
    all.closest("label").hidden = false;
    all.addEventListener("change", () => {
        for (const each of all.form.querySelectorAll("input[name=id]")) each.checked = all.checked;
    });
}
