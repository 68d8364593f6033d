"""How many chunks of a room are queued for a transfer worker, and how many are being worked on.

`transfer_worker` (NIXL 0.5.12 and later) is one endless loop that cannot be wrapped; its queue can. `FastQueue`
(disaggregation/common/utils.py) is patched as a class: `put` queues a chunk, `get` returning begins its work, the same
thread's next `get` ends it. The counts decide whether pages may be freed, so each doubt counts against it.

A chunk that ends with an error after it posted a transfer may leave a handle running: its room is *abandoned*. One that
failed before it posted anything leaves nothing: 0.5.12 to 0.5.16 assert that the room still has its transfer metadata,
which is how the second of two senders on a room fails there. `wrappers.wrap_posts` says which calls post; where they are
not seen, any error counts as abandoned. A post in a thread that has no chunk (Mooncake's executors) is anybody's: it counts
for every chunk in work. Where a chunk's end proves nothing (`backend.SETTLED_ON`), each one that posted abandons its room.
"""

import collections
import itertools
import threading

from . import marks, process, senders
from .late import LateQueue

QUEUED_AND_WORKING_MAX = 0xFFFF
ABANDONED, ATTACHED_LATE, NO_QUEUES = 1 << 32, 1 << 33, 1 << 34

ABANDONED_ROOMS = 65536
"""Abandoned rooms that are remembered after their last sender; then the oldest are forgotten."""


class Room:
    """The chunks of one room. `abandoned`: one ended with an error, and a handle of it may still be running."""

    __slots__ = ("queued", "working", "abandoned")

    def __init__(self):
        self.queued = self.working = 0
        self.abandoned = False

    def packed(self):
        queued, working = min(self.queued, QUEUED_AND_WORKING_MAX), min(self.working, QUEUED_AND_WORKING_MAX)
        return queued | working << 16 | (ABANDONED if self.abandoned else 0)


WATCHED = "watched"  # the state of a queue whose every chunk is counted
STATE = "_dislodge"  # the queue's attribute; its class has None
NUMBER = "_dislodge_number"  # the queue's attribute once it has a number

_numbers = itertools.count(1)

# Scheduler, transfer workers and bootstrap thread all come here. The marks are made inside, so that their order is that
# of the counts. Re-entrant, because an allocation inside can run anybody's finaliser.
_lock = threading.RLock()
_rooms = {}
_abandoned = collections.OrderedDict()  # room: None, oldest first
_work = threading.local()  # .chunk: the one that this thread works on
_managers = []  # weak references to managers, for their `exceptions`
_posts_seen = None  # whether each post of a worker is seen; None: there is no manager yet
_settles = None  # whether a chunk that ended without an error has ended its writes; None: there is no manager yet
_in_work = set()  # the chunks that worker threads have in hand


class Work:
    """The chunk that a worker thread has in hand."""

    __slots__ = ("room", "failed", "posted", "exception")

    def __init__(self, room):
        self.room = room
        self.failed = False
        self.posted = not _posts_seen
        self.exception = _exception(room)


def _room(room):
    found = _rooms.get(room)
    if found is None:
        found = _rooms[room] = Room()
    return found


def _tidy(room):
    chunks = _rooms.get(room)
    if chunks is not None and not (chunks.queued or chunks.working or chunks.abandoned):
        del _rooms[room]


def _abandon(room):
    _room(room).abandoned = True
    _abandoned[room] = None
    if len(_abandoned) <= ABANDONED_ROOMS:
        return
    for oldest in list(itertools.islice(_abandoned, 16)):  # a few per call: the table is full only on a server in deep trouble
        if not senders.all_in(oldest):
            del _abandoned[oldest]
            if oldest in _rooms:
                _rooms[oldest].abandoned = False
                _tidy(oldest)


def _number(queue):
    """The queue's number: marks carry it, so that a chunk that waits can be told from one that waits elsewhere."""
    number = getattr(queue, NUMBER, None)
    if number is None:
        number = next(_numbers)
        setattr(queue, NUMBER, number)
    return number


def queue_made(queue):
    """`FastQueue.__init__` was called under our eyes: every chunk of this queue will be counted."""
    setattr(queue, STATE, WATCHED)


def before_put(queue, item):
    """Counts before the chunk can be taken. A `put` that raises leaves its count behind: a doubt, so it refuses."""
    room = getattr(item, "room", None)
    if room is None:
        return None
    with _lock:
        chunks = _room(room)
        chunks.queued += 1
        marks.mark(marks.CHUNK_QUEUED, room, chunks.packed(), _number(queue))
    return queue, room


def after_put(note, _result):
    if note is None:
        return
    queue, room = note
    state = getattr(queue, STATE)
    if state is WATCHED:
        return
    with _lock:
        _late(queue).put(room)


