"""A decode scheduler: its receivers and both of its queues are marked as a prefill's, and nothing is ever done to them."""

import gc
import inspect
import json
import unittest
import weakref

from fixture import (
    DecodeServer, FakeKVReceiver, NixlKVManager, NixlKVReceiver, NixlKVSender, Request, Scheduler, marks, process, scheduler,
    senders)  # fmt: skip
from dislodge_hook import wrappers

PREALLOC, TRANSFER = 1 << 32, 2 << 32
LEFT_PREALLOC, LEFT_TRANSFER = 1 << 8, 2 << 8
SUCCESS, FAILED, REMOVED, PREALLOCATED = 1, 2, 3, 4


class Receivers(DecodeServer):
    def test_a_receivers_life_is_marked_as_a_senders_with_its_role(self):
        entry, serial = self.receive(5)
        receiver = entry.kv_receiver
        receiver.init(0)
        receiver.poll()
        receiver.send_metadata(kv_indices=[1, 2, 3, 4])
        receiver.abort()
        receiver.poll()
        wanted = self.kinds("OPEN", "SEND", "ABORT", "PHASE")
        self.assertEqual(wanted, [
            ("OPEN", 5, 1 | marks.RECEIVER, serial),
            ("PHASE", 5, 0xFF | 2 << 8, serial),
            ("SEND", 5, 4 | 1 << 32, serial),
            ("ABORT", 5, 1, serial),
            ("PHASE", 5, 2 | 0 << 8, serial),
        ])  # fmt: skip

    def test_an_unchanged_poll_is_silent(self):
        entry, _ = self.receive(6)
        self.marks.clear()
        for _ in range(5):
            entry.kv_receiver.poll()
        self.assertEqual(len(self.kinds("PHASE")), 1)

    def test_a_status_of_the_room_is_marked_once_with_what_it_was(self):
        entry, _ = self.receive(7)
        entry.kv_receiver.init(0)
        updates = [mark[2] for mark in self.kinds("UPDATE")]
        self.assertEqual(updates, [1 | 0xFF << 8 | 1 << 16, 2 | 1 << 8 | 2 << 16])

    def test_receivers_that_share_a_room_know_of_each_other_and_who_cleared_it(self):
        (first, one), (second, two) = self.receive(8), self.receive(8)
        first.kv_receiver.clear()
        record = senders.known(second.kv_receiver)
        self.assertEqual((record.shared_with, record.cleared_by), (one, one))
        self.assertEqual(senders.known(first.kv_receiver).shared_with, two)

    def test_every_wrapped_method_keeps_its_signature_and_the_hook_keeps_no_receiver_alive(self):
        seen = 0
        for cls in (*NixlKVReceiver.__mro__, *FakeKVReceiver.__mro__, *Scheduler.__mro__):
            for name, function in vars(cls).items():
                if wrappers.wrapped(cls, name):
                    seen += 1
                    self.assertEqual(inspect.signature(function), inspect.signature(function.__wrapped__))
        self.assertGreater(seen, 14)
        entry, _ = self.receive(9)
        self.run_pass()
        gone = weakref.ref(entry.kv_receiver)
        self.scheduler.disagg_decode_prealloc_queue.queue.clear()
        self.scheduler.disagg_decode_transfer_queue.queue.clear()
        del entry
        gc.collect()
        self.assertIsNone(gone())


