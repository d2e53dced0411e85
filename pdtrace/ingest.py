"""Paths in, tables out: read, deduplicate, resolve workers, interpret, join, partition.

The rooms behind reading are loaded when it is over: a command loads them meanwhile (STAGES, in their order).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from pdtrace import library
from pdtrace._ahead import Task
from pdtrace.copies import KEYED, forget_copies, keep_one_row_a_key, note_copies
from pdtrace.counting import count_records, nothing_kept
from pdtrace.errors import PROBLEM, REPORT, PdtraceError, UnknownFormat, in_one_line, reraise_stop
from pdtrace.inputs import Input, expand
from pdtrace.reading import Progress, nothing_recognised, read_all, write_sources
from pdtrace.records import dataclass
from pdtrace.store import Store

if TYPE_CHECKING:
    from pdtrace import identity
    from pdtrace.methods import Method
    from pdtrace.store import Questions

    Ahead = Callable[[Store], Questions]  # what will be asked

STAGES = (
    "pdtrace.library:queries", "pdtrace.interpret", "pdtrace.zones", "pdtrace.twins", "pdtrace.identity", "pdtrace.clocks", "pdtrace.phases",
    "pdtrace.methods",
)  # fmt: skip
WHOLE_LOG = "http_calls_whole_log"  # key of the fact that calls were counted beyond --since/--until
FINGERPRINT = "_schema"  # key of the fact that says which tables and queries a file was made with
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Options:
    """What the user may ask of an import."""

    keep_content: bool = False
    since_ns: int | None = None
    until_ns: int | None = None
    progress: Progress | None = None
    recognised: Callable[[], object] | None = None  # called when it is known what the first file is
    hashed: bool = (
        True  # whether a file that is read alone gets its sha256, which nobody may look at
    )
    # What will be asked: it is answered beside the last stages as far as it can be.
    ahead: Ahead | None = None


def ingest(paths: list[str], store: Store, options: Options | None = None) -> None:
    """Fill the store from files, folders, globs, archives or '-'.

    Raises UnreadableInput for a path that does not exist and UnknownFormat when nothing was recognised.
    """
    take(expand(paths), store, options)


def take(inputs: list[Input], store: Store, options: Options | None = None) -> None:
    """Fill the store from inputs. Raises UnknownFormat when nothing was recognised."""
    options = options or Options()
    with store.bulk_load():
        accounts = read_all(
            inputs, store, keep_content=options.keep_content, progress=options.progress,
            recognised=options.recognised, hashed=options.hashed,
        )  # fmt: skip
    if not any(account.collectors for account in accounts):
        raise UnknownFormat(*nothing_recognised(accounts))
    from pdtrace import identity, interpret, workers, zones
    from pdtrace._worker_rotation import join_pieces

    laying_out = interpret.begin(store)
    write_sources(store, accounts)
    forget_copies(store, accounts)
    note_copies(accounts, interpret.deduplicate(store))
    keep_one_row_a_key(store, accounts, ["resources"])
    zones.align(store)
    interpret.name_resources(store)
    join_pieces(store)
    workers.resolve(store)
    note_copies(accounts, interpret.run(store, deduplicated=True, begun=laying_out))
    workers.resolve(store)
    joining = identity.begin(store)
    keep_one_row_a_key(store, accounts, KEYED)
    if not count_records(store, accounts):
        raise UnknownFormat(*nothing_kept(accounts))
    _derive(store, options, joining)


def _derive(store: Store, options: Options, joining: identity.Begun | None) -> None:
    """The stages after reading: deployments, identity, clocks, requests, phases, methods, views."""
    from pdtrace import clocks, identity, twins

    twins.unite(store)
    identity.link(store, joining)
    _attempt(store, "aligning clocks", clocks.align)
    identity.build_requests(store)
    cut_to_window(store, options)


def cut_to_window(store: Store, options: Options) -> None:
    """Leave what --since and --until let through, and make what is computed from that."""
    from pdtrace import methods, phases

    _cut(store, options)
    store.install()
    cutting = Task[Store](
        frozenset(),
        lambda _: _attempt(store, "cutting requests into phases", phases.partition),
    )
    making = _by_table(phases.MAKES, cutting)
    for method in methods.METHODS.values():
        making |= _by_table(method.makes, Task(_read_by(method), partial(_run, method=method)))
    store.make(making, options.ahead and options.ahead(store))


def _by_table(tables: Iterable[str], task: Task[Store]) -> dict[str, Task[Store]]:
    """A task by the names of all tables that it makes."""
    first, *others = sorted(tables)
    done = Task[Store](frozenset({first}), lambda _: None)
    return {first: task, **dict.fromkeys(others, done)}


def _read_by(method: Method) -> frozenset[str]:
    """Every table and view that a method reads, also through others."""
    return frozenset(method.needs).union(*map(library.below, method.needs))


def _run(store: Store, method: Method) -> None:
    from pdtrace import methods

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
    # Calls that went well are counted only, without a time each: these counts stay those of the whole log, and say so.
    store.execute(
        f"""INSERT INTO facts (source, worker, key, value)
            SELECT DISTINCT source, worker, '{WHOLE_LOG}', 'true' FROM facts WHERE key = 'http_calls'"""
    )
    # A deployment's stretch of time is that of what is left of it.
    store.execute(
        """UPDATE deployments SET start_ns = r.first, end_ns = r.last
           FROM (SELECT deployment, min(start_ns) AS first, max(coalesce(end_ns, start_ns)) AS last FROM requests GROUP BY deployment) r
           WHERE r.deployment = deployments.deployment AND r.first IS NOT NULL"""
    )
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
