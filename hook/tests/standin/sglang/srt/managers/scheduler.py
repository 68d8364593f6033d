"""Stand-in: the scheduler."""

from types import SimpleNamespace

from sglang.srt.disaggregation.prefill import SchedulerDisaggregationPrefillMixin


class Scheduler(SchedulerDisaggregationPrefillMixin):
    def __init__(self, manager):
        self.disagg_prefill_inflight_queue = []
        self.disagg_prefill_bootstrap_queue = SimpleNamespace(queue=[], kv_manager=manager)
        self.paused = False

    def pause_generation(self, recv_req):
        self.paused = True

    def continue_generation(self, recv_req):
        self.paused = False
