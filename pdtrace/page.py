"""The live page: the report's views on a run, with filters that act on all of them; a server for this machine.

Everything is read from the store by the queries of the library, in threads, each with a connection of its own. What a
browser does not wait for any more (another filter, a closed tab) is broken off.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
import threading
import webbrowser
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from typing import Any

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pdtrace import _live_answers as answers
from pdtrace._live_answers import Run
from pdtrace._live_guard import Guard, is_loopback
from pdtrace.errors import BadOption, PdtraceError, in_one_line
from pdtrace.model import SloPolicy
from pdtrace.report import Vega
from pdtrace.selection import Filter, Stop, Superseded
from pdtrace.store import Store

_log = logging.getLogger(__name__)
LOCAL = "127.0.0.1"
THREADS = 3  # queries at a time; DuckDB shares its own threads among them
_KINDS = {"css": "text/css", "js": "text/javascript", "html": "text/html", "svg": "image/svg+xml"}
_NO_STORE = {"cache-control": "no-store"}
_CLOSED = 499  # the reader has gone; nobody sees it

Work = Callable[[Stop], bytes]  # gives JSON
KEPT = 200  # answers


class Page:
    """The answers of the page to a browser's requests."""

    def __init__(self, run: Run, vega: Vega) -> None:
        self.run = run
        self._vega = vega
        self._script: str | None = None
        self._vega_lock = threading.Lock()
        self._pool = ThreadPoolExecutor(THREADS, "pdtrace-page")
        self._kept: OrderedDict[tuple[object, ...], bytes] = OrderedDict()
        self._lock = threading.Lock()
        self._warming = Stop()

    def application(self, host: str = LOCAL, token: str | None = None) -> Guard:
        """The ASGI application, for requests that name this host and, where there is one, the token."""
        return Guard(self._routes(), host, token)

    def _routes(self) -> Starlette:
        asked: dict[str, Callable[[Request, Stop], bytes]] = {
            "overview": lambda _, stop: orjson.dumps(self.run.overview(stop)),
            "choices": lambda request, stop: self._of(answers.choices, request, stop),
            "diagnosis": lambda request, stop: self._of(answers.diagnosis, request, stop),
            "view": lambda request, stop: self._of(answers.view, request, stop, "name"),
            "requests": lambda request, stop: self._of(answers.requests, request, stop, "order"),
            "request": lambda request, stop: self._of(answers.request, request, stop, "request"),
        }
        routes = [
            Route("/", lambda _: _file("view.html")),
            Route("/vega.js", self._vega_script),
            Route("/static/{name}", lambda request: _file(request.path_params["name"])),
            *(Route(f"/api/{name}", self._route(work)) for name, work in asked.items()),
        ]
        return Starlette(routes=routes)

    def close(self) -> None:
        """Break off what is asked ahead; wait for what still runs."""
        self._warming.now()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _of(
        self, answer: Callable[..., dict[str, Any]], request: Request, stop: Stop, *keys: str
    ) -> bytes:
        """An answer about the selection in the query string, with these of its values."""
        given = [request.query_params.get(key, "") for key in keys]
        return self.told(
            answer, self.run.wanted(request.query_params.multi_items(), stop), stop, *given
        )

    def told(
        self, answer: Callable[..., dict[str, Any]], wanted: Filter, stop: Stop, *given: str
    ) -> bytes:
        """An answer as JSON; the last ones are kept, as the data do not change."""
        key = (answer, wanted, *given)
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        content = orjson.dumps(answer(self.run, wanted, *given, stop))
        with self._lock:
            self._kept[key] = content
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return content

    def warm(self) -> None:
        """Answer what the first visit asks for before it comes."""

        def work(stop: Stop) -> bytes:
            wanted = self.run.wanted((), stop)
            self.told(answers.choices, wanted, stop)
            return self.told(answers.diagnosis, wanted, stop)

        self._pool.submit(_done, work, self._warming)

    def _route(self, work: Callable[[Request, Stop], bytes]) -> Callable[[Request], Any]:
        async def route(request: Request) -> Response:
            return await self._answer(request, lambda stop: work(request, stop))

        return route

    async def _answer(self, request: Request, work: Work) -> Response:
        """The work's result as JSON; broken off when the reader goes."""
        stop = Stop()
        job = asyncio.get_running_loop().run_in_executor(self._pool, _done, work, stop)
        gone = asyncio.ensure_future(_gone(request))
        try:
            waiting: set[asyncio.Future[Any]] = {job, gone}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if not job.done():
                stop.now()
            status, content = await job
        finally:
            stop.now()
            gone.cancel()
        return Response(content, status, media_type="application/json", headers=_NO_STORE)

    async def _vega_script(self, _: Request) -> Response:
        try:
            script = await asyncio.to_thread(self._vega_text)
        except PdtraceError as error:
            return Response(error.message, 500, media_type="text/plain")
        return Response(script, media_type=_KINDS["js"], headers={"cache-control": "max-age=3600"})

    def _vega_text(self) -> str:
        with self._vega_lock:
            if self._script is None:
                self._script = self._vega.text()
            return self._script


