"""A subset of the requests as a store of its own: every query runs on it unchanged.

    with Selections(store) as selections, selections.open(Filter(workers=("instance:p0",))) as subset:
        subset.query("phase_summary")

The data stay where they are. A selection is an attached database in memory whose tables are views of the data; the
library's views are made on top when they are first named. Each `open` has a connection of its own, so that threads do
not wait for each other and one can be stopped alone.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import field
from typing import Self

import duckdb

from pdtrace import _selection_tables as cuts
from pdtrace import goodput, library, slo
from pdtrace._aside import Aside
from pdtrace._conditions import Conditions
from pdtrace._selection_filter import Band, Filter, State, left_of, of_deployment
from pdtrace._tables import FEW_BYTES
from pdtrace.errors import PdtraceError
from pdtrace.records import dataclass
from pdtrace.store import Asked, Store

__all__ = ["Band", "Filter", "Selection", "Selections", "State", "Stop", "Superseded"]

KEPT = 12  # selections that stay ready; the one used longest ago goes first
_WORD = re.compile(r"\w+")


class Superseded(PdtraceError):
    """The answer is not wanted any more."""


class Stop:
    """The wish to break off: what runs ends with Superseded, or with DuckDB's InterruptException."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cursors: list[duckdb.DuckDBPyConnection] = []
        self.asked = False

    def now(self) -> None:
        """Break off everything that was opened with this; for another thread."""
        with self._lock:
            self.asked = True
            for cursor in self._cursors:
                with suppress(duckdb.Error):
                    cursor.interrupt()

    def check(self) -> None:
        """Raise Superseded when it was asked for."""
        if self.asked:
            raise Superseded("the answer is not wanted any more")

    def watch(self, cursor: duckdb.DuckDBPyConnection) -> None:
        """Interrupt this connection too."""
        with self._lock:
            self._cursors.append(cursor)

    def forget(self, cursor: duckdb.DuckDBPyConnection) -> None:
        """Close a connection."""
        with self._lock:
            self._cursors.remove(cursor)
        cursor.close()


@dataclass
class _Shared:
    """What the connections to one selection share."""

    alias: str
    filter: Filter
    lock: threading.RLock = field(default_factory=threading.RLock)
    ready: bool = False
    judged: bool = False  # the fluidity of streams is filled in
    users: int = 0
    waiting: set[str] = field(default_factory=lambda: set(library.queries()))


