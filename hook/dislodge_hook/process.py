"""What is true of the whole process: whether this copy of the hook is the one that works, and what went wrong in it."""

import os
import sys

from . import VERSION

# One copy of the hook per process, whatever it was loaded by: a second one (plugin and sitecustomize, two versions on
# the path, attached live to a server that has the plugin) would wrap what is wrapped and count everything twice.
CLAIM = "_dislodge_hook"

ERROR_KINDS = 32  # an error's kind is its place and type; more kinds than this are counted together

HARMLESS = ("marker", "channel", "recv", "verb")
"""Places where a fault loses something for the agent, but nothing that the guards of a remedy look at."""

inert = False
"""True when this copy must do nothing: another one was first, or this process was forked from the server."""

errors = {}
"""How often our own code failed, by kind. `ping` reports it."""

_token = object()
_at_fork = []


def claim():
    """Whether this copy is the first in the process. Every other one is inert."""
    if sys.__dict__.setdefault(CLAIM, (VERSION, _token))[1] is not _token:
        retire()
    return not inert


def fault(place, error):
    """Counts an error of ours. Never raises."""
    try:
        kind = f"{place}:{type(error).__name__}"[:80]
        if kind not in errors and len(errors) >= ERROR_KINDS:
            kind = "other"
        errors[kind] = errors.get(kind, 0) + 1
    except Exception:
        pass


def observant():
    """Whether everything that the guards of a remedy look at was seen: one fault in what observes, and a chunk or a sender
    may be missing from the counts for good."""
    return all(kind.partition(":")[0] in HARMLESS for kind in errors)


def retire():
    """Ends the hook's work in this process; what is wrapped stays wrapped and passes everything through."""
    global inert
    inert = True


def after_fork(action):
    """Runs `action` in a child made by `fork`, which shares our file descriptors and may inherit a lock in use."""
    _at_fork.append(action)


def _in_child():
    retire()
    for action in _at_fork:
        try:
            action()
        except Exception as error:
            fault("fork", error)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
