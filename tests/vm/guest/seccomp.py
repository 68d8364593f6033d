#!/usr/bin/env python3
"""What a probe does to a process that allows itself few system calls, as container runtimes make servers do.

    seccomp.py          a line of JSON for each kind of probe and each answer of the filter: how the probed process ended

The kernel's own uprobe_events are used, so what is seen is the kernel's doing and no agent's. Return probes of x86-64 enter the
kernel by a system call of their own since 6.11 (uretprobe), entry probes on a five-byte nop since 6.18 (uprobe): no filter that is
older lists them.
"""

import ctypes
import json
import os
import platform
import signal
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

TRACING = Path("/sys/kernel/tracing")
CALLS = 1000
# x86-64 code of a function that gives back its argument's negative, after each nop that a probe may sit on.
NEGATE = bytes.fromhex("4889f8 48f7d8 c3")
NOPS = {"nop": bytes.fromhex("90"), "five-byte nop": bytes.fromhex("0f1f440000")}
# What the process still needs once it has the filter: write, rt_sigreturn, exit_group, and what Python's memory takes.
ALLOWED = (1, 9, 11, 12, 15, 202, 231)
ALLOW, FORBID = 0x7FFF0000, {"kill": 0x80000000, "errno": 0x00050000 | 1}


def main():
    if sys.argv[1:2] == ["probed"]:
        return probed(*sys.argv[2:])
    with tempfile.TemporaryDirectory() as folder:
        # Without a probe, but with a call that is not listed: that the filter does what it says.
        report("none", "nop", "kill", made(folder, "nop"), "getpid")
        for nop in NOPS:
            for kind in ("entry", "return"):
                for answer in ("none", "kill", "errno"):
                    file = made(folder, nop)
                    with Probe(kind, file) as probe:
                        report(kind, nop, answer, file, hits=probe.hits)


def made(folder, nop):
    file = Path(folder) / nop.replace(" ", "-")
    file.write_bytes(NOPS[nop] + NEGATE)
    return file


def report(kind, nop, answer, file, *further, hits=lambda: 0):
    command = [sys.executable, __file__, "probed", str(file), answer, *further]
    done = subprocess.run(command, capture_output=True, text=True)
    end = signal.Signals(-done.returncode).name if done.returncode < 0 else done.returncode
    said = (done.stdout + done.stderr).strip()[-300:]
    fact = {"seccomp": answer, "probe": kind, "on": nop, "end": end, "said": said, "hits": hits()}
    print(json.dumps({"kernel": platform.release(), **fact}), flush=True)


def probed(file, answer, further=None):
    """Calls the function under the filter."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    read_execute, private = 5, 2
    address = libc.mmap(None, 4096, read_execute, private, os.open(file, os.O_RDONLY), 0)
    function = ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_long)(address)
    if answer != "none":
        install(libc, FORBID[answer])
    if further:
        os.getpid()
    good = sum(function(number) == -number for number in range(CALLS))
    os.write(1, f"{good} of {CALLS} right".encode())
    os._exit(0)


def install(libc, otherwise):
    """The filter of seccomp(2): those system calls, and this answer to any other."""
    load, equal, give = 0x20, 0x15, 0x06
    program = [(load, 0, 0, 0)]
    for number in ALLOWED:
        program += [(equal, 0, 1, number), (give, 0, 0, ALLOW)]
    program.append((give, 0, 0, otherwise))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(program), ctypes.addressof(code)))
    no_new_privileges, set_seccomp, filter_mode = 38, 22, 2
    assert libc.prctl(no_new_privileges, 1, 0, 0, 0) == 0
    assert libc.prctl(set_seccomp, filter_mode, header, 0, 0) == 0, os.strerror(ctypes.get_errno())


class Probe:
    """A probe at the file's first byte that the kernel itself counts the hits of."""

    def __init__(self, kind, file):
        self._definition = f"{'r' if kind == 'return' else 'p'}:canary/canary {file}:0x0"

    def __enter__(self):
        self._tell(self._definition)
        (TRACING / "events/canary/enable").write_text("1")
        return self

    def hits(self):
        lines = map(str.split, (TRACING / "uprobe_profile").read_text().splitlines())
        return next(int(hits) for _, name, hits in lines if name == "canary")

    def __exit__(self, *_):
        (TRACING / "events/canary/enable").write_text("0")
        self._tell("-:canary/canary")

    @staticmethod
    def _tell(line):
        # Appended, and without the seek that Python's files begin with: anything else removes every other probe, or is refused.
        file = os.open(TRACING / "uprobe_events", os.O_WRONLY | os.O_APPEND)
        os.write(file, line.encode())
        os.close(file)


main()
