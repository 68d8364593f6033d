"""A scheduler around SGLang's own inflight queue. Import it only after `release.load`.

`Scheduler` subclasses the release's real mixin, so `process_disagg_prefill_inflight_queue` and all that it calls are the
released code. Model, batches, tokenizer and the rest of the server are not there: requests go from the bootstrap queue into
the inflight queue when a command says so, in the order in which SGLang does it.
"""

import logging
import queue
import sys
import time
from types import SimpleNamespace

import backends
import source
import stand_ins
from gauge import MetricsCollector
from memory import SLOTS, pattern
from release import make_sender, should_send, state_indices

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.prefill import SchedulerDisaggregationPrefillMixin
from sglang.srt.disaggregation.utils import (
    FAKE_BOOTSTRAP_HOST, DisaggregationMode, KVClassType, ReqToMetadataIdxAllocator, TransferBackend, get_kv_class,
    prepare_abort)
from sglang.srt.observability.req_time_stats import SchedulerReqTimeStats

POLL = {value: name for name, value in vars(KVPoll).items() if isinstance(value, int)}
IDLE_REFRESH = 30.0  # seconds between SGLang's refreshes of its gauges on an idle server


def make_classes(folder):
    """`Req` and `Scheduler` with the layout, module and names of the release's own."""
    batch, managers = "sglang.srt.managers.schedule_batch", "sglang.srt.managers.scheduler"
    stand_ins.module(managers)
    for cls, home in ((Req, batch), (Scheduler, managers)):
        cls.names = source.attributes(source.file_of(folder, home), cls.__name__)
        cls.__module__ = home
        setattr(sys.modules[home], cls.__name__, cls)


class Req:
    """The scheduler's request: every attribute of the release's own, filled as far as the queue's method looks."""

    def __init__(self, rid, room, pages, host, port):
        vars(self).update(dict.fromkeys(self.names))
        self.rid = rid
        self.origin_input_ids = list(range(pages))  # a token fills a page
        self.bootstrap_host, self.bootstrap_port, self.bootstrap_room = host, port, room
        self.metadata_buffer_index = -1
        self.pending_bootstrap = self.return_logprob = self.return_routed_experts = False
        self.time_stats = SchedulerReqTimeStats(disagg_mode=DisaggregationMode.PREFILL)

    def pages(self):
        return len(self.origin_input_ids)

    def release_mm_inputs_on_abort(self):
        pass


