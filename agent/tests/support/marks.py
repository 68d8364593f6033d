"""A process that makes marks as it is told: one command of JSON a line, one answer of JSON a line.

    marks.py MARKER_LIBRARY

    ["mark", KIND, ROOM, VALUE, SENDER]              as the hook makes them; a room may be anything
    ["detail", KIND, ROOM, VALUE, SENDER, TEXT]
    ["raw", KIND, ROOM, VALUE, SENDER, ADDRESS]      dislodge_mark itself, with any detail pointer
    ["torn", KIND, ROOM, VALUE, SENDER]              a detail whose length can be read and whose bytes cannot
    ["many", COUNT]                                  pass marks with the values 1 to COUNT
    ["threads", THREADS, COUNT]                      as many, in each of so many threads, without the GIL
    ["fork", COUNT]                                  as many in a forked child; answers when it has ended
"""

import ctypes
import importlib.machinery
import importlib.util
import json
import mmap
import os
import sys
import threading

PASS = 24


def load(path):
    loader = importlib.machinery.ExtensionFileLoader("dislodge_marker", path)
    library = importlib.util.module_from_spec(importlib.util.spec_from_loader("dislodge_marker", loader))
    loader.exec_module(library)
    return library


library = load(sys.argv[1])
raw = ctypes.CDLL(sys.argv[1]).dislodge_mark
raw.argtypes, raw.restype = [ctypes.c_uint64] * 5, None


def torn(*mark):
    """The length lies at the end of a page, and the next page cannot be read."""
    pages = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    if ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + mmap.PAGESIZE), mmap.PAGESIZE, 0):
        raise OSError("mprotect")
    ctypes.c_uint32.from_address(start + mmap.PAGESIZE - 4).value = 100
    raw(*mark, start + mmap.PAGESIZE - 4)


def many(count):
    for value in range(1, count + 1):
        library.mark(PASS, 0, value, 0)


def many_raw(count):
    for value in range(1, count + 1):
        raw(PASS, 0, value, 0, 0)


def in_threads(threads, count):
    running = [threading.Thread(target=many_raw, args=(count,)) for _ in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()


def in_child(count):
    child = os.fork()
    if not child:
        many(count)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


COMMANDS = {
    "mark": library.mark,
    "detail": lambda kind, room, value, sender, text: library.mark_detail(kind, room, value, sender, text.encode()),
    "raw": raw,
    "torn": torn,
    "many": many,
    "threads": in_threads,
    "fork": in_child,
}

print(json.dumps("ready"), flush=True)
for line in sys.stdin:
    name, *arguments = json.loads(line)
    print(json.dumps(COMMANDS[name](*arguments)), flush=True)
