"""Chunks of a room: queued, worked on, ended; and what is not known counts against."""

import threading
import unittest

from fixture import NixlKVManager, Server, senders, wait_until
from sglang.srt.disaggregation.common.utils import Chunk, FastQueue

from dislodge_hook import chunks


class Counting(Server):
    def setUp(self):
        super().setUp()
        self.go = threading.Event()
        self.begun = threading.Event()

    def tearDown(self):
        self.go.set()
        super().tearDown()

    def hold(self, manager):
        self.begun.set()
        self.go.wait(5)

    def send(self, room, work):
        sender = self.sender(room)
        sender.init(1)
        sender.send([1], work=work)
        return sender

    def settled(self, room):
        wait_until(lambda: chunks.of(room)[:2] == (0, 0))

    def test_a_chunk_is_queued_then_worked_on_then_over(self):
        first, second = self.send(100, self.hold), self.send(101, None)
        self.begun.wait(5)
        self.assertEqual(chunks.of(100), (0, 1, False))
        self.assertEqual(chunks.of(101), (1, 0, False))
        self.go.set()
        self.settled(100)
        self.settled(101)
        ours = [mark for mark in self.kinds("CHUNK_QUEUED", "WORK_BEGIN", "WORK_END") if mark[1] == 101]
        self.assertEqual([mark[:3] for mark in ours],
                         [("CHUNK_QUEUED", 101, 1), ("WORK_BEGIN", 101, 1 << 16), ("WORK_END", 101, 0)])
        del first, second

    def test_a_mark_of_a_chunk_has_the_number_of_its_queue(self):
        first, second = self.send(130, None), self.send(131, None)
        self.settled(130)
        self.settled(131)
        numbers = {room: {mark[3] for mark in self.kinds("CHUNK_QUEUED", "WORK_BEGIN", "WORK_END") if mark[1] == room}
                   for room in (130, 131)}
        other = FastQueue()
        other.put(Chunk(132, None))
        other.get()
        other.put(None)
        other.get()  # the worker is back
        numbers[132] = {mark[3] for mark in self.kinds("CHUNK_QUEUED", "WORK_BEGIN") if mark[1] == 132}
        self.assertEqual([len(found) for found in numbers.values()], [1, 1, 1])
        self.assertEqual(numbers[130], numbers[131])
        self.assertTrue(0 not in numbers[130] | numbers[132] and numbers[130] != numbers[132], numbers)
        del first, second

    def test_a_worker_that_puts_its_chunk_back_never_shows_an_idle_room(self):
        def defer(manager):
            manager.transfer_queues[0].put(Chunk(102, self.hold))

        sender = self.send(102, defer)
        self.begun.wait(5)
        ours = [mark[2] for mark in self.marks if mark[1] == 102 and mark[0] in ("CHUNK_QUEUED", "WORK_BEGIN", "WORK_END")]
        self.assertEqual(ours, [1, 1 << 16, 1 | 1 << 16, 1, 1 << 16])
        del sender

    def failing(self, post):
        def work(manager):
            if post:
                manager.agent.transfer("handle")
            raise RuntimeError("the worker's")

        return work

    def test_an_error_after_a_post_abandons_the_room_for_good(self):
        sender = self.send(103, self.failing(post=True))
        self.settled(103)
        self.assertTrue(chunks.of(103)[2])
        del sender
        self.run_pass()
        again = self.send(103, None)
        self.settled(103)
        self.assertTrue(chunks.of(103)[2])
        self.assertIn(("WORK_END", 103, 1 << 32), [mark[:3] for mark in self.marks])
        del again

    def test_an_error_before_anything_was_posted_abandons_nothing(self):
        sender = self.send(104, self.failing(post=False))
        self.settled(104)
        self.assertFalse(chunks.of(104)[2])
        again = self.send(104, lambda manager: manager.agent.transfer("handle"))  # the old exception is still noted
        self.settled(104)
        self.assertFalse(chunks.of(104)[2])
        del sender, again

    def test_any_error_counts_where_posts_are_not_seen(self):
        seen = chunks._posts_seen
        chunks._posts_seen = False
        try:
            sender = self.send(105, self.failing(post=False))
            self.settled(105)
            self.assertTrue(chunks.of(105)[2])
        finally:
            chunks._posts_seen = seen
        del sender

    def test_an_abort_during_the_work_is_no_error_of_the_chunk(self):
        def posting(manager):
            manager.agent.transfer("handle")
            self.hold(manager)

        sender = self.send(106, posting)
        self.begun.wait(5)
        sender.abort()
        self.go.set()
        self.settled(106)
        self.assertFalse(chunks.of(106)[2])

    def test_abandoned_rooms_are_bounded_but_not_those_with_a_sender(self):
        limit, chunks.ABANDONED_ROOMS = chunks.ABANDONED_ROOMS, 3
        try:
            chunks._abandoned.clear()
            sender = self.sender("kept")
            for room in ("kept", "a", "b", "c", "d"):
                chunks._abandon(room)
            self.assertTrue(chunks.of("kept")[2])
            self.assertFalse(chunks.of("a")[2])
            self.assertTrue(chunks.of("d")[2])
        finally:
            chunks.ABANDONED_ROOMS = limit
            for room in list(chunks._abandoned):
                chunks._room(room).abandoned = False
                chunks._tidy(room)
            chunks._abandoned.clear()
        del sender

    def test_an_idle_room_is_not_remembered(self):
        sender = self.send(107, None)
        self.settled(107)
        wait_until(lambda: 107 not in chunks._rooms)
        del sender


