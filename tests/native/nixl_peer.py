"""One side of NIXL transfers in main memory over UCX, driven by lines of JSON (see lines.py).

    nixl_peer.py prefill|decode [--page BYTES] [--pages N] [--threads N]
    nixl_peer.py --check                                    a whole exchange between two of these, for people

Needs `nixl_cu12` or `nixl_cu13` and numpy: prepare.py tells the interpreter and the environment.
`--threads 8` is what SGLang's prefill asks of NIXL (0.5.10 to 0.5.23); 0, the default, what its decode does.
First line: {"ready": true, "pid", "engine", "version", "agent", "metadata" (hex), "base" (address), "page", "pages"}. The
other's first line is passed to `connect`. Both roles have every command; in SGLang's shape prefill makes and decode looks.

    connect peer                    the other's first line -> {"peer"}
    make room pages [notification | notification_hex | notification_size] [form] [operation]
                                    form "create" (default) or "prepped"; the notification defaults to SGLang's, "" is none,
                                    `notification_size` is that many random bytes -> {"handle" (address), "notification_hex"}
    post handle                     -> {"status": "PROC" | "DONE" | "ERR"}; a refusal is answered as `raised`
    poll handle [times | within]    a tight loop until it isn't PROC, `times` polls or `within` seconds were (default: 1 poll)
                                    -> {"status", "polls", "seconds"}
    release handle                  -> {"released"}; what NIXL does with one in progress is answered as `raised`
    forget handle                   drops the Python object without releasing it -> {"forgotten"}
    leak count pages ...            makes that many as `make` does, and neither posts nor releases them -> {"handles", "first", "last"}
    send_notification ...           one without a transfer, its bytes chosen as in `make`
    notifications [within] [count]  those that arrived since the last time; waits until there are `count` -> {"notifications": [hex]}
    load path                       maps a further library
    fill [salt], clear              the pages
    check pages [salt] [within]     waits that many seconds for it -> {"ok", "wrong": [page]}
    written                         -> {"bytes"}: those that are not 0
    bench what count pages          "polls": getXferStatus per second on one that is in progress (stop the other process first);
                                    "transfers": make, post, poll to the end, release -> {"count", "seconds", "per_second"}
    exit
"""

import argparse
import ctypes
import importlib
import importlib.metadata
import os
import sys
import time

from lines import Lines, PageCommands


class Nixl(PageCommands):
    def __init__(self, role, page, pages, threads):
        # Imported late: whoever imports this file for its text needs no engine.
        import numpy

        from memory import Memory

        self.numpy = numpy
        package = bindings()
        self.memory = Memory(role, page, pages)
        self.name = f"{role}-{os.getpid()}"
        self.agent = package.nixl_agent(self.name, configuration(package, threads))
        self.version = importlib.metadata.version(package.__name__.partition(".")[0].replace("_", "-"))
        self.agent.register_memory([(self.memory.base, self.memory.bytes.nbytes, 0, "")], "DRAM")
        self.handles = {}  # address -> what NIXL's Python package gave for it
        self.leaked = []
        self.libraries = []
        self.peer = self.peer_base = None
        self.prepared = None  # descriptor lists of all pages, ours and theirs

    def ready(self):
        memory = self.memory
        return {"ready": True, "pid": os.getpid(), "engine": "nixl", "version": self.version, "agent": self.name,
                "metadata": self.agent.get_agent_metadata().hex(), "base": memory.base, "page": memory.page,
                "pages": memory.pages}

    def do_connect(self, peer):
        self.peer_base = peer["base"]
        self.peer = self.agent.add_remote_agent(bytes.fromhex(peer["metadata"]))
        self.prepared = None
        return {"peer": text(self.peer)}

    def do_make(self, **request):
        handle, notification = self.make(**request)
        return {"handle": self.keep(handle), "notification_hex": notification.hex()}

    def make(self, pages, form="create", operation="WRITE", **request):
        notification = chosen(**request)
        if form == "prepped":
            ours, theirs = self.prepare()
            return self.agent.make_prepped_xfer(operation, ours, pages, theirs, pages, notification), notification
        ours, theirs = self.descriptors(self.memory.base, pages), self.descriptors(self.peer_base, pages)
        return self.agent.initialize_xfer(operation, ours, theirs, self.peer, notification), notification

    def prepare(self):
        if self.prepared is None:
            everything = range(self.memory.pages)
            ours, theirs = self.descriptors(self.memory.base, everything), self.descriptors(self.peer_base, everything)
            self.prepared = (self.agent.prep_xfer_dlist("NIXL_INIT_AGENT", ours, "DRAM"),
                             self.agent.prep_xfer_dlist(self.peer, theirs, "DRAM"))
        return self.prepared

    def descriptors(self, base, pages):
        rows = [(base + page * self.memory.page, self.memory.page, 0) for page in pages]
        return self.agent.get_xfer_descs(self.numpy.array(rows, dtype=self.numpy.uint64), "DRAM")

    def keep(self, handle):
        address = getattr(handle, "_handle", handle)  # up to 0.3.1 the handle is the number itself
        self.handles[address] = handle
        return address

    def do_post(self, handle):
        return {"status": self.agent.transfer(self.handles[handle])}

    def do_poll(self, handle, times=None, within=None):
        which, check = self.handles[handle], self.agent.check_xfer_state
        limit = times or (1 if within is None else sys.maxsize)
        begin = time.monotonic()
        end = begin + (within if within is not None else 3600)
        polls, status = 0, "PROC"
        while status == "PROC" and polls < limit and time.monotonic() < end:
            status = check(which)
            polls += 1
        return {"status": status, "polls": polls, "seconds": time.monotonic() - begin}

    def do_release(self, handle):
        self.agent.release_xfer_handle(self.handles[handle])
        del self.handles[handle]
        return {"released": handle}

    def do_forget(self, handle):
        del self.handles[handle]
        return {"forgotten": handle}

    def do_leak(self, count, **request):
        addresses = []
        for _ in range(count):
            handle, _ = self.make(**request)
            self.leaked.append(handle)
            addresses.append(getattr(handle, "_handle", handle))
        return {"handles": len(addresses), "first": addresses[0], "last": addresses[-1]}

    def do_send_notification(self, **request):
        notification = chosen(**request)
        self.agent.send_notif(self.peer, notification)
        return {"notification_hex": notification.hex()}

    def do_notifications(self, within=0, count=1):
        end = time.monotonic() + within
        arrived = []
        while True:
            for messages in self.agent.get_new_notifs().values():
                arrived += messages
            if len(arrived) >= count or time.monotonic() >= end:
                return {"notifications": [as_bytes(message).hex() for message in arrived]}

    def do_load(self, path):
        self.libraries.append(ctypes.CDLL(path))
        return {}

    def do_bench(self, what, count, pages):
        handle, _ = self.make(pages=pages, room=1)
        check = self.agent.check_xfer_state
        begin = time.monotonic()
        if what == "polls":
            self.agent.transfer(handle)
            begin, done = time.monotonic(), 0
            while done < count and check(handle) == "PROC":
                done += 1
            self.keep(handle)
        else:
            for done in range(1, count + 1):
                status = self.agent.transfer(handle)
                while status == "PROC":
                    status = check(handle)
                self.agent.release_xfer_handle(handle)
                handle, _ = self.make(pages=pages, room=done)
            self.agent.release_xfer_handle(handle)
        seconds = time.monotonic() - begin
        return {"count": done, "seconds": seconds, "per_second": done / seconds}


