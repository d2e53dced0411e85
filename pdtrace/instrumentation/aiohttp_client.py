"""aiohttp clients: a router's hops to its workers, through aiohttp's own tracing door.

Every new ClientSession gets a `TraceConfig`; inside a request a POST to a generating path becomes a
dispatch span whose traceparent travels on. It ends with the last byte of the answer; where that does
not come (the worker breaks off, nobody reads on), with the last that aiohttp told.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter_ns
from types import SimpleNamespace
from typing import Any

import aiohttp

from pdtrace.instrumentation import api
from pdtrace.instrumentation._patch import Patch
from pdtrace.instrumentation.answers import PATHS
from pdtrace.instrumentation.httpx_calls import under_way
from pdtrace.instrumentation.requests import Hop, current, quietly


def _init(
    theirs: Callable[..., None], session: aiohttp.ClientSession, *args: Any, **options: Any
) -> None:
    options["trace_configs"] = [*(options.get("trace_configs") or ()), trace_config()]
    theirs(session, *args, **options)


_patch = Patch(aiohttp.ClientSession, "__init__", _init)
instrument = _patch.on
uninstrument = _patch.off


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
        or under_way.get()
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
