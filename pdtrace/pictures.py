"""The pictures of a deployment: lists dashboards/, asks each one's query, puts chart and sentence together."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from functools import cache
from importlib import import_module
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Protocol

import altair as alt
import polars as pl

from pdtrace import library
from pdtrace.errors import REPORT, UnknownQuery, in_one_line, reraise_stop
from pdtrace.records import dataclass

if TYPE_CHECKING:
    from types import ModuleType

    from pdtrace.store import Store

_log = logging.getLogger(__name__)
_ALTAIR = threading.Lock()  # its settings are the process's; the live page draws in several threads
# Views that many pictures read, each after what it reads.
_READ_BY_MANY = (
    "request_values",
    "value_quartiles",
    "phase_by_request",
    "gap_lengths",
    "interference_by_worker",
)


class _Draws(Protocol):
    def __call__(self, rows: pl.DataFrame) -> Any: ...


@dataclass(frozen=True)
class View:
    """A module of dashboards/: what it asks and how it draws."""

    name: str
    title: str
    question: str
    query: str
    order: int
    chart: _Draws
    sentence: _Draws
    level: str | None = None
    parameters: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Picture:
    """What a view shows of one deployment. Without a sentence there are no data for it."""

    name: str
    title: str
    question: str
    sentence: str | None
    level: str | None  # evidence level: the weakest among the rows
    query: str  # name of the query, with its parameters
    sql: str  # what it computes
    rows: pl.DataFrame
    spec: Mapping[str, Any] | None  # Vega-Lite without config; None where words say it all
    problem: str = ""  # why it could not be made

    @property
    def there(self) -> bool:
        """Whether there is something to show."""
        return self.sentence is not None

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values, rows column by column."""
        return {
            "name": self.name, "title": self.title, "question": self.question, "sentence": self.sentence,
            "level": self.level, "query": self.query, "sql": self.sql,
            "rows": self.rows.to_dict(as_series=False), "spec": self.spec, "problem": self.problem,
        }  # fmt: skip


@cache
def views() -> dict[str, View]:
    """All views by name, in the order of the questions."""
    names = sorted(
        entry.name.removesuffix(".py")
        for entry in files("pdtrace.dashboards").iterdir()
        if entry.name.endswith(".py") and not entry.name.startswith("_")
    )
    found = [_view(name, import_module(f"pdtrace.dashboards.{name}")) for name in names]
    return {view.name: view for view in sorted(found, key=lambda view: (view.order, view.name))}


def _view(name: str, module: ModuleType) -> View:
    title, _, question = (module.__doc__ or "").strip().splitlines()[0].partition(": ")
    return View(
        name=name,
        title=title,
        question=question[:1].upper() + question[1:],
        query=module.QUERY,
        order=module.ORDER,
        chart=module.chart,
        sentence=module.sentence,
        level=getattr(module, "LEVEL", None),
        parameters=getattr(module, "PARAMETERS", {}),
    )


def view(name: str) -> View:
    """A view by name. Raises UnknownQuery."""
    if name not in views():
        raise UnknownQuery(f"no picture named {name}", f"there are: {', '.join(views())}")
    return views()[name]


def pictures(
    store: Store, deployments: Sequence[str | None], names: Iterable[str] | None = None
) -> list[list[Picture]]:
    """The pictures of each deployment, in the order of the questions; those without data among them.

    A query is asked once, whatever the number of deployments.
    """
    chosen = [view(name) for name in (views() if names is None else names)]
    read: set[str] = set().union(*(library.below(one.query) for one in chosen))
    with store.computed_once(*(name for name in _READ_BY_MANY if name in read)):
        made = [_of_all(store, one, deployments) for one in chosen]
    return [list(of_one) for of_one in zip(*made, strict=True)]


def picture(store: Store, name: str, deployment: str | None, **parameters: object) -> Picture:
    """One picture; parameters go to its query."""
    return _of_all(store, view(name), [deployment], parameters)[0]


