"""How each request of a table ended: completed, failed, aborted or unknown, and its error."""

from __future__ import annotations

import polars as pl

from ._errors import UNNAMED, error_kind
from ._table_columns import coalesced, or_null, text_of
from ._table_headers import words_of
from ._table_plan import Plan
from ._table_values import numbers

_OK = (
    r"^(ok|okay|success|successful|succeeded|complete|completed|done|finished|true|yes|y|t|stop|length"
    r"|eos|pass|passed|good|정상|성공|成功|✓|✔|✅)$"
)
_ABORTED = r"cancel|abort|disconnect|interrupt|취소|中断|取消"
# the other side went away: a failure of the server, whatever the client's library calls it
_LEFT_ALONE = r"server_?\s?disconnect|remote_?\s?(?:protocol|disconnect|end)|connection abort"
_FAILED = (
    r"fail|err|timeout|timed|reject|exception|refused|^false$|^no$|^n$|^f$|bad|overload|exceeded|limit"
    r"|오류|실패|失败|错误|✗|❌"
)


def with_status(plan: Plan, frame: pl.DataFrame, values: pl.DataFrame) -> pl.DataFrame:
    """Status from whatever the row says; where nothing does, an answer means completed."""
    verdicts: list[pl.Series] = []
    errors: list[pl.Series] = []
    for column in plan.columns.get("aborted", []):
        cells = text_of(frame, column.name)
        if cells is not None:
            yes = cells.str.to_lowercase().is_in(["true", "1", "yes"])
            verdicts.append(_when(yes, "aborted"))
    for column in plan.columns.get("http_status", []):
        code = numbers(frame[column.name])[0] if column.name in frame.columns else None
        if code is not None:
            verdicts.append(_code_verdict(code))
            errors.append(_when(code >= 400, code.cast(pl.Int64).cast(pl.String)))
    for column in plan.columns.get("error", []):
        cells = text_of(frame, column.name)
        if cells is not None:
            cells = cells.set(
                cells.str.to_lowercase()
                .is_in(["0", "false", "no", "ok", "200"])
                .fill_null(value=False),
                None,
            )
            aborted = _aborted(cells.str.to_lowercase())
            verdicts.append(
                _when(aborted, "aborted", otherwise=_when(cells.is_not_null(), "failed"))
            )
            errors.append(_short_error(cells))
    for column in plan.columns.get("status", []):
        cells = text_of(frame, column.name)
        if cells is not None:
            verdicts.append(_word_verdict(cells, words_of(column.name)[0]))
            code = cells.cast(pl.Float64, strict=False)
            errors.append(_when(code >= 400, cells))
    told = pl.select(
        pl.when(_any(verdicts, "aborted"))
        .then(pl.lit("aborted"))
        .when(_any(verdicts, "failed"))
        .then(pl.lit("failed"))
        .when(_any(verdicts, "completed"))
        .then(pl.lit("completed"))
    ).to_series()
    if len(told) != values.height:
        told = pl.repeat(None, values.height, dtype=pl.String, eager=True)
    explicit = bool(set(plan.columns) & {"http_status", "status"})
    answered = (
        (pl.col("output_tokens") > 0)
        | (
            pl.col("output_tokens").is_null()
            & pl.any_horizontal(
                pl.col("e2e_ms", "end_raw", "first_at_raw", "chunk_first").is_not_null()
                | (pl.col("ttft_ms") > 0)
            )
        )
    ).fill_null(value=False)
    silent = (
        pl.when(answered & ~pl.lit(explicit)).then(pl.lit("completed")).otherwise(pl.lit("unknown"))
    )
    if plan.zero_output_fails:  # BurstGPT: an answer of no tokens is a failed request
        silent = pl.when(pl.col("output_tokens") == 0).then(pl.lit("failed")).otherwise(silent)
    error = coalesced([*errors]) if errors else None
    return values.with_columns(
        told.alias("told"), or_null(error, values.height, pl.String).alias("error")
    ).with_columns(status=pl.coalesce("told", silent))


def _when(
    condition: pl.Series, then: str | pl.Series, otherwise: pl.Series | None = None
) -> pl.Series:
    value = pl.lit(then) if isinstance(then, str) else then
    chosen = pl.when(condition.fill_null(value=False)).then(value)
    return pl.select(chosen if otherwise is None else chosen.otherwise(otherwise)).to_series()


def _any(verdicts: list[pl.Series], word: str) -> pl.Expr:
    if not verdicts:
        return pl.lit(value=False)
    return pl.any_horizontal([(v == word).fill_null(value=False) for v in verdicts])


def _code_verdict(code: pl.Series) -> pl.Series:
    good = _when((code >= 200) & (code < 400), "completed")
    bad = _when(code >= 400, "failed", otherwise=good)
    return _when(code == 499, "aborted", otherwise=bad)  # 499: the client closed the connection


def _word_verdict(cells: pl.Series, header: str) -> pl.Series:
    """A status word; numbers are HTTP codes, or 0 and 1 under a header such as `success`."""
    code = cells.cast(pl.Float64, strict=False)
    word = cells.str.to_lowercase()
    yes_no = header in ("success", "succeeded", "ok", "result")
    good = _when(
        word.str.contains(_OK) | ((code == 1) & yes_no), "completed", otherwise=_code_verdict(code)
    )
    bad = _when(word.str.contains(_FAILED) | ((code == 0) & yes_no), "failed", otherwise=good)
    return _when(_aborted(word), "aborted", otherwise=bad)


def _aborted(words: pl.Series) -> pl.Series:
    return words.str.contains(_ABORTED) & ~words.str.contains(_LEFT_ALONE)


def _short_error(cells: pl.Series) -> pl.Series:
    """The kind of an error, and of one without a name how long its text is: it may quote the prompt."""
    texts = cells.drop_nulls().unique().to_list()
    kinds = {text: _kind(text) for text in texts}
    return cells.replace_strict(kinds, default=None, return_dtype=pl.String)


def _kind(text: str) -> str:
    kind = error_kind(text) or UNNAMED
    named = kind != UNNAMED or text.strip() == UNNAMED
    return kind if named else f"error text of {len(text)} characters"