async def _gone(request: Request) -> None:
    """Return when the reader has closed the connection or broken off the request."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _done(work: Work, stop: Stop) -> tuple[int, bytes]:
    """Status and JSON of a work, or of why there is none."""
    try:
        stop.check()
        return 200, work(stop)
    except (
        BaseException
    ) as error:  # interrupted queries come as KeyboardInterrupt, panics in Rust as themselves
        if stop.asked or isinstance(error, Superseded):
            return _CLOSED, b"{}"
        if isinstance(error, PdtraceError):
            status = 400 if isinstance(error, BadOption) else 404
            return status, orjson.dumps({"error": error.message, "hint": error.hint})
        _log.debug("the page cannot answer", exc_info=True)
        return 500, orjson.dumps({"error": f"pdtrace failed: {in_one_line(error)}", "hint": ""})


def _file(name: str) -> Response:
    """A file of pdtrace/static."""
    kind = _KINDS.get(name.rpartition(".")[2])
    place = files("pdtrace") / "static" / name
    if kind is None or "/" in name or "\\" in name or name.startswith(".") or not place.is_file():
        return Response("nothing here", 404, media_type="text/plain")
    return Response(place.read_bytes(), media_type=kind, headers={"cache-control": "no-cache"})


def serve(
    store: Store,
    title: str,
    vega: Vega,
    tell: Callable[[str], None],
    *,
    limits: SloPolicy | None = None,
    host: str = LOCAL,
    port: int = 0,
    show: bool = False,
) -> None:
    """Show the store until Ctrl-C. `tell` gets the address; `show` opens it in a browser.

    Raises PdtraceError where the address cannot be bound.
    """
    token = None if is_loopback(host) else secrets.token_urlsafe(24)
    with _bound(host, port) as bound, _page(Run.of(store, title, limits), vega) as page:
        address = _address(host, bound.getsockname()[1], token)
        config = uvicorn.Config(
            page.application(host, token), log_level="critical", access_log=False, server_header=False,
            lifespan="off", ws="none", timeout_graceful_shutdown=2,
        )  # fmt: skip
        page.warm()
        tell(address)
        if show:
            webbrowser.open(address)
        with contextlib.suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[bound])


@contextlib.contextmanager
def _page(run: Run, vega: Vega) -> Iterator[Page]:
    page = Page(run, vega)
    try:
        yield page
    finally:
        page.close()
        run.selections.close()


def _bound(host: str, port: int) -> socket.socket:
    """A socket at this address. Raises PdtraceError."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
        bound.listen(128)  # who reads the address may connect at once
    except (OSError, OverflowError) as error:
        bound.close()
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        hint = "give another --port; 0 takes a free one"
        if isinstance(error, socket.gaierror):
            hint = "give --host an address of this machine, such as 127.0.0.1"
        raise PdtraceError(f"{host}:{port}: cannot be bound: {why}", hint) from error
    return bound


def _address(host: str, port: int, token: str | None) -> str:
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}/" + (f"?token={token}" if token else "")
