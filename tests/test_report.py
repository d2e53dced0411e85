"""The report is one file that needs no network, escapes what came from outside and draws every picture."""

from __future__ import annotations

import base64
import json
import re
import zlib
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from door import pdtrace

from pdtrace import _report_parts, pictures, report
from pdtrace.api import Trace
from pdtrace.errors import PdtraceError

NASTY = (
    "<script>alert(1)</script>",
    "</script>",
    '"><img src=x onerror=alert(1)>',
    "<!--",
    "a" * 50,
)


@pytest.fixture(scope="module")
def nasty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of two tables; the names in one want to be code."""
    folder = tmp_path_factory.mktemp("nasty")
    rows = [
        {"request": name + str(n), "input_tokens": 100 * (n + 1), "output_tokens": 20, "TTFT": 0.1 + n / 10,
         "total_latency": 2.0 + n, "note": name, "start_time": 1_700_000_000 + n}
        for n, name in enumerate(NASTY * 2)
    ]  # fmt: skip
    (folder / "in").mkdir()
    pl.DataFrame(rows).write_csv(folder / "in" / "requests.csv")
    plain = [{"request": f"plain-{n}", "TTFT": 0.9 + n / 100, "input_tokens": 10 + n, "output_tokens": 5,
              "total_latency": 2.0} for n in range(8)]  # fmt: skip
    pl.DataFrame(plain).write_csv(folder / "in" / "plain.csv")
    target = folder / "report.html"
    made = pdtrace("report", str(folder / "in"), "-o", str(target))
    assert made.returncode == 0, made.stderr
    return target


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of the dump that ships with pdtrace."""
    target = tmp_path_factory.mktemp("demo") / "report.html"
    made = pdtrace("demo", "--format", "json", "--report", str(target))
    assert made.returncode == 0, made.stderr
    assert json.loads(made.stdout)["deployments"]
    return target


def payloads(page: str) -> dict[str, Any]:
    """What the figures hold, by name."""
    found = re.findall(
        r'<figure class="picture" id="(.+?)">.*?<script type="text/plain" class="data">(.+?)</script>',
        page,
        flags=re.DOTALL,
    )
    return {name: json.loads(zlib.decompress(base64.b64decode(data))) for name, data in found}


def test_nothing_that_came_from_outside_is_code(nasty: Path) -> None:
    page = nasty.read_text("utf-8")
    outside = re.sub(r"<script\b.*?</script>", "", page, flags=re.DOTALL)
    assert "alert(1)" in outside
    assert "<script" not in outside
    assert "<img" not in outside
    assert page.count("<script") == page.count("</script>")
    assert page.count("<!--") == 0


def test_the_page_asks_for_nothing(demo: Path) -> None:
    page = demo.read_text("utf-8")
    rule = re.search(r'Content-Security-Policy" content="(.+?)"', page)
    assert rule
    assert "default-src 'none'" in rule[1].replace("&#x27;", "'")
    assert "connect-src 'none'" in rule[1].replace("&#x27;", "'")
    assert "'unsafe-inline'" not in rule[1].split("script-src")[1].split(";")[0]
    markup = re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(r'\b(src|href)="', markup)
    assert "url(" not in markup
    assert len(page) < 3_000_000


def test_the_numbers_of_the_page_are_those_of_the_queries(demo: Path) -> None:
    found = payloads(demo.read_text("utf-8"))
    with Trace.read([Path(report.__file__).parent / "demo"]) as trace:
        (deployment,) = trace.store.query("deployments")["deployment"]
        for picture in pictures.pictures(trace.store, [deployment])[0]:
            if picture.there:
                rows = found[f"d0-{picture.name}"]["rows"]
                assert rows["length"] == picture.rows.height
                assert list(rows["columns"]) == picture.rows.columns
                for name, kind in picture.rows.schema.items():
                    if kind.is_float():
                        shown = pl.Series(rows["columns"][name], dtype=pl.Float64)
                        values = picture.rows[name].fill_nan(None)
                        assert shown.null_count() == values.null_count()
                        assert _sorted(shown) == pytest.approx(_sorted(values), rel=1e-9)


def _sorted(column: pl.Series) -> list[float]:
    """Queries promise no order."""
    return column.drop_nulls().sort().to_list()


def test_large_integers_keep_their_digits_and_equal_columns_are_written_once() -> None:
    rows = pl.DataFrame(
        {"deployment": ["d"], "t_ns": [1_700_000_000_123_456_789], "x": [0.1 + 0.2]}
    )
    spec = {
        "datasets": {"a": [{"x": 0.1 + 0.2, "y": float("nan")}]},
        "$schema": "v6",
        "mark": "bar",
    }
    made = pictures.Picture("p", "P", "Why?", "So.", "B", "q", "SELECT 1", rows, spec)
    found = _report_parts.payload(made)
    assert found["rows"]["columns"]["t_ns"] == ["1700000000123456789"]
    assert found["datasets"]["a"] == {"length": 1, "columns": {"x": {"same": "x"}, "y": [None]}}
    assert found["spec"] == {"mark": "bar"}


