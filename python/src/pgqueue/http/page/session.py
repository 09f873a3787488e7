"""The pages that log in and out."""

from typing import Final

from starlette.responses import RedirectResponse, Response

from ..calls import Call, Routes
from ..errors import ApiError
from ..security.admission import address_of, safe_target
from ..security.rights import NOTHING, current
from .rendering import render
from .requests import read_form

ROUTES: Final = Routes()


@ROUTES.page("GET", "/login", NOTHING)
async def login_form(call: Call) -> Response:
    """The form for name and password. `to` is the page that the user wanted."""
    return render("login.html", call.scope, to=safe_target(call.query_params.get("to", "")), user="")


@ROUTES.page("POST", "/login", NOTHING)
async def log_in(call: Call) -> Response:
    """Begin a session, and redirect to the page that the user wanted."""
    form, context = await read_form(call), call.context
    name, password, to = (form.get(each, "") for each in ("user", "password", "to"))
    to = safe_target(to)
    try:
        if not await context.admission.passwords.verify(name, password, address_of(call.scope)):
            raise ApiError(401, "unauthorized", "name or password is wrong")
    except ApiError as error:
        return render("login.html", call.scope, to=to, user=name[:128], problem=error)
    cookie = context.admission.sessions.begin(call.scope, name)
    return RedirectResponse(f"./{to}", 303, {"Set-Cookie": cookie})


@ROUTES.page("POST", "/logout", NOTHING)
async def log_out(call: Call) -> Response:
    """End the session, and redirect to the log-in form."""
    await read_form(call)
    cookie = call.context.admission.sessions.end(call.scope, current().session)
    return RedirectResponse("login", 303, {"Set-Cookie": cookie})
