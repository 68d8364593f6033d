"""Stand-in for NIXL's side as it is from 0.5.12 to 0.5.22: queues and workers, `_send_failed`, overrides with super()."""

import threading

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVManager, CommonKVReceiver, CommonKVSender
from sglang.srt.disaggregation.common.utils import Chunk, FastQueue


class nixl_agent:
    def transfer(self, handle, notif_msg=b""):
        return "PROC"


class NixlKVManager(CommonKVManager):
    def __init__(self, tp=1, cp=1, pp=1):
        super().__init__(tp, cp, pp)
        self.agent = nixl_agent()
        self.exceptions = {}
        self.transfer_queues = [FastQueue()]
        self.idle = threading.Semaphore(0)
        threading.Thread(target=self.transfer_worker, args=(self.transfer_queues[0],), daemon=True).start()

    def transfer_worker(self, queue):
        while True:
            self.idle.release()
            chunk = queue.get()
            try:
                if chunk.work is not None:
                    chunk.work(self)
            except Exception as error:
                self.exceptions[chunk.room] = error
                self.update_status(chunk.room, KVPoll.Failed)

    def check_status(self, bootstrap_room):
        return self.request_status.get(bootstrap_room, KVPoll.WaitingForInput)

    def update_status(self, bootstrap_room, status):
        super().update_status(bootstrap_room, status)

    def _handle_abort_notification(self, msg):
        if msg[0] != b"ABORT":
            return False
        self.update_status(int(msg[1]), KVPoll.Failed)
        return True


class NixlKVSender(CommonKVSender):
    def __init__(self, mgr, bootstrap_addr, bootstrap_room, dest_tp_ranks=(0,), *, pp_rank=0):
        super().__init__(mgr, bootstrap_addr, bootstrap_room, dest_tp_ranks, pp_rank=pp_rank)
        self._send_failed = False
        self._send_error = None

    def send(self, kv_indices, state_indices=None, work=None):
        self.curr_idx += len(kv_indices)
        self.kv_mgr.transfer_queues[0].put(Chunk(self.bootstrap_room, work))

    def poll(self):
        if self._send_failed:
            return KVPoll.Failed
        return self.kv_mgr.check_status(self.bootstrap_room)

    def clear(self):
        super().clear()

    def failure_exception(self):
        self._send_failed = True
        self.clear()
        raise self._send_error or RuntimeError("failed")


class NixlKVReceiver(CommonKVReceiver):
    def __init__(self, mgr, bootstrap_addr, bootstrap_room=None):
        self.started_transfer = False
        super().__init__(mgr, bootstrap_addr, bootstrap_room)

    def send_metadata(self, kv_indices, aux_index=None, state_indices=None, decode_prefix_len=None):
        self.started_transfer = True

    def poll(self) -> int:
        if self.conclude_state is not None:
            return self.conclude_state
        status = self.kv_mgr.check_status(self.bootstrap_room)
        if status in (KVPoll.Success, KVPoll.Failed):
            self.conclude_state = status
        return status

    def clear(self) -> None:
        super().clear()

    def failure_exception(self):
        self.clear()
        raise RuntimeError("failed")
