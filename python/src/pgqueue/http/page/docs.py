"""The OpenAPI document, and its page."""

import asyncio
from functools import cache
from typing import Final

import msgspec
from starlette.responses import HTMLResponse, Response

from ..calls import Call, Table
from ..openapi import document
from ..security.rights import NOTHING
from .rendering import TEMPLATES
from .requests import Pages

pages = Pages(is_page=False)
ROUTES: Final = pages.routes


@pages.get("/openapi.json", NOTHING)
async def openapi(call: Call) -> Response:
    """The OpenAPI document."""
    text, _ = await asyncio.to_thread(_documents, call.table)
    return Response(text, media_type="application/json")


@pages.get("/docs", NOTHING)
async def docs(call: Call) -> Response:
    """The OpenAPI document as a page. It loads nothing from another host."""
    _, page = await asyncio.to_thread(_documents, call.table)
    return HTMLResponse(page)


@cache
def _documents(table: Table) -> tuple[bytes, str]:
    """The document and its page; they are made once, in a thread, because this takes long."""
    found = document(table.routes)
    return msgspec.json.encode(found), TEMPLATES.get_template("docs.html").render({"up": "", "document": found})
