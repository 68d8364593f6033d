"""A prefill server of several ranks: a process for each, of one parent, which is this one.

    ranks.py RELEASE_DIR --tp N | --pp 2

Each rank is a scheduler as in `server.py`, with a decode rank of its own, as SGLang pairs ranks of servers that are of one size.
Real is what is real there, and that the released queue code reduces its polls over the ranks (or hands on between stages what
is to be released), by collectives that really exchange and really hang: `collectives.py`, a stand-in for torch.distributed.
As in SGLang, the first rank takes in what comes from outside and all learn of it in the same turn of their loops.

The first line on stdout is {"ready": [pid of each rank]}; then each line on stdin is a command to all, answered by one line: a list
with each rank's answer. Commands are those of `server.py`, of which at most one may be running, and those of `rank.py`. Once
the ranks hang there is no answer any more.
"""

import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from collectives import Place
from server import free_port

PR_SET_PDEATHSIG = 1


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("release", type=Path)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        shared = dict(tp=options.tp, pp=options.pp, folder=folder, bootstrap_port=free_port(), first_room=int(time.time()) * 1000)
        places = [Place(tp_rank=tp, pp_rank=pp, **shared) for pp in range(options.pp) for tp in range(options.tp)]
        ranks = [start(options.release, place) for place in places]
        try:
            say({"ready": [json.loads(rank.stdout.readline())["ready"] for rank in ranks]})
            for line in sys.stdin:
                ranks[0].stdin.write(line)
                ranks[0].stdin.flush()
                say([json.loads(rank.stdout.readline() or '{"died": "without a word"}') for rank in ranks])
        finally:
            for rank in ranks:
                rank.kill()


def start(release, place):
    command = [sys.executable, str(Path(__file__).with_name("rank.py")), str(release)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | place.variables(),
                            preexec_fn=lambda: ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL))


def say(what):
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main()
