"""What SGLang calls at the start of each of its processes: hooks for its own HookRegistry, inert unless asked for.

Source: sgl-project/sglang 0.5.23, sglang/srt/plugins (the framework, with hooks after a method as one
of its documented uses), sglang/srt/managers/scheduler.py (`process_batch_result`),
sglang/srt/disaggregation/prefill.py (`process_disagg_prefill_inflight_queue`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from pdtrace.instrumentation import asgi
from pdtrace.instrumentation._doors import once, switched_on
from pdtrace.instrumentation.sglang.book import Book

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_books: dict[int, Book] = {}  # one a scheduler: one a process, as SGLang starts them
_broken: list[bool] = []


def load() -> None:
    """Register the hooks where PDTRACE_FOLDER or `pdtrace run` asks for it; else nothing happens."""
    try:
        if not (os.environ.get("PDTRACE_FOLDER") or os.environ.get("PDTRACE_RUN")):
            return
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        HookRegistry.register(f"{_SCHEDULER}.process_batch_result", processed, HookType.AFTER)
        HookRegistry.register(
            f"{_SCHEDULER}.process_disagg_prefill_inflight_queue", handed_over, HookType.AFTER
        )
        asgi.served_as("frontend")
        if switched_on(named=False):
            from pdtrace.instrumentation import uvicorn_server

            uvicorn_server.instrument()
    except Exception as error:
        once("pdtrace: SGLang's process is not recorded", error=error)


def processed(result: Any, scheduler: Any, batch: Any, *_: Any, **__: Any) -> None:
    """After SGLang has processed the result of a batch. None: the result stays as it is."""
    _kept(scheduler, lambda book: book.processed(batch))


def handed_over(result: Any, scheduler: Any, *_: Any, **__: Any) -> None:
    """After a prefill worker has looked which of its requests' KV is with the decode worker."""
    if result:
        _kept(scheduler, lambda book: book.handed_over(result))


def _kept(scheduler: Any, work: Callable[[Book], None]) -> None:
    if _broken:
        return
    try:
        book = _books.get(id(scheduler))
        if book is None:
            book = _books[id(scheduler)] = Book(
                model=_model(scheduler), records=_rank(scheduler) == 0
            )
        if book.records:
            work(book)
    except Exception as error:
        _broken.append(True)
        for book in _books.values():
            book.forget()
        _books.clear()
        once("pdtrace: this SGLang is not understood; it is no longer recorded", error=error)


def _rank(scheduler: Any) -> int:
    """Every tensor parallel rank runs the same batches; one of them is recorded."""
    rank = getattr(scheduler, "tp_rank", None)
    if rank is None:
        module = sys.modules.get("sglang.srt.managers.scheduler")
        parallel = getattr(module, "get_parallel", None)
        rank = getattr(parallel(), "tp_rank", 0) if parallel is not None else 0
    return int(rank)


def _model(scheduler: Any) -> str | None:
    arguments = getattr(scheduler, "server_args", None)
    name = getattr(arguments, "served_model_name", None) or getattr(arguments, "model_path", None)
    return None if name is None else str(name)[:256]
