"""Every picture can be drawn of whatever rows its query may give, and says one sentence."""

from __future__ import annotations

import json
from typing import Any

import orjson
import polars as pl
import pytest

from pdtrace import library, pictures
from pdtrace.errors import UnknownQuery
from pdtrace.store import Store

NAMES = list(pictures.views())
NASTY = "</script><script>alert(1)</script>"


@pytest.fixture(scope="module")
def empty() -> Store:
    store = Store()
    store.install()
    return store


def filled(
    schema: pl.Schema, number: float | None, text: str | None, height: int = 1
) -> pl.DataFrame:
    """Rows of a query with one value in every column of a kind."""

    def value(kind: pl.DataType) -> Any:
        if isinstance(kind, pl.List):
            return None if number is None else [value(kind.inner)]
        if isinstance(kind, pl.Struct):
            return None if number is None else {f.name: value(f.dtype) for f in kind.fields}
        if kind == pl.String:
            return text
        if kind == pl.Boolean:
            return None if number is None else number > 0
        if number is None:
            return None
        most = 2**30 if kind == pl.Int32 else 2**62
        return int(min(max(number, -most), most)) if kind.is_integer() else float(number)

    return pl.DataFrame(
        {name: [value(kind)] * height for name, kind in schema.items()}, schema=schema
    )


@pytest.fixture(params=NAMES)
def view(request: pytest.FixtureRequest) -> pictures.View:
    return pictures.views()[request.param]


def schema_of(view: pictures.View, store: Store) -> pl.Schema:
    return store.query(view.query, **view.parameters).schema


def test_a_view_tells_its_title_its_question_and_its_place(view: pictures.View) -> None:
    assert view.title
    assert view.question.endswith("?")
    assert view.query in {**library.queries(), **library.tables()}
    assert view.order > 0


def test_no_rows_are_no_picture_and_no_error(view: pictures.View, empty: Store) -> None:
    rows = empty.query(view.query, **view.parameters)
    assert "deployment" in rows.columns
    assert view.sentence(rows) is None
    chart = view.chart(rows)
    assert chart is None or pictures.vega_lite(chart)
    drawn = pictures.draw(view, rows)
    assert not drawn.there
    assert drawn.spec is None


@pytest.mark.parametrize(
    ("number", "text", "height"),
    [(1, "decode", 1), (0, "whole", 1), (1e18, "prefill", 3), (-5, NASTY, 2), (None, None, 1), (None, "x", 2)],
    ids=["one row", "zero", "enormous", "negative and nasty", "unknown", "only names"],
)  # fmt: skip
def test_any_rows_give_a_chart_that_is_json(
    view: pictures.View, empty: Store, number: float | None, text: str | None, height: int
) -> None:
    rows = filled(schema_of(view, empty), number, text, height)
    sentence = view.sentence(rows)
    assert sentence is None or sentence.strip()
    chart = view.chart(rows)
    if chart is not None:
        spec = pictures.vega_lite(chart)
        assert json.loads(json.dumps(spec)) == spec
    assert orjson.dumps(pictures.draw(view, rows).to_dict(), default=str)


def test_charts_are_valid_vega_lite(view: pictures.View, empty: Store) -> None:
    chart = view.chart(filled(schema_of(view, empty), 1, "decode"))
    if chart is not None:
        chart.to_dict(validate=True)


def test_views_stand_in_the_order_of_their_questions() -> None:
    orders = [view.order for view in pictures.views().values()]
    assert orders == sorted(orders)


def test_an_unknown_picture_names_those_that_there_are() -> None:
    with pytest.raises(UnknownQuery, match="nothing"):
        pictures.view("nothing")


def test_deployments_are_never_pooled(store: Store) -> None:
    for deployment, decode_ms in (("one", 90), ("two", 10)):
        request = f"r-{deployment}"
        window = {
            "start_ns": 0,
            "end_ns": 100_000_000,
            "first_token_ns": (100 - decode_ms) * 1_000_000,
        }
        store.append("requests", [{"request": request, "deployment": deployment, "mode": "aggregated", "outcome": "completed", **window}])  # fmt: skip
        population = {"deployment": deployment, "mode": "aggregated", "counted": True}
        store.append("phase_sums", [
            {"request": request, **population, "phase": "prefill", "detail": "prefill_exec", "duration_ns": (100 - decode_ms) * 1_000_000,
             "ttft_part_ns": (100 - decode_ms) * 1_000_000, "basis": "measured", "placed_ns": 0, "bound_ns": 0},
            {"request": request, **population, "phase": "decode", "detail": "decode_exec", "duration_ns": decode_ms * 1_000_000,
             "ttft_part_ns": 0, "basis": "measured", "placed_ns": 0, "bound_ns": 0},
        ])  # fmt: skip
    (one,), (two,) = pictures.pictures(store, ["one", "two"], ["where_time_goes"])
    assert "(mean 100 ms) decode holds 90 %, then prefill (10 %)" in str(one.sentence)
    assert "(mean 100 ms) prefill holds 90 %, then decode (10 %)" in str(two.sentence)
    assert "of the time to first token (mean 10.0 ms) prefill holds 100 %" in str(one.sentence)
    assert one.level == "B"


def test_widths_are_filled_in_for_pictures_without_a_page() -> None:
    spec = {"width": "container", "layer": [{"mark": "bar"}]}
    assert pictures.sized(spec, 800) == {"width": 730, "layer": [{"mark": "bar"}]}
    assert pictures.sized({"vconcat": [spec]}, 800)["vconcat"][0]["width"] == 730


def test_a_picture_that_breaks_says_why_and_leaves_the_others_alone(store: Store) -> None:
    store.execute("CREATE OR REPLACE VIEW phase_shares AS SELECT NULL::VARCHAR AS deployment")
    made = pictures.pictures(store, [None])[0]
    broken = next(picture for picture in made if picture.name == "where_time_goes")
    assert not broken.there
    assert "report it" in broken.problem
    assert [p.problem for p in made if p is not broken] == [""] * (len(made) - 1)


@pytest.mark.parametrize("query", ["ttft_by_prompt", "no_query_of_ours"])
def test_rows_that_no_query_orders_come_in_one_order(query: str) -> None:
    rows = pl.DataFrame(
        {"deployment": ["b", "a", "a"], "value": [1.0, 3.0, None], "gaps": [[1], [2], [3]]}
    )
    turned = pictures.settled(query, rows.reverse())
    assert turned.equals(pictures.settled(query, rows))
    assert turned["value"].to_list() == [None, 3.0, 1.0]


def test_sums_of_another_order_are_the_same_number() -> None:
    one, other = (pl.DataFrame({"sum": [value]}) for value in (0.1 + 0.2, 0.3))
    assert pictures.settled("belief_points", one).equals(pictures.settled("belief_points", other))


def test_rows_that_a_query_orders_stay_as_they_are() -> None:
    rows = pl.DataFrame({"deployment": ["b", "a"], "place": [2, 1]})
    assert pictures.settled("belief_points", rows).equals(rows)
