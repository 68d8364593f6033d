"""A queue that was there before the hook, and when it is known again what it and its worker hold.

Its worker may be inside the old `get`, or at work on a chunk that nobody counted, and it may hold such chunks. It is known
again when the worker has come to the new `get` and what was uncounted has been taken; or at once, while the worker waits in
the old `get` of an empty queue and nothing has been put since.
"""

import collections
import sys
import threading


class LateQueue:
    """What is known of such a queue. `chunks` holds its lock around every call."""

    def __init__(self):
        self._counted = collections.deque()  # rooms of the chunks that were put under our eyes, oldest first
        self._ahead = None  # chunks that were not counted and are still in front; None: the worker has not been back
        self._idle = False  # the worker was seen waiting

    @property
    def unknown(self):
        """Whether the queue or its worker may hold a chunk that was not counted."""
        return bool(self._counted) or not self._idle

    def put(self, room):
        """A chunk was put, and counted."""
        self._counted.append(room)

    def back(self, held):
        """The worker calls `get`, and the queue holds so many chunks. Returns the rooms of chunks that it took, unseen, in
        the `get` that it was in: they are over, and how they ended is not known."""
        if self._ahead is not None:
            return []
        taken = [self._counted.popleft() for _ in range(len(self._counted) - held)]
        self._ahead = held - len(self._counted)
        return taken

    def taken(self):
        """A chunk was taken. Returns whether it is one that was counted."""
        if self._ahead is None:
            return True  # `back` failed; counted or not, the queue stays late
        self._ahead -= 1
        return self._ahead < 0

    @property
    def caught_up(self):
        return self._ahead is not None and self._ahead <= 0

    def look(self, queue, get):
        """Sees whether the worker waits inside `get`, the queue's method from before the hook."""
        self._idle = not self._counted and not queue._buf and _waits(queue, get)


def _waits(queue, get):
    """Whether a thread waits in the condition of this very call. It has taken nothing then: `get` takes after it waited."""
    for frame in sys._current_frames().values():
        caller = frame.f_back
        if frame.f_code is threading.Condition.wait.__code__ and caller is not None and caller.f_code is get.__code__:
            if caller.f_locals.get("self") is queue:
                return True
    return False
