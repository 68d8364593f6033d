"""Stand-in: the sender of warm-up requests, which never ends when nothing is sent; `poll` reads `conclude_state`."""

from sglang.srt.disaggregation.base.conn import BaseKVReceiver, BaseKVSender, KVPoll


class FakeKVSender(BaseKVSender):
    def __init__(self, mgr, bootstrap_addr, bootstrap_room):
        self.kv_mgr = mgr
        self.bootstrap_room = bootstrap_room
        self.conclude_state = None
        self.has_sent = False

    def send(self, kv_indices):
        self.has_sent = True

    def poll(self):
        if self.conclude_state is not None:
            return self.conclude_state
        return KVPoll.Success if self.has_sent else KVPoll.WaitingForInput

    def failure_exception(self):
        raise Exception("fake")

    def abort(self):
        self.conclude_state = KVPoll.Failed


class FakeKVReceiver(BaseKVReceiver):
    def __init__(self, mgr, bootstrap_addr, bootstrap_room=None):
        self.bootstrap_done = False
        self.has_sent_metadata = False

    def init(self, prefill_dp_rank: int):
        self.bootstrap_done = True

    def send_metadata(self, kv_indices, aux_index=None, state_indices=None, decode_prefix_len=None):
        self.has_sent_metadata = True

    def poll(self) -> int:
        if not self.bootstrap_done:
            return KVPoll.Bootstrapping
        return KVPoll.Success if self.has_sent_metadata else KVPoll.WaitingForInput

    def clear(self) -> None:
        pass

    def failure_exception(self):
        raise Exception("fake")
