"""A bpftrace script, and the lines that it prints.

bpftrace 0.17 does not limit a uprobe to the process of its `-p`: every probe has to say `/pid == PID/`, and PID is replaced here.
"""

import os
import subprocess
import tempfile
import time

READY = "watching"
STARTING = 60  # seconds for bpftrace to attach


class Watch:
    """Runs while its `with` block does. `lines()` gives what was printed since the last call, after `pause` seconds."""

    def __init__(self, pid, script):
        self.printed = tempfile.NamedTemporaryFile("w")
        self.file = open(self.printed.name)  # of its own: two that share an offset would read nothing
        self.script = tempfile.NamedTemporaryFile("w", suffix=".bt")
        self.script.write('BEGIN { printf("%s\\n"); }\n' % READY + script.replace("PID", str(pid)))
        self.script.flush()
        self.process = subprocess.Popen(["bpftrace", "-B", "line", self.script.name], stdout=self.printed,
                                        stderr=subprocess.PIPE, env={**os.environ, "BPFTRACE_STRLEN": "64"})
        end = time.monotonic() + STARTING
        while READY not in self.lines(0.1):
            if self.process.poll() is not None or time.monotonic() > end:
                self.process.kill()
                raise RuntimeError(f"bpftrace did not attach: {self.process.stderr.read().decode()[-2000:]}")
        time.sleep(0.2)  # BEGIN runs while the probes are being attached

    def lines(self, pause=0.5):
        time.sleep(pause)
        return [line for line in self.file.read().splitlines() if line]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:  # bpftrace 0.17 misses a SIGTERM now and then
            self.process.kill()
            self.process.wait()
        self.script.close()
        self.file.close()
        self.printed.close()
