"""Which names mean the same worker: merges rows by their aliases, renames them everywhere."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import field

import polars as pl

from pdtrace._graph import components
from pdtrace._worker_names import folder, rename
from pdtrace.model import ALIAS_KINDS, GLOBAL_ALIAS_KINDS
from pdtrace.records import dataclass
from pdtrace.store import Store

NEAR_NS = 120 * 10**9  # windows this close may be one process
_SCOPED = ("pod", "pid", "address", "file")  # kinds of names that hold nearby, in this order
_BASIS_ORDER = {"span": 0, "config": 1, "log": 2, "inferred": 3, None: 4}
_WORDS = ("name", "engine", "version", "host", "rank", "deployment")


def resolve(store: Store) -> None:
    """Make one worker of all rows that mean the same one; running it again changes nothing.

    Leaves the temp table worker_map(worker, canonical) with every id ever seen.
    """
    known = store.short("SELECT worker, kind, value, source FROM worker_aliases")
    rows = store.short("SELECT * FROM workers")
    paths = dict(store.rows("SELECT source, path FROM sources"))
    mapping = canonical_ids(rows, known, paths, lambda: _windows(store, rows, known))
    _remember(store, mapping)
    changed = {old: new for old, new in mapping.items() if old != new}
    if changed or rows.height != len(mapping):
        store.replace("workers", merged_rows(rows, mapping))
    if changed:
        rename(store, changed)
        store.execute("CREATE OR REPLACE TEMP TABLE kept AS SELECT DISTINCT * FROM worker_aliases")
        store.execute("DELETE FROM worker_aliases; INSERT INTO worker_aliases FROM kept")
        store.execute("DROP TABLE kept")


def unite(store: Store, same: str) -> None:
    """Make one worker of those that bear the same alias in the rows (worker, kind, value) of this statement."""
    rows = store.sql(same)
    if rows.height:
        store.append("worker_aliases", rows)
        resolve(store)


def _remember(store: Store, mapping: Mapping[str, str]) -> None:
    """Temp table worker_map: what earlier runs renamed is renamed on."""
    store.execute("CREATE TEMP TABLE IF NOT EXISTS worker_map (worker VARCHAR, canonical VARCHAR)")
    old = {
        str(worker): str(canonical)
        for worker, canonical in store.rows("SELECT worker, canonical FROM temp.worker_map")
    }
    new = {worker: mapping.get(canonical, canonical) for worker, canonical in old.items()}
    new |= mapping
    if new != old:
        rows = {"worker": list(new), "canonical": list(new.values())}
        kinds = {"worker": pl.String, "canonical": pl.String}
        store.temporary("worker_map", pl.DataFrame(rows, schema=kinds))


def _windows(store: Store, rows: pl.DataFrame, aliases: pl.DataFrame) -> dict[str, tuple[int, int]]:
    """First and last instant seen of the workers whose pid must be told apart by time."""
    windows: dict[str, tuple[int, int]] = {}
    for worker, start, end in rows.select("worker", "start_ns", "end_ns").iter_rows():
        _widen(windows, worker, start, end)
    if not (aliases["kind"] == "pid").any():
        return windows
    filled = store.filled()
    for table, first, last in (
        ("samples", "time_ns", "time_ns"),
        ("events", "time_ns", "time_ns"),
        ("steps", "coalesce(start_ns, start_lower_ns)", "coalesce(start_ns, start_upper_ns)"),
        ("legs", "start_ns", "coalesce(end_ns, start_ns)"),
    ):
        if table not in filled:
            continue
        found = store.rows(
            f"""SELECT worker, min({first}), max({last}) FROM {table}
                WHERE worker LIKE 'pid:%' OR worker LIKE 'instance:%' GROUP BY worker"""
        )
        for worker, start, end in found:
            _widen(windows, worker, start, end)
    return windows


def _widen(
    windows: dict[str, tuple[int, int]], worker: str, start: int | None, end: int | None
) -> None:
    if start is None and end is None:
        return
    low = start if start is not None else end
    high = end if end is not None else start
    assert low is not None
    assert high is not None
    before = windows.get(worker, (low, high))
    windows[worker] = (min(before[0], low), max(before[1], high))


@dataclass
class _Group:
    """What is known of one set of ids that already count as one worker."""

    ids: list[str]
    values: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    folders: set[str] = field(default_factory=set)
    hosts: set[str] = field(default_factory=set)
    window: tuple[int, int] | None = None


def canonical_ids(
    rows: pl.DataFrame,
    aliases: pl.DataFrame,
    paths: Mapping[int, str],
    windows: Callable[[], Mapping[str, tuple[int, int]]],
) -> dict[str, str]:
    """Every worker id with the id that stands for it; independent of the order of the rows.

    `windows`: when workers were seen, asked for only where one name stands in several groups.
    """
    ids = sorted({*rows["worker"].drop_nulls(), *aliases["worker"].drop_nulls()})
    number = {worker: n for n, worker in enumerate(ids)}
    said = sorted(
        {(w, k, v) for w, k, v in aliases.select("worker", "kind", "value").iter_rows() if w and v}
        | {(w, *_own_alias(w)) for w in ids}
    )
    label = _join_global(number, said)
    groups = _groups(ids, label, said, aliases, rows, paths)
    if _share(groups):
        _set_windows(groups, windows())
    for kind in _SCOPED:
        groups = _join_scoped(groups, kind)
    return {worker: _best_id(group) for group in groups for worker in group.ids}


def _own_alias(worker: str) -> tuple[str, str]:
    """The alias that an id is made of; a pid without its scope."""
    kind, _, value = worker.partition(":")
    return (kind, value.partition("@")[0] if kind == "pid" else value)


def _join_global(number: Mapping[str, int], said: list[tuple[str, str, str]]) -> list[int]:
    """Components over shared global aliases; pods wait: a restarted pod keeps only its name."""
    first: dict[tuple[str, str], int] = {}
    a, b = [], []
    for worker, kind, value in said:
        if kind == "process" or (kind in GLOBAL_ALIAS_KINDS and kind != "pod"):
            a.append(first.setdefault((kind, value), number[worker]))
            b.append(number[worker])
    return [int(x) for x in components(len(number), a, b)]


def _groups(
    ids: list[str],
    label: list[int],
    said: list[tuple[str, str, str]],
    aliases: pl.DataFrame,
    rows: pl.DataFrame,
    paths: Mapping[int, str],
) -> list[_Group]:
    groups: dict[int, _Group] = {}
    of: dict[str, _Group] = {}
    for worker, root in zip(ids, label, strict=True):
        group = groups.setdefault(root, _Group([]))
        group.ids.append(worker)
        of[worker] = group
        if worker.startswith("pid:") and "@" in worker:
            group.folders.add(worker.partition("@")[2])
    for worker, kind, value in said:
        of[worker].values[kind].add(_own_alias(f"pid:{value}")[1] if kind == "pid" else value)
    for worker, source in aliases.select("worker", "source").unique().iter_rows():
        if source in paths and worker in of:
            of[worker].folders.add(folder(paths[source]))
    for worker, host in rows.select("worker", "host").iter_rows():
        if worker in of and host:
            of[worker].hosts.add(host)
    return list(groups.values())


def _share(groups: list[_Group]) -> bool:
    """Whether a name that holds nearby stands in several groups."""
    held = Counter((k, v) for group in groups for k in _SCOPED for v in group.values[k])
    return any(count > 1 for count in held.values())


def _set_windows(groups: list[_Group], windows: Mapping[str, tuple[int, int]]) -> None:
    for group in groups:
        for worker in group.ids:
            if worker in windows:
                group.window = _hull(group.window, windows[worker])


def _hull(a: tuple[int, int] | None, b: tuple[int, int] | None) -> tuple[int, int] | None:
    if a is None or b is None:
        return a or b
    return (min(a[0], b[0]), max(a[1], b[1]))


def _join_scoped(groups: list[_Group], kind: str) -> list[_Group]:
    """Groups without a global name join the one group they can be, by a name that holds nearby."""
    holders: dict[str, list[int]] = defaultdict(list)
    for n, group in enumerate(groups):
        for value in sorted(group.values[kind]):
            holders[value].append(n)
    a, b = [], []
    for members in holders.values():
        hosts = [n for n in members if _names_beyond(groups[n], kind)]
        # A log often knows the KV engine's id, spans know the instance: one may host.
        instances = [n for n in hosts if groups[n].values["instance"]]
        if kind == "pid" and instances:
            hosts = instances
        guests = [n for n in members if n not in hosts]
        for guest in guests:
            fitting = [n for n in hosts if _may_be_one(groups[guest], groups[n], kind)]
            if not hosts and kind != "pid":  # nameless among themselves
                earlier = [n for n in guests if n < guest]
                fitting = [n for n in earlier if _may_be_one(groups[guest], groups[n], kind)][:1]
            if len(fitting) == 1:
                a.append(fitting[0])
                b.append(guest)
    if not a:
        return groups
    merged: dict[int, _Group] = {}
    for n, root in enumerate(int(x) for x in components(len(groups), a, b)):
        merged[root] = _merge(merged[root], groups[n]) if root in merged else groups[n]
    return list(merged.values())


def _names_beyond(group: _Group, kind: str) -> bool:
    """Whether it has a name that holds anywhere; a pod's own name makes nobody a host of pods."""
    return any(group.values[k] for k in GLOBAL_ALIAS_KINDS if k != kind)


