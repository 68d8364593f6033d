"""Stand-in for what SGLang's transfer backends share: a status for each room, and a sender for each request.

The second of the three faults is here: a failure of a room that has no status is dropped, without a word.
"""

import threading

from sglang.srt.disaggregation.base.conn import KVPoll


class KVTransferError(Exception):
    def __init__(self, bootstrap_room, failure_reason, is_from_another_rank=False):
        super().__init__(f"KVTransferError(bootstrap_room={bootstrap_room}): {failure_reason}")
        self.is_from_another_rank = is_from_another_rank


class CommonKVManager:
    attn_tp_size = attn_cp_size = pp_size = 1
    bootstrap_timeout = 300

    def __init__(self):
        self.request_status = {}
        self.transfer_infos = {}  # room -> where the decode wants its pages
        self.failure_records = {}
        self.failure_lock = threading.Lock()

    def check_status(self, bootstrap_room):
        return self.request_status[bootstrap_room]

    def update_status(self, bootstrap_room, status):
        current = self.request_status.get(bootstrap_room)
        if current is None:
            if status in (KVPoll.Bootstrapping, KVPoll.WaitingForInput):
                self.request_status[bootstrap_room] = status
        elif current != KVPoll.Failed:
            self.request_status[bootstrap_room] = status if status == KVPoll.Failed else max(current, status)

    def record_failure(self, bootstrap_room, failure_reason):
        with self.failure_lock:
            self.failure_records[bootstrap_room] = failure_reason


class CommonKVSender:
    def __init__(self, mgr, bootstrap_addr, bootstrap_room, req_has_disagg_prefill_dp_rank=False):
        self.kv_mgr, self.bootstrap_server_url, self.bootstrap_room = mgr, bootstrap_addr, bootstrap_room
        self.conclude_state = None
        self.num_kv_indices, self.curr_idx = None, 0
        mgr.update_status(bootstrap_room, KVPoll.Bootstrapping)

    def init(self, num_kv_indices, aux_index=None):
        self.num_kv_indices, self.aux_index = num_kv_indices, aux_index

    def abort(self):
        self.kv_mgr.record_failure(self.bootstrap_room, "Aborted by AbortReq.")
        self.conclude_state = KVPoll.Failed
        self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Failed)

    def clear(self):
        """For the room, whoever else may have it."""
        self.kv_mgr.request_status.pop(self.bootstrap_room, None)
        self.kv_mgr.transfer_infos.pop(self.bootstrap_room, None)
