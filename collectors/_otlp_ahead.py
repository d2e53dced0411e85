"""Blocks read and decoded by several threads, some of them ahead of the one who takes what they give."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event
from typing import TypeVar

T = TypeVar("T")


def in_order(
    tasks: Iterator[Callable[[], T]], threads: int, ahead: int
) -> Generator[T, None, None]:
    """What the tasks give, in their order; up to `ahead` of them are begun or done and not taken yet.

    The threads ask for the tasks too, one after the other: who takes the results does not wait for a file. An
    error comes when all before it is taken.
    """
    pending: deque[Future[T | None]] = deque()
    turn = Event()
    turn.set()
    with ThreadPoolExecutor(threads, "otlp") as pool:
        try:
            while True:
                while len(pending) < ahead:
                    mine, turn = turn, Event()
                    pending.append(pool.submit(_next, tasks, mine, turn))
                found = pending.popleft().result()
                if found is None:
                    return
                yield found
        finally:
            # From the end: who waits for its turn would wait for ever for one that was cancelled.
            for future in reversed(pending):
                future.cancel()


def _next(tasks: Iterator[Callable[[], T]], mine: Event, following: Event) -> T | None:
    """Do the next task; None when there is none. The pool begins them in the order in which they were handed over."""
    mine.wait()
    try:
        task = next(tasks, None)
    finally:
        following.set()
    return None if task is None else task()
