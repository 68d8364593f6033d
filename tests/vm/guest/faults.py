#!/usr/bin/env python3
"""Each fault, and what it does to an unmodified engine: that these are the faults that their names say.

    faults.py nixl|mooncake...
"""

import sys

import rdma
from engines import Pair
from processes import say
from rdma import changed, counters


def frozen_before_the_first_write(pair, room):
    """SIGSTOP before the two are connected: nothing moves, and all of it does after SIGCONT."""
    pair.decode.freeze()
    pair.post(room)
    assert pair.is_in_progress(room)
    pair.decode.thaw()
    assert pair.end(room)["good"] and pair.has_arrived(room)


def frozen_when_connected(pair, room):
    """SIGSTOP of a connected peer: the write completes all the same, for a device answers it and not a process."""
    pair.decode.freeze()
    pair.post(room)
    assert pair.end(room)["good"]
    pair.decode.thaw()
    assert pair.has_arrived(room)


def stalled(pair, room):
    """Nothing gets through for a while: the transfer is in progress, and ends well once the device's retries get through."""
    rdma.lose_everything()
    pair.post(room)
    assert pair.is_in_progress(room, 0.5)
    rdma.lose_nothing()
    assert pair.end(room)["good"] and pair.has_arrived(room)


def nothing_gets_through(pair, room):
    rdma.lose_everything()
    pair.post(room)
    end = pair.end(room)
    rdma.lose_nothing()
    assert not end["good"], end
    return end


def peer_killed(pair, room):
    pair.decode.kill()
    pair.post(room)
    end = pair.end(room)
    assert not end["good"], end
    return end


def memory_unregistered(pair, room):
    """The peer takes its memory back: its device refuses the write."""
    pair.decode.tell("unregister")
    pair.decode.expect(event="unregistered")
    pair.post(room)
    end = pair.end(room)
    assert not end["good"], end
    return end


def link_lost(pair, room):
    """The cable is unplugged."""
    rdma.link_down()
    pair.post(room)
    end = pair.end(room)
    rdma.link_up()
    assert not end["good"], end
    return end


def inflict(fault, pair, room):
    before = counters()
    end = fault(pair, room)
    seen = changed(before)
    say(fault=fault.__name__, engine=pair.engine, end=end, changed=seen)
    return seen


def main():
    rdma.make_devices()
    for engine in sys.argv[1:]:
        {"nixl": on_nixl, "mooncake": on_mooncake}[engine]()


def on_nixl():
    with Pair("nixl") as pair:
        inflict(frozen_before_the_first_write, pair, 1)
        inflict(frozen_when_connected, pair, 2)
        inflict(stalled, pair, 3)
        # UCX gives the whole endpoint up then: the pair is of no use any more.
        assert inflict(nothing_gets_through, pair, 4)["retry_exceeded_err"]
    # Memory that NIXL deregisters stays registered in UCX's cache: a write to it succeeds.
    for fault in (peer_killed, link_lost):
        with Pair("nixl") as pair:
            assert pair.transfer(1)[0]["good"]
            inflict(fault, pair, 2)


def on_mooncake():
    with Pair("mooncake") as pair:
        inflict(frozen_before_the_first_write, pair, 1)
        inflict(frozen_when_connected, pair, 2)
        inflict(stalled, pair, 3)
    # Mooncake asks the device for seven retries, to soft-RoCE no end of them (Linux, rxe_comp.c), so it is Mooncake's own time
    # limit (5 s at least) that ends these, with no completion. Its queue pairs live on: what was posted is still written later.
    with Pair("mooncake", MC_TRANSFER_TIMEOUT="5") as pair:
        assert pair.transfer(1)[0]["good"]
        assert "retry_exceeded_err" not in inflict(nothing_gets_through, pair, 2)
        inflict(peer_killed, pair, 3)
    for fault in (memory_unregistered, link_lost):
        with Pair("mooncake") as pair:
            assert pair.transfer(1)[0]["good"]
            inflict(fault, pair, 2)


main()
