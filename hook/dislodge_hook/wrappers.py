"""The wrapped methods of senders, receivers and managers: each call becomes a mark, and no call becomes anything else.

Where an override calls `super()`, both methods are wrapped and the outermost call marks.
"""

import functools
import inspect
import weakref

from . import backend, chunks, marks, process, senders, signature

SELF = ("self",)
ROOM = ("bootstrap_room", "room")
STATUS = ("status",)
KV_INDICES = ("kv_indices", 1)  # by position: Mooncake's `send` is behind a decorator from 0.5.13 on (mooncake_trace_func)

# What was wrapped is remembered here and not on the functions: whoever wraps a wrapper of ours with `functools.wraps`, as
# other plugins may, copies its attributes.
_wrappers = {}  # (class, method name): our wrapper
_names = {}  # our wrapper: method name
_outermost = {}  # (class of an instance, method name): the wrapper of ours that a call meets first
_made = []  # weak references to managers: a process makes one or two


def wrap_in(cls, name, make):
    """Puts `make(original)` in the place of a method that this very class defines, once."""
    original = cls.__dict__.get(name)
    if not callable(original) or (cls, name) in _wrappers or getattr(original, "__isabstractmethod__", False):
        return
    wrapper = make(original)
    if wrapper is None:
        return
    _names[wrapper], _wrappers[cls, name] = name, wrapper
    setattr(cls, name, wrapper)
    _outermost.clear()


def wrapped(cls, name):
    """Whether this very class's method is wrapped."""
    return (cls, name) in _wrappers


def outermost(cls, name):
    """The wrapper of ours that a call of this method on an instance of `cls` meets first."""
    key = cls, name
    if key not in _outermost:
        _outermost[key] = next((_wrappers[base, name] for base in cls.__mro__ if (base, name) in _wrappers), None)
    return _outermost[key]


def acts(instance, wrapper):
    return outermost(type(instance), _names[wrapper]) is wrapper


def observer(before=None, after=None, picks=()):
    """For `wrap_in`: a wrapper that marks, with the original's signature."""
    return lambda original: signature.wrap(original, before, after, picks, acts)


# poll ----------------------------------------------------------------------------------------------------------------


def poll_wrapper(original):
    """The one wrapper that is called all the time: every request, every pass. It costs a comparison by identity; KVPoll's
    values are small ints, of which CPython has one each. No default on the class: with one, 3.12 and later do not
    specialise the attribute, which costs half as much again."""
    if list(inspect.signature(original).parameters) != ["self"]:
        return None

    def poll(self):
        status = original(self)
        try:
            if status is self._dislodge_last:
                return status
        except AttributeError:
            pass  # a sender from before the hook
        polled(self, status, poll)
        return status

    return functools.wraps(original)(poll)


def polled(sender, status, wrapper):
    """The slow path: `poll` returned something else than last time. An inner `poll` that differs from the outer one (which
    may hold a Success back) comes here each time and is not the sender's phase."""
    try:
        if process.inert or (wrapper is not None and not acts(sender, wrapper)):
            return
        record = senders.of(sender)
        before, after = record.phase, marks.status(status)
        setattr(sender, senders.LAST, status)
        if before == after:
            return
        record.phase, record.phase_since = after, senders.now()
        marks.mark(marks.PHASE, record.room, before | after << 8, record.serial)
    except Exception as error:
        process.fault("poll", error)


# The other methods of a sender ---------------------------------------------------------------------------------------


def present(sender):
    """Whether the sender's room has a status."""
    statuses = getattr(getattr(sender, "kv_mgr", None), "request_status", None)
    return statuses is not None and getattr(sender, "bootstrap_room", None) in statuses


def before_init(sender, room):
    if senders.known(sender) is not None:  # `__init__` called again makes another sender of it
        setattr(sender, senders.ATTRIBUTE, None)
    senders.of(sender, room, created=senders.now())


def before_abort(sender):
    record = senders.of(sender)
    record.aborted = senders.now()
    marks.mark(marks.ABORT, record.room, int(present(sender)), record.serial)


def before_send(sender, pages):
    return senders.of(sender), sender, len(pages) if hasattr(pages, "__len__") else 0


def after_send(note, _result):
    if note is None:
        return
    record, sender, pages = note
    if hasattr(sender, "curr_idx"):
        last = getattr(sender, "num_kv_indices", None) == sender.curr_idx
    else:
        last = bool(getattr(sender, "has_sent", False))  # fake
    record.sent_chunks += 1
    record.sent_pages += pages
    record.sent_last = record.sent_last or last
    marks.mark(marks.SEND, record.room, min(pages, 0xFFFFFFFF) | int(last) << 32, record.serial)


def before_clear(sender):
    return senders.of(sender), sender, present(sender)


def after_clear(note, _result):
    if note is None:
        return
    record, sender, was_present = note
    removed = was_present and not present(sender)
    if removed:
        for other in senders.live_in(record.room):
            if other is not record:
                other.cleared_by = record.serial
    if record.phase == marks.SUCCESS:
        record.ended = True
    marks.mark(marks.CLEAR, record.room, int(removed), record.serial)


def before_failure(sender):
    record = senders.of(sender)
    record.ended = True
    marks.mark(marks.FAILURE, record.room, 0, record.serial)


