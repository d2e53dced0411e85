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

SMALL_BYTES = 64 << 10  # many files of at most so much may be read at once
TOGETHER = 256  # so many: a batch costs little then, and they are few megabytes
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
    hashed: bool = True,
) -> list[Account]:
    """Read all inputs; what is known of each afterwards. Where there are several they are always `hashed`, to find copies."""
    told = _Progress(inputs, progress)
    hashed = hashed or len(inputs) > 1
    accounts = []
    small: list[Account] = []
    for item in inputs:
        item.keep_content = keep_content
        account = _recognised(item, recognised)
        accounts.append(account)
        if _is_small(account):
            small.append(account)
        elif account.collectors:
            _read_alone(account, store, told.report(item), hashed=hashed)
        if len(small) == TOGETHER:
            _read_together(small, store, hashed=hashed)
            small = []
        told.over(item)
    _read_together(small, store, hashed=hashed)
    return accounts


class _Progress:
    """Tells how much of all inputs was read."""

    def __init__(self, inputs: list[Input], tell: Progress | None) -> None:
        self._tell = tell
        self._total = sum(item.size or 0 for item in inputs)
        self._done = 0

    def report(self, item: Input) -> Callable[[int], None]:
        """What is called with the bytes of an input that were read so far."""
        base = self._done

        def report(size: int) -> None:
            if self._tell is not None:
                self._tell(item.path, base + min(size, item.size or size), self._total)

        return report

    def over(self, item: Input) -> None:
        """An input is dealt with."""
        self._done += item.size or 0


def _is_small(account: Account) -> bool:
    """Whether a source is one of those that its collector reads many of at once."""
    size = account.item.size
    if len(account.collectors) != 1 or size is None or size > SMALL_BYTES:
        return False
    return hasattr(registry.collectors()[account.collectors[0]], "read_together")


def _read_together(accounts: list[Account], store: Store, *, hashed: bool) -> None:
    """Let collectors read many small sources at once; where that fails or does not fit, each alone."""
    for name in sorted({account.collectors[0] for account in accounts}):
        mine = [account for account in accounts if account.collectors[0] == name]
        for account in _left(name, mine, store) if len(mine) > 1 else mine:
            _read_alone(account, store, _silent, hashed=hashed)


def _left(name: str, accounts: list[Account], store: Store) -> list[Account]:
    """Read these sources at once; those that remain to be read."""
    readings = [Reading(account.item, _silent) for account in accounts]
    sinks = [SourceSink(store, account) for account in accounts]
    try:
        pairs = list(zip(readings, sinks, strict=True))
        left = set(registry.collectors()[name].read_together(pairs))
        for place, sink in enumerate(sinks):
            if place not in left:
                sink.close()
    except BaseException as error:
        reraise_stop(error)
        _log.debug("collector %s failed on %d files at once", name, len(accounts), exc_info=True)
        store.take_back()
        left = {*range(len(accounts))}
    if store.settle():
        left = {*range(len(accounts))}  # alone it is told which of them cannot be stored
    for place, (account, reading) in enumerate(zip(accounts, readings, strict=True)):
        if place in left:
            reading.close()
        else:
            _finish(account, reading)
    return [account for place, account in enumerate(accounts) if place in left]


def _silent(_: int) -> None:
    """Small files show no progress of their own."""


def _recognised(item: Input, recognised: Callable[[], object] | None) -> Account:
    """What an input is; the account names collectors where it is to be read."""
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
    return account


def _read_alone(
    account: Account, store: Store, report: Callable[[int], None], *, hashed: bool
) -> None:
    """Read one input; damage ends the reading and is told, what came before it stays."""
    reading = Reading(account.item, report, hashed=hashed)
    for name in account.collectors:
        _read_by(name, reading, SourceSink(store, account), account)
    _finish(account, reading)
    problem = store.settle()
    account.lost = bool(problem)
    if problem and not account.failed:
        raise PdtraceError(
            f"{store.path}: cannot be written: {problem}",
            "is the disk full? TMPDIR names another",
        )


def _finish(account: Account, reading: Reading) -> None:
    """What is known of a source when it was read."""
    try:
        account.sha256, account.size = reading.fingerprint()
    except DAMAGED as error:
        reading.damage = reading.damage or words(error)
    if reading.damage and not account.problem:
        account.problem = f"damaged after {account.read:,} records: {reading.damage}"
    account.seen = reading.so_far()


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
