"""Queries answered ahead: views that many read are computed once, then several queries run at the same time.

They need not wait for all tables: each is answered as soon as those are there that it reads.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import duckdb
import polars as pl

from pdtrace import library
from pdtrace._ahead import Connection, Key, Task, create, frame
from pdtrace._conditions import Conditions, named_in

_WORD = re.compile(r"\w+")


class Queries:
    """The views and findings of a store in memory, of which `waiting` do not exist yet.

    `found`: the rows of what was asked (by key). What fails is left out: who asks for it runs it again and sees the error.
    """

    def __init__(self, waiting: set[str], conditions: Conditions) -> None:
        self._waiting = waiting
        self._conditions = conditions
        self._held: set[str] = set()
        self.found: dict[Key, pl.DataFrame] = {}

    def let_go(self, connection: Connection) -> None:
        """Drop the tables: their views wait to be made again."""
        for name in self._held:
            connection.execute(f"DROP TABLE IF EXISTS {name}")
        self._waiting |= self._held
        self._held.clear()

    def tasks(
        self,
        connection: Connection,
        names: Iterable[str],
        asked: Mapping[Key, str],
        making: Mapping[str, Task[Any]] | None = None,
    ) -> dict[str, Task[Connection]]:
        """What is left to do until these are held and what is asked is found, each as soon as what it reads is there.

        Tables, not temporary ones: every connection to the store sees them. A view whose condition (`when:` of its
        header) does not hold is an empty one. Where others are `making` tables, conditions are pieces of work, too: a
        finding whose condition does not hold is not asked then, and what nobody else reads is not made.
        """
        read = {one: _read_by(one) for one in asked if one not in self.found}
        held = {name for name in names if name not in self._held}
        below = held.union(*read.values(), *map(library.below, held))
        conditions = {
            name: query.when
            for name, query in library.queries().items()
            if query.when and name in below | {name for name, _ in read}
        }
        if making is None:
            self._hold_empty(connection, conditions, held)
        unsure = {n: when for n, when in conditions.items() if self._conditions.told(when) is None}
        gates = {one: unsure.get(one[0]) if _is_finding(one[0]) else None for one in read}
        needed = frozenset().union(*(task.after for task in (making or {}).values()))
        tasks = {text: self._asking(text) for text in unsure.values()}
        for name in library.queries():
            if name in (held | below & self._waiting) - self._held:
                readers = {gates[one] for one in read if name in read[one] | {one[0]}}
                sure = name in needed or None in readers
                waits = frozenset() if sure else frozenset(text for text in readers if text)
                tasks[name] = self._making(name, unsure.get(name), waits, hold=name in held)
        for number, (one, gate) in enumerate(gates.items()):
            tasks[f"{number} {one[0]}"] = Task(
                read[one] | {one[0]} | ({gate} if gate else frozenset()),
                lambda c, one=one, gate=gate: self._answer(c, one, asked[one], gate),  # type: ignore[misc]
            )
        return tasks

    def _hold_empty(
        self, connection: Connection, conditions: Mapping[str, str], held: set[str]
    ) -> None:
        """Hold those of these views that have no rows."""
        for name, when in conditions.items():
            free = may_be_empty(library.queries()[name]) and name in self._waiting | held
            if not self._conditions.hold(when) and free:
                self._hold(connection, name, empty=True)

    def _asking(self, condition: str) -> Task[Connection]:
        """Asks a condition, which is known from then on."""

        def work(cursor: Connection) -> None:
            self._conditions.hold(condition, lambda sql: cursor.execute(sql).fetchall())

        return Task(named_in(condition), work)

    def _making(
        self, name: str, when: str | None, readers: frozenset[str], *, hold: bool
    ) -> Task[Connection]:
        """Makes or holds a view, empty where its condition `when` does not hold.

        `readers`: the conditions of those who read it, unless one reads it in any case.
        """
        query = library.queries()[name]
        told = self._conditions.told

        def work(cursor: Connection) -> None:
            if readers and all(told(text) is False for text in readers):
                return
            empty = when is not None and told(when) is False and may_be_empty(query)
            if hold or empty:
                self._hold(cursor, name, empty=empty)
            else:
                create(cursor, query)
                self._waiting.discard(name)

        return Task(library.below(name) | readers | ({when} if when else set()), work)

    def _answer(self, cursor: Connection, one: Key, sql: str, when: str | None) -> None:
        if when and not self._conditions.told(when):
            return  # where that is not known, who asks will see why
        query = library.queries().get(one[0])
        if query is not None and one[0] in self._waiting:
            sql = query.called(dict(one[1]))
        with suppress(duckdb.Error):
            self.found[one] = frame(cursor, sql)

    def _hold(self, cursor: Connection, name: str, *, empty: bool = False) -> None:
        """A table of the view's name with its rows."""
        query = library.queries()[name]
        table = name if name in self._waiting else f"_held_{name}"
        rows = query.empty if empty else f"AS {query.body}"
        cursor.execute(f"CREATE OR REPLACE TABLE {table} {rows}")
        if table != name:
            cursor.execute(f"DROP VIEW {name}")
            cursor.execute(f"ALTER TABLE {table} RENAME TO {name}")
        self._waiting.discard(name)
        self._held.add(name)


def may_be_empty(query: library.Query) -> bool:
    """Whether a table without rows can stand in for the query."""
    return query.kind == "views" and not query.params


def _is_finding(name: str) -> bool:
    return name in library.queries() and library.queries()[name].kind == "findings"


def _read_by(one: Key) -> frozenset[str]:
    """The queries and tables that a question reads, also through others; it may be a statement of its own."""
    if one[0] in library.queries():
        return library.below(one[0])
    named = frozenset(_WORD.findall(one[0])) & (library.queries().keys() | library.tables().keys())
    return named.union(*map(library.below, named))
