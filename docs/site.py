"""What MkDocs does beside its own: links that lead out of docs/ become words, since the site holds only docs/."""

from __future__ import annotations

import re
from typing import Any

_OUT = re.compile(r"\[([^\]]+)\]\((?:\.\./)+(?!findings|howto)[^)]*\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Take away the links that leave docs/; those of a page below docs/ may go up one folder."""
    depth = page.file.src_uri.count("/")
    return _OUT.sub(lambda link: _text(link, depth), markdown)


def _text(link: re.Match[str], depth: int) -> str:
    ups = link.group(0).partition("](")[2].count("../")
    return link.group(1) if ups > depth else link.group(0)
