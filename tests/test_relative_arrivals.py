"""Traces whose times start at 0: arrivals are known from each other, not on a clock."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdtrace import coverage
from pdtrace.api import Trace

MOONCAKE = "".join(
    f'{{"timestamp": {t}, "input_length": 6758, "output_length": 500, "hash_ids": [0, {t}]}}\n'
    for t in (0, 3000)
)
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,Conversation log\n45,ChatGPT,1087,230,1317,Conversation log\n"


@pytest.mark.parametrize(
    ("name", "text", "relative"),
    [
        ("a.jsonl", MOONCAKE, True),
        ("a.csv", BURST, True),
        ("a.csv", "id,input_tokens,output_tokens\n1,3,100\n2,4,80\n", False),
    ],
)
def test_what_is_missing_is_a_dated_clock(
    tmp_path: Path, name: str, text: str, relative: bool
) -> None:
    (tmp_path / name).write_text(text)
    trace = Trace.read([tmp_path])
    (row,) = [r for r in coverage.items(trace.store) if r["item"] == "arrival_time"]
    assert row["present"] == 0
    assert (row["words"] == coverage.RELATIVE_ARRIVALS) == relative
    assert ("with its date" in row["switch"]) == relative
