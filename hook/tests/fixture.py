"""What the tests share: the hook on the stand-in server, and marks that are kept instead of made."""

import contextlib
import os
import subprocess
import sys
import time
import unittest
from types import SimpleNamespace

HERE = os.path.dirname(os.path.abspath(__file__))
HOOK = os.path.dirname(HERE)
STANDIN = os.path.join(HERE, "standin")
for path in (STANDIN, HOOK):
    if path not in sys.path:
        sys.path.insert(0, path)

from dislodge_hook import chunks, control, importing, marks, process, scheduler, senders  # noqa: E402

importing.watch()

from sglang.srt.disaggregation.decode import DecodeRequest  # noqa: E402
from sglang.srt.disaggregation.fake.conn import FakeKVReceiver, FakeKVSender  # noqa: E402
from sglang.srt.disaggregation.nixl.conn import NixlKVManager, NixlKVReceiver, NixlKVSender  # noqa: E402
from sglang.srt.managers.scheduler import Scheduler  # noqa: E402

KINDS = {value: name for name, value in vars(marks).items() if name.isupper() and type(value) is int and name not in (
    "FAILED", "BOOTSTRAPPING", "WAITING_FOR_INPUT", "TRANSFERRING", "SUCCESS", "NONE", "RECEIVER", "DETAIL_BYTES", "RID_BYTES")}  # fmt: skip

FAR = 2**63


class Request:
    def __init__(self, rid, sender):
        self.rid, self.disagg_kv_sender, self.error = rid, sender, None


class Server(unittest.TestCase):
    """A prefill server of stand-ins, whose passes the test makes; `self.marks` is what the agent would have seen."""

    manager_sizes = {}

    def setUp(self):
        self.marks = []
        marks.mark = lambda *mark: self.marks.append((KINDS[mark[0]], *mark[1:]))
        marks.mark_detail = lambda *mark: self.marks.append((KINDS[mark[0]], *mark[1:]))
        marks.absent = None
        process.errors.clear()
        if scheduler._watch.channel is not None:
            scheduler._watch.channel.close()
        scheduler._watch.__init__()
        self.manager = NixlKVManager(**self.manager_sizes)
        self.scheduler = Scheduler(self.manager)
        self.prepare()
        self.run_pass()

    def prepare(self):
        """What the scheduler is made into before its first pass."""

    def tearDown(self):
        self.assertEqual(process.errors, {})

    def run_pass(self, tick=True):
        if tick:
            scheduler._watch.next_tick = 0
        return self.scheduler.process_disagg_prefill_inflight_queue()

    def sender(self, room, cls=NixlKVSender, manager=None):
        return cls(manager or self.manager, "addr", room)

    def request(self, room, status=2, cls=NixlKVSender, rid=None):
        """A request in the inflight queue whose room has this status; a pass has seen it."""
        sender = self.sender(room, cls)
        if cls is NixlKVSender:
            self.manager.request_status[room] = status
        req = Request(rid or f"rid-{room}", sender)
        self.scheduler.disagg_prefill_inflight_queue.append(req)
        self.run_pass()
        return req

    def kinds(self, *wanted):
        return [mark for mark in self.marks if mark[0] in wanted]

    def ask(self, verb, epoch=1, number=7, deadline=FAR, **arguments):
        message = {"protocol": 1, "epoch": epoch, "id": number, "deadline": deadline, "verb": verb, **arguments}
        return self.answer(control.json.dumps(message).encode())

    def answer(self, data):
        """What the agent reads after a pass, having written `data`."""
        theirs = scheduler._watch.channel._theirs
        theirs.send(data)
        self.run_pass()
        return control.json.loads(theirs.recv(5000))

    def fail_arguments(self, req, **changes):
        record = senders.known(req.disagg_kv_sender)
        return {"serial": record.serial, "rid": req.rid, "room": str(record.room), "phase": record.phase,
                "reason": "because", **changes}  # fmt: skip


class DecodeServer(Server):
    """The same of a decode server."""

    def prepare(self):
        self.scheduler.become_decode(self.manager)

    def run_pass(self, tick=True):
        if tick:
            scheduler._watch.next_tick = 0
        return self.scheduler.process_decode_queue()

    def receive(self, room, cls=NixlKVReceiver, rid=None):
        """A request in the prealloc queue, as `DecodePreallocQueue.add` makes it. Its receiver's serial."""
        receiver = cls(self.manager, "addr", room)
        entry = DecodeRequest(SimpleNamespace(rid=rid or f"rid-{room}", error=None), receiver)
        self.scheduler.disagg_decode_prealloc_queue.queue.append(entry)
        return entry, senders.known(receiver).serial


@contextlib.contextmanager
def chunks_of_test(room, queued=0, working=0, abandoned=False):
    """A room with these chunks."""
    with chunks._lock:
        made = chunks._room(room)
        made.queued, made.working, made.abandoned = queued, working, abandoned
    yield
    made.queued, made.working, made.abandoned = 0, 0, False
    chunks._tidy(room)


def wait_until(condition, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError("it did not happen")
        time.sleep(0.001)


def python(source, *paths, **environment):
    """Runs source in another Python, with the hook and the stand-in on its path unless told otherwise. Returns its output.

    From a folder of its own: `-c` puts the current one in front of the path."""
    path = os.pathsep.join(paths or (HOOK, STANDIN))
    done = subprocess.run([sys.executable, "-c", source], env={**os.environ, "PYTHONPATH": path, **environment},
                          capture_output=True, text=True, timeout=60, cwd="/")  # fmt: skip
    if done.returncode:
        raise AssertionError(done.stderr)
    return done.stdout