def _may_be_one(guest: _Group, host: _Group, kind: str) -> bool:
    """Whether a scoped name (pid, pod, address, file) can mean the same worker in both groups."""
    if guest.hosts and host.hosts and not guest.hosts & host.hosts:
        return False
    for strong in GLOBAL_ALIAS_KINDS:
        if strong != kind and guest.values[strong] and host.values[strong]:
            return False  # it would have been joined by it already
    if kind == "file":
        return True
    same_folder = bool(guest.folders & host.folders)
    if guest.window and host.window:
        gap = max(guest.window[0], host.window[0]) - min(guest.window[1], host.window[1])
        return gap <= NEAR_NS and (kind != "address" or same_folder)
    return same_folder or kind == "pod"


def _merge(a: _Group, b: _Group) -> _Group:
    group = _Group(sorted(a.ids + b.ids), folders=a.folders | b.folders, hosts=a.hosts | b.hosts)
    for kind in {*a.values, *b.values}:
        group.values[kind] = a.values[kind] | b.values[kind]
    group.window = _hull(a.window, b.window)
    return group


def _best_id(group: _Group) -> str:
    """kind:value of the strongest kind, smallest value; pids keep the scope that their id has."""
    for kind in ALIAS_KINDS:
        if kind == "pid":
            own = [worker for worker in group.ids if worker.startswith("pid:")]
            if own:
                return min(own)
        elif group.values[kind] and (kind != "service" or len(group.ids) > 1):
            return f"{kind}:{min(group.values[kind])}"
    return min(group.ids)


def merged_rows(rows: pl.DataFrame, mapping: Mapping[str, str]) -> pl.DataFrame:
    """One row per worker: the first known value in a fixed order, the hull of the windows."""
    names = pl.DataFrame(
        {"worker": list(mapping), "canonical": list(mapping.values())},
        schema={"worker": pl.String, "canonical": pl.String},
    )
    basis = pl.col("role_basis").replace_strict(_BASIS_ORDER, default=4, return_dtype=pl.Int32)
    ordered = (
        names.join(rows, on="worker", how="left")
        .with_columns(pl.when(pl.col("role").is_null()).then(9).otherwise(basis).alias("_rank"))
        .sort("canonical", "_rank", "role", "worker", *_WORDS, nulls_last=True)
    )
    return (
        ordered.group_by("canonical", maintain_order=True)
        .agg(
            *(pl.col(c).drop_nulls().first() for c in _WORDS),
            pl.col("role").first(),
            pl.col("role_basis").first(),
            pl.col("start_ns").min(),
            pl.col("end_ns").max(),
        )
        .rename({"canonical": "worker"})
    )
