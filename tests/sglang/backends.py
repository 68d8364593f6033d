"""The transfer backends that the test-bed runs, and what each needs before and after the release is imported.

`nixl` and `mooncake` are the real engines, over TCP on the loopback interface. `mori` and `ascend` run the release's own Python
code on a stand-in for the engine (`engine_stand_in.py`): mori's wants ROCm, ascend's an Ascend driver.
"""

import ctypes
import importlib
import os

import stand_ins

NAMES = ("nixl", "mooncake", "mori", "ascend")

def slot_pages(name: str) -> int:
    """Pages of a large request in each of its buffers, of 32 KiB: what a connection's TCP buffers on both sides can't hold (about
    10 MiB). NIXL writes all buffers over one connection, Mooncake each over its own."""
    return 1024 if name == "mooncake" else 256


def before_torch(name: str):
    """The engine's own modules: NIXL looks at the real torch, if there is one."""
    if name == "nixl":
        os.environ.setdefault("UCX_TLS", "tcp,self")  # through shared memory a write ends although its peer is stopped
        os.environ.setdefault("UCX_NET_DEVICES", "lo")
        import nixl._api as nixl_api

        original = nixl_api.nixl_agent.__init__

        def host_memory_as_vram(agent, *args, **kwargs):
            """Some releases register their KV pool as VRAM whatever it is."""
            original(agent, *args, **kwargs)
            agent.nixl_mems["VRAM"] = agent.nixl_mems["DRAM"]

        nixl_api.nixl_agent.__init__ = host_memory_as_vram
    elif name == "mooncake":
        os.environ["MC_FORCE_TCP"] = "1"
        os.environ.setdefault("MOONCAKE_PROTOCOL", "tcp")  # 0.5.12 and later read it
        os.environ.setdefault("MC_LOG_LEVEL", "WARNING")
        import mooncake.engine  # noqa: F401  (fails here, with the missing library's name, rather than in a worker)
    else:
        # mori's aux data would go by a message of its own, which may come after the one that says Success.
        os.environ.setdefault("SGLANG_MORI_SEND_AUX_RDMA", "1")
        import engine_stand_in

        engine_stand_in.install(name)


def after_import(name: str):
    """What the server does once, before it makes its manager: the engine that Mooncake's managers share (the model runner's
    `init_mooncake_transfer_engine`)."""
    if name == "mooncake":
        importlib.import_module(stand_ins.MOONCAKE_ENGINE).init_mooncake_transfer_engine("127.0.0.1", 0, None)


def backend(name: str):
    """SGLang's own name of the backend."""
    from sglang.srt.disaggregation.utils import TransferBackend

    return TransferBackend(name)


def kv_class(name: str, kind: str):
    """The release's class of this backend: MANAGER, SENDER, RECEIVER or BOOTSTRAP_SERVER."""
    from sglang.srt.disaggregation.utils import KVClassType, get_kv_class

    return get_kv_class(backend(name), KVClassType[kind])


def transfer_queues(manager):
    """The queues between the scheduler and the transfer workers; none where `send` posts by itself (NIXL until 0.5.11)."""
    return getattr(manager, "transfer_queues", None) or getattr(manager, "_transfer_queues", None) or ()


def overwrite_what_was_sent(manager, value: int) -> str:
    """From now on each page is overwritten at the moment at which Mooncake's call returns that was to write it: whatever of it
    reaches the decode after that shows there. Returns the call's name."""
    engine = manager.engine
    original = engine.batch_transfer_sync

    def batch_transfer_sync(session_id, buffers, peer_buffer_addresses, lengths):
        status = original(session_id, buffers, peer_buffer_addresses, lengths)
        for buffer, length in zip(buffers, lengths):
            ctypes.memset(buffer, value, length)
        return status

    engine.batch_transfer_sync = batch_transfer_sync
    return original.__qualname__
