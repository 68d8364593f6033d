"""Wrapping changes nothing that the server can see, and each call is marked once."""

import copy
import functools
import gc
import inspect
import pickle
import unittest
import weakref

from fixture import FakeKVSender, NixlKVManager, NixlKVSender, Request, Scheduler, Server, senders
from dislodge_hook import backend, marks, process, scheduler, signature, wrappers


class Signatures(unittest.TestCase):
    def forms(self):
        def plain(self, a, b=(), *rest, c, d=None, **more):
            return self, a, b, rest, c, d, more

        def positional(self, a, b=3, /, c=4, *, d):
            return self, a, b, c, d

        return plain, positional

    def test_a_wrapper_has_the_signature_and_the_defaults_of_the_original(self):
        for original in self.forms():
            wrapper = signature.wrap(original, acts=lambda instance, wrapper: True)
            self.assertEqual(inspect.signature(wrapper), inspect.signature(original))
            bare = inspect.signature(wrapper, follow_wrapped=False)
            self.assertEqual(bare.parameters.keys(), inspect.signature(original).parameters.keys())
            self.assertEqual([p.kind for p in bare.parameters.values()],
                             [p.kind for p in inspect.signature(original).parameters.values()])
            for name in ("__name__", "__qualname__", "__doc__", "__module__", "__defaults__", "__kwdefaults__"):
                self.assertEqual(getattr(wrapper, name), getattr(original, name), name)

    def test_arguments_arrive_as_they_were_given(self):
        plain, positional = (signature.wrap(original) for original in self.forms())
        self.assertEqual(plain(1, 2, 3, 4, 5, c=6, e=7), (1, 2, 3, (4, 5), 6, None, {"e": 7}))
        self.assertEqual(positional(1, 2, d=5), (1, 2, 3, 4, 5))
        with self.assertRaises(TypeError):
            positional(1, a=2, d=5)

    def test_every_wrapped_method_keeps_its_signature(self):
        seen = 0
        for cls in (*NixlKVSender.__mro__, *NixlKVManager.__mro__, *FakeKVSender.__mro__, *Scheduler.__mro__):
            for name, function in vars(cls).items():
                if wrappers.wrapped(cls, name):
                    seen += 1
                    self.assertEqual(inspect.signature(function), inspect.signature(function.__wrapped__))
        self.assertGreater(seen, 20)

    def test_faults_of_the_hook_are_counted_and_those_of_the_original_pass(self):
        def broken(*_):
            raise LookupError("ours")

        def original(x):
            if x < 0:
                raise ValueError("theirs")
            return x + 1

        wrapper = signature.wrap(original, broken, broken, (("x",),))
        self.assertEqual(wrapper(1), 2)
        with self.assertRaisesRegex(ValueError, "theirs"):
            wrapper(-1)
        self.assertEqual(sum(process.errors.values()), 3)
        process.errors.clear()


