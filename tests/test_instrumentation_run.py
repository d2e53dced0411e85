"""`pdtrace run` records a server that knows nothing of pdtrace, and leaves everything else as it was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import httpx
import pytest
from recorded import APP, attributes

SERVER = (
    APP.replace("VERSION", "a")
    + """
import uvicorn

if __name__ == "__main__":
    config = uvicorn.Config(app, port=0, log_level="error")
    server = uvicorn.Server(config)
    import asyncio, socket
    listener = socket.socket(); listener.bind(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    server.run(sockets=[listener])
"""
)


def spans(folder: Path) -> list[dict[str, Any]]:
    messages = [
        json.loads(line)
        for path in folder.glob("*.jsonl")
        for line in path.read_text().splitlines()
    ]
    return [
        span
        for message in messages
        for span in message["resourceSpans"][0]["scopeSpans"][0]["spans"]
    ]


def test_a_server_is_recorded_without_changing_its_code(tmp_path: Path) -> None:
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    other = tmp_path / "site"
    other.mkdir()
    (other / "sitecustomize.py").write_text("import os; os.environ['THEIRS'] = '1'\n")
    command = [sys.executable, "-m", "pdtrace", "run", "-o", str(tmp_path / "traces"), "--role", "aggregated", "--", sys.executable, str(script)]  # fmt: skip
    path = os.pathsep.join([str(other), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path})  # fmt: skip
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        url = f"http://127.0.0.1:{port}/v1/completions"
        while process.poll() is None:
            try:
                answer = httpx.post(url, json={"model": "m"}, timeout=60)
                break
            except httpx.ConnectError:
                time.sleep(0.1)
        assert answer.content.count(b"data:") == 3
    finally:
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=120)
    assert "traces go to" in said
    (span,) = spans(tmp_path / "traces")
    told = attributes(span)
    assert told["gen_ai.request.model"] == "m"
    assert told["pdtrace.worker.role"] == "aggregated"
    assert len(told["pdtrace.token.times_us"]) == 2


def test_programs_start_as_before_and_find_their_own_sitecustomize(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("theirs = 1\n")
    code = "import sitecustomize, sys; print(sitecustomize.theirs, 'httpx' in sys.modules, sys.argv[1:])"
    command = [sys.executable, "-m", "pdtrace", "run", "--", sys.executable, "-c", code, "--role", "x"]  # fmt: skip
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, timeout=120, check=True)  # fmt: skip
    assert run.stdout.strip() == "1 False ['--role', 'x']"
    assert not (tmp_path / "pdtrace-traces").exists()  # nothing was served


def test_a_command_that_is_not_there_is_one_clear_error() -> None:
    command = [sys.executable, "-m", "pdtrace", "run", "--", "no-such-program"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 2
    assert "no-such-program: No such file or directory" in run.stderr


def test_what_is_imported_later_is_instrumented_once(tmp_path: Path) -> None:
    code = """
import sys
from pdtrace.instrumentation import auto
auto.activate()
assert "httpx" not in sys.modules
import httpx
assert httpx.HTTPTransport.handle_request.__wrapped__.__module__ == "httpx._transports.default"
assert type(httpx.__spec__.loader).__name__ == "SourceFileLoader"
auto.deactivate()
assert not hasattr(httpx.HTTPTransport.handle_request, "__wrapped__")
"""
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, timeout=120, check=True)


def declared(group: str) -> dict[str, str]:
    """Entry points of pdtrace: as the checkout declares them, or as the installed package has them."""
    project = Path(__file__).resolve().parents[1] / "pyproject.toml"
    if project.is_file():
        found: dict[str, str] = tomllib.loads(project.read_text())["project"]["entry-points"][group]
        return found
    return {e.name: e.value for e in entry_points(group=group) if e.name.startswith("pdtrace")}


def test_every_instrumentor_has_an_entry_point_of_its_own(tmp_path: Path) -> None:
    """What `opentelemetry-instrument` does: load each by name, instrument; one at a time here."""
    found = declared("opentelemetry_instrumentor")
    code = f"""
from importlib.metadata import EntryPoint
import httpx, uvicorn
from pdtrace.instrumentation import api
plain = (httpx.HTTPTransport.handle_request, uvicorn.Config.load)
found = {found!r}
assert set(found) == {{"pdtrace", "pdtrace_uvicorn", "pdtrace_httpx", "pdtrace_aiohttp", "pdtrace_openai"}}, found
for name, changed in (("pdtrace_uvicorn", [1]), ("pdtrace_openai", [0]), ("pdtrace_aiohttp", []), ("pdtrace_httpx", [0]), ("pdtrace", [0, 1])):
    one = EntryPoint(name, found[name], "opentelemetry_instrumentor").load()()
    one.instrument(raise_exception_on_conflict=True)
    one.instrument()
    now = (httpx.HTTPTransport.handle_request, uvicorn.Config.load)
    assert [i for i in (0, 1) if now[i] is not plain[i]] == changed, name
    assert api.instrumented()
    one.uninstrument()
    assert (httpx.HTTPTransport.handle_request, uvicorn.Config.load) == plain
assert not api.instrumented()
print("fine")
"""
    run = subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)  # fmt: skip
    assert run.stdout == "fine\n", run.stderr


@pytest.mark.parametrize(
    ("group", "value"),
    [
        ("vllm.general_plugins", "pdtrace.instrumentation.vllm.plugin:load"),
        ("sglang.srt.plugins", "pdtrace.instrumentation.sglang.plugin:load"),
    ],
)
def test_engines_find_their_plugins(group: str, value: str) -> None:
    assert declared(group) == {"pdtrace": value}
    assert callable(
        EntryPoint("pdtrace", value, group).load()
    )  # and neither engine is needed for it
