"""Who may ask the live page, and what its answers may do in a browser.

A page of another site can send requests to this machine, and by DNS rebinding even read the answers under its own name:
a request must name a host that means this machine, and scripts of other sites are turned away. Users of the same machine
can connect; where the page is bound to more than this machine, it asks for a token.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qs

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

COOKIE = "pdtrace_token"
# No inline scripts, no eval, nothing from elsewhere. Vega sets colours and cursors in style attributes.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; style-src-attr 'unsafe-inline'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
)


class Guard:
    """An ASGI application behind the rules above. `host` is the address it is bound to."""

    def __init__(self, app: App, host: str, token: str | None = None) -> None:
        self.app = app
        self.host = host.lower()
        self.token = token
        self.local = is_loopback(host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or say why not."""
        if scope["type"] != "http":
            return
        headers = {
            key.decode("latin-1").lower(): value.decode("latin-1")
            for key, value in scope["headers"]
        }
        status, text = self._refusal(scope, headers)
        if status:
            await self._answer(send, status, text)
            return
        cookie = self._cookie_to_set(scope)

        async def marked(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *_HEADERS, *cookie]
            await send(message)

        await self.app(scope, receive, marked)

    def _refusal(self, scope: Scope, headers: dict[str, str]) -> tuple[int, str]:
        if not self.may_name(headers.get("host", "")):
            return 403, "this page answers to the address that it is bound to only"
        if scope["method"] not in {"GET", "HEAD"}:
            return 405, "this page only reads"
        site = headers.get("sec-fetch-site", "none")
        opened = headers.get("sec-fetch-mode") == "navigate" and scope["path"] == "/"
        if site in {"cross-site", "same-site"} and not opened:
            return 403, "other sites may link here, not read"
        if self.token is not None and not self._has_token(scope, headers):
            return 401, "open the address with the token that `pdtrace view` printed"
        return 0, ""

    def may_name(self, host: str) -> bool:
        """Whether a Host header means us. Addresses cannot be rebound; other names can."""
        name = _without_port(host)
        if name in {"localhost", self.host}:
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return address.is_loopback or not self.local

    def _has_token(self, scope: Scope, headers: dict[str, str]) -> bool:
        given = [self._asked_token(scope)]
        for part in headers.get("cookie", "").split(";"):
            key, _, value = part.strip().partition("=")
            if key == COOKIE:
                given.append(value)
        return any(
            hmac.compare_digest(value.encode(), (self.token or "").encode()) for value in given
        )

    def _asked_token(self, scope: Scope) -> str:
        query = parse_qs(scope["query_string"].decode("latin-1"))
        (token, *_) = query.get("token", [""])
        return str(token)

    def _cookie_to_set(self, scope: Scope) -> list[tuple[bytes, bytes]]:
        if self.token is None or not self._asked_token(scope):
            return []
        value = f"{COOKIE}={self.token}; HttpOnly; SameSite=Strict; Path=/"
        return [(b"set-cookie", value.encode())]

    async def _answer(self, send: Send, status: int, text: str) -> None:
        kind = (b"content-type", b"text/plain; charset=utf-8")
        await send({"type": "http.response.start", "status": status, "headers": [kind, *_HEADERS]})
        await send({"type": "http.response.body", "body": text.encode()})


def is_loopback(host: str) -> bool:
    """Whether an address to bind to is reachable from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _without_port(host: str) -> str:
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if ":" in host else host
