"""LMCache's lookups tell whose prompts share beginnings; KV cache events do not, and are named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from door import pdtrace

from pdtrace.api import Trace


def lookup(n: int, hashes: list[object], **more: object) -> dict[str, object]:
    return {
        "timestamp": 1_790_000_000.25 + n, "request_id": f"cmpl-{n}-0", "model_name": "m", "chunk_size": 256,
        "seq_len": 600, "dtypes": ["torch.bfloat16"], "shapes": [[2, 3]], "chunk_hashes": hashes, **more,
    }  # fmt: skip


def written(folder: Path, rows: list[object]) -> Path:
    path = folder / "lookup_hashes_20260921_141320_000001.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("odd", "requests"),
    [
        ({"chunk_hashes": ["-0x5"]}, 2),
        ({"chunk_hashes": ["0x-5"]}, 2),
        ({"seq_len": 2**63}, 2),
        ({"seq_len": 1e300}, 2),
        ({"seq_len": -1}, 2),
        ({"chunk_size": 2**70}, 3),
        ({"timestamp": 1e12}, 3),
        ({"timestamp": -1e300}, 3),
    ],
)
def test_one_lookup_with_an_absurd_number_costs_no_other(
    odd: dict[str, object], requests: int, tmp_path: Path
) -> None:
    rows: list[object] = [lookup(0, ["0x10"]), {**lookup(1, ["0x10"]), **odd}, lookup(2, ["0x10"])]
    with Trace.read([str(written(tmp_path, rows))]) as trace:
        assert trace.sql("SELECT count(*) FROM legs").item() == requests
        assert trace.sql("SELECT count(*) FROM prefix_blocks").item() == requests
        assert trace.sql("SELECT count(*) FROM facts WHERE key = '_problem'").item() == 0


def test_lookups_are_requests_whose_prompts_share_beginnings(tmp_path: Path) -> None:
    long = "0x" + "ab" * 32
    rows: list[object] = [
        lookup(0, ["0x10", "0xfedcba9876543210"]),
        lookup(0, ["0x10", "0xfedcba9876543210"], timestamp=1_790_000_009.0),  # tried again
        lookup(1, ["0x10", long]),
        lookup(2, ["0x10", long]),
        lookup(3, ["no hash"]),
        {"chunk_size": 256, "seq_len": 5},
    ]
    with Trace.read([str(written(tmp_path, rows))]) as trace:
        legs = trace.sql(
            "SELECT request_id, start_ns, prompt_tokens, model, status FROM legs ORDER BY record"
        )
        assert legs.rows() == [
            (f"cmpl-{n}-0", (1_790_000_000 + n) * 10**9 + 250_000_000, 600, "m", "unknown") for n in (0, 1, 2)
        ]  # fmt: skip
        blocks = trace.sql("SELECT block_tokens, hashes FROM prefix_blocks ORDER BY record")
        assert blocks["block_tokens"].to_list() == [256] * 3
        assert blocks["hashes"][0].to_list() == [16, 0xFEDCBA9876543210]
        assert blocks["hashes"][1].to_list() == blocks["hashes"][2].to_list()
        reasons = dict(trace.sql("SELECT reason, records FROM skipped").rows())
        assert reasons == {"looked up again": 1, "no lookup of chunks": 2}
        seen = trace.store.query("prefix_reuse").sort("request")
        assert seen["seen_tokens"].to_list() == [0, 256, 512]
        assert trace.sql("SELECT DISTINCT mode FROM requests").item() == "unknown"


@pytest.mark.parametrize(
    "content",
    [
        b'{"timestamp":1,"event":{"worker_id":7,"event":{"event_id":1,"data":{"stored":{"parent_hash":null,"blocks":[]}}}}}\n',
        b'{"ts":1.0,"events":[{"type":"BlockStored","block_hashes":[1],"parent_block_hash":null,"token_ids":[1],"block_size":16}]}\n',
        b'["BlockRemoved",[1,2]]\n',
        b"\x93\xcbA\xda\xb0\x00\x00\x00\x00\x00\x91\x97\xabBlockStored\x91\x01\xc0\x92\x01\x02\x10\xc0\xc0\x00",
    ],
)
def test_kv_events_are_recognised_and_it_is_said_why_they_are_not_used(
    tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "kv_events.jsonl").write_bytes(content)
    written(tmp_path, [lookup(0, ["0x10"])])
    found = json.loads(pdtrace("coverage", "--format", "json", str(tmp_path)).stdout)["sources"]
    (why,) = [row["why"] for row in found if row["path"].endswith("kv_events.jsonl")]
    assert why.startswith("KV cache events")
    assert "not whose prompts they are" in why
