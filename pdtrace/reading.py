"""Inputs become raw rows: recognise each, let its collectors read it, keep what came before any damage."""

from __future__ import annotations

import logging
from collections.abc import Callable

from pdtrace import registry
from pdtrace._streams import DAMAGED, words
from pdtrace.errors import REPORT, PdtraceError, UnreadableInput, in_one_line, reraise_stop
from pdtrace.inputs import Input
from pdtrace.sink import Account, Reading, SourceSink
from pdtrace.store import Store

START_BYTES = 1024  # sources are compared by them before they are read again
Progress = Callable[
    [str, int, int], None
]  # label, bytes read of the files so far, bytes of all files

_log = logging.getLogger(__name__)


def read_all(
    inputs: list[Input],
    store: Store,
    *,
    keep_content: bool = False,
    progress: Progress | None = None,
    recognised: Callable[[], object] | None = None,
) -> list[Account]:
    """Read all inputs; what is known of each afterwards."""
    total = sum(item.size or 0 for item in inputs)
    done = 0
    accounts = []
    for item in inputs:
        item.keep_content = keep_content
        base = done

        def report(size: int, item: Input = item, base: int = base) -> None:
            if progress is not None:
                progress(item.path, base + min(size, item.size or size), total)

        account = _read_one(item, store, report, recognised)
        problem = store.settle()
        account.lost = bool(problem)
        if problem and not account.failed:
            raise PdtraceError(
                f"{store.path}: cannot be written: {problem}",
                "is the disk full? TMPDIR names another",
            )
        accounts.append(account)
        done += item.size or 0
    return accounts


def _read_one(
    item: Input,
    store: Store,
    report: Callable[[int], None],
    recognised: Callable[[], object] | None,
) -> Account:
    """Recognise and read one input; damage ends the reading and is told, what came before it stays."""
    account = Account(item)
    if item.problem:
        account.problem = item.problem
        account.ignored = item.useless
        return account
    try:
        head = item.head()
    except DAMAGED as error:
        account.problem = f"cannot be read: {words(error)}"
        return account
    account.start = head.data[:START_BYTES]
    failures: list[str] = []
    matches = registry.sniff(head, failures)
    if not matches:
        account.what = "empty (0 bytes)" if not head.data else "no known format"
        if item.damage:
            account.problem = f"damaged near its beginning: {item.damage}"
        elif failures:
            account.problem = f"{failures[0]}; {REPORT}"
        return account
    account.what = matches[0][1].ignore or matches[0][1].what
    if matches[0][1].ignore:
        account.ignored = True
        return account
    if recognised is not None:
        recognised()
    account.collectors = [name for name, _ in matches]
    reading = Reading(item, report)
    for name in account.collectors:
        _read_by(name, reading, SourceSink(store, account), account)
    try:
        account.sha256, account.size = reading.fingerprint()
    except DAMAGED as error:
        reading.damage = reading.damage or words(error)
    if reading.damage and not account.problem:
        account.problem = f"damaged after {account.read:,} records: {reading.damage}"
    account.seen = reading.so_far()
    return account


def _read_by(name: str, reading: Reading, sink: SourceSink, account: Account) -> None:
    """Let one collector read a source. Whatever goes wrong is this source's problem, not the others'."""
    try:
        try:
            registry.collectors()[name].read(reading, sink)
        finally:
            sink.close()
    except DAMAGED as error:
        account.problem = f"damaged after {sink.read_count:,} records: {words(error)}"
    except UnreadableInput as error:
        account.problem = f"cannot be read: {error.message}"
    except BaseException as error:
        reraise_stop(error)
        _log.debug("collector %s failed on %s", name, reading.path, exc_info=True)
        account.failed = True
        account.problem = f"collector {name} failed after {sink.read_count:,} records: {in_one_line(error)}; {REPORT}"


def write_sources(store: Store, accounts: list[Account]) -> None:
    """Fill table sources, all but the counts."""
    store.append(
        "sources",
        [
            {
                "source": a.item.number,
                "path": a.item.path,
                "collector": "+".join(a.collectors) or None,
                "why": a.problem or a.what,
                "bytes": a.size if a.size is not None else None,
                "record_unit": a.unit if a.collectors else None,
                "clock": a.clock if a.collectors else None,
                "sha256": a.sha256,
            }
            for a in accounts
        ],
    )


def nothing_recognised(accounts: list[Account]) -> tuple[str, str]:
    """Message and hint when nothing could be used."""
    if not accounts:
        return (
            "nothing to read: no file is there",
            "give a file or a folder that holds logs, traces, metrics or bench files",
        )
    told = [a for a in accounts if not a.ignored] or accounts
    reasons = "; ".join(f"{a.item.path}: {a.problem or a.what}" for a in told[:3])
    more = f"; and {len(accounts) - 3:,} more files" if len(accounts) > 3 else ""
    if all(a.ignored for a in accounts):
        return (
            f"nothing here says where time went ({reasons}{more})",
            "`pdtrace sources` lists what is read: add the server's log, traces, metrics or a table of requests",
        )
    return (
        f"no format recognised ({reasons}{more})",
        "`pdtrace sources` lists what can be read; a table needs a header line with names such as ttft_ms",
    )