class Queues(DecodeServer):
    def test_a_request_goes_through_both_queues_and_its_receivers_end_comes_last(self):
        entry, serial = self.receive(20, rid="a")
        self.run_pass(tick=False)
        entry.kv_receiver.init(0)
        self.run_pass(tick=False)
        self.manager.update_status(20, 4)
        del entry
        self.run_pass(tick=False)
        told = [mark for mark in self.marks if mark[3] == serial and mark[0] in ("ENTER", "LEAVE", "SEND", "CLEAR", "CLOSE")]
        self.assertEqual(told, [
            ("ENTER", 20, 1 | PREALLOC, serial, b"a"),
            ("SEND", 20, 3 | 1 << 32, serial),
            ("LEAVE", 20, PREALLOCATED | LEFT_PREALLOC, serial),
            ("ENTER", 20, 1 | TRANSFER, serial, b"a"),
            ("CLEAR", 20, 1, serial),
            ("LEAVE", 20, SUCCESS | LEFT_TRANSFER, serial),
            ("CLOSE", 20, 0, serial),
        ])  # fmt: skip

    def test_one_that_comes_as_another_goes_is_seen_in_the_same_pass(self):
        first, one = self.receive(21)
        first.kv_receiver.init(0)
        self.run_pass(tick=False)
        second, two = self.receive(22)
        second.kv_receiver.init(0)
        self.manager.update_status(21, 4)
        del first
        self.run_pass(tick=False)
        moves = [(mark[0], mark[3], mark[2] & 0xFF) for mark in self.kinds("LEAVE")]
        self.assertIn(("LEAVE", one, SUCCESS), moves)
        self.assertIn(("LEAVE", two, PREALLOCATED), moves)
        self.assertEqual(senders.known(second.kv_receiver).queue, 2)

    def test_a_failed_handshake_leaves_the_prealloc_queue_as_failed(self):
        entry, serial = self.receive(23)
        self.run_pass()
        entry.kv_receiver.abort()
        del entry
        self.run_pass(tick=False)
        gc.collect()  # the exception that its request keeps has the receiver in its frames
        self.assertEqual([mark[2:] for mark in self.kinds("LEAVE")], [(FAILED | LEFT_PREALLOC, serial)])
        self.assertEqual([mark[0] for mark in self.marks if mark[3] == serial][-3:], ["CLEAR", "LEAVE", "CLOSE"])

    def test_queues_that_are_emptied_without_a_pass_are_left_without_an_end(self):
        entry, serial = self.receive(24)
        entry.kv_receiver.init(0)
        self.run_pass()
        self.scheduler.disagg_decode_transfer_queue.queue.clear()
        self.run_pass()
        self.assertEqual([mark[2:] for mark in self.kinds("LEAVE")][-1], (REMOVED | LEFT_TRANSFER, serial))
        self.assertEqual(self.kinds("CLOSE"), [])
        del entry
        gc.collect()
        self.assertEqual(self.kinds("CLOSE"), [("CLOSE", 24, 0, serial)])

    def test_a_warm_up_that_passes_both_queues_at_once_is_seen_to_come_and_go(self):
        entry, serial = self.receive(0, FakeKVReceiver)
        entry.kv_receiver.init(0)
        del entry
        self.run_pass(tick=False)
        told = [(mark[0], mark[2]) for mark in self.marks if mark[3] == serial and mark[0] in ("ENTER", "LEAVE", "CLOSE")]
        self.assertEqual(told, [("ENTER", 1 | PREALLOC), ("LEAVE", SUCCESS | LEFT_PREALLOC), ("CLOSE", 0)])

    def test_pass_marks_tell_both_lengths_and_the_passes_between(self):
        scheduler._watch.next_pass_mark = 2**63
        waiting, _ = self.receive(25)
        transferring, _ = self.receive(26)
        transferring.kv_receiver.init(0)
        self.run_pass()
        for _ in range(99):
            self.run_pass(tick=False)
        self.marks.clear()
        scheduler._watch.next_pass_mark = 0
        self.run_pass()
        self.assertEqual(self.kinds("PASS"), [("PASS", 0, 1 | 101 << 32, 1 + 1)])
        del waiting

    def test_an_exception_of_the_pass_is_the_servers(self):
        entry, _ = self.receive(27)
        entry.kv_receiver.poll = lambda: 1 / 0
        with self.assertRaises(ZeroDivisionError):
            self.run_pass()

    def test_pause_and_continue_are_marked(self):
        self.scheduler.pause_generation(None)
        self.scheduler.continue_generation(None)
        self.assertEqual([mark[0] for mark in self.kinds("PAUSED", "RESUMED")], ["PAUSED", "RESUMED"])


