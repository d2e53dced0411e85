"""aiohttp clients: a router's hops to its workers, through aiohttp's own tracing door.

Every new ClientSession gets a `TraceConfig`; inside a request a POST to a generating path becomes a
dispatch span whose traceparent travels on. It ends with the last byte of the answer; where that does
not come (the worker breaks off, nobody reads on), with the last that aiohttp told.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from time import perf_counter_ns
from types import SimpleNamespace
from typing import Any

import aiohttp

from pdtrace.instrumentation import api
from pdtrace.instrumentation.asgi import PATHS
from pdtrace.instrumentation.requests import Hop, current, quietly

_log = logging.getLogger("pdtrace.instrumentation")
_original: Callable[..., None] | None = None
_theirs: Callable[..., None] = aiohttp.ClientSession.__init__  # what ours goes on to, for good


def instrument() -> None:
    """Give every new session our trace configuration; a second call changes nothing."""
    global _original, _theirs
    if _original is None:
        _original = _theirs = aiohttp.ClientSession.__init__
        aiohttp.ClientSession.__init__ = _init  # type: ignore[method-assign]


def uninstrument() -> None:
    """New sessions are as they were."""
    global _original
    if _original is not None:
        aiohttp.ClientSession.__init__ = _original  # type: ignore[method-assign]
        _original = None


def _init(self: aiohttp.ClientSession, *args: Any, **options: Any) -> None:
    if _original is not None:  # else somebody kept this function beyond uninstrument()
        options["trace_configs"] = [*(options.get("trace_configs") or ()), trace_config()]
    _theirs(self, *args, **options)


def trace_config() -> aiohttp.TraceConfig:
    """Our part of aiohttp's client tracing, for sessions that are made by hand."""
    config = aiohttp.TraceConfig()
    config.on_request_start.append(_started)
    config.on_request_end.append(_headed)
    config.on_response_chunk_received.append(_received)
    config.on_request_exception.append(_failed)
    return config


async def _started(_: Any, context: SimpleNamespace, sent: aiohttp.TraceRequestStartParams) -> None:
    context.pdtrace_hop = None
    around = current()
    if (
        around is None
        or not api.instrumented()
        or sent.method != "POST"
        or not PATHS.search(sent.url.path)
    ):
        return
    hop = around.dispatch(worker=sent.url.authority.rpartition("@")[2])  # no user, no password
    hop.inject(sent.headers)
    hop.start = perf_counter_ns()
    context.pdtrace_hop = hop
    context.pdtrace_slot = None


async def _headed(_: Any, context: SimpleNamespace, ended: aiohttp.TraceRequestEndParams) -> None:
    hop = context.pdtrace_hop
    if hop is not None:
        hop.set(http_status=ended.response.status)
        _until_now(context, hop)
        # Chunks are told only of an answer that is read in one piece.
        quietly(ended.response.content.on_eof, partial(_until_now, context, hop))


async def _received(
    _: Any, context: SimpleNamespace, chunk: aiohttp.TraceResponseChunkReceivedParams
) -> None:
    hop = context.pdtrace_hop
    if hop is not None:
        _until_now(context, hop)


async def _failed(
    _: Any, context: SimpleNamespace, failed: aiohttp.TraceRequestExceptionParams
) -> None:
    hop = context.pdtrace_hop
    if hop is not None:
        _until_now(context, hop, type(failed.exception).__name__)


def _until_now(context: SimpleNamespace, hop: Hop, error: str | None = None) -> None:
    """The hop lasts until now: aiohttp does not tell when the last chunk was the last."""
    phases = hop.request.phases
    record = ("dispatch", hop.start, perf_counter_ns(), hop.attributes, error)
    slot = context.pdtrace_slot
    if slot is None:
        context.pdtrace_slot = len(phases)
        phases.append(record)
    elif slot < len(phases):
        phases[slot] = record
