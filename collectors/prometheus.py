"""Prometheus and OpenMetrics text dumps of any server: every sample of every scrape.

A file may hold one scrape or many, one after the other, with or without a stamp in front of each
(`# scrape_ts <epoch s>`, an HTTP Date header, a line that is a date); samples of a scrape without
a stamp have no time. Answers of a metrics store's API and its exports are the same samples. Source of
the names: vLLM, NIXL's exporter, Dynamo frontends and workers, SGLang, anything.
"""

from __future__ import annotations

import re

import polars as pl

from pdtrace.model import Head, Match, Sink, Source

from . import _prometheus_answers as answers
from . import _prometheus_series as series
from ._loglines import text_batches
from ._prometheus_text import MARKER, SAMPLE, parse, stamps
from ._prometheus_workers import Describer

TITLE = "Prometheus"

NOT_A_SAMPLE = "not a sample, comment or header"
_TYPE = (
    r"^# TYPE [A-Za-z_:][\w:]* "
    r"(?:counter|gauge|histogram|summary|untyped|unknown|gaugehistogram|info|stateset)\r?$"
)
_METRIC_LIKE = r"^[A-Za-z_:][\w:]*(?:\{|_(?:total|count|sum|bytes|seconds|created|info)\s)"
# One look at the text: most files are none, and columns of lines take long to make.
_MAY_BE = re.compile(
    rf"# TYPE |(?:^|[\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029]){_METRIC_LIKE[1:]}", re.MULTILINE
)
_CHATTER = r"^[<>*] |^[A-Za-z-]+: |^HTTP/"
_TYPE_LINE, _SAMPLE_LINE = re.compile(_TYPE), re.compile(SAMPLE)
_BESIDE = re.compile(rf"^#|{_CHATTER}|{MARKER}")  # no sample, whatever it looks like
SOON_CHARACTERS = 4096
MOST = 0.8
FEW = 5  # lines from which on samples without types are told from other words
_NAMESPACE = r"^(?:vllm|sglang|lmcache|trtllm):\w+\{|^(?:sglang|dynamo|trtllm|lmcache)_\w+\{"


def sniff(head: Head) -> Match | None:
    """Text exposition: TYPE lines with samples, or nearly only lines like name{...} value."""
    if answers.form_of(head):
        return Match("exact", "samples of a metrics store")
    if b"\0" in head.data and b"# TYPE " not in head.data:
        return None  # binary: to look for samples in its "lines" takes long
    text = head.text()
    if not _MAY_BE.search(text):
        return None
    if _soon_certain(text[:SOON_CHARACTERS].splitlines()[:-1]):
        return Match("exact", "Prometheus metrics")
    whole = text.splitlines()
    lines = pl.Series("text", whole[:-1] or whole, dtype=pl.String)
    lines = lines.filter(lines.str.strip_chars().str.len_chars() > 0)
    plain = lines.filter(
        ~lines.str.starts_with("#") & ~lines.str.contains(_CHATTER) & ~lines.str.contains(MARKER)
    )
    good = plain.str.contains(SAMPLE)
    typed = bool(lines.str.contains(_TYPE).any())
    if typed and (good.any() or not len(plain)):
        return Match("exact", "Prometheus metrics")
    if (
        (len(plain) >= FEW or bool(len(plain) and plain.str.contains(_NAMESPACE).all()))
        and good.sum() >= MOST * len(plain)
        and plain.str.contains(_METRIC_LIKE).any()
    ):
        return Match("exact", "Prometheus metrics")
    return None


def _soon_certain(lines: list[str]) -> bool:
    """Whether the first lines hold a TYPE line and a sample: columns of all lines take twenty times as long."""
    typed = any(_TYPE_LINE.search(line) for line in lines)
    return typed and any(
        _SAMPLE_LINE.search(line) and not _BESIDE.search(line) for line in lines if line.strip()
    )


def read(source: Source, out: Sink) -> None:
    """Read all scrapes of one dump."""
    out.unit("sample")
    history = series.History()
    describer = Describer(source, out)
    record = 0
    with source.open() as stream:
        form = answers.form_of(Head(source.path, source.name, stream.read(64 << 10)))
    for batch in answers.texts(source, form) if form else text_batches(source):
        lines = stamps(parse(batch), history.scrape)
        history.scrape = lines["scrape_ns"][-1] if lines.height else history.scrape
        found = lines.filter(pl.col("value_text").is_not_null() | pl.col("odd"))
        out.read(found.height)
        found = found.with_columns(
            pl.int_range(record, record + found.height, dtype=pl.Int64).alias("record")
        )
        record += found.height
        odd = found.filter("odd")
        if odd.height:
            out.skip(odd["record"].to_list(), NOT_A_SAMPLE, odd["text"][0])
        samples = history.timed(found.filter(~pl.col("odd")))
        if not samples.height:
            continue
        history.learn_types(lines)
        rows = describer.describe(samples)
        rows = rows.with_columns(history.kinds(rows["metric"]))
        events = history.restarts(rows)
        if events.height:
            out.add("events", events)
        out.add("samples", rows.select(series.SAMPLE_COLUMNS))
    describer.close()
