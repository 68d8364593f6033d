"""One rank of `ranks.py`: `rank.py RELEASE_DIR`, with its place in the environment.

Commands beside those of `server.py`:

    only RANK COMMAND…   that rank carries the command out, the others answer null
    held RANK            a large request, whose decode rank is stopped (SIGSTOP) before it is sent: there, and nowhere else
    crossed              two requests in the queue for which nothing is sent, in another order on odd ranks: a stand-in for ranks
                         whose own clocks decide (sglang#27221)
    alone RANK           a request that is bootstrapped on all, and enters the queue of that rank only
    late RANK MS         the next release of pages takes so long on that rank
    resurrected RANK     a request that is aborted on all stages, and of which a late update undoes that on this one, when it has
                         told the others (sglang#30685; up to 0.5.15, where the larger status wins): it keeps what they drop
"""

import argparse
import json
import os
import queue
import sys
import threading
import time
import traceback
from pathlib import Path

from setproctitle import setproctitle

import release
from collectives import Group, Place
from memory import PrefillMemory
from peer import DecodePeer
from server import listening, start_bootstrap_server

BACKEND = "nixl"


def run(folder: Path, place: Place, answers):
    memory = PrefillMemory(256)
    loaded = release.load(folder, place.bootstrap_port, memory.release_kv_cache, BACKEND)
    from ranked import Commands, Scheduler
    from scheduler import make_classes

    if place.pp > 1:
        from pipeline import make_scheduler as Scheduler  # noqa: N812

    make_classes(folder)
    release.load_plugins()
    setproctitle(place.title())
    rank = place.pp_rank * place.tp + place.tp_rank
    everybody = Group(place.folder, "everybody", rank, place.tp * place.pp)
    if rank == 0:
        start_bootstrap_server(place.bootstrap_port, BACKEND)
    everybody.broadcast(True)
    loaded.parallel.pp_group.broadcast_object = Group(place.folder, f"pp-of-{place.tp_rank}", place.pp_rank, place.pp).broadcast_object
    for _ in release.until(lambda: listening(place.bootstrap_port), "the bootstrap server"):
        time.sleep(0.05)
    scheduler = Scheduler(loaded, place, everybody, memory)
    peers = [DecodePeer(folder, place.bootstrap_port, BACKEND) for _ in range(2)]
    say(answers, {"ready": os.getpid()})
    commands = Commands(scheduler, *peers)
    if rank == 0:
        threading.Thread(target=take_lines, args=(scheduler,), daemon=True).start()
    threading.Thread(target=tell, args=(scheduler.answers, answers), daemon=True).start()
    scheduler.event_loop(commands)


def take_lines(scheduler):
    for line in filter(str.strip, sys.stdin):
        scheduler.lines.put(line)


def tell(waiting: queue.SimpleQueue, answers):
    while True:
        say(answers, waiting.get().get())


def say(answers, what):
    answers.write(json.dumps(what) + "\n")
    answers.flush()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("release", type=Path)
    options, stream = parser.parse_args(), release.private_stdout()
    try:
        run(options.release.resolve(), Place.of_this_process(), stream)
    except Exception as error:  # what the queue's method raises ends the server, as in SGLang
        traceback.print_exc()
        say(stream, {"died": repr(error)})
    os._exit(1)  # the bootstrap thread is not a daemon
