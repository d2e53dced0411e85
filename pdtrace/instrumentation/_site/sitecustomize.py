"""Found by Python at its start under `pdtrace run`: switches the instrumentation on, then makes way."""

import contextlib
import importlib
import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 -- pathlib costs 5 ms at each start
sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != _here]  # noqa: PTH100
# The environment's own sitecustomize, which stood behind this one; Python wants to find one of them.
_this = sys.modules.pop("sitecustomize", None)
with contextlib.suppress(ImportError):
    importlib.import_module("sitecustomize")
if _this is not None:
    sys.modules.setdefault("sitecustomize", _this)

if os.environ.get("PDTRACE_RUN"):
    try:
        from pdtrace.instrumentation import auto

        auto.activate()
    except Exception as error:
        sys.stderr.write(f"pdtrace: not instrumented: {error}\n")
