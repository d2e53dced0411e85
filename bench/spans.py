"""Makes OTLP spans of LLM serving, in protobuf and as JSON lines, from a seed.

7 spans a request (gateway, router, worker, queue, prefill, kv_transfer, decode), 12 attributes a span,
0-2 events, 4 resource attributes, 4 + 4 workers, about 1,000 spans a message. `unseen` adds 30
attributes to every span whose keys no code has ever heard of.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import orjson

SPANS_PER_MESSAGE = 1022


WORKERS = [
    "gateway",
    "router",
    *(f"prefill-{i}" for i in range(4)),
    *(f"decode-{i}" for i in range(4)),
]


UNSEEN = [f"acme.{kind}.property_{i}" for i in range(10) for kind in ("text", "count", "level")]


Attributes = dict[str, str | int | float]


@dataclass
class Span:
    """A span before it is written in either format."""

    ids: tuple[bytes, bytes, bytes]
    name: str
    kind: int
    start: int
    end: int
    attributes: Attributes
    events: tuple[tuple[str, int], ...] = ()


def requests(count: int, *, unseen: bool) -> Iterator[list[tuple[str, Span]]]:
    """The spans of one request after the other, each with its service."""
    draw = random.Random(11)
    now = 1_790_000_000_000_000_000
    for _ in range(count):
        now += int(draw.expovariate(50) * 1e9)
        trace, spans = draw.randbytes(16), [draw.randbytes(8) for _ in range(7)]
        prompt, output = int(draw.lognormvariate(6.5, 1.1)), 1 + int(draw.expovariate(1 / 200))
        prefill, decode = f"prefill-{draw.randrange(4)}", f"decode-{draw.randrange(4)}"
        routed, queued = now + 300_000, now + 800_000
        started = queued + int(draw.expovariate(1 / 20e6))
        moved = started + prompt * 60_000 + 5_000_000
        landed = moved + prompt * 9_000 + 1_000_000
        end = landed + output * 22_000_000

        def common(phase: str, worker: str, more: Attributes) -> Attributes:
            attributes: Attributes = {
                "gen_ai.request.id": f"chatcmpl-{trace.hex()}",  # noqa: B023
                "gen_ai.request.model": "meta-llama/Llama-3.1-70B-Instruct",
                "gen_ai.operation.name": "chat",
                "gen_ai.usage.input_tokens": prompt,  # noqa: B023
                "gen_ai.usage.output_tokens": output,  # noqa: B023
                "gen_ai.request.max_tokens": 1024,
                "gen_ai.request.temperature": 0.7,
                "llm.serving.phase": phase,
                "llm.serving.worker": worker,
                "llm.serving.cached_tokens": prompt // 3,  # noqa: B023
                **more,
            }
            if unseen:
                for key in UNSEEN:
                    if ".text." in key:
                        attributes[key] = f"{key[-1]}-{draw.randrange(50)}"
                    elif ".count." in key:
                        attributes[key] = draw.randrange(100_000)
                    else:
                        attributes[key] = draw.random()
            return attributes

        root = {"http.response.status_code": 200, "server.address": "10.0.0.1"}
        choice = {"llm.router.policy": "kv_aware", "llm.router.overlap_blocks": prompt // 48}
        latency = {
            "gen_ai.latency.time_to_first_token": (moved - started) / 1e9,
            "gen_ai.latency.e2e": (end - now) / 1e9,
        }
        waiting = {"llm.queue.depth": draw.randrange(64), "llm.queue.policy": "fcfs"}
        chunks = {"llm.prefill.chunks": 1 + prompt // 2048, "llm.batch.size": draw.randrange(1, 32)}
        kv = {"llm.kv.bytes": prompt * 327_680, "llm.kv.backend": "nixl"}
        steps = {"llm.decode.steps": output, "llm.batch.size": draw.randrange(1, 128)}
        first, last = ("first_token", landed + 22_000_000), ("finish", end)
        rows = [
            ("gateway", 0, -1, "POST /v1/chat/completions", 2, now, end + 400_000, common("gateway", "gateway", root), ()),
            ("router", 1, 0, "router.schedule", 1, routed, queued, common("router", "router", choice), ()),
            (prefill, 2, 1, "llm_request", 2, queued, landed, common("worker", prefill, latency), ()),
            (prefill, 3, 2, "queue", 1, queued, started, common("queue", prefill, waiting), ()),
            (prefill, 4, 2, "prefill", 1, started, moved, common("prefill", prefill, chunks), (("chunk", (started + moved) // 2),)),
            (prefill, 5, 2, "kv_transfer", 3, moved, landed, common("kv_transfer", prefill, kv), ()),
            (decode, 6, 1, "decode", 2, landed, end, common("decode", decode, steps), (first, last)),
        ]  # fmt: skip
        yield [
            (
                service,
                Span(
                    (trace, spans[i], spans[up] if up >= 0 else b""),
                    name,
                    kind,
                    a,
                    b,
                    attributes,
                    events,
                ),
            )
            for service, i, up, name, kind, a, b, attributes, events in rows
        ]


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def block(tag: bytes, data: bytes) -> bytes:
    size = len(data)
    return tag + (bytes((size,)) if size < 128 else varint(size)) + data


def pair(tag: bytes, key: str, value: str | int | float) -> bytes:
    if isinstance(value, str):
        inner = block(b"\x0a", value.encode())
    elif isinstance(value, int):
        inner = b"\x18" + varint(value)
    else:
        inner = b"\x21" + struct.pack("<d", value)
    return block(tag, block(b"\x0a", key.encode()) + block(b"\x12", inner))


def span_message(span: Span) -> bytes:
    trace, own, parent = span.ids
    parts = [block(b"\x0a", trace), block(b"\x12", own), block(b"\x22", parent) if parent else b""]
    parts += [block(b"\x2a", span.name.encode()), bytes((0x30, span.kind))]
    parts.append(struct.pack("<BQBQ", 0x39, span.start, 0x41, span.end))
    parts += [pair(b"\x4a", key, value) for key, value in span.attributes.items()]
    for name, at in span.events:
        parts.append(
            block(
                b"\x5a",
                struct.pack("<BQ", 0x09, at)
                + block(b"\x12", name.encode())
                + pair(b"\x1a", "n", 1),
            )
        )
    return b"".join([*parts, b"\x7a\x02\x18\x01"])


def json_attributes(attributes: Attributes) -> list[dict[str, object]]:
    return [
        {"key": key, "value": {"stringValue": v} if isinstance(v, str) else {"intValue": str(v)} if isinstance(v, int) else {"doubleValue": v}}
        for key, v in attributes.items()
    ]  # fmt: skip


def span_object(span: Span) -> dict[str, object]:
    trace, own, parent = span.ids
    found: dict[str, object] = {
        "traceId": trace.hex(), "spanId": own.hex(), "parentSpanId": parent.hex(), "name": span.name, "kind": span.kind,
        "startTimeUnixNano": str(span.start), "endTimeUnixNano": str(span.end),
        "attributes": json_attributes(span.attributes), "status": {"code": 1},
    }  # fmt: skip
    if span.events:
        one = json_attributes({"n": 1})
        found["events"] = [
            {"timeUnixNano": str(at), "name": name, "attributes": one} for name, at in span.events
        ]
    return found


def generate(folder: Path, spans: int, *, unseen: bool) -> int:
    """Write otlp.pb (length-prefixed), otlp.jsonl and pb/*.pb (one message a file); returns the spans."""
    (folder / "pb").mkdir(parents=True)
    written = number = 0
    with (folder / "otlp.pb").open("wb") as framed, (folder / "otlp.jsonl").open("wb") as lines:
        batch: dict[str, list[Span]] = {}
        total = spans // 7
        for index, request in enumerate(requests(total, unseen=unseen), 1):
            for service, span in request:
                batch.setdefault(service, []).append(span)
            written += 7
            if index % (SPANS_PER_MESSAGE // 7) and index < total:
                continue
            message, resources = b"", []
            for service in sorted(batch, key=WORKERS.index):
                about: Attributes = {
                    "service.name": service,
                    "service.version": "0.9.1",
                    "host.name": "node-3",
                    "k8s.pod.name": f"{service}-abcde",
                }
                resource = b"".join(pair(b"\x0a", key, value) for key, value in about.items())
                scope = block(b"\x0a", b"llm.serving") + block(b"\x12", b"1.0")
                body = block(b"\x0a", scope) + b"".join(
                    block(b"\x12", span_message(s)) for s in batch[service]
                )
                message += block(b"\x0a", block(b"\x0a", resource) + block(b"\x12", body))
                scope_spans = {
                    "scope": {"name": "llm.serving", "version": "1.0"},
                    "spans": [span_object(s) for s in batch[service]],
                }
                resources.append(
                    {
                        "resource": {"attributes": json_attributes(about)},
                        "scopeSpans": [scope_spans],
                    }
                )
            framed.write(struct.pack(">I", len(message)) + message)
            (folder / "pb" / f"{number:05}.pb").write_bytes(message)
            lines.write(orjson.dumps({"resourceSpans": resources}) + b"\n")
            batch, number = {}, number + 1
    return written
