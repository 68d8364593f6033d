"""Stand-in: the queue between scheduler and transfer workers."""

import collections
import threading


class Chunk:
    def __init__(self, room, work=None):
        self.room = room
        self.work = work


class FastQueue:
    def __init__(self):
        self._buf = collections.deque()
        self._cond = threading.Condition()

    def put(self, item):
        with self._cond:
            self._buf.append(item)
            self._cond.notify()

    def get(self):
        with self._cond:
            while not self._buf:
                self._cond.wait()
            return self._buf.popleft()
