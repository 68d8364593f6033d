"""Stand-in for SGLang's NIXL backend: a few threads copy pages to a decode in the same process, with a small delay.

The first fault is here: `abort` sets `conclude_state`, and `poll` never looks at it. A room without a status polls as
WaitingForInput, so a sender whose room somebody else has cleared waits for ever.
"""

import threading
import time

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVManager, CommonKVSender, KVTransferError
from sglang.srt.disaggregation.common.utils import FastQueue, TransferKVChunk

QUEUES = 4
TRANSFER_SECONDS = 0.02


class NixlKVManager(CommonKVManager):
    def __init__(self, pages):
        super().__init__()
        self.pages, self.exceptions = pages, {}
        self.transfer_queues = [FastQueue() for _ in range(QUEUES)]
        for queue in self.transfer_queues:
            threading.Thread(target=self.transfer_worker, args=(queue,), daemon=True).start()

    def check_status(self, bootstrap_room):
        return self.request_status.get(bootstrap_room, KVPoll.WaitingForInput)

    def add_transfer_request(self, bootstrap_room, kv_indices, is_last_chunk):
        if bootstrap_room in self.transfer_infos:
            chunk = TransferKVChunk(bootstrap_room, kv_indices, is_last_chunk)
            self.transfer_queues[bootstrap_room % QUEUES].put(chunk)

    def transfer_worker(self, queue):
        while True:
            chunk = queue.get()
            destination = self.transfer_infos.get(chunk.room)
            if destination is None or self.request_status.get(chunk.room) in (None, KVPoll.Failed):
                continue
            self.update_status(chunk.room, KVPoll.Transferring)
            time.sleep(TRANSFER_SECONDS)
            destination.extend(self.pages[index] for index in chunk.prefill_kv_indices)
            if chunk.is_last_chunk:
                self.update_status(chunk.room, KVPoll.Success)
                self.transfer_infos.pop(chunk.room, None)


class NixlKVSender(CommonKVSender):
    def __init__(self, mgr, bootstrap_addr, bootstrap_room, req_has_disagg_prefill_dp_rank=False):
        super().__init__(mgr, bootstrap_addr, bootstrap_room, req_has_disagg_prefill_dp_rank)
        self.has_sent = self._send_failed = False
        self._send_error = None

    def send(self, kv_indices, state_indices=None, num_kv_tokens=None):
        if self._send_failed:
            return
        self.curr_idx += len(kv_indices)
        is_last_chunk = self.curr_idx == self.num_kv_indices
        self.kv_mgr.add_transfer_request(self.bootstrap_room, kv_indices, is_last_chunk)
        self.has_sent = self.has_sent or is_last_chunk

    def poll(self):
        return KVPoll.Failed if self._send_failed else self.kv_mgr.check_status(self.bootstrap_room)

    def failure_exception(self):
        with self.kv_mgr.failure_lock:
            reason = self.kv_mgr.failure_records.pop(self.bootstrap_room, None)
        self.conclude_state, self._send_failed = KVPoll.Failed, True
        self.clear()
        if self._send_error is not None:
            raise self._send_error
        raise KVTransferError(self.bootstrap_room, reason or "NIXL KVSender Exception", is_from_another_rank=reason is None)
