"""The door: exit codes, errors in one line, formats, options. Ugly input has tests of its own (test_ugly)."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from importlib.resources import files
from pathlib import Path

import duckdb
import jsonschema
import pytest
from click.shell_completion import ShellComplete
from door import pdtrace

from pdtrace import outputs
from pdtrace.cli import cli
from pdtrace.errors import PdtraceError

DEMO = str(files("pdtrace") / "demo")
SMALLEST = str(Path(__file__).parent / "fixtures" / "table" / "smallest.csv")


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The demo dump as a .duckdb file."""
    target = str(tmp_path_factory.mktemp("stored") / "run.duckdb")
    made = pdtrace("ingest", DEMO, "-o", target)
    assert made.returncode == 0, made.stderr
    return target


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A table of requests as a .duckdb file."""
    target = str(tmp_path_factory.mktemp("small") / "small.duckdb")
    assert pdtrace("ingest", SMALLEST, "-o", target).returncode == 0
    return target


def balanced(result: dict) -> None:
    """read = kept + skipped, and the reasons add up."""
    for source in result["sources"]:
        assert source["rows_read"] == source["rows_kept"] + source["rows_skipped"], source
        assert source["rows_skipped"] == sum(source["skipped_reasons"].values()), source


def test_diagnosis_as_json_fits_its_schema_and_balances(stored: str) -> None:
    done = pdtrace("diagnose", stored, "--format", "json", "--slo", "ttft=500ms,tpot=50ms")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    schema = json.loads((files("pdtrace.schemas") / "diagnosis.schema.json").read_text("utf-8"))
    jsonschema.validate(result, schema)
    balanced(result)


def test_markdown_and_text_say_the_verdict(small: str) -> None:
    text = pdtrace("diagnose", small).stdout
    assert "\x1b[" not in text
    markdown = pdtrace("diagnose", small, "--format", "md").stdout
    assert markdown.count("|") > 20


def test_standard_input_is_read_by_a_real_process() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pdtrace", "diagnose", "-", "--format", "json"],
        input=Path(SMALLEST).read_bytes(), capture_output=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["deployments"][0]["requests"]["count"] == 20


def test_a_closed_pipe_ends_quietly(stored: str, tmp_path: Path) -> None:
    own = tmp_path / "own.duckdb"  # whatever else in this process still has the other one open
    own.write_bytes(Path(stored).read_bytes())
    process = subprocess.Popen(
        [sys.executable, "-m", "pdtrace", "query", "phases", str(own), "--format", "json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout
    process.stdout.read(10)
    process.stdout.close()
    assert process.stderr
    error = process.stderr.read()
    process.stderr.close()
    assert (process.wait(120), error) == (0, b"")


def test_a_process_ends_with_all_that_was_registered_and_printed(tmp_path: Path) -> None:
    program = "import atexit; atexit.register(print, 'last'); from pdtrace.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "schema", "not_there"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stdout, "not_there" in done.stderr) == (1, "last\n", True)
    profile = tmp_path / "profile"  # who watches the process has a say in its end
    watched = [sys.executable, "-m", "cProfile", "-o", str(profile), "-m", "pdtrace", "--version"]
    subprocess.run(watched, check=True, timeout=120)
    assert profile.stat().st_size


@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [
        (["diagnose", SMALLEST, "--check", "ttft_p50<1ms"], 3, "FAILED"),
        (["ingest", SMALLEST, "-o", "out.duckdb"], 0, ""),
        (["diagnose", "not-there"], 1, "error: not-there"),
    ],
)
def test_what_goes_to_a_closed_output_goes_nowhere(
    tmp_path: Path, arguments: list[str], code: int, error: str
) -> None:
    """As with `>&-`: all else is done, the exit code is as ever, and no file gets the number of the closed one."""
    shell = ["sh", "-c", 'exec "$@" >&-', "sh"]
    done = subprocess.run(
        [*shell, sys.executable, "-W", "error", "-m", "pdtrace", *arguments],
        cwd=tmp_path, stderr=subprocess.PIPE, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert error in done.stderr
    assert "Traceback" not in done.stderr
    assert bool(error) or not done.stderr
    made = tmp_path / "out.duckdb"
    assert not made.exists() or pdtrace("query", "requests", str(made)).stdout.count("\n") > 1


def test_checks_decide_the_exit_code(small: str) -> None:
    fine = pdtrace("diagnose", small, "--check", "ttft_p50<60m")
    assert fine.returncode == 0, fine.stderr
    failed = pdtrace("diagnose", small, "--check", "ttft_p50<1ms")
    assert failed.returncode == 3
    assert "FAILED" in failed.stderr
    unknown = pdtrace("diagnose", small, "--check", "itl_p99<1s")
    assert unknown.returncode == 3
    assert "cannot be checked" in unknown.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["--slo", "quick"],
        ["--slo", "ttft=-5ms"],
        ["--slo", "ttft=nan"],
        ["--slo", ""],
        ["--slo", "ttft=500ms,,"],
        ["--check", "ttft_p95"],
        ["--check", "ttft_p95<soon"],
        ["--check", "failed<1.2.3"],
        ["--check", "failed<."],
        ["--check", "attainment>=95%"],  # of which limits?
        ["--since", "yesterday"],
        ["--until", "2026-13-01"],
        ["--since", "0001-01-01"],
        ["--since", "9999-12-31T23:59:59"],
        ["--since", "2026-01-02", "--until", "2026-01-01"],
    ],
)
def test_bad_option_values_are_usage_errors_with_a_way_out(arguments: list[str]) -> None:
    done = pdtrace("diagnose", SMALLEST, *arguments)
    assert done.returncode == 2, done
    assert done.error
    assert "hint: " in done.stderr


def test_bad_usage_exits_with_2() -> None:
    assert pdtrace("diagnose").returncode == 2
    assert pdtrace("nonsense").returncode == 2
    assert pdtrace("query", "requests", SMALLEST, "--limit", "-1").returncode == 2
    assert pdtrace("query", "requests", SMALLEST, "--param", "x").returncode == 2
    assert pdtrace("diagnose", SMALLEST, "--format", "xml").returncode == 2


def test_ingest_makes_a_file_that_every_command_takes(stored: str) -> None:
    again = pdtrace("ingest", DEMO, "-o", stored)
    assert again.returncode == 1
    assert "exists already" in again.error
    direct, kept = (
        json.loads(pdtrace("diagnose", p, "--format", "json").stdout) for p in (DEMO, stored)
    )
    assert kept == direct
    assert pdtrace("coverage", stored).returncode == 0
    assert "ttft_ms" in pdtrace("query", "requests", stored, "--format", "csv").stdout
    assert pdtrace("explain", "slowest", stored).returncode == 0
    assert [p.name for p in Path(stored).parent.iterdir()] == ["run.duckdb"]


def test_a_window_cuts_a_file_as_it_cuts_the_dumps(stored: str) -> None:
    result = json.loads(pdtrace("diagnose", stored, "--format", "json").stdout)
    middle = "2026-11-29T23:00:00Z"
    window = result["deployments"][0]["window"]
    assert window["start"] < middle < window["end"], window
    direct, kept = (
        json.loads(pdtrace("diagnose", p, "--since", middle, "--format", "json").stdout)
        for p in (DEMO, stored)
    )
    assert kept["deployments"] == direct["deployments"]
    assert (
        0
        < kept["deployments"][0]["requests"]["count"]
        < result["deployments"][0]["requests"]["count"]
    )


def test_windows_that_hold_nothing_are_told(stored: str, small: str) -> None:
    outside = pdtrace("diagnose", stored, "--since", "2030-01-01")
    assert outside.returncode == 1
    assert "nothing happened inside" in outside.error
    timeless = pdtrace("diagnose", small, "--since", "2020-01-01")
    assert timeless.returncode == 1
    assert "no time of day" in timeless.error


def test_a_store_does_not_mix_with_other_files(small: str) -> None:
    done = pdtrace("diagnose", small, SMALLEST)
    assert done.returncode == 2
    assert "cannot be combined" in done.error


def test_files_that_are_no_store_of_ours_are_told(tmp_path: Path, small: str) -> None:
    foreign = str(tmp_path / "foreign.duckdb")
    with duckdb.connect(foreign) as connection:
        connection.execute("CREATE TABLE t AS SELECT 1 AS a")
    done = pdtrace("diagnose", foreign)
    assert done.returncode == 1
    assert "not one that pdtrace made" in done.error
    old = tmp_path / "old.duckdb"
    old.write_bytes(Path(small).read_bytes())
    with duckdb.connect(str(old)) as connection:
        connection.execute("DROP TABLE legs CASCADE")
    done = pdtrace("diagnose", str(old))
    assert done.returncode == 1
    assert "another version" in done.error
    cut = tmp_path / "cut.duckdb"
    cut.write_bytes(Path(small).read_bytes()[:20_000])
    assert pdtrace("diagnose", str(cut)).returncode == 1
    garbage = tmp_path / "garbage.duckdb"
    garbage.write_bytes(bytes(8) + b"DUCK" + bytes(5000))
    done = pdtrace("diagnose", str(garbage))
    assert done.returncode == 1
    assert "cannot be opened" in done.error


def test_a_store_with_other_queries_gets_ours(tmp_path: Path, small: str) -> None:
    other = tmp_path / "other.duckdb"
    other.write_bytes(Path(small).read_bytes())
    with duckdb.connect(str(other)) as connection:
        connection.execute("UPDATE facts SET value = 'older' WHERE key = '_schema'")
        connection.execute("CREATE OR REPLACE VIEW phase_summary AS SELECT 1 AS a")
    assert pdtrace("diagnose", str(other)).stdout == pdtrace("diagnose", small).stdout


def test_ingest_never_destroys_what_is_not_its_own(tmp_path: Path) -> None:
    table = tmp_path / "requests.csv"
    table.write_bytes(Path(SMALLEST).read_bytes())
    for arguments, words in (
        (["-o", str(table), "--force"], "is one of the inputs"),
        (["-o", str(tmp_path)], "is a folder"),
        (["-o", str(tmp_path / "no" / "x.duckdb")], "no such folder"),
        (["-o", "/proc/x.duckdb"], "cannot be written"),
    ):
        done = pdtrace("ingest", str(table), *arguments)
        assert done.returncode == 1, arguments
        assert words in done.error
    note = tmp_path / "note.txt"
    note.write_text("mine")
    done = pdtrace("ingest", str(table), "-o", str(note), "--force")
    assert "does not replace it" in done.error
    assert note.read_text() == "mine"
    target = tmp_path / "run.duckdb"
    for _ in range(2):
        done = pdtrace("ingest", str(tmp_path), "-o", str(target), "--force")
        assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["note.txt", "requests.csv", "run.duckdb"]
    assert json.loads(pdtrace("diagnose", str(target), "--format", "json").stdout)


def test_an_interrupted_ingest_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "big.csv").write_text("request,ttft_ms,output_tokens\n" + "a,1,1\n" * 2_000_000)
    for sign, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        process = subprocess.Popen(
            [sys.executable, "-m", "pdtrace", "ingest", str(folder), "-o", str(folder / "x.duckdb")],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip
        while process.poll() is None and not list(folder.glob(".pdtrace-*")):
            time.sleep(0.01)
        process.send_signal(sign)
        assert process.stderr
        errors = process.stderr.read()
        process.stderr.close()
        assert process.wait(60) == code, errors
        assert b"Traceback" not in errors
        assert [p.name for p in folder.iterdir()] == ["big.csv"]


def test_ctrl_c_inside_a_result_of_duckdb_is_an_interruption(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise RuntimeError("Query interrupted")

    monkeypatch.setattr("pdtrace.files.take", interrupted)
    with tempfile.TemporaryDirectory() as folder:
        done = pdtrace("ingest", SMALLEST, "-o", f"{folder}/x.duckdb")
        assert (done.returncode, done.stderr.strip()) == (130, "interrupted")
        assert not list(Path(folder).iterdir())


def test_a_draft_without_room_is_told_by_the_name_that_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "x.duckdb"
    monkeypatch.setattr("pdtrace._tables.Tables.settle", lambda _: "No space left on device")
    done = pdtrace("ingest", SMALLEST, "-o", str(target))
    assert done.error == f"error: {target}: cannot be written: No space left on device"
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_made_is_told_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a read-only disk even the removal of what is not there fails."""

    def read_only(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", read_only)
        patch.setattr(Path, "open", read_only)
        with pytest.raises(PdtraceError) as raised, outputs.writing(str(tmp_path / "x.html")):
            pass
    assert raised.value.message == f"{tmp_path}/x.html: cannot be written: Read-only file system"


@pytest.mark.parametrize(
    "arguments",
    [
        ["report", SMALLEST, "-o", "x.pdf"],
        ["compare", SMALLEST, SMALLEST, "--report", "x.pdf"],
        ["whatif", SMALLEST, "--pd", "1:1", "--workers", "2"],
    ],
)
def test_what_cannot_be_meant_is_told_before_anything_is_read(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: object, **__: object) -> None:
        raise AssertionError("it was read")

    monkeypatch.setattr("pdtrace.api.Trace.read", read)
    done = pdtrace(*arguments)
    assert done.returncode == 2, done
    assert done.error
    assert "hint: " in done.stderr


def test_names_that_are_no_utf8_are_told(small: str, tmp_path: Path) -> None:
    odd = os.fsdecode(b"run\xff.duckdb")
    shutil.copy(small, tmp_path / odd)
    for arguments in (
        ["diagnose", str(tmp_path / odd)],
        ["ingest", SMALLEST, "-o", str(tmp_path / f"other-{odd}")],
    ):
        assert "not UTF-8" in pdtrace(*arguments).error
    assert pdtrace("query", f'SELECT 1 AS "{odd}"', small).error.startswith("error: SQL: ")
    assert pdtrace("slow", small, "--where", f"model = '{odd}'").returncode == 2


def test_standard_input_has_a_name() -> None:
    done = pdtrace("diagnose", "-", stdin=Path(SMALLEST).read_bytes())
    assert "standard input ──" in done.stdout


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("pdtrace query slow_", ["slow_first_token", "slow_stream", "slow_worker"]),
        ("pdtrace schema request_mar", ["request_marks"]),
        ("pdtrace export --picture stu", ["stutter"]),
        ("pdtrace demo --scenario exclusive_r", ["exclusive_rare"]),
    ],
)
def test_the_shell_completes_names(words: str, names: list[str]) -> None:
    parts = words.split()
    found = ShellComplete(cli, {}, "pdtrace", "_PDTRACE_COMPLETE").get_completions(
        parts[1:-1], parts[-1]
    )
    assert [item.value for item in found] == names


