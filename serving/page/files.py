"""The page: its files as endpoints, and what it may load.

Contract: nothing comes from elsewhere, so the page works offline, and the browser is told to refuse
everything else; model output goes into the page as text only.
"""

from functools import cache
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

from ropeway.serving.http.context import ServerContext
from ropeway.serving.http.endpoint import Endpoint
from ropeway.serving.page.live import Live, live

_TYPES = {
    "index.html": "text/html",
    "style.css": "text/css",
    "app.js": "text/javascript",
    "chat.js": "text/javascript",
    "live.js": "text/javascript",
    "message.js": "text/javascript",
    "pieces.js": "text/javascript",
    "stream.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@cache
def _content(name: str) -> bytes:
    return files("ropeway.serving.page").joinpath(name).read_bytes()


async def page_file(request: Request, context: ServerContext) -> Response:
    """One of the page's files; the path's last part names it, "/" is the page itself."""
    name = request.url.path.rpartition("/")[2] or "index.html"
    return Response(_content(name), media_type=_TYPES[name], headers=_HEADERS)


ENDPOINTS = [
    Endpoint("/live", "GET", live, "What the page's live view shows.", response_type=Live),
    *(
        Endpoint(
            "/" if name == "index.html" else f"/page/{name}",
            "GET",
            page_file,
            f"A file of the page: {name}.",
            open=True,
        )
        for name in _TYPES
    ),
]
