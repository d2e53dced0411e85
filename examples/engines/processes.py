"""Processes of an engine: started with their logs in the capture, awaited, and ended by their own ids."""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from venvs import Unavailable


class Running:
    """Processes that belong together; each has a process group of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, command: Sequence[str], env: Mapping[str, str], log: str) -> None:
        """Start a process; what it writes goes to a file of that name in the capture."""
        with (self.folder / log).open("wb") as out:
            self.processes[name] = subprocess.Popen(
                ["nice", "-n", "5", *command],
                env={**os.environ, **env},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=self.folder,
            )

    def wait(self, url: str, ready: Callable[[str], bool] = bool, seconds: float = 120) -> None:
        """Until the page says what is awaited."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for name, process in self.processes.items():
                if process.poll() is not None:
                    raise Unavailable(f"{name} ended with {process.returncode}: {self.last(name)}")
            with contextlib.suppress(OSError):
                if ready(get(url)):
                    return
            time.sleep(0.2)
        raise Unavailable(f"{url} was not ready after {seconds:.0f} s")

    def last(self, name: str) -> str:
        """The last line that a process wrote."""
        lines = [
            line
            for path in self.folder.glob(f"{name}.*")
            for line in path.read_text(errors="replace").splitlines()
            if line.strip()
        ]
        return lines[-1][:500] if lines else "it wrote nothing"

    def stop(self, seconds: float = 20) -> list[str]:
        """End all: asked first, then by force; names of those that had to be forced."""
        for process in self.processes.values():
            _signal(process, signal.SIGTERM)
        end = time.monotonic() + seconds
        forced = []
        for name, process in self.processes.items():
            try:
                process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                forced.append(name)
            _signal(process, signal.SIGKILL)  # what it started and left
            process.wait(10)
        return forced


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Running]:
    """Processes that are ended whatever happens."""
    folder.mkdir(parents=True, exist_ok=True)
    them = Running(folder)
    try:
        yield them
    finally:
        them.stop()


def load(url: str, model: str, truth: Path, *words: str, recorded: Path | None = None) -> None:
    """Send the load of load.py in a process of its own, recorded by pdtrace where a folder is given."""
    command = [sys.executable, str(Path(__file__).with_name("load.py")), url, model, str(truth), *words]  # fmt: skip
    if recorded:
        record = ["-m", "pdtrace", "run", "-o", str(recorded), "--"]
        command = [sys.executable, *record, *command, "--no-traceparent"]
    subprocess.run(command, check=True)


def arguments(what: str | None, modes: Sequence[str], requests: int) -> argparse.ArgumentParser:
    """The words that every run_ENGINE.py takes."""
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("folder", type=lambda text: Path(text).resolve())
    parser.add_argument("--mode", choices=modes, default=modes[0])
    parser.add_argument("--requests", default=str(requests))
    return parser


def get(url: str) -> str:
    """The page as text; OSError when there is none."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())


def save(url: str, path: Path) -> None:
    """Keep a page, such as /metrics, in the capture."""
    path.write_text(get(url))


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now; below 32768, since Dynamo reads one of its own as a signed 16-bit number."""
    with contextlib.ExitStack() as stack:
        found: list[int] = []
        while len(found) < count:
            one = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                one.bind(("127.0.0.1", random.randrange(20000, 32000)))
                found.append(one.getsockname()[1])
        return found
