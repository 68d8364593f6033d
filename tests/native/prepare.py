"""Makes what the peer programs run on: a Python environment, and the wheels of NIXL and Mooncake, unpacked side by side.

    prepare.py --into DIR [--verbs] [ENGINE==VERSION...]    e.g. prepare.py --into target/native nixl==0.8.0 mooncake==0.3.9

Without engines: those of `DEFAULT`. `nixl` is nixl-cu12 (up to 0.7.0 the wheel itself was named nixl), `mooncake` is
mooncake-transfer-engine-non-cuda. What is there already is
kept, so a second run needs no network; of two runs at the same time the later waits. The last line of output is
{"python": path, "engines": {"nixl-1.5.1": {"folder": path, "environment": {name: value}}}}: the interpreter, and what has to be in
the environment of `nixl_peer.py` or `mooncake_peer.py`. With `--verbs`, Mooncake's engines have "verbs" as well: the environment for
`--protocol rdma --device fake0` on the stand-in for an RDMA device, to which `FAKE_VERBS_STATE` has to be added (fake_verbs.py).

Needs cc, and of Debian's packages what the engines link with: libibverbs1, libnuma1 and libcurl4; for `--verbs` libibverbs-dev.
"""

import argparse
import ctypes
import fcntl
import hashlib
import json
import os
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "sglang"))

from prepare import Failed, environment, pip, run  # noqa: E402  (tests/sglang/prepare.py: this file is __main__)

REQUIREMENTS = HERE / "requirements.txt"
DEFAULT = """nixl==1.5.1 nixl==1.4.1 nixl==1.0.1 nixl==0.8.0
    mooncake==0.3.13.post1 mooncake==0.3.11.post1 mooncake==0.3.9 mooncake==0.3.7.post1""".split()
# What Mooncake's engine.so (0.3.7 to 0.3.13) takes from the system: file -> Debian package.
SYSTEM = {"libibverbs.so.1": "libibverbs1", "libnuma.so.1": "libnuma1", "libcurl.so.4": "libcurl4"}


def main() -> int:
    parser = argparse.ArgumentParser(description="Prepares the test-bed of the transfer engines.")
    parser.add_argument("--into", type=Path, required=True, metavar="DIR")
    parser.add_argument("--verbs", action="store_true")
    parser.add_argument("engines", nargs="*", default=DEFAULT, metavar="ENGINE==VERSION")
    options = parser.parse_args()
    into = options.into.resolve()
    into.mkdir(parents=True, exist_ok=True)
    with open(into / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            python = environment(into / "python", REQUIREMENTS)
            engines = {}
            for wanted in options.engines:
                engine, _, version = wanted.partition("==")
                if engine not in ENVIRONMENT or not version:
                    raise Failed(f"{wanted}: not of the form nixl==VERSION or mooncake==VERSION")
                folder = unpacked(python, into, engine, version)
                made = engines[f"{engine}-{version}"] = {"folder": str(folder)}
                made["environment"] = ENVIRONMENT[engine](into, folder, version)
                if options.verbs and engine == "mooncake":
                    made["verbs"] = verbs_environment(into, folder)
        except Failed as failure:
            print(f"prepare.py: {failure}", file=sys.stderr)
            return 1
    print(json.dumps({"python": str(python), "engines": engines}))
    return 0


def unpacked(python: Path, into: Path, engine: str, version: str) -> Path:
    """A folder that holds the wheel, without the headers that it carries; complete, or not there at all."""
    folder = into / f"{engine}-{version}"
    if folder.exists():
        return folder
    with tempfile.TemporaryDirectory(dir=into, prefix=f".{engine}-{version}-") as scratch:
        wheel = wheel_name(engine, version)
        pip(python, "download", "--no-deps", "--only-binary=:all:", "--dest", scratch, f"{wheel}=={version}",
            what=f"downloading {wheel} {version}")
        (wheel,) = Path(scratch).glob("*.whl")
        tree = Path(scratch) / "tree"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(tree, [name for name in archive.namelist() if ".data/headers/" not in name])
        tree.rename(folder)
    return folder


def wheel_name(engine: str, version: str) -> str:
    if engine == "mooncake":
        return "mooncake-transfer-engine-non-cuda"
    return "nixl-cu12" if numbers(version) > (0, 7, 0) else "nixl"


def numbers(version: str) -> tuple:
    return tuple(int(part) for part in version.split(".")[:3])


def nixl_environment(into: Path, folder: Path, version: str) -> dict:
    """Loopback over TCP: with shared memory, UCX would finish a write while the other process is stopped."""
    number = numbers(version)
    made = {"PYTHONPATH": os.pathsep.join([str(folder), str(HERE / "stand_ins")]), "UCX_TLS": "tcp,self"}
    if not (0, 8, 0) <= number <= (0, 10, 1):  # these say "no route" to `lo`; they reach this host's own address through it
        made["UCX_NET_DEVICES"] = "lo"
    if (0, 5, 1) <= number <= (0, 9, 0):
        made["LD_LIBRARY_PATH"] = str(compiled(into, "libcuda.c", "libcuda.so.1").parent)
    return made


def mooncake_environment(into: Path, folder: Path, version: str) -> dict:
    missing = [package for library, package in SYSTEM.items() if not loads(library)]
    if missing:
        raise Failed(f"Mooncake needs these of Debian's packages, which are not installed: {' '.join(missing)}")
    return {"PYTHONPATH": str(folder), "MC_FORCE_TCP": "1"}


def verbs_environment(into: Path, folder: Path) -> dict:
    """Mooncake's rdma transport on the stand-in: its own search for devices reads /sys, so it is told the topology."""
    topology = into / "topology.json"
    topology.write_text(json.dumps({"cpu:0": [["fake0"], []], "*": [["fake0"], []]}))
    library = compiled(into, "verbs.c", "libibverbs-stand-in.so", "-pthread")
    return {"PYTHONPATH": str(folder), "LD_PRELOAD": str(library), "MC_CUSTOM_TOPO_JSON": str(topology), "MC_GID_INDEX": "0"}


ENVIRONMENT = {"nixl": nixl_environment, "mooncake": mooncake_environment}


def compiled(into: Path, source: str, name: str, *flags: str) -> Path:
    """The stand-in of that source as a shared library, in a folder of its own; made again when the source is another."""
    source = HERE / "stand_ins" / source
    digest = hashlib.sha256(source.read_bytes() + " ".join(flags).encode()).hexdigest()[:16]
    library = into / f"{source.stem}-stand-in-{digest}" / name
    if not library.exists():
        library.parent.mkdir(exist_ok=True)
        half = library.with_suffix(".half")
        run([os.environ.get("CC", "cc"), "-shared", "-fPIC", "-O2", "-o", str(half), str(source), f"-Wl,-soname,{name}", *flags],
            f"compiling the stand-in for {name}")
        half.rename(library)
    return library


def loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
