"""Calls functions of libraries with whatever numbers a test hands it, over `lines.py` of tests/native.

    engine_stand_in.py LIBRARY...

    call library function arguments     the library's place in the command line -> {"returned"}
    memory hex                          -> {"address"} of these bytes, kept until the program ends
"""

import ctypes
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tests/native"))

from lines import Lines  # noqa: E402


class Calls:
    def __init__(self, paths):
        self.libraries = [ctypes.CDLL(path) for path in paths]
        self.kept = []

    def do_call(self, library, function, arguments):
        return {"returned": self.libraries[library][function](*map(ctypes.c_uint64, arguments))}

    def do_memory(self, hex):
        self.kept.append(ctypes.create_string_buffer(bytes.fromhex(hex)))
        return {"address": ctypes.addressof(self.kept[-1])}


lines = Lines()
lines.commands = Calls(sys.argv[1:])
lines.say(ready=True, pid=os.getpid())
lines.serve()
