"""Paths in, tables out: read, deduplicate, resolve workers, interpret, join, partition; and the import log."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import polars as pl
import zstandard

from pdtrace import clocks, identity, interpret, library, methods, phases, registry, spans, workers
from pdtrace.errors import PdtraceError, UnknownFormat
from pdtrace.inputs import Input, expand
from pdtrace.sink import Account, Reading, SourceSink
from pdtrace.store import Store

DAMAGED = (OSError, EOFError, zlib.error, zstandard.ZstdError)  # streams that stop being readable
DUPLICATE_FILE = "duplicate of another source"
NO_ROW = "gave no row"
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
    options = options or Options()
    inputs = expand(paths)
    with store.bulk_load():
        accounts = _read_all(inputs, store, options)
    _write_sources(store, accounts)
    _forget_twins(store, accounts)
    _note_copies(accounts, spans.deduplicate(store.connection))
    _keep_one_row_a_key(store, ["resources"])
    interpret.name_resources(store)
    workers.resolve(store)
    _note_copies(accounts, interpret.run(store))
    workers.resolve(store)
    _keep_one_row_a_key(store, _KEYED)
    _count(store, accounts)
    derive(store, options)
    if not any(account.collectors for account in accounts):
        raise UnknownFormat(*_nothing(paths, accounts))


def derive(store: Store, options: Options | None = None) -> None:
    """The stages after reading: deployments, identity, clocks, requests, phases, methods, views."""
    options = options or Options()
    identity.link(store)
    clocks.align(store)
    identity.build_requests(store)
    _cut_to_window(store, options)
    phases.partition(store)
    store.install()
    methods.run(store)


def _nothing(paths: list[str], accounts: list[Account]) -> tuple[str, str]:
    """Message and hint when nothing could be used."""
    where = ", ".join(paths)
    if not accounts:
        return (
            f"{where}: nothing to read",
            "give a file or a folder that holds logs, traces, metrics or bench files",
        )
    reasons = "; ".join(f"{a.item.path}: {a.problem or a.what}" for a in accounts[:3])
    more = f" and {len(accounts) - 3} more" if len(accounts) > 3 else ""
    return (
        f"{where}: no format recognised ({reasons}{more})",
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

        accounts.append(_read_one(item, store, report))
        done += item.size or 0
    return accounts


def _read_one(item: Input, store: Store, report: Callable[[int], None]) -> Account:
    """Recognise and read one input; damage ends the reading and is told, what came before it stays."""
    account = Account(item)
    if item.problem:
        account.problem = item.problem
        return account
    try:
        head = item.head()
    except DAMAGED as error:
        account.problem = f"cannot be read: {_words(error)}"
        return account
    matches = registry.sniff(head)
    if not matches:
        account.what = "empty (0 bytes)" if not head.data else "no known format"
        return account
    account.what = matches[0][1].ignore or matches[0][1].what
    if matches[0][1].ignore:
        account.ignored = True
        return account
    account.collectors = [name for name, _ in matches]
    reading = Reading(item, report)
    for name in account.collectors:
        sink = SourceSink(store, account)
        try:
            registry.collectors()[name].read(reading, sink)
        except DAMAGED as error:
            account.problem = f"damaged after {sink.read_count:,} records: {_words(error)}"
        sink.close()
    try:
        account.sha256, account.size = reading.fingerprint()
    except DAMAGED as error:
        account.problem = account.problem or f"damaged: {_words(error)}"
    return account


def _words(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


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


def _forget_twins(store: Store, accounts: list[Account]) -> None:
    """A file given twice counts once: of equal contents the first by path stays."""
    first: dict[str, Account] = {}
    for account in accounts:
        if account.sha256 is None or not account.collectors:
            continue
        twin = first.setdefault(account.sha256, account)
        if twin is not account:
            _forget(store, account.item.number)
            account.twin = twin.item.path
            account.what = f"{DUPLICATE_FILE}: {twin.item.path}"


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


def _forget(store: Store, source: int) -> None:
    """Take back all rows that a source gave."""
    for table in library.tables().values():
        if table.name != "sources" and any(c.name == "source" for c in table.columns):
            store.execute(f"DELETE FROM {table.name} WHERE source = {source}")


# Tables that collectors fill and that have a natural key; spans.deduplicate knows more of spans.
_KEYED = [
    table.name
    for table in library.tables().values()
    if table.key and table.stage != "derived" and table.name not in {"spans", "sources", "skipped"}
]


def _keep_one_row_a_key(store: Store, names: list[str]) -> None:
    """Keep one row per natural key; the winner does not depend on the order of reading."""
    for name in names:
        table = library.tables()[name]
        keys = ", ".join(table.key)
        ((total, distinct),) = store.rows(f"SELECT count(*), count(DISTINCT ({keys})) FROM {name}")
        if total == distinct:
            continue
        columns = {c.name for c in table.columns}
        order = "s.sha256, t.record" if {"source", "record"} <= columns else "t.rowid"
        join = "LEFT JOIN sources s USING (source)" if "source" in columns else ""
        store.execute(
            f"""DELETE FROM {name} WHERE rowid IN (
                  SELECT id FROM (SELECT t.rowid AS id, row_number() OVER (
                      PARTITION BY {keys} ORDER BY {order}, t.rowid) AS place FROM {name} t {join})
                  WHERE place > 1)"""
        )


def _count(store: Store, accounts: list[Account]) -> None:
    """Fill rows_read, rows_kept, rows_skipped, the reasons and the time range of every source."""
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
    store.append("skipped", rows)


def _reasons(account: Account, missing: int) -> dict[str, int]:
    """Why records of a source were not kept; the reasons add up to `missing`."""
    if account.twin:
        return {f"{DUPLICATE_FILE}: {account.twin}": missing} if missing else {}
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


def _cut_to_window(store: Store, options: Options) -> None:
    """--since and --until: only requests that started, and what happened, inside the window stay."""
    conditions = []
    if options.since_ns is not None:
        conditions.append("{column} >= " + str(options.since_ns))
    if options.until_ns is not None:
        conditions.append("{column} < " + str(options.until_ns))
    if not conditions:
        return
    inside = " AND ".join(conditions)
    for table, column in (("requests", "start_ns"), ("samples", "time_ns"), ("events", "time_ns")):
        store.execute(
            f"DELETE FROM {table} WHERE NOT coalesce({inside.format(column=column)}, false)"
        )
    start = "coalesce(start_ns, start_lower_ns)"
    store.execute(f"DELETE FROM steps WHERE NOT coalesce({inside.format(column=start)}, false)")
    store.execute("DELETE FROM observations WHERE request NOT IN (SELECT request FROM requests)")
    if store.count("requests") == 0 and store.count("samples") == 0 and store.count("steps") == 0:
        raise PdtraceError(
            "nothing happened inside --since/--until", "`pdtrace coverage` shows the time range"
        )
