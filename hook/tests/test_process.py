"""One working copy per process, none in a forked child, nothing at all in other programs, and a missing marker is no fault."""

import json
import os
import shutil
import tempfile
import unittest

from fixture import HOOK, STANDIN, python

USE = """
import json, sys
from importlib import metadata
for entry_point in metadata.entry_points(group="sglang.srt.plugins"):
    entry_point.load()()
from sglang.srt.disaggregation.nixl.conn import NixlKVManager, NixlKVSender
from sglang.srt.managers.scheduler import Scheduler
from dislodge_hook import marks, process, scheduler, senders
manager = NixlKVManager()
server = Scheduler(manager)
seen = []
if SEE:
    marks.mark = marks.mark_detail = lambda *mark: seen.append(mark[0])
    marks.absent = None
sender = NixlKVSender(manager, "a", 5)
sender.poll()
server.process_disagg_prefill_inflight_queue()
"""


def use(then, see=True, paths=(), **environment):
    source = f"SEE = {see}\n{USE}\n{then}"
    return json.loads(python(source, *(paths or (HOOK, STANDIN)), **environment))


class Loading(unittest.TestCase):
    def test_the_plugin_is_found_and_works(self):
        told = use("print(json.dumps([seen, process.errors, process.inert]))")
        self.assertEqual(told[1:], [{}, False])
        self.assertLess({1, 10, 12, 24}, set(told[0]))

    def test_plugin_and_sitecustomize_together_are_one(self):
        told = use("print(json.dumps([seen.count(10), seen.count(12), process.errors]))",
                   paths=(HOOK, os.path.join(HOOK, "sitecustomize"), STANDIN))
        self.assertEqual(told, [1, 1, {}])

    def test_a_second_copy_of_any_version_is_inert(self):
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(os.path.join(HOOK, "dislodge_hook"), os.path.join(folder, "other_dislodge_hook"))
            told = use("""
import other_dislodge_hook, other_dislodge_hook.process as other
other_dislodge_hook.register()
class Late(NixlKVSender):
    def poll(self):
        return super().poll()
Late.__module__ = NixlKVSender.__module__
seen.clear()
manager.update_status(5, 3)
sender.poll()
print(json.dumps([other.inert, process.inert, seen.count(12), other.errors]))
""", paths=(HOOK, folder, STANDIN))  # fmt: skip
        self.assertEqual(told, [True, False, 1, {}])

    def test_modules_that_are_already_there_are_patched(self):
        told = json.loads(python("""
import json
from sglang.srt.disaggregation.nixl.conn import NixlKVManager, NixlKVSender
from sglang.srt.managers.scheduler import Scheduler
manager = NixlKVManager()
server = Scheduler(manager)
old = NixlKVSender(manager, "a", 5)
while not manager.transfer_queues[0]._cond._waiters:
    pass
import dislodge_hook
dislodge_hook.register()
from dislodge_hook import chunks, marks, process, scheduler, senders
from types import SimpleNamespace
server.disagg_prefill_bootstrap_queue.queue.append(SimpleNamespace(disagg_kv_sender=old))
server.process_disagg_prefill_inflight_queue()
print(json.dumps([scheduler._watch.late, chunks.late(manager), senders.known(old).created, process.errors]))
"""))
        self.assertEqual(told, [True, False, 0, {}])  # late, but its worker waits and holds nothing

    def test_a_module_keeps_its_loader_and_its_source(self):
        told = json.loads(python("""
import json, inspect, importlib
import dislodge_hook
dislodge_hook.register()
import sglang.srt.disaggregation.nixl.conn as conn
print(json.dumps([type(conn.__loader__).__name__, conn.__spec__.loader is conn.__loader__, "exec_module" in vars(conn.__loader__),
                  inspect.getsource(conn).startswith('\"\"\"Stand-in')]))
importlib.reload(conn)
"""))
        self.assertEqual(told, ["SourceFileLoader", True, False, True])

    def test_a_module_that_fails_to_import_fails_as_without_the_hook(self):
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(STANDIN, os.path.join(folder, "s"))
            with open(os.path.join(folder, "s/sglang/srt/disaggregation/nixl/conn.py"), "w") as broken:
                broken.write("raise ValueError('theirs')")
            out = python("""
import dislodge_hook
dislodge_hook.register()
try:
    import sglang.srt.disaggregation.nixl.conn
except ValueError as error:
    print(error)
try:
    import sglang.srt.disaggregation.ascend.conn
except ModuleNotFoundError as error:
    print(error.name)
""", HOOK, os.path.join(folder, "s"))  # fmt: skip
        self.assertEqual(out.split(), ["theirs", "sglang.srt.disaggregation.ascend"])


