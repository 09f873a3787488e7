"""The page of dead letters in the admin: find them, send them again, also with another payload, and delete them."""

import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from django import forms
from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.db import DatabaseError, connections, transaction
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import path, reverse
from psycopg.types.json import Jsonb

from ..._wording import counted
from ...consumer.policy import FAILURES, RECORD_HEADERS
from ...message import DeadMessage, QueueStats
from .client import DjangoQueue, queue, queues
from .models import DeadLetter

__all__ = ["DeadLetterAdmin"]

_PAGE = 50
_BATCH = 500
_MOST_SEARCHED = 10_000  # dead letters, for one page of results
_MOST_CHARACTERS = 100_000  # of a payload that can be edited


class _PayloadForm(forms.Form):
    payload = forms.CharField(
        max_length=_MOST_CHARACTERS, widget=forms.Textarea({"rows": 20, "cols": 100, "class": "vLargeTextField"})
    )

    def clean_payload(self) -> Jsonb:
        """The payload, as the text that was typed: the database reads its numbers, and Python rounds none."""
        text = self.cleaned_data["payload"]
        try:
            json.loads(text)
        except ValueError as error:
            raise forms.ValidationError(f"This is no JSON: {error}.") from None
        return Jsonb(text, dumps=str)


@dataclass(frozen=True, slots=True)
class _Place:
    """A queue in a database."""

    using: str
    name: str

    @property
    def queue(self) -> DjangoQueue:
        """The queue, with JSON as text."""
        return queue(self.name, self.using, json_loads=bytes.decode)

    def url(self, **query: Any) -> str:
        """The address of its dead letters."""
        given = {name: value for name, value in query.items() if value}
        query = {"database": self.using, "queue": self.name, **given}
        return f"{reverse('admin:pgqueue_deadletter_changelist')}?{urlencode(query)}"

    def letter_url(self, id: int) -> str:
        """The address of a dead letter."""
        return str(reverse("admin:pgqueue_deadletter_letter", args=[self.using, self.name, id]))

    def pretty(self, text: str) -> str:
        """JSON with line breaks, by the database, which rounds no number."""
        with connections[self.using].cursor() as cursor:
            cursor.execute("select jsonb_pretty(%s::jsonb)", [text])
            return str(cursor.fetchone()[0])

    def find(self, id: int) -> DeadMessage:
        """A dead letter. Raises `Http404`."""
        for letter in self.queue.browse_dead_messages(1, id - 1):
            if letter.id == id:
                return letter
        raise Http404(f"queue {self.name} has no dead letter {id}: it was sent again or deleted")

    def search(self, text: str, after: int) -> tuple[list[DeadMessage], int | None]:
        """A page of dead letters that have a text in their id, reason, error, payload or headers, by id.

        Returns it with the id to go on after, or None at the end.
        """
        found: list[DeadMessage] = []
        searched = 0
        while searched < _MOST_SEARCHED:
            letters = self.queue.browse_dead_messages(_BATCH if text else _PAGE + 1, after)
            for letter in letters:
                if len(found) == _PAGE:
                    return found, after
                after = letter.id
                if text in _searchable(letter):
                    found.append(letter)
            searched += len(letters)
            if not letters or (not text and len(letters) <= _PAGE):
                return found, None
        return found, after


def _searchable(letter: DeadMessage) -> str:
    facts = (letter.id, letter.message_id, letter.reason, letter.last_error, letter.payload, letter.headers)
    return "\n".join(str(fact) for fact in facts if fact is not None).lower()


