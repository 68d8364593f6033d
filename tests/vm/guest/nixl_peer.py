"""A prefill or decode process on unmodified NIXL, in the shape of SGLang's: prefill writes pages and notifies decode of the room.

    nixl_peer.py prefill|decode SOCKET DEVICE

Commands: `post ROOM [overwrite_at_once|overwrite_at_end]`, `state ROOM` (prefill); `verify ROOM`, `unregister` (decode). Prefill connects with its first post.
"""

import os
import sys
import time
import traceback

import numpy
from nixl_cu12._api import nixl_agent, nixl_agent_config

from peer import PAGE, PAGES, Buffer, commands, meet, say


def main():
    role, path, _ = sys.argv[1:]
    agent = nixl_agent(role, nixl_agent_config(backends=["UCX"]))
    buffer = Buffer()
    registered = agent.register_memory([(buffer.address, buffer.size, 0, "")], "DRAM")
    metadata, address = meet(role, path, (agent.get_agent_metadata(), buffer.address))
    say("met", pid=os.getpid())
    if role == "prefill":
        prefill(agent, buffer, metadata, address)
    else:
        decode(agent, buffer, registered)


def pages(agent, base):
    table = numpy.array([[base + page * PAGE, PAGE, 0] for page in range(PAGES)], dtype=numpy.uint64)
    return agent.get_xfer_descs(table, "DRAM")


def prefill(agent, buffer, metadata, remote):
    peer, handles, polls, overwrite_at_end = None, {}, 0, set()
    for command in commands():
        match command:
            case ["post", room, *overwrite]:
                room = int(room)
                peer = peer or agent.add_remote_agent(metadata)
                buffer.fill(room)
                local = pages(agent, buffer.address)
                handle = agent.initialize_xfer("WRITE", local, pages(agent, remote), peer, f"{room}_kv_0_1_0".encode())
                handles[room] = handle
                state = attempt(agent.transfer, handle)
                say("posted", room=room, **state)
                if "overwrite_at_once" in overwrite:
                    buffer.fill(room + 1)
                    say("overwritten", room=room)
                if "overwrite_at_end" in overwrite:
                    overwrite_at_end.add(room)
            case ["state", room] if int(room) in handles:
                say("state", room=int(room), polls=polls, **attempt(agent.check_xfer_state, handles[int(room)]))
        for room, handle in list(handles.items()):
            state, polls = attempt(agent.check_xfer_state, handle), polls + 1
            if state["state"] != "PROC":
                if room in overwrite_at_end:
                    buffer.fill(room + 1)
                say("end", room=room, good=state["state"] == "DONE", **state)
                del handles[room]
                agent.release_xfer_handle(handle)
        rest()


def rest():
    """A machine of two emulated processors has others to run, as the agent."""
    time.sleep(0.005)


def attempt(call, handle):
    try:
        return {"state": call(handle)}
    except Exception as error:
        return {"state": "ERR", "error": type(error).__name__}


def decode(agent, buffer, registered):
    for command in commands():
        match command:
            case ["verify", room]:
                say("verified", room=int(room), good=buffer.holds(int(room)))
            case ["unregister"]:
                agent.deregister_memory(registered)
                say("unregistered")
        for peer, notifications in agent.get_new_notifs().items():
            for notification in notifications:
                say("notified", peer=peer, notification=notification.decode())
        rest()


try:
    main()
except BaseException:
    traceback.print_exc()
    os._exit(1)
# The wheel's own libnl crashes in its destructor when a process ends the ordinary way.
os._exit(0)
