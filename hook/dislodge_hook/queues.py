"""The queues of a scheduler, compared between passes: who came, who left, and why.

A prefill scheduler has its inflight queue, a decode scheduler two: `DecodePreallocQueue` (a receiver waits for the prefill's
address, then for memory) and `DecodeTransferQueue` (the prefill was told where to write). Their lists hold requests, or
`DecodeRequest`s with the receiver beside the request (disaggregation/decode.py, 0.5.10 to 0.5.23). List objects are replaced:
a reference to one is good for one pass only.
"""

from . import marks, senders

LEFT_SUCCESS, LEFT_FAILED, LEFT_NOT_TERMINAL, LEFT_PREALLOCATED = 1, 2, 3, 4
INFLIGHT, PREALLOC, TRANSFER = 0, 1, 2
LENGTH_MAX = 0xFFFFFFFF


def left(phase):
    """Why a request left, from what its sender's or receiver's `poll` returned last."""
    return {marks.SUCCESS: LEFT_SUCCESS, marks.FAILED: LEFT_FAILED}.get(phase, LEFT_NOT_TERMINAL)


class Inflight:
    """`disagg_prefill_inflight_queue` of a prefill scheduler."""

    role = "prefill"

    def __init__(self):
        self.length = 0
        self.records = {}  # serial: record

    def compare(self, scheduler, now):
        self.take(scheduler.disagg_prefill_inflight_queue, now)

    def take(self, queue, now):
        """Marks who entered and who left since the last comparison."""
        inflight = {}
        for req in queue:
            record = senders.of(req.disagg_kv_sender)
            inflight[record.serial] = record
            if record.serial not in self.records:
                record.entered, record.rid = now, str(req.rid)
                marks.mark_detail(marks.ENTER, record.room, len(queue), record.serial, marks.text(record.rid))
        for serial, record in self.records.items():
            if serial not in inflight:
                record.entered = 0
                reason = left(record.phase)
                record.ended = record.ended or reason != LEFT_NOT_TERMINAL
                marks.mark(marks.LEAVE, record.room, reason, serial)
        self.records = inflight
        self.length = len(queue)

    def empty(self):
        """The scheduler has another role now; what it gave up in this one was in no pass."""
        self.take([], 0)

    def mark_pass(self, passes):
        marks.mark(marks.PASS, 0, min(self.length, LENGTH_MAX) | passes << 32, 0)


class Decode:
    """Both queues of a decode scheduler."""

    role = "decode"

    def __init__(self):
        self.prealloc = self.transfer = 0  # lengths
        self.records = {}  # serial: record

    def differ(self, scheduler):
        """Whether a queue is not as long as it was."""
        return (
            len(scheduler.disagg_decode_prealloc_queue.queue) != self.prealloc
            or len(scheduler.disagg_decode_transfer_queue.queue) != self.transfer
        )

    def compare(self, scheduler, now):
        queues = scheduler.disagg_decode_prealloc_queue.queue, scheduler.disagg_decode_transfer_queue.queue
        self.take(*queues, now)

    def take(self, prealloc, transfer, now):
        """Marks who entered and who left which queue since the last comparison. Who passed through one in between is in both
        comparisons' gap: that it left the prealloc queue for the transfer queue is told by where it is now."""
        records = {}
        for number, queue in ((PREALLOC, prealloc), (TRANSFER, transfer)):
            for entry in queue:
                receiver = entry.kv_receiver
                if receiver is None:
                    continue  # it has left, and its entry is about to
                record = senders.of(receiver)
                records[record.serial] = record
                if record.queue == number:
                    continue
                if record.queue:
                    marks.mark(marks.LEAVE, record.room, LEFT_PREALLOCATED | record.queue << 8, record.serial)
                record.queue, record.entered, record.rid = number, now, str(entry.req.rid)
                value = min(len(queue), LENGTH_MAX) | number << 32
                marks.mark_detail(marks.ENTER, record.room, value, record.serial, marks.text(record.rid))
        for serial, record in self.records.items():
            if serial not in records:
                self.leaves(record)
        self.records = records
        self.prealloc, self.transfer = len(prealloc), len(transfer)

    def leaves(self, record):
        reason = left(record.phase)
        marks.mark(marks.LEAVE, record.room, reason | record.queue << 8, record.serial)
        record.ended = record.ended or reason != LEFT_NOT_TERMINAL
        record.entered = record.queue = 0
        if record.reference() is None:
            senders.mark_gone(record)  # its finaliser left that to us

    def empty(self):
        self.take([], [], 0)

    def mark_pass(self, passes):
        value = min(self.prealloc, LENGTH_MAX) | passes << 32
        marks.mark(marks.PASS, 0, value, 1 + min(self.transfer, LENGTH_MAX))
