"""Makes what `server.py` runs on: a Python environment, and the disaggregation code of SGLang releases.

    prepare.py --into DIR RELEASE...        e.g. prepare.py --into target/sglang 0.5.12.post1 0.5.22

Needs nothing but Python's standard library. What is there already is kept, so a second run needs no network; of two runs at the
same time the later waits. The last line of output is {"python": path, "releases": {release: folder}}.
"""

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REQUIREMENTS = Path(__file__).with_name("requirements.txt")
PREFERRED = ("3.12", "3.13", "3.11", "3.10")


class Failed(Exception):
    pass


def main() -> int:
    parser = argparse.ArgumentParser(description="Prepares the SGLang test-bed.")
    parser.add_argument("--into", type=Path, required=True, metavar="DIR")
    parser.add_argument("releases", nargs="+", metavar="RELEASE")
    options = parser.parse_args()
    into = options.into.resolve()
    into.mkdir(parents=True, exist_ok=True)
    with open(into / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            python = environment(into / "venv", REQUIREMENTS)
            releases = {release: str(unpacked(python, into, release)) for release in options.releases}
        except Failed as failure:
            print(f"prepare.py: {failure}", file=sys.stderr)
            return 1
    print(json.dumps({"python": str(python), "releases": releases}))
    return 0


def environment(folder: Path, requirements: Path) -> Path:
    """A virtual environment with pinned packages; the stamp is written last, so one that is half made is made again."""
    python, stamp = folder / "bin" / "python", folder / "requirements.sha256"
    digest = hashlib.sha256(requirements.read_bytes()).hexdigest()
    if stamp.exists() and stamp.read_text() == digest and answers(python):
        return python
    shutil.rmtree(folder, ignore_errors=True)
    base = find_python()
    run([base, "-m", "venv", str(folder)], f"making a virtual environment with {base}")
    pip(python, "install", "--no-deps", "-r", str(requirements), what="installing the pinned packages")
    stamp.write_text(digest)
    return python


def find_python() -> str:
    """The first of the preferred versions that is there and can make virtual environments."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for version in PREFERRED:
        candidates = [sys.executable] if sys.version_info[:2] == tuple(map(int, version.split("."))) else []
        candidates += [shutil.which(f"python{version}"), *map(str, sorted(pyenv.glob(f"{version}*/bin/python")))]
        for candidate in filter(None, candidates):
            if answers(candidate):
                return candidate
    raise Failed(f"found no Python of {', '.join(PREFERRED)} with the venv and ensurepip modules")


def answers(python) -> bool:
    try:
        check = subprocess.run([str(python), "-c", "import venv, ensurepip"], capture_output=True, timeout=60)
    except OSError:
        return False
    return check.returncode == 0


def unpacked(python: Path, into: Path, release: str) -> Path:
    """A folder that holds the wheel's server-side Python files and its metadata; complete, or not there at all."""
    folder = into / release
    if folder.exists():
        return folder
    with tempfile.TemporaryDirectory(dir=into, prefix=f".{release}-") as scratch:
        pip(python, "download", "--no-deps", "--only-binary=:all:", "--dest", scratch, f"sglang=={release}",
            what=f"downloading SGLang {release}")
        (wheel,) = Path(scratch).glob("*.whl")
        tree = Path(scratch) / "tree"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(tree, filter(is_wanted, archive.namelist()))
        tree.rename(folder)
    return folder


def is_wanted(name: str) -> bool:
    parts = name.split("/")
    if parts[0].endswith(".dist-info"):
        return True
    kept = len(parts) == 2 or parts[1] == "srt" and parts[2] not in ("layers", "models", "hardware_backend")
    return parts[0] == "sglang" and name.endswith(".py") and kept


def pip(python: Path, *arguments: str, what: str):
    run([str(python), "-m", "pip", "--disable-pip-version-check", *arguments], what)


def run(command, what: str):
    print(f"prepare.py: {what}", file=sys.stderr)
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        end = "\n".join(line[:200] for line in done.stdout.strip().splitlines()[-8:])
        raise Failed(f"{what} failed (exit status {done.returncode}):\n{end}")


if __name__ == "__main__":
    sys.exit(main())
