"""The command line called in-process: exit code, stdout and stderr of one call."""

from __future__ import annotations

import io
import sys
from dataclasses import dataclass
from unittest.mock import patch

from pdtrace.cli import main


@dataclass(frozen=True)
class Done:
    """What one call of the command line gave."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def error(self) -> str:
        """The one error line; anything else on stderr fails the test."""
        lines = self.stderr.strip().splitlines()
        assert lines, (self.returncode, self.stdout)
        assert lines[0].startswith("error: "), self.stderr
        assert all(line.startswith("hint: ") for line in lines[1:]), self.stderr
        assert len(lines) <= 2
        return lines[0]


def pdtrace(*arguments: str, stdin: bytes = b"") -> Done:
    """Call `pdtrace` with these arguments."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    given = io.TextIOWrapper(io.BytesIO(stdin))
    code: object = None
    streams = {"stdout": out, "stderr": err, "stdin": given}
    with patch.multiple(sys, **streams):
        try:
            main(arguments)
        except SystemExit as ending:
            code = ending.code
    texts = []
    for stream in (out, err):
        stream.flush()
        texts.append(stream.buffer.getvalue().decode())  # type: ignore[attr-defined]
    assert isinstance(code, int)
    return Done(code, *texts)