class Marks(Server):
    def test_an_unchanged_poll_is_silent_and_a_changed_one_marks_once(self):
        sender = self.sender(5)
        self.marks.clear()
        self.assertEqual([sender.poll() for _ in range(3)], [1, 1, 1])
        self.manager.update_status(5, 3)
        self.assertEqual([sender.poll() for _ in range(3)], [3, 3, 3])
        serial = senders.known(sender).serial
        self.assertEqual(self.kinds("PHASE"), [("PHASE", 5, 0xFF | 1 << 8, serial), ("PHASE", 5, 1 | 3 << 8, serial)])

    def test_overrides_that_call_super_mark_once(self):
        sender = self.sender(6)
        serial = senders.known(sender).serial
        sender.abort()
        sender.clear()
        self.assertEqual(self.kinds("OPEN"), [("OPEN", 6, backend.NIXL, serial)])
        self.assertEqual(self.kinds("ABORT"), [("ABORT", 6, 1, serial)])
        self.assertEqual(self.kinds("CLEAR"), [("CLEAR", 6, 1, serial)])
        updates = [mark for mark in self.kinds("UPDATE") if mark[1] == 6]
        self.assertEqual([mark[2] for mark in updates], [1 | 0xFF << 8 | 1 << 16, 0 | 1 << 8 | 0 << 16])

    def test_an_inner_poll_that_differs_from_the_outer_one_does_not_mark(self):
        class Holding(NixlKVSender):
            def poll(self):
                status = super().poll()
                return 3 if status == 4 else status

        Holding.__module__ = NixlKVSender.__module__
        wrappers.wrap_sender(Holding)
        sender = self.sender(7, Holding)
        self.manager.request_status[7] = 4
        self.assertEqual([sender.poll(), sender.poll()], [3, 3])
        self.assertEqual([mark[2] for mark in self.kinds("PHASE")], [0xFF | 3 << 8])

    def test_a_subclass_that_is_not_wrapped_still_marks(self):
        class Foreign(NixlKVSender):
            def poll(self):
                return super().poll()

        sender = self.sender(8, Foreign)
        sender.poll()
        self.assertEqual(len(self.kinds("PHASE")), 1)

    def test_another_plugin_that_wraps_a_wrapper_of_ours_changes_nothing(self):
        class Mine(NixlKVSender):
            def poll(self):
                return super().poll()

        Mine.__module__ = NixlKVSender.__module__
        wrappers.wrap_sender(Mine)
        ours = Mine.poll
        Mine.poll = functools.wraps(ours)(lambda self: ours(self))
        wrappers._outermost.clear()
        wrappers.wrap_sender(Mine)
        sender = self.sender(15, Mine)
        self.assertEqual([sender.poll(), sender.poll()], [1, 1])
        self.assertEqual(len(self.kinds("PHASE")), 1)

    def test_a_dropped_update_is_marked_and_noted_on_the_live_sender(self):
        sender = self.sender(9)
        self.manager.request_status.pop(9)
        self.marks.clear()
        sender.abort()
        self.assertEqual(self.kinds("ABORT")[0][2], 0)
        self.assertEqual(self.kinds("UPDATE"), [("UPDATE", 9, 0 | 0xFF << 8 | 0xFF << 16, 0)])
        self.assertGreater(senders.known(sender).dropped, 0)

    def test_send_counts_pages_and_knows_the_last_chunk(self):
        sender = self.sender(10)
        sender.init(5)
        sender.send([1, 2, 3])
        sender.send(kv_indices=[4, 5])
        self.assertEqual([mark[2] for mark in self.kinds("SEND")], [3, 2 | 1 << 32])
        record = senders.known(sender)
        self.assertEqual((record.sent_chunks, record.sent_pages, record.sent_last), (2, 5, True))

    def test_peer_abort_is_marked_also_for_a_room_that_is_not_there(self):
        sender = self.sender(11)
        self.assertTrue(self.manager._handle_abort_notification([b"ABORT", b"11", b"ip", b"1"]))
        self.assertTrue(self.manager._handle_abort_notification([b"ABORT", b"12", b"ip", b"1"]))
        self.assertFalse(self.manager._handle_abort_notification([b"Guard"]))
        self.assertEqual(self.kinds("PEER_ABORT"), [("PEER_ABORT", 11, 1, 0), ("PEER_ABORT", 12, 0, 0)])
        del sender

    def test_sharing_a_room_and_clearing_it_are_noted(self):
        first, second = self.sender(13), self.sender(13)
        one, two = senders.known(first), senders.known(second)
        self.assertEqual((one.shared_with, two.shared_with), (two.serial, one.serial))
        first.clear()
        self.assertEqual((one.cleared_by, two.cleared_by), (0, one.serial))

    def test_rooms_that_are_no_64_bit_number_go_through(self):
        for room in (2**64, -1, None, "seven"):
            sender = self.sender(room)
            sender.poll()
            self.assertIs(senders.known(sender).room, room)
            self.assertIsNone(senders.number(room))

    def test_serials_grow_and_are_never_given_twice(self):
        given = []
        for _ in range(50):
            given.append(senders.known(self.sender(14)).serial)
        self.assertEqual(len(set(given)), 50)
        self.assertEqual(given, sorted(given))


