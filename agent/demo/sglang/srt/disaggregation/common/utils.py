"""Stand-in: the unit of a transfer worker's work, and the queue that it comes from."""

import collections
import dataclasses
import threading


@dataclasses.dataclass
class TransferKVChunk:
    room: int
    prefill_kv_indices: range
    is_last_chunk: bool


class FastQueue:
    """Not queue.SimpleQueue: the hook counts chunks by wrapping `put` and `get`, and reads `_buf`."""

    def __init__(self):
        self._buf = collections.deque()
        self._filled = threading.Semaphore(0)

    def put(self, item):
        self._buf.append(item)
        self._filled.release()

    def get(self):
        self._filled.acquire()
        return self._buf.popleft()