def test_code_in_a_script_element_cannot_end_it() -> None:
    assert report.safe('"</script><!--"') == '"\\u003c/script>\\u003c!--"'
    assert json.loads(report.safe('"</ScRiPt>"')) == "</ScRiPt>"


def test_text_shortens_long_ids_and_keeps_them_to_copy() -> None:
    html = _report_parts.text("request " + "a" * 60 + " took 49.4 s")
    assert f'data-full="{"a" * 60}"' in html
    assert "49.4\u00a0s" in html


def test_only_a_report_is_replaced_and_only_when_told(tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    report.check_target(target, force=False)
    target.write_text("mine")
    with pytest.raises(PdtraceError, match="exists already"):
        report.check_target(target, force=False)
    with pytest.raises(PdtraceError, match="no report"):
        report.check_target(target, force=True)
    target.write_text(f'<!doctype html><html><head>{report.MARK} 1">')
    report.check_target(target, force=True)
    with pytest.raises(PdtraceError, match="folder"):
        report.check_target(tmp_path, force=True)
    with pytest.raises(PdtraceError, match="no such folder"):
        report.check_target(tmp_path / "none" / "x.html", force=True)


# --- in a browser


class Visit:
    """A page that was opened, with what it said and asked for meanwhile."""

    def __init__(self, browser: Any, path: Path, **options: Any) -> None:
        self.page = browser.new_page(**options)
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.said.append(dialog.message), dialog.dismiss()))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(path.as_uri())
        self.page.wait_for_function(
            "document.documentElement.dataset.drawn !== undefined", timeout=90_000
        )


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_every_picture_is_drawn_without_errors_and_without_the_network(
    browser: Any, demo: Path, width: int, scheme: str
) -> None:
    visit = Visit(browser, demo, viewport={"width": width, "height": 900}, color_scheme=scheme)
    assert visit.said == []
    assert visit.asked == [demo.as_uri()]
    charts = visit.page.query_selector_all("figure.picture .chart")
    assert charts
    assert all(chart.query_selector("svg") for chart in charts)
    assert all(chart.get_attribute("aria-label") for chart in charts)
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= width


def test_times_turn_to_utc_and_colours_to_dark_when_asked(browser: Any, demo: Path) -> None:
    visit = Visit(browser, demo, timezone_id="Asia/Seoul", color_scheme="light")
    page = visit.page
    first = page.text_content("time")
    page.click("#zone")
    assert page.text_content("time") == page.get_attribute("time", "datetime")[:19].replace(
        "T", " "
    )
    assert page.text_content("time") != first
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.click("#theme")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
    assert visit.said == []


def test_rows_are_shown_and_saved_from_the_page(browser: Any, demo: Path) -> None:
    page = Visit(browser, demo).page
    figure = "figure#d0-where_time_goes"
    page.click(f"{figure} details.query summary")
    page.wait_for_selector(f"{figure} .rows table")
    with page.expect_download() as saved:
        page.click(f"{figure} button.csv")
    lines = Path(saved.value.path()).read_text("utf-8").splitlines()
    rows = payloads(demo.read_text("utf-8"))["d0-where_time_goes"]["rows"]
    assert lines[0].split(",") == list(rows["columns"])
    assert len(lines) == rows["length"] + 1


def test_deployments_are_chosen_one_at_a_time(browser: Any, nasty: Path) -> None:
    visit = Visit(browser, nasty)
    page = visit.page
    assert page.locator("section.deployment:visible").count() == 1
    first = page.text_content("section.deployment:not([hidden]) .verdict")
    page.select_option("#deployment", "d1")
    page.wait_for_selector("section#d1 figure.picture svg")
    assert page.locator("section.deployment:visible").count() == 1
    assert page.text_content("section.deployment:not([hidden]) .verdict") != first
    assert page.url.endswith("#d1")
    assert visit.said == []


def test_on_paper_findings_are_open_and_colours_light(browser: Any, demo: Path) -> None:
    page = Visit(browser, demo, color_scheme="dark").page
    page.emulate_media(media="print")
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert page.locator("details.finding-more:not([open])").count() == 0
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not page.is_visible("#theme")


def test_names_that_want_to_be_code_stay_text(browser: Any, nasty: Path) -> None:
    visit = Visit(browser, nasty)
    for summary in visit.page.query_selector_all(
        "section.deployment:not([hidden]) details.query summary"
    ):
        summary.click()
    visit.page.wait_for_timeout(200)
    assert visit.said == []
    assert visit.asked == [nasty.as_uri()]
    assert NASTY[0] in visit.page.text_content("main")
