"""What vLLM calls at the start of each of its processes (entry point group `vllm.general_plugins`)."""

from __future__ import annotations

import os
import sys

from pdtrace.instrumentation import asgi
from pdtrace.instrumentation._doors import once, switched_on
from pdtrace.instrumentation.vllm.frontend import handed_on

_OURS = "pdtrace.instrumentation.vllm"


def load() -> None:
    """Record this process where PDTRACE_FOLDER or `pdtrace run` asks for it; else nothing happens.

    In the API server the calls that uvicorn serves are recorded, without `--middleware`.
    """
    try:
        if not (os.environ.get("PDTRACE_FOLDER") or os.environ.get("PDTRACE_RUN")):
            return
        if any(_OURS in argument for argument in sys.argv):
            asgi.served_as("frontend")  # the engine's spans are those of our scheduler
        if switched_on(named=False):
            from pdtrace.instrumentation import uvicorn_server

            asgi.hand_on(handed_on)
            uvicorn_server.instrument()
    except Exception as error:
        once("pdtrace: vLLM's process is not recorded", error=error)
