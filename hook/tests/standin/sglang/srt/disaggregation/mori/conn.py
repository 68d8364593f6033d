"""Stand-in for mori's side as it is from 0.5.13 on: queues with a name of their own, and decode's ABORT taken elsewhere."""

import threading

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVManager, CommonKVSender
from sglang.srt.disaggregation.common.utils import Chunk, FastQueue


class IOEngine:
    def batch_write(self, plan):
        return ["in progress"]


class MoriKVManager(CommonKVManager):
    def __init__(self, tp=1, cp=1, pp=1):
        super().__init__(tp, cp, pp)
        self.engine = IOEngine()
        self._transfer_queues = [FastQueue()]
        threading.Thread(target=self._transfer_worker, args=(self._transfer_queues[0],), daemon=True).start()

    def _transfer_worker(self, queue):
        while True:
            queue.get()
            self.engine.batch_write([])

    def check_status(self, bootstrap_room):
        return self.request_status[bootstrap_room]

    def _handle_abort_message(self, msg):
        self.update_status(int(msg[1]), KVPoll.Failed)


class MoriKVSender(CommonKVSender):
    def send(self, kv_indices, state_indices=None):
        self.curr_idx += len(kv_indices)
        self.kv_mgr._transfer_queues[0].put(Chunk(self.bootstrap_room))

    def poll(self):
        return self.kv_mgr.check_status(self.bootstrap_room) if self.conclude_state is None else self.conclude_state

    def failure_exception(self):
        raise RuntimeError("failed")
