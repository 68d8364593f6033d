"""What scripts in the guest share: a soft-RoCE device, processes that talk in lines of JSON, and faults that are real."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

# How long anything may take in an emulated machine on a busy host.
PATIENCE = 60
DEVICE, LINK, ADDRESS = "rxe0", "dum0", "10.0.0.1"
PORT = Path(f"/sys/class/infiniband/{DEVICE}/ports/1")


def say(**fact):
    """A fact for whoever runs the guest, as one line of JSON."""
    print(json.dumps(fact), flush=True)


def run(*command):
    subprocess.run(command, check=True)


def until(what, look, within=PATIENCE):
    """The first true value that `look` gives."""
    deadline = time.monotonic() + within
    while not (found := look()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {within} s for {what}")
        time.sleep(0.01)
    return found


def make_device():
    """An RDMA device on a link that leads nowhere: what is sent to its own address comes back as from a peer."""
    if PORT.exists():
        return
    run("ip", "link", "add", LINK, "type", "dummy")
    run("ip", "addr", "add", f"{ADDRESS}/24", "dev", LINK)
    run("ip", "link", "set", LINK, "up")
    run("rdma", "link", "add", DEVICE, "type", "rxe", "netdev", LINK)
    wait_for_device("ACTIVE")


def wait_for_device(state):
    until(f"{DEVICE} to be {state}", lambda: (PORT / "state").read_text().strip().endswith(state))


def counters():
    """The device's own counts of packets, retries and errors since it was made."""
    return {file.name: int(file.read_text()) for file in sorted((PORT / "hw_counters").iterdir()) if file.name != "lifespan"}


def changed(before):
    """Those counters that changed, and by how much."""
    return {name: count - before[name] for name, count in counters().items() if count != before[name]}


def link_down():
    """What is sent gets no answer any more: the sender's queue pair retries, and then completes with an error."""
    run("ip", "link", "set", LINK, "down")
    wait_for_device("DOWN")


def link_up():
    run("ip", "link", "set", LINK, "up")
    wait_for_device("ACTIVE")


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
        print(*words, file=self._process.stdin, flush=True)

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
        until(f"{self.name} to be stopped", lambda: set(self._thread_states()) == {"T"})

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


class Pair:
    """A prefill and a decode process of an engine (`nixl` or `mooncake`), which know of each other and are not connected yet.

    This is where an agent comes in: `pair.prefill.pid` is the process to trace.
    """

    def __init__(self, engine, **environment):
        self.engine = engine
        script, meeting = f"/guest/{engine}_peer.py", f"/run/{engine}-{time.monotonic_ns()}"
        environment = {**PEERS[engine], **environment}
        self.decode = Process(f"{engine} decode", [sys.executable, script, "decode", meeting], environment)
        self.prefill = Process(f"{engine} prefill", [sys.executable, script, "prefill", meeting], environment)
        self.decode.expect(event="met")
        self.prefill.expect(event="met")

    def transfer(self, room):
        """One whole transfer; returns what the prefill process said of its end and whether decode has the bytes."""
        self.prefill.tell("post", room)
        end = self.prefill.expect(event="end", room=room)
        self.decode.tell("verify", room)
        return end, self.decode.expect(event="verified", room=room)["good"]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.prefill.kill()
        self.decode.kill()


LIBRARIES = "/usr/lib/x86_64-linux-gnu"
PEERS = {
    "nixl": {
        "PYTHONPATH": "/guest:/opt/engines",
        "UCX_TLS": "rc_verbs,tcp,self",
        "UCX_NET_DEVICES": f"{DEVICE}:1,lo,{LINK}",
        # The wheel's own libibverbs looks for providers in a folder of the machine that built it.
        "LD_PRELOAD": f"{LIBRARIES}/libibverbs.so.1:{LIBRARIES}/libmlx5.so.1",
    },
    "mooncake": {"PYTHONPATH": "/guest:/opt/engines", "MC_GID_INDEX": "1"},
}
