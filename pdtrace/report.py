"""The report: diagnosis and pictures as one self-contained HTML file that asks the network for nothing."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import orjson

from pdtrace import __version__, _report_parts, outputs
from pdtrace._report_parts import escaped, tag
from pdtrace.diagnose import diagnose
from pdtrace.errors import BadOption, PdtraceError
from pdtrace.inputs import shown

if TYPE_CHECKING:
    from pdtrace.diagnosis import Diagnosis
    from pdtrace.model import SloPolicy
    from pdtrace.pictures import Picture
    from pdtrace.store import Store

MARK = '<meta name="generator" content="pdtrace'
_VEGA = "import sys, vl_convert; sys.stdout.buffer.write(vl_convert.javascript_bundle().encode())"
_SCRIPT_END = re.compile(r"</(?=script)|<!--", re.IGNORECASE)


class Vega:
    """The scripts that draw, put together by another process meanwhile (4 s of work)."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", _VEGA]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)  # noqa: S603 -- ourselves

    def text(self) -> str:
        """Vega, Vega-Lite and vega-embed as one script. Raises PdtraceError."""
        found, _ = self._process.communicate()
        if self._process.returncode or not found:
            raise PdtraceError(
                "Vega cannot be put into the report", "is vl-convert-python installed whole?"
            )
        return found.decode()

    def stop(self) -> None:
        """End the process if it still runs."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()


@contextlib.contextmanager
def vega() -> Iterator[Vega]:
    """The scripts that draw, put together while the block runs; their process ends with it."""
    made = Vega()
    try:
        yield made
    finally:
        made.stop()


def write(store: Store, output: str, policy: SloPolicy | None = None, *, scripts: Vega, force: bool = False) -> Diagnosis:  # fmt: skip
    """Diagnose the store and write the report; it appears under its name only when it is whole.

    Raises PdtraceError where the file exists and force is not given, or where it is no report.
    """
    from pdtrace import pictures  # Altair: a second that commands spend while they read

    target = Path(output)
    check_target(target, force=force)
    diagnosis = diagnose(store, policy)
    drawn = pictures.pictures(store, [part.id for part in diagnosis.deployments])
    put(target, page_of(diagnosis, drawn, scripts.text()))
    return diagnosis


def diagnose_and_write(store: Store, output: str | None) -> Diagnosis:
    """The diagnosis of the store, and its report where a file is named."""
    if output is None:
        return diagnose(store)
    check_target(Path(output), force=False)
    with vega() as scripts:
        return write(store, output, scripts=scripts)


def check_target(target: Path, *, force: bool) -> None:
    """Raise PdtraceError where the output would destroy something that pdtrace did not make."""
    name = shown(str(target))
    if target.is_dir():
        raise PdtraceError(
            f"{name}: is a folder", "give -o the name of a file, such as report.html"
        )
    if target.suffix.lower() not in {".html", ".htm"}:
        raise BadOption(f"{name}: the report is HTML", "give a name that ends in .html")
    if not target.parent.is_dir():
        raise PdtraceError(f"{shown(str(target.parent))}: no such folder", "make it first")
    if not os.path.lexists(target):
        return
    if not force:
        raise PdtraceError(f"{name}: exists already", "give another name, or --force to replace it")
    with target.open("rb") as stream:
        head = stream.read(2048)
    if head and MARK.encode() not in head:
        raise PdtraceError(
            f"{name}: is no report of pdtrace, so --force does not replace it", "give another name"
        )


def put(target: Path, page: str) -> None:
    """Write a page; it appears under its name only when it is whole. Raises PdtraceError."""
    with outputs.writing(str(target), force=True) as stream:
        stream.write(page.encode())


def page_of(diagnosis: Diagnosis, drawn: Sequence[Sequence[Picture]], vega: str) -> str:
    """The page of a diagnosis and the pictures of each of its deployments."""
    parts = list(zip(diagnosis.deployments, drawn, strict=True))
    sections = [_report_parts.deployment(d, p, n) for n, (d, p) in enumerate(parts)]
    main = _chooser(diagnosis) + "".join(sections) + _report_parts.lists(diagnosis)
    names = ", ".join(part.name or part.id for part in diagnosis.deployments) or "nothing"
    return shell(names, header("pdtrace report", diagnosis.overview), main, vega)


def shell(title: str, head: str, main: str, vega: str) -> str:
    """A whole page around a header and what it holds, with the scripts that draw."""
    from pdtrace import pictures

    config = orjson.dumps(pictures.config("page")).decode()
    scripts = [safe(code) for code in (vega, static("pictures.js"), static("report.js"))]
    body = (
        head
        + tag("main", main)
        + tag("footer", f"made by pdtrace {escaped(__version__)}; this page loads nothing from the network")
        + tag("div", "", class_="said", role="status", aria_live="polite")
        + f'<script type="application/json" id="pdtrace-config">{safe(config)}</script>'
        + "".join(f"<script>{code}</script>" for code in scripts)
    )  # fmt: skip
    meta = (
        '<meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy_of(scripts)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'{MARK} {escaped(__version__)}"><meta name="referrer" content="no-referrer">'
        f"<title>pdtrace: {escaped(title[:120])}</title><style>{static('report.css')}</style>"
    )
    return f'<!doctype html>\n<html lang="en">\n<head>{meta}</head>\n<body>{body}</body>\n</html>\n'


def policy_of(scripts: Sequence[str], connect: str = "'none'") -> str:
    """A Content-Security-Policy that runs these scripts only and allows no network.

    Vega makes functions of its expressions, which browsers call eval; no data become expressions.
    """
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()}'"
        for code in scripts
    )
    return (
        f"default-src 'none'; script-src 'unsafe-eval' {hashes}; style-src 'unsafe-inline'; "
        f"img-src data: blob:; connect-src {connect}; form-action 'none'; base-uri 'none'"
    )


def safe(code: str) -> str:
    r"""Code or JSON inside a script element: what would end the element is written `\u003c/`."""
    return _SCRIPT_END.sub(lambda found: "\\u003c" + found.group()[1:], code)


def static(name: str) -> str:
    """A file of pdtrace/static."""
    return (files("pdtrace") / "static" / name).read_text("utf-8")


def header(title: str, overview: str) -> str:
    """The head of a page: what it is, its first sentence, buttons for zone and colours."""
    tools = (
        '<button id="zone" type="button" aria-pressed="false" title="show times in UTC">UTC</button>'
        '<button id="theme" type="button">dark</button>'
    )
    return tag(
        "header",
        tag("h1", escaped(title))
        + tag("p", _report_parts.text(overview))
        + tag("div", tools, class_="tools")
        + "<noscript><p>The pictures need scripts; the text does not.</p></noscript>",
        class_="page",
    )


def _chooser(diagnosis: Diagnosis) -> str:
    if len(diagnosis.deployments) < 2:
        return ""
    options = "".join(
        tag("option", escaped(f"{part.name or part.id} ({part.requests['count']:,} requests)"), value=f"d{n}")
        for n, part in enumerate(diagnosis.deployments)
    )  # fmt: skip
    label = f"{len(diagnosis.deployments)} deployments, judged apart: "
    return tag(
        "div",
        f'<label for="deployment">{label}</label>' + tag("select", options, id="deployment"),
        class_="chooser",
    )
