"""A prefill server and its decode peer, made from one SGLang release's own code and a real engine, on a machine without a GPU.

    server.py RELEASE_DIR [--backend nixl|mooncake|mori|ascend] [--control SOCKET] [--queues N] [--decode-server]
              [--tp N] [--pp N] [--cp N]

RELEASE_DIR is a folder that `prepare.py` made, and this runs on the Python that it made. Real: the plugin loader, the
scheduler's inflight-queue method, its metrics collector on prometheus_client, the backend's manager, sender, receiver and bootstrap server, NIXL (UCX over TCP) or
Mooncake's engine (TCP) on the loopback interface, poll reduction, time statistics, finish reasons. Stand-ins: model, batches,
the scheduler's other duties, the KV pool, which is host memory, and the engines of mori and ascend (`engine_stand_in.py`).
Mooncake gives a transfer up after MC_TRANSFER_TIMEOUT seconds (default 30, at least 5). Pages are poisoned when they are released, so that a release that came too early shows as
wrong data on the decode side. A plugin on PYTHONPATH (entry-point group sglang.srt.plugins) is loaded by both processes.

The first line on stdout is {"ready": pid, "metrics": port}. Then commands, one a line, come on stdin or on the Unix socket, and
each is answered by one line of JSON. If the scheduler dies, as SGLang's would, the last line is {"died": …}: an answer
to nothing, like the first.

    healthy [N [large]]  N requests, one after the other; how many ended well with the right data
    dup ROOM             two requests share a room; the second is prefilled after the first has ended and cleared it.
                         Pins the second from 0.5.12 to 0.5.22; 0.5.23 fails it at once; until 0.5.11 the scheduler dies,
                         and with Mooncake until 0.5.22
    dup_inflight ROOM    two requests share a room; the first's write is unfinished when the second enters the queue and
         [unsent|later]  is sent; or only enters it; or stays bootstrapped until end_first, which pins it as dup does
    end_first            continue the decode, wait for the end of dup_inflight's first request
    park [N [large]]     requests in the inflight queue for which nothing is sent
    send RID             a parked request's pages are sent after all
    admit [N]            requests in the bootstrap queue whose decode is told of them, and no more
    unpark RID           a parked request's pages are sent after all, to a decode that is stopped (SIGSTOP) by then
    stop [N]             N large requests are bootstrapped, the decode is stopped (SIGSTOP), then they are sent
    blocked [N [beside]] as stop 1, and N more requests whose chunks wait in the same transfer queue; beside: another one is
                         stuck before, in another queue (where the room chooses it: until 0.5.16)
    broken HOW           a worker gives a chunk up after it has posted the pages' transfer, which a stopped decode holds up;
                         another request is bootstrapped, whose decode lives
           alone         the request's end is waited for
           paused        generation is paused meanwhile, so that nobody polls Failed (from 0.5.20 on: the worker takes five seconds)
           shared        the other request shares the room, and the first one's end is waited for
    next                 the other request of broken is sent
    orphan               a request in the bootstrap queue whose decode never comes
    warmup               a request with a FakeKVSender, as warm-up and health checks make
    warmup_pinned        the same with an empty last chunk: pinned until 0.5.20
    cont | kill          continue or kill the decode; the next command that needs one starts another
    abort RID            what the scheduler's abort_request does (prefix match)
    decode               starts the decode, if it does not run; its pid
    decode_queues        with --decode-server: rids of the decode in its prealloc and in its transfer queue
    decode_slots N       with --decode-server: that many requests find memory there
    stranger             with --decode-server: a request of the decode to a prefill that nobody is
    decode_abort RID     the decode gives the request up, and from 0.5.13 on says so
    pause | resume       pause_generation in place, continue_generation: no pass in between
    slow MS              sleep that long in each pass
    queue | bootstrap    what is in the inflight and in the bootstrap queue (this polls)
    finished             rid -> finish reason, and how often its pages were released
    good                 rid -> whether the decode got the right data; null while it got none
    pages_intact         rids whose write is unfinished, and those whose pages were released in that state
    look RID             how many first and last bytes of the request's pages are what on the decode side
    overwrite            from now on, Mooncake: what was sent is overwritten at the moment at which the call has returned
    engine MODE          mori and ascend: what the stand-in does, works | fails | hangs
    metrics | quit

--tp, --pp and --cp make the scheduler claim larger groups than it has, for code that looks at the sizes; it stays one process.
"""

