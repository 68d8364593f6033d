"""Controls the stand-in for an RDMA device (stand_ins/verbs.c).

    fake_verbs.py STATE ok | stall | fail STATUS COUNT | delay MICROSECONDS | counters

STATE is the file that FAKE_VERBS_STATE names. It begins with four u32 of this machine's byte order: mode (0 carry out, 1 stall,
2 fail), ibv_wc_status, how many more to fail, delay in µs; then three u64: work requests posted, completed, failed.
"""

import struct
import sys
from pathlib import Path

MODES = {"ok": 0, "stall": 1, "fail": 2}
RETRY_EXCEEDED = 12  # IBV_WC_RETRY_EXC_ERR
HEAD = struct.Struct("=4I")
COUNTERS = struct.Struct("=3Q")


class Device:
    """The device that all processes with the same state file share."""

    def __init__(self, state):
        self.state = Path(state)
        self.state.touch(mode=0o600)

    def environment(self):
        return {"FAKE_VERBS_STATE": str(self.state)}

    def ok(self):
        """Work requests are carried out as they are polled; those that stalled, too."""
        self.control("ok")

    def stall(self):
        """No completion comes, no byte moves."""
        self.control("stall")

    def fail(self, status=RETRY_EXCEEDED, count=1):
        """The next `count` work requests complete with that ibv_wc_status, and their queue pairs are in error."""
        self.control("fail", status, count)

    def delay(self, microseconds):
        """Nothing is carried out before it was posted that long ago."""
        self.control("ok", delay=microseconds)

    def control(self, mode, status=0, count=0, delay=0):
        with open(self.state, "r+b", buffering=0) as file:
            file.write(HEAD.pack(MODES[mode], status, count, delay))

    def counters(self):
        """{"posted", "completed", "failed"}: work requests of all processes."""
        with open(self.state, "rb") as file:
            file.seek(HEAD.size)
            read = file.read(COUNTERS.size).ljust(COUNTERS.size, b"\0")
        return dict(zip(("posted", "completed", "failed"), COUNTERS.unpack(read)))


def main():
    state, command, *numbers = sys.argv[1:]
    answer = getattr(Device(state), command)(*map(int, numbers))
    if answer:
        print(answer)


if __name__ == "__main__":
    main()
