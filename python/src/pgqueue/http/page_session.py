"""The pages that log in and out."""

from fastapi import Request, Response
from fastapi.responses import RedirectResponse

from .admission import address_of, safe_target
from .context import CurrentContext
from .errors import ApiError
from .page_rendering import render
from .page_requests import page_router, read_form
from .rights import current

__all__ = ["router"]

router = page_router()


@router.get("/login")
async def login_form(to: str = "") -> Response:
    """The form for name and password. `to` is the page that the user wanted."""
    return _login_page(safe_target(to))


def _login_page(to: str, name: str = "", problem: ApiError | None = None) -> Response:
    values = {"to": to, "user": name, "problem": problem}
    return render("login.html", values, problem.status if problem else 200, problem.headers if problem else None)


@router.post("/login")
async def log_in(request: Request, context: CurrentContext) -> Response:
    """Begin a session, and redirect to the page that the user wanted."""
    form = await read_form(request)
    name, password, to = (form.get(each, [""])[0] for each in ("user", "password", "to"))
    to = safe_target(to)
    try:
        if not await context.admission.passwords.verify(name, password, address_of(request.scope)):
            raise ApiError(401, "unauthorized", "name or password is wrong")
    except ApiError as error:
        return _login_page(to, name[:128], error)
    cookie = context.admission.sessions.begin(request.scope, name)
    return RedirectResponse(f"./{to}", 303, {"Set-Cookie": cookie})


@router.post("/logout")
async def log_out(request: Request, context: CurrentContext) -> Response:
    """End the session, and redirect to the log-in form."""
    await read_form(request)
    cookie = context.admission.sessions.end(request.scope, current().session)
    return RedirectResponse("login", 303, {"Set-Cookie": cookie})
