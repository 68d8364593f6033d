"""Stand-in: the statuses, and a sender whose `clear` does nothing."""


class KVPoll:
    Failed, Bootstrapping, WaitingForInput, Transferring, Success = range(5)


class BaseKVReceiver:
    def send_metadata(self, kv_indices, aux_index=None, state_indices=None, decode_prefix_len=None):
        raise NotImplementedError


class BaseKVSender:
    def clear(self):
        pass
