"""Hashes of prompt blocks in request tables: lists of whole numbers (column hash_ids and its like).

The published traces with such a column (Mooncake, FAST'25: 512 tokens; Bailian: 16) do not say the
size of a block in the file: it is the power of two with which the lengths of all lists agree.
"""

from __future__ import annotations

import polars as pl

from ._table_plan import Plan

_NAMES = ("hash_ids", "block_hashes", "input_sequence_hashes")
_SIZES = tuple(2**n for n in range(12, 2, -1))  # 4096 to 8 tokens
_EVIDENCE_ROWS = 20  # of unlike lists: fewer agree with a size by chance


def is_block_column(name: str) -> bool:
    """Whether a column of this name (of nested keys the last one) holds lists of block hashes."""
    return name.rpartition(".")[2].strip().lower() in _NAMES


def prefix_blocks(plan: Plan, frame: pl.DataFrame, values: pl.DataFrame) -> pl.DataFrame | None:
    """Rows of `prefix_blocks` for the legs in `values`, which stand beside the rows of `frame`."""
    name = next((n for n in frame.columns if is_block_column(n)), None)
    if name is None:
        return None
    dtype = frame[name].dtype
    if not isinstance(dtype, pl.List) or not isinstance(dtype.inner, pl.DataType):
        return None
    if not dtype.inner.is_integer():
        return None
    rows = values.select("leg", "record", "prompt_tokens").with_columns(
        hashes=frame[name].cast(pl.List(pl.UInt64), strict=False)
    )
    whole = pl.col("hashes").list.len() > 0
    told = rows.filter(whole & ~pl.col("hashes").list.eval(pl.element().is_null()).list.any())
    size = plan.block_tokens or block_size(told["prompt_tokens"], told["hashes"].list.len())
    plan.block_tokens = size
    return told.select(
        "leg", "record", pl.lit(size, dtype=pl.Int64).alias("block_tokens"), "hashes"
    )


def block_size(prompt_tokens: pl.Series, blocks: pl.Series) -> int | None:
    """Tokens of a block: the only size that explains how many blocks prompts have; None cannot tell.

    A last partial block is counted (published traces) or left out (some engines).
    """
    both = pl.DataFrame({"tokens": prompt_tokens, "blocks": blocks}).drop_nulls()
    if both["blocks"].n_unique() < 2 or both.height < _EVIDENCE_ROWS:
        return None
    tokens, count = both["tokens"], both["blocks"].cast(pl.Int64)
    fits = [
        size
        for size in _SIZES
        if ((tokens + size - 1) // size == count).all() or (tokens // size == count).all()
    ]
    return fits[0] if len(fits) == 1 else None
