"""The words of findings about KV: transfers between workers, waits for them, idle decode workers, failures."""

from __future__ import annotations

from pdtrace._words import Row, Words, of_ttft, sentence, wait_spread
from pdtrace.numbers import count, duration, plural, rate, seconds, share, size

_COUNTED = "all movements and ranks summed: the requests cannot have waited longer for them"

NOTICED = 0.05  # part of a value from which on a bound in it is told in the title
ROOMY, FULL = (
    0.8,
    0.95,
)  # KV cache in use: below, any request finds space; above, a long prompt may not


def kv_transfer(row: Row) -> Words:
    """Waiting for KV: transfer, wait for it, load; what was moved and how fast."""
    if row["bound"]:
        title = f"waiting for KV takes at most {of_ttft(row)} (upper bound)"
        detail = _bounded(row)
    else:
        most = "at most " if row["upper_bound_s"] > NOTICED * row["value"] else ""
        title = f"KV transfer and waiting for it take {most}{of_ttft(row)}"
        detail = _split(row)
    if holding := _holding(row):
        title = (
            f"waiting for KV takes {of_ttft(row)} beside the prefill, which may hold the transfer"
        )
    return Words(
        title,
        sentence(
            wait_spread(row),
            detail,
            holding,
            _narrowed(row),
            _space(row),
            _side(row),
            _moved(row),
            _link(row),
        ),
        tuple(_assumed(row)),
        (_advice(row),),
    )


def _bounded(row: Row) -> str:
    """The whole wait on the decode side, and what of it is known to be KV time."""
    known = row["interval_low"] or 0.0
    waited = _waited(row)
    return sentence(
        f"{seconds(waited)} are the whole wait on the decode side: transfer, hand-over, "
        "waiting for KV space or for a step; request by request these data do not tell them apart."
        if waited
        else None,
        _in_walls(row),
        f"{seconds(known)} are known to be KV time."
        if known
        else "None of it is known to be KV time for sure."
        if waited
        else None,
    )


def _holding(row: Row) -> str | None:
    """Prefill on prefill workers whose record ends with the transfer."""
    if row["prefill_bound_s"] <= NOTICED * row["value"]:
        return None
    return (
        f"The {seconds(row['prefill_bound_s'])} of prefill run from the first batch to the transfer's end: how much of "
        "them is transfer these records do not tell; the engine's own spans would."
    )


def _waited(row: Row) -> float:
    """Seconds of bounds that are waits on the decode side; below a microsecond it is rounding."""
    waited: float = row["upper_bound_s"] - row["wall_s"]
    return waited if waited > 1e-6 else 0.0


def _in_walls(row: Row) -> str | None:
    """Movements beside a prefill of which nobody knows when it computed."""
    if not row["wall_s"]:
        return None
    return (
        f"{seconds(row['wall_s'])} lie inside prefills known as wall time only: hidden behind them or waited for, "
        "which the steps of the prefill would tell."
    )


def _split(row: Row) -> str:
    """Transfer, waits before it, loads; the hidden part beside them."""
    waited = f"waiting for it or for KV space {seconds(row['wait_s'])}"
    if row["bridge_s"] or row["space_s"]:
        waited = (
            f"between prefill and its start {seconds(row['bridge_s'])} (that may hold waits for KV space), "
            f"waits stated to be for KV space {seconds(row['space_s'])}"
        )
    held = _waited(row)
    bound = f", and {seconds(held)} of waits that may hold other things" if held else ""
    busy, walls = "", _in_walls(row)
    apart = (row["bridge_s"] or 0) + (row["space_s"] or 0)
    if apart and row["link_busy_s"] is not None:
        busy = (
            f"; for {share(row['link_busy_s'] / apart)} of those waits the link was moving other KV"
        )
    moving = f"Transfer {seconds(row['transfer_s'])}"
    if not row["transfer_s"] and _holding(row):
        moving = "Transfer not told apart"
    return (
        f"{moving}, {waited}{busy}, loads from a cache tier "
        f"{seconds(row['load_s'])}{bound}.{f' {walls}' if walls else ''}"
    )