def test_queries_by_name_and_by_sql(small: str) -> None:
    rows = pdtrace("query", "SELECT count(*) AS n FROM requests;", small, "--format", "csv")
    assert rows.stdout == "n\n20\n"
    assert "no query named" in pdtrace("query", "nothing_like_it", small).error
    assert "has no parameter" in pdtrace("query", "slow_stream", small, "--param", "x=1").error
    many = pdtrace("query", "SELECT * FROM range(10000000000)", small, "--limit", "3")
    assert many.stdout.split() == ["range", "0", "1", "2"]
    assert "more rows" in many.stderr


@pytest.mark.parametrize(
    "text",
    [
        "DROP TABLE requests",
        "SELECT 1; DROP TABLE requests",
        "WITH x AS (SELECT 1) DELETE FROM requests",
        "COPY requests TO '/tmp/x.csv'",
        "ATTACH '/tmp/x.duckdb'",
        "PRAGMA database_list",
        "SET enable_external_access = true",
        "INSTALL httpfs",
        "SELECT * FROM read_text('/etc/hostname')",
        "SELECT * FROM '/etc/hostname'",
        "SELECT * FROM glob('/*')",
        "SELECT * FROM statements",
        "SELECT",
        "SELECT nothing FROM requests",
        "",
        "/* */",
        "'",
        "SELECT 1/0::INTEGER, error('boom')",
    ],
)
def test_sql_that_is_not_one_select_over_the_tables_is_refused(small: str, text: str) -> None:
    before = Path(small).read_bytes()
    done = pdtrace("query", text, small)
    assert done.returncode == 1
    assert done.error
    assert Path(small).read_bytes() == before


def test_explain_names_what_it_cannot_find(small: str, stored: str) -> None:
    for wanted in ("no-such-id", "%", "' OR 1=1 --", "\x1b[31m", "\udcff", ""):
        done = pdtrace("explain", wanted, small)
        assert done.returncode == 1, wanted
        assert "no request has the id" in done.error
        assert "\x1b" not in done.stderr
    several = pdtrace("explain", "cmpl-", stored)
    assert several.returncode == 1
    assert "fits 20 or more requests" in several.error


def test_sources_and_schema_list_what_there_is() -> None:
    assert "vLLM" in pdtrace("sources").stdout
    assert "requests" in pdtrace("schema").stdout
    assert "ttft_ms" in pdtrace("schema", "requests").stdout
    assert "nothing is named" in pdtrace("schema", "nonsense").error
