"""Which SGLang server a span comes from: its processes name their threads, seldom the server.

A server is several processes (API server, schedulers, a controller of data parallel ranks), each of
which may export under a resource of its own, or all servers under one bare service name. What worked
on one request is one server; a prefill and a decode server are two, whatever resource they state.
"""

from __future__ import annotations

from collections import defaultdict

import polars as pl

from pdtrace.model import ALIAS_KINDS, Sink

ENGINE = "SGLang"
_STRONG = r"^(?:instance|engine_id|worker_id|pod|pid):"


def with_servers(requests: pl.DataFrame, threads: pl.DataFrame, out: Sink) -> pl.DataFrame:
    """The requests with their server in `worker`; servers are declared with their other names."""
    nodes = _nodes(requests, threads)
    servers = _servers(nodes)
    named = nodes.unique("leg", keep="first", maintain_order=True).select(
        "leg", server=pl.col("node").replace_strict(servers, return_dtype=pl.String)
    )
    found = requests.join(named, on="leg", how="left", maintain_order="left").with_columns(
        worker=pl.coalesce("server", "worker")
    )
    _declare(found, nodes, servers, out)
    return found


def _nodes(requests: pl.DataFrame, threads: pl.DataFrame) -> pl.DataFrame:
    """leg, node (what cannot be two servers), and the name that it gives: resource or thread."""
    strong = pl.col("worker").str.contains(_STRONG).fill_null(value=False)
    host = pl.coalesce(pl.col("host_id").replace("", None), "service_name", pl.lit("host"))
    thread = pl.format("pid:{}@{}", "pid", host.str.slice(0, 8))
    seen = threads.select(
        "leg", "role", strong=strong, front=~pl.col("schedules"),
        name=pl.when(strong).then("worker").otherwise(thread),
    )  # fmt: skip
    roots = requests.filter(strong).select(
        "leg", "role", strong=pl.lit(value=True), front=pl.lit(value=True), name="worker"
    )
    nodes = pl.concat([roots, seen]).filter(pl.col("name").is_not_null())
    return nodes.with_columns(
        node=pl.concat_str("name", pl.col("role").fill_null(""), separator="|")
    ).sort("leg", ~pl.col("front"), "node")


def _servers(nodes: pl.DataFrame) -> dict[str, str]:
    """Node -> worker id: nodes that met at a request are one server."""
    first = pl.col("node").first().over("leg")
    pairs = nodes.select(first.alias("a"), pl.col("node").alias("b")).unique().sort("a", "b")
    group: dict[str, str] = {}

    def head(node: str) -> str:
        while group.setdefault(node, node) != node:
            node = group[node]
        return node

    for a, b in pairs.iter_rows():  # a few processes, not requests
        low, high = sorted((head(a), head(b)))
        group[high] = low
    members: dict[str, list[str]] = defaultdict(list)
    for node in group:
        members[head(node)].append(node)
    told = nodes.select("node", "name", "role", "strong", "front").unique("node").sort("node")
    info = {row["node"]: row for row in told.iter_rows(named=True)}
    roles = dict(told.group_by("name").agg(pl.col("role").n_unique()).iter_rows())
    return {
        node: worker
        for nodes_of in members.values()
        for worker in [_worker([info[node] for node in nodes_of], roles)]
        for node in nodes_of
    }


def _worker(told: list[dict[str, str]], roles: dict[str, int]) -> str:
    """The strongest name among these, of the API server rather than of a scheduler's thread."""
    order = {kind: n for n, kind in enumerate(ALIAS_KINDS)}
    best = min(
        told,
        key=lambda row: (
            not row["strong"],
            order[row["name"].partition(":")[0]],
            not row["front"] and not row["strong"],
            row["name"],
        ),
    )
    # One resource for servers of several roles tells them apart by nothing but their role.
    shared = best["strong"] and roles[best["name"]] > 1
    return f"{best['name']}/{best['role']}" if shared else best["name"]


def _declare(found: pl.DataFrame, nodes: pl.DataFrame, servers: dict[str, str], out: Sink) -> None:
    """Rows of workers, and the resources of their other processes as aliases."""
    times = (
        found.filter(pl.col("server").is_not_null())
        .group_by("server", "service_name")
        .agg(
            pl.col("role").drop_nulls().mode().sort().first(),
            pl.col("role_basis").first(),
            pl.col("start_ns").min(),
            pl.col("end_ns").max(),
        )
        .sort("server", "service_name")
        .unique("server", keep="first", maintain_order=True)
    )
    if times.height:
        out.add(
            "workers",
            times.select(
                pl.col("server").alias("worker"),
                pl.concat_str(
                    pl.col("service_name").fill_null("sglang"),
                    pl.when(pl.col("role").is_in(["prefill", "decode"])).then("role"),
                    separator="-",
                    ignore_nulls=True,
                ).alias("name"),
                pl.lit(ENGINE).alias("engine"),
                "role",
                "role_basis",
                "start_ns",
                "end_ns",
            ),
        )  # fmt: skip
    others = nodes.filter("strong").select("node", "name").unique().sort("node")
    aliases = [
        {"worker": servers[node], "kind": name.partition(":")[0], "value": name.partition(":")[2].partition("@")[0]}
        for node, name in others.iter_rows()
        if "/" not in servers[node] and servers[node] != name
    ]  # fmt: skip
    if aliases:
        out.add("worker_aliases", aliases)
