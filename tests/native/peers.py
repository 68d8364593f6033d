"""Starts the peer programs and talks to them, for the checks in Python."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
STARTING = 60  # seconds until a peer is ready: UCX looks for devices first
ANSWER = 60  # seconds for an answer, unless said otherwise


class NoAnswer(Exception):
    """The peer ended, or said nothing in time."""


class Peer:
    """A running peer. `ready` is its first line; see the program for what is in it."""

    def __init__(self, engine, role, *arguments, python=sys.executable, environment=None, quiet=True):
        command = [python, str(HERE / f"{engine}_peer.py"), role, *map(str, arguments)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL if quiet else None,
            env={**os.environ, **(environment or {})})
        self.pid, self.role = self.process.pid, role
        self.rest, self.kept, self.last = b"", [], 0
        try:
            self.ready = self.line(STARTING)
        except NoAnswer:
            self.end()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end()

    def ask(self, do, patience=ANSWER, **arguments):
        """Sends a command and waits for its answer, `patience` seconds at most."""
        return self.answer(self.send(do, **arguments), patience)

    def send(self, do, **arguments):
        """Sends a command; returns the id that `answer` waits for."""
        self.last += 1
        self.process.stdin.write(json.dumps({"do": do, "id": self.last, **arguments}).encode() + b"\n")
        self.process.stdin.flush()
        return self.last

    def answer(self, identity, patience=ANSWER):
        """The answer to the command of that id; those of others that come meanwhile are kept."""
        end = time.monotonic() + patience
        while True:
            for answer in self.kept:
                if answer.get("id") == identity:
                    self.kept.remove(answer)
                    return answer
            self.kept.append(self.line(end - time.monotonic()))

    def line(self, patience):
        end = time.monotonic() + patience
        while b"\n" not in self.rest:
            left = end - time.monotonic()
            if left <= 0 or not select.select([self.process.stdout], [], [], left)[0]:
                raise NoAnswer(f"{self.role} (pid {self.pid}) said nothing for {patience:.0f} s")
            chunk = os.read(self.process.stdout.fileno(), 1 << 16)
            if not chunk:
                raise NoAnswer(f"{self.role} (pid {self.pid}) ended: exit status {self.process.wait()}")
            self.rest += chunk
        line, _, self.rest = self.rest.partition(b"\n")
        return json.loads(line)

    def stop(self):
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self):
        os.kill(self.pid, signal.SIGCONT)

    def end(self):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


class Pair:
    """A prefill and a decode that know each other."""

    def __init__(self, engine, *arguments, **options):
        self.prefill = Peer(engine, "prefill", *arguments, **options)
        try:
            self.decode = Peer(engine, "decode", *arguments, **options)
            try:
                self.decode.ask("connect", peer=self.prefill.ready)
                self.prefill.ask("connect", peer=self.decode.ready)
            except NoAnswer:
                self.decode.end()
                raise
        except NoAnswer:
            self.prefill.end()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.prefill.end()
        self.decode.end()
