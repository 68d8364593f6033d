"""Checks and prints what LAYOUTS.md says, as tables: of the wheels' code, and of the engines while they run.

    layouts.py --into DIR [--only SECTION]... [ENGINE==VERSION...]

DIR and the engines are prepare.py's, which is run first. The sections of the code need objdump, nm and readelf: `prologues`,
`status`, `batch`. Those of running engines need bpftrace and root: `calls`, `life`, `flush`,
`ends`, `late`, `free`.
"""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

import ends
import lives
from elf import Library, prologue
from symbols import FILES, FREE, PROBES, RELEASE


def main():
    parser = argparse.ArgumentParser(description="Prints the tables of LAYOUTS.md.")
    parser.add_argument("--into", type=Path, required=True, metavar="DIR")
    parser.add_argument("--only", action="append", choices=SECTIONS, metavar="SECTION")
    parser.add_argument("engines", nargs="*", metavar="ENGINE==VERSION")
    options = parser.parse_args()
    prepare = Path(__file__).with_name("prepare.py")
    made = subprocess.run([sys.executable, str(prepare), "--into", str(options.into), *options.engines],
                          stdout=subprocess.PIPE, check=True)
    made = json.loads(made.stdout.splitlines()[-1])
    beds = [lives.Bed(name, made["python"], bed["environment"], Path(bed["folder"])) for name, bed in made["engines"].items()]
    for section in options.only or SECTIONS:
        engine, table = SECTIONS[section]
        for one in ("nixl", "mooncake") if engine is None else (engine,):
            chosen = [bed for bed in beds if bed.engine == one]
            if chosen:
                print(f"\n### {section}: {one}\n", flush=True)
                table(chosen)
    return 0


def libraries(bed):
    """library -> its file in the wheel; those that it has."""
    found = {}
    for name, patterns in FILES.items():
        paths = [path for pattern in patterns for path in sorted(bed.folder.glob(pattern))]
        if paths:
            found[name] = Library(paths[0])
    return found


def rows(header, lines):
    print("| " + " | ".join(header) + " |")
    print("|" + "---|" * len(header))
    for line in lines:
        print("| " + " | ".join(map(str, line)) + " |", flush=True)


def prologues(beds):
    """The first instruction of each function that a probe can be on."""
    files = {bed: libraries(bed) for bed in beds}

    def first(bed, library, name):
        library = files[bed].get(library)
        symbol = library and library.matching(name)
        return prologue(library.bytes_at(symbol, 16)) if symbol else "-"

    rows(["library", "function", *(bed.version for bed in beds)],
         ([library, role, *(first(bed, library, name) for bed in beds)] for library, role, name in PROBES[beds[0].engine]))


def status_offset(code):
    """Where `status` is in nixlXferReqH: releaseXferReq compares it with NIXL_IN_PROG (1), and nothing else so."""
    found = {match[1] for line in code if (match := re.match(r"cmpl \$0x1,(0x[0-9a-f]+)\(%r\w+\)", line))}
    return int(found.pop(), 16) if len(found) == 1 else None


def status(beds):
    def line(bed):
        code = libraries(bed)["libnixl"].code(RELEASE)
        return [bed.version, status_offset(code), sum("cmpl $0x1," in one for one in code), len(code)]

    rows(["NIXL", "offset of `status`", "`cmpl $0x1, off(reg)` in releaseXferReq", "its instructions"], map(line, beds))


def batch_layout(code):
    """What freeBatchID says of BatchDesc and TransferTask: its loop is `for task in task_list: if !task.is_finished return`.
    {"begin", "end": offsets of task_list's ends, "stride": sizeof(TransferTask), "finished": offset of is_finished}."""
    loads = [match for line in code if (match := re.match(r"mov (0x[0-9a-f]+)\(%rdx\),", line))]
    checks = [at for at, line in enumerate(code) if re.match(r"movzbl 0x[0-9a-f]+\(%r\w+\),%e", line)]
    if len(loads) < 2 or not checks:
        return None
    check = re.match(r"movzbl (0x[0-9a-f]+)\((%r\w+)\)", code[checks[0]])
    step = next((match for line in code[max(0, checks[0] - 6):checks[0]]
                 if (match := re.match(rf"add \$(0x[0-9a-f]+),{check[2]}$", line))), None)
    if step is None:
        return None
    ends = sorted({int(match[1], 16) for match in loads[:2]})
    return {"begin": ends[0], "end": ends[-1], "stride": int(step[1], 16), "finished": int(check[1], 16)}


def batch(beds):
    def line(bed):
        found = batch_layout(libraries(bed)["engine"].code(FREE)) or {}
        return [bed.version, *(found.get(key, "?") for key in ("begin", "end", "stride", "finished"))]

    rows(["Mooncake", "task_list begin", "end", "sizeof(TransferTask)", "is_finished"], map(line, beds))


def calls(beds):
    for bed in beds:
        rows([f"NIXL {bed.version}: call", "what the probe read", "right"], lives.calls(bed, libraries(bed)))


def life(beds):
    for bed in beds:
        offset = status_offset(libraries(bed)["libnixl"].code(RELEASE))
        rows([f"NIXL {bed.version}: after", "Python said", "`status` in memory"], lives.life(bed, offset))


def flush(beds):
    for bed in beds:
        rows([f"NIXL {bed.version}: when", "hits in the prefill process, by thread and status"], lives.flush(bed, libraries(bed)))


def ends_(beds):
    for bed in beds:
        rows([f"NIXL {bed.version}", "sendXferRange's local list is", "ranges", "inside postXferReq", "flushes asked",
              "ended before decode went on", "ended after it, handle released"], ends.ends(bed, libraries(bed)))


def late(beds):
    for bed in beds:
        rows([f"NIXL {bed.version}: when", "its flushes ended since", "its pages at decode: as posted", "as filled later"],
             ends.late(bed, libraries(bed)))


def free(beds):
    for bed in beds:
        library = libraries(bed)["engine"]
        rows([f"Mooncake {bed.version}: when", "Python said", "tasks: slices/ok/failed/bytes/is_finished", "freeBatchID"],
             lives.free(bed, library, batch_layout(library.code(FREE))["stride"]))


SECTIONS = {"prologues": (None, prologues), "status": ("nixl", status), "batch": ("mooncake", batch), "calls": ("nixl", calls),
            "life": ("nixl", life), "flush": ("nixl", flush), "ends": ("nixl", ends_),
            "late": ("nixl", late), "free": ("mooncake", free)}

if __name__ == "__main__":
    sys.exit(main())
