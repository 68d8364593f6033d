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

PROVED = frozenset([NIXL, FAKE])
"""Backends on which failing a sender was run against the released code, with the count of its chunks."""

ENGINES = {NIXL: "nixl", MOONCAKE: "mooncake-transfer-engine", MORI: "mori", ASCEND: "memfabric-hybrid"}
"""The distribution that brings the backend's native library."""

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


def sender_class(manager):
    """The sender class that stands beside a manager's class in its module, or None."""
    module = sys.modules.get(type(manager).__module__)
    name = type(manager).__name__.replace("KVManager", "KVSender")
    cls = getattr(module, name, None)
    return cls if isinstance(cls, type) else None
