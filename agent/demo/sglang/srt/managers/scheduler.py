"""Stand-in for the scheduler: requests go from a bootstrap queue into the inflight queue, and one loop polls both."""

import queue
import time
from types import SimpleNamespace

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.prefill import SchedulerDisaggregationPrefillMixin

PAGES_PER_REQUEST = 4
SLOTS = 64
PASS_SECONDS = 0.001


class Req:
    def __init__(self, rid, room):
        self.rid, self.bootstrap_room = rid, room
        self.slot = self.finished_reason = self.disagg_kv_sender = None
        self.time_stats = SimpleNamespace(prefill_transfer_queue_entry_time=0.0)


class Scheduler(SchedulerDisaggregationPrefillMixin):
    def __init__(self):
        from sglang.srt.disaggregation.nixl.conn import NixlKVManager  # late, as in SGLang: plugins come first

        self.pages = [0] * (SLOTS * PAGES_PER_REQUEST)
        self.free_slots = list(range(SLOTS))
        self.ps = SimpleNamespace(tp_size=1, tp_rank=0, pp_size=1, pp_rank=0, attn_tp_size=1, attn_cp_size=1, dp_size=1)
        self.disagg_prefill_bootstrap_queue = SimpleNamespace(queue=[], kv_manager=NixlKVManager(self.pages))
        self.disagg_prefill_inflight_queue, self.waiting_queue = [], []
        self.released, self.finished = {}, {}
        self.gracefully_exit = self._engine_paused = False
        self.inbox = queue.SimpleQueue()  # calls to make between two passes

    def event_loop_normal_disagg_prefill(self):
        while not self.gracefully_exit:
            while not self.inbox.empty():
                self.inbox.get()()
            if not self._engine_paused:
                self.pop_bootstrapped()
                self.process_disagg_prefill_inflight_queue()
            time.sleep(PASS_SECONDS)

    def pause_generation(self, recv_req):
        self._engine_paused = True

    def continue_generation(self, recv_req):
        self._engine_paused = False

    def add_request(self, rid, room):
        from sglang.srt.disaggregation.nixl.conn import NixlKVSender

        req = Req(rid, room)
        bootstrap = self.disagg_prefill_bootstrap_queue
        req.disagg_kv_sender = NixlKVSender(mgr=bootstrap.kv_manager, bootstrap_addr="", bootstrap_room=room)
        bootstrap.queue.append(req)
        return req

    def pop_bootstrapped(self):
        bootstrap, stay = self.disagg_prefill_bootstrap_queue, []
        for req in bootstrap.queue:
            if req.disagg_kv_sender.poll() == KVPoll.WaitingForInput and self.free_slots:
                req.slot = self.free_slots.pop(0)
                req.disagg_kv_sender.init(PAGES_PER_REQUEST, req.slot)
                self.waiting_queue.append(req)
            else:
                stay.append(req)
        bootstrap.queue = stay

    def prefill(self, req, content):
        """Fills the request's pages, then puts it into the inflight queue and sends them."""
        self.waiting_queue.remove(req)
        indices = range(req.slot * PAGES_PER_REQUEST, (req.slot + 1) * PAGES_PER_REQUEST)
        self.pages[indices.start:indices.stop] = [content] * PAGES_PER_REQUEST
        self.disagg_prefill_inflight_queue.append(req)
        req.disagg_kv_sender.send(indices)
        req.time_stats.prefill_transfer_queue_entry_time = time.perf_counter()

    def release_kv_cache(self, req):
        self.released[req.rid] = self.released.get(req.rid, 0) + 1
        self.free_slots.append(req.slot)

    def stream_output(self, reqs):
        self.finished.update({req.rid: req.finished_reason for req in reqs})

    def abort_request(self, rid):
        told = [req for req in self.disagg_prefill_inflight_queue if req.rid.startswith(rid)]
        for req in told:
            req.disagg_kv_sender.abort()
        return [req.rid for req in told]
