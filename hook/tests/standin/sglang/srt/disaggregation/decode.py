"""Stand-in: a decode scheduler's two queues, in the order of the released pass: prealloc, then transfer."""

from dataclasses import dataclass
from typing import List, Optional

from sglang.srt.disaggregation.base.conn import KVPoll


@dataclass
class DecodeRequest:
    req: object
    kv_receiver: object
    waiting_for_input: bool = False
    failed: bool = False


class DecodePreallocQueue:
    def __init__(self, kv_manager):
        self.kv_manager = kv_manager
        self.queue: List[DecodeRequest] = []
        self.slots = 8

    def pop_preallocated(self):
        preallocated, kept = [], []
        for entry in self.queue:
            poll = entry.kv_receiver.poll()
            if poll == KVPoll.Failed:
                try:
                    entry.kv_receiver.failure_exception()
                except Exception as error:
                    entry.req.error = error
                entry.kv_receiver.clear()
                entry.kv_receiver = None
            elif poll == KVPoll.WaitingForInput and self.slots:
                self.slots -= 1
                entry.kv_receiver.send_metadata([1, 2, 3], 0)
                preallocated.append(entry)
            else:
                kept.append(entry)
        self.queue = kept
        return preallocated


class DecodeTransferQueue:
    def __init__(self):
        self.queue: List[DecodeRequest] = []

    def extend(self, decode_reqs):
        self.queue.extend(decode_reqs)

    def pop_transferred(self, rids_to_check: Optional[List[str]] = None):
        transferred, kept = [], []
        for entry in self.queue:
            poll = entry.kv_receiver.poll()
            if poll not in (KVPoll.Success, KVPoll.Failed):
                kept.append(entry)
                continue
            if poll == KVPoll.Failed:
                try:
                    entry.kv_receiver.failure_exception()
                except Exception as error:
                    entry.req.error = error
            entry.kv_receiver.clear()
            entry.kv_receiver = None
            transferred.append(entry.req)
        self.queue = kept
        return transferred


class SchedulerDisaggregationDecodeMixin:
    def process_decode_queue(self):
        self.disagg_decode_transfer_queue.extend(self.disagg_decode_prealloc_queue.pop_preallocated())
        return self.disagg_decode_transfer_queue.pop_transferred()
