"""What goes on beside a command: modules that it needs later are loaded, a large file is begun."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Event, Thread

from pdtrace import _few_functions, _no_pandas, _own_process


@contextmanager
def reading(paths: Sequence[str], *, keep_content: bool) -> Iterator[None]:
    """Let another process begin with the first large file that a collector can begin so, while this one loads libraries."""
    beside = importlib.import_module("pdtrace.collectors._otlp_beside")
    with beside.beginning(paths, keep_content=keep_content, prepare=_prepare):
        yield


def _prepare() -> None:
    _own_process.prepare()
    _no_pandas.leave_out()
    _few_functions.make_when_asked()


@contextmanager
def loading(*modules: str) -> Iterator[Callable[[], None]]:
    """Load modules in this order while the block runs, from when it calls what it gets; behind its end none more is begun.

    Before that they would keep the interpreter from the imports of the block itself, and a file that cannot be read needs none.
    `module:function` calls the function as well, one that keeps its result. Loading wants the interpreter, reading and SQL mostly leave it alone: on two cores it costs no time by the clock.
    """
    over = Event()
    # No daemon: a process that ends inside an import waits for it.
    thread = Thread(target=_load, args=(modules, over), name="pdtrace-loading")

    def begin() -> None:
        if thread.ident is None:
            thread.start()

    try:
        yield begin
    finally:
        over.set()


def _load(modules: tuple[str, ...], over: Event) -> None:
    for name in modules:
        if over.is_set():
            return
        place, _, function = name.partition(":")
        with suppress(Exception):  # who needs the module imports it, too, and sees the error
            module = importlib.import_module(place)
            if function:
                getattr(module, function)()
