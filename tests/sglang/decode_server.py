"""A decode server, made from one SGLang release's own code: the peer of `server.py` that has a scheduler's queues.

    decode_server.py RELEASE_DIR BOOTSTRAP_PORT BACKEND

Real: `process_decode_queue`, both queue classes with everything that moves a request through them (`add`, the handshake,
`pop_preallocated`, `pop_transferred`), receiver and manager, engine, poll reduction, time statistics, finish reasons. Stand-ins:
the KV pool, which is host memory (a request takes a slot of it), with its allocator and `_pre_alloc`; committing a transfer, of
which only the data is looked at; the metadata buffers, which are the slots' aux records; model and batches.

Takes the lines of `decode.py`, and answers as it does, except that it knows no `wrong_aux`. Beside them

    slots N                from now on that many slots of the pool are there to be had
    stranger ROOM          a request to a prefill that nobody is
    queues                 answers {"queues": {"prealloc": [rid…], "transfer": [rid…]}}
"""

import json
import logging
import os
import queue
import sys
import threading
import time
import traceback
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from setproctitle import setproctitle

import backends
import release
import stand_ins
from decode import die_with_the_server, read_lines
from memory import PAGES, SLOTS, Memory, pattern


class HostTensor(np.ndarray):
    """What the queue's code asks of a tensor."""

    def cpu(self):
        return self

    def numpy(self):
        return np.asarray(self)


class Pool:
    """The pool's slots, as request pool and as allocator of tokens: a request has one, and a token fills a page."""

    page_size = 1

    def __init__(self, slot_pages: int):
        self.slot_pages, self.limit, self.used = slot_pages, SLOTS, set()
        pages = np.arange(SLOTS * slot_pages, dtype=np.int32).reshape(SLOTS, slot_pages)
        self.req_to_token = pages.view(HostTensor)

    def available_size(self) -> int:
        """In slots, which is more than the code that counts tokens needs to know: it is asked whether any is left."""
        return max(0, self.limit - len(self.used))

    def take(self) -> int:
        slot = min(set(range(SLOTS)) - self.used)
        self.used.add(slot)
        return slot

    def prealloc_fits_assumes_reclaim(self) -> bool:
        return False

    def prealloc_fits(self, *_, **__) -> bool:
        return self.available_size() > 0

    def translate_kv_indices_for_transfer(self, indices):
        return indices.numpy()


class MetadataBuffers:
    """The aux records of the slots: a room's metadata is there when its record is."""

    def __init__(self, memory):
        self.memory, self.rooms = memory, {}
        self.bootstrap_room = self

    def __getitem__(self, place):
        index, _ = place
        room = self.rooms.get(index, 0) if self.memory.aux[index].all() else 0
        return SimpleNamespace(item=lambda: room)

    def __setitem__(self, index, room):
        self.memory.aux[index] = room

    def clear_slot(self, index):
        self.memory.aux[index] = 0


