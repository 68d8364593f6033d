"""What the hook costs the server: per unchanged poll, and per pass over 64 inflight requests.

    python hook/bench.py [--json] [--rounds N] [--backend nixl|mooncake]

A third row is a decode's: an unchanged poll of NIXL's receiver, as it is from 0.5.18 to 0.5.22, in the transfer queue.

Wrapped and unwrapped classes run side by side in one process, in turns; the figures are medians over the rounds, in CPU time
of the thread. The classes are stand-ins with the shape of NIXL's sender in 0.5.12 (`poll` asks the manager, the manager looks
in a dict), or of Mooncake's in 0.5.22 (`poll` hands the question on, then compares the answer), and of the scheduler's pass. The real marker is loaded when there is one for this machine.
"""

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from dislodge_hook import importing, marks, process, scheduler, wrappers  # noqa: E402

INFLIGHT = 64
POLLS = 3000  # a sample is a millisecond or less: on a shared machine few of them are disturbed
PASSES = 60


def classes(backend):
    """A manager, a sender and a scheduler, made afresh: one set is wrapped, one is not."""

    class StandInKVManager:
        def __init__(self):
            self.request_status = {}
            self.attn_tp_size = self.attn_cp_size = self.pp_size = 1

        def check_status(self, bootstrap_room):
            return self.request_status.get(bootstrap_room, 2)

    class StandInKVSender:
        def __init__(self, mgr, bootstrap_addr, bootstrap_room):
            self.kv_mgr = mgr
            self.bootstrap_room = bootstrap_room
            self._send_failed = False

        def poll(self):
            if self._send_failed:
                return 0
            return self.kv_mgr.check_status(self.bootstrap_room)

    class StandInMooncakeKVSender(StandInKVSender):
        def __init__(self, mgr, bootstrap_addr, bootstrap_room):
            self.kv_mgr = mgr
            self.bootstrap_room = bootstrap_room
            self.conclude_state = None

        def poll(self):
            return self._poll_with_status(self.kv_mgr.check_status)

        def _poll_with_status(self, check_status):
            if self.conclude_state is not None:
                return self.conclude_state
            status = check_status(self.bootstrap_room)
            if status == 4 and self.kv_mgr.staging_outstanding.get(self.bootstrap_room, 0) > 0:
                return 3
            if status in (4, 0):
                self.conclude_state = status
            elif status == 1:
                return 0
            return status

    class StandInScheduler:
        def __init__(self):
            self.disagg_prefill_inflight_queue = []

        def process_disagg_prefill_inflight_queue(self, rids_to_check=None):
            if len(self.disagg_prefill_inflight_queue) == 0:
                return []
            polls = [int(req.disagg_kv_sender.poll()) for req in self.disagg_prefill_inflight_queue]
            done, undone = [], []
            for req, poll in zip(self.disagg_prefill_inflight_queue, polls):
                if poll in [2, 3]:
                    undone.append(req)
                else:
                    done.append(req)
            self.disagg_prefill_inflight_queue = undone
            return done

    sender = {"nixl": StandInKVSender, "mooncake": StandInMooncakeKVSender}[backend]
    return StandInKVManager, sender, StandInScheduler


def receiver_class():
    """A receiver, made afresh, with the shape of NIXL's."""

    class StandInKVReceiver:
        def __init__(self, mgr, bootstrap_addr, bootstrap_room=None):
            self.kv_mgr, self.bootstrap_room = mgr, bootstrap_room
            self.conclude_state, self.started_transfer, self.init_time = None, True, time.time()

        def send_metadata(self, kv_indices):
            pass

        def poll(self):
            if self.conclude_state is not None:
                return self.conclude_state
            status = self.kv_mgr.check_status(self.bootstrap_room)
            if status in (4, 0):
                self.conclude_state = status
                return status
            if not self.started_transfer:
                return status
            if time.time() - self.init_time >= 300:
                return 0
            return 2

    return StandInKVReceiver


def receiver(wrapped):
    """A receiver that has been polled once."""
    manager, cls = classes("nixl")[0], receiver_class()
    if wrapped:
        cls.__module__ = importing.PREFIX + "nixl.conn"
        wrappers.wrap_receiver(cls)
    made = cls(manager(), "", 2**62 + INFLIGHT)
    made.poll()
    return made


class Request:
    def __init__(self, rid, sender):
        self.rid = rid
        self.disagg_kv_sender = sender


