// Puts what the server draws in place of what it drew before, every two seconds while somebody looks.
// The page works without it: it would load itself anew instead.
"use strict";

const live = document.querySelector("[data-live]");
const stale = document.getElementById("stale");

async function refresh() {
    if (document.hidden) return;
    try {
        const answer = await fetch(live.dataset.live, {signal: AbortSignal.timeout(10000)});
        if (!answer.ok) throw new Error(answer.status);
        const drawn = await answer.text();
        const focused = live.contains(document.activeElement) ? document.activeElement.dataset.key : null;
        live.innerHTML = drawn;
        if (focused) live.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus({preventScroll: true});
        stale.hidden = true;
    } catch {
        stale.hidden = false;
    }
}

(async function () {
    for (;;) {
        await new Promise((done) => setTimeout(done, 2000));
        await refresh();
    }
})();
document.addEventListener("visibilitychange", refresh);
