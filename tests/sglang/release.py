"""Loads one SGLang release's own disaggregation code, without torch or a GPU, and knows where releases differ."""

import inspect
import logging
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import backends
import stand_ins

PATIENCE = 45.0  # seconds that anything may take which needs the other process


def load(folder: Path, bootstrap_port: int, release_kv_cache, backend: str) -> SimpleNamespace:
    """Makes the release importable; returns its arguments and its parallel state, which the caller may look at later."""
    os.environ["SGLANG_HOST_IP"] = "127.0.0.1"
    logging.basicConfig(level=os.environ.get("LOG_LEVEL", "INFO"), stream=sys.stderr,
                        format="%(asctime)s %(levelname)s %(name)s %(message)s")
    server_args = SimpleNamespace(
        host="127.0.0.1", port=30000, disaggregation_bootstrap_port=bootstrap_port, disaggregation_transfer_backend=backend,
        disaggregation_mode="prefill", dist_init_addr=None, nnodes=1, tp_size=1, pp_size=1, dp_size=1, attn_cp_size=1,
        dcp_size=1, enable_dp_attention=False, kv_cache_dtype="auto", load_balance_method="follow_bootstrap_room",
        chunked_prefill_size=8192, page_size=1, enable_hisparse=False, enable_trace=False,
        enable_pd_role_switch=False, **stand_ins.DECODE_OPTIONS)
    parallel = one_rank()
    backends.before_torch(backend)
    stand_ins.install(folder, parallel, server_args, release_kv_cache)
    sys.path.append(str(folder))  # where importlib.metadata finds the release's version
    return SimpleNamespace(folder=folder, server_args=server_args, parallel=parallel, backend=backend)


def one_rank() -> SimpleNamespace:
    """The parallel state of a server that is a single process."""
    group = SimpleNamespace(rank_in_group=0, world_size=1, is_first_rank=True, is_last_rank=True,
                            broadcast_object=lambda value, src=0: value)
    sizes = {f"{name}_size": 1 for name in "tp pp dp attn_tp attn_cp attn_dcp attn_dp".split()}
    ranks = {f"{name}_rank": 0 for name in "tp pp dp attn_tp attn_cp attn_dcp attn_dp".split()}
    off = dict.fromkeys("enable_dsa_cache_layer_split enable_kv_cache_sharding enable_cp_tp_group_sharing "
                        "enable_dp_attention enable_prefill_context_parallel".split(), False)
    return SimpleNamespace(**sizes, **ranks, **off, num_dp_ranks=1, nnodes=1, dist_init_addr=None, pp_group=group,
                           world_group=group, load_balance_method="follow_bootstrap_room")


def private_stdout():
    """The stream for answers; what libraries print goes to stderr from now on."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def load_plugins():
    """As the scheduler's process does first of all; before 0.5.11 there was nothing to load."""
    try:
        from sglang.srt import plugins
    except ImportError:
        logging.info("this release has no plugins")
    else:
        plugins.load_plugins()


def make_sender(cls, manager, bootstrap_address: str, room: int):
    arguments = {"mgr": manager, "bootstrap_addr": bootstrap_address, "bootstrap_room": room}
    if "dest_tp_ranks" in inspect.signature(cls.__init__).parameters:  # until 0.5.21
        arguments |= {"dest_tp_ranks": [0], "pp_rank": 0}
    return cls(**arguments)


def should_send(sender, pages: int, last_chunk: bool = True) -> bool:
    """The scheduler's question before it sends a chunk: the sender's to answer since 0.5.11, before that its own."""
    return sender.should_send_kv_chunk(pages, last_chunk) if hasattr(sender, "should_send_kv_chunk") else pages > 0


def state_indices(folder: Path):
    """What `send` and `send_metadata` want for a model without state."""
    return [] if folder.name == "0.5.12.post1" else None


def until(condition, what: str):
    """Yields as long as the condition does not hold; for generators that go on once a pass."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waiting for {what}")
        yield


def pause(seconds: float):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield
