"""The prefill server's own metrics, as Prometheus text on the loopback interface.

The gauge keeps the value of the last batch, as SGLang's does: with a request pinned the server is never idle enough to
refresh it.
"""

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

LABELS = '{engine_type="prefill",model_name="test-bed",moe_ep_rank="0",pp_rank="0",tp_rank="0"}'


class MetricsCollector:
    """Stands where SGLang's SchedulerMetricsCollector does; the queue's method calls the increments."""

    def __init__(self):
        self.inflight = self.transfer_failed = self.bootstrap_failed = 0
        self.last_log_time = 0.0
        self.port = self._serve()

    def log(self, inflight_reqs):
        self.inflight, self.last_log_time = len(inflight_reqs), time.perf_counter()

    def increment_transfer_failed_reqs(self):
        self.transfer_failed += 1

    def increment_bootstrap_failed_reqs(self):
        self.bootstrap_failed += 1

    def text(self) -> str:
        series = [
            ("gauge", "num_prefill_inflight_queue_reqs", "The number of requests in the prefill inflight queue.", self.inflight),
            ("counter", "num_transfer_failed_reqs_total", "The number of transfer failed requests.", self.transfer_failed),
            ("counter", "num_bootstrap_failed_reqs_total", "The number of bootstrap failed requests.", self.bootstrap_failed),
        ]
        return "".join(f"# HELP sglang:{name} {text}\n# TYPE sglang:{name} {kind}\nsglang:{name}{LABELS} {float(value)}\n"
                       for kind, name, text, value in series)

    def _serve(self) -> int:
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                body = collector.text().encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=http.serve_forever, daemon=True).start()
        return http.server_port
