"""Paths in, tables out: read, deduplicate, resolve workers, interpret, join, partition; and the import log."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import polars as pl

from pdtrace import (
    clocks,
    identity,
    interpret,
    library,
    methods,
    phases,
    registry,
    spans,
    workers,
    zones,
)
from pdtrace._streams import DAMAGED, words
from pdtrace.errors import (
    PROBLEM,
    REPORT,
    PdtraceError,
    UnknownFormat,
    UnreadableInput,
    in_one_line,
    reraise_stop,
)
from pdtrace.inputs import Input, expand
from pdtrace.sink import Account, Reading, SourceSink
from pdtrace.store import Store

DUPLICATE_FILE = "duplicate of another source"
BEGINNING = "beginning of another source"
LOST = "taken back after a failure"
FINGERPRINT = "_schema"  # key of the fact that says which tables and queries a file was made with
START_BYTES = 1024  # sources are compared by them before they are read again
_log = logging.getLogger(__name__)
NO_ROW = "gave no row"
REPEATED = "repeats another record"
Progress = Callable[
    [str, int, int], None
]  # label, bytes read of the files so far, bytes of all files


@dataclass(frozen=True)
class Options:
    """What the user may ask of an import."""

    keep_content: bool = False
    since_ns: int | None = None
    until_ns: int | None = None
    progress: Progress | None = None


def ingest(paths: list[str], store: Store, options: Options | None = None) -> None:
    """Fill the store from files, folders, globs, archives or '-'.

    Raises UnreadableInput for a path that does not exist and UnknownFormat when nothing was recognised.
    """
    take(expand(paths), store, options)


def take(inputs: list[Input], store: Store, options: Options | None = None) -> None:
    """Fill the store from inputs. Raises UnknownFormat when nothing was recognised."""
    options = options or Options()
    with store.bulk_load():
        accounts = _read_all(inputs, store, options)
    if not any(account.collectors for account in accounts):
        raise UnknownFormat(*_nothing(accounts))
    _write_sources(store, accounts)
    _forget_copies(store, accounts)
    _note_copies(accounts, spans.deduplicate(store.connection))
    _keep_one_row_a_key(store, accounts, ["resources"])
    zones.align(store)
    interpret.name_resources(store)
    workers.resolve(store)
    _note_copies(accounts, interpret.run(store))
    workers.resolve(store)
    _keep_one_row_a_key(store, accounts, _KEYED)
    if not _count(store, accounts):
        raise UnknownFormat(*_no_record(accounts))
    derive(store, options)


def derive(store: Store, options: Options | None = None) -> None:
    """The stages after reading: deployments, identity, clocks, requests, phases, methods, views."""
    identity.link(store)
    _attempt(store, "aligning clocks", clocks.align)
    identity.build_requests(store)
    cut_to_window(store, options or Options())


def cut_to_window(store: Store, options: Options) -> None:
    """Leave what --since and --until let through, and make what is computed from that."""
    _cut(store, options)
    _attempt(store, "cutting requests into phases", phases.partition)
    store.install()
    for method in methods.METHODS.values():
        _attempt(store, method.name, partial(methods.run, methods=[method]))


def _attempt(store: Store, what: str, stage: Callable[[Store], object]) -> None:
    """Run a stage that others can do without; its failure is told in the diagnosis."""
    try:
        stage(store)
    except BaseException as error:
        reraise_stop(error)
        _log.debug("%s failed", what, exc_info=True)
        tell_problem(store, f"{what} failed: {in_one_line(error)}; {REPORT}")


def tell_problem(store: Store, text: str) -> None:
    """Keep a sentence about what could not be done; the diagnosis shows it."""
    store.append("facts", [{"key": PROBLEM, "value": text}])


def _nothing(accounts: list[Account]) -> tuple[str, str]:
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


def _read_all(inputs: list[Input], store: Store, options: Options) -> list[Account]:
    total = sum(item.size or 0 for item in inputs)
    done = 0
    accounts = []
    for item in inputs:
        item.keep_content = options.keep_content
        base = done

        def report(size: int, item: Input = item, base: int = base) -> None:
            if options.progress is not None:
                options.progress(item.path, base + min(size, item.size or size), total)

        account = _read_one(item, store, report)
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


def _read_one(item: Input, store: Store, report: Callable[[int], None]) -> Account:
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


def _write_sources(store: Store, accounts: list[Account]) -> None:
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


def _raw_tables() -> list[str]:
    """Tables whose rows say which record made them."""
    return [t.name for t in library.tables().values() if any(c.name == "record" for c in t.columns)]


def _forget_copies(store: Store, accounts: list[Account]) -> None:
    """Content that is there twice counts once.

    Of equal sources the first by path stays; of a source that is the beginning of another (copied while it
    grew, cut off on the way) the longer one.
    """
    first: dict[str, Account] = {}
    for account in accounts:
        if account.sha256 is None or not account.collectors:
            continue
        twin = first.setdefault(account.sha256, account)
        if twin is not account:
            _forget(store, account, f"{DUPLICATE_FILE}: {twin.item.path}")
    for account, longer in _beginnings([a for a in accounts if a.collectors and not a.twin]):
        _forget(store, account, f"{BEGINNING}: {longer.item.path}")


def _beginnings(accounts: list[Account]) -> list[tuple[Account, Account]]:
    """Sources that are the beginning of a longer one, with the longest such."""
    ordered = sorted((a for a in accounts if a.seen[1]), key=lambda a: (a.start, a.seen[1]))
    shorter: dict[int, list[Account]] = {}  # by number of the longer source
    for position, account in enumerate(ordered):
        for other in ordered[position + 1 :]:
            if not other.start.startswith(account.start):
                break
            if other.seen[1] > account.seen[1] and not other.failed:
                shorter.setdefault(other.item.number, []).append(account)
    found: dict[int, tuple[Account, Account]] = {}
    for longer in sorted(ordered, key=lambda a: (a.seen[1], a.item.path)):
        wanted = shorter.get(longer.item.number, [])
        hashes = _hashes_at(longer.item, sorted({a.seen[1] for a in wanted}))
        for account in wanted:
            if hashes.get(account.seen[1]) == account.seen[0]:
                found[account.item.number] = (account, longer)
    return list(found.values())


def _hashes_at(item: Input, sizes: list[int]) -> dict[int, str]:
    """sha256 of the first so many bytes of an input, for several sizes in one pass."""
    hashes: dict[int, str] = {}
    digest = hashlib.sha256()
    position = 0
    if not sizes:
        return hashes
    try:
        with item.open() as stream:
            for size in sizes:
                while position < size and (block := stream.read(min(1 << 20, size - position))):
                    digest.update(block)
                    position += len(block)
                if position == size:
                    hashes[size] = digest.hexdigest()
    except DAMAGED:
        return hashes  # what was found before the damage counts
    return hashes


def _note_copies(accounts: list[Account], removed: pl.DataFrame) -> None:
    """Copies of spans that were removed are records not kept; copies that differ are told apart."""
    for row in removed.iter_rows(named=True):
        account = accounts[row["source"]]
        same = row["records"] - row["conflicts"]
        for reason, count in (
            (row["reason"], same),
            (f"conflict: {row['reason']}", row["conflicts"]),
        ):
            if count:
                account.reasons[reason] += count
                account.positions[reason].extend(
                    row["positions"][: 5 - len(account.positions[reason])]
                )


def _forget(store: Store, account: Account, why: str) -> None:
    """Take back all rows that a source gave."""
    source = account.item.number
    account.twin = account.what = why
    account.problem = ""
    for table in library.tables().values():
        if table.name != "sources" and any(c.name == "source" for c in table.columns):
            store.execute(f"DELETE FROM {table.name} WHERE source = {source}")


# Tables that collectors fill and that have a natural key; spans.deduplicate knows more of spans.
_KEYED = [
    table.name
    for table in library.tables().values()
    if table.key and table.stage != "derived" and table.name not in {"spans", "sources", "skipped"}
]


def _keep_one_row_a_key(store: Store, accounts: list[Account], names: list[str]) -> None:
    """Keep one row per natural key; the winner does not depend on the order of reading.

    The records of the rows that go are noted: those that gave no other row repeat another record.
    """
    for name in names:
        table = library.tables()[name]
        keys = ", ".join(table.key)
        ((total, distinct),) = store.rows(f"SELECT count(*), count(DISTINCT ({keys})) FROM {name}")
        if total == distinct:
            continue
        own = ", ".join(f"t.{key}" for key in table.key)  # sources has start_ns too
        columns = {c.name for c in table.columns}
        order = "s.sha256, t.record" if {"source", "record"} <= columns else "t.rowid"
        join = "LEFT JOIN sources s USING (source)" if "source" in columns else ""
        store.execute(
            f"""CREATE OR REPLACE TEMP TABLE repeated AS
                SELECT t.rowid AS id FROM {name} t {join}
                QUALIFY row_number() OVER (PARTITION BY {own} ORDER BY {order}, t.rowid) > 1"""
        )
        if {"source", "record"} <= columns:
            for source, records in store.rows(
                f"""SELECT source, count(DISTINCT record) FROM {name}
                    WHERE rowid IN (SELECT id FROM repeated) AND record IS NOT NULL GROUP BY source"""
            ):
                accounts[source].reasons[REPEATED] += records
        store.execute(f"DELETE FROM {name} WHERE rowid IN (SELECT id FROM repeated)")
        store.execute("DROP TABLE repeated")


def _no_record(accounts: list[Account]) -> tuple[str, str]:
    """Message and hint when files were recognised and not one record of them is of use."""
    told = [a for a in accounts if a.collectors]
    parts = [
        f"{a.item.path}: {a.problem or a.what}, "
        + (", ".join(f"{n:,} x {reason}" for reason, n in a.reasons.most_common(2)) or "no records")
        for a in told[:3]
    ]
    more = f"; and {len(told) - 3:,} more files" if len(told) > 3 else ""
    return (
        f"nothing here says where time went ({'; '.join(parts)}{more})",
        "is the file whole? `pdtrace sources` lists what is read of each system",
    )


def _count(store: Store, accounts: list[Account]) -> int:
    """Records kept of all sources; fills rows_read, rows_kept, rows_skipped, the reasons and the time range."""
    unions = " UNION ".join(
        f"SELECT source, record FROM {name} WHERE record IS NOT NULL" for name in _raw_tables()
    )
    kept = dict(store.rows(f"SELECT source, count(*) FROM ({unions}) GROUP BY source"))
    rows = []
    for account in accounts:
        number = account.item.number
        if not account.collectors:
            continue
        have = int(kept.get(number, 0))
        account.read = max(account.read, have)
        missing = account.read - have
        reasons = _reasons(account, missing)
        rows += [
            {
                "source": number,
                "reason": reason,
                "records": count,
                "positions": account.positions.get(reason) or None,
                "excerpt": account.excerpts.get(reason),
            }
            for reason, count in reasons.items()
        ]
        store.execute(
            "UPDATE sources SET rows_read = ?, rows_kept = ?, rows_skipped = ?, used = ?, why = ? WHERE source = ?",
            [account.read, have, missing, have > 0, account.problem or account.what, number],
        )
    store.execute("UPDATE sources SET used = false WHERE used IS NULL")
    store.execute(_TIME_RANGES)
    store.append("skipped", rows)
    return sum(kept.values())


_TIME_RANGES = """
UPDATE sources SET start_ns = seen.start_ns, end_ns = seen.end_ns
FROM (
  SELECT source, min(start_ns) AS start_ns, max(end_ns) AS end_ns
  FROM (
    SELECT source, start_ns, coalesce(end_ns, start_ns) AS end_ns FROM spans
    UNION ALL SELECT source, start_ns, coalesce(end_ns, last_token_ns, start_ns) FROM legs
    UNION ALL SELECT source, time_ns, time_ns FROM samples
    UNION ALL SELECT source, time_ns, time_ns FROM events
    UNION ALL SELECT source, coalesce(start_ns, start_lower_ns), coalesce(start_ns, start_lower_ns) FROM steps
    UNION ALL SELECT source, start_ns, coalesce(end_ns, start_ns) FROM transfers
  )
  GROUP BY source
) seen
WHERE sources.source = seen.source
"""


def _reasons(account: Account, missing: int) -> dict[str, int]:
    """Why records of a source were not kept; the reasons add up to `missing`."""
    if account.twin:
        return {account.twin: missing} if missing else {}
    if account.lost:
        return {LOST: missing} if missing else {}
    reasons: dict[str, int] = {}
    left = missing
    for reason, count in account.reasons.items():
        # Where two collectors read one source, what one left the other may have taken.
        taken = min(count, left)
        if taken > 0:
            reasons[reason] = taken
            left -= taken
    if left > 0:
        reasons[NO_ROW] = left
    return reasons


def _cut(store: Store, options: Options) -> None:
    """--since and --until: only requests that started, and what happened, inside the window stay."""
    conditions = []
    if options.since_ns is not None:
        conditions.append("{column} >= " + str(options.since_ns))
    if options.until_ns is not None:
        conditions.append("{column} < " + str(options.until_ns))
    if not conditions:
        return
    inside = " AND ".join(conditions)
    count = "SELECT count(*), count(*) FILTER (start_ns IS NULL) FROM requests"
    before, timeless = store.rows(count)[0]
    for table, column in (("requests", "start_ns"), ("samples", "time_ns"), ("events", "time_ns")):
        store.execute(
            f"DELETE FROM {table} WHERE NOT coalesce({inside.format(column=column)}, false)"
        )
    start = "coalesce(start_ns, start_lower_ns)"
    store.execute(f"DELETE FROM steps WHERE NOT coalesce({inside.format(column=start)}, false)")
    store.execute("DELETE FROM observations WHERE request NOT IN (SELECT request FROM requests)")
    if before and timeless == before:
        raise PdtraceError(
            "--since/--until: the requests in these data have no time of day",
            "leave the options out, or add a column with the time at which each request arrived",
        )
    if store.count("requests") == 0 and store.count("samples") == 0 and store.count("steps") == 0:
        raise PdtraceError(
            "nothing happened inside --since/--until",
            "`pdtrace diagnose` without them shows the time range; times without a zone are UTC",
        )
    if timeless:
        tell_problem(
            store,
            f"whether {timeless:,} requests without a time of day fall inside --since/--until: they were left out",
        )
