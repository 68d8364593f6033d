"""One side of Mooncake transfers in main memory, driven by lines of JSON (see lines.py).

    mooncake_peer.py prefill|decode [--page BYTES] [--pages N] [--protocol tcp|rdma] [--device NAME]
    mooncake_peer.py --check                                a whole exchange between two of these, for people

Needs `mooncake` (mooncake-transfer-engine-non-cuda) and numpy: prepare.py tells the interpreter and the environment.
First line: {"ready": true, "pid", "engine", "version", "session" (host:port of its own handshake), "base" (address), "page",
"pages"}. The other's first line is passed to `connect`. Mooncake's API carries no message: decode only sees its memory.

    connect peer                    the other's first line
    transfer pages [kind] [times]   kind "batch" (default, batch_transfer_sync_write), "single" (transfer_sync_write: one page);
                                    with `on` it runs on that thread -> {"code": 0 or -1, "milliseconds"} of the last of `times`
    submit page                     transfer_submit_write -> {"batch"}: the BatchID, an address
    poll batch [times | within]     transfer_check_status until it isn't 0 (pending); the engine frees the batch when it has ended
                                    -> {"code": 0 pending, 1 done, -1 failed, -2 timed out, "polls", "seconds"}
    leak count page                 submits that many and never asks for them again, so that nobody frees them -> {"batches"}
    threads                         -> {"threads": {tid: name}}
    fill [salt], clear, check pages [salt] [within], written        as in nixl_peer.py. Over TCP a write is "done" when it is in the
                                    sockets: decode may see it a little later
    bench what count pages          "polls": transfer_check_status per second on one that hasn't ended (stop the other process
                                    first); "transfers": batches, one after the other -> {"count", "seconds", "per_second"}
    exit
"""

import argparse
import importlib.metadata
import os
import sys
import time
from pathlib import Path

from lines import Lines, PageCommands


class Mooncake(PageCommands):
    def __init__(self, role, page, pages, protocol, device):
        if protocol == "tcp":
            os.environ.setdefault("MC_FORCE_TCP", "1")
        # Imported late: whoever imports this file for its text needs no engine, and MC_FORCE_TCP is read on import.
        from mooncake.engine import TransferEngine

        from memory import Memory

        self.version = importlib.metadata.version("mooncake-transfer-engine-non-cuda")
        self.engine = TransferEngine()
        if self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", protocol, device):
            raise SystemExit("mooncake_peer.py: the engine did not initialize; see its log above")
        self.memory = Memory(role, page, pages)
        if self.engine.register_memory(self.memory.base, self.memory.bytes.nbytes):
            raise SystemExit("mooncake_peer.py: the engine did not register the memory; see its log above")
        self.peer = None

    def ready(self):
        memory = self.memory
        return {"ready": True, "pid": os.getpid(), "engine": "mooncake", "version": self.version,
                "session": f"127.0.0.1:{self.engine.get_rpc_port()}", "base": memory.base, "page": memory.page,
                "pages": memory.pages}

    def do_connect(self, peer):
        self.peer = peer
        return {}

    def do_transfer(self, pages, kind="batch", times=1):
        write = {"batch": self.batch, "single": self.single}[kind]
        for _ in range(times):
            begin = time.monotonic()
            code = write(pages)
        return {"code": code, "milliseconds": (time.monotonic() - begin) * 1e3}

    def batch(self, pages):
        ours, theirs = zip(*map(self.addresses, pages))
        return self.engine.batch_transfer_sync_write(
            self.peer["session"], list(ours), list(theirs), [self.memory.page] * len(pages))

    def single(self, pages):
        (page,) = pages
        return self.engine.transfer_sync_write(self.peer["session"], *self.addresses(page), self.memory.page)

    def addresses(self, page):
        return self.memory.base + page * self.memory.page, self.peer["base"] + page * self.memory.page

    def do_submit(self, page):
        return {"batch": self.engine.transfer_submit_write(self.peer["session"], *self.addresses(page), self.memory.page)}

    def do_poll(self, batch, times=None, within=None):
        limit = times or (1 if within is None else sys.maxsize)
        begin = time.monotonic()
        end = begin + (within if within is not None else 3600)
        polls, code = 0, 0
        while code == 0 and polls < limit and time.monotonic() < end:
            code = self.engine.transfer_check_status(batch)
            polls += 1
        return {"code": code, "polls": polls, "seconds": time.monotonic() - begin}

    def do_leak(self, count, page=0):
        return {"batches": [self.do_submit(page)["batch"] for _ in range(count)]}

    def do_threads(self):
        tasks = Path("/proc/self/task").iterdir()
        return {"threads": {task.name: (task / "comm").read_text().strip() for task in tasks}}

    def do_bench(self, what, count, pages):
        if what == "polls":
            batch, check = self.do_submit(pages[0])["batch"], self.engine.transfer_check_status
            begin, done = time.monotonic(), 0
            while done < count and check(batch) == 0:
                done += 1
        else:
            begin = time.monotonic()
            for done in range(1, count + 1):
                if self.batch(pages):
                    break
        seconds = time.monotonic() - begin
        return {"count": done, "seconds": seconds, "per_second": done / seconds}


def check(arguments):
    """Prints a batch, a single write, a submitted one, a write on a thread of its own, and one to a peer that was killed."""
    from peers import Pair

    pages = list(range(4))
    with Pair("mooncake", *arguments) as pair:
        prefill, decode = pair.prefill, pair.decode
        print("Mooncake", prefill.ready["version"], "prefill", prefill.pid, "decode", decode.pid)
        codes = []
        for kind, which, on in (("batch", pages, {}), ("single", [5], {}), ("batch", [6, 7], {"on": "worker"})):
            answer = prefill.ask("transfer", kind=kind, pages=which, **on)
            codes.append(answer["code"])
            print(kind, on, answer)
        submitted = prefill.ask("submit", page=8)
        polled = prefill.ask("poll", batch=submitted["batch"], within=20)
        data = decode.ask("check", pages=[*pages, 5, 6, 7, 8], within=20)
        print("submit", submitted, polled, "data", data)
        decode.end()
        print("decode was killed", prefill.ask("transfer", pages=pages, patience=120))
    return 0 if codes == [0, 0, 0] and polled["code"] == 1 and data["ok"] else 1


def main():
    parser = argparse.ArgumentParser(description="One side of Mooncake transfers, or a check of both.")
    parser.add_argument("role", nargs="?", choices=["prefill", "decode"])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--page", type=int, default=65536, metavar="BYTES")
    parser.add_argument("--pages", type=int, default=16, metavar="N")
    parser.add_argument("--protocol", default="tcp", choices=["tcp", "rdma"])
    parser.add_argument("--device", default="", metavar="NAME")
    options = parser.parse_args()
    if options.check:
        return check(["--page", options.page, "--pages", options.pages, "--protocol", options.protocol,
                      "--device", options.device])
    if options.role is None:
        parser.error("a role, or --check")
    lines = Lines()
    lines.commands = Mooncake(options.role, options.page, options.pages, options.protocol, options.device)
    lines.say(**lines.commands.ready())
    lines.serve()


if __name__ == "__main__":
    sys.exit(main())
