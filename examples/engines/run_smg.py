"""The smg gateway (the SGLang model gateway's successor) before stub workers that pdtrace records.

python run_smg.py FOLDER [--mode disaggregated|aggregated] [--requests 40]

The capture lies in FOLDER/capture (pdtrace diagnose reads it), what the client saw in FOLDER/truth.jsonl.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from processes import arguments, free_ports, load, running, save
from receiver import receiving
from venvs import environment

VERSION = "1.13.0"
MODEL = "stub"
MODES = ("disaggregated", "aggregated")
STUB = Path(__file__).with_name("smg_worker.py")


def install() -> Path:
    """The Python that has the gateway."""
    return environment("smg", [[f"smg=={VERSION}"]])


def roles(mode: str) -> list[str]:
    """Workers of a mode: two of each kind."""
    return ["aggregated"] * 2 if mode == "aggregated" else ["prefill"] * 2 + ["decode"] * 2


@contextlib.contextmanager
def serving(folder: Path, mode: str) -> Iterator[str]:
    """The gateway and its workers run while the block does; yields its address."""
    gateway = str(install().with_name("smg"))
    port, metrics, grpc_port, http_port, *ports = free_ports(4 + len(roles(mode)))
    with receiving(folder, grpc_port, http_port), running(folder) as them:
        for rank, (role, own) in enumerate(zip(roles(mode), ports, strict=True)):
            them.start(
                f"{role}{rank}",
                [sys.executable, str(STUB), role, str(own), str(folder / "workers")],
                {},
                f"{role}{rank}.out",
            )
        addresses = [f"http://127.0.0.1:{own}" for own in ports]
        for address in addresses:
            them.wait(f"{address}/health")
        command = [
            gateway, "launch", "--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin",
            "--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics), "--log-json", "--log-dir", str(folder),
            "--disable-tokenizer-autoload",  # it would ask a model hub
            "--enable-trace", "--otlp-traces-endpoint", f"127.0.0.1:{grpc_port}",
        ]  # fmt: skip
        if mode == "aggregated":
            command += ["--worker-urls", *addresses]
        else:
            command += ["--pd-disaggregation"]
            for role, address in zip(roles(mode), addresses, strict=True):
                # The stub's door for KV is its own port, where SGLang has a bootstrap server.
                door = [address.rsplit(":", 1)[1]] if role == "prefill" else []
                command += [f"--{role}", address, *door]
        them.start("smg", command, {}, "smg.log")
        url = f"http://127.0.0.1:{port}"
        them.wait(f"{url}/workers", lambda page: page.count('"is_healthy":true') == len(addresses))
        yield url
        save(f"http://127.0.0.1:{metrics}/metrics", folder / "metrics_smg.prom")
        time.sleep(1)
        them.stop()


def main() -> None:
    given = arguments(__doc__, MODES, 40).parse_args()
    with serving(given.folder / "capture", given.mode) as url:
        load(url, MODEL, given.folder / "truth.jsonl", "--requests", given.requests)


if __name__ == "__main__":
    main()
