"""Failing one sender on the agent's request, after every guard was checked again here, on the scheduler thread, at the
moment of acting.

A failed request gives its pages back at once: a write that still reads them would send another request's bytes. So the
agent's evidence is necessary and never sufficient.
"""

from typing import NamedTuple

from . import backend, description, marks, process, quiescence, senders, wrappers
from .control import Refused

REASON_CHARACTERS = 256


class Facts(NamedTuple):
    """What the guards look at, as it is now."""

    remedied: bool
    live: bool
    room: "int | None"
    asked_room: str
    observant: bool
    in_queue: bool
    rid: "str | None"
    asked_rid: str
    phase: int
    asked_phase: int
    room_status: "int | None"
    succeeded: bool
    shared_with: "int | None"
    counts: "quiescence.Counts | None"
    tp: "int | None"
    cp: "int | None"
    pp: "int | None"
    proved: bool
    can_be_flagged: bool


def refusal(facts):
    """The first guard that says no, or None. Identity first, then the phase, then what may still move, then the rest."""
    counts = facts.counts
    checks = (
        ("already_failed", facts.remedied),
        ("unknown_sender", not facts.live),
        ("room_mismatch", facts.room is None or str(facts.room) != facts.asked_room),
        ("not_in_queue", not facts.in_queue),
        ("rid_mismatch", facts.rid != facts.asked_rid),
        ("terminal", facts.phase in marks.TERMINAL),
        ("phase_changed", facts.phase != facts.asked_phase),
        # The worker may have ended the transfer since the last poll; this pass's poll will say so.
        ("phase_changed", facts.room_status in marks.TERMINAL or facts.succeeded),
        ("room_shared", facts.shared_with is not None),
        ("attached_late", counts.late),
        ("chunks_queued", counts.queued > 0),
        ("chunks_working", counts.working > 0),
        ("counts_unknown", counts.in_flight is None or not facts.observant),
        ("transfer_in_flight", bool(counts.in_flight)),
        ("abandoned_handles", counts.abandoned),
        ("ranks_unknown", None in (facts.tp, facts.cp, facts.pp)),
        ("tensor_parallel", facts.tp != 1),
        ("context_parallel", facts.cp != 1),
        ("pipeline_parallel", facts.pp != 1),
        ("backend_unproved", not facts.proved),
        ("no_sender_flag", not facts.can_be_flagged),
    )
    return next((reason for reason, says_no in checks if says_no), None)


def fail(scheduler, request):
    """The verb `fail`. Raises `Refused`."""
    serial, rid, room, phase, reason = arguments(request)
    record = senders.by_serial(serial)
    sender = record.reference() if record is not None else None
    if sender is None:
        raise Refused("unknown_sender", f"no sender {serial}")
    if record.receiver:  # the prefill writes to its pages, and nobody here knows when it has done so
        raise Refused("decode_side", describe(record))
    why = refusal(gather(scheduler, record, sender, rid, room, phase))
    if why is not None:
        raise Refused(why, describe(record))
    record.remedied = True
    flag = set_flag(record, sender, reason_text(reason))
    marks.mark(marks.REMEDY, record.room, flag, record.serial)
    return {"flag": backend.FLAG_NAMES[flag]}


def arguments(request):
    kinds = (("serial", int), ("rid", str), ("room", str), ("phase", int), ("reason", str))
    for name, kind in kinds:
        if type(request.get(name)) is not kind:
            raise Refused("malformed", f"{name} is no {kind.__name__}")
    return tuple(request[name] for name, _ in kinds)


def gather(scheduler, record, sender, rid, room, phase):
    # The scheduler's own list, by the sender's identity: two requests can have one rid.
    req = next((r for r in scheduler.disagg_prefill_inflight_queue if r.disagg_kv_sender is sender), None)
    # What was counted is what is asked about. Until 0.5.12 a fake sender does not keep its room.
    same_room = record.room == getattr(sender, "bootstrap_room", record.room)
    others = [other.serial for other in senders.live_in(record.room) if other is not record]
    tp, cp, pp = description.sizes(scheduler)
    return Facts(
        remedied=record.remedied,
        live=record.live,
        room=senders.number(record.room) if same_room else None,
        asked_room=room,
        observant=process.observant(),
        in_queue=req is not None,
        rid=getattr(req, "rid", None),
        asked_rid=rid,
        phase=record.phase,
        asked_phase=phase,
        room_status=wrappers.status_of(getattr(sender, "kv_mgr", None), record.room),
        succeeded=quiescence.succeeded(record, sender),
        shared_with=others[0] if others else None,
        counts=quiescence.look(record, sender),
        tp=tp,
        cp=cp,
        pp=pp,
        proved=backend.proved(record.backend),
        can_be_flagged=hasattr(sender, "__dict__"),
    )


def describe(record):
    return f"room {record.room} phase {record.phase} rid {str(record.rid)[:128]}"


def reason_text(reason):
    """What the server will log and tell the client."""
    text = f"failed by dislodge: {reason}".encode("ascii", "replace").decode()
    return "".join(c if c.isprintable() else "?" for c in text)[:REASON_CHARACTERS]


def set_flag(record, sender, reason):
    """Makes the sender's `poll` return Failed; the server's own cleanup does the rest in this very pass."""
    flag = backend.flag_for(type(sender), vars(sender))
    if flag == backend.SEND_FAILED:
        sender._send_error = RuntimeError(reason)  # first: without it 0.5.13 and later log the failure at DEBUG only
        sender._send_failed = True
    elif flag == backend.CONCLUDE_STATE:
        manager = getattr(sender, "kv_mgr", None)
        if hasattr(manager, "record_failure") and "failure_records" in backend.names_in(type(sender), "failure_exception"):
            manager.record_failure(sender.bootstrap_room, reason)
        sender.conclude_state = marks.FAILED
    else:
        sender.poll = marking_poll(record)
    return flag


def marking_poll(record):
    """A `poll` for one sender, where no flag is read (NIXL to 0.5.11, fake to 0.5.12). It holds the record, not the sender."""

    def poll():
        sender = record.reference()
        if sender is not None:
            wrappers.polled(sender, marks.FAILED, None)
        return marks.FAILED

    return poll
