"""Halves and wholes: which requests ran whole and which were split, and what that says of workers and deployments."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from pdtrace._identity_headline import COVERAGE
from pdtrace.store import Store


def with_mode(requests: pl.DataFrame, moving: Sequence[str] = ()) -> pl.DataFrame:
    """Mode per request; a lone engine leg is aggregated unless its worker mostly does one half or is `moving` KV."""
    pairs = pl.col("prefill_worker").is_not_null() & pl.col("decode_worker").is_not_null()
    parts = [*_halves(requests, pairs), *moving]
    whole = pl.col("ran") & ~pl.col("ran_on").is_in(parts).fill_null(value=False)
    half = pl.col("prefill_worker").is_not_null() | pl.col("decode_worker").is_not_null()
    told = pl.col("chosen").is_not_null()
    ran_on = (
        pl.when(whole & ~half).then("ran_on").when(told & (pl.col("chosen") != "")).then("chosen")
    )
    return requests.with_columns(
        pl.when(pairs)
        .then(pl.lit("disaggregated"))
        .when((whole & ~half) | told)
        .then(pl.lit("aggregated"))
        .otherwise(pl.lit("unknown"))
        .alias("mode"),
        pl.coalesce("prefill_worker", ran_on).alias("prefill_worker"),
        pl.coalesce("decode_worker", ran_on).alias("decode_worker"),
    ).drop("chosen", "ran_on", "ran")


def _halves(requests: pl.DataFrame, pairs: pl.Expr) -> list[str]:
    """Workers that are one half of a pair in most of their requests."""
    both = requests.filter(pairs)
    if both.height == 0:
        return []
    parts = pl.concat([both.select(worker="prefill_worker"), both.select(worker="decode_worker")])
    paired = parts.group_by("worker").agg(pl.len().alias("paired"))
    alone = requests.filter("ran").group_by(worker="ran_on").agg(pl.len().alias("alone"))
    known = paired.join(alone, on="worker", how="left")
    return known.filter(pl.col("paired") >= pl.col("alone").fill_null(0))["worker"].to_list()


def lone_halves(legs: pl.DataFrame, requests: pl.DataFrame) -> pl.DataFrame:
    """Engine legs of requests of which only one half of a P/D pair is on record: r, row, duty, new.

    A worker that decodes for pairs may have computed this prompt itself, or its partner's leg is
    missing: nobody can tell, so that its first-token time is nobody's TTFT.
    """
    decoders = requests.filter(pl.col("mode") == "disaggregated")["decode_worker"].unique()
    open_ = requests.filter(pl.col("mode") == "unknown").select("r")
    lone = legs.filter(pl.col("observer") == "engine").join(open_, on="r", how="semi")
    told = pl.col("duty")
    duty = (
        pl.when(told.is_not_null())
        .then(told)
        .when("plike")
        .then(pl.lit("prefill"))
        .when(pl.col("worker").is_in(decoders.drop_nulls().implode()))
        .then(pl.lit("decode"))
    )
    found = lone.select("r", "row", duty.alias("duty"), told.is_null().alias("new"))
    return found.filter(pl.col("duty").is_not_null())


def without_wholes(seen: pl.DataFrame, halves: pl.DataFrame) -> pl.DataFrame:
    """No latency of the whole request for requests that the engines saw one half of."""
    half = pl.col("r").is_in(halves["r"].unique().implode())
    return seen.with_columns(pl.when(half.not_()).then(pl.col(c)).alias(c) for c in ("ttft", "e2e"))


def write_roles(
    store: Store, inferred: pl.DataFrame, legs: pl.DataFrame, requests: pl.DataFrame
) -> None:
    """Inferred roles of legs, and of workers from what their requests showed."""
    if inferred.height:
        _write_duties(store, inferred)
    duty = (
        legs.select("worker", "duty")
        .drop_nulls("duty")
        .group_by("worker", "duty")
        .agg(pl.len().alias("legs"))
    )
    aggregated = (
        requests.select("mode", "decode_worker")
        .filter(pl.col("mode") == "aggregated")
        .group_by(worker="decode_worker")
        .agg(pl.len().alias("legs"))
        .with_columns(pl.lit("aggregated").alias("duty"))
    )
    # A server that is its own front end (vLLM's API server) is an engine.
    seen = legs.select("worker", "observer")
    engines = seen.filter(pl.col("observer") == "engine")["worker"].unique()
    outside = (
        seen.filter(pl.col("observer") != "engine")
        .filter(~pl.col("worker").is_in(engines.implode()))
        .group_by("worker", duty="observer")
        .agg(pl.len().alias("legs"))
    )
    roles = (
        pl.concat([duty, aggregated.select(duty.columns), outside.select(duty.columns)])
        .filter(pl.col("worker").is_not_null())
        .with_columns((pl.col("legs") / pl.col("legs").sum().over("worker")).alias("share"))
        .filter(pl.col("share") >= COVERAGE)
    )
    store.connection.register("_roles", roles.to_arrow())
    store.execute(
        """UPDATE workers SET role = r.duty, role_basis = 'inferred' FROM _roles r
           WHERE workers.worker = r.worker AND workers.role IS NULL"""
    )
    store.connection.unregister("_roles")


def _write_duties(store: Store, inferred: pl.DataFrame) -> None:
    if (kept := store.kept_aside("legs")) is not None:
        rows = kept.select(pl.int_range(pl.len()).alias("row"))
        found = inferred.unique("row", keep="first", maintain_order=True)
        duty = rows.join(found, on="row", how="left", maintain_order="left")["duty"]
        basis = pl.when(duty.is_not_null()).then(pl.lit("inferred")).otherwise("role_basis")
        role = pl.coalesce(duty, "role")
        store.keep_aside("legs", kept.with_columns(role=role, role_basis=basis))
        return
    store.connection.register("_duties", inferred.to_arrow())
    store.execute(
        """UPDATE legs SET role = d.duty, role_basis = 'inferred' FROM _duties d
           WHERE legs.rowid = d.row"""
    )
    store.connection.unregister("_duties")


def write_modes(store: Store, requests: pl.DataFrame, headlines: pl.DataFrame) -> None:
    """Mode and headline observer of each deployment."""
    known = (
        requests.select("deployment", "mode")
        .filter(pl.col("mode") != "unknown")
        .group_by("deployment")
        .agg((pl.col("mode") == "disaggregated").mean().alias("share"))
    )
    modes = known.select(
        "deployment",
        mode=pl.when(pl.col("share") >= COVERAGE)
        .then(pl.lit("disaggregated"))
        .when(pl.col("share") <= 1 - COVERAGE)
        .then(pl.lit("aggregated"))
        .otherwise(pl.lit("mixed")),
    )
    before = store.short("FROM deployments")
    named = before.drop("headline_observer").join(
        headlines.select("deployment", headline_observer="observer"),
        on="deployment",
        how="left",
        maintain_order="left",
    )
    named = named.join(
        modes.rename({"mode": "found"}), on="deployment", how="left", maintain_order="left"
    )
    named = named.with_columns(mode=pl.coalesce("found", "mode"))
    store.replace("deployments", named.select(before.columns))
