"""Whatever carried a log line is taken off: its text, its container and its stamp remain."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import IO

import polars as pl
import pytest

from pdtrace.collectors import _loglines as loglines
from pdtrace.model import Head

NS = 1_000_000_000
T0 = 1795993004 * NS  # 2026-11-29T22:56:44Z


@dataclass
class Bytes:
    """A source in memory."""

    data: bytes
    path: str = "folder/server.log"
    name: str = "server.log"
    number: int = 0
    mtime_ns: int | None = None
    keep_content: bool = False

    def open(self) -> IO[bytes]:
        return io.BytesIO(self.data)


def lines(data: bytes, size: int = 1 << 20) -> list[tuple[int, str, int | None, str]]:
    frames = list(loglines.log_batches(Bytes(data), size))
    return (
        list(pl.concat(frames).select("record", "stream", "prefix_time_ns", "text").iter_rows())
        if frames
        else []
    )


@pytest.mark.parametrize(
    ("data", "stream", "time_ns"),
    [
        (b"hello\n", "", None),
        (b"vllm-prefill-1  | hello\n", "vllm-prefill-1", None),
        (b"\x1b[36mvllm-prefill-1  | \x1b[0m2026-11-29T22:56:44.5Z hello\n", "vllm-prefill-1", T0 + NS // 2),
        (b"stack_vllm.1.abc@node-a    | hello\n", "stack_vllm.1.abc@node-a", None),
        (b"[pod/vllm-0/main] hello\n", "pod/vllm-0/main", None),
        (b"[pod/vllm-0/main] 2026-11-29T22:56:44.000000001Z hello\n", "pod/vllm-0/main", T0 + 1),
        (b"2026-11-29T23:56:44+01:00 hello\n", "", T0),
        (b"2026-11-29T22:56:44.1Z stdout F hello\n", "", T0 + NS // 10),
        (b'{"log":"hello\\n","stream":"stderr","time":"2026-11-29T22:56:44Z"}\n', "", T0),
        (b'{"log":"hello\\n","time":"2026-11-29T22:56:44Z","kubernetes":{"pod_name":"p-0","container_name":"c"}}\n', "pod/p-0/c", T0),
        (b'{"__REALTIME_TIMESTAMP":"1795993004000000","MESSAGE":"hello","_HOSTNAME":"h","_SYSTEMD_UNIT":"u"}\n', "h/u", T0),
        (b"2026-11-29T22:56:44+0000 host-a vllm[123]: hello\n", "host-a/vllm", T0),
        (b"Nov 29 22:56:44 host-a vllm[123]: hello\n", "host-a/vllm", None),
    ],
)  # fmt: skip
def test_a_wrapper_is_taken_off(data: bytes, stream: str, time_ns: int | None) -> None:
    assert lines(data * 3) == [(n, stream, time_ns, "hello") for n in range(3)]


def test_stern_needs_many_lines_with_few_names() -> None:
    assert lines(b"vllm-0-abcde main hello\n" * 12)[0] == (
        0,
        "pod/vllm-0-abcde/main",
        None,
        "hello",
    )
    assert lines(b"engine-core went away\n")[0][3] == "engine-core went away"


@pytest.mark.parametrize(
    "rest", [" INFO dynamo_llm::http: ready", "ERROR http-request{method=POST}: x"]
)
def test_the_stamp_of_a_rust_program_is_its_own(rest: str) -> None:
    text = f"2026-11-29T22:56:44.123456Z {rest}"
    assert lines(text.encode() + b"\n")[0] == (0, "", None, text)


def test_colours_carriage_returns_and_broken_bytes_do_no_harm() -> None:
    data = b"\x1b[1;36m(A pid=1)\x1b[0;0m x\r\n 10%\r100% done\n\x00\xffb\n\nhalf"
    assert [text for *_, text in lines(data)] == ["(A pid=1) x", "100% done", "�b", "", "half"]
    assert pl.concat(list(loglines.log_batches(Bytes(data))))["whole"].to_list() == [True] * 4 + [
        False
    ]


def test_lines_split_by_the_runtime_are_joined_also_across_batches() -> None:
    data = b"2026-11-29T22:56:44Z stdout P ab\n2026-11-29T22:56:45Z stderr F other\n2026-11-29T22:56:46Z stdout F cd\n"
    assert lines(data.replace(b"stderr F other", b"stdout P --"))[0] == (0, "", T0, "ab--cd")
    # two containers whose halves interleave, read in tiny batches
    two = b"".join(
        b"%s  | %s\n" % (name, text)
        for name, text in [
            (b"a-1", b"2026-11-29T22:56:44Z stdout P x"), (b"b-1", b"2026-11-29T22:56:44Z stdout P u"),
            (b"a-1", b"2026-11-29T22:56:45Z stdout F y"), (b"b-1", b"2026-11-29T22:56:45Z stdout F v"),
        ]
    )  # fmt: skip
    assert [(r, s, t) for r, s, _, t in lines(two)] == [(0, "a-1", "xy"), (1, "b-1", "uv")]
    assert sorted(t for *_, t in lines(two * 20, size=64)) == sorted(["xy", "uv"] * 20)


def test_batches_keep_count_and_order() -> None:
    data = b"".join(b"line %d\n" % n for n in range(1000))
    found = lines(data, size=100)
    assert [row[0] for row in found] == list(range(1000))
    assert [row[3] for row in found] == [f"line {n}" for n in range(1000)]


def test_a_head_is_unwrapped_without_its_cut_line() -> None:
    head = Head("x.log", "x.log", b"a-1  | one\na-1  | two\na-1  | thr", complete=False)
    assert loglines.head_texts(head) == ("one", "two")


def test_an_empty_source_gives_nothing() -> None:
    assert lines(b"") == []
