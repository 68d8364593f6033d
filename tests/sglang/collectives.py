"""A stand-in for torch.distributed over gloo, between the processes of `ranks.py`: it really exchanges, over Unix sockets, and
really waits.

A rank that enters another collective than the others do, or with another length, hangs in it, and so do they: as NCCL would, for
as long as its time-out, an hour. (gloo raises in some of these cases.) A broadcast does not wait for those who receive it.
"""

import json
import logging
import os
import socket
import threading
import time
from dataclasses import asdict, dataclass

PATIENCE = 45.0  # seconds for the other processes to start
VARIABLE = "RANKS_PLACE"


@dataclass
class Place:
    """Which rank a process is, of how many; where the ranks meet; what they have to agree on before they do."""

    tp: int = 1
    tp_rank: int = 0
    pp: int = 1
    pp_rank: int = 0
    folder: str = ""
    bootstrap_port: int = 0
    first_room: int = 0

    @classmethod
    def of_this_process(cls):
        """A process that nobody gave a place is alone."""
        return cls(**json.loads(os.environ.get(VARIABLE, "{}")))

    def variables(self):
        return {VARIABLE: json.dumps(asdict(self))}

    def title(self):
        """As SGLang titles a scheduler's process."""
        stage = f"_PP{self.pp_rank}" if self.pp > 1 else ""
        return f"sglang::scheduler{stage}_TP{self.tp_rank}"


class Group:
    """Some ranks; the first one collects and gives out."""

    def __init__(self, folder: str, name: str, rank: int, size: int):
        self.name, self.rank, self.size = name, rank, size
        self.peers = []
        if size > 1:
            path = f"{folder}/{name}"
            self.peers = accepted(path, size - 1) if rank == 0 else [connected(path)]

    def all_reduce_min(self, values: list) -> list:
        if self.size == 1:
            return values
        if self.rank:
            self.give(self.peers[0], "all_reduce", values)
            return self.take(self.peers[0], "all_reduce", len(values))
        theirs = [self.take(peer, "all_reduce", len(values)) for peer in self.peers]
        reduced = [min(those) for those in zip(values, *theirs)]
        for peer in self.peers:
            self.give(peer, "all_reduce", reduced)
        return reduced

    def broadcast(self, value):
        """The first rank's value."""
        for peer in self.peers if self.rank == 0 else ():
            self.give(peer, "broadcast", value)
        return self.take(self.peers[0], "broadcast") if self.rank else value

    def broadcast_object(self, value, src=0):
        """As GroupCoordinator has it."""
        return self.broadcast(value)

    def give(self, peer, kind, value):
        peer.write(json.dumps([kind, value]) + "\n")
        peer.flush()

    def take(self, peer, kind, length=None):
        line = peer.readline()
        if not line:
            raise RuntimeError(f"a rank of the group {self.name} is gone")
        their_kind, value = json.loads(line)
        if their_kind != kind or length is not None and len(value) != length:
            logging.error("the ranks of the group %s are out of step: %s of %s here, %s there; hanging", self.name, kind, length, line.strip())
            threading.Event().wait()
        return value


class Channel:
    """From one rank to another, as `point_to_point_pyobj` sends."""

    def __init__(self, folder: str, name: str, sends: bool):
        path = f"{folder}/{name}"
        self.peer = connected(path) if sends else accepted(path, 1)[0]

    def send(self, value):
        self.peer.write(json.dumps(value) + "\n")
        self.peer.flush()

    def receive(self):
        line = self.peer.readline()
        if not line:
            raise RuntimeError("the stage before is gone")
        return json.loads(line)


def accepted(path: str, count: int):
    listener = socket.socket(socket.AF_UNIX)
    listener.settimeout(PATIENCE)
    listener.bind(path + ".new")
    listener.listen()
    os.rename(path + ".new", path)  # who sees it can connect
    peers = [listener.accept()[0] for _ in range(count)]
    for peer in peers:
        peer.settimeout(None)
    return [peer.makefile("rw") for peer in peers]


def connected(path: str):
    deadline = time.monotonic() + PATIENCE
    while not os.path.exists(path):
        if time.monotonic() > deadline:
            raise TimeoutError(f"waiting for {path}")
        time.sleep(0.01)
    peer = socket.socket(socket.AF_UNIX)
    peer.connect(path)
    return peer.makefile("rw")


def all_reduce(tensor, op=None, group=None):
    """torch.distributed's; SGLang reduces polls with MIN alone."""
    if group is not None:
        tensor[:] = group.all_reduce_min(list(tensor))


def get_world_size(group=None):
    return 1 if group is None else group.size
