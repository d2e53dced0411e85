"""The import log: records read, kept and skipped of each source, the reasons, the time range."""

from __future__ import annotations

from pdtrace import library
from pdtrace.sink import Account
from pdtrace.store import Store

LOST = "taken back after a failure"
NO_ROW = "gave no row"


def count_records(store: Store, accounts: list[Account]) -> int:
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


def _raw_tables() -> list[str]:
    """Tables whose rows say which record made them."""
    return [t.name for t in library.tables().values() if any(c.name == "record" for c in t.columns)]


def nothing_kept(accounts: list[Account]) -> tuple[str, str]:
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
