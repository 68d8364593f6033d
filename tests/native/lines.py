"""How a peer program is talked to: one JSON object a line on its stdin, one JSON object a line on its stdout.

A request is `{"do": COMMAND, ...}`; `"id"` is echoed. With `"on": NAME` it runs on the thread of that name (started when first
named, one request at a time), so that a transfer that hangs leaves the program answering; without, on the main thread, in turn.
An answer holds the command's result and `"tid"`, the kernel's id of the thread that ran it. A command that raised answers
`{"raised": exception type, "message": text}`. At the end of its input the program ends at once.
"""

import json
import os
import queue
import sys
import threading


class Lines:
    """Serves the methods of `commands` whose names begin with `do_`."""

    def __init__(self, commands=None):
        """Before an engine is imported: engines log to stdout, so that is made stderr, and answers go to a copy of it."""
        self.commands = commands
        self.threads = {}
        self.lock = threading.Lock()
        sys.stdout.flush()
        self.out = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def say(self, **message):
        with self.lock:
            self.out.write(json.dumps(message) + "\n")

    def serve(self):
        """Answers until stdin ends or `{"do": "exit"}`, and does not return. `os._exit`, because the NIXL wheels' bundled
        libnl-route faults in its destructor at an ordinary exit (nixl-cu12 0.3.1 to 1.5.1)."""
        for line in sys.stdin:
            request = json.loads(line)
            if request.get("do") == "exit":
                break
            if "on" in request:
                self.thread(request["on"]).put(request)
            else:
                self.answer(request)
        os._exit(0)

    def thread(self, name):
        if name not in self.threads:
            requests = self.threads[name] = queue.SimpleQueue()
            threading.Thread(target=self.work, args=(requests,), name=name, daemon=True).start()
        return self.threads[name]

    def work(self, requests):
        while True:
            self.answer(requests.get())

    def answer(self, request):
        request = dict(request)
        name = request.pop("do", None)
        request.pop("on", None)
        mark = {"id": request.pop("id")} if "id" in request else {}
        try:
            command = getattr(self.commands, f"do_{name}", None)
            if command is None:
                raise LookupError(f"unknown command: {name}")
            result = command(**request)
        except Exception as error:
            result = {"raised": type(error).__name__, "message": str(error)[:500]}
        self.say(**mark, **result, tid=threading.get_native_id())


class PageCommands:
    """The commands on a peer's own pages; the peer has a `memory` (memory.py)."""

    def do_fill(self, salt=0):
        self.memory.fill(salt)
        return {}

    def do_clear(self):
        self.memory.clear()
        return {}

    def do_check(self, **request):
        wrong = self.memory.wrong(**request)
        return {"ok": not wrong, "wrong": wrong}

    def do_written(self):
        return {"bytes": self.memory.written()}