class AttachedLate(Server):
    """A queue as it is when the hook comes: not marked as watched; its worker may be inside the old `get`."""

    def late_queue(self, *held):
        queue = FastQueue()
        setattr(queue, chunks.STATE, None)
        for room in held:
            queue._buf.append(Chunk(room))
        return queue

    def late(self, queue):
        manager = NixlKVManager.__new__(NixlKVManager)
        manager.transfer_queues = [queue]
        return chunks.late(manager)

    def test_late_until_the_worker_calls_get_on_an_empty_queue(self):
        queue = self.late_queue()
        self.assertTrue(self.late(queue))
        chunks.before_get(queue)
        self.assertFalse(self.late(queue))

    def test_late_until_what_was_queued_before_has_been_taken(self):
        queue = self.late_queue(110, 110)
        queue.put(Chunk(111))
        queue.get()
        self.assertTrue(self.late(queue))
        self.assertEqual(chunks.of(111), (1, 0, False))
        queue.get()
        self.assertFalse(self.late(queue))
        self.assertEqual(chunks.of(111), (1, 0, False))
        queue.get()
        self.assertEqual(chunks.of(111), (0, 1, False))
        queue.put(Chunk(112))
        queue.get()
        self.assertEqual((chunks.of(110), chunks.of(111)), ((0, 0, False), (0, 0, False)))

    def test_a_chunk_that_the_old_get_took_is_not_queued_for_ever_and_its_end_is_unknown(self):
        queue = self.late_queue()
        queue.put(Chunk(113))
        queue._buf.popleft()  # the worker, inside the old `get`
        self.assertTrue(self.late(queue))
        chunks.before_get(queue)
        self.assertFalse(self.late(queue))
        self.assertEqual(chunks.of(113), (0, 0, True))

    def old_get(self, queue):
        """A worker inside the `get` from before the hook."""
        taken = []
        threading.Thread(target=lambda: taken.append(FastQueue.get.__wrapped__(queue)), daemon=True).start()
        return taken

    def found(self, *queues, **attributes):
        from types import SimpleNamespace

        chunks.found(SimpleNamespace(transfer_queues=queues, **attributes), FastQueue.get.__wrapped__)

    def test_not_late_while_the_worker_waits_in_the_old_get_of_an_empty_queue(self):
        queue, other = self.late_queue(), self.late_queue()
        taken = self.old_get(queue)
        wait_until(lambda: queue._cond._waiters)
        self.found(queue, other)
        self.assertFalse(self.late(queue))
        self.assertTrue(self.late(other))  # no worker was seen
        queue.put(Chunk(114))
        self.assertTrue(self.late(queue))
        wait_until(lambda: taken)
        self.assertTrue(self.late(queue))
        self.assertEqual(chunks.of(114), (1, 0, False))
        chunks.before_get(queue)
        self.assertFalse(self.late(queue))
        self.assertEqual(chunks.of(114), (0, 0, True))

    def test_late_while_the_queue_holds_what_was_not_counted(self):
        queue = self.late_queue(115)
        self.found(queue)
        self.assertTrue(self.late(queue))

    def test_an_error_from_before_the_hook_abandons_its_room(self):
        self.found(exceptions={116: ValueError()})
        self.assertTrue(chunks.of(116)[2])

    def test_senders_from_before_the_hook_are_found_where_the_scheduler_keeps_them(self):
        from fixture import Request, scheduler
        from types import SimpleNamespace

        found = []
        for place in ("bootstrap", "waiting", "running"):
            sender = self.sender(f"room-{place}")
            record = senders.known(sender)
            senders._alive.pop(record.serial), senders._rooms.pop(record.room)
            sender._dislodge = None
            found.append(sender)
        self.scheduler.disagg_prefill_bootstrap_queue.queue.append(Request("b", found[0]))
        self.scheduler.waiting_queue = [Request("w", found[1]), SimpleNamespace(disagg_kv_sender=None)]
        self.scheduler.running_batch = SimpleNamespace(reqs=[Request("r", found[2])])
        scheduler.adopt(self.scheduler)
        self.assertEqual([senders.known(sender).created for sender in found], [0, 0, 0])


if __name__ == "__main__":
    unittest.main()
