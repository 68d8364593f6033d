"""Processes of the guest that talk in lines of JSON."""

import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

# How long anything may take in an emulated machine on a busy host.
PATIENCE = 60


def say(**fact):
    """A fact for whoever runs the guest, as one line of JSON."""
    print(json.dumps(fact), flush=True)


def until(what, look, within=PATIENCE):
    """The first true value that `look` gives."""
    deadline = time.monotonic() + within
    while not (found := look()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {within} s for {what}")
        time.sleep(0.01)
    return found


class Process:
    """A process whose standard output is lines of JSON, kept in `facts`; other lines and its standard error are kept in `log`."""

    def __init__(self, name, command, environment=None):
        self.name, self.facts, self.log, self._ended = name, [], [], False
        self._process = subprocess.Popen(
            command, env={**os.environ, **(environment or {})}, text=True, errors="replace",
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        threading.Thread(target=self._read, args=[self._process.stdout, True], daemon=True).start()
        threading.Thread(target=self._read, args=[self._process.stderr, False], daemon=True).start()

    @property
    def pid(self):
        return self._process.pid

    def _read(self, lines, facts):
        for line in lines:
            try:
                if facts and isinstance(fact := json.loads(line), dict):
                    self.facts.append(fact)
                    continue
            except ValueError:
                pass
            self.log.append(line.rstrip())
        if facts:
            self._ended = True

    def tell(self, *words):
        try:
            print(*words, file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise self._failure(EOFError, f"ended ({self._process.wait()}) before it could be told {words}") from None

    def expect(self, within=PATIENCE, **wanted):
        """Takes out the first fact that has these values; the others stay, in their order."""
        def take():
            ended = self._ended
            for place, fact in enumerate(self.facts):
                if wanted.items() <= fact.items():
                    return self.facts.pop(place)
            if ended:
                raise self._failure(EOFError, f"ended ({self._process.wait()}) before {wanted}")
            return None

        try:
            return until(wanted, take, within)
        except TimeoutError as late:
            raise self._failure(TimeoutError, late) from None

    def logged(self, text, within=PATIENCE):
        """The first line of its log that has this text in it."""
        return until(f"`{text}` in the log of {self.name}", lambda: next((line for line in list(self.log) if text in line), None), within)

    def _failure(self, kind, what):
        return kind("\n".join([f"{self.name}: {what}; its log ends with", *self.log[-20:]]))

    def freeze(self):
        """SIGSTOP; returns when every thread has stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        until(f"{self.name} to be stopped", lambda: set(self._thread_states()) == {"T"}, within=10)

    def thaw(self):
        os.kill(self.pid, signal.SIGCONT)

    def _thread_states(self):
        for task in Path(f"/proc/{self.pid}/task").iterdir():
            yield (task / "stat").read_text().rpartition(")")[2].split()[0]

    def kill(self):
        """SIGKILL; returns when it is gone, and its queue pairs with it."""
        self._process.kill()
        self._process.wait()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()
