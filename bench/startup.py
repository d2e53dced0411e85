"""How long `pdtrace --help` and `import pdtrace` take, against a bare interpreter."""

from __future__ import annotations

import sys
from pathlib import Path

from bench.measure import Figure, interleaved, table


def main(arguments: list[str] | None = None) -> list[Figure]:
    """Measure and print."""
    here = Path(sys.executable).parent
    commands = {
        "python -c pass": [sys.executable, "-c", "pass"],
        "import pdtrace": [sys.executable, "-c", "import pdtrace"],
        "pdtrace --help": [str(here / "pdtrace"), "--help"],
    }
    runs = interleaved(commands, 7)
    base = runs["python -c pass"].wall_s
    rows = [("", "wall s", "above bare interpreter", "goal")]
    goals = {"import pdtrace": "< 0.1 s above", "pdtrace --help": "< 0.3 s"}
    rows += [
        (n, f"{r.wall_s:.3f}", f"{r.wall_s - base:.3f}", goals.get(n, "")) for n, r in runs.items()
    ]
    table("Start-up, median of 7", rows)
    return [
        Figure("import pdtrace, above a bare interpreter", f"{runs['import pdtrace'].wall_s - base:.2f} s", "0.1 s"),
        Figure("pdtrace --help", f"{runs['pdtrace --help'].wall_s:.2f} s", "0.3 s"),
    ]  # fmt: skip


if __name__ == "__main__":
    main()
