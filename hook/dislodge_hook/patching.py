"""What is patched in which of SGLang's modules. By capability: a class that defines a method itself gets it wrapped,
wherever the release has put it."""

import sys

from . import chunks, importing, scheduler, signature, wrappers


def apply(module):
    """Patches one watched module."""
    name = module.__name__
    if name == importing.PREFIX + "common.utils":
        patch_queue(getattr(module, "FastQueue", None))
    elif name in (importing.PREFIX + "prefill", importing.PREFIX + "decode", "sglang.srt.managers.scheduler_pp_mixin"):
        for cls in classes_of(module):
            scheduler.wrap_pass(cls)
    elif name == "sglang.srt.managers.scheduler":
        for cls in classes_of(module):
            scheduler.wrap_pause(cls)
    else:
        utils = sys.modules.get(importing.PREFIX + "common.utils")  # there before a class that uses its queue
        if utils is not None:
            patch_queue(getattr(utils, "FastQueue", None))
        patch_backend(module)


def classes_of(module):
    """Classes that the module defines itself."""
    return [c for c in list(vars(module).values()) if isinstance(c, type) and c.__module__ == module.__name__]


def patch_backend(module):
    for cls in classes_of(module):
        if cls.__name__.endswith("KVSender"):
            wrap_each(cls, wrappers.wrap_sender)
        elif cls.__name__.endswith("KVReceiver"):
            wrap_each(cls, wrappers.wrap_receiver)
        elif cls.__name__.endswith("KVManager"):
            wrap_each(cls, wrappers.wrap_manager)


def wrap_each(cls, wrap):
    """SGLang's classes that this one is made of, mixins and bases included. One without instance attributes is left
    alone: there is no place for its record."""
    if not any("__dict__" in base.__dict__ for base in cls.__mro__):
        return
    for base in cls.__mro__:
        if (base.__module__ or "").startswith(importing.PREFIX):
            wrap(base)


def patch_queue(cls):
    """`get` and `put` first: a queue is called watched only when every chunk of it is counted."""
    if cls is None or chunks.STATE in cls.__dict__:
        return
    setattr(cls, chunks.STATE, None)
    once = wrappers.wrap_in
    picks = (("self",), ("item",))
    once(cls, "get", lambda f: signature.wrap(f, chunks.before_get, chunks.after_get, picks[:1]))
    once(cls, "put", lambda f: signature.wrap(f, chunks.before_put, chunks.after_put, picks))
    once(cls, "__init__", lambda f: signature.wrap(f, lambda queue: queue, lambda queue, _: chunks.queue_made(queue), picks[:1]))

