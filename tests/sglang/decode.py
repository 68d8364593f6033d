"""The decode peer of `server.py`: receives the rooms that it is told on stdin, and reports on each whether its data is right.

    decode.py RELEASE_DIR BOOTSTRAP_PORT BACKEND

Takes lines `ROOM PAGES`; answers `{"room": …, "state": "Success" | "Failed", "data": true | false}`. With a third word,
`wrong_aux`, it names an aux record that it has never registered, so that the prefill cannot send that one. `abort ROOM` gives
a room up, as a client that went away does; `look ROOM` answers `{"room": …, "pages": {byte: pages that hold it}}`. It is
titled as a decode server's scheduler is, loads plugins as one does, and never runs the prefill's pass.
"""

import ctypes
import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

from setproctitle import setproctitle

import backends
import release
from collectives import Place
from memory import SLOTS, Memory, pattern

PR_SET_PDEATHSIG = 1
NOT_REGISTERED = 1 << 20  # index of an aux record beyond those that there are


class Decode:
    def __init__(self, folder: Path, bootstrap_port: int, backend: str, answers):
        self.answers = answers
        loaded = release.load(folder, bootstrap_port, release_kv_cache=lambda *_, **__: None, backend=backend)
        loaded.server_args.disaggregation_mode = "decode"
        release.load_plugins()
        setproctitle(Place.of_this_process().title())
        from sglang.srt.disaggregation.base.conn import KVPoll
        from sglang.srt.disaggregation.utils import DisaggregationMode

        self.address, self.state_indices = f"127.0.0.1:{bootstrap_port}", release.state_indices(folder)
        self.terminal = {KVPoll.Success: "Success", KVPoll.Failed: "Failed"}
        self.memory, self.free = Memory(backends.slot_pages(backend)), list(range(SLOTS))
        self.receiver_class = backends.kv_class(backend, "RECEIVER")
        backends.after_import(backend)
        self.manager = backends.kv_class(backend, "MANAGER")(self.memory.kv_args(), DisaggregationMode.DECODE, loaded.server_args, False)
        self.waiting = []
        self.places = {}  # room -> slot, pages

    def receive(self, room: int, pages: int, aux: int | None = None):
        slot = self.free.pop(0)
        self.memory.fill(slot, pages, 0)
        receiver = self.receiver_class(mgr=self.manager, bootstrap_addr=self.address, bootstrap_room=room)
        receiver.init(0)
        receiver.send_metadata(self.memory.pages(slot, pages), aux_index=slot if aux is None else aux,
                               state_indices=self.state_indices)
        self.waiting.append((room, receiver, slot, pages))
        self.places[room] = slot, pages

    def poll(self):
        for entry in list(self.waiting):
            room, receiver, slot, pages = entry
            state = receiver.poll()
            if state not in self.terminal:
                continue
            data = self.memory.holds(slot, pages, pattern(room))
            self.answer({"room": room, "state": self.terminal[state], "data": data})
            receiver.clear()
            self.waiting.remove(entry)
            if self.terminal[state] == "Success":  # into a failed request's pages a late write may still come
                self.free.append(slot)

    def answer(self, what):
        self.answers.write(json.dumps(what) + "\n")
        self.answers.flush()

    def obey(self, line):
        name, *arguments = line.split()
        if name == "abort":
            next(receiver for room, receiver, *_ in self.waiting if room == int(arguments[0])).abort()
        elif name == "look":
            room = int(arguments[0])
            self.answer({"room": room, "pages": self.memory.census(*self.places[room])})
        else:
            pages, *wrong_aux = arguments
            self.receive(int(name), int(pages), NOT_REGISTERED if wrong_aux else None)

    def run(self):
        for _ in release.until(lambda: self.manager.try_ensure_parallel_info(self.address), "the prefill server"):
            time.sleep(0.1)
        inbox = queue.SimpleQueue()
        threading.Thread(target=read_lines, args=(inbox,), daemon=True).start()
        while True:
            while not inbox.empty():
                line = inbox.get()
                if line is None:
                    return
                self.obey(line)
            self.poll()
            time.sleep(0.001)


def read_lines(inbox):
    for line in sys.stdin:
        inbox.put(line)
    inbox.put(None)


def die_with_the_server(server: int):
    """Also when stopped."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:
        os._exit(1)


if __name__ == "__main__":
    status = 0
    die_with_the_server(int(os.environ["SERVER_PID"]))
    try:
        Decode(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], release.private_stdout()).run()
    except Exception:
        traceback.print_exc()
        status = 1
    os._exit(status)  # the manager's threads are not daemons
