"""What the gauge of a release says on an idle server whose last batch had a request in the inflight queue.

    idle_gauge.py RELEASE_DIR

For releases up to 0.5.3, whose scheduler reports that it is idle in `Scheduler.check_memory`: that method and the collector are
the released code, on a server of plain values whose pools are full and whose queues are empty. Writes one JSON object: the
page after the batch, and after each of two idle reports.
"""

import ast
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import release


def method(path: Path, name: str, namespace: dict):
    """A method of the release's scheduler, compiled from its own text."""
    body = ast.parse(path.read_text()).body
    scheduler = next(node for node in body if isinstance(node, ast.ClassDef) and node.name == "Scheduler")
    found = next(node for node in scheduler.body if isinstance(node, ast.FunctionDef) and node.name == name)
    exec(compile(ast.Module([found], []), str(path), "exec"), namespace)
    return namespace[name]


def main():
    folder = Path(sys.argv[1]).resolve()
    release.load(folder, 0, None, "nixl")
    from gauge import MetricsCollector, registry
    from prometheus_client import generate_latest
    from sglang.srt.disaggregation.utils import DisaggregationMode

    collector = MetricsCollector(folder)
    collector.log(["a request"])
    pages = [generate_latest(registry()).decode()]
    clock = SimpleNamespace(perf_counter=time.perf_counter)
    check_memory = method(folder / "sglang/srt/managers/scheduler.py", "check_memory",
                          {"time": clock, "DisaggregationMode": DisaggregationMode})
    scheduler = SimpleNamespace(
        is_hybrid=False, max_total_num_tokens=64, _get_token_info=lambda: (0, 0.0, 64, 0), disaggregation_mode=DisaggregationMode.PREFILL,
        tree_cache=SimpleNamespace(protected_size=lambda: 0), req_to_token_pool=SimpleNamespace(size=1, free_slots=[0]),
        enable_metrics=True, current_scheduler_metrics_enabled=lambda: True, metrics_collector=collector.real,
        stats=collector.stats, running_batch=SimpleNamespace(reqs=[]), waiting_queue=[], grammar_queue=[],
        disagg_prefill_bootstrap_queue=SimpleNamespace(queue=[]), disagg_prefill_inflight_queue=[],
        _publish_kv_events=lambda: None)
    for _ in range(2):
        # The report comes thirty seconds after the last one: the clock is set, not waited for.
        before, now = collector.last_log_time, time.perf_counter()
        clock.perf_counter = lambda: before + 31
        check_memory(scheduler)
        assert collector.last_log_time >= now, "the server did not report that it is idle"
        pages.append(generate_latest(registry()).decode())
    print(json.dumps(pages))


if __name__ == "__main__":
    main()