def before_get(queue):
    """The worker is back: its chunk has ended."""
    with _lock:
        _end_work(queue)
        if getattr(queue, STATE) is not WATCHED:
            for room in _late(queue).back(len(queue._buf)):
                _room(room).queued = max(0, _room(room).queued - 1)
                _abandon(room)
            _catch_up(queue)
    return queue


def after_get(queue, item):
    """The worker has a chunk."""
    room = getattr(item, "room", None)
    with _lock:
        counted = True
        if getattr(queue, STATE) is not WATCHED:
            counted = _late(queue).taken()
            _catch_up(queue)
        if room is None:
            return
        chunks = _room(room)
        if counted:
            chunks.queued = max(0, chunks.queued - 1)
        chunks.working += 1
        _work.chunk = Work(room)
        _in_work.add(_work.chunk)
        marks.mark(marks.WORK_BEGIN, room, chunks.packed(), _number(queue))


def _end_work(queue):
    work = getattr(_work, "chunk", None)
    if work is None:
        return
    _work.chunk, room = None, work.room
    _in_work.discard(work)
    chunks = _room(room)
    chunks.working = max(0, chunks.working - 1)
    if work.posted and (work.failed or not _settles or _exception(room) != work.exception):
        _abandon(room)
    marks.mark(marks.WORK_END, room, chunks.packed(), _number(queue))
    _tidy(room)


def _late(queue):
    state = getattr(queue, STATE)
    if state is None:
        state = LateQueue()
        setattr(queue, STATE, state)
    return state


def _catch_up(queue):
    if getattr(queue, STATE).caught_up:
        setattr(queue, STATE, WATCHED)


def failed(room):
    """`update_status(room, Failed)`, `record_failure` or `conclude_failure` was called: an error of this thread's chunk,
    if it is the room's."""
    work = getattr(_work, "chunk", None)
    if work is not None and work.room == room:
        work.failed = True


def _of_this_thread():
    """The chunk that this thread posts for; all of them where it has none of its own."""
    work = getattr(_work, "chunk", None)
    if work is not None:
        return (work,)
    with _lock:
        return tuple(_in_work)


def posted():
    """This thread posts a transfer. Returns the chunks that it may belong to."""
    works = _of_this_thread()
    for work in works:
        work.posted = True
    return works


def returned(works, status):
    """A transfer that was waited for has ended with 0, or was given up and may go on."""
    if status != 0:
        for work in works or ():
            work.failed = True


def queues_of(manager):
    """The queues between the scheduler and a manager's transfer workers (mori's have a name of their own)."""
    return getattr(manager, "transfer_queues", None) or getattr(manager, "_transfer_queues", None) or ()


def manager_made(reference, posts_seen, settles):
    """Remembers a manager, weakly: NIXL's worker notes a chunk's exception in `manager.exceptions[room]`. `posts_seen`:
    whether `posted` is called for each of its workers' posts; `settles`: whether the end of their chunks proves something."""
    global _posts_seen, _settles
    _managers.append(reference)
    _posts_seen = posts_seen and _posts_seen is not False
    _settles = settles and _settles is not False


def _exception(room):
    """Which exception the managers have noted for a room. An identity, since keeping the exception would keep its frames."""
    noted = [getattr(reference(), "exceptions", None) for reference in list(_managers)]
    return [id(exceptions[room]) for exceptions in noted if exceptions and room in exceptions]


def late(manager):
    """Whether a queue of this manager may hold, or its worker may work on, a chunk that was not counted."""
    states = [getattr(queue, STATE, None) for queue in queues_of(manager)]
    return any(state is not WATCHED and (state is None or state.unknown) for state in states)


def found(manager, get):
    """A manager that was there before the hook. Each of its queues has one worker, in every backend. An error of a chunk
    that was over by then is noted in `manager.exceptions`, at most."""
    with _lock:
        for room in list(getattr(manager, "exceptions", ())):
            _abandon(room)
        if not _settles:  # a chunk of a sender from before may have ended, and left a write behind
            for room in senders.rooms_from_before():
                _abandon(room)
        for queue in queues_of(manager):
            if getattr(queue, STATE) is not WATCHED:
                _late(queue).look(queue, get)


def steady():
    """Held while a count is read and marked, so that the marks of a room reach the ring in the order of its changes."""
    return _lock


def of(room):
    """(queued, working, abandoned) of a room."""
    with _lock:
        chunks = _rooms.get(room)
        return (chunks.queued, chunks.working, chunks.abandoned) if chunks else (0, 0, False)


def _in_child():
    global _lock
    _lock = threading.RLock()  # a worker may have held it when the server forked


process.after_fork(_in_child)
