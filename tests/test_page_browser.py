"""The live page in a real browser: drawn without errors or network, filtered by mouse and keyboard, shared as a link."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from importlib.resources import as_file, files
from typing import Any

import altair as alt
import polars as pl
import pytest
import uvicorn
from test_page import NASTY, fill

from pdtrace import pictures
from pdtrace._live_answers import Run
from pdtrace.api import Trace
from pdtrace.page import Page
from pdtrace.report import Vega, vega
from pdtrace.selection import Filter
from pdtrace.store import Store

READY = 'html[data-state="ready"]'


def points(rows: pl.DataFrame) -> Any:
    """TTFT of each request."""
    return (
        alt.Chart(rows)
        .mark_point(size=400, filled=True)
        .encode(x="start_ns:Q", y="ttft_ms:Q")
        .properties(width="container")
    )


def count(rows: pl.DataFrame) -> str | None:
    return f"{rows.height} requests are drawn" if rows.height else None


STAND_IN = pictures.View(
    "stand_in", "Requests", "Who waited?", "request_values", 5, points, count, "B"
)


@pytest.fixture(scope="module")
def scripts(browser: Any) -> Iterator[Vega]:
    with vega() as made:
        text = made.text()
        made.text = lambda: text  # type: ignore[method-assign]
        yield made


class Served:
    """A page that a browser can open."""

    def __init__(self, store: Store, scripts: Vega) -> None:
        self.page = Page(Run.of(store, NASTY), scripts)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._socket.getsockname()[1]}/"
        config = uvicorn.Config(
            self.page.application(), log_level="critical", lifespan="off", ws="none"
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]})
        self._thread.start()

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()
        self.page.close()


@pytest.fixture(scope="module")
def small(scripts: Vega) -> Iterator[Served]:
    """Twenty hand-made requests, with a picture of them beside those that there are."""
    before = pictures.views
    everything = {"stand_in": STAND_IN, **before()}
    pictures.views = lambda: everything  # type: ignore[assignment]
    store = Store()
    fill(store)
    store.install()
    served = Served(store, scripts)
    yield served
    served.stop()
    pictures.views = before


class Visit:
    """A page that was opened, with what it said and asked for meanwhile."""

    def __init__(self, browser: Any, served: Served, query: str = "", **options: Any) -> None:
        self.context = browser.new_context(
            **{"viewport": {"width": 1280, "height": 900}, **options}
        )
        self.page = self.context.new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.served = served
        self.page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.said.append(dialog.message), dialog.dismiss()))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(served.address + query)
        self.ready()

    def ready(self) -> None:
        self.page.wait_for_selector(READY, timeout=90_000)

    def __enter__(self) -> Visit:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()

    def text(self, selector: str) -> str:
        return " ".join(self.page.inner_text(selector).split())

    def shows(self, requests: int) -> None:
        """Wait until so many requests are shown, and all of it is there."""
        self.page.wait_for_function(
            "(n) => document.querySelector('#selection strong')?.innerText === n",
            arg=str(requests),
            timeout=60_000,
        )
        self.ready()

    @property
    def query(self) -> str:
        return str(self.page.evaluate("location.search"))

    def until(self, selector: str, text: str) -> None:
        """Wait until an element says something."""
        self.page.wait_for_function(
            "([s, t]) => document.querySelector(s)?.innerText.includes(t)",
            arg=[selector, text],
            timeout=60_000,
        )
        self.ready()


def quiet(visit: Visit) -> None:
    """Nothing was complained of, nothing asked of anybody else."""
    assert visit.said == []
    assert all(
        url.startswith(visit.served.address) for url in visit.asked if not url.startswith("data:")
    )


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_every_view_with_data_is_drawn_without_errors_and_network(
    browser: Any, scripts: Vega, width: int, scheme: str
) -> None:
    with as_file(files("pdtrace") / "demo") as folder, Trace.read([folder]) as trace:
        served = Served(trace.store, scripts)
        try:
            with Visit(
                browser, served, viewport={"width": width, "height": 900}, color_scheme=scheme
            ) as visit:
                drawn = {
                    figure.get_attribute("id")
                    for figure in visit.page.query_selector_all("figure.picture")
                }
                charts = visit.page.query_selector_all("figure.picture .chart")
                assert charts and all(chart.query_selector("svg") for chart in charts)
                assert all(chart.get_attribute("aria-label") for chart in charts)
                with served.page.run.selections.open() as whole:
                    (deployment,) = whole.query("deployments")["deployment"]
                    there = {
                        name: pictures.picture(whole, name, deployment).there
                        for name in pictures.views()
                    }
                assert drawn == {f"view-{name}" for name, yes in there.items() if yes}
                assert len(visit.page.query_selector_all("#absent li")) == sum(
                    not yes for yes in there.values()
                )
                assert visit.page.is_visible(".verdict")
                assert (
                    visit.page.evaluate(
                        "document.querySelector('.verdict').getBoundingClientRect().bottom"
                    )
                    < 900
                )
                assert visit.page.evaluate("document.documentElement.scrollWidth") <= width
                quiet(visit)
        finally:
            served.stop()


def test_a_filter_acts_on_everything_and_the_address_keeps_it(browser: Any, small: Served) -> None:
    with Visit(browser, small) as visit:
        assert "20 requests" in visit.text("#selection")
        visit.page.locator("#choice-worker-1").check()
        visit.shows(10)
        assert visit.query == "?worker=w1"
        assert "10 requests" in visit.text("#opening .facts")
        assert "10 requests are drawn" in visit.text("#view-stand_in .sentence").lower()
        assert len(visit.page.query_selector_all("#view-stand_in .chart .mark-symbol path")) == 10
        assert len(visit.page.query_selector_all("#slowest tbody tr")) == 10
        visit.page.go_back()
        visit.shows(20)
        assert not visit.page.locator("#choice-worker-1").is_checked()
        visit.page.go_forward()
        visit.shows(10)
        visit.page.click("#selection button.chip")
        visit.shows(20)
        quiet(visit)


def test_a_link_shows_the_same(browser: Any, small: Served) -> None:
    link = "?worker=w1&prompt=512-2048&request=r7"
    with Visit(browser, small, link) as visit:
        assert "7 of 20 requests" in visit.text("#selection")
        assert visit.page.locator("#choice-worker-1").is_checked()
        assert visit.text("#request-title") == "Request r7"
        assert visit.page.evaluate("document.querySelector('#request').open")
        quiet(visit)


def test_the_numbers_on_the_page_are_the_rows_of_the_query(browser: Any, small: Served) -> None:
    with Visit(browser, small, "?worker=w0&from=1970-01-01T00:00:05Z") as visit:
        visit.page.click("#view-stand_in details.query summary")
        rows = visit.page.query_selector_all("#view-stand_in .rows tbody tr")
        heads = [
            cell.inner_text() for cell in visit.page.query_selector_all("#view-stand_in .rows th")
        ]
        shown = {}
        for row in rows:
            cells = dict(
                zip(
                    heads, (cell.inner_text() for cell in row.query_selector_all("td")), strict=True
                )
            )
            shown[cells["request"]] = (
                float(cells["ttft_ms"]),
                int(cells["prompt_tokens"]),
                cells["decode_worker"],
            )
        wanted = Filter(deployment="d", workers=("w0",), from_ns=5_000_000_000)
        with small.page.run.selections.open(wanted) as subset:
            rows = (
                subset.query("request_values")
                .select("request", "ttft_ms", "prompt_tokens", "decode_worker")
                .rows()
            )
        assert shown == {request: tuple(values) for request, *values in rows} and len(shown) == 7
        with visit.page.expect_download() as download:
            visit.page.click("#view-stand_in button.csv")
        assert pl.read_csv(download.value.path()).height == 7


def test_the_brush_works_with_the_keyboard(browser: Any, small: Served) -> None:
    with Visit(browser, small) as visit:
        visit.page.focus("#brush-start")
        for _ in range(6):
            visit.page.keyboard.press("PageUp")  # half of 120 stretches
        visit.shows(10)
        assert visit.query.startswith("?from=1970-01-01T00%3A00%3A09.5")
        assert "1970" in visit.page.get_attribute("#brush-start", "aria-valuetext")
        assert visit.page.evaluate("document.activeElement.id") == "brush-start"
        visit.page.keyboard.press("Escape")
        visit.shows(20)
        assert visit.query == ""


def test_the_brush_works_with_the_mouse(browser: Any, small: Served) -> None:
    with Visit(browser, small) as visit:
        box = visit.page.query_selector("#brush svg").bounding_box()
        middle = box["y"] + box["height"] / 2
        visit.page.mouse.move(box["x"] + box["width"] * 0.25, middle)
        visit.page.mouse.down()
        visit.page.mouse.move(box["x"] + box["width"] * 0.75, middle, steps=4)
        visit.page.mouse.up()
        visit.shows(10)
        assert visit.text("#selection").startswith("10 of 20")
        assert "from=" in visit.query and "until=" in visit.query


def test_a_mark_and_an_id_open_the_request(browser: Any, small: Served) -> None:
    with Visit(browser, small) as visit:
        visit.page.query_selector_all("#view-stand_in .mark-symbol path")[3].click(force=True)
        visit.page.wait_for_selector("dialog[open] h3")
        opened = visit.text("#request-title").removeprefix("Request ")
        assert f"request={opened}" in visit.query
        visit.page.keyboard.press("Escape")
        visit.page.wait_for_selector("dialog:not([open])", state="attached")
        assert "request=" not in visit.query
        link = visit.page.query_selector_all("#slowest a[data-request]")[1]
        link.focus()
        visit.page.keyboard.press("Enter")
        visit.until("#request-title", "Request r18")
        visit.page.wait_for_selector("#request-body h3")
        assert "TTFT 1.90 s" in visit.text("#request-body")
        visit.page.click("#request-close")
        quiet(visit)


def test_limits_judge_and_filter(browser: Any, small: Served) -> None:
    with Visit(browser, small) as visit:
        visit.page.fill("#slo", "ttft=550ms")
        visit.page.keyboard.press("Enter")
        visit.until("#attributes", "limits missed")
        assert "goodput" in visit.text("#opening")
        visit.page.get_by_label("limits missed").check()
        visit.shows(15)
        visit.page.fill("#slo", "fast")
        visit.page.keyboard.press("Enter")
        visit.page.wait_for_selector("#problem:not([hidden])")
        assert "is not understood" in visit.text("#problem")


def test_what_comes_from_outside_stays_text(browser: Any, small: Served) -> None:
    with Visit(browser, small, f"?request={NASTY}&tenant={NASTY}") as visit:
        visit.until("#request-title", NASTY)
        visit.page.click("#request-close")
        visit.page.click("#view-stand_in details.query summary")
        assert (
            NASTY in visit.text("#title")
            and NASTY in visit.text("#attributes")
            and NASTY in visit.text("#opening")
        )
        scripts = visit.page.evaluate(
            "[...document.querySelectorAll('body script:not([src])')].map((e) => e.parentElement.outerHTML.slice(0, 300))"
        )
        assert scripts == []
        quiet(visit)


def test_an_empty_selection_and_the_last_of_many_clicks(browser: Any, small: Served) -> None:
    with Visit(browser, small, "?model=none") as visit:
        assert "0 of 20 requests" in visit.text("#selection")
        assert {f.get_attribute("id") for f in visit.page.query_selector_all("figure.picture")} <= {
            "view-coverage"
        }
        assert "Views without data here" in visit.text("#absent")
        visit.page.click("#selection button.chip")
        for label in (0, 1, 0):  # on, both, off again
            visit.page.click(f"#choice-worker-{label}")
        visit.shows(10)
        assert visit.query == "?worker=w1"
        assert "10 requests are drawn" in visit.text("#view-stand_in .sentence").lower()
        quiet(visit)


def test_everything_is_reached_with_tab_and_has_a_name(browser: Any, small: Served) -> None:
    with Visit(browser, small) as visit:
        reached = set()
        for _ in range(60):
            visit.page.keyboard.press("Tab")
            reached.add(
                visit.page.evaluate(
                    "document.activeElement.id || document.activeElement.className || document.activeElement.tagName"
                )
            )
        assert {
            "skip",
            "copy",
            "zone",
            "theme",
            "brush-start",
            "brush-end",
            "choice-worker-0",
            "slo",
        } <= reached
        nameless = visit.page.evaluate(
            """[...document.querySelectorAll('button, input, select, a[href], [tabindex="0"][role]')].filter((e) => e.checkVisibility())
               .filter((e) => !(e.innerText || e.ariaLabel || e.getAttribute('aria-label') || e.labels?.length)).map((e) => e.outerHTML)"""
        )
        assert nameless == []


@pytest.fixture
def dated(scripts: Vega) -> Iterator[Served]:
    """The same requests in 2026: before 1973 an instant has no date."""
    store = Store()
    fill(store, origin_ns=1_767_225_600 * 10**9)
    store.install()
    served = Served(store, scripts)
    yield served
    served.stop()


def test_colours_zone_and_paper(browser: Any, dated: Served) -> None:
    with Visit(browser, dated, color_scheme="light", timezone_id="Asia/Seoul") as visit:
        page = visit.page
        ground = "getComputedStyle(document.body).backgroundColor"
        before = page.evaluate(ground)
        page.click("#theme")
        assert page.evaluate(ground) != before
        page.reload()
        visit.ready()
        assert page.evaluate(ground) != before  # kept
        first = page.inner_text("#slowest time")
        page.click("#zone")
        page.wait_for_function("document.querySelector('#zone').innerText === 'local time'")
        assert first.startswith("2026-01-01 09:00:") and page.inner_text(
            "#slowest time"
        ).startswith("2026-01-01 00:00:")
        page.emulate_media(media="print")
        assert (
            not page.is_visible("aside")
            and not page.is_visible("#theme")
            and page.is_visible(".verdict")
        )
        assert page.evaluate(ground) == "rgb(255, 255, 255)"
        quiet(visit)


def test_a_page_whose_server_has_gone_says_so(browser: Any, scripts: Vega) -> None:
    store = Store()
    store.install()
    served = Served(store, scripts)
    with Visit(browser, served) as visit:
        assert "0 requests" in visit.text("#selection")
        quiet(visit)
        served.stop()
        visit.page.fill("#slo", "ttft=1s")
        visit.page.keyboard.press("Enter")
        visit.page.wait_for_selector("#problem:not([hidden])")
        assert "does it still run" in visit.text("#problem")