class Marker(unittest.TestCase):
    machine = os.uname().machine

    @unittest.skipUnless(os.path.exists(os.path.join(HOOK, "dislodge_hook", "marker", machine + ".so"))
                         or os.environ.get("CI") == "true", "no marker library for this machine: run hook/marker/build")
    def test_the_real_marker_loads_and_takes_anything(self):
        told = use("""
mark, detail = marks.mark, marks.mark_detail
for room in (0, 2**64 - 1, 2**64, -1, 10**500, None, "x", 1.5, object()):
    assert mark(10, room, 1, 2) is None and detail(10, room, 1, 2, b"x" * 5000) is None
for arguments in ((), (1,), (None,) * 4, (1, 2, 3, 4, "no bytes"), (1, 2, 3, 4, None)):
    assert mark(*arguments) is None and detail(*arguments) is None
print(json.dumps([marks.absent, mark.__name__, process.errors]))
""", see=False)  # fmt: skip
        self.assertEqual(told, [None, "mark", {}])

    def test_without_a_marker_everything_else_goes_on(self):
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(HOOK, os.path.join(folder, "h"), ignore=shutil.ignore_patterns("tests", "marker", "target"))
            told = use("print(json.dumps([bool(marks.absent), process.errors, senders.known(sender).phase]))",
                       see=False, paths=(os.path.join(folder, "h"), STANDIN))
        self.assertEqual(told, [True, {"marker:ImportError": 1}, 1])

    def test_a_damaged_marker_is_no_fault_of_the_server(self):
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(HOOK, os.path.join(folder, "h"), ignore=shutil.ignore_patterns("tests", "target"))
            with open(os.path.join(folder, "h", "dislodge_hook", "marker", self.machine + ".so"), "wb") as library:
                library.write(b"not an ELF file")
            told = use("print(json.dumps([bool(marks.absent), senders.known(sender).phase]))",
                       see=False, paths=(os.path.join(folder, "h"), STANDIN))
        self.assertEqual(told, [True, 1])


class Fork(unittest.TestCase):
    def test_a_forked_child_has_no_channel_and_makes_no_mark(self):
        told = use("""
import os, warnings
warnings.simplefilter("ignore")
from dislodge_hook import chunks
channel = scheduler._watch.channel
fds = [channel._ours.fileno(), channel._theirs.fileno(), channel._memory]
reader, writer = os.pipe()
chunks._lock.acquire()
if os.fork() == 0:
    try:
        marks_before = len(seen)
        child = NixlKVSender(manager, "a", 6)
        manager.update_status(6, 3)
        child.poll()
        child.init(1)
        child.send([1])
        server.process_disagg_prefill_inflight_queue()
        open_fds = []
        for fd in fds:
            try:
                os.fstat(fd)
                open_fds.append(fd)
            except OSError:
                pass
        told = [process.inert, open_fds, len(seen) - marks_before, senders.known(child) is None, child.poll()]
    except BaseException as error:
        told = repr(error)
    os.write(writer, json.dumps(told).encode())
    os._exit(0)
chunks._lock.release()
os.wait()
parent = [process.inert, [os.fstat(fd) is not None for fd in fds]]
print(json.dumps([json.loads(os.read(reader, 4096)), parent]))
""")  # fmt: skip
        child, parent = told
        self.assertEqual(child, [True, [], 0, True, 3])
        self.assertEqual(parent, [False, [True, True, True]])


class Sitecustomize(unittest.TestCase):
    ours = os.path.join(HOOK, "sitecustomize")

    def test_other_programs_import_only_the_finder(self):
        out = python("import sys; print(sorted(m for m in sys.modules if 'dislodge' in m), 'json' in sys.modules)", HOOK, self.ours)
        self.assertEqual(out.strip(), "['dislodge_hook', 'dislodge_hook.importing'] False")

    def test_it_hands_over_to_the_next_one(self):
        with tempfile.TemporaryDirectory() as folder:
            with open(os.path.join(folder, "sitecustomize.py"), "w") as next_one:
                next_one.write("import sys\nsys.handed_over = __file__\n")
            out = python("import sys, sitecustomize; print(sys.handed_over == sitecustomize.__file__, len(sys.meta_path))",
                         HOOK, self.ours, folder)
        self.assertEqual(out.split()[0], "True")

    def test_without_a_next_one_it_is_itself(self):
        out = python("import sys, sitecustomize; print('dislodge_hook.importing' in sys.modules)", HOOK, self.ours)
        self.assertEqual(out.strip(), "True")

    def test_it_patches_the_server(self):
        source = "import sglang.srt.disaggregation.nixl.conn as c; print(c.NixlKVSender.poll.__wrapped__.__name__)"
        self.assertEqual(python(source, HOOK, self.ours, STANDIN).strip(), "poll")

    def test_no_hook_on_the_path_is_no_error(self):
        self.assertEqual(python("print(1)", self.ours).strip(), "1")


if __name__ == "__main__":
    unittest.main()