class Selections:
    """The selections of one store, ready for several threads."""

    def __init__(self, store: Store) -> None:
        self._lock = threading.RLock()
        self._all: OrderedDict[Filter, _Shared] = OrderedDict()
        self._made = 0
        self._own: duckdb.DuckDBPyConnection | None = None
        if store.read_only and store.path is not None:
            # Nothing can be attached beside a file that was opened for reading only: it is attached here.
            self._own = duckdb.connect(":memory:")
            place = str(store.path).replace("'", "''")
            self._own.execute(f"ATTACH '{place}' AS run (READ_ONLY)")
            self.connection, self.base = self._own, "run.main"
        else:
            store.settle_aside()
            self.connection = store.connection
            self.base = f'"{store.scalar("SELECT current_database()")}".main'

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of all selections."""
        with self._lock:
            for shared in self._all.values():
                self._detach(shared)
            self._all.clear()
            if self._own is not None:
                self._own.close()
                self._own = None

    @contextmanager
    def open(self, wanted: Filter | None = None, stop: Stop | None = None) -> Iterator[Selection]:
        """The selection with a connection of its own, for one thread; `stop` breaks it off."""
        shared = self._take(wanted or Filter())
        try:
            selection = Selection(self, shared, stop or Stop())
            try:
                selection.begin()
                yield selection
            finally:
                selection.close()
        finally:
            with self._lock:
                shared.users -= 1

    def _take(self, wanted: Filter) -> _Shared:
        with self._lock:
            shared = self._all.get(wanted)
            if shared is None:
                self._made += 1
                shared = self._all[wanted] = _Shared(f"selection_{self._made}", wanted)
                self.connection.execute(f"ATTACH ':memory:' AS {shared.alias}")
            shared.users += 1
            self._all.move_to_end(wanted)
            self._forget()
            return shared

    def _forget(self) -> None:
        """Drop what was used longest ago; what others are taken from stays."""
        idle = [wanted for wanted, s in self._all.items() if not s.users and wanted.chooses]
        for wanted in idle[: max(0, len(self._all) - KEPT)]:
            self._detach(self._all.pop(wanted))

    def _detach(self, shared: _Shared) -> None:
        with suppress(duckdb.Error):
            self.connection.execute(f"DETACH {shared.alias}")

    def cursor(self, alias: str) -> duckdb.DuckDBPyConnection:
        """A new connection in which plain names mean those of this selection."""
        with self._lock:
            cursor = self.connection.cursor()
        cursor.execute(f"USE {alias}")
        return cursor


class Selection(Store):
    """One connection to a selection: a store in memory in every respect but where its rows are."""

    def __init__(self, selections: Selections, shared: _Shared, stop: Stop) -> None:
        # Not Store's own: the tables are made by begin(), and what waits to be created is shared.
        self.path = None
        self.read_only = self._lasting = self._loading = False
        self._taken_bytes = FEW_BYTES  # planned as the store that it chooses from
        self._appended = 0
        self._checked = set()
        self._answers = {}
        self._begun = self._conditions = None
        self._waiting = set()
        self._aside = Aside()
        self._selections, self._shared, self._stop = selections, shared, stop
        self._cursors: list[duckdb.DuckDBPyConnection] = []
        self.filter = shared.filter
        self.connection = self.cursor()

    @property
    def place(self) -> str:
        """The name under which other connections find its tables and views."""
        return f"{self._shared.alias}.main"

    def _another(self) -> duckdb.DuckDBPyConnection:
        """Another connection to the same selection."""
        cursor = self._selections.cursor(self._shared.alias)
        self._cursors.append(cursor)
        self._stop.watch(cursor)
        return cursor

    def close(self) -> None:
        """Close its connections; the selection stays."""
        while self._cursors:
            self._stop.forget(self._cursors.pop())

    def counts(self) -> dict[str, int]:
        """Requests of its deployment (all), those chosen, and those of which it cannot be told."""
        if not self.filter.chooses:
            n = self.count("requests")
            return {"all": n, "chosen": n, "unknown": 0}
        sql = "SELECT count(*), count(*) FILTER (fits), count(*) FILTER (fits IS NULL) FROM _asked"
        return dict(zip(("all", "chosen", "unknown"), self.rows(sql)[0], strict=True))

    def prepare(self, statement: str) -> None:
        """Make what a statement names, unless the answer is not wanted any more."""
        self._stop.check()
        self._make(_WORD.findall(statement.lower()))

    def give(self, table: str, batch: object) -> None:
        """Fill what is computed from the limits; they themselves are there from the start."""
        if table != "slo_classes" and len(batch):  # type: ignore[arg-type]
            with self._shared.lock:
                self.replace(table, batch)
                self._shared.judged = True

    @contextmanager
    def computed_once(
        self,
        *names: str,
        ask: Iterable[Asked] = (),
        conditions: Conditions | None = None,
        statements: Iterable[str] = (),
    ) -> Iterator[None]:
        """What many queries read is held anyway."""
        self._make(names)
        with super().computed_once(ask=ask, conditions=conditions, statements=statements):
            yield

    def _make(self, names: Iterable[str]) -> None:
        """Create these views and what they read, unless somebody has; those that many read as tables."""
        shared = self._shared
        wanted = self._needed(names)
        if wanted & shared.waiting:
            with shared.lock:
                for name, query in library.queries().items():
                    if name in wanted & shared.waiting:
                        self._make_one(query)
                        shared.waiting.discard(name)
        if "slo_fluidity" in wanted and shared.filter.limits:
            with shared.lock:
                if not shared.judged:
                    shared.judged = True
                    goodput.judge_streams(self)

    def _needed(self, names: Iterable[str]) -> set[str]:
        """What these read here; what is taken from the whole run is asked for there."""
        found: set[str] = set()
        todo = list(names)
        while todo:
            name = todo.pop()
            if name not in found:
                found.add(name)
                if name in library.queries() and self._parent(name) is None:
                    todo.extend(library.queries()[name].needs)
        return found

    def _parent(self, name: str) -> Filter | None:
        """The selection that a view is taken from; None: it is computed here."""
        if name not in cuts.IN_CONTEXT:
            return None
        whole = Filter(limits=self.filter.limits if name == "slo_requests" else None)
        return None if whole == self.filter else whole

    def _make_one(self, query: library.Query) -> None:
        self._stop.check()
        try:
            if (parent := self._parent(query.name)) is not None:
                self._copy(query.name, parent)
            elif query.name in cuts.HELD:
                self.connection.execute(f"CREATE OR REPLACE TABLE {query.name} AS {query.body}")
            else:
                self.connection.execute(query.ddl)
        except duckdb.InterruptException:
            raise
        except duckdb.Error as error:
            raise PdtraceError(f"schemas/{query.kind}/{query.name}.sql: {error}") from error

    def _copy(self, name: str, parent: Filter) -> None:
        """The rows of the chosen requests of a view of the whole run."""
        with self._selections.open(parent, self._stop) as whole:
            whole._make([name])
            cut = self._left(cuts.Cut("request")) if self.filter.chooses else ""
            kind = "TABLE" if cut and name in cuts.HELD else "VIEW"
            self.connection.execute(
                f"CREATE OR REPLACE {kind} {name} AS SELECT t.* FROM {whole.place}.{name} AS t{cut}"
            )

    def begin(self) -> None:
        """Choose the requests and cut the tables, unless somebody has."""
        shared = self._shared
        with shared.lock:
            if shared.ready:
                return
            if shared.filter.chooses:
                self._choose()
            for table in library.tables():
                self._stop.check()
                self.connection.execute(self._table(table))
            if shared.filter.limits:
                self.replace("slo_classes", slo.rows(shared.filter.limits))
            shared.ready = True

    def _choose(self) -> None:
        """The chosen requests, their legs, and what steps and samples are cut to."""
        wanted, base, run = self.filter, self._selections.base, self.connection
        conditions, given = wanted.conditions()
        # Names that no parameter of a macro has: DuckDB takes those for columns in views below it too.
        run.execute(
            "CREATE OR REPLACE TABLE _wanted AS"
            " SELECT ?::VARCHAR AS wanted_deployment, ?::BIGINT AS wanted_from, ?::BIGINT AS wanted_until",
            [wanted.deployment, wanted.from_ns, wanted.until_ns],
        )
        own = "" if wanted.deployment is None else f" WHERE {of_deployment('r')}"
        run.execute(
            f"CREATE OR REPLACE TABLE _asked AS SELECT r.request, {conditions} AS fits"
            f" FROM {base}.requests AS r{self._judged()}{own}",
            given,
        )
        run.execute("CREATE OR REPLACE TABLE _chosen AS SELECT request FROM _asked WHERE fits")
        run.execute(
            f"CREATE OR REPLACE TABLE _legs AS SELECT leg FROM {base}.legs SEMI JOIN _chosen USING (request)"
        )
        named = [worker for worker in wanted.workers if worker is not None]
        mine = "true" if wanted.deployment is None else of_deployment("w")
        run.execute(
            f"CREATE OR REPLACE TABLE _place AS SELECT worker FROM {base}.workers AS w"
            f" WHERE {mine} AND (? OR list_contains(?::VARCHAR[], worker))",
            [not wanted.workers, named],
        )

    def _judged(self) -> str:
        """Who met the limits, joined, where requests are chosen by that."""
        if not self.filter.states:
            return ""
        with self._selections.open(Filter(limits=self.filter.limits), self._stop) as whole:
            whole._make(["slo_requests"])
            return f" LEFT JOIN {whole.place}.slo_requests AS s ON s.request = r.request"

    def _table(self, name: str) -> str:
        """The statement that makes a table of this selection."""
        if name in cuts.GIVEN:
            return library.tables()[name].ddl
        view = (
            f"CREATE OR REPLACE VIEW {name} AS SELECT t.* FROM {self._selections.base}.{name} AS t"
        )
        cut = cuts.cut_of(name)
        return view if cut is None or not self.filter.chooses else view + self._left(cut)

    def _left(self, cut: cuts.Cut) -> str:
        return left_of(self.filter, cut, self._selections.base)