def _narrowed(row: Row) -> str | None:
    """What counters say of the transfers inside a wait that is only bounded."""
    if row["counter_transfers"] is None or row["transfers"]:
        return None
    since = " since the start of their processes" if row["counter_since_start"] else ""
    told = f"Counters tell of {plural(row['counter_transfers'], 'KV movement')}{since}"
    if row["counter_s"] is None:
        return f"{told}."
    told += f" of {seconds(row['counter_s'])} in sum ({_COUNTED})"
    if not row["bound"] or row["at_most_transfer_s"] is None:
        return f"{told}."
    part = row["at_most_transfer_s"] / row["value"]
    return f"{told}: at most {share(part)} of this wait is the transfer itself, at least {share(1 - part)} is something else."


def _space(row: Row) -> str | None:
    """Whether the decode workers' KV cache was full enough for requests to wait for space."""
    most = row["decode_usage_max_ratio"]
    if most is None:
        return None
    if most < ROOMY:
        return (
            f"In no step was a decode worker's KV cache more than {share(most)} full: nothing points to waits for KV "
            "space."
        )
    if most >= FULL:
        return f"A decode worker's KV cache was up to {share(most)} full: some of the wait may be for KV space."
    return None


def _side(row: Row) -> str | None:
    """Which token the wait holds up."""
    if row["origin"] == "decode":
        return "The decode side makes the first token: the wait is part of TTFT."
    if row["origin"] is None:
        return None
    who = (
        "The prefill side makes" if row["origin"] == "prefill" else "In part the prefill side makes"
    )
    if not row["after_first_s"]:
        return f"{who} the first token."
    part = (
        f", {share(row['first_gap_ratio'])} of those first gaps"
        if row["first_gap_ratio"] is not None
        else ""
    )
    return f"{who} the first token: {seconds(row['after_first_s'])} lie behind it, in the first gap between tokens{part}."


def _moved(row: Row) -> str | None:
    """Bytes and time of the movements, or the size that they must have had."""
    if row["transfers"]:
        basis = {
            "config": ", computed from the configured KV size of a token",
            "formula": ", computed from the model's published shape",
            "mixed": ", in part computed",
        }.get(row["bytes_basis"] or "", "")
        moved = (
            f" of {size(row['transferred_bytes'])}{basis}"
            if row["transferred_bytes"] is not None
            else " of unknown size"
        )
        told = f"Records tell of {plural(row['transfers'], 'KV movement')}{moved}{_ways(row)}{_ended(row)}"
        if row["moved_s"] is None:
            return f"{told}."
        hidden = (
            f"of which {seconds(row['hidden_s'])} were hidden behind the requests' own prefill"
            if row["hidden_s"] is not None
            else "what of it was hidden behind prefill is not known (prefill is known as wall time only)"
        )
        return f"{told}: under way for {seconds(row['moved_s'])} in all, {hidden}."
    if row["counter_bytes"] is not None:
        if not row["counter_s"]:
            return f"They moved {size(row['counter_bytes'])}."
        mean = rate(row["counter_bytes"] / row["counter_s"])
        return (
            f"They moved {size(row['counter_bytes'])}, {mean} as the mean of single movements; "
            "the speed of the link may be greater."
        )
    if row["expected_bytes"] and row["value"]:
        needed = rate(row["expected_bytes"] / row["value"])
        return (
            f"The KV of all prompts is {size(row['expected_bytes'])}: {needed} for each request on average "
            "if all of it moved during those waits."
        )
    return None


_DIRECTIONS = {
    "prefill_to_decode": "from prefill to decode",
    "decode_to_prefill": "from decode to prefill",
    "load": "from another cache tier",
    "store": "to another cache tier",
}


def _ways(row: Row) -> str:
    """The directions of the movements, where they are known."""
    ways = [_DIRECTIONS.get(way, way) for way in row["directions"]]
    return f" {' and '.join(ways)}" if ways else ""


def _ended(row: Row) -> str:
    """How many failed or expired; nothing where that is not stated of all."""
    failed = row["failed_transfers"]
    if failed is None:
        return ""
    return (
        f", {failed:,} of them failed or expired" if failed else ", none of them failed or expired"
    )


