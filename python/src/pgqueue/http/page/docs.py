"""The OpenAPI document, its page, and the files of all pages."""

import asyncio
from functools import cache
from typing import Final

import msgspec
from starlette.responses import HTMLResponse, Response
from starlette.staticfiles import StaticFiles

from ..calls import Call, Routes, Table
from ..openapi import document
from ..security.rights import NOTHING
from .rendering import TEMPLATES

ROUTES: Final = Routes()
_FILES: Final = StaticFiles(packages=[("pgqueue.http.page", "static")])


@ROUTES.add("GET", "/static/{file}", NOTHING)
async def static(call: Call) -> Response:
    """A file that pages load."""
    return await _FILES.get_response(call.names["file"], call.scope)


@ROUTES.add("GET", "/openapi.json", NOTHING)
async def openapi(call: Call) -> Response:
    """The OpenAPI document."""
    text, _ = await asyncio.to_thread(_documents, call.table)
    return Response(text, media_type="application/json")


@ROUTES.add("GET", "/docs", NOTHING)
async def docs(call: Call) -> Response:
    """The OpenAPI document as a page. It loads nothing from another host."""
    _, page = await asyncio.to_thread(_documents, call.table)
    return HTMLResponse(page)


@cache
def _documents(table: Table) -> tuple[bytes, str]:
    """The document and its page; they are made once, in a thread, because this takes long."""
    found = document(table.routes)
    return msgspec.json.encode(found), TEMPLATES.get_template("docs.html").render({"up": "", "document": found})
