"""Real servers under `pdtrace run`: gunicorn's forked workers, uvicorn --reload; HTTP/2 end to end."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from recorded import APP, Kept, attributes

import pdtrace
from pdtrace import instrumentation as pdt
from pdtrace.instrumentation import httpx_client
from pdtrace.instrumentation.asgi import PdtraceMiddleware


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def running(tmp_path: Path, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    """A server below `pdtrace run`, in a folder with app.py."""
    whole = [sys.executable, "-m", "pdtrace", "run", "-o", str(tmp_path / "traces"), "--", sys.executable, "-m", *command]  # fmt: skip
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    with (tmp_path / "server.log").open("wb") as log:
        process = subprocess.Popen(whole, cwd=tmp_path, stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": path, "HOME": str(tmp_path), "PYTHONFAULTHANDLER": "1"}, start_new_session=True)  # fmt: skip
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(120)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)  # writes what it is doing into the log
            process.wait(60)
            if not caught_in_own_handler((tmp_path / "server.log").read_text()):
                raise
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def caught_in_own_handler(log: str) -> bool:
    """Whether uvicorn's reloader stands still in its signal handler: it sets the event that it may be waiting for.

    Both take the event's lock in one thread; a signal in the instant between is never answered, with or without pdtrace.
    """
    _, _, stack = log.partition("Fatal Python error: Aborted")
    return "basereload.py" in stack and "in signal_handler" in stack and "in set" in stack


def until(found: Callable[[], Any], seconds: float = 240) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        value = found()
        if value:
            return value
        time.sleep(0.1)
    raise AssertionError("it did not happen in time")


def post(port: int, **headers: str) -> httpx.Response | None:
    try:
        return httpx.post(f"http://127.0.0.1:{port}/v1/completions", json={"model": "m"}, headers=headers, timeout=60)  # fmt: skip
    except httpx.TransportError:
        return None


def recorded(folder: Path) -> list[tuple[int, dict[str, Any]]]:
    """(process id, attributes) of each request span, once a span in the files."""
    found = []
    for path in folder.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            (resource,) = json.loads(line)["resourceSpans"]
            told = {p["key"]: p["value"] for p in resource["resource"]["attributes"]}
            for span in resource["scopeSpans"][0]["spans"]:
                if span["name"] == "pdtrace.request":
                    found.append((int(told["process.pid"]["intValue"]), attributes(span)))
    return found


def test_gunicorn_workers_record_their_own_requests(tmp_path: Path) -> None:
    pytest.importorskip("gunicorn")
    worker = "uvicorn_worker.UvicornWorker"
    if importlib.util.find_spec("uvicorn_worker") is None:
        pytest.skip("uvicorn-worker is not installed")
    (tmp_path / "app.py").write_text(APP)
    port = free_port()
    with running(tmp_path, "gunicorn", "-w", "2", "-k", worker, "--preload", "-b", f"127.0.0.1:{port}", "app:app"):  # fmt: skip
        until(lambda: post(port, **{"x-request-id": "first"}))
        served = Counter()
        for number in range(200):
            answer = post(port, **{"x-request-id": f"q{number}"})
            assert answer is not None
            assert answer.content.count(b"data:") == 3
            served[int(answer.headers["x-pid"])] += 1
            if number >= 30 and len(served) == 2:
                break
        asked = sum(served.values())
    spans = recorded(tmp_path / "traces")
    mine = [(pid, told) for pid, told in spans if told["pdtrace.request.id"] != "first"]
    assert len(mine) == asked == len({told["pdtrace.request.id"] for _, told in mine})
    assert Counter(pid for pid, _ in mine) == served
    assert {len(told["pdtrace.token.times_us"]) for _, told in mine} == {2}
    assert "sitecustomize" not in (tmp_path / "server.log").read_text()


def test_a_reloaded_server_is_recorded_too(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    port = free_port()
    with running(tmp_path, "uvicorn", "app:app", "--reload", "--port", str(port)):
        before = until(lambda: post(port, **{"x-request-id": "old"}))
        assert b"VERSION" in before.content
        (tmp_path / "app.py").write_text(APP.replace("VERSION", "NEWER"))
        touched = itertools.count()

        def newer() -> httpx.Response | None:
            # Files are told apart by their times; again now and then, should the server not have looked at the first yet.
            number = next(touched)
            if number % 60 == 0:
                later = time.time() + 10 + number
                os.utime(tmp_path / "app.py", (later, later))
            answer = post(port, **{"x-request-id": "new"})
            return answer if answer is not None and b"NEWER" in answer.content else None

        after = until(newer)
    # The process before the reload may have answered some of the second kind too.
    seen = {(told["pdtrace.request.id"], pid) for pid, told in recorded(tmp_path / "traces")}
    old, new = int(before.headers["x-pid"]), int(after.headers["x-pid"])
    assert old != new
    assert ("old", old) in seen
    assert ("new", new) in seen
    assert ("old", new) not in seen


def test_http2_from_client_to_server() -> None:
    """Several streams over one connection: each call has spans of its own, bytes arrive as they were sent."""
    config = pytest.importorskip("hypercorn.config")
    serving = pytest.importorskip("hypercorn.asyncio")
    pytest.importorskip("h2")
    scope: dict[str, Any] = {}
    exec(APP, scope)
    versions: list[str] = []

    async def app(asked: Any, receive: Any, send: Any) -> None:
        if asked["type"] == "http":
            versions.append(asked["http_version"])
        await scope["app"](asked, receive, send)

    kept = Kept()
    pdtrace.instrument(exporter=kept)
    httpx_client.instrument()

    async def run() -> list[bytes]:
        made = config.Config()
        port = free_port()
        made.bind, made.loglevel = [f"127.0.0.1:{port}"], "ERROR"
        over = asyncio.Event()
        server = asyncio.create_task(serving.serve(PdtraceMiddleware(app, role="router"), made, shutdown_trigger=over.wait))  # fmt: skip
        while not server.done():
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                break
            except OSError:
                await asyncio.sleep(0.05)
        async with httpx.AsyncClient(http1=False, http2=True, timeout=60) as client:
            calls = [client.post(f"http://127.0.0.1:{port}/v1/completions", json={}) for _ in range(4)]  # fmt: skip
            answers = await asyncio.gather(*calls)
        over.set()
        await server
        return [answer.content for answer in answers]

    try:
        contents = asyncio.run(run())
    finally:
        httpx_client.uninstrument()
        pdt.flush()
        pdtrace.uninstrument()
    assert set(versions) == {"2"}
    assert {content.count(b"data:") for content in contents} == {3}
    served = [s for s in kept.named("pdtrace.request") if attributes(s)["pdtrace.worker.role"] == "router"]  # fmt: skip
    called = {s["spanId"] for s in kept.named("pdtrace.request") if attributes(s)["pdtrace.worker.role"] == "client"}  # fmt: skip
    assert len(served) == 4
    assert {s["parentSpanId"] for s in served} == called
    assert {len(attributes(s)["pdtrace.token.times_us"]) for s in served} == {2}