def make_queues(decode):
    """The release's queue classes, with what needs a GPU replaced."""
    for name in ("HybridLinearKVPool", "NSATokenToKVPool", "SWAKVPool", "DeepSeekV4TokenToKVPool"):
        if hasattr(decode, name):
            setattr(decode, name, type(name, (), {}))
    if isinstance(getattr(decode, "kv_to_page_indices", None), stand_ins.Anything):
        decode.kv_to_page_indices = lambda indices, page_size: np.asarray(indices)

    class DecodePreallocQueue(decode.DecodePreallocQueue):
        def __init__(self, scheduler, manager, transfer_queue, backend):
            self.scheduler, self.kv_manager, self.transfer_queue = scheduler, manager, transfer_queue
            self.transfer_backend = backend
            self.req_to_token_pool = self.token_to_kv_pool_allocator = scheduler.pool
            self.token_to_kv_pool = None
            self.req_to_metadata_buffer_idx_allocator = scheduler.slots
            self.tree_cache, self.gloo_group = scheduler.tree_cache, None
            self.tp_rank = self.pp_rank = self.num_reserved_decode_tokens = self._num_published_destinations = 0
            self.pp_size = self.tp_size = self.dp_size = 1
            self.queue, self.retracted_queue, self.pending_reqs = [], [], []
            self.held_rebootstrap_reqs = []
            self._prefill_dp_rank_queries = {}
            self._ensure_retry_count, self._ensure_last_attempt_time = {}, {}
            self._max_ensure_retries, self._ensure_retry_interval = 15, 1.0
            self.enable_staging = False

        def _check_if_req_exceed_kv_capacity(self, req):
            return False

        def resume_retracted_reqs(self, rids_to_check=None):
            return []

        def _uses_swa_tail_prealloc(self):
            return False

        def _allocatable_tokens(self, *_, **__):
            return SLOTS * self.scheduler.pool.slot_pages if self.scheduler.pool.available_size() else 0

        _allocatable_token_budgets = _allocatable_tokens

        def _pre_alloc(self, req, *_, **__):
            slot = self.scheduler.pool.take()
            req.slot = req.req_pool_idx = slot
            req.kv.req_pool_idx, req.kv.holds_kv = slot, True
            self.scheduler.memory.fill(slot, req.pages(), 0)
            self.scheduler.slots.next = slot
            self.scheduler.metadata_buffers.rooms[slot] = req.bootstrap_room
            return self.scheduler.memory.pages(slot, req.pages())

    class DecodeTransferQueue(decode.DecodeTransferQueue):
        def __init__(self, scheduler):
            self.scheduler, self.queue = scheduler, []
            self.gloo_group, self.tp_rank = None, 0
            self.req_to_metadata_buffer_idx_allocator = scheduler.slots
            self.metadata_buffers, self.tree_cache = scheduler.metadata_buffers, scheduler.tree_cache
            self.spec_algorithm, self.enable_staging, self.staging_handler = None, False, None
            self.enable_deferred_kv_release, self.deferred_kv_release_timeout = True, 30.0
            self._deferred_releases = []

        def _commit_transfer_to_req(self, decode_req):
            self.scheduler.arrived(decode_req.req)
            decode_req.kv_receiver.clear()
            decode_req.kv_receiver = None
            decode_req.req.time_stats.set_wait_queue_entry_time()
            return True

    return DecodePreallocQueue, DecodeTransferQueue


class Slots:
    """ReqToMetadataIdxAllocator's part: a request's aux record is its slot's."""

    def __init__(self, pool):
        self.pool, self.next = pool, None

    def available_size(self):
        return self.pool.available_size()

    def alloc(self):
        return self.next

    def free(self, index):
        self.pool.used.discard(index)


