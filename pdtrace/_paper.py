"""What text for people is written on: rich's console on terminals, plain lines in files and pipes.

There rich is loaded only for a line that it would change: it takes 50 ms and twice as long for a page, styles that
nobody sees among them.
"""

from __future__ import annotations

from typing import IO, TYPE_CHECKING, Any

from rich.cells import cell_len as _cell_len

from pdtrace.errors import printable

if TYPE_CHECKING:
    from rich.console import Console

# Signs of ours that old encodings lack, by others of the same width.
_PLAIN_SIGNS = str.maketrans("─█·…–—−≤≥→◂×±µ“”‘’▁▂▃▄▅▆▇", "-#.~---<>><x+u\"\"''_.:-=+*")
_WHOLE = {"no_wrap": True, "overflow": "ellipsis", "crop": False}


def cell_len(text: str) -> int:
    """The cells that a text takes on a terminal; rich, which looks at each sign, is asked only where that may matter."""
    return len(text) if text.isascii() and text.isprintable() else _cell_len(text)


def encodable(text: str, encoding: str) -> str:
    """Text that the stream can carry: our own signs give way to plain ones, others to `?`."""
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        lost = {ord(sign) for sign in set(text) if sign.encode(encoding, "ignore") == b""}
        plain = text.translate({sign: _PLAIN_SIGNS.get(sign, "?") for sign in lost})
        return plain.encode(encoding, "replace").decode(encoding)
    except LookupError:
        return text
    return text


class Plain:
    """A file or a pipe: lines without styles, of at most so many cells."""

    is_terminal = False

    def __init__(self, stream: IO[str], width: int) -> None:
        self.stream = stream
        self.width = width
        self.encoding = (getattr(stream, "encoding", None) or "utf-8").lower()

    def takes(self, text: str, width: int) -> bool:
        """Whether rich would leave the text as it is: no control signs, and it fits, also in signs of the encoding."""
        cells = cell_len(text)
        return (
            text.isprintable()
            and cells <= width
            and cell_len(encodable(text, self.encoding)) == cells
        )

    def line(self, text: str) -> None:
        """Write a line; who reads stderr as well sees both in their order."""
        self.stream.write(encodable(printable(text), self.encoding) + "\n")
        self.stream.flush()

    def console(self) -> Console:
        """The console for all other lines."""
        from pdtrace._console import SafeConsole

        return SafeConsole(file=self.stream, width=self.width, highlight=False, emoji=False)


def put(
    out: Console | Plain, text: str = "", style: str = "", *, mark: str = "", cells: int = 0, whole: bool = False
) -> None:  # fmt: skip
    """Print a line; its first cells in the style of `mark`. `whole`: cut where it is too wide, not wrapped."""
    if isinstance(out, Plain):
        if out.takes(text, out.width):
            out.line(text)
            return
        out = out.console()
    if not (whole or mark) and cell_len(text) > out.width:
        from pdtrace._grid import wrapped  # lines of rich's would end in blanks

        for part in wrapped(text, out.width):
            put(out, part, style, whole=True)
        return
    from rich.text import Text

    line = Text(text, style=style)
    if mark:
        line.stylize(mark, 0, cells)
    how: dict[str, Any] = _WHOLE if whole else {}
    out.print(line, **how)


def rule(out: Console | Plain, title: str) -> None:
    """Print a title with a line behind it, as long as the page is wide."""
    if isinstance(out, Plain):
        if title and out.takes(title, out.width - 2):
            sign = "─" if out.encoding.startswith("utf") else "-"
            out.line(f"{title} {sign * (out.width - 1 - cell_len(title))}")
            return
        out = out.console()
    from rich.text import Text

    out.rule(Text(title, style="bold"), align="left", characters="─")
