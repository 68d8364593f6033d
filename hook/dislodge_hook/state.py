"""Resynchronisation: marks are edge-triggered, so an agent that comes late, or lost some, asks for all that is live."""

from . import chunks, marks, quiescence, senders

ENTRIES_A_PASS = 64  # a bounded share of the scheduler's time


class Resynchronisation:
    """One run: `state_begin`, then at most 64 entries a pass, then `state_end`. A new one replaces one that runs."""

    def __init__(self):
        self._waiting = None  # serials, newest first
        self._epoch = 0
        self._marked = 0

    @property
    def running(self):
        return self._waiting is not None

    def begin(self, epoch):
        """Starts; returns how many senders are live now."""
        self._waiting = senders.live()[::-1]
        self._epoch, self._marked = epoch, 0
        marks.mark(marks.STATE_BEGIN, 0, epoch, 0)
        return len(self._waiting)

    def step(self):
        """One pass's share."""
        if self._waiting is None:
            return
        for _ in range(min(ENTRIES_A_PASS, len(self._waiting))):
            self._mark(self._waiting.pop())
        if not self._waiting:
            self._waiting = None
            marks.mark_detail(marks.STATE_END, 0, self._epoch, 0, marks.record({"entries": self._marked}))

    def _mark(self, serial):
        record = senders.by_serial(serial)
        sender = record.reference() if record is not None else None
        if sender is None or not record.live:
            return  # it ended since `begin`, and that was marked
        self._marked += 1
        with chunks.steady():
            detail = marks.record(entry(record, quiescence.look(record, sender).packed()))
            marks.mark_detail(marks.ENTRY, record.room, self._epoch, serial, detail)


def entry(record, packed):
    """The detail of an `entry` mark."""
    values = {
        "backend": record.backend,
        "phase": record.phase,
        "phase_since": record.phase_since,
        "created": record.created,
        "entered": record.entered,
        "sent_chunks": record.sent_chunks,
        "sent_pages": record.sent_pages,
        "sent_last": record.sent_last,
        "aborted": record.aborted,
        "dropped": record.dropped,
        "shared_with": record.shared_with,
        "cleared_by": record.cleared_by,
        "chunks": packed,
        "rid": "",
        "rid_truncated": False,
    }
    if record.receiver:
        values = {"queue": record.queue, "receiver": True, **values}
    if record.rid is None:
        values["rid"] = None  # never seen in the queue
    else:
        space = marks.DETAIL_BYTES - len(marks.record(values))
        values["rid"], values["rid_truncated"] = marks.cut(record.rid, space)
    return values
