"""Which transfer backend a class belongs to, and what its code can do, read from the code itself.

SGLang moves methods between classes from release to release (facts: `poll` lives in nixl.conn up to 0.5.22, in common.conn
from 0.5.23); so nothing here asks for a version.
"""

import sys
import types

from .importing import PREFIX

NIXL, FAKE, MOONCAKE, MORI, ASCEND, OTHER = 1, 2, 3, 4, 5, 0
NUMBERS = {"nixl": NIXL, "fake": FAKE, "mooncake": MOONCAKE, "mori": MORI, "ascend": ASCEND}
NAMES = {number: name for name, number in NUMBERS.items()}

PROVED = {
    NIXL: None,
    FAKE: None,
    MOONCAKE: frozenset(["0.5.10", "0.5.12.post1", "0.5.15", "0.5.18", "0.5.22", "0.5.23"]),
}
"""Backends on which failing a sender was run against SGLang's released code and the real engine, with the count of its
chunks, and the releases on which that counts; None: on all. Everything over TCP on one host; over RDMA the engines were run
without SGLang (tests/vm/guest/transfers.py). The agent has the same list (`remedy::guard::PROVED`; agent/tests/hook.rs compares
them).

NIXL and fake were run on the six releases that Mooncake has here; on the others it counts because what differs from release to
release (queues, flags) is read from the code, and each of NIXL's chunks is proved over by its own handles. Mooncake's are
proved over by what a call of the engine returns, which is a fact of each release.
mori and ascend were run on a stand-in for their engine, which proves no more than that the marks come."""

SETTLED_ON = {number: PROVED[number] for number in (NIXL, MOONCAKE)}
"""Releases of SGLang on which a chunk that ended without an error was proved to leave no write behind; None: on all.

NIXL's worker waits for each handle that it posted. Mooncake's worker stands in `batch_transfer_sync` until the engine calls
the batch complete (0), or until it fails or its time is up (not 0: the batch goes on, and SGLang says so itself in 0.5.22,
`_poison_unsettled_send`). Proved over TCP with mooncake-transfer-engine 0.3.13: pages overwritten the moment the call had
returned 0 never reached the decode, pages overwritten after -1 did (agent/tests/sglang_mooncake.rs). On a release that is
not listed each chunk that posted something leaves its room `abandoned handles`; that test, run on it, is what would prove it.
mori hands a chunk that takes too long to another thread (`_drain_worker`), so its worker's next `get` proves nothing; what
would is its engine's statuses, all terminal, asked when the room is looked at. ascend's engine was never run."""

ENGINES = {
    NIXL: ("nixl",),
    MOONCAKE: tuple("mooncake-transfer-engine" + kind for kind in (
        "", "-cuda13", "-non-cuda", "-rocm", "-efa", "-efa-cuda13", "-efa-non-cuda", "-npu", "-musa")),
    MORI: ("amd-mori", "mori"),
    ASCEND: ("memfabric-hybrid",),
}  # fmt: skip
"""The distributions that bring the backend's native library; the first that is installed counts."""

SEND_FAILED, CONCLUDE_STATE, MARKING_POLL = 1, 2, 3
FLAG_NAMES = {SEND_FAILED: "send_failed", CONCLUDE_STATE: "conclude_state", MARKING_POLL: "marking_poll"}


def of(cls):
    """The backend's number, from the module of the most derived class that says one."""
    for base in cls.__mro__:
        module = base.__module__ or ""
        if module.startswith(PREFIX):
            number = NUMBERS.get(module[len(PREFIX):].split(".", 1)[0])
            if number is not None:
                return number
    return OTHER


def proved(number):
    """Whether a sender of this backend may be failed, on this release."""
    return covers(PROVED, number)


def settles(number):
    """Whether a chunk of this backend that ended without an error is known to have ended its writes, on this release."""
    return covers(SETTLED_ON, number)


def covers(releases, number):
    return number in releases and (releases[number] is None or release() in releases[number])


def release():
    """SGLang's version, or None."""
    for name in ("sglang", "sglang.version"):
        version = getattr(sys.modules.get(name), "__version__", None)
        if isinstance(version, str):
            return version
    try:
        from sglang.version import __version__

        return __version__ if isinstance(__version__, str) else None
    except Exception:
        return distribution("sglang")


def distribution(name):
    """The version of an installed distribution, or None."""
    try:
        from importlib import metadata

        return metadata.version(name)
    except Exception:
        return None


def names_in(cls, method, operation="LOAD_"):
    """Names that the code of a method reads (or, with "STORE_ATTR", assigns), and the methods of its own that it calls."""
    import dis  # needed when an agent asks, not before

    found, seen, waiting = set(), set(), [method]
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        for base in cls.__mro__:
            function = base.__dict__.get(name)
            while hasattr(function, "__wrapped__"):
                function = function.__wrapped__
            if isinstance(function, types.FunctionType):
                code = list(dis.get_instructions(function))
                found.update(step.argval for step in code if step.opname.startswith(operation))
                names = function.__code__.co_names
                waiting.extend(n for n in names if isinstance(getattr(cls, n, None), types.FunctionType))
                if "super" not in names and "__init__" not in names:
                    break  # otherwise the next class's method runs too
    return found


def flag_for(cls, attributes):
    """What makes `poll` of this sender return Failed: `_send_failed` (NIXL 0.5.12–0.5.22), `conclude_state` (NIXL 0.5.23,
    fake since 0.5.13, mooncake, mori), else a `poll` of ours on the instance. A flag that `poll` does not read would
    be a silent no-op: NIXL's `conclude_state` before 0.5.23 is one."""
    read = names_in(cls, "poll")
    if "_send_failed" in read and {"_send_failed", "_send_error"} <= set(attributes):
        return SEND_FAILED
    if "conclude_state" in read and "conclude_state" in attributes:
        return CONCLUDE_STATE
    return MARKING_POLL


def flag_of_class(cls):
    """The same before there is a sender: its attributes are those that `__init__` assigns."""
    return flag_for(cls, names_in(cls, "__init__", "STORE_ATTR"))


def class_beside(manager, kind):
    """The class of that kind ("KVSender", "KVReceiver") that stands beside a manager's class in its module, or None."""
    module = sys.modules.get(type(manager).__module__)
    name = type(manager).__name__.replace("KVManager", kind)
    cls = getattr(module, name, None)
    return cls if isinstance(cls, type) else None