class Queue(Server):
    def test_enter_and_leave_are_marked_with_rid_and_reason(self):
        success, failure = self.request(20, rid="a"), self.request(21, rid="ü" * 200)
        self.manager.request_status[20] = 4
        failure.disagg_kv_sender._send_failed = True
        self.run_pass()
        enters = self.kinds("ENTER")
        self.assertEqual(enters[0][4], b"a")
        self.assertEqual(enters[1][4], "ü".encode() * 200)
        serials = [senders.known(req.disagg_kv_sender).serial for req in (success, failure)]
        self.assertEqual(self.kinds("LEAVE"), [("LEAVE", 20, 1, serials[0]), ("LEAVE", 21, 2, serials[1])])
        self.assertFalse(any(senders.known(req.disagg_kv_sender).live for req in (success, failure)))

    def test_a_request_that_enters_and_leaves_in_one_pass_is_seen_without_a_tick(self):
        sender = self.sender(22)
        self.manager.request_status[22] = 4
        self.scheduler.disagg_prefill_inflight_queue.append(Request("quick", sender))
        self.run_pass(tick=False)
        self.assertEqual([mark[0] for mark in self.kinds("ENTER", "LEAVE")], ["ENTER", "LEAVE"])

    def test_a_request_that_is_removed_without_a_pass_leaves_not_terminal(self):
        req = self.request(23)
        self.scheduler.disagg_prefill_inflight_queue = []
        self.run_pass()
        self.assertEqual(self.kinds("LEAVE")[0][2], 3)
        self.assertTrue(senders.known(req.disagg_kv_sender).live)

    def test_pass_marks_are_rare_and_count_the_passes_between(self):
        scheduler._watch.next_pass_mark = 0
        self.marks.clear()
        self.run_pass()
        for _ in range(99):
            self.run_pass(tick=False)
        self.assertEqual(len(self.kinds("PASS")), 1)
        scheduler._watch.next_pass_mark = 0
        self.run_pass()
        self.assertEqual(self.kinds("PASS")[1][2], 100 << 32)

    def test_pause_and_continue_are_marked(self):
        self.scheduler.pause_generation(None)
        self.scheduler.continue_generation(None)
        self.assertTrue(not self.scheduler.paused)
        self.assertEqual([mark[0] for mark in self.kinds("PAUSED", "RESUMED")], ["PAUSED", "RESUMED"])

    def test_hello_says_what_is_known(self):
        (hello,) = self.kinds("HELLO")
        self.assertLessEqual(len(hello[4]), marks.DETAIL_BYTES)
        self.assertIn(b'"flag":"send_failed","counts":"queues","late":false,"tp":1', hello[4])
        self.assertIn(b'"sglang":"0.0.0+standin"', hello[4])

    def test_an_exception_of_the_pass_is_the_servers(self):
        req = self.request(24)
        req.disagg_kv_sender.poll = lambda: 1 / 0
        with self.assertRaises(ZeroDivisionError):
            self.run_pass()


class Lifetime(Server):
    def test_nothing_is_kept_alive(self):
        req = self.request(30)
        self.ask("state")
        self.manager.request_status[30] = 4
        done = self.run_pass()
        watched = [weakref.ref(thing) for thing in (req, req.disagg_kv_sender, self.scheduler, self.manager)]
        serial = senders.known(req.disagg_kv_sender).serial
        del req, done
        self.assertEqual([ref() is None for ref in watched[:2]], [True, True])
        self.assertIn(("CLOSE", 30, 0, serial), self.marks)
        self.run_pass()
        self.assertIsNone(senders.by_serial(serial))
        del self.scheduler
        gc.collect()
        self.assertIsNone(watched[2]())

    def test_a_sender_in_a_cycle_is_closed_by_the_collector(self):
        sender = self.sender(31)
        sender.itself = sender
        del sender
        gc.collect()
        self.assertEqual(len([mark for mark in self.kinds("CLOSE") if mark[1] == 31]), 1)

    def test_copying_a_sender_does_not_copy_its_identity(self):
        sender = self.sender(32, FakeKVSender)
        sender.kv_mgr = None
        pickled = pickle.loads(pickle.dumps(sender))
        self.assertEqual(pickled.bootstrap_room, 32)
        self.assertIsNone(senders.known(pickled))
        for twin in (copy.copy(sender), copy.deepcopy(sender)):
            twin.abort()
            twin.poll()
            self.assertNotEqual(senders.known(twin).serial, senders.known(sender).serial)

    def test_a_broken_registry_never_reaches_the_server(self):
        real, senders.of = senders.of, None
        try:
            sender = self.sender(33)
            self.assertEqual(sender.poll(), 1)
            sender.abort()
            sender.init(1)
            sender.send([1])
            self.scheduler.disagg_prefill_inflight_queue.append(Request("r", sender))
            self.run_pass()
            with self.assertRaises(RuntimeError):
                sender.failure_exception()
        finally:
            senders.of = real
        self.assertGreater(sum(process.errors.values()), 4)
        process.errors.clear()

    def test_a_class_without_instance_attributes_is_left_alone(self):
        from dislodge_hook import importing, patching

        class Slotted:
            __slots__ = ("room",)
            __module__ = importing.PREFIX + "nixl.conn"

            def poll(self):
                return 1

        before = Slotted.poll
        patching.wrap_each(Slotted, wrappers.wrap_sender)
        self.assertIs(Slotted.poll, before)


if __name__ == "__main__":
    unittest.main()
