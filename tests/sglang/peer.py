"""The prefill server's handle on a decode process."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path


class DecodePeer:
    """Started when it is first asked for something, and again after it was killed."""

    def __init__(self, folder: Path, bootstrap_port: int, backend: str, program="decode.py"):
        program = Path(__file__).with_name(program)
        self.command = [sys.executable, str(program), str(folder), str(bootstrap_port), backend]
        self.process, self.stopped, self.results, self.looks = None, False, {}, {}
        self.queues = None

    def expect(self, room: int, pages: int, *words: str):
        """Called on the scheduler's thread: the child dies with the thread that started it."""
        self.start()
        self.tell(" ".join([str(room), str(pages), *words]))

    def start(self):
        if self.process is None or self.process.poll() is not None:
            self.process = subprocess.Popen(self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                            env=os.environ | {"SERVER_PID": str(os.getpid())})
            threading.Thread(target=self._read, args=(self.process.stdout,), daemon=True).start()

    def tell(self, line: str):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def _read(self, stdout):
        for line in stdout:
            if line.startswith("{"):
                result = json.loads(line)
                if "queues" in result:
                    self.queues = result["queues"]
                    continue
                answers = self.looks if "pages" in result else self.results
                answers[result["room"]] = result

    @property
    def pid(self):
        return self.process.pid if self.process else None

    def stop(self):
        self._signal(signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)
        self.stopped = True

    def go_on(self):
        self._signal(signal.SIGCONT)
        self.stopped = False

    def kill(self):
        self._signal(signal.SIGKILL)
        self.process.wait()
        self.stopped = False

    def _signal(self, number):
        if self.process is None or self.process.poll() is not None:
            raise RuntimeError("there is no decode process yet")
        self.process.send_signal(number)
