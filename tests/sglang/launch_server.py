"""Stands where `sglang.launch_server` does: the process that starts the scheduler's and answers `/metrics` for it.

    launch_server.py [--host HOST] [--port PORT] [--enable-metrics] -- ARGUMENTS OF server.py

As SGLang's: the folder of the values is made before anything imports prometheus_client (`set_prometheus_multiproc_dir`), the
scheduler writes them, this process merges and serves them (`add_prometheus_middleware`; here over WSGI, there over ASGI), and
its command line stays as it is while the scheduler's becomes a title.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--enable-metrics", action="store_true")
    parser.add_argument("server", nargs="+", metavar="ARGUMENT")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=os.environ.get("PROMETHEUS_MULTIPROC_DIR")) as folder:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
        if options.enable_metrics:
            from prometheus_client import CollectorRegistry, multiprocess, start_http_server

            registry = CollectorRegistry()
            multiprocess.MultiProcessCollector(registry)
            start_http_server(options.port, options.host, registry)
        return subprocess.call([sys.executable, str(Path(__file__).with_name("server.py")), *options.server])


if __name__ == "__main__":
    sys.exit(main())