def make_scheduler(mixin, names):
    """A `Scheduler` of the release's name, module and attributes around its decode mixin."""

    class Scheduler(mixin):
        def __init__(self, loaded, bootstrap_port, answers):
            from sglang.srt.disaggregation import decode
            from sglang.srt.disaggregation.utils import DisaggregationMode

            vars(self).update({name: None for name in names if not hasattr(type(self), name)})
            self.server_args, self.answers, self.bootstrap_port = loaded.server_args, answers, bootstrap_port
            self.disaggregation_mode = DisaggregationMode.DECODE
            pages = backends.slot_pages(loaded.backend)
            self.memory, self.pool = Memory(pages), Pool(pages)
            self.slots, self.metadata_buffers = Slots(self.pool), MetadataBuffers(self.memory)
            self.tree_cache = SimpleNamespace(finish=lambda *_: None, unlock=lambda *_: None, maybe_hand_to_session=lambda *_: None,
                                              disable=True)
            self.running_batch, self.last_batch, self.waiting_queue = SimpleNamespace(reqs=[]), None, []
            self.enable_hisparse = self.enable_decode_hicache = self.enable_lora = self.enable_priority_scheduling = False
            self.enable_metrics, self.kv_checksum_computer = False, None
            self.metrics_reporter = SimpleNamespace(enable_metrics=False)
            self.output_streamer = self
            self._engine_paused, self.places, self.rooms = False, {}, {}
            backends.after_import(loaded.backend)
            manager = backends.kv_class(loaded.backend, "MANAGER")(self.memory.kv_args(), self.disaggregation_mode, self.server_args, False)
            prealloc, transfer = make_queues(decode)
            self.disagg_decode_transfer_queue = transfer(self)
            self.disagg_decode_prealloc_queue = prealloc(self, manager, self.disagg_decode_transfer_queue, backends.backend(loaded.backend))

        def stream_output(self, reqs, return_logprob, skip_req=None):
            for req in reqs:
                self.answer({"room": req.bootstrap_room, "state": "Failed", "data": False})

        def retire_unadmitted_request(self, req):
            raise RuntimeError(f"{req.rid} was not admitted")

        def arrived(self, req):
            data = self.memory.holds(req.slot, req.pages(), pattern(req.bootstrap_room))
            self.places[req.bootstrap_room] = req.slot, req.pages()
            self.answer({"room": req.bootstrap_room, "state": "Success", "data": data})

        def answer(self, what):
            self.answers.write(json.dumps(what) + "\n")
            self.answers.flush()

        def pause_generation(self, recv_req):
            self._engine_paused = True

        def continue_generation(self, recv_req):
            self._engine_paused = False

        def receive(self, room, pages, port):
            from scheduler import Req

            req = Req(f"decode-{room}-{os.urandom(3).hex()}", room, pages, "127.0.0.1", port)
            req.output_ids, req.sampling_params = [], SimpleNamespace(max_new_tokens=1)
            req.kv = SimpleNamespace(holds_kv=False, holds_mamba=False, req_pool_idx=None, cache_protected_len=0, retraction_backup=None)
            from sglang.srt.observability.req_time_stats import SchedulerReqTimeStats

            req.time_stats = SchedulerReqTimeStats(disagg_mode=self.disaggregation_mode)
            self.rooms[room] = req
            self.disagg_decode_prealloc_queue.add(req)

        def entries(self):
            return [*self.disagg_decode_prealloc_queue.queue, *self.disagg_decode_transfer_queue.queue]

        def obey(self, line):
            name, *arguments = line.split()
            if name == "abort":
                next(entry.kv_receiver for entry in self.entries() if entry.req.bootstrap_room == int(arguments[0])).abort()
            elif name == "look":
                room = int(arguments[0])
                self.answer({"room": room, "pages": self.memory.census(*self.places[room])})
            elif name == "slots":
                self.pool.limit = int(arguments[0])
            elif name == "stranger":
                self.receive(int(arguments[0]), PAGES, 1)  # nobody listens on port 1
            elif name == "queues":
                rids = {"prealloc": self.disagg_decode_prealloc_queue, "transfer": self.disagg_decode_transfer_queue}
                self.answer({"room": None, "queues": {name: [entry.req.rid for entry in it.queue] for name, it in rids.items()}})
            else:
                self.receive(int(name), int(arguments[0]), self.bootstrap_port)

        def event_loop_normal_disagg_decode(self):
            inbox = queue.SimpleQueue()
            threading.Thread(target=read_lines, args=(inbox,), daemon=True).start()
            while True:
                while not inbox.empty():
                    line = inbox.get()
                    if line is None:
                        return
                    self.obey(line)
                if not self._engine_paused:
                    self.process_decode_queue()
                    self.waiting_queue.clear()  # what a batch would take
                time.sleep(0.001)  # SGLang does not sleep between passes

    home = "sglang.srt.managers.scheduler"
    Scheduler.__module__ = home
    setattr(sys.modules[home], "Scheduler", Scheduler)
    return Scheduler


def run(folder: Path, bootstrap_port: int, backend: str, answers):
    loaded = release.load(folder, bootstrap_port, release_kv_cache=lambda *_, **__: None, backend=backend)
    loaded.server_args.disaggregation_mode = "decode"
    stand_ins.install_decode_side()
    import scheduler

    scheduler.make_classes(folder)
    release.load_plugins()
    setproctitle("sglang::scheduler_TP0")
    from sglang.srt.disaggregation.decode import SchedulerDisaggregationDecodeMixin

    logging.info("decode server of %s", folder.name)
    names = scheduler.Scheduler.names
    make_scheduler(SchedulerDisaggregationDecodeMixin, names)(loaded, bootstrap_port, answers).event_loop_normal_disagg_decode()


if __name__ == "__main__":
    status = 0
    die_with_the_server(int(os.environ["SERVER_PID"]))
    try:
        run(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], release.private_stdout())
    except Exception:
        traceback.print_exc()
        status = 1
    os._exit(status)  # the manager's threads are not daemons
