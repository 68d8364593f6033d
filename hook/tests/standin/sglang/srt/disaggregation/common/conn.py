"""Stand-in: a status of a cleared room is dropped, and `abort` sets what `poll` does not read."""

from sglang.srt.disaggregation.base.conn import BaseKVReceiver, BaseKVSender, KVPoll


class CommonKVManager:
    def __init__(self, tp=1, cp=1, pp=1):
        self.request_status = {}
        self.failure_records = {}
        self.attn_tp_size, self.attn_cp_size, self.pp_size = tp, cp, pp
        self.bootstrap_timeout = 300
        self.waiting_timeout = 300

    def update_status(self, bootstrap_room, status):
        if bootstrap_room not in self.request_status:
            if status != KVPoll.Failed:
                self.request_status[bootstrap_room] = status
            return
        before = self.request_status[bootstrap_room]
        self.request_status[bootstrap_room] = status if status == KVPoll.Failed else max(before, status)

    def record_failure(self, bootstrap_room, failure_reason):
        self.failure_records[bootstrap_room] = failure_reason


class CommonKVSender(BaseKVSender):
    def __init__(self, mgr, bootstrap_addr, bootstrap_room, dest_tp_ranks=(0,), *, pp_rank=0):
        self.kv_mgr = mgr
        self.bootstrap_room = bootstrap_room
        self.conclude_state = None
        self.curr_idx = 0
        mgr.update_status(bootstrap_room, KVPoll.Bootstrapping)

    def init(self, num_kv_indices, aux_index=None):
        self.num_kv_indices = num_kv_indices

    def clear(self):
        self.kv_mgr.request_status.pop(self.bootstrap_room, None)

    def abort(self):
        self.kv_mgr.record_failure(self.bootstrap_room, "aborted")
        self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Failed)
        self.conclude_state = KVPoll.Failed


class CommonKVReceiver(BaseKVReceiver):
    def __init__(self, mgr, bootstrap_addr, bootstrap_room=None):
        self.kv_mgr = mgr
        self.bootstrap_room = bootstrap_room
        self.conclude_state = None
        mgr.update_status(bootstrap_room, KVPoll.Bootstrapping)

    def init(self, prefill_dp_rank: int):
        self.kv_mgr.update_status(self.bootstrap_room, KVPoll.WaitingForInput)

    def clear(self) -> None:
        self.kv_mgr.request_status.pop(self.bootstrap_room, None)

    def abort(self):
        self.kv_mgr.record_failure(self.bootstrap_room, "aborted")
        self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Failed)
        self.conclude_state = KVPoll.Failed
