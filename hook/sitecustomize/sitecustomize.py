"""Starts the hook in SGLang 0.5.10 and older, which has no plugins: PYTHONPATH=hook:hook/sitecustomize.

It puts a finder in front that waits for SGLang's modules, and hands over to the sitecustomize that this one hides (Debian
and Ubuntu ship one). A Python program that is not SGLang pays one set lookup per import.
"""

import os
import sys


def _next_one():
    """The sitecustomize that Python would have found without ours."""
    from importlib.machinery import PathFinder

    here = os.path.dirname(os.path.realpath(__file__))
    path = [entry for entry in sys.path if os.path.realpath(entry or os.getcwd()) != here]
    spec = PathFinder.find_spec("sitecustomize", path)
    return spec if spec is not None and spec.has_location and spec.loader is not None else None


def _hand_over():
    from importlib.util import module_from_spec

    spec = _next_one()
    if spec is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)  # its errors are its own: Python reports them as without us


try:
    from dislodge_hook import importing

    importing.watch()
except Exception:  # never in the way of somebody's Python
    pass

_hand_over()
