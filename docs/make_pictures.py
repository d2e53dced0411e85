"""Draws docs/pictures: what `pdtrace demo` shows on a terminal, and pictures of its report. Run by `make docs`."""

from __future__ import annotations

import io
import re
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from pdtrace import drawing, terminal
from pdtrace.api import Trace
from pdtrace.files import demo_folder

PICTURES = Path(__file__).resolve().parent / "pictures"
WIDTH = 118
OF_THE_REPORT = ("where_time_goes", "stutter")  # `pdtrace export --picture NAME` draws the same
FIRST_PAGE = 58  # lines; the README shows these, the other picture all


def main() -> None:
    """Diagnose the demo dump once; draw the beginning and the whole of the text, and the pictures."""
    PICTURES.mkdir(exist_ok=True)
    with demo_folder() as dump, Trace.read([dump]) as trace:
        page = demo_page(trace)
        for name in OF_THE_REPORT:
            drawing.draw(trace.store, name, str(PICTURES / f"{name}.svg"), force=True)
    draw(page, "demo-whole")
    lines = page.split("\n", allow_blank=True)
    cut = max(n for n, line in enumerate(lines[: FIRST_PAGE + 1]) if line.plain.startswith("["))
    draw(Text("\n").join([*lines[:cut], Text("…", style="dim")]), "demo")


def demo_page(trace: Trace) -> Text:
    """What the command prints on a terminal, with its styles."""
    out = Console(
        file=io.StringIO(), width=WIDTH, force_terminal=True, color_system="truecolor",
        highlight=False, emoji=False, legacy_windows=False, _environ={},
    )  # fmt: skip
    terminal.write_diagnosis(trace.diagnose(), out)
    assert isinstance(out.file, io.StringIO)
    return Text.from_ansi(out.file.getvalue().rstrip())


def draw(page: Text, name: str) -> None:
    """Write one SVG; fonts are those of the reader's machine, nothing is loaded from the network."""
    out = Console(file=io.StringIO(), width=WIDTH, record=True, force_terminal=True, _environ={})
    out.print(page, soft_wrap=True)
    picture = out.export_svg(title="pdtrace demo", theme=MONOKAI, unique_id=name)
    picture = re.sub(r"\s*@font-face \{.*?\}", "", picture, flags=re.DOTALL)
    picture = picture.replace("Fira Code, monospace", "ui-monospace, Menlo, Consolas, monospace")
    lines = (line.rstrip() for line in picture.splitlines())
    (PICTURES / f"{name}.svg").write_text("\n".join(lines) + "\n", "utf-8")


if __name__ == "__main__":
    main()
