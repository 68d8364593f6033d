"""The prefill server's own metrics: the release's `SchedulerMetricsCollector` on the real prometheus_client, as Prometheus text
on the loopback interface.

Where `PROMETHEUS_MULTIPROC_DIR` is set (`launch_server.py` does, as SGLang does), the scheduler's process writes its values
into files there, and whoever answers `/metrics` reads them. The gauge keeps the value of the last batch, as SGLang's does:
with a request pinned the server is never idle enough to refresh it.
"""

import importlib.util
import inspect
import os
import sys
from types import SimpleNamespace

import source

HOMES = ("sglang.srt.observability.metrics_collector", "sglang.srt.metrics.collector")  # from 0.5.10 on, and before
LABELS = {"model_name": "test-bed", "engine_type": "prefill", "tp_rank": 0, "pp_rank": 0, "moe_ep_rank": 0}


class Settings(SimpleNamespace):
    """Arguments of a server that was given none of which its collector wants to know."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return {"prefill_delayer_max_delay_passes": 30, "should_export_expert_balancedness_to_prometheus": lambda: False}.get(name)


def collector_module(folder):
    """The release's own module, under another name: others import only names of it that are never used."""
    home, path = next((home, path) for home in HOMES if (path := source.file_of(folder, home)).exists())
    spec = importlib.util.spec_from_file_location(f"{home}_as_released", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in [name for name in vars(module) if name.startswith("get_") and name[4:] in ("schedule", "observability")]:
        setattr(module, name, Settings)
    return module


def registry():
    """What SGLang's `/metrics` shows (`add_prometheus_middleware`)."""
    from prometheus_client import REGISTRY, CollectorRegistry, multiprocess

    if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
        return REGISTRY
    merged = CollectorRegistry()
    multiprocess.MultiProcessCollector(merged)
    return merged


class MetricsCollector:
    """What the queue's method calls, around the release's own collector."""

    def __init__(self, folder):
        from prometheus_client import start_http_server

        self.module = collector_module(folder)
        real = self.module.SchedulerMetricsCollector
        takes_arguments = "server_args" in inspect.signature(real.__init__).parameters  # not yet in 0.5.3
        self.real = real(labels=LABELS, **({"server_args": Settings()} if takes_arguments else {}))
        self.stats = self.module.SchedulerStats()
        server, _ = start_http_server(0, "127.0.0.1", registry())
        self.port = server.server_port

    @property
    def last_log_time(self):
        return self.real.last_log_time

    def log(self, inflight_reqs):
        """As the report of a batch does."""
        count = getattr(self.module, "QueueCount", None)
        self.stats.num_prefill_inflight_queue_reqs = count.from_reqs(inflight_reqs) if count else len(inflight_reqs)
        self.real.log_stats(self.stats)

    def increment_transfer_failed_reqs(self):
        self.real.increment_transfer_failed_reqs()

    def increment_bootstrap_failed_reqs(self):
        self.real.increment_bootstrap_failed_reqs()
