"""rich's console, made safe for what stands in dumps; loaded for terminals."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from pdtrace._paper import encodable
from pdtrace.errors import printable


class SafeConsole(Console):
    """A console that takes no orders from data: control signs in ids and names are replaced."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Segments of a renderable."""
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield segment._replace(text=encodable(printable(segment.text), self.encoding))

    def on_broken_pipe(self) -> None:
        """Leave `pdtrace … | head` to the door."""
        raise BrokenPipeError
