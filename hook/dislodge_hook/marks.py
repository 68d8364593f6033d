"""The marks: what the agent's probe sees. The numbers are the contract's (agent/ARCHITECTURE.md, "The mark")."""

import json
import os
import sys

from . import process

HELLO, STATE_BEGIN, ENTRY, STATE_END = 1, 2, 3, 4
OPEN, CLOSE, PHASE, ABORT, UPDATE, SEND, CLEAR, FAILURE = 10, 11, 12, 13, 14, 15, 16, 17
ENTER, LEAVE, PEER_ABORT = 18, 19, 20
CHUNK_QUEUED, WORK_BEGIN, WORK_END = 21, 22, 23
PASS, PAUSED, RESUMED, REMEDY = 24, 25, 26, 27

FAILED, BOOTSTRAPPING, WAITING_FOR_INPUT, TRANSFERRING, SUCCESS = 0, 1, 2, 3, 4
"""SGLang's KVPoll (disaggregation/base/conn.py), the same in every release from 0.4.5 to 0.5.23."""
TERMINAL = (FAILED, SUCCESS)
NONE = 0xFF
"""No status: never polled, or the room is absent."""

RECEIVER = 1 << 8
"""In the value of `open`: a decode's receiver."""

DETAIL_BYTES = 456
RID_BYTES = 128


def _silent(*_):
    return None


mark = _silent
"""mark(kind, room, value, sender). Any object is accepted as a room; one that is no number of 64 bits is flagged."""
mark_detail = _silent
"""mark_detail(kind, room, value, sender, detail: bytes)."""
NOT_TRIED = "not loaded yet"
absent = NOT_TRIED
"""Why there is no marker, or None when there is one."""


def load(path=None):
    """Loads the marker library, once. Without it the hook works and says nothing; `absent` has the reason."""
    global mark, mark_detail, absent
    if absent is not NOT_TRIED or process.inert:
        return
    try:
        import importlib.machinery
        import importlib.util

        if path is None:
            path = os.path.join(os.path.dirname(__file__), "marker", os.uname().machine + ".so")
        if sys.maxsize < 2**32 or not getattr(sys, "_is_gil_enabled", lambda: True)():
            raise ImportError("the marker needs a 64-bit Python with a GIL")
        loader = importlib.machinery.ExtensionFileLoader("dislodge_marker", path)
        library = importlib.util.module_from_spec(importlib.util.spec_from_loader("dislodge_marker", loader))
        loader.exec_module(library)
        mark, mark_detail, absent = library.mark, library.mark_detail, None
    except Exception as error:
        absent = str(error)
        process.fault("marker", error)


def silence():
    """No more marks from this process."""
    global mark, mark_detail, absent
    mark, mark_detail, absent = _silent, _silent, "silenced"


def status(value):
    """A status as a mark carries it."""
    return value if type(value) is int and 0 <= value < NONE else NONE


def record(values):
    """The detail of a mark as compact JSON. What does not fit loses its optional parts from the end."""
    values = {name: value for name, value in values.items() if value is not None}
    text = _json(values)
    while len(text) > DETAIL_BYTES and values:
        values.popitem()
        text = _json(values)
    return text


def _json(values):
    return json.dumps(values, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")


def text(value):
    """A text as the detail of a mark. What is longer than a detail arrives cut, and is flagged as cut where it is read."""
    return value[: DETAIL_BYTES + 1].encode("utf-8", "replace")


def cut(rid, room):
    """A request id for use in JSON, of at most 128 bytes and at most `room` as it is written there; and whether it was cut."""
    limit = max(0, min(RID_BYTES, room))
    kept = rid[:limit]
    while len(_json(kept)) - 2 > limit:
        kept = kept[:-1]
    return kept, kept != rid


process.after_fork(silence)
