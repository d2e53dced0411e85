"""Of an error's text its kind stays: what it quotes of prompts and answers is in no table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from door import pdtrace

from pdtrace.collectors._errors import error_kind

SECRET = "Tell me a secret"
FIXTURES = Path(__file__).parent / "fixtures"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (SECRET, "error"),
        ("What is love", "error"),
        ("Password", "error"),
        ("limit 4111111111111111", "error"),
        ("Bad Request", "Bad Request"),
        ("429 Too Many Requests", "429 Too Many Requests"),
        ("rate limit exceeded", "rate limit exceeded"),
        ("Connection reset by peer", "Connection reset by peer"),
        ("timeout after 30 s", "timeout after 30 s"),
        ("[Errno 111] Connection refused", "[Errno 111] Connection refused"),
        ("context_length_exceeded", "context_length_exceeded"),
        (f"openai.RateLimitError: {SECRET}", "RateLimitError"),
        (f"Traceback (most recent call last):\n{SECRET}\nValueError: {SECRET}", "ValueError"),
        (f"Error code: 400 - {{'error': '{SECRET}'}}", "HTTP 400"),
        (f"Server error '503 Service Unavailable' for url '{SECRET}'", "HTTP 503"),
        ("", None),
        (None, None),
    ],
)
def test_the_kind_of_an_error_quotes_nobody(text: str | None, kind: str | None) -> None:
    assert error_kind(text) == kind


def of_a_table() -> bytes:
    row = {"id": "a", "ttft_ms": 5, "total_ms": 9, "error": SECRET, "finish_reason": SECRET}
    return json.dumps(row).encode() + b"\n" + json.dumps(row | {"id": "b"}).encode() + b"\n"


def of_a_bench() -> bytes:
    made = json.loads(
        (FIXTURES / "vllm_bench" / "synthetic-append.json").read_text().splitlines()[0]
    )
    n = len(made["errors"])
    return json.dumps(made | {"errors": [SECRET] * n, "generated_texts": [SECRET] * n}).encode()


@pytest.mark.parametrize("dump", [of_a_table(), of_a_bench()], ids=["table", "vllm bench"])
def test_no_table_holds_what_an_error_quotes(dump: bytes, tmp_path: Path) -> None:
    (tmp_path / "dump.json").write_bytes(dump)
    target = str(tmp_path / "x.duckdb")
    assert pdtrace("ingest", str(tmp_path / "dump.json"), "-o", target).returncode == 0
    legs = pdtrace("query", "legs", target, "--format", "json").stdout
    assert json.loads(legs)[0]["error"].startswith("error")
    for table in ("legs", "requests", "sources", "skipped", "events", "facts", "reported"):
        assert SECRET not in pdtrace("query", table, target, "--format", "json").stdout
