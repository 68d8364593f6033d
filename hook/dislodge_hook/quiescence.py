"""Whether anything of a room may still read or write pages: the part of the answer that only the server has."""

from typing import NamedTuple

from . import backend, chunks, senders

SETTLED = ("DONE", "ERR")
"""States of a NIXL transfer that ends no further write (nixl `check_xfer_state`)."""


class Counts(NamedTuple):
    """The chunks of a room. `in_flight` counts transfer handles that are not settled; None: they could not be asked."""

    queued: int
    working: int
    abandoned: bool
    late: bool
    queues: bool
    in_flight: "int | None"

    def packed(self):
        """As a mark carries it. A handle in flight counts as work; handles that cannot be asked, as abandoned."""
        working = self.working + (self.in_flight or 0)
        packed = min(self.queued, chunks.QUEUED_AND_WORKING_MAX) | min(working, chunks.QUEUED_AND_WORKING_MAX) << 16
        packed |= chunks.ABANDONED if self.abandoned or self.in_flight is None else 0
        packed |= chunks.ATTACHED_LATE if self.late else 0
        return packed | (0 if self.queues else chunks.NO_QUEUES)


RECEIVES = Counts(0, 0, abandoned=False, late=False, queues=False, in_flight=0)
"""Of a receiver, which posts nothing: what is written to its pages, the prefill counts."""


def kind(manager, number):
    """How this backend's chunks can be counted: `queues` (NIXL 0.5.12 and later, Mooncake, ascend, mori 0.5.13 and later),
    `handles` (NIXL before; of mori before there are none to ask, so that its counts are unknown), `none`."""
    if number == backend.FAKE:
        return "none"  # moves nothing, whichever manager it is paired with
    return "queues" if chunks.queues_of(manager) else "handles"


def look(record, sender):
    """The counts of a sender's room. On the scheduler thread only: it asks NIXL about handles that thread owns."""
    manager = getattr(sender, "kv_mgr", None)
    if record.receiver:
        return RECEIVES
    how = kind(manager, record.backend)
    queued, working, abandoned = chunks.of(record.room)
    in_flight = 0
    if how != "queues":
        in_flight = _handles_in_flight(record.room, required=sender if how == "handles" else None)
    return Counts(queued, working, abandoned, how == "queues" and chunks.late(manager), how == "queues", in_flight)


def succeeded(record, sender):
    """Whether a sender without transfer queues will poll Success next: all was sent, each handle is done."""
    if kind(getattr(sender, "kv_mgr", None), record.backend) != "handles" or not getattr(sender, "has_sent", False):
        return False
    try:
        return all(sender.kv_mgr.agent.check_xfer_state(handle) == "DONE" for handle in sender.xfer_handles)
    except Exception:
        return False  # not known to have succeeded; the guards that follow refuse


def _handles_in_flight(room, required):
    """Handles of every sender of the room that is not gone, ended ones too: a release without transfer queues writes
    from them while nothing counts chunks. None when a state cannot be read, or `required` has no handles to ask."""
    if required is not None and not hasattr(required, "xfer_handles"):
        return None
    count = 0
    try:
        for record in senders.all_in(room):
            sender = record.reference()
            for handle in getattr(sender, "xfer_handles", None) or ():
                count += sender.kv_mgr.agent.check_xfer_state(handle) not in SETTLED
    except Exception:
        return None
    return count
