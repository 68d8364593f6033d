"""What layouts.py reads in a library's file: where a symbol is, its bytes, and its instructions as objdump prints them."""

import functools
import re
import subprocess
from pathlib import Path


class Library:
    """A shared library on disk. `symbol`: mangled name -> (address, size), of .dynsym and, where there is one, .symtab."""

    def __init__(self, path):
        self.path = Path(path)
        self.content = self.path.read_bytes()

    @functools.cached_property
    def symbols(self):
        found = {}
        for which in (["-D"], []):
            listed = output("nm", *which, "--defined-only", "-S", str(self.path), check=False)
            for line in listed.splitlines():
                parts = line.split()
                if len(parts) == 4 and parts[2] in "TtWi":
                    found.setdefault(parts[3].partition("@")[0], (int(parts[0], 16), int(parts[1], 16)))
        return found

    @functools.cached_property
    def segments(self):
        """(address, size in the file, offset in the file) of each PT_LOAD."""
        lines = re.findall(r"LOAD +(0x\w+) (0x\w+) 0x\w+ (0x\w+)", output("readelf", "-lW", str(self.path)))
        return [(int(address, 16), int(size, 16), int(offset, 16)) for offset, address, size in lines]

    def matching(self, name):
        """The symbol of that name, or, ending in `*`, the first that begins so; None when there is none."""
        if not name.endswith("*"):
            return name if name in self.symbols else None
        return min((one for one in self.symbols if one.startswith(name[:-1]) and ".cold" not in one), default=None)

    def bytes_at(self, symbol, count):
        address, _ = self.symbols[symbol]
        for begin, size, offset in self.segments:
            if begin <= address < begin + size:
                at = address - begin + offset
                return self.content[at:at + count]
        return b""

    def code(self, symbol):
        """Its instructions, one string each, without addresses."""
        begin, size = self.symbols[symbol]
        text = output("objdump", "-d", "--no-show-raw-insn", f"--start-address={begin:#x}", f"--stop-address={begin + size:#x}",
                      str(self.path))
        return [" ".join(line.split("\t", 1)[1].split()) for line in text.splitlines() if re.match(r" +[0-9a-f]+:\t", line)]


def prologue(code):
    """What the first instruction is to a uprobe: `push` (emulated: cheap), `endbr64` and what follows it, or its bytes."""
    if code[:4] == b"\xf3\x0f\x1e\xfa":
        return f"endbr64+{prologue(code[4:])}"
    if code[:1] and 0x50 <= code[0] <= 0x57 or code[:1] == b"\x41" and 0x50 <= code[1] <= 0x57:
        return "push"
    if code[:1] == b"\x90" or code[:2] == b"\x0f\x1f":
        return "nop"
    return f"other ({code[:4].hex()})"


def output(*command, check=True):
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=check).stdout
