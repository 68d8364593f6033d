"""A prefill and a decode process on an unmodified transfer engine."""

import sys
import time

from processes import PATIENCE, Process
from rdma import DEVICES


class Pair:
    """A prefill and a decode process of an engine (`nixl` or `mooncake`), which know of each other and are not connected yet.

    This is where an agent comes in: `pair.prefill.pid` is the process to trace.
    """

    def __init__(self, engine, **further):
        self.engine = engine
        meeting = f"/run/{engine}-{time.monotonic_ns()}"
        self.decode, self.prefill = (
            Process(
                f"{engine} {role}",
                [sys.executable, f"/guest/{engine}_peer.py", role, meeting, DEVICES[role][0]],
                {**environment(engine, role), **further},
            )
            for role in ("decode", "prefill")
        )
        self.decode.expect(event="met")
        self.prefill.expect(event="met")

    def post(self, room, *overwrite):
        self.prefill.tell("post", room, *overwrite)
        self.prefill.expect(event="posted", room=room)

    def end(self, room, within=PATIENCE):
        """What the prefill process says of the transfer's end."""
        return self.prefill.expect(within, event="end", room=room)

    def is_in_progress(self, room, seconds=1.5):
        """Whether the transfer does not end within that time."""
        try:
            self.end(room, within=seconds)
        except TimeoutError:
            return True
        return False

    def has_arrived(self, room):
        self.decode.tell("verify", room)
        return self.decode.expect(event="verified", room=room)["good"]

    def transfer(self, room):
        """One whole transfer; returns its end and whether decode has the bytes."""
        self.post(room)
        return self.end(room), self.has_arrived(room)

    def __enter__(self):
        return self

    def __exit__(self, failure, *_):
        if failure:
            for process in (self.prefill, self.decode):
                print(f"{process.name}:", *process.log[-20:], *process.facts[-5:], sep="\n  ", flush=True)
        self.prefill.kill()
        self.decode.kill()


def environment(engine, role):
    """What an operator would set for these devices, and no more."""
    device, link, _ = DEVICES[role]
    shared = {"PYTHONPATH": "/guest:/opt/engines"}
    if engine == "mooncake":
        # The address's own GID; the first is the link-local one.
        return {**shared, "MC_GID_INDEX": "1"}
    libraries = "/usr/lib/x86_64-linux-gnu"
    return {
        **shared,
        "UCX_TLS": "rc_verbs,ud_verbs:aux,self",
        "UCX_NET_DEVICES": f"{device}:1",
        # Seven, the default, means no end of retries to soft-RoCE (Linux, rxe_comp.c), where a network card gives up.
        "UCX_RC_RETRY_COUNT": "3",
        # The wheel's own libibverbs looks for providers in a folder of the machine that built it.
        "LD_PRELOAD": f"{libraries}/libibverbs.so.1:{libraries}/libmlx5.so.1",
    }