def wrap_sender(cls):
    """Wraps what this class of a sender's MRO defines itself."""
    wrap_in(cls, "__init__", observer(before_init, None, (SELF, ROOM)))
    wrap_in(cls, "abort", observer(before_abort, None, (SELF,)))
    wrap_in(cls, "send", observer(before_send, after_send, (SELF, KV_INDICES)))
    wrap_in(cls, "clear", observer(before_clear, after_clear, (SELF,)))
    wrap_in(cls, "failure_exception", observer(before_failure, None, (SELF,)))
    if senders.ATTRIBUTE not in cls.__dict__:
        setattr(cls, senders.ATTRIBUTE, None)
    wrap_in(cls, "poll", poll_wrapper)


def before_send_metadata(receiver, pages):
    return senders.of(receiver), pages


def after_send_metadata(note, _result):
    """The prefill has been told where to write: the receiver's one `send`."""
    if note is None:
        return
    record, pages = note
    pages = len(pages) if hasattr(pages, "__len__") else 0
    record.sent_chunks += 1
    record.sent_pages += pages
    record.sent_last = True
    marks.mark(marks.SEND, record.room, min(pages, 0xFFFFFFFF) | 1 << 32, record.serial)


def wrap_receiver(cls):
    """The same for a class of a receiver's MRO. Its `poll` ends where its `abort` was called, on each backend and release from
    0.5.10 to 0.5.23: both know `conclude_state`."""
    wrap_in(cls, "__init__", observer(before_init, None, (SELF, ROOM)))
    wrap_in(cls, "abort", observer(before_abort, None, (SELF,)))
    wrap_in(cls, "send_metadata", observer(before_send_metadata, after_send_metadata, (SELF, KV_INDICES)))
    wrap_in(cls, "clear", observer(before_clear, after_clear, (SELF,)))
    wrap_in(cls, "failure_exception", observer(before_failure, None, (SELF,)))
    if senders.ATTRIBUTE not in cls.__dict__:
        setattr(cls, senders.ATTRIBUTE, None)
    wrap_in(cls, "poll", poll_wrapper)


ENGINE_CALLS = ("transfer_sync", "batch_transfer_sync")

# Managers ------------------------------------------------------------------------------------------------------------


def status_of(manager, room):
    """The room's status, or None. 0.5.22 and later keep them in a PPConsensusStore when PP > 1."""
    statuses = getattr(manager, "request_status", None)
    if statuses is None:
        return None
    if hasattr(statuses, "get"):
        return statuses.get(room)
    return statuses[room] if room in statuses else None


def before_update(manager, room, requested):
    if requested == marks.FAILED:
        chunks.failed(room)
    if not senders.any_yet():
        return None
    return manager, room, requested, status_of(manager, room)


def after_update(note, _result):
    if note is None:
        return
    manager, room, requested, before = note
    after = status_of(manager, room)
    dropped = after != requested and after == before
    if after == before and not dropped:
        return
    if dropped and requested == marks.FAILED:
        for record in senders.live_in(room):
            record.dropped = senders.now()
    value = marks.status(requested) | marks.status(before) << 8 | marks.status(after) << 16
    marks.mark(marks.UPDATE, room, value, 0)


def before_failure_record(room):
    chunks.failed(room)


def before_peer_abort(manager, message):
    """Decode's ABORT: frames `ABORT`, the room in ASCII, … (NIXL 0.5.13 and later; Mooncake 0.5.19 and later, which before
    looked for it in its thread's own loop, where nothing can be wrapped). Any other message is not one."""
    if not message or message[0] != b"ABORT" or not senders.any_yet():
        return
    text = bytes(message[1])
    room = int(text) if text.isdigit() else None
    marks.mark(marks.PEER_ABORT, room, int(status_of(manager, room) is not None), 0)


def after_manager(manager, _result):
    _made.append(weakref.ref(manager))
    follow(manager)


def follow(manager):
    """From here on, what this manager's workers post and how their chunks end is seen."""
    if chunks.queues_of(manager):
        number = backend.of(type(manager))
        chunks.manager_made(weakref.ref(manager), wrap_posts(manager), backend.settles(number))


def wrap_posts(manager):
    """Wraps the calls through which this manager's workers post a transfer. False where there are others, or none is known.

    NIXL: `nixl_agent.transfer`. Mooncake and ascend: SGLang's own class around the engine (mooncake_transfer_engine.py),
    whose calls come back when the transfer has ended or was given up. mori posts by `IOEngine.batch_write`, and ends in
    other threads than it began: not followed."""
    agent = type(getattr(manager, "agent", None))
    if agent.__name__ == "nixl_agent":
        wrap_in(agent, "transfer", lambda original: signature.wrap(original, chunks.posted))
        return wrapped(agent, "transfer")
    engine = type(getattr(manager, "engine", None))
    if "MooncakeTransferEngine" not in [base.__name__ for base in engine.__mro__]:
        return False
    for base in engine.__mro__:
        for name in ENGINE_CALLS:
            wrap_in(base, name, lambda original: signature.wrap(original, chunks.posted, chunks.returned))
    return all(outermost(engine, name) is not None for name in ENGINE_CALLS)


def made_under_our_eyes(manager):
    """Whether the hook was there when this manager was made."""
    return any(reference() is manager for reference in _made)


def wrap_manager(cls):
    """Wraps what this class of a manager's MRO defines itself."""
    wrap_in(cls, "__init__", observer(lambda manager: manager, after_manager, (SELF,)))
    wrap_in(cls, "update_status", observer(before_update, after_update, (SELF, ROOM, STATUS)))
    wrap_in(cls, "record_failure", observer(before_failure_record, None, (ROOM,)))
    wrap_in(cls, "conclude_failure", observer(before_failure_record, None, (ROOM,)))
    for name in ("_handle_abort_notification", "_handle_abort_message"):  # the second is mori's
        wrap_in(cls, name, observer(before_peer_abort, None, (SELF, ("msg",))))

