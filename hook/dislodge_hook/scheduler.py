"""The scheduler's own pass over its queues, and the moment at which the agent's requests are carried out. Everything here runs
on the scheduler thread.

`process_disagg_prefill_inflight_queue` (disaggregation/prefill.py, since 0.4.6) and `process_decode_queue`
(disaggregation/decode.py) run in each turn of the event loop, also with empty queues. With pipeline parallelism a decode calls
`process_decode_transfer_queue` instead, once a microbatch (managers/scheduler_pp_mixin.py).
"""

import inspect
import time

from . import chunks, control, description, marks, process, queues, remedy, senders, signature, state, wrappers

PASS = "process_disagg_prefill_inflight_queue"
DECODE_PASS = "process_decode_queue"
PIPELINED_DECODE_PASS = "process_decode_transfer_queue"
TICK = 50_000_000  # ns: how often a queue is compared though its length is the same, and the socket looked at
PASS_EVERY = 100_000_000  # ns: at most ten `pass` marks a second


class Watch:
    """What is remembered between passes. From 0.5.21 on a running scheduler can be given the other role
    (disaggregation/role_switch.py, which wants both sides' queues empty first): the pass that is made tells."""

    def __init__(self):
        self.channel = None
        self.resynchronisation = state.Resynchronisation()
        self.side = None  # whose pass was begun last: `inflight` or `decode`
        self.late = False
        self.inflight, self.decode = queues.Inflight(), queues.Decode()
        self.passes = self.passes_marked = 0
        self.next_tick = self.next_pass_mark = 0

    @property
    def started(self):
        return self.side is not None

    def before(self, scheduler):
        """Most passes end here: nothing is due, and the queue is as long as it was."""
        self.passes += 1
        queue = scheduler.disagg_prefill_inflight_queue
        now = time.monotonic_ns()
        if now >= self.next_tick:
            self.tick(scheduler, self.inflight, now)
        elif len(queue) != self.inflight.length:
            self.inflight.take(queue, now)
        return scheduler

    def after(self, scheduler, _result):
        if scheduler is None:
            return  # `before` failed
        queue = scheduler.disagg_prefill_inflight_queue
        if len(queue) != self.inflight.length:
            self.inflight.take(queue, time.monotonic_ns())

    def before_decode(self, scheduler):
        self.passes += 1
        now = time.monotonic_ns()
        if now >= self.next_tick:
            self.tick(scheduler, self.decode, now)
        elif self.decode.differ(scheduler):
            self.decode.compare(scheduler, now)
        return scheduler

    def after_decode(self, scheduler, _result):
        if scheduler is not None and self.decode.differ(scheduler):
            self.decode.compare(scheduler, time.monotonic_ns())

    def tick(self, scheduler, side, now):
        self.next_tick = now + TICK  # first: what fails below fails a few times a second, not each pass
        if self.side is not side:
            self.start(scheduler, side)
        senders.settle()
        side.compare(scheduler, now)
        if now >= self.next_pass_mark:
            self.next_pass_mark = now + PASS_EVERY
            passes, self.passes_marked = self.passes - self.passes_marked, self.passes
            side.mark_pass(min(passes, 0xFFFFFFFF))
        if self.channel is not None:
            self.channel.serve(now, self.verbs(scheduler))
        self.resynchronisation.step()
        if self.resynchronisation.running:
            self.next_tick = 0  # its next share, and a look at the socket, in the next pass

    def start(self, scheduler, side):
        """The first pass, or the first in another role: this process is a scheduler of that role. Only now is there anything
        for an agent to find."""
        if self.side is not None:
            self.side.empty()
        self.side = side
        marks.load()
        self.late = late(scheduler)
        if self.late:
            adopt(scheduler)
            find_workers(description.manager_of(scheduler))
        for cls in type(scheduler).__mro__:
            wrap_pause(cls)
        hello = description.hello(scheduler, 0, self.late, side.role)
        hello = {name: value for name, value in hello.items() if value is not None}
        if self.channel is None:
            self.channel = control.Channel.open(hello)
        marks.mark_detail(marks.HELLO, 0, 0, 0, marks.record(hello))

    def verbs(self, scheduler):
        return {
            "ping": lambda request: {"passes": self.passes, "dropped_replies": self.channel.dropped_replies},
            "state": lambda request: self.resynchronise(scheduler, request["epoch"]),
            "fail": lambda request: remedy.fail(scheduler, request),
        }

    def resynchronise(self, scheduler, epoch):
        hello = description.hello(scheduler, epoch, self.late, self.side.role)
        marks.mark_detail(marks.HELLO, 0, epoch, 0, marks.record(hello))
        return {"entries": self.resynchronisation.begin(epoch)}


def late(scheduler):
    """Whether the server had a manager before the hook came."""
    manager = description.manager_of(scheduler)
    return manager is not None and not wrappers.made_under_our_eyes(manager)


def adopt(scheduler):
    """Gives a record to each sender and receiver that was there before the hook, wherever the scheduler keeps its request: a
    room shared with an unknown sender must not look unshared."""
    for sender in description.senders_of(scheduler):
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
    """Wraps the passes of a class that defines them."""
    sides = {
        PASS: (_watch.before, _watch.after),
        DECODE_PASS: (_watch.before_decode, _watch.after_decode),
        PIPELINED_DECODE_PASS: (_watch.before_decode, _watch.after_decode),
    }
    for name, (before, after) in sides.items():
        wrappers.wrap_in(cls, name, lambda original, b=before, a=after: signature.wrap(original, b, a, (wrappers.SELF,)))


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
