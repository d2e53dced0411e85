"""A second process decodes blocks of a large OTLP/JSON file: the rows are those of one process, whatever happens to it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from pdtrace.collectors import _otlp_json

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="there only")

# Run in a process of its own: another may only begin where nothing is loaded yet.
SCRIPT = """
    import json, os, sys
    from pdtrace import _no_pandas
    from pdtrace.collectors import _otlp_beside as beside

    path, how, shared = sys.argv[1], sys.argv[2], int(sys.argv[3])
    beside.LEAST_BYTES, beside._BLOCK_BYTES, beside.LEAST_SHARED, beside.SLOTS = 1, 4096, shared, 3

    def prepare():
        _no_pandas.leave_out()
        from pdtrace.collectors import _otlp_json
        _otlp_json.BLOCK_BYTES = 4096
        if how == "dies later":
            write = beside.Helper._send
            def send(self, number, *rest):
                if number == 5:
                    os._exit(9)
                write(self, number, *rest)
            beside.Helper._send = send

    used = []
    result = beside.Helper.result
    def counted(self, number, block):
        found = result(self, number, block)
        used.append(found is not None)
        return found
    beside.Helper.result = counted

    class Source:
        name, number, mtime_ns, keep_content = "spans.jsonl", 0, None, how == "content"
        def __init__(self): self.path = path
        def open(self): return open(path, "rb")

    class Sink:
        def __init__(self): self.rows, self.skipped, self.count, self.units = {}, [], 0, []
        def unit(self, name): self.units.append(name)
        def read(self, n): self.count += n
        def skip(self, record, reason, excerpt=None): self.skipped.append((record, reason))
        def fact(self, worker, key, value): self.rows.setdefault("facts", []).append([worker, key, value])
        def add(self, table, batch, record="record"):
            rows = batch if isinstance(batch, list) else batch.to_pylist()
            rows = [{k: v for k, v in row.items() if v is not None} for row in rows]
            self.rows.setdefault(table, []).extend(rows)

    with beside.beginning([path], keep_content=False, prepare=prepare):
        children = open(f"/proc/self/task/{os.getpid()}/children").read().split()
        _no_pandas.leave_out()
        from pdtrace.collectors import _otlp_json, otlp
        _otlp_json.BLOCK_BYTES = 4096
        if how == "grows":
            with open(path, "ab") as file:
                file.write(b'{"resourceSpans":[]}\\n' * 400)
        if how == "written anew":
            with open(path, "r+b") as file:
                text = file.read().replace(b'"intValue": "1', b'"intValue": "2')
                file.seek(0)
                file.write(text)
        sink = Sink()
        otlp.read(Source(), sink)
    left = open(f"/proc/self/task/{os.getpid()}/children").read().split()
    again = Sink()
    otlp.read(Source(), again)
    for one in (sink, again):
        one.rows["resources"].sort(key=lambda row: row["resource"])
    same = vars(sink) == vars(again)
    print(json.dumps({"children": len(children), "left": left, "used": used, "same": same, "count": sink.count,
                      "resources": len(sink.rows["resources"]), "tables": sorted(sink.rows), "skipped": len(sink.skipped)}))
"""


def _span(n: int) -> dict[str, object]:
    return {
        "traceId": f"{n + 1:032x}", "spanId": f"{n + 1:016x}", "name": "llm_request", "kind": 2,
        "startTimeUnixNano": str(10**18 + n), "endTimeUnixNano": str(10**18 + n + 5),
        "attributes": [
            {"key": "gen_ai.usage.prompt_tokens", "value": {"intValue": str(n)}},
            {"key": "gen_ai.prompt", "value": {"stringValue": "secret " * 3}},
        ],
        "status": {},
    }  # fmt: skip


def _line(n: int) -> str:
    name = {"key": "service.name", "value": {"stringValue": f"server {n % 3}"}}
    spans = [_span(8 * n + k) for k in range(8)]
    scope = {"scope": {"name": "vllm"}, "spans": spans}
    return json.dumps(
        {"resourceSpans": [{"resource": {"attributes": [name]}, "scopeSpans": [scope]}]}
    )


def _log(n: int) -> str:
    record = {"timeUnixNano": str(10**18 + n), "body": {"stringValue": f"line {n}"}}
    return json.dumps({"resourceLogs": [{"scopeLogs": [{"logRecords": [record]}]}]})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Sixty lines of eight spans, a line of log records in the middle, one that is no JSON, the last one cut off."""
    lines = [_line(n) for n in range(60)]
    lines[30], lines[45] = _log(30), "{nonsense"
    path = tmp_path / "spans.jsonl"
    path.write_text("\n".join(lines)[:-40])
    return path


