"""Spans, events and links with their fields and attributes, whichever way they were read."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from pdtrace.records import dataclass

from ._compute import pc
from ._otlp_attributes import Lifted, Ragged, optional, ragged


@dataclass
class Items:
    """Spans, or the events or links of all spans one after the other."""

    parents: int  # how many spans there are
    owner: np.ndarray  # number of the span of each
    fields: pa.StructArray
    attributes: Ragged


@dataclass
class Spans:
    """Spans with what is inside them."""

    own: Items
    events: Items | None = None
    links: Items | None = None


def nested(spans: pa.StructArray, lifted: Lifted | None) -> Spans:
    """Spans as decoders give them; lists of attributes may have been lifted out before."""
    n = len(spans)
    return Spans(
        Items(n, np.arange(n), spans, ragged(spans.field("attributes"), lifted)),
        _children(spans, "events", lifted),
        _children(spans, "links", lifted),
    )


def _children(spans: pa.StructArray, name: str, lifted: Lifted | None) -> Items | None:
    lists = optional(spans, name)
    if lists.null_count == len(spans):
        return None
    items = lists.flatten()
    return Items(len(spans), parents(lists), items, ragged(items.field("attributes"), lifted))


def parents(lists: pa.ListArray) -> np.ndarray:
    """The number of the list that each element is in."""
    found: np.ndarray = pc.list_parent_indices(lists).to_numpy(zero_copy_only=False)
    return found