def _link(row: Row) -> str | None:
    """Speed of the link that carried most."""
    if not row["links"] or (row["link_rate"] is None and row["link_speed"] is None):
        return row["link_note"] and f"No fit of the link: {row['link_note']}."
    ends = f"{_short(row['link_from'])} → {_short(row['link_to'])}"
    which = "The link" if row["links"] == 1 else f"Of {row['links']:,} links the busiest,"
    parts = []
    if row["link_rate"] is not None:
        parts.append(f"gave {rate(row['link_rate'])} while busy")
    if row["link_speed"] is not None:
        parts.append(
            f"a movement takes {duration(row['link_setup_ms'])} ({duration(row['link_setup_low_ms'])} to "
            f"{duration(row['link_setup_high_ms'])}) and its bytes at {rate(row['link_speed'])} "
            f"({rate(row['link_speed_low'])} to {rate(row['link_speed_high'])})"
        )
    text = f"{which} {ends}, " if row["links"] > 1 else f"{which} {ends} "
    return text + "; ".join(parts) + "." + _contention(row)


def _short(worker: str | None) -> str:
    """A worker's id without the kind of its name."""
    return "unknown" if worker is None else worker.partition(":")[2] or worker


def _contention(row: Row) -> str:
    low = row["link_contention_low_ratio"]
    if low is None:
        return ""
    value = f"{share(row['link_contention_ratio'])} ({share(low)} to {share(row['link_contention_high_ratio'])})"
    if low > 0:
        return f" Movements slow each other down: each other one in flight adds {value} of a movement's own time."
    return (
        f" Movements in company do not surely take longer: each other one in flight adds {value}."
    )


def _assumed(row: Row) -> list[str]:
    """What bounds and sizes rest on."""
    told = []
    if row["bound"] and _waited(row):
        told.append("the decode side's wait contains the transfer and is not only the transfer")
    if row["wall_s"]:
        told.append(
            "KV that moved inside a prefill known as wall time only counts as waited for, though the prompt may have "
            "been computed meanwhile"
        )
    return told + _sized(row)


def _sized(row: Row) -> list[str]:
    used = (
        row["bytes_basis"] in {"config", "formula", "mixed"}
        if row["transfers"]
        else (row["counter_bytes"] is None and row["expected_bytes"] is not None)
    )
    if not used:
        return []
    basis = row["size_note"] or "the KV size of a token is what the configuration states"
    return [f"{basis}; a prefix that the decode side had already makes the bytes too many"]


def _advice(row: Row) -> str:
    apart = (row["bridge_s"] or 0) + (row["space_s"] or 0)
    if apart > 0.3 * row["value"]:
        busy = None if row["link_busy_s"] is None else row["link_busy_s"] / apart
        if busy is not None and busy > 0.8:
            return (
                "the link: it was moving other KV nearly all the while that requests waited for their transfer; more "
                "bandwidth or less KV to move, and then KV space on the decode workers"
            )
        if row["space_s"] or (busy is not None and busy < 0.3):
            return "KV space on the decode workers: more of it, or fewer requests at once"
    if (row["link_contention_low_ratio"] or 0) > 0.2:
        return "the link: movements share it; spreading them over more links or times"
    return "comparing with the size of the KV and the speed of the link; KV space on the decode workers"


def decode_idle(row: Row) -> Words:
    """Decode workers stood still while KV was on its way to them."""
    most = "at most " if row["bound"] else ""
    return Words(
        title=f"decode workers stood still for {most}{share(row['share'])} of the time while their requests waited for KV",
        detail=f"{seconds(row['value'])} of {seconds(row['observed_s'])} worker time: no step decoded, and KV for at least one "
        f"request was awaited. In all they stood still for {seconds(row['idle_s'])}; requests on their way to them waited "
        f"{seconds(row['kv_waited_s'])} for KV.",
        assumptions=(
            "with a light load idle decode workers are headroom, not waste",
            *(
                ("the wait for KV is an upper bound: it may hold other things",)
                if row["bound"]
                else ()
            ),
        ),
        suggestions=(
            "another ratio of prefill to decode workers, where prefill or the transfer is the bottleneck",
        ),
    )


def transfer_failures(row: Row) -> Words:
    """KV movements failed."""
    return Words(
        title=f"{count(row['value'])} of {plural(row['transfers'], 'KV movement')} failed",
        detail=f"{row['failed']:,} failed, {row['expired']:,} expired.",
        suggestions=("reading the transfer engine's log on both sides",),
    )
