#!/usr/bin/env python3
"""Unmodified NIXL and Mooncake write between two processes over RDMA; the device's own counters say that it did the work.

What is written to pages once the engine has said that a transfer is done never reaches the peer; what is written to them
before does. So it is the engine's word that frees them, over RDMA as over TCP.
"""

from engines import Pair
from peer import PAGE, PAGES
from processes import say
from rdma import changed, counters, lose_everything, lose_nothing, lose_some, make_devices

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

    # More retries than the loss takes; no copies of UCX's own, which hide what becomes of the pages.
    with Pair(engine, UCX_RC_RETRY_COUNT="7", UCX_ZCOPY_THRESH="0") as pair:
        assert pair.transfer(1)[0]["good"]
        lose_some()
        before, rooms = counters(), range(2, 7)
        for room in rooms:
            pair.post(room, "overwrite_at_end")
            assert pair.end(room)["good"] and pair.has_arrived(room), (engine, room)
        lose_nothing()
        sent_again = changed(before).get("rcvd_seq_err", 0) + changed(before).get("completer_retry_err", 0)
        lose_everything()
        pair.post(20, "overwrite_at_once")
        pair.prefill.expect(event="overwritten", room=20)
        lose_nothing()
        assert pair.end(20)["good"]
        too_early = not pair.has_arrived(20)
    say(overwritten=engine, at_the_end_of=len(rooms), sent_again=sent_again, arrived_when_too_early=too_early)
    assert too_early, "the test sees nothing"