class Scheduler(SchedulerDisaggregationPrefillMixin):
    def __init__(self, loaded, bootstrap_port, memory):
        vars(self).update({name: None for name in self.names if not hasattr(type(self), name)})
        self.server_args, self.parallel, self.memory = loaded.server_args, loaded.parallel, memory
        self.state_indices = state_indices(loaded.folder)
        self.bootstrap_port = bootstrap_port
        self.disaggregation_mode = DisaggregationMode.PREFILL
        self.transfer_backend = backends.backend(loaded.backend)
        manager_class = get_kv_class(self.transfer_backend, KVClassType.MANAGER)
        backends.after_import(loaded.backend)
        kv_manager = manager_class(memory.kv_args(), self.disaggregation_mode, self.server_args, False)
        self.disagg_prefill_bootstrap_queue = SimpleNamespace(queue=[], kv_manager=kv_manager)
        self.disagg_prefill_inflight_queue = []
        self.waiting_queue = []  # bootstrapped, not prefilled yet
        self.req_to_metadata_buffer_idx_allocator = ReqToMetadataIdxAllocator(SLOTS)
        self.token_to_kv_pool_allocator = SimpleNamespace(page_size=1)
        self.tree_cache = SimpleNamespace(finish=lambda handle, outcome: None)
        self.metrics_reporter = SimpleNamespace(enable_metrics=True, kv_transfer_latency_ms=0.0, kv_transfer_speed_gb_s=0.0)
        self.metrics_collector = MetricsCollector(loaded.folder)
        self.enable_metrics = True
        self.output_streamer = self  # older releases call self.stream_output
        self.gracefully_exit = self._engine_paused = False
        self.pass_sleep = 0.001  # SGLang does not sleep between passes
        self.inbox, self.running, self.finished = queue.SimpleQueue(), [], {}
        self.claim_sizes(tp=1, pp=1, cp=1)

    def claim_sizes(self, tp, pp, cp):
        """Says how large the groups are, wherever this release says it. A stand-in: the process stays alone, the
        transfer code was set up for one rank, and no reduction takes place."""
        sizes = {"tp_size": tp, "pp_size": pp, "attn_tp_size": tp, "attn_cp_size": cp, "dp_size": 1}
        ranks = {name.replace("size", "rank"): 0 for name in sizes} | {"attn_dp_rank": 0, "dp_rank": None}
        vars(self.parallel).update(sizes)
        vars(self.server_args).update({name: sizes[name] for name in ("tp_size", "pp_size", "dp_size", "attn_cp_size")})
        if "ps" in self.names:
            self.ps = SimpleNamespace(**sizes | ranks)
        vars(self).update({name: value for name, value in (sizes | ranks).items() if name in self.names})

    def event_loop_normal_disagg_prefill(self, commands):
        while not self.gracefully_exit:
            commands.advance()
            if not self._engine_paused:
                self.pop_bootstrapped()
                self.process_disagg_prefill_inflight_queue()
                self.on_idle()
            time.sleep(self.pass_sleep)

    def on_idle(self):
        """With a request pinned SGLang is never fully idle: the gauge keeps what the last batch reported."""
        busy = self.disagg_prefill_inflight_queue or self.disagg_prefill_bootstrap_queue.queue or self.waiting_queue
        if not busy and time.perf_counter() > self.metrics_collector.last_log_time + IDLE_REFRESH:
            self.metrics_collector.log(self.disagg_prefill_inflight_queue)

    def pause_generation(self, recv_req):
        self._engine_paused = True

    def continue_generation(self, recv_req):
        self._engine_paused = False

    def stream_output(self, reqs, return_logprob, skip_req=None):
        for req in reqs:
            self.finished[req.rid] = req.finished_reason.to_json()

    def _release_aborted_request(self, req):
        self.tree_cache.finish(req.cache_request_handle, "abort")

    def abort_request(self, rid):
        """Returns the rids whose sender was told to abort, and those whose sender knows no abort."""
        told, cannot = [], []
        for req in self.disagg_prefill_bootstrap_queue.queue + self.disagg_prefill_inflight_queue:
            if req.rid.startswith(rid):
                able = hasattr(req.disagg_kv_sender, "abort")
                (told if able else cannot).append(req.rid)
                if able:
                    req.disagg_kv_sender.abort()
        return told, cannot

    # A request's way into the inflight queue.

    def add_to_bootstrap_queue(self, rid, room, pages, fake=False):
        """As PrefillBootstrapQueue.add: makes the sender."""
        host = FAKE_BOOTSTRAP_HOST if fake else "127.0.0.1"
        req = Req(rid, room, pages, host, self.bootstrap_port)
        cls = get_kv_class(TransferBackend.FAKE if fake else self.transfer_backend, KVClassType.SENDER)
        bootstrap = self.disagg_prefill_bootstrap_queue
        req.disagg_kv_sender = make_sender(cls, bootstrap.kv_manager, f"{host}:{self.bootstrap_port}", room)
        bootstrap.queue.append(req)
        return req

    def pop_bootstrapped(self):
        """As PrefillBootstrapQueue.pop_bootstrapped: polls once a pass, moves on what the decode is ready to receive."""
        bootstrap, stay = self.disagg_prefill_bootstrap_queue, []
        for req in bootstrap.queue:
            poll = req.disagg_kv_sender.poll()
            if poll == KVPoll.Failed:
                self.fail_bootstrap(req)
            elif poll == KVPoll.WaitingForInput and self.req_to_metadata_buffer_idx_allocator.available_size():
                req.metadata_buffer_index = self.req_to_metadata_buffer_idx_allocator.alloc()
                getattr(req.disagg_kv_sender, "pop_decode_prefix_len", lambda: 0)()
                req.disagg_kv_sender.init(req.pages(), req.metadata_buffer_index)
                self.waiting_queue.append(req)
            elif poll in (KVPoll.Bootstrapping, KVPoll.WaitingForInput):
                stay.append(req)
            else:
                raise RuntimeError(f"Unexpected poll state {POLL.get(poll, poll)} for req {req.rid} in pop_bootstrapped")
        bootstrap.queue = stay

    def fail_bootstrap(self, req):
        message = f"Prefill bootstrap failed for request {req.rid=} {req.bootstrap_room=}"
        try:
            req.disagg_kv_sender.failure_exception()
        except Exception as error:
            message += f" with exception {error}"
        logging.warning(message)
        prepare_abort(req, message)
        self.stream_output([req], req.return_logprob)
        self.metrics_collector.increment_bootstrap_failed_reqs()

    def prefill(self, req, last_chunk_pages=None):
        """As process_batch_result_disagg_prefill: into the queue first, then the last chunk is sent. Says whether it was."""
        self.enter_inflight_queue(req)
        sent = self.send_last_chunk(req, req.pages() if last_chunk_pages is None else last_chunk_pages)
        req.time_stats.set_prefill_transfer_queue_entry_time()
        return sent

    def send_last_chunk(self, req, pages):
        sent = should_send(req.disagg_kv_sender, pages)
        if sent:
            req.disagg_kv_sender.send(self.memory.pages(req.metadata_buffer_index, pages), self.state_indices)
        return sent

    def park(self, req):
        """Into the queue, and nothing is sent."""
        self.enter_inflight_queue(req)
        req.time_stats.set_prefill_transfer_queue_entry_time()

    def enter_inflight_queue(self, req):
        self.memory.own(req.rid, req.metadata_buffer_index, req.pages(), pattern(req.bootstrap_room))
        self.disagg_prefill_inflight_queue.append(req)
        self.metrics_collector.log(self.disagg_prefill_inflight_queue)
