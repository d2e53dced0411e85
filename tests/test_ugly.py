"""Ugly input: one clear error or a diagnosis that tells what is wrong; never a traceback, nothing lost silently."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import polars as pl
import pytest
import zstandard
from door import pdtrace
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdtrace import _archives, _streams, registry
from pdtrace.api import Trace
from pdtrace.errors import PdtraceError, printable
from pdtrace.inputs import expand

FIXTURES = Path(__file__).parent / "fixtures"
SMALLEST = (FIXTURES / "table" / "smallest.csv").read_bytes()
LOG = (FIXTURES / "vllm_log" / "agg-2026-11-29.log").read_bytes()
SPANS = (FIXTURES / "otlp" / "vllm_pd.jsonl").read_bytes()
HEADER = b"request,input_tokens,output_tokens,ttft_ms,e2e_ms\n"


def table(rows: int, first: int = 0) -> bytes:
    """A table of so many requests."""
    return HEADER + b"".join(
        b"r%d,100,10,%d,%d\n" % (i, 100 + i, 900 + i) for i in range(first, first + rows)
    )


def sources(*paths: Path | str) -> dict[str, dict[str, Any]]:
    """The import log by file name; every source must balance."""
    with Trace.read(paths) as trace:
        rows = {Path(r["path"]).name: r for r in trace.store.sql("FROM sources").to_dicts()}
        reasons = dict(trace.store.rows("SELECT source, sum(records) FROM skipped GROUP BY source"))
    for row in rows.values():
        if row["collector"]:
            assert row["rows_read"] == row["rows_kept"] + row["rows_skipped"], row
            assert row["rows_skipped"] == reasons.get(row["source"], 0), row
    return rows


# ---- damaged and oddly encoded streams -----------------------------------------------------------


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.ZstdCompressor().compress])
def test_a_cut_stream_gives_what_came_before_and_says_so(tmp_path: Path, pack) -> None:
    noise = b"".join(
        b"%d,%d,10,%d,%d\n" % (i, i * 7919 % 997, i * 31 % 9973, 20_000 + i) for i in range(40_000)
    )
    packed = pack(HEADER + noise)
    (tmp_path / "cut.csv.packed").write_bytes(packed[: len(packed) * 2 // 3])
    (row,) = sources(tmp_path).values()
    assert row["rows_kept"] > 10_000
    assert row["why"].startswith("damaged after")
    assert row["sha256"] is None


def test_a_broken_middle_of_gzip_keeps_every_line_before_it(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(LOG))
    middle = len(packed) // 2
    packed[middle : middle + 8] = bytes(8)
    (tmp_path / "server.log.gz").write_bytes(packed)
    item = expand([str(tmp_path)])[0]
    whole = item.head().data
    assert whole[:2500] == LOG[:2500]
    (row,) = sources(tmp_path).values()
    assert row["rows_kept"] > 0
    assert row["why"].startswith("damaged after")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig", "utf-32"])
@pytest.mark.parametrize("newline", [b"\n", b"\r\n", b"\r\r\n"])
def test_windows_text_is_read_as_any_other(tmp_path: Path, encoding: str, newline: bytes) -> None:
    data = SMALLEST.replace(b"\r\n", b"\n").replace(b"\n", newline)
    (tmp_path / "t.csv").write_bytes(data.decode().encode(encoding))
    (row,) = sources(tmp_path).values()
    assert row["rows_kept"] == 20


@given(data=st.data())
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_damage_of_any_format_balances(tmp_path_factory: pytest.TempPathFactory, data) -> None:
    original, name = data.draw(
        st.sampled_from([(SMALLEST, "t.csv"), (LOG[:9000], "s.log"), (SPANS[:9000], "s.jsonl")])
    )
    damaged = bytearray(original)
    for _ in range(data.draw(st.integers(0, 6))):
        at = data.draw(st.integers(0, len(damaged)))
        damaged[at : at + data.draw(st.integers(0, 40))] = data.draw(st.binary(max_size=40))
    path = tmp_path_factory.mktemp("damaged") / name
    path.write_bytes(damaged)
    try:
        rows = sources(path)
    except PdtraceError as error:
        assert "failed" not in error.message, error.message
        assert error.hint
    else:
        assert not any("failed" in row["why"] for row in rows.values())


@given(
    content=st.binary(max_size=5000),
    cut=st.integers(0, 5000),
    kind=st.sampled_from(["gz", "zst", ""]),
)
@settings(max_examples=60, deadline=None)
def test_what_is_readable_of_a_stream_is_its_beginning(content: bytes, cut: int, kind: str) -> None:
    pack = {"gz": gzip.compress, "zst": zstandard.ZstdCompressor().compress, "": bytes}[kind]
    packed = pack(b"x" + content)[:cut]
    found, problem = b"", ""
    with _streams.decompressed(io.BytesIO(packed), len(packed)) as stream:
        try:
            found, problem = _streams.read_up_to(stream, 10_000)
        except _streams.DAMAGED as error:
            problem = _streams.words(error)
    if not kind:
        assert found == packed
    elif len(packed) > 6:
        assert (b"x" + content).startswith(found)
        assert bool(problem) == (cut < len(pack(b"x" + content)))


def test_a_decompression_bomb_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_streams, "BOMB_BYTES", 1 << 20)
    monkeypatch.setattr(_archives, "BOMB_BYTES", 1 << 20)
    bomb = HEADER + b"r,1,1,1,1\n" + b"\n" * (30 << 20)
    (tmp_path / "bomb.csv.gz").write_bytes(gzip.compress(bomb))
    with zipfile.ZipFile(tmp_path / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("bomb.csv", bomb)
    (tmp_path / "good.csv").write_bytes(table(3))
    rows = sources(tmp_path)
    assert "bomb" in rows["bomb.zip!bomb.csv"]["why"]
    assert "decompress" in rows["bomb.csv.gz"]["why"]
    assert rows["good.csv"]["rows_kept"] == 3


# ---- folders ---------------------------------------------------------------------------------------


def test_a_mixed_folder_accounts_for_everything_in_it(tmp_path: Path) -> None:
    names = [
        "with space.csv",
        "quote'\".csv",
        "glob[1]*?.csv",
        "bang!.csv",
        "ünï 한.csv",
        "a\nb.csv",
    ]
    for number, name in enumerate(names):
        (tmp_path / name).write_bytes(table(2, first=10 * number))
    raw = os.fsencode(tmp_path) + b"/\xff\xfe.csv"
    with open(raw, "wb") as stream:  # noqa: PTH123 -- a name that is no text
        stream.write(table(2, first=900))
    (tmp_path / "folder.csv").mkdir()
    (tmp_path / "empty").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "dangling.csv").symlink_to(tmp_path / "nowhere")
    (tmp_path / "zz-same.csv").symlink_to(tmp_path / names[0])
    elsewhere = tmp_path.parent / f"{tmp_path.name}-linked"
    elsewhere.mkdir()
    (elsewhere / "linked.csv").write_bytes(table(2, first=800))
    (tmp_path / "link").symlink_to(elsewhere)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "x.db").write_bytes(b"SQLite format 3\0" + bytes(2000))
    (tmp_path / "x.duckdb").write_bytes(bytes(8) + b"DUCK" + bytes(2000))
    (tmp_path / "x.7z").write_bytes(b"7z\xbc\xaf\x27\x1c" + bytes(50))
    (tmp_path / "x.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(100))
    (tmp_path / "x.bin").write_bytes(os.urandom(3000))
    (tmp_path / "zero").write_bytes(b"")
    inner = io.BytesIO()
    with tarfile.open(fileobj=inner, mode="w:gz") as archive:
        info = tarfile.TarInfo("deep/nested.csv")
        info.size = len(table(2, first=700))
        archive.addfile(info, io.BytesIO(table(2, first=700)))
    with zipfile.ZipFile(tmp_path / "outer.zip", "w") as outer:
        outer.writestr("inner.tar.gz", inner.getvalue())
        with pytest.warns(UserWarning, match="Duplicate"):
            for first in (500, 600):
                outer.writestr("twice.csv", table(2, first=first))
    rows = sources(tmp_path, f"{tmp_path}/", f"{tmp_path}/./zz-same.csv")
    kept = {name for name, row in rows.items() if row["rows_kept"]}
    assert kept == {
        *names, "\\xff\\xfe.csv", "linked.csv", "nested.csv", "outer.zip!twice.csv", "outer.zip!twice.csv (2)",
    }  # fmt: skip
    assert sum(row["rows_kept"] or 0 for row in rows.values()) == 2 * len(kept)
    assert "No such file" in rows["dangling.csv"]["why"]
    assert rows["pipe"]["why"] == "not a regular file"
    assert "SQLite" in rows["x.db"]["why"]
    assert "give it alone" in rows["x.duckdb"]["why"]
    assert "7z" in rows["x.7z"]["why"]
    assert {"x.png", "x.bin", "zero"} <= rows.keys()


def test_unreadable_files_and_folders_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "good.csv").write_bytes(table(3))
    (tmp_path / "secret.csv").write_bytes(table(3, first=50))
    (tmp_path / "closed").mkdir()
    open_path, listdir = Path.open, os.listdir

    def refuse(self: Path, *arguments: Any, **more: Any) -> Any:
        if self.name == "secret.csv":
            raise PermissionError(13, "Permission denied", str(self))
        return open_path(self, *arguments, **more)

    def refuse_folder(path: str) -> list[str]:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", path)
        return listdir(path)

    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(os, "listdir", refuse_folder)
    rows = sources(tmp_path)
    assert rows["good.csv"]["rows_kept"] == 3
    assert "Permission denied" in rows["secret.csv"]["why"]
    assert "Permission denied" in rows["closed"]["why"]


def test_archives_keep_their_secrets_and_their_place(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("../../evil.csv", table(2))
        archive.writestr("locked.csv", table(2, first=20))
        archive.writestr("broken.csv", table(2, first=40))
    data = bytearray((tmp_path / "a.zip").read_bytes())
    for magic, flag in (
        (b"PK\x03\x04", 6),
        (b"PK\x01\x02", 8),
    ):  # mark the second member as encrypted
        at = data.index(magic, data.index(magic) + 1)
        data[at + flag] |= 1
    at = data.index(b"r40,100")
    data[at : at + 3] = b"r99"
    (tmp_path / "a.zip").write_bytes(data)
    rows = sources(tmp_path)
    assert rows["evil.csv"]["rows_kept"] == 2
    assert "encrypted" in rows["a.zip!locked.csv"]["why"]
    assert "checksum" in rows["a.zip!broken.csv"]["why"]
    assert [p.name for p in tmp_path.parent.iterdir() if p.name == "evil.csv"] == []


def test_a_cut_tar_gives_its_members_up_to_the_cut(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for number in range(3):
            info = tarfile.TarInfo(f"{number}.csv")
            info.size = len(table(500, first=1000 * number))
            archive.addfile(info, io.BytesIO(table(500, first=1000 * number)))
    (tmp_path / "a.tar").write_bytes(buffer.getvalue()[: 12_000 + 1024 + 6000])
    rows = sources(tmp_path)
    assert rows["a.tar!0.csv"]["rows_kept"] == 500
    assert 300 < rows["a.tar!1.csv"]["rows_kept"] < 320
    assert "ends in the middle" in rows["a.tar!1.csv"]["why"]
    assert "unexpected end" in rows["a.tar"]["why"]


def test_many_members_and_many_tiny_files_take_linear_time(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for number in range(10_000):
            archive.writestr(f"{number}.txt", b"nothing")
    assert len(expand([str(tmp_path)])) == 10_000


def test_paths_that_cannot_be_are_one_clear_error() -> None:
    for path in ("x" * 5000, "a\0b", "/dev/null/x", "", "no[thing]*"):
        done = pdtrace("diagnose", path)
        assert done.returncode in (1, 2), path
        assert done.error
    assert "not a regular file" in pdtrace("diagnose", "/dev/null").error


def test_standard_input_may_be_packed_or_empty(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("t.csv", gzip.compress(SMALLEST))
    done = pdtrace(
        "query",
        "SELECT count(*) AS n FROM requests",
        "-",
        "-",
        "--format",
        "csv",
        stdin=buffer.getvalue(),
    )
    assert done.stdout == "n\n20\n", done.stderr
    assert "empty" in pdtrace("diagnose", "-").error


# ---- the same content twice --------------------------------------------------------------------------


def test_content_that_is_there_twice_counts_once(tmp_path: Path) -> None:
    for folder in ("a", "b-copy", "partial"):
        (tmp_path / folder).mkdir()
    whole = table(40)
    (tmp_path / "a" / "t.csv").write_bytes(whole)
    (tmp_path / "b-copy" / "t.csv.gz").write_bytes(gzip.compress(whole))
    (tmp_path / "partial" / "growing.csv").write_bytes(whole[:-300])
    (tmp_path / "partial" / "half.csv.gz").write_bytes(gzip.compress(whole, 0)[:-400])
    (tmp_path / "other.csv").write_bytes(table(5, first=100))
    rows = sources(tmp_path)
    assert rows["t.csv"]["rows_kept"] == 40
    assert rows["other.csv"]["rows_kept"] == 5
    assert rows["t.csv.gz"]["why"].startswith("duplicate of another source: ")
    for name in ("growing.csv", "half.csv.gz"):
        assert rows[name]["rows_kept"] == 0
        assert rows[name]["why"].startswith("beginning of another source: ")


def test_a_log_that_was_copied_while_it_grew_is_one_server(tmp_path: Path) -> None:
    (tmp_path / "server.log").write_bytes(LOG)
    (tmp_path / "server.log.1").write_bytes(LOG[: len(LOG) * 3 // 4])
    with Trace.read([tmp_path]) as both, Trace.read([tmp_path / "server.log"]) as alone:
        for name in ("legs", "steps", "samples", "events", "deployments"):
            assert both.store.count(name) == alone.store.count(name), name


def test_a_log_whose_steps_stand_in_it_twice_counts_them_once(tmp_path: Path) -> None:
    (tmp_path / "once.log").write_bytes(LOG)
    (tmp_path / "twice").mkdir()
    (tmp_path / "twice" / "server.log").write_bytes(LOG + LOG)
    with Trace.read([tmp_path / "twice"]) as twice, Trace.read([tmp_path / "once.log"]) as once:
        assert once.store.count("steps") > 0
        assert twice.store.count("steps") == once.store.count("steps")
        ((read, kept, skipped),) = twice.store.rows(
            "SELECT rows_read, rows_kept, rows_skipped FROM sources"
        )
        assert read == kept + skipped


# ---- values --------------------------------------------------------------------------------------


def spans_of(*spans: dict[str, Any], service: str = "vllm") -> str:
    """One OTLP export request as a JSON line."""
    resource = {"attributes": [{"key": "service.name", "value": {"stringValue": service}}]}
    return json.dumps({"resourceSpans": [{"resource": resource, "scopeSpans": [
        {"scope": {"name": "vllm.llm_engine"}, "spans": list(spans)}]}]}) + "\n"  # fmt: skip


def span(number: int, start: Any = None, end: Any = None, **attributes: Any) -> dict[str, Any]:
    """An llm_request span of 0.5 s."""
    start = 1_764_457_200_000_000_000 + number * 10**8 if start is None else start
    values = {
        "gen_ai.request.id": f"cmpl-{number}", "gen_ai.latency.e2e": 0.5,
        "gen_ai.latency.time_to_first_token": 0.1, "gen_ai.usage.prompt_tokens": 100,
        "gen_ai.usage.completion_tokens": 10, **attributes,
    }  # fmt: skip
    kinds = {bool: "boolValue", int: "intValue", float: "doubleValue", str: "stringValue"}
    return {
        "traceId": f"{number + 1:032x}", "spanId": f"{number + 1:016x}", "name": "llm_request", "kind": 2,
        "startTimeUnixNano": start, "endTimeUnixNano": start + 5 * 10**8 if end is None else end,
        "attributes": [{"key": k, "value": {kinds[type(v)]: v}} for k, v in values.items()],
    }  # fmt: skip


def test_absurd_instants_and_values_do_not_stop_a_diagnosis(tmp_path: Path) -> None:
    good = [span(number) for number in range(5)]
    odd = [
        span(10, start=0), span(11, start=2**63 - 1, end=2**63 - 1), span(12, start=-5),
        span(13, start=-(2**63), end=2**63 - 1), span(14, end=0), span(15, start=1_764_457_200_000),
        span(16, **{"gen_ai.usage.prompt_tokens": "many", "gen_ai.latency.e2e": float("nan")}),
        span(17, **{"gen_ai.usage.prompt_tokens": -5, "gen_ai.latency.e2e": 1e300}),
        {**span(18), "traceId": "", "spanId": ""}, {**span(19), "name": "half \ud800"}, {},
    ]  # fmt: skip
    (tmp_path / "t.jsonl").write_text(spans_of(*good) + spans_of(*odd))
    done = pdtrace("diagnose", str(tmp_path), "--format", "json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["deployments"][0]["requests"]["count"] >= 5
    assert not [line for line in result["unknown"] if "failed" in line]


@pytest.mark.parametrize(
    ("name", "content", "kept"),
    [
        ("numbers.csv", HEADER + b"\n".join(b"r,%b,%b,%b,%b" % ((v,) * 4) for v in (b"1", b"nan", b"inf", b"1e400", b"9" * 40, b"-5", b"x", b"")), 1),
        ("numbers.jsonl", b"\n".join(b'{"request":"r","ttft_ms":%b,"e2e_ms":%b,"output_tokens":3}' % (v, v) for v in (b"1", b"NaN", b"-Infinity", b"1e400", b"9" * 40, b"[1]", b"{}", b'"x"')), 2),
        ("blank.csv", HEADER + b"\n" * 200_000 + b"a,1,2,3,4\n", 1),
        ("ragged.csv", HEADER + b"a,1,2,3,4\nb,1\nd,1,2,3,4,5,6,7\n,,,,\nc,1,2,3,4", 3),
        ("nul.csv", HEADER + b"a\0b,1,2,3,4\nc,1,2,3,4\n", 2),
    ],
)  # fmt: skip
def test_odd_tables_keep_the_rows_that_say_something(
    tmp_path: Path, name: str, content: bytes, kept: int
) -> None:
    (tmp_path / name).write_bytes(content)
    (row,) = sources(tmp_path).values()
    assert row["rows_kept"] >= kept
    assert "failed" not in row["why"]


def test_deep_nesting_and_long_lines_are_records_that_are_not_kept(tmp_path: Path) -> None:
    deep = '{"resourceSpans":' + "[" * 100_000 + "]" * 100_000 + "}\n"
    (tmp_path / "deep.jsonl").write_text(spans_of(span(0)) + deep)
    (tmp_path / "long.log").write_bytes(LOG[:3000] + b"x" * 5_000_000 + b"\n" + LOG[3000:])
    rows = sources(tmp_path)
    assert (rows["deep.jsonl"]["rows_kept"], rows["deep.jsonl"]["rows_skipped"]) == (1, 1)
    assert rows["long.log"]["rows_kept"] > 10


def test_half_a_parquet_file_is_told(tmp_path: Path) -> None:
    whole = io.BytesIO()
    pl.DataFrame(
        {"request": ["a"], "ttft_ms": [1.0], "e2e_ms": [2.0], "output_tokens": [3]}
    ).write_parquet(whole)
    (tmp_path / "a.parquet").write_bytes(whole.getvalue())
    (tmp_path / "half.parquet").write_bytes(whole.getvalue()[:-40])
    (tmp_path / "big.parquet").write_bytes(whole.getvalue()[:-40] + os.urandom(100_000))
    rows = sources(tmp_path)
    assert rows["a.parquet"]["rows_kept"] == 1
    assert rows["half.parquet"]["why"]
    assert not rows["big.parquet"]["rows_kept"]


# ---- orders to the terminal, markup, SQL --------------------------------------------------------------

EVIL = "\x1b[31mX\x1b]0;t\x07\u202e [red]b[/red] <script>alert(1)</script> | `x` '; DROP TABLE legs; --"


def test_data_give_no_orders_to_terminal_browser_or_store(tmp_path: Path) -> None:
    evil = [span(n, **{"gen_ai.request.id": f"{EVIL}{n}"}) for n in range(3)]
    (tmp_path / "evil\x1b[31m.jsonl").write_text(spans_of(*evil, service=EVIL))
    quoted = EVIL.replace('"', '""')
    rows = "".join(
        f'"{quoted}{n}",100,10,{100 + 900 * n},{2000 + n},"{quoted}"\n' for n in range(9)
    )
    (tmp_path / "evil.csv").write_text(
        "request,input_tokens,output_tokens,ttft_ms,e2e_ms,note\n" + rows
    )
    path = str(tmp_path)
    store = f"{tmp_path}/x.duckdb"
    assert pdtrace("ingest", path, "-o", store).returncode == 0
    for arguments in (
        ["diagnose", store], ["diagnose", store, "--format", "md"], ["diagnose", store, "--format", "json"],
        ["coverage", store], ["explain", "slowest", store], ["query", "legs", store], ["query", "requests", store, "--format", "md"],
    ):  # fmt: skip
        done = pdtrace(*arguments)
        assert done.returncode == 0, done.stderr
        for sign in ("\x1b", "\x07", "\u202e"):
            assert sign not in done.stdout + done.stderr, arguments
        if "md" in arguments:
            assert "<script" not in done.stdout
    assert (
        "[red]b[/red]"
        in pdtrace(
            "query", "SELECT note FROM requests WHERE note IS NOT NULL", store, "--format", "csv"
        ).stdout
    )


def test_printable_text_keeps_everything_but_controls() -> None:
    assert printable("a\tb\nü한 \x1b\x9b\u202e\ud800") == "a\tb\nü한 " + "\ufffd" * 4


# ---- bugs of ours ------------------------------------------------------------------------------------


class _Panic(BaseException):
    """As a panic in a Rust library arrives."""


@pytest.mark.parametrize("error", [KeyError("x"), _Panic("boom"), RecursionError(), MemoryError()])
def test_a_collector_that_breaks_down_leaves_the_other_sources_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    (tmp_path / "good.csv").write_bytes(table(3))
    (tmp_path / "bad.jsonl").write_bytes(SPANS)
    (tmp_path / "worse.log").write_bytes(LOG)

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(registry.collectors()["otlp"], "read", fail)
    monkeypatch.setattr(registry.collectors()["vllm_log"], "sniff", fail)
    rows = sources(tmp_path)
    assert rows["good.csv"]["rows_kept"] == 3
    assert "collector otlp failed" in rows["bad.jsonl"]["why"]
    assert "report" in rows["bad.jsonl"]["why"]
    assert "collector vllm_log failed" in rows["worse.log"]["why"]
    target = tmp_path / "x.duckdb"
    assert pdtrace("ingest", str(tmp_path), "-o", str(target)).returncode == 0
    assert (
        pdtrace(
            "query", "SELECT count(*) AS n FROM requests", str(target), "--format", "csv"
        ).stdout
        == "n\n3\n"
    )


def test_a_bad_row_in_a_transaction_takes_back_its_source_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "good.csv").write_bytes(table(3))
    (tmp_path / "spans.jsonl").write_bytes(SPANS)

    def bad(source: Any, out: Any) -> None:
        out.read(1)
        out.add("events", pl.DataFrame({"record": [0], "time_ns": ["soon"]}))

    monkeypatch.setattr(registry.collectors()["otlp"], "read", bad)
    target = tmp_path / "x.duckdb"
    assert pdtrace("ingest", str(tmp_path), "-o", str(target)).returncode == 0
    rows = sources(target)
    assert rows["good.csv"]["rows_kept"] == 3
    assert "collector otlp failed" in rows["spans.jsonl"]["why"]


def test_a_stage_or_finding_that_fails_is_told_in_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t.csv").write_bytes(SMALLEST)
    vllm: ModuleType = registry.collectors()["vllm"]
    (tmp_path / "s.jsonl").write_text(spans_of(span(0)))

    def fail(*_: object, **__: object) -> None:
        raise ValueError("boom")

    monkeypatch.setattr(vllm, "interpret", fail)
    monkeypatch.setattr("pdtrace.phases.partition", fail)
    monkeypatch.setattr("pdtrace.wording.finding", fail)
    done = pdtrace("diagnose", str(tmp_path), "--format", "json")
    assert done.returncode == 0, done.stderr
    unknown = "\n".join(json.loads(done.stdout)["unknown"])
    assert "collector vllm failed" in unknown
    assert "cutting requests into phases failed" in unknown
    assert "finding slow_first_token failed" in unknown
    debug = pdtrace("diagnose", str(tmp_path / "t.csv"), "--debug")
    assert "Traceback" in debug.stderr
