"""An OTLP receiver for captures: gRPC and HTTP, traces and logs, each request kept as it came.

python receiver.py FOLDER GRPC_PORT HTTP_PORT
"""

from __future__ import annotations

import contextlib
import gzip
import struct
import sys
import threading
from collections.abc import Iterator
from concurrent import futures
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import grpc
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2, logs_service_pb2_grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

KINDS = {
    "traces": (trace_service_pb2.ExportTraceServiceResponse, trace_service_pb2_grpc, "TraceService"),
    "logs": (logs_service_pb2.ExportLogsServiceResponse, logs_service_pb2_grpc, "LogsService"),
    "metrics": (metrics_service_pb2.ExportMetricsServiceResponse, metrics_service_pb2_grpc, "MetricsService"),
}  # fmt: skip


class Files:
    """`otlp_<kind>.pb`: big-endian length and body, request after request."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()

    def keep(self, kind: str, body: bytes) -> None:
        with self._lock, (self._folder / f"otlp_{kind}.pb").open("ab") as out:
            out.write(struct.pack(">I", len(body)) + body)


def _grpc_server(files: Files, port: int) -> grpc.Server:
    server = grpc.server(
        futures.ThreadPoolExecutor(4), options=[("grpc.max_receive_message_length", 64 << 20)]
    )
    for kind, (response, module, service) in KINDS.items():

        def export(_self: object, request: object, _context: object, kind=kind, response=response):
            files.keep(kind, request.SerializeToString())
            return response()

        servicer = type(kind, (getattr(module, f"{service}Servicer"),), {"Export": export})
        getattr(module, f"add_{service}Servicer_to_server")(servicer(), server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    return server


def _http_server(files: Files, port: int) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            kind = self.path.rsplit("/", 1)[-1]
            files.keep(kind, body)
            answer = KINDS[kind][0]().SerializeToString()
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


@contextlib.contextmanager
def receiving(folder: Path, grpc_port: int, http_port: int) -> Iterator[None]:
    """Receive while the block runs."""
    folder.mkdir(parents=True, exist_ok=True)
    files = Files(folder)
    over_grpc, over_http = _grpc_server(files, grpc_port), _http_server(files, http_port)
    over_grpc.start()
    thread = threading.Thread(target=over_http.serve_forever, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over_grpc.stop(2).wait()
        over_http.shutdown()
        over_http.server_close()
        thread.join()


if __name__ == "__main__":
    with receiving(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])):
        print("ready", flush=True)
        threading.Event().wait()
