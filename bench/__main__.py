"""python -m bench: all measurements, one after the other; --small for a quick look."""

from __future__ import annotations

import argparse

from bench import diagnose, ingest, inputs, scale, startup
from bench.measure import Figure, table


def main() -> None:
    """Measure, then print one table of figures and goals."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "--small",
        action="store_true",
        help="a tenth of the data, once: about a minute, and no goal",
    )
    small = parser.parse_args().small
    figures: list[Figure] = startup.main([])
    figures += diagnose.main(["--requests", "10000", "--times", "1"] if small else [])
    figures += scale.main(["--requests", "100000"] if small else [])
    if small:
        figures += ingest.main(["--spans", "100000", "--repeat", "1"])
    else:
        figures += ingest.main(["--spans", "1000000"])
        figures += ingest.main(["--spans", "1000000", "--repeat", "1", "--unseen", "--table-only"])
        figures += ingest.main(["--spans", "3000000", "--repeat", "1", "--table-only"])
    figures += inputs.main(["--mb", "30"] if small else [])
    rows = [("", "measured", "goal"), *((f.what, f.measured, f.goal) for f in figures)]
    table(
        "All figures" + (" (small data: goals are about ten times as much)" if small else ""), rows
    )


if __name__ == "__main__":
    main()
