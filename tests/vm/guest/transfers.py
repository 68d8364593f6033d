#!/usr/bin/env python3
"""Unmodified NIXL and Mooncake write between two processes over RDMA; the device's own counters say that it did the work."""

import sys

from vm import Pair, changed, counters, make_device, say

ROOMS = range(1, 6)

make_device()
failed = False
for engine in ("nixl", "mooncake"):
    before = counters()
    say(transfers=engine, counters_before=before)
    with Pair(engine) as pair:
        for room in ROOMS:
            end, verified = pair.transfer(room)
            say(transfer=engine, room=room, end=end, verified=verified)
            failed |= not (end["good"] and verified)
            if engine == "nixl":
                pair.decode.expect(event="notified", notification=f"{room}_kv_0_1_0")
        for process in (pair.prefill, pair.decode):
            for line in process.log: print(process.name, line)
        say(transfers=engine, counters_after=counters(), changed=changed(before))
sys.exit(failed)