import argparse
import json
import os
import queue
import signal
import socket
import socketserver
import sys
import threading
import time
import traceback
from pathlib import Path

from setproctitle import setproctitle

import backends
import release
from memory import PrefillMemory
from peer import DecodePeer


def parse_options():
    parser = argparse.ArgumentParser()
    parser.add_argument("release", type=Path)
    parser.add_argument("--backend", choices=backends.NAMES, default="nixl", help="transfer backend (default: nixl)")
    parser.add_argument("--control", help="Unix socket to take commands from, instead of stdin")
    parser.add_argument("--queues", type=int, help="transfer queues (SGLang's default is 4)")
    parser.add_argument("--decode-server", action="store_true", help="the decode has a scheduler's queues (decode_server.py)")
    for group in ("tp", "pp", "cp"):
        parser.add_argument(f"--{group}", type=int, default=1, help=f"claim a {group.upper()} group of this size")
    return parser.parse_args()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def listening(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def run_scheduler_process(options, answers):
    """The order is SGLang's: plugins, title, scheduler; the transfer backend is imported when the scheduler needs it."""
    if options.queues:
        os.environ["SGLANG_DISAGGREGATION_QUEUE_SIZE"] = str(options.queues)
    folder, bootstrap_port, memory = options.release.resolve(), free_port(), PrefillMemory(backends.slot_pages(options.backend))
    loaded = release.load(folder, bootstrap_port, memory.release_kv_cache, options.backend)
    from commands import Commands
    from scheduler import Scheduler, make_classes

    make_classes(folder)
    release.load_plugins()
    setproctitle("sglang::scheduler_TP0")
    start_bootstrap_server(bootstrap_port, options.backend)
    scheduler = Scheduler(loaded, bootstrap_port, memory)
    scheduler.claim_sizes(options.tp, options.pp, options.cp)
    program = "decode_server.py" if options.decode_server else "decode.py"
    peers = [DecodePeer(folder, bootstrap_port, options.backend, program) for _ in range(2)]
    print(json.dumps({"ready": os.getpid(), "metrics": scheduler.metrics_collector.port}), file=answers, flush=True)
    take_commands(scheduler, options.control, answers)
    try:
        scheduler.event_loop_normal_disagg_prefill(Commands(scheduler, *peers))
        time.sleep(0.1)  # for the answer to quit
    finally:
        for peer in peers:
            if peer.pid:
                peer.kill()
        if options.control:
            os.unlink(options.control)


def start_bootstrap_server(port: int, backend: str):
    """In SGLang it lives in the main process. Older managers register once only, so it has to listen by then."""
    backends.kv_class(backend, "BOOTSTRAP_SERVER")("127.0.0.1", port)
    for _ in release.until(lambda: listening(port), "the bootstrap server"):
        time.sleep(0.05)


def take_commands(scheduler, control: str | None, answers):
    if control is None:
        threading.Thread(target=take_from_stdin, args=(scheduler, answers), daemon=True).start()
        return

    class Handler(socketserver.StreamRequestHandler):
        def handle(self):
            converse(scheduler, map(bytes.decode, self.rfile), lambda line: self.wfile.write(line.encode()))

    class Server(socketserver.ThreadingUnixStreamServer):
        daemon_threads = True

    threading.Thread(target=Server(control, Handler).serve_forever, daemon=True).start()


def take_from_stdin(scheduler, answers):
    def write(line):
        answers.write(line)
        answers.flush()

    converse(scheduler, sys.stdin, write)
    scheduler.gracefully_exit = True


def converse(scheduler, lines, write):
    for line in filter(str.strip, lines):
        answer = queue.SimpleQueue()
        scheduler.inbox.put((line, answer))
        write(json.dumps(answer.get()) + "\n")


if __name__ == "__main__":
    status, stream = 0, release.private_stdout()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        run_scheduler_process(parse_options(), stream)
    except Exception as error:  # what the queue's method raises ends the server, as in SGLang
        traceback.print_exc()
        print(json.dumps({"died": repr(error)}), file=stream, flush=True)
        status = 1
    os._exit(status)  # the bootstrap thread is not a daemon
