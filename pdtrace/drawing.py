"""One picture of a run as a PNG or SVG file, with its title and what it shows; and the list of pictures."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import orjson

from pdtrace import pictures
from pdtrace.errors import BadOption, PdtraceError, in_one_line, printable, reraise_stop
from pdtrace.outputs import writing

if TYPE_CHECKING:
    from pdtrace.pictures import Picture
    from pdtrace.store import Store

WIDTH, SIDE = 900, 90  # pixels of a picture, and of what stands beside its axes
# An SVG's words are set in its reader's font, which may be a fifth wider than the one measured here.
_PADDING = {"left": 24, "top": 8, "right": 24, "bottom": 8}
SCALE = 2  # pixels of a PNG for each
LINE = 116  # letters of a sentence in one line
FORMATS = ("png", "svg")


def listing(store: Store) -> list[dict[str, str]]:
    """Every picture with its question and what it shows of each deployment, or that there are no data for it."""
    known = _deployments(store)
    made = pictures.pictures(store, list(known))
    return [
        {
            "picture": picture.name, "question": picture.question,
            **({"deployment": known[deployment]} if len(known) > 1 else {}),
            "shows": picture.problem or picture.sentence or "no data for it",
        }
        for place, name in enumerate(pictures.views())
        for deployment, drawn in zip(known, made, strict=True)
        if (picture := drawn[place]).name == name
    ]  # fmt: skip


def draw(
    store: Store, name: str, output: str, *, style: str | None = None, theme: str = "light",
    deployment: str | None = None, force: bool = False,
) -> Picture:  # fmt: skip
    """Write one picture of one deployment into a new file.

    Raises UnknownQuery, BadOption where several deployments have it and none is named, PdtraceError
    where there are no data for it.
    """
    kind = _kind(style, output)
    picture = _of_one(store, name, deployment)
    if picture.spec is None:
        raise PdtraceError(
            f"picture {name}: {picture.problem or picture.sentence or 'no data for it in this deployment'}",
            "`pdtrace export PATH --list` says what can be drawn",
        )
    content = rendered(picture, kind, theme)
    with writing(output, force=force) as stream:
        stream.write(content)
    return picture


def rendered(picture: Picture, kind: str, theme: str = "light") -> bytes:
    """The picture as PNG or SVG. Raises PdtraceError where Vega refuses it."""
    import vl_convert

    spec = {
        **_utc(pictures.sized(picture.spec or {}, WIDTH, SIDE)),
        "title": _headline(picture, theme),
        "padding": _PADDING,
    }
    config = pictures.config(theme)
    try:
        if kind == "svg":
            return vl_convert.vegalite_to_svg(vl_spec=orjson.dumps(spec, default=str).decode(), config=config).encode()  # fmt: skip
        return bytes(vl_convert.vegalite_to_png(vl_spec=orjson.dumps(spec, default=str).decode(), config=config, scale=SCALE))  # fmt: skip
    except BaseException as error:
        reraise_stop(error)
        raise PdtraceError(f"picture {picture.name}: {in_one_line(error)}") from error


def _utc(part: Any) -> Any:
    """The spec with its instants in UTC, and that said: a file does not know its reader's zone."""
    if isinstance(part, list):
        return [_utc(value) for value in part]
    if not isinstance(part, Mapping):
        return part
    found = {key: value if key == "datasets" else _utc(value) for key, value in part.items()}
    if part.get("type") == "temporal":
        found["scale"] = {**(part.get("scale") or {}), "type": "utc"}
        if part.get("title"):
            found["title"] = f"{part['title']} (UTC)"
    return found


def _headline(picture: Picture, theme: str) -> Mapping[str, Any]:
    lines = textwrap.wrap(printable(picture.sentence or ""), LINE)
    level = f"evidence {picture.level} · " if picture.level else ""
    lines.append(f"{level}pdtrace query {picture.query}")
    ink = pictures.config(theme)["title"]["color"]
    return {"text": f"{picture.title}: {picture.question[:1].lower()}{picture.question[1:]}", "subtitle": lines, "anchor": "start", "fontSize": 15, "offset": 14,
            "subtitleColor": ink, "subtitleFontSize": 12, "subtitlePadding": 6, "subtitleLineHeight": 16}  # fmt: skip


def _kind(style: str | None, output: str) -> str:
    kind = style or output.rpartition(".")[2].lower()
    if kind not in FORMATS:
        raise BadOption(f"{output}: png or svg?", "give -o a name that ends in .png or .svg, or --format")  # fmt: skip
    return kind


def _of_one(store: Store, name: str, wanted: str | None) -> Picture:
    """The picture of the deployment that is named, or of the only one that has it."""
    known = _deployments(store)
    chosen = [key for key, text in known.items() if wanted is None or wanted in (key, text)]
    if not chosen:
        raise BadOption(f"--deployment: none is named {wanted}", f"there are: {', '.join(known.values())}")  # fmt: skip
    made = {key: of[0] for key, of in zip(chosen, pictures.pictures(store, chosen, [name]), strict=True)}  # fmt: skip
    there = [key for key, picture in made.items() if picture.spec is not None]
    if len(there) > 1:
        raise BadOption(
            "several deployments have this picture, and they are never pooled",
            f"name one with --deployment: {', '.join(known[key] for key in there)}",
        )
    return made[there[0] if there else chosen[0]]


def _deployments(store: Store) -> dict[str | None, str]:
    """Names of the deployments by id; requests of none are one of their own."""
    rows = store.rows("SELECT deployment, name FROM deployments ORDER BY start_ns, deployment")
    return {key: name or key for key, name in rows} or {None: "requests"}
