"""The live page's answers: what a selection in the address changes, who may ask, what happens when nobody listens."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import polars as pl
import pytest
from door import pdtrace

from pdtrace import _live_state, pictures
from pdtrace._live_answers import Run
from pdtrace._live_guard import POLICY, Guard
from pdtrace.errors import BadOption, PdtraceError
from pdtrace.model import Slo
from pdtrace.page import Page, serve
from pdtrace.selection import Band, Filter
from pdtrace.slo import one_class
from pdtrace.store import Store

S = 1_000_000_000
NASTY = "<script>alert(1)</script>"


class Script:
    """Stands for Vega."""

    def text(self) -> str:
        return "/* vega */"

    def stop(self) -> None:
        pass


def fill(store: Store, n: int = 20, origin_ns: int = 0) -> None:
    """Requests of two workers, one a second from `origin_ns` on; every fifth has no tenant, the last a name that is HTML."""
    store.append("sources", [{"source": 0, "path": NASTY, "collector": "table", "used": True, "rows_read": n, "rows_kept": n, "rows_skipped": 0}])  # fmt: skip
    store.append("deployments", [{"deployment": "d", "name": NASTY, "mode": "aggregated", "headline_observer": "client", "start_ns": origin_ns, "end_ns": origin_ns + n * S},
                                 {"deployment": "e", "name": "e", "mode": "unknown"}])  # fmt: skip
    store.append(
        "workers",
        [{"worker": w, "deployment": "d", "name": w, "role": "aggregated"} for w in ("w0", "w1")],
    )
    for i in range(n):
        name = NASTY if i == n - 1 else f"r{i}"
        ttft = 100.0 + 100 * i
        start, end = origin_ns + i * S, origin_ns + (i + 5) * S
        times = {"start_ns": start, "end_ns": end}
        worker = f"w{i % 2}"
        store.append("requests", [{
            "request": name, "deployment": "d", **times, "first_token_ns": start + int(ttft * 1e6), "prompt_tokens": 100 * i,
            "output_tokens": 10, "ttft_ms": ttft, "e2e_ms": 5000.0, "tpot_ms": 20.0, "outcome": "completed",
            "prefill_worker": worker, "decode_worker": worker, "mode": "aggregated", "model": "llama",
            "tenant": None if i % 5 == 0 else NASTY if i == 1 else "red", "first_token_observer": "client",
        }])  # fmt: skip
        store.append("legs", [{"leg": name, "request": name, "deployment": "d", "worker": worker, "observer": "client", "status": "completed", "source": 0, **times}])  # fmt: skip
        store.append("observations", [{"request": name, "deployment": "d", "observer": "client", "leg": name, "ttft_ms": ttft, "e2e_ms": 5000.0,
                                       "tpot_ms": 20.0, "basis": "measured", "level": "B", "definition": "sent to first chunk"}])  # fmt: skip
        first = start + int(ttft * 1e6)
        for phase, detail, a, b in (
            ("prefill", "prefill_exec", start, first),
            ("decode", "decode_exec", first, end),
        ):
            store.append("phases", [{"request": name, "phase": phase, "detail": detail, "start_ns": a, "end_ns": b, "worker": worker, "basis": "measured"}])  # fmt: skip
            store.append("phase_sums", [{"request": name, "deployment": "d", "mode": "aggregated", "counted": True, "phase": phase, "detail": detail, "duration_ns": b - a,
                                         "ttft_part_ns": b - a if phase == "prefill" else 0, "basis": "measured", "placed_ns": 0, "bound_ns": 0}])  # fmt: skip


def page_of(store: Store, limits: str | None = None) -> Page:
    from pdtrace.slo import policy

    return Page(Run.of(store, NASTY, policy(limits) if limits else None), Script())  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    store = Store()
    fill(store)
    store.install()
    page = page_of(store)
    yield page
    page.close()


def ask(page: Page, path: str, **headers: str) -> httpx.Response:
    async def go() -> httpx.Response:
        transport = httpx.ASGITransport(page.application())
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.get(path, headers=headers)

    return asyncio.run(go())


def told(page: Page, path: str) -> Any:
    answer = ask(page, path)
    assert answer.status_code == 200, answer.text
    return answer.json()


# --- the address


@pytest.mark.parametrize(
    ("query", "chosen"),
    [
        ([], Filter()),
        ([("worker", "b"), ("worker", "a"), ("worker", "b")], Filter(workers=("a", "b"))),
        ([("model", ""), ("model", "x")], Filter(models=("x", None))),
        ([("from", "1970-01-01T00:00:01Z"), ("until", "1970-01-01T02:00:02 02:00")], Filter(from_ns=S, until_ns=2 * S)),
        ([("prompt", "512-2048")], Filter(prompt=Band(512, 2048))),
        ([("prompt", "-128"), ("output", "9-")], Filter(prompt=Band(None, 128), output=Band(9, None))),
        ([("prompt", "unknown")], Filter(prompt=Band(unknown=True))),
        ([("slo", "ttft=1s"), ("state", "open"), ("state", "met")], Filter(limits=one_class(Slo(ttft_ms=1000)), states=("met", "open"))),
        ([("request", "r"), ("nonsense", "1"), ("tenant", "t")], Filter(tenants=("t",))),
        ([("deployment", ""), ("from", ""), ("prompt", "")], Filter()),
    ],
)  # fmt: skip
def test_the_address_is_the_selection(query: list[tuple[str, str]], chosen: Filter) -> None:
    assert _live_state.wanted(query) == chosen


@pytest.mark.parametrize(
    "query",
    [
        {"from": "yesterday"}, {"from": "1970-01-01T00:00:02Z", "until": "1970-01-01T00:00:01Z"}, {"prompt": "a-b"}, {"prompt": "12"},
        {"prompt": f"{10**30}-"}, {"prompt": "٣-"}, {"slo": "fast"}, {"slo": "limits.toml"}, {"state": "met"}, {"state": "nice", "slo": "ttft=1s"},
    ],
)  # fmt: skip
def test_what_the_address_cannot_mean_is_one_clear_error(query: dict[str, str]) -> None:
    with pytest.raises(BadOption) as error:
        _live_state.wanted(list(query.items()))
    assert error.value.message and error.value.hint


def test_conditions_are_said_in_words() -> None:
    chosen = Filter(
        from_ns=S // 2,
        workers=("a", None),
        prompt=Band(512, 2048),
        output=Band(unknown=True),
        states=("missed",),
    )
    assert _live_state.words(chosen, {"a": "prefill 0"}.__getitem__) == [
        ("started at or after 1970-01-01T00:00:00.5Z", "from"),
        ("worker prefill 0 or unknown", "worker"),
        ("limits missed", "state"),
        ("prompt from 512 below 2,048 tokens", "prompt"),
        ("answer of unknown length", "output"),
    ]


# --- the answers


def test_the_run_is_told_with_its_deployments_and_pictures(page: Page) -> None:
    overview = told(page, "/api/overview")
    assert [(d["id"], d["requests"]) for d in overview["deployments"]] == [("d", 20), ("e", 0)]
    assert {v["name"] for v in overview["views"]} <= set(pictures.views())


def test_filters_change_the_counts(page: Page) -> None:
    choices = told(page, "/api/choices?worker=w1&tenant=red")
    assert choices["counts"] == {"all": 20, "chosen": 7, "unknown": 2}
    assert [c["key"] for c in choices["conditions"]] == ["worker", "tenant"]
    workers = {v["value"]: (v["all"], v["chosen"]) for v in choices["attributes"]["worker"]}
    assert workers == {"w0": (10, 0), "w1": (10, 7)}
    assert sum(choices["arrivals"]["all"]) == 20 and sum(choices["arrivals"]["chosen"]) == 7


def test_filters_change_the_diagnosis(page: Page) -> None:
    assert "20 requests" in told(page, "/api/diagnosis")["opening"]
    assert "10 requests" in told(page, "/api/diagnosis?worker=w1")["opening"]


def test_filters_change_the_pictures_to_the_rows_of_the_query(page: Page) -> None:
    name = next(iter(pictures.views()))
    view = pictures.view(name)
    for address, wanted in (
        ("", Filter(deployment="d")),
        ("&from=1970-01-01T00:00:10Z", Filter(deployment="d", from_ns=10 * S)),
    ):
        shown = told(page, f"/api/view?name={name}{address}")["payload"]["rows"]
        with page.run.selections.open(wanted) as subset:
            rows = subset.query(view.query, **view.parameters).filter(pl.col("deployment") == "d")
        assert shown["length"] == rows.height > 0
        sent = pl.DataFrame(shown["columns"]).select(rows.columns)
        keys = [name for name, kind in rows.schema.items() if not kind.is_float()]
        both = zip(sent.sort(keys).iter_rows(), rows.sort(keys).iter_rows(), strict=True)
        assert all(one == pytest.approx(other) for one, other in both)


@pytest.mark.parametrize(
    "query", ["model=none", "deployment=e", "from=2100-01-01T00:00:00Z", "prompt=999999-"]
)
def test_an_empty_selection_says_no_data_and_never_fails(page: Page, query: str) -> None:
    assert told(page, f"/api/choices?{query}")["counts"]["chosen"] == 0
    assert told(page, f"/api/diagnosis?{query}")["opening"]
    assert told(page, f"/api/requests?{query}") == {"html": "", "shown": 0}
    for name in pictures.views():
        view = told(page, f"/api/view?name={name}&{query}")
        assert not view["problem"], view
        assert not view["there"] or name == "coverage", view  # that says what is missing


def test_limits_come_from_the_address_or_the_start() -> None:
    store = Store()
    fill(store)
    store.install()
    page = page_of(store, "ttft=1050ms")
    assert told(page, "/api/choices?state=met")["counts"]["chosen"] == 10
    assert told(page, "/api/choices?state=met&slo=ttft%3D550ms")["counts"]["chosen"] == 5
    assert "10 of 20" in told(page, "/api/diagnosis")["opening"].replace("\xa0", " ")
    page.close()


def test_the_slowest_requests_come_first_and_lead_to_their_story(page: Page) -> None:
    table = told(page, "/api/requests?order=ttft")
    links = re.findall(r'data-request="([^"]*)"', table["html"])
    assert links[:2] == ["&lt;script&gt;alert(1)&lt;/script&gt;", "r18"] and table["shown"] == 20
    story = told(page, "/api/request?request=r18&worker=w1")
    assert story["request"] == "r18"
    assert "not in the selection" in story["html"]
    assert "TTFT 1.90 s" in story["html"].replace("\xa0", " ")
    assert "prefill_exec" in story["sections"]


def test_what_comes_from_outside_stays_text(page: Page) -> None:
    answers = [ask(page, f"/api/{name}").json() for name in ("diagnosis", "requests", "choices")]
    story = ask(page, f"/api/request?request={NASTY}").json()
    answers += [story, *story["pictures"]]
    pieces = [
        value
        for answer in answers
        for key, value in answer.items()
        if key in {"html", "sections", "opening", "closing"}
    ]
    assert any("&lt;script&gt;" in piece for piece in pieces)
    assert not any("<script" in piece for piece in pieces)


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        ("/api/view?name=none", 404, "no picture named none"),
        ("/api/request?request=none", 404, "no request has the id none"),
        ("/api/request", 404, "no request has the id ''"),
        ("/api/choices?deployment=none", 404, "no such deployment"),
        ("/api/choices?prompt=x", 400, "no range of tokens"),
    ],
)
def test_errors_are_told_as_json(page: Page, path: str, status: int, says: str) -> None:
    answer = ask(page, path)
    assert answer.status_code == status
    assert says in answer.json()["error"]


def test_files_are_served_and_nothing_beside_them(page: Page) -> None:
    home = ask(page, "/")
    assert home.headers["content-type"].startswith("text/html")
    for name in ("vega.js", *re.findall(r'(?:href|src)="(static/[^"]+)"', home.text)):
        assert ask(page, f"/{name}").status_code == 200, name
    for path in (
        "/static/..%2fpage.py",
        "/static/none.js",
        "/static/.hidden.js",
        "/static/%2e%2e/page.py",
        "/page.py",
        "/static/",
    ):
        assert ask(page, path).status_code == 404, path


def test_scripts_name_only_what_is_there() -> None:
    root = files("pdtrace") / "static"
    for entry in root.iterdir():
        if entry.name.startswith("view") and entry.name.endswith(".js"):
            code = entry.read_text("utf-8")
            assert (
                "http://" not in code.replace("http://www.w3.org/2000/svg", "")
                and "https://" not in code
            )
            for name in re.findall(r'from "\./([^"]+)"', code):
                assert (root / name).is_file(), (entry.name, name)
    html = (root / "view.html").read_text("utf-8")
    assert not re.search(r"<script>|\son\w+=|style=", html)  # the policy would refuse them


def test_an_empty_store_has_a_page() -> None:
    store = Store()
    store.install()
    page = page_of(store)
    assert told(page, "/api/overview")["deployments"] == []
    assert told(page, "/api/choices") == {
        "counts": {"all": 0, "chosen": 0, "unknown": 0},
        "conditions": [],
        "attributes": {},
        "arrivals": None,
    }
    assert told(page, "/api/diagnosis")["opening"]
    assert all(not told(page, f"/api/view?name={name}")["there"] for name in pictures.views())
    page.close()


# --- who may ask


@pytest.mark.parametrize(
    ("host", "named", "allowed"),
    [
        ("127.0.0.1", "127.0.0.1:8000", True), ("127.0.0.1", "localhost:8000", True), ("127.0.0.1", "LOCALHOST", True),
        ("127.0.0.1", "[::1]:8000", True), ("127.0.0.1", "evil.example:8000", False), ("127.0.0.1", "127.0.0.1.evil.example", False),
        ("127.0.0.1", "10.0.0.7:8000", False), ("127.0.0.1", "", False), ("127.0.0.1", "localhost.evil.example", False),
        ("0.0.0.0", "10.0.0.7:8000", True), ("0.0.0.0", "evil.example", False), ("box.example", "box.example:8000", True),
    ],
)  # fmt: skip
def test_only_names_of_this_machine_are_answered(host: str, named: str, allowed: bool) -> None:
    assert Guard(None, host).may_name(named) is allowed  # type: ignore[arg-type]


def test_other_hosts_and_sites_are_refused(page: Page) -> None:
    assert ask(page, "/api/overview", host="evil.example").status_code == 403
    for site in ("cross-site", "same-site"):
        assert ask(page, "/api/overview", **{"sec-fetch-site": site}).status_code == 403
        assert (
            ask(page, "/", **{"sec-fetch-site": site, "sec-fetch-mode": "no-cors"}).status_code
            == 403
        )
        assert (
            ask(page, "/", **{"sec-fetch-site": site, "sec-fetch-mode": "navigate"}).status_code
            == 200
        )  # a link
    assert ask(page, "/api/overview", **{"sec-fetch-site": "same-origin"}).status_code == 200


def test_every_answer_has_the_policy(page: Page) -> None:
    for path in ("/", "/static/view.js", "/api/overview", "/none"):
        headers = ask(page, path).headers
        assert headers["content-security-policy"] == POLICY
        assert headers["x-content-type-options"] == "nosniff"
    assert (
        "unsafe-eval" not in POLICY
        and "script-src 'self';" in POLICY
        and "default-src 'none'" in POLICY
    )


def test_nothing_can_be_changed(page: Page) -> None:
    async def go() -> int:
        transport = httpx.ASGITransport(page.application())
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return (await client.post("/api/overview")).status_code

    assert asyncio.run(go()) == 405


def test_open_to_the_network_it_asks_for_the_token(page: Page) -> None:
    async def go() -> tuple[list[int], str]:
        transport = httpx.ASGITransport(page.application("0.0.0.0", "secret"))
        async with httpx.AsyncClient(transport=transport, base_url="http://10.0.0.7") as client:
            before = [
                (await client.get(path)).status_code
                for path in ("/", "/?token=wrong", "/static/view.js", "/api/overview")
            ]
            first = await client.get("/?token=secret")
            after = (await client.get("/api/overview")).status_code
        return [*before, first.status_code, after], first.headers["set-cookie"]

    statuses, cookie = asyncio.run(go())
    assert statuses == [401, 401, 401, 401, 200, 200]
    assert "HttpOnly" in cookie and "SameSite=Strict" in cookie


# --- nobody listens


def test_what_nobody_waits_for_is_broken_off(page: Page) -> None:
    slow = "SELECT count(*) AS n FROM range(1000000) a, range(10000000) b WHERE a.range * b.range % 7 = 1"

    def work(stop: Any) -> bytes:
        with page.run.selections.open(Filter(deployment="d"), stop) as subset:
            return str(subset.sql(slow)).encode()

    class Gone:
        async def receive(self) -> dict[str, str]:
            await asyncio.sleep(0.3)
            return {"type": "http.disconnect"}

    begun = time.monotonic()
    answer = asyncio.run(page._answer(Gone(), work))  # type: ignore[arg-type]
    assert answer.status_code == 499
    assert time.monotonic() - begun < 20  # the query would take minutes
    assert told(page, "/api/choices")["counts"]["all"] == 20  # others are not hurt


# --- the command


def test_a_port_in_use_is_one_clear_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        store = Store()
        with pytest.raises(PdtraceError) as error:
            serve(store, "x", Script(), print, port=taken.getsockname()[1])  # type: ignore[arg-type]
    assert "cannot be bound" in error.value.message


def test_a_path_that_is_not_there_is_one_error() -> None:
    done = pdtrace("view", "/no/such/folder")
    assert done.returncode == 1 and "no such file" in done.error.lower()


def test_the_command_prints_its_address_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    table = tmp_path / "requests.csv"
    table.write_text("request,ttft_ms,total_ms\na,100,900\nb,120,800\n", "utf-8")
    command = [sys.executable, "-m", "pdtrace", "view", str(table)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", address)
            with urllib.request.urlopen(address + "api/overview") as answer:
                assert b'"requests":2' in answer.read()
            refused = urllib.request.Request(address, headers={"Host": "evil.example"})
            with pytest.raises(urllib.error.HTTPError) as error:
                urllib.request.urlopen(refused)
            error.value.close()
            assert error.value.code == 403
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
        finally:
            process.kill()


# --- what is of the selection, and what is not


def test_findings_of_the_whole_run_stand_apart_and_out_of_the_verdict() -> None:
    store = Store()
    fill(store)
    store.append("interference_steps", [{
        "worker": "w0", "rank": "0", "deployment": "d", "role": "aggregated", "capture": "full", "steps": 100, "decode_only_steps": 50,
        "mixed_steps": 50, "affected_steps": 50, "lost_s": 49.0, "lost_low_s": 48.0, "lost_high_s": 50.0, "decode_s": 100.0,
        "lost_ratio": 0.49, "lost_ratio_low": 0.48, "lost_ratio_high": 0.5, "flagged": True,
    }])  # fmt: skip
    store.install()
    page = page_of(store)
    opening = {
        q: told(page, f"/api/diagnosis?{q}")["opening"]
        for q in ("", "tenant=red", "worker=w0", "tenant=none")
    }
    verdict = {q: re.search('class="verdict">([^<]*)<', text)[1] for q, text in opening.items()}  # type: ignore[index]
    apart = {q: text.partition("Not of the selection")[2] for q, text in opening.items()}
    assert "held decodes up" in verdict[""] and not apart[""]
    assert "held decodes up" not in verdict["tenant=red"]
    assert (
        "held decodes up" in apart["tenant=red"]
        and "of the whole run, not of the selection" in apart["tenant=red"]
    )
    assert "held decodes up" in verdict["worker=w0"]  # its own steps
    assert "No request fits" in verdict["tenant=none"] and "held decodes up" in apart["tenant=none"]
    page.close()
