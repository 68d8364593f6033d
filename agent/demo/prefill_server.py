"""The server of `dislodge demo`: a stand-in for an SGLang prefill server, on Python's standard library alone.

    prefill_server.py [TITLE]

It has SGLang's module and class names, and the faults with which SGLang 0.5.12 to 0.5.22 pin a request in the prefill's inflight
queue; the package `sglang` beside it says what it is. The decode is a dictionary in the same process. Plugins on
PYTHONPATH (entry-point group sglang.srt.plugins) are loaded.

The first line on stdout is {"ready": pid}; then each line on stdin is a command, answered by one line of JSON:

    healthy [N]    N requests, one after the other
    dup ROOM       two requests share a room; the second is prefilled after the first has ended, and is pinned
    abort RID      what /abort_request does (prefix match)
    queue          the inflight queue
    finished       rid -> finish reason, and how often its pages were released
    quit
"""

import json
import logging
import os
import random
import sys
import threading
import time

from sglang.srt import plugins
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.managers.scheduler import PAGES_PER_REQUEST, Scheduler

PATIENCE = 5.0  # seconds
STATUS = {value: name for name, value in vars(KVPoll).items() if isinstance(value, int)}


def set_title(title: str):
    """Makes /proc/PID/cmdline say `title`, as SGLang does with setproctitle.

    Starting Python with another argv[0] is not good enough: some builds find their own library through it. The kernel shows
    the memory where the arguments were, so the title is written there; Python has copied them, and nothing else reads
    them. Through /proc/self/mem, because not every Python has ctypes.
    """
    with open("/proc/self/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, proc(5)
    text = title.encode()[: end - start - 1]
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        memory.seek(start)
        memory.write(text.ljust(end - start, b"\0"))
    with open("/proc/self/comm", "w") as comm:
        comm.write(title[:15])


class Commands:
    """Runs on a thread of its own, and has the scheduler's thread make every call that touches its queues."""

    def __init__(self, scheduler: Scheduler):
        self.scheduler = scheduler
        self.received = {}  # room -> the pages that the decode got

    def answer(self, line: str):
        name, *arguments = line.split()
        command = getattr(self, "do_" + name, None)
        try:
            return command(*arguments) if command else {"error": f"unknown command: {name}"}
        except Exception as error:
            return {"error": repr(error)}

    def call(self, function, *arguments):
        done, outcome = threading.Event(), []

        def make():
            try:
                outcome.append((function(*arguments), None))
            except Exception as error:
                outcome.append((None, error))
            done.set()

        self.scheduler.inbox.put(make)
        if not done.wait(PATIENCE):
            raise TimeoutError("the scheduler does not answer")
        result, error = outcome[0]
        if error is not None:
            raise error
        return result

    def until(self, condition, what):
        deadline = time.monotonic() + PATIENCE
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"waiting for {what}")
            time.sleep(0.001)

    def expect(self, room):
        """The decode is ready: it says where it wants the room's pages."""
        manager = self.scheduler.disagg_prefill_bootstrap_queue.kv_manager
        self.received[room] = manager.transfer_infos[room] = []
        manager.update_status(room, KVPoll.WaitingForInput)

    def bootstrapped(self, room, count):
        reqs = [self.call(self.scheduler.add_request, f"req-{room}-{os.urandom(3).hex()}", room) for _ in range(count)]
        self.call(self.expect, room)
        self.until(lambda: all(req in self.scheduler.waiting_queue for req in reqs), "the bootstrap")
        return reqs

    def run(self, req):
        content = req.bootstrap_room % 255 + 1
        self.call(self.scheduler.prefill, req, content)
        self.until(lambda: req.rid in self.scheduler.finished, f"the end of {req.rid}")
        return self.received[req.bootstrap_room] == [content] * PAGES_PER_REQUEST

    def do_healthy(self, count="1"):
        good = sum(self.run(self.bootstrapped(random.getrandbits(63), 1)[0]) for _ in range(int(count)))
        return {"asked": int(count), "good": good}

    def do_dup(self, room):
        first, second = self.bootstrapped(int(room), 2)
        self.run(first)
        self.call(self.scheduler.prefill, second, 0)
        return {"first": first.rid, "second": second.rid}

    def do_abort(self, rid):
        return {"aborted": self.call(self.scheduler.abort_request, rid)}

    def do_queue(self):
        return self.call(lambda: [
            {"rid": req.rid, "room": req.bootstrap_room, "poll": STATUS[req.disagg_kv_sender.poll()],
             "age": round(time.perf_counter() - req.time_stats.prefill_transfer_queue_entry_time, 3)}
            for req in self.scheduler.disagg_prefill_inflight_queue])

    def do_finished(self):
        scheduler = self.scheduler
        return {rid: {**reason, "released": scheduler.released[rid]} for rid, reason in list(scheduler.finished.items())}

    def do_quit(self):
        self.scheduler.gracefully_exit = True
        return {}


def take_commands(scheduler: Scheduler):
    """The end of stdin ends the server: it does not outlive whoever started it."""
    commands = Commands(scheduler)
    for line in filter(str.strip, sys.stdin):
        print(json.dumps(commands.answer(line)), flush=True)
    scheduler.gracefully_exit = True


def main():
    logging.basicConfig(level="INFO", stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    title = sys.argv[1] if len(sys.argv) > 1 else "sglang::scheduler_TP0"
    plugins.load_plugins()
    set_title(title)
    scheduler = Scheduler()
    print(json.dumps({"ready": os.getpid()}), flush=True)
    threading.Thread(target=take_commands, args=(scheduler,), daemon=True).start()
    scheduler.event_loop_normal_disagg_prefill()
    os._exit(0)  # a thread that reads stdin cannot be joined


if __name__ == "__main__":
    main()