def _of_all(
    store: Store, view: View, deployments: Sequence[str | None], parameters: Mapping[str, object] | None = None
) -> list[Picture]:  # fmt: skip
    """A view of each deployment. One that breaks down says why and leaves the others alone."""
    asked = {**view.parameters, **(parameters or {})}
    try:
        rows = settled(view.query, store.query(view.query, **asked))
    except BaseException as error:
        reraise_stop(error)
        return [_broken(view, asked, error) for _ in deployments]
    made = []
    for deployment in deployments:
        mine = rows.filter(pl.col("deployment").eq_missing(pl.lit(deployment, dtype=pl.String)))
        try:
            made.append(draw(view, mine, asked))
        except BaseException as error:
            reraise_stop(error)
            made.append(_broken(view, asked, error))
    return made


def settled(query: str, rows: pl.DataFrame) -> pl.DataFrame:
    """The rows as they are in every run: DuckDB's threads hand them over as they come, and sums differ behind 12 digits.

    The order that a query gives its rows stays.
    """
    rows = rows.with_columns(pl.selectors.float().round_sig_figs(12))
    known = library.queries().get(query)
    if known and re.search(r"^ORDER BY", known.body, re.MULTILINE):
        return rows
    return rows.sort([name for name, kind in rows.schema.items() if not kind.is_nested()])


def _broken(view: View, parameters: Mapping[str, object], error: BaseException) -> Picture:
    _log.debug("picture %s failed", view.name, exc_info=error)
    problem = f"{in_one_line(error)}; {REPORT}"
    return _picture(view, pl.DataFrame(), None, None, parameters, problem)


def draw(view: View, rows: pl.DataFrame, parameters: Mapping[str, object] | None = None) -> Picture:
    """A view of these rows."""
    sentence = view.sentence(rows)
    spec = None
    if sentence is not None and (chart := view.chart(rows)) is not None:
        spec = vega_lite(chart)
    return _picture(view, rows, sentence, spec, parameters or {}, "")


def _picture(
    view: View, rows: pl.DataFrame, sentence: str | None, spec: Mapping[str, Any] | None,
    parameters: Mapping[str, object], problem: str,
) -> Picture:  # fmt: skip
    query = library.queries().get(view.query)
    given = "".join(f" --param {key}={value}" for key, value in parameters.items())
    return Picture(
        name=view.name, title=view.title, question=view.question, sentence=sentence,
        level=_level(rows) or view.level, query=view.query + given,
        sql=query.body if query else f"FROM {view.query}", rows=rows, spec=spec, problem=problem,
    )  # fmt: skip


def _level(rows: pl.DataFrame) -> str | None:
    """The weakest evidence level among the rows."""
    if "level" not in rows.columns:
        return None
    levels = rows["level"].drop_nulls()
    return None if levels.is_empty() else str(levels.max())


def vega_lite(chart: Any) -> dict[str, Any]:
    """A chart as Vega-Lite, its data inline and its looks left to whoever shows it."""
    with _ALTAIR, alt.data_transformers.enable("default", max_rows=None), alt.theme.enable("none"):
        spec: dict[str, Any] = chart.to_dict(validate=False)
    spec.pop("config", None)
    return spec


def sized(spec: Mapping[str, Any], width: int, side: int = 70) -> dict[str, Any]:
    """A spec whose charts are as wide as there is room: `width` less what stands beside the axes."""
    return {
        key: width - side if key == "width" and value == "container"
        else [sized(part, width, side) if isinstance(part, Mapping) else part for part in value] if key in _PARTS
        else sized(value, width, side) if key == "spec"
        else value
        for key, value in spec.items()
    }  # fmt: skip


_PARTS = ("layer", "vconcat", "concat")


def config(mode: str = "light") -> dict[str, Any]:
    """The looks of all pictures: light, dark, or in the colour of a page's text."""
    theme = import_module("pdtrace.dashboards._theme")
    settings: dict[str, Any] = theme.config(mode)
    return settings
