#!/usr/bin/env python3
"""Unmodified NIXL and Mooncake write between two processes over RDMA; the device's own counters say that it did the work."""

from engines import Pair
from peer import PAGE, PAGES
from processes import say
from rdma import changed, counters, make_devices

ROOMS = range(1, 6)
# Bytes of a packet at the link's MTU of 1500, the next lower one that RoCE has.
MTU = 1024

make_devices()
for engine in ("nixl", "mooncake"):
    before = counters()
    with Pair(engine) as pair:
        for room in ROOMS:
            end, arrived = pair.transfer(room)
            assert end["good"] and arrived, (end, arrived, pair.prefill.log)
            if engine == "nixl":
                pair.decode.expect(event="notified", notification=f"{room}_kv_0_1_0")
    say(transferred=engine, rooms=len(ROOMS), bytes=len(ROOMS) * PAGE * PAGES, counters_before=before, changed=changed(before))
    assert changed(before)["sent_pkts"] >= len(ROOMS) * PAGE * PAGES // MTU, "something went another way"
