"""Stand-in: the statuses, and a sender whose `clear` does nothing."""


class KVPoll:
    Failed, Bootstrapping, WaitingForInput, Transferring, Success = range(5)


class BaseKVSender:
    def clear(self):
        pass
