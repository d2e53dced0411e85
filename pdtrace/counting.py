"""The import log: records read, kept and skipped of each source, the reasons, the time range."""

from __future__ import annotations

from types import ModuleType

import polars as pl

from pdtrace import library, registry
from pdtrace.sink import Account
from pdtrace.store import Store

LOST = "taken back after a failure"
NO_ROW = "gave no row"


def count_records(store: Store, accounts: list[Account]) -> int:
    """Records kept of all sources; fills rows_read, rows_kept, rows_skipped, the reasons and the time range."""
    filled = store.filled()
    kept = _records_kept(store, filled)
    ranges = _time_ranges(store, filled)
    counts: list[tuple[object, ...]] = []
    skipped: list[dict[str, object]] = []
    for account in accounts:
        number = account.item.number
        start, end = ranges.get(number, (None, None))
        told = account.problem or account.what
        if not account.collectors:
            counts.append((number, start, end, None, None, None, False, told))
            continue
        have = kept.get(number, 0)
        account.read = max(account.read, have)
        missing = account.read - have
        counts.append((number, start, end, account.read, have, missing, have > 0, told))
        skipped += [
            {
                "source": number,
                "reason": reason,
                "records": count,
                "positions": account.positions.get(reason) or None,
                "excerpt": account.excerpts.get(reason),
            }
            for reason, count in _reasons(account, missing).items()
        ]
    store.temporary("source_counts", pl.DataFrame(counts, schema=_COUNTS, orient="row"))
    store.execute(
        f"""UPDATE sources SET {", ".join(f"{name} = c.{name}" for name in _COUNTS if name != "source")}
            FROM source_counts c WHERE sources.source = c.source"""
    )
    store.execute("DROP TABLE source_counts")
    store.append("skipped", skipped)
    return sum(kept.values())


_COUNTS = {
    "source": pl.Int32, "start_ns": pl.Int64, "end_ns": pl.Int64, "rows_read": pl.Int64, "rows_kept": pl.Int64,
    "rows_skipped": pl.Int64, "used": pl.Boolean, "why": pl.String,
}  # fmt: skip
_INSTANTS = {
    "spans": ("start_ns", "coalesce(end_ns, start_ns)"),
    "legs": ("start_ns", "coalesce(end_ns, last_token_ns, start_ns)"),
    "samples": ("time_ns", "time_ns"),
    "events": ("time_ns", "time_ns"),
    "steps": ("coalesce(start_ns, start_lower_ns)", "coalesce(start_ns, start_lower_ns)"),
    "transfers": ("start_ns", "coalesce(end_ns, start_ns)"),
}  # first and last instant that a row of these tables tells


def _records_kept(store: Store, filled: frozenset[str]) -> dict[int | None, int]:
    """How many records of each source made a row of any table."""
    tables = [n for n in _raw_tables() if n in filled and store.may_tell(n, "record")]
    if not tables:
        return {}
    if len(tables) == 1 and (batches := store.batches_aside(tables[0])):
        told = pl.concat(pl.DataFrame(b.select(["source", "record"])) for b in batches)
        counts = told.drop_nulls("record").group_by("source").agg(pl.col("record").n_unique())
        return dict(counts.iter_rows())
    rows = " UNION ".join(
        f"SELECT source, record FROM {name} WHERE record IS NOT NULL" for name in tables
    )
    distinct = "" if len(tables) > 1 else "DISTINCT "
    return dict(store.rows(f"SELECT source, count({distinct}record) FROM ({rows}) GROUP BY source"))


def _time_ranges(
    store: Store, filled: frozenset[str]
) -> dict[int | None, tuple[int | None, int | None]]:
    """First and last instant of each source."""
    rows = " UNION ALL ".join(
        f"SELECT source, {first} AS low, {last} AS high FROM {name}"
        for name, (first, last) in _INSTANTS.items()
        if name in filled
    )
    if not rows:
        return {}
    found = store.rows(f"SELECT source, min(low), max(high) FROM ({rows}) GROUP BY source")
    return {source: (low, high) for source, low, high in found}


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


def _raw_tables() -> list[str]:
    """Tables whose rows say which record made them."""
    return [t.name for t in library.tables().values() if any(c.name == "record" for c in t.columns)]


def nothing_kept(accounts: list[Account]) -> tuple[str, str]:
    """Message and hint when files were recognised and not one record of them is of use."""
    told = [a for a in accounts if a.collectors]
    parts = [
        f"{a.item.path}: {a.problem or a.what}, "
        + (
            ", ".join(f"{n:,} x {reason}" for reason, n in a.reasons.most_common(3) if n)
            or "no records"
        )
        for a in told[:3]
    ]
    more = f"; and {len(told) - 3:,} more files" if len(told) > 3 else ""
    return (
        f"nothing here says where time went ({'; '.join(parts)}{more})",
        _switches(told) + "`pdtrace sources` lists what is read of each system",
    )


_WANTED = ("outcome", "first_token", "engine_steps")  # what one would miss first in a server's log


def _switches(told: list[Account]) -> str:
    """How the systems that wrote these logs are made to say more, where their collectors tell."""
    modules = registry.collectors()
    known = [modules[c] for a in told for c in a.collectors if c in modules]
    systems = {name for module in known for name in _names(module)}
    texts = [
        module.SWITCHES[item]
        for item in _WANTED
        for module in modules.values()
        if _names(module) & systems and item in getattr(module, "SWITCHES", {})
    ]
    return f"to log more: {'; '.join(dict.fromkeys(texts))}. " if texts else ""


def _names(module: ModuleType) -> set[str]:
    return {module.TITLE, getattr(module, "ENGINE", module.TITLE)}
