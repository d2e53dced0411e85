"""Known and useless files of a run: named in the import log with the reason, never read."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from pdtrace.errors import UnknownFormat
from pdtrace.model import Head, Match, Sink, Source

TITLE = "Other files of a run (recognised, not used)"
AT_MOST = "dialect"  # the strength of every match: not asked of a file that a reader knows exactly

_KV_EVENTS = "KV cache events: which blocks a worker kept and dropped, not whose prompts they are; reuse by prefix needs the hashes of each request"

# What the content shows, whatever the file's name.
_CONTENTS: tuple[tuple[re.Pattern[bytes], str], ...] = (
    (re.compile(rb"={3,} ?Serving Benchmark Result ?={3,}"), "stdout of a serving benchmark: its JSON result has the requests"),
    (re.compile(rb"\A(?:event: [^\n]*\n)?data: (?:\{|\[DONE\])"), "body of one streamed response"),
    (re.compile(rb'\A\s*\{[^{}\[\]]*"object"\s*:\s*"(?:text_completion|chat\.completion|response|list|embedding)"'), "body of one response"),
    (re.compile(rb'\A\s*\{\s*"error"\s*:\s*\{\s*"message"'), "body of one error response"),
    (re.compile(rb"\Aready\r?\ncounts \{"), "stdout of an OTLP receiver"),
    (re.compile(rb"NVIDIA-SMI \d|Driver Version: *\d+.*CUDA Version|^GPU \d+: NVIDIA", re.MULTILINE), "nvidia-smi output: nothing about requests"),
    (re.compile(rb"\A#!"), "a script"),
    (re.compile(rb'\A\s*[\[{].{0,4096}?"(?:BlockStored|BlockRemoved|AllBlocksCleared)"', re.DOTALL), _KV_EVENTS),
    (re.compile(rb'\A\s*\{.{0,512}?"data"\s*:\s*\{\s*"(?:stored|removed)"\s*:\s*\{\s*"(?:parent_hash|blocks|block_hashes)"', re.DOTALL), _KV_EVENTS),
    (re.compile(rb"\A[\x80-\xdf].{0,512}?(?:BlockStored|BlockRemoved|AllBlocksCleared)", re.DOTALL), _KV_EVENTS),
    (re.compile(rb"\A.{4}[\x80-\x9f\xde\xdf].{0,64}?LMCT", re.DOTALL), "LMCache's trace of storage calls (msgpack): it names no requests; --lookup-hash-log-dir does"),
    (re.compile(rb'\A\{"pdtrace_simulator": ?\{'), "the truth of a simulated run: for tests, not for diagnosis"),
)  # fmt: skip

# What the name shows, for files whose content is anybody's.
_NAMES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"(?i)^(readme|origin|license|licence|notice|changelog|contributing|authors)(\.\w+)?$"), "a text for people"),
    (re.compile(r"(?i)^(cmd|command|cmdline|run_cmd|launch)[\w.-]*\.txt$"), "command lines of the run"),
    (re.compile(r"(?i)\.(md|rst|adoc)$"), "a text for people"),
    (re.compile(r"(?i)\.(py|pyc|ipynb|sh|bash|ps1|js|ts|rs|go|c|cc|cpp|h|java|toml|ini|cfg|lock|jinja)$"), "source or settings"),
    (re.compile(r"(?i)^(dockerfile|makefile|\.gitignore|\.env.*|docker-compose\S*\.ya?ml|requirements\S*\.txt)$"), "source or settings"),
    (re.compile(r"(?i)\.ya?ml$"), "settings, or a report that no collector reads"),
    (re.compile(r"(?i)\.pytorch\.json$"), "the same totals in another tool's layout"),
    (re.compile(r"(?i)\.(png|jpe?g|svg|gif|pdf|html?|css|woff2?|ico)$"), "a picture or page"),
    (re.compile(r"(?i)\.(safetensors|pt|bin\.index|onnx|gguf|model)$|^tokenizer(_config)?\.json$"), "part of a model"),
    (re.compile(r"(?i)\.(pid|lock|tmp|swp)$"), "a leftover of a process"),
)  # fmt: skip


def sniff(head: Head) -> Match | None:
    """Recognised and useless, with the reason; anything that a real source claims exactly is left to it."""
    if not head.data:
        return Match("dialect", ignore="empty (0 bytes)") if head.complete else None
    if not head.data.strip():
        return Match("dialect", ignore="empty (only blanks)")
    start = head.data[:32_768]
    for pattern, why in _CONTENTS:
        if why and pattern.search(start) and not _several_records(pattern, head):
            return Match("dialect", ignore=why)
    name = PurePosixPath(head.name).name
    for rule, why in _NAMES:
        if rule.search(name) and not _table_inside(name, head):
            return Match("dialect", ignore=why)
    return None


def _several_records(pattern: re.Pattern[bytes], head: Head) -> bool:
    """JSON lines of responses are a log, not one body."""
    return b'"object"' in pattern.pattern and bool(re.search(rb"\}\s*\n\s*\{", head.data))


def _table_inside(name: str, head: Head) -> bool:
    """A Markdown file may hold a pasted table of requests: left to `table`."""
    pipes = re.search(rb"^\s*\|.*\|\s*\n\s*\|[ :|-]*-{2,}[ :|-]*\|", head.data, re.MULTILINE)
    latency = re.search(rb"(?i)ttft|first.?token|latency|e2e|duration|tokens", head.data)
    return (
        name.lower().endswith(".md")
        and bool(pipes and latency)
        and not re.match(r"(?i)readme|origin", name)
    )


def read(source: Source, out: Sink) -> None:
    """Never called: everything here is ignored."""
    raise UnknownFormat(f"{source.path}: nothing to read", "this file is recognised and not used")
