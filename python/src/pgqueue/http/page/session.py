"""The pages that log in and out."""

from typing import Final

from starlette.responses import RedirectResponse, Response

from ..calls import Call
from ..errors import ApiError
from ..security.admission import address_of, safe_target
from ..security.rights import NOTHING, current
from .rendering import render
from .requests import Pages, read_form

pages = Pages()
ROUTES: Final = pages.routes


@pages.get("/login", NOTHING)
async def login_form(call: Call) -> Response:
    """The form for name and password. `to` is the page that the user wanted."""
    return render("login.html", call.scope, to=safe_target(call.query.get("to", "")), user="")


@pages.post("/login", NOTHING)
async def log_in(call: Call) -> Response:
    """Begin a session, and redirect to the page that the user wanted."""
    form, context = await read_form(call), call.context
    name, password, to = (form.get(each, [""])[0] for each in ("user", "password", "to"))
    to = safe_target(to)
    try:
        if not await context.admission.passwords.verify(name, password, address_of(call.scope)):
            raise ApiError(401, "unauthorized", "name or password is wrong")
    except ApiError as error:
        return render("login.html", call.scope, to=to, user=name[:128], problem=error)
    cookie = context.admission.sessions.begin(call.scope, name)
    return RedirectResponse(f"./{to}", 303, {"Set-Cookie": cookie})


@pages.post("/logout", NOTHING)
async def log_out(call: Call) -> Response:
    """End the session, and redirect to the log-in form."""
    await read_form(call)
    cookie = call.context.admission.sessions.end(call.scope, current().session)
    return RedirectResponse("login", 303, {"Set-Cookie": cookie})
