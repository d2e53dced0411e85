"""What may be kept of an error's text: its kind. The text itself may quote the prompt or the answer."""

from __future__ import annotations

import re
from http import HTTPStatus

UNNAMED = "error"
MOST_CHARACTERS = 60

_STATUS = re.compile(
    r"^\W*([45]\d\d)\b"  # 503 Service Unavailable
    r"|\b(?:HTTP|status|code|error)(?:[ _]?code)?['\"]?[ :=/]+'?(?:1\.[01] )?([45]\d\d)\b"
    r"|'([45]\d\d) [A-Z]",  # httpx: Server error '503 Service Unavailable' for url ...
    re.IGNORECASE,
)
# The class of an exception, as a traceback's last line or a client names it.
_CLASS = re.compile(
    r"(?<![\w.])((?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:Error|Exception|Timeout|Cancelled|Disconnected|Exit))\b"
)
# One word as programs write it, no word of a language: invalid_request_error, ECONNRESET, 429.
_CODE = re.compile(r"[A-Za-z]*\d*(?:_[A-Za-z0-9]+)+|[A-Z][A-Z0-9]{2,}|\d{3}|[a-z]+(?:[A-Z][a-z]+)+|(?:[A-Z][a-z]+){2,}")  # fmt: skip
_WORD = re.compile(r"[a-z]+|\d{1,3}")
# What programs say of failures; a text of nothing else quotes nobody.
_WORDS = frozenset(
    """
    a after an and at be because before but by can cannot could for from has in is it no not of on or the to was while with
    abort aborted access already api authentication backend bad broken budget busy cancel canceled cancelled client
    closed completed concurrency connect connecting connection content context control conversion could creation
    deadline denied disconnect disconnected down endpoint engine errno error errors exceeded exception exhausted expired fail
    failed failure finished first full gateway generation gone http idle incomplete input insufficient internal invalid
    length limit limited limits long lost many max maximum memory missing model network none not null number oom open out
    overload overloaded parse peer pipe please pool preempted protocol quota rate read reached receive refused reject
    rejected remote request requests reset resource response retries retry retrying rpm s sec second seconds ms minute
    minutes send server service session shutdown shut size slow socket ssl stalled status stop stopped stream success
    temporarily terminated throttled time timed timedout timeout timeouts tls token tokens too tpm try unavailable
    unexpected unexpectedly unknown unreachable unsupported upstream url user violation wait waiting worker write wrong
    """.split()  # noqa: SIM905 -- a text of words is read more easily
) | frozenset(word for status in HTTPStatus for word in re.findall(r"[a-z]+", status.phrase.lower()))  # fmt: skip


def is_plain(text: str) -> bool:
    """Whether the text is a code, or words of programs about failures only: then it quotes nobody."""
    if len(text) > MOST_CHARACTERS:
        return False
    if _CODE.fullmatch(text):
        return True
    words = re.findall(r"\w+", text.lower())
    return bool(words) and all(
        word in _WORDS or (_WORD.fullmatch(word) is not None and word.isdecimal()) for word in words
    )


def error_kind(text: object) -> str | None:
    """The kind of an error: its words where they quote nobody, an HTTP status, a class; None where there is no text."""
    said = str(text).strip() if text else ""
    if not said:
        return None
    if is_plain(said):
        return said
    if status := _STATUS.search(said[:200]):
        return f"HTTP {next(filter(None, status.groups()))}"
    classes = _CLASS.findall(said)
    return str(classes[-1]).rpartition(".")[2][-MOST_CHARACTERS:] if classes else UNNAMED
