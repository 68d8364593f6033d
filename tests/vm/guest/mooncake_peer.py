"""A prefill or decode process on unmodified Mooncake, in the shape of SGLang's: prefill writes pages in one synchronous call.

    mooncake_peer.py prefill|decode SOCKET DEVICE

Commands: `post ROOM [overwrite_at_once|overwrite_at_end]` (prefill); `verify ROOM`, `unregister` (decode). Prefill connects with its first post.
"""

import os
import sys
import threading
import time

from mooncake.engine import TransferEngine

from peer import PAGE, PAGES, Buffer, commands, meet, say


def main():
    role, path, device = sys.argv[1:]
    engine = TransferEngine()
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "rdma", device):
        sys.exit("the engine cannot be initialised")
    buffer = Buffer()
    if engine.register_memory(buffer.address, buffer.size):
        sys.exit("the memory cannot be registered")
    session, address = meet(role, path, (f"127.0.0.1:{engine.get_rpc_port()}", buffer.address))
    say("met", pid=os.getpid())
    for command in commands():
        match command:
            case ["post", room, *overwrite]:
                threading.Thread(target=post, args=[engine, buffer, session, address, int(room), overwrite]).start()
            case ["verify", room]:
                say("verified", room=int(room), good=buffer.holds(int(room)))
            case ["unregister"]:
                engine.unregister_memory(buffer.address)
                say("unregistered")
        time.sleep(0.005)
    os._exit(0)


def post(engine, buffer, session, remote, room, overwrite):
    buffer.fill(room)
    offsets = [page * PAGE for page in range(PAGES)]
    started = time.monotonic()
    say("posted", room=room)
    if "overwrite_at_once" in overwrite:
        threading.Timer(0.5, overwritten, [buffer, room]).start()
    status = engine.batch_transfer_sync_write(
        session, [buffer.address + offset for offset in offsets], [remote + offset for offset in offsets], [PAGE] * PAGES)
    if "overwrite_at_end" in overwrite:
        buffer.fill(room + 1)
    say("end", room=room, good=status == 0, status=status, seconds=round(time.monotonic() - started, 3))


def overwritten(buffer, room):
    buffer.fill(room + 1)
    say("overwritten", room=room)


main()
