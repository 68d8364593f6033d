"""Each sender's serial number and what is known of it, kept on the sender itself; and who is live in a room. A decode's
receivers are senders here, with serials of the same count.

A serial is given once and never again: rooms are reused and shared, and CPython gives a new sender the address of a freed
one. The registry holds records, a record holds a weak reference: nothing here keeps a sender alive.
"""

import collections
import itertools
import time
import weakref

from . import backend, marks, process

now = time.monotonic_ns

ATTRIBUTE = "_dislodge"
"""The sender's attribute that holds its record; its class has None."""
LAST = "_dislodge_last"
"""The sender's attribute that holds what `poll` returned last, NONE before."""


class Record:
    """What is known of one sender. Times are CLOCK_MONOTONIC in nanoseconds, 0 = never."""

    __slots__ = (
        "serial", "room", "backend", "reference", "phase", "phase_since", "created", "entered", "sent_chunks",
        "sent_pages", "sent_last", "aborted", "dropped", "shared_with", "cleared_by", "rid", "ended", "remedied",
        "receiver", "queue",
    )  # fmt: skip

    def __init__(self, serial, sender, room, created):
        self.serial = serial
        self.room = room
        self.backend = backend.of(type(sender))
        self.reference = _Reference(sender, _gone)
        self.reference.serial, self.reference.room = serial, room
        self.phase, self.phase_since = marks.NONE, 0
        self.created, self.entered = created, 0
        self.sent_chunks = self.sent_pages = 0
        self.sent_last = False
        self.aborted = self.dropped = 0
        self.shared_with = self.cleared_by = 0
        self.rid = None
        self.ended = False
        self.remedied = False
        self.receiver = hasattr(sender, "send_metadata")
        self.queue = 0  # of a decode scheduler, by its number in `queues`; 0: in none

    def __reduce__(self):
        return type(None), ()  # a sender that is pickled or deep-copied goes without its record

    @property
    def live(self):
        """From `__init__` until the sender has left the queue in a terminal phase, was cleared after Success, or was
        asked for its failure; or until it is gone."""
        return not self.ended and self.reference() is not None


class _Reference(weakref.ref):
    __slots__ = ("serial", "room")


_serials = itertools.count(1)
_alive = {}  # serial: record, until the sender object is gone
_rooms = {}  # room: {serial: record}
_departed = collections.deque()
# Both dicts change on the scheduler thread only: senders are made there, and what is gone waits in `_departed`, since a
# finaliser runs in any thread and at any allocation. Other threads read copies, which CPython takes in one step.


def of(sender, room=None, created=0):
    """The sender's record; makes one when the sender is new to us (`created` = 0: it was there before the hook)."""
    record = known(sender)
    if record is not None:
        return record
    settle()
    marks.load()
    if room is None:
        room = getattr(sender, "bootstrap_room", None)
    room = room if isinstance(room, (int, str, type(None))) else None
    record = Record(next(_serials), sender, room, created)
    # By attribute: asking for `__dict__` would make CPython 3.11 and later build one, and slow the sender down for good.
    setattr(sender, LAST, marks.NONE)
    setattr(sender, ATTRIBUTE, record)
    for other in live_in(room):
        record.shared_with, other.shared_with = other.serial, record.serial
    _alive[record.serial] = record
    _rooms.setdefault(room, {})[record.serial] = record
    marks.mark(marks.OPEN, room, record.backend | (marks.RECEIVER if record.receiver else 0), record.serial)
    return record


def known(sender):
    """The sender's record, or None. A copied sender has its model's, which is not its own."""
    record = getattr(sender, ATTRIBUTE, None)
    return record if record is not None and record.reference() is sender else None


def by_serial(serial):
    """The record of a sender that is not gone, or None."""
    record = _alive.get(serial)
    return record if record is not None and record.reference() is not None else None


def all_in(room):
    """Records of the room's senders that are not gone, ended ones too. Safe in any thread."""
    return [record for record in list(_rooms.get(room, {}).values()) if record.reference() is not None]


def live_in(room):
    """Records of the room's live senders. Safe in any thread."""
    return [record for record in list(_rooms.get(room, {}).values()) if record.live]


def live():
    """Serials of all live senders, oldest first."""
    return [serial for serial, record in list(_alive.items()) if record.live]


def rooms_from_before():
    """Rooms of the senders that were there before the hook."""
    return {record.room for record in list(_alive.values()) if not record.created}


def any_yet():
    """Whether this process has had a sender or receiver: until then, and in every process but a scheduler of one of the two
    roles, nothing is marked."""
    return bool(_alive)


def _gone(reference):
    """Runs when a sender object dies, in whatever thread that happens."""
    try:
        _departed.append(reference.serial)
        record = _alive.get(reference.serial)
        if record is None or not record.queue:  # a receiver dies in the pass that takes it out: its `leave` comes first
            marks.mark(marks.CLOSE, reference.room, 0, reference.serial)
    except Exception as error:
        if process is not None:  # at the interpreter's end it may be gone, as may be what was missing
            process.fault("close", error)


def mark_gone(record):
    """Marks that a receiver is gone that was in a queue when it died."""
    marks.mark(marks.CLOSE, record.room, 0, record.serial)


def settle():
    """Forgets the senders that are gone. On the scheduler thread only."""
    while _departed:
        record = _alive.pop(_departed.popleft(), None)
        if record is None:
            continue
        room = _rooms.get(record.room)
        if room is not None:
            room.pop(record.serial, None)
            if not room:
                del _rooms[record.room]


def number(room):
    """The room, if it is a number that a mark can carry, else None."""
    return room if isinstance(room, int) and 0 <= room < 2**64 else None
