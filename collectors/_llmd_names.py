"""Names that llm-d's collectors share."""

from __future__ import annotations

TITLE = "llm-d"
ENGINE = "llm-d"

# Endpoints are written namespace/pod, pod, or address:port, with or without a data parallel rank behind.
POD = r"^(?:[a-z0-9.-]+/|/)?([a-z0-9][a-z0-9.-]*?)(?:-rank-\d+)?$"
ADDRESS = r"^((?:\d{1,3}\.){3}\d{1,3}|\[[0-9a-fA-F:]+\]|[A-Za-z0-9.-]+):(\d{2,5})$"
