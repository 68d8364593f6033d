"""Stand-in for Mooncake's side as it is from 0.5.13 to 0.5.22: `send` behind a decorator that hides its parameters, one worker
and one executor per queue, transfers that the worker waits for, and an error of the worker that ends its thread."""

import concurrent.futures
import threading

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVManager, CommonKVSender
from sglang.srt.disaggregation.common.utils import Chunk, FastQueue


class MooncakeTransferEngine:
    """SGLang's class around the engine (distributed/device_communicators/mooncake_transfer_engine.py)."""

    status = 0

    def transfer_sync(self, session_id, buffer, peer_buffer_address, length):
        return self.status

    def batch_transfer_sync(self, session_id, buffers, peer_buffer_addresses, lengths):
        return self.status


def mooncake_trace_func(func):
    def wrapper(self, *args, **kwargs):
        return func(self, *args, **kwargs)

    return wrapper


class MooncakeKVManager(CommonKVManager):
    def __init__(self, tp=1, cp=1, pp=1):
        super().__init__(tp, cp, pp)
        self.engine = MooncakeTransferEngine()
        self.executor = concurrent.futures.ThreadPoolExecutor(1)
        self.transfer_queues = [FastQueue(), FastQueue()]
        for queue in self.transfer_queues:
            threading.Thread(target=self.transfer_worker, args=(queue,), daemon=True).start()

    def transfer_worker(self, queue):
        while True:
            chunk = queue.get()
            if chunk.work is not None and chunk.work(self):
                self.record_failure(chunk.room, "not sent")
                self.update_status(chunk.room, KVPoll.Failed)

    def check_status(self, bootstrap_room):
        return self.request_status[bootstrap_room]


class MooncakeKVSender(CommonKVSender):
    @mooncake_trace_func
    def send(self, kv_indices, state_indices=None, work=None):
        self.curr_idx += len(kv_indices)
        self.kv_mgr.transfer_queues[self.bootstrap_room % 2].put(Chunk(self.bootstrap_room, work))

    def poll(self):
        if self.conclude_state is not None:
            return self.conclude_state
        return self.kv_mgr.check_status(self.bootstrap_room)

    def failure_exception(self):
        self.clear()
        raise RuntimeError(self.kv_mgr.failure_records.pop(self.bootstrap_room, "another rank"))
