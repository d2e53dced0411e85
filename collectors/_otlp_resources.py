"""OTLP resources: each distinct content once, under a hash of it."""

from __future__ import annotations

import hashlib
from threading import Lock
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from ._compute import pc
from ._otlp_attributes import Lifted, json_objects, ragged, withhold
from ._otlp_content import redact
from ._otlp_values import json_text


class Resources:
    """The resources of one source.

    Their ids by content, and the rows that were not handed over yet.
    """

    def __init__(self) -> None:
        self._ids: dict[str, str] = {}
        self._lock = Lock()  # decoders run in threads
        self._written: set[str] = set()
        self._rows: list[dict[str, Any]] = []

    def identify(
        self, messages: pa.StructArray, keep_content: bool, lifted: Lifted | None = None
    ) -> tuple[pa.Array, int]:
        """The resource id of each ResourceSpans message, and the count of withheld texts."""
        resource = messages.field("resource")
        attributes = ragged(resource.field("attributes"), lifted)
        attributes.take_irregular()
        withheld = 0 if keep_content else withhold(attributes)
        parts = {
            "attributes": pc.fill_null(json_objects(attributes), "{}"),
            "schemaUrl": _optional(messages, "schemaUrl"),
            "droppedAttributesCount": _optional(resource, "droppedAttributesCount"),
            "unknown": _optional(messages, "unknown"),
        }
        texts = pc.binary_join_element_wise(*parts.values(), "\x00").dictionary_encode()
        with self._lock:
            ids = [self._identify(text) for text in texts.dictionary.to_pylist()]
        indices = texts.indices.cast(pa.int32())
        return pa.DictionaryArray.from_arrays(indices, pa.array(ids, pa.string())), withheld

    def _identify(self, text: str) -> str:
        if text not in self._ids:
            attributes, schema_url, dropped, unknown = text.split("\x00")
            content: dict[str, Any] = {"attributes": orjson.loads(attributes)}
            if schema_url:
                content["schemaUrl"] = schema_url
            if dropped not in ("", "0"):
                content["droppedAttributesCount"] = int(dropped)
            if unknown:
                content["unknown"] = redact(orjson.loads(unknown)).value
            self._ids[text] = self._note(content)
        return self._ids[text]

    def of(
        self, attributes: dict[str, Any], more: dict[str, Any], *, keep_content: bool
    ) -> tuple[str, int]:
        """The id of a resource given as plain values (logs, metrics).

        And the count of withheld texts.
        """
        withheld = 0
        if not keep_content:
            counted = redact(attributes)
            attributes, withheld = counted.value, counted.withheld
        content = {"attributes": attributes, **{key: value for key, value in more.items() if value}}
        key = json_text(content)
        with self._lock:
            if key not in self._ids:
                self._ids[key] = self._note(content)
        return self._ids[key], withheld

    def _note(self, content: dict[str, Any]) -> str:
        whole = orjson.dumps(content, option=orjson.OPT_SORT_KEYS)
        key = hashlib.sha256(whole).hexdigest()[:16]
        if key not in self._written:
            self._written.add(key)
            attributes = content["attributes"]
            texts = {
                name: v if isinstance(v, str) else json_text(v) for name, v in attributes.items()
            }
            self._rows.append(
                {
                    "resource": key,
                    "service_name": texts.get("service.name"),
                    "attributes": list(texts.items()),
                    "content": whole.decode(),
                }
            )
        return key

    def adopt(self, rows: pa.Table | None) -> None:
        """Take over rows that another process noted, but for those that are here already."""
        if rows is None:
            return
        with self._lock:
            for row in rows.to_pylist():
                if row["resource"] not in self._written:
                    self._written.add(row["resource"])
                    self._rows.append(row)

    def take(self) -> pa.Table | None:
        """The rows of resources that are new since the last call."""
        with self._lock:
            rows, self._rows = self._rows, []
        if not rows:
            return None
        return pa.Table.from_pylist(rows, schema=_SCHEMA)


_SCHEMA = pa.schema(
    [
        ("resource", pa.string()),
        ("service_name", pa.string()),
        ("attributes", pa.map_(pa.string(), pa.string())),
        ("content", pa.string()),
    ]
)


def _optional(structs: pa.StructArray, name: str) -> pa.Array:
    """A field as text, empty where it is missing."""
    if structs.type.get_field_index(name) < 0:
        return pa.array(np.full(len(structs), ""), pa.string())
    return pc.fill_null(structs.field(name).cast(pa.string()), "")
