"""python -m bench: all measurements, one after the other; --small for a quick look."""

from __future__ import annotations

import argparse

from bench import diagnose, ingest, scale, startup

parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
parser.add_argument(
    "--small", action="store_true", help="a tenth of the data, once: about a minute, and no goal"
)
small = parser.parse_args().small
startup.main([])
diagnose.main(["--requests", "10000", "--times", "1"] if small else [])
scale.main(["--requests", "100000"] if small else [])
ingest.main(["--spans", "100000", "--repeat", "1"] if small else ["--spans", "1000000"])
if not small:
    ingest.main(["--spans", "1000000", "--repeat", "1", "--unseen", "--table-only"])
