"""NVIDIA Dynamo with its mocker as the engine: frontend, KV router and workers, no GPU, etcd or NATS.

python run_dynamo.py FOLDER [--mode disaggregated|bootstrap|aggregated] [--requests 40]

The capture lies in FOLDER/capture (pdtrace diagnose reads it), what the client saw in FOLDER/truth.jsonl.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import tiny_model
from processes import arguments, free_ports, get, load, running, save
from receiver import receiving
from venvs import environment

VERSION = "1.6.1"
# The package asks for aisimulate, a placeholder whose wheel lies on an index of the vendor; the mocker does
# not need it. What is listed is all that frontend and mocker import.
STEPS = [
    ["--no-deps", f"ai-dynamo=={VERSION}"],
    [f"ai-dynamo-runtime=={VERSION}", "msgspec", "pyzmq", "prometheus-client", "packaging", "pyyaml"],
]  # fmt: skip
MODEL = "tiny"
MODES = ("disaggregated", "bootstrap", "aggregated")


def install() -> Path:
    """The Python that has Dynamo."""
    return environment("dynamo", STEPS)


def common(folder: Path, discovery: str, grpc_port: int) -> dict[str, str]:
    """The environment of every process: loopback only, discovery in files, all telemetry on."""
    loopback = ("DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST", "DYN_SYSTEM_HOST")  # fmt: skip
    endpoint = f"http://127.0.0.1:{grpc_port}"
    return dict.fromkeys(loopback, "127.0.0.1") | {
        "DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": discovery,
        "DYN_REQUEST_PLANE": "tcp", "DYN_EVENT_PLANE": "zmq",
        "DYN_LOGGING_JSONL": "true", "DYN_LOGGING_SPAN_EVENTS": "true", "DYN_LIFECYCLE_TRACE_ENABLED": "1",
        "DYN_FPM_TRACE": "1", "DYN_FPM_MODE": "full", "DYN_FPM_OUTPUT_PATH": str(folder / "fpm"),
        "OTEL_EXPORT_ENABLED": "true", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "OTEL_BSP_SCHEDULE_DELAY": "200",
        "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": endpoint,
        "OTEL_EXPORTER_OTLP_LOGS_ENDPOINT": endpoint,
        "HOSTNAME": "host-a",  # else the machine's name gets into spans
        "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PYTHONUNBUFFERED": "1",
    }  # fmt: skip


def roles(mode: str) -> list[str]:
    """Workers of a mode: two of each kind."""
    return ["agg"] * 2 if mode == "aggregated" else ["prefill"] * 2 + ["decode"] * 2


@contextlib.contextmanager
def serving(folder: Path, mode: str, model: Path) -> Iterator[str]:
    """Dynamo runs while the block does; yields its address. Its dumps are complete after the block."""
    python = str(install())
    frontend, grpc_port, http_port, rpc, *ports = free_ports(4 + 3 * len(roles(mode)))
    with (
        tempfile.TemporaryDirectory() as discovery,
        receiving(folder, grpc_port, http_port),
        running(folder) as them,
    ):
        env = common(folder, discovery, grpc_port)
        trace = {
            "DYN_REQUEST_TRACE": "1", "DYN_REQUEST_TRACE_RECORDS": "request_end,tool",
            "DYN_REQUEST_TRACE_SINKS": "file,otel", "DYN_REQUEST_TRACE_FILE_FORMAT": "jsonl",
            "DYN_REQUEST_TRACE_FILE_PATH": str(folder / "request_trace.jsonl"),
            "DYN_REQUEST_TRACE_FILE_COMPRESSION": "none",
        }  # fmt: skip
        them.start(
            "frontend",
            [python, "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(frontend), "--router-mode", "kv"],
            env | trace | {"OTEL_SERVICE_NAME": "dynamo-frontend", "DYN_TCP_RPC_PORT": str(rpc)},
            "frontend.log.jsonl",
        )  # fmt: skip
        for rank, role in enumerate(roles(mode)):
            system, rpc, bootstrap = ports[3 * rank : 3 * rank + 3]
            command = [
                python, "-m", "dynamo.mocker", "--model-path", str(model), "--model-name", MODEL,
                "--block-size", "16", "--num-gpu-blocks-override", "4096", "--max-num-batched-tokens", "2048",
            ]  # fmt: skip
            if mode != "aggregated":
                command += ["--disaggregation-mode", role, "--kv-transfer-bandwidth", "1"]
            if mode == "bootstrap" and role == "prefill":  # both hops at once, as SGLang does it
                command += ["--bootstrap-ports", str(bootstrap)]
            own = {"OTEL_SERVICE_NAME": f"dynamo-worker-{role}", "DYN_SYSTEM_PORT": str(system), "DYN_TCP_RPC_PORT": str(rpc)}  # fmt: skip
            them.start(f"{role}{rank}", command, env | own, f"{role}{rank}.log.jsonl")
        url = f"http://127.0.0.1:{frontend}"
        awaited = "backend/generate" if mode == "aggregated" else "prefill/generate"
        them.wait(f"{url}/health", lambda page: awaited in page)
        them.wait(f"{url}/v1/models", lambda page: f'"{MODEL}"' in page)
        _wait_for_all(url, len(roles(mode)))
        yield url
        for port in (frontend, *ports[0::3]):
            save(f"http://127.0.0.1:{port}/metrics", folder / f"metrics_{port}.prom")
        time.sleep(1)  # exporters flush each 200 ms
        them.stop()


def _wait_for_all(url: str, workers: int) -> None:
    """Until the frontend knows each worker; later ones would get no request."""
    for _ in range(100):
        if get(f"{url}/health").count('"generate"') >= workers:
            return
        time.sleep(0.1)


def main() -> None:
    given = arguments(__doc__, MODES, 40).parse_args()
    model = tiny_model.make(given.folder / "model")
    with serving(given.folder / "capture", given.mode, model) as url:
        load(url, MODEL, given.folder / "truth.jsonl", "--requests", given.requests)


if __name__ == "__main__":
    main()
