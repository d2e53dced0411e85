"""python -m bench: all measurements, one after the other."""

from __future__ import annotations

from bench import diagnose, ingest, startup

startup.main([])
diagnose.main([])
ingest.main(["--spans", "1000000"])
