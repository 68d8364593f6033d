"""The scheduler's own pass over its inflight queue: who came, who left, and the moment at which the agent's requests are
carried out. Everything here runs on the scheduler thread.

`process_disagg_prefill_inflight_queue` (disaggregation/prefill.py, since 0.4.6) runs in each turn of the event loop, also
with an empty queue, and replaces the list object: a reference to it is good for one pass only.
"""

import inspect
import time

from . import backend, chunks, control, description, marks, process, remedy, senders, signature, state, wrappers

PASS = "process_disagg_prefill_inflight_queue"
TICK = 50_000_000  # ns: how often the queue is compared though its length is the same, and the socket looked at
PASS_EVERY = 100_000_000  # ns: at most ten `pass` marks a second
LEFT_SUCCESS, LEFT_FAILED, LEFT_NOT_TERMINAL = 1, 2, 3


class Watch:
    """What is remembered between passes."""

    def __init__(self):
        self.channel = None
        self.resynchronisation = state.Resynchronisation()
        self.started = False
        self.late = False
        self.length = 0
        self.inflight = {}  # serial: record
        self.passes = self.passes_marked = 0
        self.next_tick = self.next_pass_mark = 0

    def before(self, scheduler):
        """Most passes end here: nothing is due, and the queue is as long as it was."""
        self.passes += 1
        queue = scheduler.disagg_prefill_inflight_queue
        now = time.monotonic_ns()
        if now >= self.next_tick:
            self.tick(scheduler, queue, now)
        elif len(queue) != self.length:
            self.compare(queue, now)
        return scheduler

    def after(self, scheduler, _result):
        if scheduler is None:
            return  # `before` failed
        queue = scheduler.disagg_prefill_inflight_queue
        if len(queue) != self.length:
            self.compare(queue, time.monotonic_ns())

    def tick(self, scheduler, queue, now):
        self.next_tick = now + TICK  # first: what fails below fails a few times a second, not each pass
        if not self.started:
            self.start(scheduler)
        senders.settle()
        self.compare(queue, now)
        if now >= self.next_pass_mark:
            self.next_pass_mark = now + PASS_EVERY
            passes, self.passes_marked = self.passes - self.passes_marked, self.passes
            marks.mark(marks.PASS, 0, min(len(queue), 0xFFFFFFFF) | min(passes, 0xFFFFFFFF) << 32, 0)
        if self.channel is not None:
            self.channel.serve(now, self.verbs(scheduler))
        self.resynchronisation.step()
        if self.resynchronisation.running:
            self.next_tick = 0  # its next share, and a look at the socket, in the next pass

    def start(self, scheduler):
        """The first pass: this process is a prefill scheduler. Only now is there anything for an agent to find."""
        self.started = True
        marks.load()
        self.late = late(scheduler)
        if self.late:
            adopt(scheduler)
            find_workers(description.manager_of(scheduler))
        for cls in type(scheduler).__mro__:
            wrap_pause(cls)
        hello = {name: value for name, value in description.hello(scheduler, 0, self.late).items() if value is not None}
        self.channel = control.Channel.open(hello)
        marks.mark_detail(marks.HELLO, 0, 0, 0, marks.record(hello))

    def compare(self, queue, now):
        """Marks who entered and who left since the last comparison."""
        inflight = {}
        for req in queue:
            record = senders.of(req.disagg_kv_sender)
            inflight[record.serial] = record
            if record.serial not in self.inflight:
                record.entered, record.rid = now, str(req.rid)
                marks.mark_detail(marks.ENTER, record.room, len(queue), record.serial, marks.text(record.rid))
        for serial, record in self.inflight.items():
            if serial not in inflight:
                record.entered = 0
                reason = left(record.phase)
                record.ended = record.ended or reason != LEFT_NOT_TERMINAL
                marks.mark(marks.LEAVE, record.room, reason, serial)
        self.inflight = inflight
        self.length = len(queue)

    def verbs(self, scheduler):
        return {
            "ping": lambda request: {"passes": self.passes, "dropped_replies": self.channel.dropped_replies},
            "state": lambda request: self.resynchronise(scheduler, request["epoch"]),
            "fail": lambda request: remedy.fail(scheduler, request),
        }

    def resynchronise(self, scheduler, epoch):
        marks.mark_detail(marks.HELLO, 0, epoch, 0, marks.record(description.hello(scheduler, epoch, self.late)))
        return {"entries": self.resynchronisation.begin(epoch)}


def left(phase):
    """Why a request left, from what its sender's `poll` returned last."""
    return {marks.SUCCESS: LEFT_SUCCESS, marks.FAILED: LEFT_FAILED}.get(phase, LEFT_NOT_TERMINAL)


def late(scheduler):
    """Whether the server had a manager before the hook came."""
    manager = description.manager_of(scheduler)
    return manager is not None and not wrappers.made_under_our_eyes(manager)


def adopt(scheduler):
    """Gives a record to each sender that was there before the hook, wherever the scheduler keeps its request: a room
    shared with an unknown sender must not look unshared."""
    for req in description.requests_of(scheduler):
        sender = getattr(req, "disagg_kv_sender", None)
        if sender is not None and hasattr(type(sender), senders.ATTRIBUTE):
            senders.of(sender)


def find_workers(manager):
    """Looks at what the workers of a manager from before the hook are doing."""
    queues = chunks.queues_of(manager)
    if not queues:
        return
    wrappers.follow(manager)
    get = type(queues[0]).get
    chunks.found(manager, getattr(get, "__wrapped__", get))


_watch = Watch()


def wrap_pass(cls):
    """Wraps the queue's pass in a class that defines it."""
    wrappers.wrap_in(cls, PASS, lambda original: signature.wrap(original, _watch.before, _watch.after, (wrappers.SELF,)))


def wrap_pause(cls):
    """A paused server makes no pass, and is not stuck. `pause_generation` is synchronous on the scheduler; the tokenizer
    manager has a coroutine of the same name, which is not ours to wrap."""
    for name, kind in (("pause_generation", marks.PAUSED), ("continue_generation", marks.RESUMED)):
        if not inspect.iscoroutinefunction(cls.__dict__.get(name)):
            wrappers.wrap_in(cls, name, wrappers.observer(None, _paused(kind), (wrappers.SELF,)))


def _paused(kind):
    return lambda _note, _result: marks.mark(kind, 0, 0, 0) if _watch.started else None


def _in_child():
    if _watch.channel is not None:
        _watch.channel.close()
        _watch.channel = None


process.after_fork(_in_child)