@admin.register(DeadLetter)
class DeadLetterAdmin(admin.ModelAdmin):
    """Dead letters. The permission to view shows them; to change sends them again; to delete deletes them."""

    def has_add_permission(self, _: HttpRequest) -> bool:
        """Nobody adds dead letters."""
        return False

    def get_urls(self) -> list[Any]:
        """The addresses of the pages."""
        wrap = self.admin_site.admin_view
        letter = path("<str:using>/<str:name>/<int:id>/", wrap(self.letter_view), name="pgqueue_deadletter_letter")
        return [path("", wrap(self.changelist_view), name="pgqueue_deadletter_changelist"), letter]

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """The dead letters of a queue, and the queues that have some."""
        self._require(request, "view")
        aliases = _aliases()
        using = request.GET.get("database") or aliases[0]
        _check_alias(using)
        name = request.GET.get("queue", "")
        if request.method == "POST" and name:
            return self._act(request, _Place(using, name))
        text, after = request.GET.get("q", "").strip(), request.GET.get("after", "")
        stats: list[QueueStats] = []
        found: list[DeadMessage] = []
        next_after: int | None = None
        try:
            stats = [one for one in queues(using).stats() if one.dead_messages]
            name = name or (stats[0].queue_name if stats else "")
            if name:
                found, next_after = _Place(using, name).search(text.lower(), int(after) if after.isdecimal() else 0)
        except DatabaseError as error:
            messages.error(request, str(error))
        place = _Place(using, name)
        context = {
            "title": f"Dead letters of queue {name}" if name else "Dead letters",
            "aliases": aliases,
            "place": place,
            "queues": [(one, _Place(using, one.queue_name).url()) for one in stats],
            "letters": [
                (letter, place.letter_url(letter.id), (letter.last_error or "").partition("\n")[0]) for letter in found
            ],
            "text": text,
            "next_url": next_after and place.url(q=text, after=next_after),
            **(extra_context or {}),
        }
        return self._page(request, "list.html", context)

    def letter_view(self, request: HttpRequest, using: str, name: str, id: int) -> HttpResponse:
        """One dead letter, and the form that sends it again with another payload."""
        self._require(request, "view")
        _check_alias(using)
        place = _Place(using, name)
        try:
            letter = place.find(id)
        except DatabaseError as error:
            raise Http404(str(error)) from None
        text = None if letter.payload is None else place.pretty(letter.payload)
        # The result of a task belongs to this message, and a new one could not be run.
        result = queues(using).get_result(letter.message_id) if letter.message_id else None
        is_task = result is not None and result.id == id
        is_fixed = text is None or len(text) > _MOST_CHARACTERS or is_task
        form = None if is_fixed else _PayloadForm(initial={"payload": text})
        if request.method == "POST":
            if request.POST.get("action") != "edit":
                return self._act(request, place, [id])
            self._require(request, "change")
            if form is None:
                raise PermissionDenied("This payload cannot be edited here.")
            form = _PayloadForm(request.POST)
            if form.is_valid() and self._edit(request, place, letter, form.cleaned_data["payload"]):
                return HttpResponseRedirect(place.url())
        context = {
            "title": f"Dead letter {id} of queue {name}",
            "place": place,
            "letter": letter,
            "payload": text,
            "headers": json.dumps(_own_headers(letter), indent=2, ensure_ascii=False),
            "failures": _failures(letter),
            "form": form,
        }
        return self._page(request, "letter.html", context)

    def _act(self, request: HttpRequest, place: _Place, ids: list[int] | None = None) -> HttpResponse:
        """Send dead letters again, or delete them after a confirmation."""
        action = request.POST.get("action", "")
        if action not in ("redrive", "redrive_all", "delete"):
            raise Http404("there is no such action")
        self._require(request, "delete" if action == "delete" else "change")
        if ids is None and action != "redrive_all":
            ids = [int(found) for found in request.POST.getlist("ids") if found.isdecimal()]
            if not ids:
                messages.warning(request, "No dead letter is selected.")
                return HttpResponseRedirect(place.url())
        if action == "delete" and "confirmed" not in request.POST:
            context = {"title": "Are you sure?", "place": place, "ids": ids}
            return self._page(request, "confirm.html", context)
        try:
            with transaction.atomic(using=place.using):
                if action == "delete":
                    number, done = place.queue.purge_dead_messages(ids), "deleted"
                else:
                    number, done = place.queue.redrive(None, ids), "sent again"
            for one in [None] if ids is None else ids:
                what = done if one else f"all {number} {done}"
                self.log_change(request, DeadLetter(id=one), f"{what}, of queue {place.name}")
            messages.success(request, f"{counted(number, 'dead letter')} {done}.")
        except DatabaseError as error:
            messages.error(request, str(error))
        return HttpResponseRedirect(place.url())

    def _edit(self, request: HttpRequest, place: _Place, letter: DeadMessage, payload: Jsonb) -> bool:
        """Send a dead letter as a new message with another payload, and delete it, in one transaction."""
        headers = _own_headers(letter)
        try:
            with transaction.atomic(using=place.using):
                if place.queue.purge_dead_messages([letter.id]) != 1:
                    raise Http404(f"queue {place.name} has no dead letter {letter.id}: it was sent again or deleted")
                sent = place.queue.enqueue(payload, headers=headers or None, message_id=letter.message_id)
        except DatabaseError as error:
            messages.error(request, str(error))
            return False
        self.log_change(request, DeadLetter(id=letter.id), f"sent again as message {sent}, of queue {place.name}")
        messages.success(request, f"Sent as message {sent}; dead letter {letter.id} is deleted.")
        return True

    def _require(self, request: HttpRequest, permission: str) -> None:
        if not getattr(self, f"has_{permission}_permission")(request):
            raise PermissionDenied

    def _page(self, request: HttpRequest, template: str, context: dict[str, Any]) -> HttpResponse:
        known = {
            **self.admin_site.each_context(request),
            "opts": self.opts,
            "has_change_permission": self.has_change_permission(request),
            "has_delete_permission": self.has_delete_permission(request),
        }
        return TemplateResponse(request, f"admin/pgqueue/deadletter/{template}", {**known, **context})


def _aliases() -> list[str]:
    """The databases that can have queues."""
    found = [alias for alias in connections if connections[alias].vendor == "postgresql"]
    if not found:
        raise Http404("no database is a PostgreSQL")
    return found


def _check_alias(using: str) -> None:
    if using not in _aliases():
        raise Http404(f"there is no database {using!r}")


def _headers(letter: DeadMessage) -> dict[str, Any]:
    headers = json.loads(str(letter.headers or "{}"))
    return headers if isinstance(headers, dict) else {}


def _own_headers(letter: DeadMessage) -> dict[str, Any]:
    """The headers that the sender has set."""
    return {name: value for name, value in _headers(letter).items() if name not in RECORD_HEADERS}


def _failures(letter: DeadMessage) -> list[dict[str, Any]]:
    """The failed attempts that consumers have recorded."""
    failures = _headers(letter).get(FAILURES)
    return [one for one in failures if isinstance(one, dict)] if isinstance(failures, list) else []
