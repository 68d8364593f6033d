"""Stand-ins for the modules that SGLang's disaggregation code imports and that need a GPU, torch or the whole server.

Packages become empty shells whose `__path__` leads into the release, so that everything below them which is light enough
(`disaggregation/`, `environ.py`, `plugins/`, `observability/req_time_stats.py`, …) is the release's own file; what is not
light is replaced here, module by module. The process is one rank of one, and says so through the same functions.
"""

import importlib
import logging
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import source

SHELLS = """
    sglang sglang.srt sglang.srt.utils sglang.srt.disaggregation sglang.srt.debug_utils sglang.srt.distributed
    sglang.srt.distributed.device_communicators
    sglang.srt.layers sglang.srt.configs sglang.srt.observability sglang.srt.mem_cache sglang.srt.managers
    sglang.srt.model_executor
""".split()

# Imported by the scheduler's side for names that a run without a model never uses.
UNUSED = """
    triton.language sglang.kernels.ops.memory.adler32 sglang.kernels.ops.memory.ptr_table
    sglang.srt.model_executor.forward_batch_info sglang.srt.observability.metrics_collector
    sglang.srt.observability.trace_async sglang.srt.mem_cache.memory_pool sglang.srt.mem_cache.swa_memory_pool
    sglang.srt.mem_cache.deepseek_v4_memory_pool sglang.srt.mem_cache.unified_radix_cache
    sglang.srt.debug_utils.cuda_coredump
""".split()

# The same of a decode's side.
DECODE_UNUSED = """
    sglang.utils sglang.srt.configs.mamba_utils sglang.srt.managers.utils sglang.srt.managers.schedule_policy
    sglang.srt.managers.scheduler_components.pool_stats_observer sglang.srt.mem_cache.allocation
    sglang.srt.mem_cache.allocation_sizing sglang.srt.mem_cache.allocator.swa sglang.srt.mem_cache.hicache_storage
    sglang.srt.mem_cache.kv_cache_builder sglang.srt.mem_cache.unified_cache.component_type
    sglang.srt.utils.torch_memory_saver_adapter
""".split()

MOONCAKE_ENGINE = "sglang.srt.distributed.device_communicators.mooncake_transfer_engine"  # the release's own


# A decode's options, as they are unless set.
DECODE_OPTIONS = dict(disaggregation_decode_enable_offload_kvcache=False, disaggregation_decode_enable_radix_cache=False,
                      disaggregation_decode_polling_interval=1, disaggregation_decode_host_receive_threshold=1)


class Anything:
    """Can be called, subscripted, made a base of a class and asked for any attribute; all of them give another one."""

    def __init__(self, *_, **__):
        pass

    def __call__(self, *_, **__):
        return Anything()

    def __getattr__(self, _):
        return Anything()

    def __class_getitem__(cls, _):
        return cls

    def __mro_entries__(self, _):
        return ()


def module(name, **attributes):
    """Puts a module into sys.modules, and on its parent."""
    made = ModuleType(name)
    vars(made).update(attributes)
    sys.modules[name] = made
    parent, _, child = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], child, made)
    return made


def package(name, path=()):
    made = module(name)
    made.__path__ = [str(entry) for entry in path]
    return made


def blank(name, **attributes):
    """A module that has every name it is asked for."""
    made = module(name, **attributes)

    def missing(wanted):
        if wanted.startswith("__"):
            raise AttributeError(wanted)
        return Anything()

    made.__getattr__ = missing
    return made


def install(release: Path, parallel, server_args, release_kv_cache):
    """Makes `sglang.srt.disaggregation` of this release importable.

    `parallel` answers for the parallel state, `server_args` for the arguments; `release_kv_cache(req, …)` is called where
    the server gives a request's KV pages back.
    """
    install_torch()
    for name in SHELLS:
        package(name, [release.joinpath(*name.split("."))])
    install_utils()
    install_parallel_state(parallel)
    install_runtime_context(parallel, server_args)
    module("sglang.srt.server_args", ServerArgs=type("ServerArgs", (), {}))
    module("sglang.srt.configs.model_config", get_dsa_index_topk=lambda *_: 0, get_dsa_mtp_topk_width=lambda *_: 0,
           is_deepseek_dsa=lambda *_: False)
    install_tracing()
    install_scheduler_side(release, release_kv_cache)
    logging.Logger.warning_once = logging.Logger.warning  # SGLang adds this method itself


