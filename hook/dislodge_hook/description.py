"""What the hook says about its server: versions, ranks, sizes of the groups whose polls are reduced together, time-outs.

Nothing is assumed: a value that this release does not give is left out, and `fail` refuses where it needs it.
"""

import platform
import sys

from . import VERSION, backend, quiescence


def manager_of(scheduler):
    """The KV manager, which the bootstrap queue holds (disaggregation/prefill.py, all releases), on a decode the prealloc queue
    (disaggregation/decode.py). Each role's queues are gone, or were never there, while the scheduler has the other."""
    for name in ("disagg_prefill_bootstrap_queue", "disagg_decode_prealloc_queue"):
        manager = getattr(getattr(scheduler, name, None), "kv_manager", None)
        if manager is not None:
            return manager
    return None


def senders_of(scheduler):
    """Every sender or receiver that the scheduler holds somewhere, between two steps of its loop."""
    for req in requests_of(scheduler):
        yield getattr(req, "disagg_kv_sender", None)
    for name in ("disagg_decode_prealloc_queue", "disagg_decode_transfer_queue"):
        for entry in getattr(getattr(scheduler, name, None), "queue", None) or ():
            yield getattr(entry, "kv_receiver", None)


def requests_of(scheduler):
    """Every request that a prefill scheduler holds somewhere."""
    yield from getattr(scheduler, "disagg_prefill_inflight_queue", None) or ()
    yield from getattr(getattr(scheduler, "disagg_prefill_bootstrap_queue", None), "queue", None) or ()
    yield from getattr(scheduler, "waiting_queue", None) or ()
    for name in ("cur_batch", "last_batch", "running_batch"):
        yield from getattr(getattr(scheduler, name, None), "reqs", None) or ()
    for item in list(getattr(scheduler, "result_queue", None) or ()):  # of the overlapped loop: (batch, result)
        yield from getattr(item[0], "reqs", None) or ()
    chunked = getattr(scheduler, "chunked_req", None)
    if chunked is not None:
        yield chunked


def hello(scheduler, epoch, late, role):
    """The detail of the `hello` mark."""
    manager = manager_of(scheduler)
    sends = role == "prefill"
    cls = backend.class_beside(manager, "KVSender" if sends else "KVReceiver")
    number = backend.of(type(manager)) if manager is not None else None

    return {
        "hook": VERSION,
        "epoch": epoch,
        "sglang": backend.release(),
        "engine": _engine(number),
        "python": platform.python_version(),
        "role": role,
        "backend": backend.NAMES.get(number),
        "sender": cls.__name__ if cls else None,
        "flag": backend.FLAG_NAMES[backend.flag_of_class(cls)] if cls and sends else None,
        "counts": quiescence.kind(manager, number) if manager is not None and sends else None,
        "late": late,
        **ranks(scheduler),
        "bootstrap_timeout": _number(getattr(manager, "bootstrap_timeout", None)),
        "waiting_timeout": _waiting_timeout(manager),
    }


def sizes(scheduler):
    """(tp, cp, pp), each None when no source knows it. `tp` and `cp` are the attention groups, whose polls are
    MIN-reduced: where data-parallel attention is on, the attention TP group is a part of TP."""
    sources = _sources(scheduler)
    tp = _largest(sources, ("attn_tp_size",)) or _largest(sources, ("tp_size",))
    return tp, _largest(sources, ("attn_cp_size",)), _largest(sources, ("pp_size",))


def ranks(scheduler):
    sources = _sources(scheduler)
    tp, cp, pp = sizes(scheduler)
    return {
        "tp": tp,
        "tp_rank": _first(sources, ("attn_tp_rank", "tp_rank")),
        "pp": pp,
        "pp_rank": _first(sources, ("pp_rank",)),
        "cp": cp,
        "dp": _largest(sources, ("attn_dp_size", "dp_size")),
        "dp_rank": _first(sources, ("attn_dp_rank", "dp_rank")),
    }


def _sources(scheduler):
    """Where releases keep sizes and ranks: on the manager (all), on the scheduler (to 0.5.1x), in `scheduler.ps`, in the
    runtime context (0.5.18 and later), in the server's arguments."""
    manager = manager_of(scheduler)
    found = [manager, scheduler, getattr(scheduler, "ps", None), _parallel()]
    found += [getattr(scheduler, "server_args", None), getattr(manager, "server_args", None)]
    return [source for source in found if source is not None]


def _parallel():
    context = sys.modules.get("sglang.srt.runtime_context")
    try:
        return context.get_parallel()
    except Exception:
        return None  # no such module in this release, or nothing in it yet


def _integers(sources, names, least):
    for name in names:
        for source in sources:
            value = getattr(source, name, None)
            if type(value) is int and value >= least:
                yield value


def _largest(sources, names):
    """Sources may lag behind each other; the largest refuses most."""
    return max(_integers(sources, names, 1), default=None)


def _first(sources, names):
    return next(_integers(sources, names, 0), None)


def _number(value):
    return value if type(value) in (int, float) else None


def _waiting_timeout(manager):
    """Decode's waiting time-out, which is this server's too when both are started alike (environ.py)."""
    own = _number(getattr(manager, "waiting_timeout", None))
    if own is not None:
        return own
    try:
        return _number(sys.modules["sglang.srt.environ"].envs.SGLANG_DISAGGREGATION_WAITING_TIMEOUT.get())
    except Exception:
        return None


def _engine(number):
    for name in backend.ENGINES.get(number, ()):
        version = backend.distribution(name)
        if version:
            return f"{name} {version}"
    return None
