"""The plain gateway of examples/engines, recorded by `pdtrace run`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from processes import free_ports, running

GATEWAY = Path(__file__).resolve().parents[2] / "examples" / "engines" / "gateway.py"


@contextlib.contextmanager
def before(url: str, traces: Path) -> Iterator[str]:
    """A recorded gateway runs before that server; yields its address."""
    port = free_ports(1)[0]
    command = [sys.executable, "-m", "pdtrace", "run", "-o", str(traces), "--role", "gateway", "--"]
    with running(traces) as them:
        them.start("gateway", [*command, sys.executable, str(GATEWAY), str(port), url], {}, "gateway.out")  # fmt: skip
        them.wait(f"http://127.0.0.1:{port}/health")
        yield f"http://127.0.0.1:{port}"
