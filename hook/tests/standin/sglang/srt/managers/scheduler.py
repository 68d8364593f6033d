"""Stand-in: the scheduler. It is a prefill's until `become_decode`."""

from types import SimpleNamespace

from sglang.srt.disaggregation.decode import DecodePreallocQueue, DecodeTransferQueue, SchedulerDisaggregationDecodeMixin
from sglang.srt.disaggregation.prefill import SchedulerDisaggregationPrefillMixin


class Scheduler(SchedulerDisaggregationDecodeMixin, SchedulerDisaggregationPrefillMixin):
    def __init__(self, manager):
        self.disagg_prefill_inflight_queue = []
        self.disagg_prefill_bootstrap_queue = SimpleNamespace(queue=[], kv_manager=manager)
        self.disagg_decode_prealloc_queue = self.disagg_decode_transfer_queue = None
        self.paused = False

    def become_decode(self, manager):
        self.disagg_prefill_inflight_queue = []
        self.disagg_prefill_bootstrap_queue = None
        self.disagg_decode_prealloc_queue = DecodePreallocQueue(manager)
        self.disagg_decode_transfer_queue = DecodeTransferQueue()

    def pause_generation(self, recv_req):
        self.paused = True

    def continue_generation(self, recv_req):
        self.paused = False