def install_torch():
    class Tensor(list):
        def tolist(self):
            return list(self)

    torch = blank("torch", Tensor=Tensor, tensor=lambda data, **_: Tensor(data), dtype=object, uint8="uint8", int32="int32",
                  device=lambda *_, **__: None, Event=Anything, no_grad=lambda: lambda function: function,
                  version=SimpleNamespace(cuda=None), autograd=SimpleNamespace(_profiler_enabled=lambda: False),
                  get_device_module=lambda _: SimpleNamespace(set_device=lambda _: None))
    torch.__path__ = []
    # One rank: a reduction leaves its tensor as it is.
    module("torch.distributed", ProcessGroup=type("ProcessGroup", (), {}), Work=Anything,
           ReduceOp=SimpleNamespace(MIN="min", MAX="max"), get_world_size=lambda *_: 1,
           all_reduce=lambda *_, **__: None, broadcast_object_list=lambda *_, **__: None)
    blank("triton", jit=lambda function: function).__path__ = []


def install_utils():
    utils = sys.modules["sglang.srt.utils"]
    utils.get_bool_env_var = lambda *_, **__: False
    utils.is_npu = utils.is_hip = utils.is_cuda = lambda: False

    def missing(wanted):
        if wanted.startswith("__"):
            raise AttributeError(wanted)
        return lambda *_, **__: Anything()

    utils.__getattr__ = missing
    module("sglang.srt.utils.common", is_npu=lambda: False, ceil_align=lambda n, size: -(-n // size) * size,
           run_with_deadline=lambda function, timeout_s=None, what=None: function())


def install_parallel_state(parallel):
    distributed = sys.modules["sglang.srt.distributed"]
    distributed.get_pp_group = distributed.get_world_group = lambda: parallel.pp_group
    module("sglang.srt.distributed.parallel_state", GroupCoordinator=type("GroupCoordinator", (), {}),
           get_mooncake_transfer_engine=lambda: importlib.import_module(MOONCAKE_ENGINE).get_mooncake_transfer_engine())
    module("sglang.srt.distributed.communication_tags", P2PTag=Anything())
    attention = {f"get_attention_{group}_{what}": lambda name=f"attn_{group}_{what}": getattr(parallel, name)
                 for group in ("tp", "cp", "dp") for what in ("size", "rank")}
    module("sglang.srt.layers.dp_attention", is_dp_attention_enabled=lambda: False, **attention)
    module("sglang.srt.mem_cache.page_interleave", get_kv_shard_group=lambda *_: parallel.pp_group)


def install_runtime_context(parallel, server_args):
    disagg = SimpleNamespace(**DECODE_OPTIONS, disaggregation_bootstrap_port=server_args.disaggregation_bootstrap_port,
                             disaggregation_decode_allocation_policy="early",
                             disaggregation_transfer_backend=server_args.disaggregation_transfer_backend)
    off = SimpleNamespace(enable_unified_memory=False, speculative_algorithm=None, speculative_num_draft_tokens=0)
    context = module(
        "sglang.srt.runtime_context", get_parallel=lambda: parallel, get_disagg=lambda: disagg,
        get_serving=lambda: SimpleNamespace(host=server_args.host, port=server_args.port),
        get_schedule=lambda: SimpleNamespace(chunked_prefill_size=8192, max_prefill_tokens=16384),
        get_device=lambda: SimpleNamespace(device="cpu", gpu_id=0),
        get_observability=lambda: SimpleNamespace(enable_trace=False), linear_attn_tp_size=lambda: 1,
        max_prefill_buffer_tokens=lambda: 16384,
        **{name: lambda: off for name in ("get_memory", "get_spec", "get_model")})
    context.__getattr__ = lambda _: lambda *_, **__: Anything()


def install_tracing():
    class NoTrace:
        tracing_enable = False

        def __getattr__(self, _):
            return lambda *_, **__: self

    blank("sglang.srt.observability.trace", TraceNullContext=NoTrace, TraceReqContext=NoTrace)


def install_scheduler_side(release, release_kv_cache):
    """What `disaggregation/prefill.py` imports beyond the transfer code."""
    for name in ("sglang.kernels", "sglang.kernels.ops", "sglang.kernels.ops.memory"):
        package(name)
    for name in UNUSED:
        blank(name)
    blank("sglang.srt.mem_cache.common", release_kv_cache=release_kv_cache,
          kv_to_page_num=lambda tokens, page_size: -(-tokens // page_size))
    blank("sglang.srt.mem_cache.base_prefix_cache",
          CacheRequestOutcome=SimpleNamespace(SUCCESS="success", ABORT="abort"))
    batch = "sglang.srt.managers.schedule_batch"
    reasons = source.classes(source.file_of(release, batch), batch, "BaseFinishReason", "FINISH_LENGTH", "FINISH_ABORT")
    blank(batch, **reasons)


def install_decode_side():
    """What `disaggregation/decode.py` imports beyond that."""
    for name in ("sglang.srt.mem_cache.allocator", "sglang.srt.mem_cache.unified_cache", "sglang.srt.managers.scheduler_components"):
        if name not in sys.modules:
            blank(name).__path__ = []
    for name in DECODE_UNUSED:
        if name not in sys.modules:
            blank(name)
    sys.modules["sglang.srt.utils.common"].async_h2d = lambda *_, **__: Anything()