class Asked(DecodeServer):
    def test_hello_says_that_it_is_a_decode(self):
        (hello,) = self.kinds("HELLO")
        told = json.loads(hello[4])
        self.assertEqual((told["role"], told["sender"], told["backend"]), ("decode", "NixlKVReceiver", "nixl"))
        self.assertEqual(told["waiting_timeout"], 300)
        self.assertFalse({"flag", "counts"} & set(told), told)

    def test_state_replays_each_live_receiver_with_its_queue(self):
        waiting, one = self.receive(30)
        moving, two = self.receive(31)
        moving.kv_receiver.init(0)
        self.run_pass()
        self.marks.clear()
        self.assertEqual(self.ask("state")["entries"], 2)
        entries = {mark[3]: json.loads(mark[4]) for mark in self.kinds("ENTRY")}
        self.assertEqual((entries[one]["receiver"], entries[one]["queue"], entries[two]["queue"]), (True, 1, 2))
        self.assertEqual((entries[two]["sent_pages"], entries[two]["rid"]), (3, "rid-31"))
        self.assertGreater(entries[two]["entered"], 0)
        self.assertEqual(entries[one]["chunks"], 1 << 34)
        del waiting

    def test_an_entry_with_a_long_rid_fits(self):
        entry, _ = self.receive(2**63 - 1, rid="\u0001" * 300)
        self.run_pass()
        self.marks.clear()
        self.ask("state")
        (mark,) = self.kinds("ENTRY")
        self.assertLessEqual(len(mark[4]), marks.DETAIL_BYTES)
        self.assertTrue(json.loads(mark[4])["rid_truncated"])

    def test_nothing_is_ever_done_to_a_receiver(self):
        entry, serial = self.receive(32)
        entry.kv_receiver.init(0)
        self.run_pass()
        before = dict(vars(entry.kv_receiver))
        arguments = {"serial": serial, "rid": "rid-32", "room": "32", "phase": 2, "reason": "because"}
        answer = self.ask("fail", **arguments)
        self.assertEqual((answer["ok"], answer["refused"]), (False, "decode_side"))
        self.assertEqual(dict(vars(entry.kv_receiver)), before)
        self.assertEqual(self.scheduler.disagg_decode_transfer_queue.queue, [entry])
        self.assertEqual(self.kinds("REMEDY"), [])


class Roles(DecodeServer):
    def prepare(self):
        pass  # a prefill, to begin with

    def run_pass(self, tick=True):
        if self.scheduler.disagg_decode_prealloc_queue is not None:
            return super().run_pass(tick)
        scheduler._watch.next_tick = 0
        return self.scheduler.process_disagg_prefill_inflight_queue()

    def test_a_scheduler_that_is_given_the_other_role_says_so_and_goes_on(self):
        left_behind = Request("left", NixlKVSender(self.manager, "addr", 40))
        self.scheduler.disagg_prefill_inflight_queue.append(left_behind)
        self.run_pass()
        serial = senders.known(left_behind.disagg_kv_sender).serial
        channel = scheduler._watch.channel
        self.manager = NixlKVManager()
        self.scheduler.become_decode(self.manager)
        self.receive(41)
        self.run_pass()
        roles = [json.loads(mark[4])["role"] for mark in self.kinds("HELLO")]
        self.assertEqual(roles, ["prefill", "decode"])
        self.assertEqual(self.kinds("LEAVE"), [("LEAVE", 40, REMOVED, serial)])
        self.assertEqual(self.kinds("ENTER")[-1][2], 1 | PREALLOC)
        self.assertIs(scheduler._watch.channel, channel)
        self.assertEqual(self.ask("state")["ok"], True)


class Pipelined(DecodeServer):
    def test_the_pass_of_a_pipelined_decode_is_seen_too(self):
        class Stage(Scheduler):
            def process_decode_transfer_queue(self, release_rids):
                return self.disagg_decode_transfer_queue.pop_transferred(release_rids)

        scheduler.wrap_pass(Stage)
        self.scheduler.__class__ = Stage
        entry, _ = self.receive(50)
        self.marks.clear()
        self.scheduler.process_decode_transfer_queue(None)
        self.assertEqual([mark[2] for mark in self.kinds("ENTER")], [1 | PREALLOC])
        self.assertEqual(process.errors, {})
        del entry


if __name__ == "__main__":
    unittest.main()
