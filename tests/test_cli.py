"""The door: exit codes, errors in one line, formats."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import jsonschema
import pytest

DEMO = str(files("pdtrace") / "demo")
SMALLEST = Path(__file__).parent / "fixtures" / "table" / "smallest.csv"


def pdtrace(*arguments: str, stdin: bytes | None = None) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "pdtrace", *arguments], capture_output=True, input=stdin, timeout=120
    )
    return subprocess.CompletedProcess(
        done.args, done.returncode, done.stdout.decode(), done.stderr.decode()
    )


def error_of(done: subprocess.CompletedProcess[str]) -> str:
    """The one error line; a traceback fails the test."""
    assert "Traceback" not in done.stderr
    lines = done.stderr.strip().splitlines()
    assert lines[0].startswith("error: ")
    assert all(line.startswith(("error: ", "hint: ")) for line in lines)
    return lines[0]


def test_diagnosis_as_json_fits_its_schema_and_balances() -> None:
    done = pdtrace("diagnose", DEMO, "--format", "json", "--slo", "ttft=500ms,tpot=50ms")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    schema = json.loads((files("pdtrace.schemas") / "diagnosis.schema.json").read_text("utf-8"))
    jsonschema.validate(result, schema)
    for source in result["sources"]:
        assert source["rows_read"] == source["rows_kept"] + source["rows_skipped"], source
        assert source["rows_skipped"] == sum(source["skipped_reasons"].values()), source


def test_markdown_and_text_say_the_verdict() -> None:
    text = pdtrace("diagnose", str(SMALLEST)).stdout
    assert "\x1b[" not in text
    markdown = pdtrace("diagnose", str(SMALLEST), "--format", "md").stdout
    assert markdown.count("|") > 20


def test_standard_input_is_read() -> None:
    done = pdtrace("diagnose", "-", "--format", "json", stdin=SMALLEST.read_bytes())
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["deployments"][0]["requests"]["count"] == 20


def test_checks_decide_the_exit_code() -> None:
    fine = pdtrace("diagnose", str(SMALLEST), "--check", "ttft_p50<1h".replace("1h", "60m"))
    assert fine.returncode == 0, fine.stderr
    failed = pdtrace("diagnose", str(SMALLEST), "--check", "ttft_p50<1ms")
    assert failed.returncode == 3
    assert "FAILED" in failed.stderr
    unknown = pdtrace("diagnose", str(SMALLEST), "--check", "itl_p99<1s")
    assert unknown.returncode == 3
    assert "cannot be checked" in unknown.stderr


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("empty.log", b""),
        ("binary.bin", bytes(range(256)) * 50),
        ("other.json", b'{"menu": {"id": "file", "items": [1, 2, 3]}}'),
        ("prose.txt", b"Dear diary,\nnothing happened today.\n" * 20),
    ],
)
def test_what_is_not_ours_is_one_clear_error(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    done = pdtrace("diagnose", str(tmp_path))
    assert done.returncode == 1
    assert "no format recognised" in error_of(done)
    assert name in done.stderr


def test_empty_folder_and_missing_path_are_clear_errors(tmp_path: Path) -> None:
    empty = pdtrace("diagnose", str(tmp_path))
    assert empty.returncode == 1
    assert "nothing to read" in error_of(empty)
    missing = pdtrace("diagnose", str(tmp_path / "nowhere"))
    assert missing.returncode == 1
    assert "no such file" in error_of(missing)


def test_bad_options_are_usage_errors_with_a_way_out() -> None:
    assert pdtrace("diagnose").returncode == 2
    assert pdtrace("nonsense").returncode == 2
    assert "write it like" in pdtrace("diagnose", str(SMALLEST), "--slo", "quick").stderr


def test_ingest_makes_a_file_that_every_command_takes(tmp_path: Path) -> None:
    target = str(tmp_path / "run.duckdb")
    made = pdtrace("ingest", DEMO, "-o", target)
    assert made.returncode == 0, made.stderr
    again = pdtrace("ingest", DEMO, "-o", target)
    assert again.returncode == 1
    assert "exists already" in error_of(again)
    direct, stored = (
        json.loads(pdtrace("diagnose", p, "--format", "json").stdout) for p in (DEMO, target)
    )
    assert stored["deployments"] == direct["deployments"]
    assert pdtrace("coverage", target).returncode == 0
    assert "ttft_ms" in pdtrace("query", "requests", target, "--limit", "1").stdout
    assert pdtrace("explain", "slowest", target).returncode == 0
    assert [p.name for p in tmp_path.iterdir()] == ["run.duckdb"]


def test_queries_by_name_and_by_sql() -> None:
    rows = pdtrace("query", "SELECT count(*) AS n FROM requests", str(SMALLEST), "--format", "csv")
    assert rows.stdout == "n\n20\n"
    assert "only SELECT" in error_of(pdtrace("query", "DROP TABLE requests", str(SMALLEST)))
    assert "no query named" in error_of(pdtrace("query", "nothing_like_it", str(SMALLEST)))
    files_refused = pdtrace("query", "SELECT * FROM read_text('/etc/hostname')", str(SMALLEST))
    assert files_refused.returncode == 1
    assert "Traceback" not in files_refused.stderr


def test_explain_names_what_it_cannot_find() -> None:
    done = pdtrace("explain", "no-such-id", str(SMALLEST))
    assert done.returncode == 1
    assert "no request has the id no-such-id" in error_of(done)


def test_sources_and_schema_list_what_there_is() -> None:
    assert "vLLM" in pdtrace("sources").stdout
    assert "requests" in pdtrace("schema").stdout
    one = pdtrace("schema", "requests")
    assert "ttft_ms" in one.stdout
    assert "nothing is named" in error_of(pdtrace("schema", "nonsense"))
