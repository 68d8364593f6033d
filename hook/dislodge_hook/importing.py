"""Patches a module right after the server has imported it, or now if it has.

The finder is all that runs in a program that is not SGLang: one set lookup per import. Everything else of the hook is
imported when the first watched module is.
"""

import sys

PREFIX = "sglang.srt.disaggregation."
BACKENDS = ("nixl", "fake", "mooncake", "mori", "ascend")

WATCHED = frozenset(
    [PREFIX + "common.utils", PREFIX + "common.conn", PREFIX + "prefill", PREFIX + "decode"]
    + ["sglang.srt.managers.scheduler", "sglang.srt.managers.scheduler_pp_mixin"]
    + [f"{PREFIX}{backend}.conn" for backend in BACKENDS]
)


class PostImport:
    """A finder that finds nothing: it lets the others find a watched module and adds the patch to its loader."""

    def __init__(self):
        self._finding = set()

    def find_spec(self, fullname, path=None, target=None):
        if fullname not in WATCHED or fullname in self._finding:
            return None
        self._finding.add(fullname)
        try:
            spec = self._found_by_others(fullname, path, target)
            if spec is not None:
                _patch_after(spec.loader)
            return spec
        except Exception:
            return None  # the others are asked again by the import system, and raise what they have to
        finally:
            self._finding.discard(fullname)

    def _found_by_others(self, fullname, path, target):
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            if finder is self or find is None:
                continue
            spec = find(fullname, path, target)
            if spec is not None:
                return spec
        return None


def _patch_after(loader):
    """Shadows the loader's `exec_module` for one call. The loader itself stays: `module.__loader__` is what it was."""
    original = loader.exec_module

    def exec_module(module):
        try:
            del loader.exec_module
        except Exception:
            pass
        original(module)
        patch(module)

    try:
        loader.exec_module = exec_module
    except Exception:
        pass  # a loader without attributes of its own: this module stays as it is


def patch(module):
    """Applies what the hook has for this module. Never raises."""
    try:
        from . import patching, process
    except Exception:
        return
    try:
        if process.claim():
            patching.apply(module)
    except Exception as error:
        process.fault("patch", error)


def watch():
    """Patches the watched modules that are there, and each other one when it is imported."""
    if not any(type(finder).__name__ == "PostImport" and type(finder).__module__ == __name__ for finder in sys.meta_path):
        sys.meta_path.insert(0, PostImport())
    for name in sorted(WATCHED & set(sys.modules)):
        patch(sys.modules[name])