def _read(path: Path, how: str, shared: int = 100) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", dedent(SCRIPT), str(path), how, str(shared)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    assert found["children"] == 1
    assert found["left"] == []
    assert found["same"]
    assert found["skipped"] == 2
    assert found["resources"] == 3 + (1 if "log_records" in found["tables"] else 0)  # type: ignore[operator]
    return found


@pytest.mark.parametrize("shared", [1, 100])
def test_two_processes_read_what_one_reads(file: Path, shared: int) -> None:
    found = _read(file, "well", shared)
    used = found["used"]
    assert isinstance(used, list)
    if shared == 100:  # else who is quicker takes the next
        assert used.count(True) >= 3
        assert False in used  # blocks that hold more than spans are decoded here
    assert {"log_records", "spans", "facts"} <= set(found["tables"])  # type: ignore[call-overload]


@pytest.mark.parametrize("how", ["dies later", "grows", "content", "written anew"])
def test_without_the_other_process_this_one_decodes(file: Path, how: str) -> None:
    used = _read(file, how)["used"]
    assert isinstance(used, list)
    if how in ("content", "written anew"):
        assert True not in used
    else:
        assert True in used


FEW_FILES = """
    import os, resource, sys
    from pdtrace.collectors import _otlp_beside as beside

    beside.LEAST_BYTES, beside._LEAST_OPEN = 1, int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_NOFILE, (16, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    with beside.beginning([sys.argv[1]], keep_content=False, prepare=lambda: None):
        print(beside._running, len([os.open(os.devnull, os.O_RDONLY) for _ in range(9)]))
"""


@pytest.mark.parametrize("least", [0, 64])
def test_where_few_files_may_be_open_none_is_taken_away(file: Path, least: int) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", dedent(FEW_FILES), str(file), str(least)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("[] 9\n", "")


@pytest.mark.parametrize(
    "lengths", [[7] * 40, [90, 3, 250, 1, 1, 60], [130], [10, 10, 400], [49, 0, 0, 51, 99, 5]]
)
@pytest.mark.parametrize("ended", [True, False])
def test_blocks_are_where_their_places_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lengths: list[int], ended: bool
) -> None:
    """Lines that end at a block's border, are longer than blocks, empty, or lack their end."""
    monkeypatch.setattr(_otlp_json, "BLOCK_BYTES", 50)
    monkeypatch.setattr(_otlp_json, "_LOOK_BYTES", 16)
    text = b"\n".join(bytes([65 + n]) * length for n, length in enumerate(lengths)) + b"\n" * ended
    path = tmp_path / "lines"
    path.write_bytes(text)
    with path.open("rb") as file:
        places = list(_otlp_json.line_places(file.fileno()))
        blocks = list(_otlp_json.line_blocks(file.read(50), file, b"  "))
    padded = [b"".join(lines.pieces[:-1]) for lines in blocks if len(lines.pieces) > 1]
    assert [text[begin:end] for begin, end in places] == padded
    assert b"".join([*padded, *(lines.text() for lines in blocks if len(lines.pieces) == 1)]) == text  # fmt: skip
    assert [lines.cut for lines in blocks if lines.cut] == [True] * (not ended)
    for lines in blocks:
        whole = lines.text()
        assert (len(lines), lines.ends(9)) == (len(whole), (whole[:9], whole[-9:]))