def server(wrapped, backend):
    manager_class, sender_class, scheduler_class = classes(backend)
    if wrapped:
        for cls in (manager_class, *sender_class.__mro__[:-1]):
            cls.__module__ = importing.PREFIX + f"{backend}.conn"
        wrappers.wrap_manager(manager_class)
        for cls in sender_class.__mro__[:-1]:
            wrappers.wrap_sender(cls)
        scheduler.wrap_pass(scheduler_class)
    manager, made = manager_class(), scheduler_class()
    for index in range(INFLIGHT):
        room = 2**62 + index
        manager.request_status[room] = 3
        made.disagg_prefill_inflight_queue.append(Request(f"rid-{index}", sender_class(manager, "", room)))
    made.process_disagg_prefill_inflight_queue()  # the first pass opens the channel, each first poll marks
    return made


def nanoseconds_per_poll(polled):
    polls = [polled] * 100
    start = time.thread_time_ns()
    for _ in range(POLLS // 100):
        [int(sender.poll()) for sender in polls]
    return (time.thread_time_ns() - start) / POLLS


def microseconds_per_pass(made):
    run = made.process_disagg_prefill_inflight_queue
    start = time.thread_time_ns()
    for _ in range(PASSES):
        run()
    return (time.thread_time_ns() - start) / PASSES / 1000


def measure(rounds, backend):
    plain, hooked = server(False, backend), server(True, backend)
    senders = [made.disagg_prefill_inflight_queue[0].disagg_kv_sender for made in (plain, hooked)]
    receivers = [receiver(False), receiver(True)]
    series = {"poll_ns": ([], []), "receiver_ns": ([], []), "pass_us": ([], [])}
    gc.disable()
    for _ in range(rounds):
        for index, made in enumerate((plain, hooked)):
            series["poll_ns"][index].append(nanoseconds_per_poll(senders[index]))
            series["receiver_ns"][index].append(nanoseconds_per_poll(receivers[index]))
            series["pass_us"][index].append(microseconds_per_pass(made))
    gc.enable()
    medians = {name: [statistics.median(values) for values in pair] for name, pair in series.items()}
    # Pairs taken one after the other see the same machine: the difference of each pair, then the median.
    added = {name: statistics.median(b - a for a, b in zip(*series[name])) for name in ("poll_ns", "receiver_ns")}
    ratio = statistics.median(b / a for a, b in zip(*series["pass_us"]))
    return {
        "python": platform.python_version(),
        "marker": marks.absent or "loaded",
        "rounds": rounds,
        "poll_plain_ns": round(medians["poll_ns"][0], 1),
        "poll_hooked_ns": round(medians["poll_ns"][1], 1),
        "poll_added_ns": round(added["poll_ns"], 1),
        "receiver_plain_ns": round(medians["receiver_ns"][0], 1),
        "receiver_hooked_ns": round(medians["receiver_ns"][1], 1),
        "receiver_added_ns": round(added["receiver_ns"], 1),
        "pass_plain_us": round(medians["pass_us"][0], 2),
        "pass_hooked_us": round(medians["pass_us"][1], 2),
        "pass_ratio": round(ratio, 2),
        "errors": process.errors,
    }


def main():
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--json", action="store_true", help="one JSON object instead of text")
    options.add_argument("--rounds", type=int, default=501)
    options.add_argument("--backend", choices=("nixl", "mooncake"), default="nixl", help="whose sender's shape")
    options = options.parse_args()
    process.claim()
    figures = measure(options.rounds, options.backend)
    if options.json:
        print(json.dumps(figures))
        return
    print(f"Python {figures['python']}, marker {figures['marker']}, medians of {figures['rounds']} rounds")
    print(f"unchanged poll: {figures['poll_plain_ns']} ns plain, {figures['poll_hooked_ns']} ns hooked, "
          f"{figures['poll_added_ns']} ns added")
    print(f"unchanged poll of a receiver: {figures['receiver_plain_ns']} ns plain, {figures['receiver_hooked_ns']} ns hooked, "
          f"{figures['receiver_added_ns']} ns added")
    print(f"pass over {INFLIGHT}: {figures['pass_plain_us']} us plain, {figures['pass_hooked_us']} us hooked, "
          f"{figures['pass_ratio']} x")
    if figures["errors"]:
        print(f"errors of the hook: {figures['errors']}")


if __name__ == "__main__":
    main()