def bindings():
    for name in ("nixl_cu12", "nixl_cu13", "nixl"):
        try:
            return importlib.import_module(f"{name}._api")
        except ModuleNotFoundError as error:
            if error.name not in (name, f"{name}._api"):
                raise
    raise SystemExit("nixl_peer.py: neither nixl_cu12, nixl_cu13 nor nixl can be imported; see prepare.py")


def configuration(package, threads):
    """UCX alone, which is the default as well; NIXL up to 0.5.1 has no such argument, and 0.3.1 none of the kind."""
    return package.nixl_agent_config(**({"backends": ["UCX"], "num_threads": threads} if threads else {}))


def chosen(room=None, notification=None, notification_hex=None, notification_size=None):
    if notification_hex is not None:
        return bytes.fromhex(notification_hex)
    if notification_size is not None:
        return os.urandom(notification_size)
    if notification is not None:
        return notification.encode()
    if room is None:
        return b""
    return f"{room}_kv_0_1_0".encode()


def text(name):
    return name.decode() if isinstance(name, bytes) else name


def as_bytes(message):
    return message if isinstance(message, bytes) else message.encode("latin-1")


def check(arguments):
    """Prints one transfer of each form, its notification, and one to a peer that was killed."""
    from peers import Pair

    with Pair("nixl", *arguments) as pair:
        prefill, decode = pair.prefill, pair.decode
        print("NIXL", prefill.ready["version"], "prefill", prefill.pid, "decode", decode.pid)
        good = True
        for room, form in enumerate(("create", "prepped"), 1000):
            pages = list(range(4))
            decode.ask("clear")
            made = prefill.ask("make", room=room, pages=pages, form=form)
            steps = [prefill.ask("post", handle=made["handle"]), prefill.ask("poll", handle=made["handle"], within=20)]
            arrived = decode.ask("notifications", within=20)["notifications"]
            data = decode.ask("check", pages=pages)
            steps += [prefill.ask("release", handle=made["handle"])]
            good &= data["ok"] and arrived == [made["notification_hex"]] and steps[1].get("status") == "DONE"
            print(form, made, *steps, "notifications", [bytes.fromhex(one) for one in arrived], "data", data, sep="\n  ")
        made = prefill.ask("make", room=1002, pages=[0])
        decode.end()
        print("decode was killed", prefill.ask("post", handle=made["handle"]),
              prefill.ask("poll", handle=made["handle"], within=20), sep="\n  ")
    return 0 if good else 1


def main():
    parser = argparse.ArgumentParser(description="One side of NIXL transfers, or a check of both.")
    parser.add_argument("role", nargs="?", choices=["prefill", "decode"])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--page", type=int, default=65536, metavar="BYTES")
    parser.add_argument("--pages", type=int, default=16, metavar="N")
    parser.add_argument("--threads", type=int, default=0, metavar="N")
    options = parser.parse_args()
    if options.check:
        return check(["--page", options.page, "--pages", options.pages, "--threads", options.threads])
    if options.role is None:
        parser.error("a role, or --check")
    lines = Lines()
    lines.commands = Nixl(options.role, options.page, options.pages, options.threads)
    lines.say(**lines.commands.ready())
    lines.serve()


if __name__ == "__main__":
    sys.exit(main())
