"""The same content or record from two sources counts once, whichever was read first."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import polars as pl

from pdtrace import library
from pdtrace._lookup import repeated
from pdtrace._streams import DAMAGED
from pdtrace.inputs import Input
from pdtrace.sink import Account
from pdtrace.store import Store

DUPLICATE_FILE = "duplicate of another source"
BEGINNING = "beginning of another source"
REPEATED = "repeats another record"


def forget_copies(store: Store, accounts: list[Account]) -> None:
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


def note_copies(accounts: list[Account], removed: pl.DataFrame) -> None:
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
KEYED = [
    table.name
    for table in library.tables().values()
    if table.key
    and table.stage in {"read", "interpret"}
    and table.name not in {"spans", "sources", "skipped"}
]


def _may_repeat(store: Store, name: str, keys: Sequence[str]) -> bool:
    """Whether rows of a table may share a key.

    Hashes of long texts are counted many times as fast; two keys of one hash are only looked at in vain.
    """
    if name == "legs" and len(keys) == 1 and (kept := store.kept_aside(name)) is not None:
        return bool(repeated(kept[keys[0]].hash()).any())
    ((total, distinct),) = store.rows(
        f"SELECT count(*), count(DISTINCT hash({', '.join(keys)})) FROM {name}"
    )
    return bool(total != distinct)


def keep_one_row_a_key(store: Store, accounts: list[Account], names: list[str]) -> None:
    """Keep one row per natural key; the winner does not depend on the order of reading.

    The records of the rows that go are noted: those that gave no other row repeat another record.
    """
    filled = store.filled()
    for name in names:
        if name not in filled:
            continue
        table = library.tables()[name]
        if not _may_repeat(store, name, table.key):
            continue
        store.settle_aside(name)
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
