"""Stand-ins for mori's `IOEngine` and memfabric_hybrid's `TransferEngine`, which need ROCm, and an Ascend driver.

They have the names and signatures that SGLang's mori and ascend code uses, and move the bytes themselves, with
`process_vm_writev` into the decode's memory: what the decode then holds is right or wrong as with a real engine. How the real
ones time, fail and order their writes is not shown by them. `MODE` says what becomes of a write.
"""

import ctypes
import enum
import json
import os
import time
from types import SimpleNamespace

import stand_ins

MODE = SimpleNamespace(name="works")
"""`works`; `fails`: nothing is written and that is said; `hangs`: nothing is written until the mode changes."""

PROBE = 0.01  # seconds between two looks at a mode that has to change


class Iovec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.process_vm_writev.restype = ctypes.c_ssize_t


def write(pid: int, local: int, remote: int, length: int) -> bool:
    """Copies our memory into another process's."""
    here, there = Iovec(local, length), Iovec(remote, length)
    count = ctypes.c_ulong(1)
    return LIBC.process_vm_writev(pid, ctypes.byref(here), count, ctypes.byref(there), count, ctypes.c_ulong(0)) == length


def install(name: str):
    """Puts the engine's modules where SGLang's code of this backend imports them from."""
    if name == "mori":
        stand_ins.package("mori")
        stand_ins.module("mori.cpp", TransferStatus=TransferStatus)
        stand_ins.module(
            "mori.io", BackendType=SimpleNamespace(RDMA="rdma"), EngineDesc=EngineDesc, IOEngine=IOEngine,
            IOEngineConfig=SimpleNamespace, MemoryDesc=MemoryDesc, MemoryLocationType=SimpleNamespace(GPU=1, CPU=0),
            PollCqMode=enum.Enum("PollCqMode", ["POLLING"]), RdmaBackendConfig=lambda *_: None, StatusCode=StatusCode,
            set_log_level=lambda *_: None)
    else:
        stand_ins.module("memfabric_hybrid", TransferEngine=AscendEngine)


# memfabric_hybrid


class AscendEngine:
    """A session is "host:port"; the port stands for the process."""

    TransDataOpType = SimpleNamespace(SDMA=0, DEVICE_RDMA=1)

    def get_rpc_port(self):
        return os.getpid()

    def initialize(self, *_):
        return 0

    def batch_register_memory(self, pointers, lengths):
        return 0

    def batch_transfer_sync_write(self, session_id, buffers, peer_buffer_addresses, lengths):
        while MODE.name == "hangs":
            time.sleep(PROBE)
        pid = int(session_id.rsplit(":", 1)[1])
        if MODE.name == "fails":
            return -1
        return 0 if all(write(pid, *piece) for piece in zip(buffers, peer_buffer_addresses, lengths)) else -1


# mori


class StatusCode(enum.IntEnum):
    SUCCESS = 0
    INIT = 1
    IN_PROGRESS = 2
    ERR_RDMA_OP = 10


class Packed:
    """A description that goes to the peer and comes back equal."""

    def __init__(self, **fields):
        vars(self).update(fields)

    def pack(self):
        return json.dumps(vars(self)).encode()

    @classmethod
    def unpack(cls, data):
        return cls(**json.loads(data))


class EngineDesc(Packed):
    pass


class MemoryDesc(Packed):
    pass


class TransferStatus:
    """Ends when it is looked at, since nothing works in the background."""

    def __init__(self, pieces):
        self._pieces, self._code = pieces, StatusCode.IN_PROGRESS

    def Code(self):
        if self._code == StatusCode.IN_PROGRESS and MODE.name != "hangs":
            good = MODE.name == "works" and all(write(*piece) for piece in self._pieces)
            self._code = StatusCode.SUCCESS if good else StatusCode.ERR_RDMA_OP
        return self._code

    def InProgress(self):
        return self.Code() == StatusCode.IN_PROGRESS

    def Succeeded(self):
        return self.Code() == StatusCode.SUCCESS

    def Failed(self):
        return self.Code() == StatusCode.ERR_RDMA_OP

    def Message(self):
        return "the stand-in was told to fail"

    def Wait(self):
        while self.InProgress():
            time.sleep(PROBE)


class IOEngine:
    def __init__(self, key, config):
        self._key, self._last_uid = key, 0

    def create_backend(self, *_):
        pass

    def get_engine_desc(self):
        return EngineDesc(key=self._key, port=1, pid=os.getpid())

    def register_memory(self, pointer, length, device, location):
        return MemoryDesc(pid=os.getpid(), data=pointer, size=length)

    def register_remote_engine(self, description):
        pass

    def allocate_transfer_uid(self):
        self._last_uid += 1
        return self._last_uid

    def batch_write(self, local, local_offsets, remote, remote_offsets, sizes, uids):
        return [TransferStatus([(there.pid, here.data + a, there.data + b, size) for a, b, size in zip(*offsets)])
                for here, there, *offsets in zip(local, remote, local_offsets, remote_offsets, sizes)]

    def wait_all(self, statuses, timeout_ms=-1):
        end = time.monotonic() + timeout_ms / 1000 if timeout_ms >= 0 else float("inf")
        while any(status.InProgress() for status in statuses):
            if time.monotonic() > end:
                return StatusCode.IN_PROGRESS
            time.sleep(PROBE)
        return StatusCode.SUCCESS if all(status.Succeeded() for status in statuses) else StatusCode.ERR_RDMA_OP
