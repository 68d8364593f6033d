"""Mooncake's and mori's senders and managers: which end of a chunk proves that nothing is written any more."""

import threading
import unittest
from unittest import mock

from fixture import Request, Scheduler, Server, chunks, scheduler, senders, wait_until
from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager, MooncakeKVSender
from sglang.srt.disaggregation.mori.conn import MoriKVManager, MoriKVSender

import sglang
from dislodge_hook import backend, description, wrappers

PROVED = "0.5.22"


class Engine(Server):
    """A server of this backend's stand-ins, on a release that says `version` of itself."""

    version = PROVED
    manager_class, sender_class = MooncakeKVManager, MooncakeKVSender

    def setUp(self):
        version = mock.patch.object(sglang, "__version__", self.version)
        version.start()
        self.addCleanup(version.stop)
        before = chunks._posts_seen, chunks._settles
        chunks._posts_seen = chunks._settles = None  # one backend a process; here there are several
        self.addCleanup(lambda: (setattr(chunks, "_posts_seen", before[0]), setattr(chunks, "_settles", before[1])))
        super().setUp()
        chunks._posts_seen = chunks._settles = None
        self.manager = self.manager_class()
        self.scheduler = Scheduler(self.manager)
        self.run_pass()
        self.go, self.begun = threading.Event(), threading.Event()
        self.addCleanup(self.go.set)

    def send(self, room, work=None):
        sender = self.sender(room, self.sender_class)
        sender.init(1)
        sender.send([1], **({"work": work} if work else {}))
        return sender

    def in_queue(self, sender):
        room = sender.bootstrap_room
        self.manager.request_status[room] = 2
        req = Request(f"rid-{room}", sender)
        self.scheduler.disagg_prefill_inflight_queue.append(req)
        self.run_pass()
        return req

    def settled(self, room):
        wait_until(lambda: chunks.of(room)[:2] == (0, 0))
        return chunks.of(room)

    def hold(self, manager):
        self.begun.set()
        self.go.wait(5)
        return 0


def write(status):
    def work(manager):
        manager.engine.status = status
        return manager.engine.batch_transfer_sync("peer", [1], [2], [3])

    return work


class Mooncake(Engine):
    def test_a_send_behind_a_decorator_is_marked_with_its_pages(self):
        sender = self.sender(300, MooncakeKVSender)
        sender.init(5)
        sender.send([1, 2, 3])
        sender.send(kv_indices=[4, 5])
        serial = senders.known(sender).serial
        self.assertEqual(self.kinds("SEND"), [("SEND", 300, 3, serial), ("SEND", 300, 2 | 1 << 32, serial)])

    def test_a_write_that_returned_0_is_over_and_one_that_was_given_up_is_not(self):
        first, second = self.send(301, write(0)), self.send(302, write(-1))
        self.assertEqual(self.settled(301), (0, 0, False))
        self.assertEqual(self.settled(302), (0, 0, True))
        self.assertIn(("WORK_END", 302, 1 << 32), [mark[:3] for mark in self.marks])
        del first, second

    def test_a_status_that_the_worker_does_not_look_at_counts_all_the_same(self):
        def unchecked(manager):  # the return of maybe_send_extra until 0.5.18
            write(-1)(manager)
            return 0

        sender = self.send(303, unchecked)
        self.assertEqual(self.settled(303), (0, 0, True))
        del sender

    def test_a_chunk_that_fails_before_it_posts_leaves_nothing(self):
        sender = self.send(304, lambda manager: -1)  # its session had failed before
        self.assertEqual(self.settled(304), (0, 0, False))
        del sender

    def test_a_write_of_an_executor_counts_for_every_chunk_in_work(self):
        def elsewhere(manager):
            self.begun.wait(5)
            return manager.executor.submit(write(-1), manager).result() and 0

        first, second = self.send(306, self.hold), self.send(307, elsewhere)
        self.assertEqual(self.settled(307), (0, 0, True))
        self.go.set()
        self.assertEqual(self.settled(306), (0, 0, True))
        del first, second

    def test_a_worker_that_died_works_for_ever(self):
        def dies(manager):
            write(0)(manager)
            raise SystemExit  # as quiet as a thread can end; the server's is a RuntimeError

        sender = self.send(308, dies)
        wait_until(lambda: len(self.kinds("WORK_BEGIN")))
        req = self.in_queue(sender)
        self.assertEqual(self.ask("fail", **self.fail_arguments(req))["refused"], "chunks_working")

    def test_a_sender_that_posted_nothing_is_failed_by_the_flag_that_its_poll_reads(self):
        req = self.in_queue(self.sender(310, MooncakeKVSender))
        self.assertEqual(self.ask("fail", **self.fail_arguments(req))["flag"], "conclude_state")
        self.assertEqual(self.scheduler.disagg_prefill_inflight_queue, [])
        self.assertIn("because", str(req.error))
        self.assertEqual([mark[1] for mark in self.kinds("REMEDY", "FAILURE", "LEAVE")], [310, 310, 310])

    def test_a_sender_is_not_failed_after_a_write_that_was_given_up(self):
        sender = self.send(312, write(-1))
        self.settled(312)
        req = self.in_queue(sender)
        self.assertEqual(self.ask("fail", **self.fail_arguments(req))["refused"], "abandoned_handles")

    def test_the_engines_other_distributions_are_found(self):
        def version(name):
            return "0.3.13" if name == "mooncake-transfer-engine-non-cuda" else None

        with mock.patch.object(backend, "distribution", version):
            hello = description.hello(self.scheduler, 0, False, "prefill")
        self.assertEqual(hello["engine"], "mooncake-transfer-engine-non-cuda 0.3.13")
        self.assertEqual((hello["backend"], hello["flag"], hello["counts"]), ("mooncake", "conclude_state", "queues"))

    def test_an_engine_whose_calls_are_not_known_abandons_on_any_error(self):
        class Other:
            def batch_transfer_sync(self, *_):
                return 0

        self.manager.engine = Other()
        self.assertFalse(wrappers.wrap_posts(self.manager))


class UnprovedRelease(Engine):
    version = "0.5.99"

    def test_each_chunk_that_posted_leaves_its_room_abandoned(self):
        posted, silent = self.send(320, write(0)), self.send(321, lambda manager: 0)
        self.assertEqual(self.settled(320), (0, 0, True))
        self.assertEqual(self.settled(321), (0, 0, False))
        req = self.in_queue(posted)
        self.assertEqual(self.ask("fail", **self.fail_arguments(req))["refused"], "abandoned_handles")
        del silent

    def test_what_ran_before_the_hook_came_is_unknown_too(self):
        sender = self.sender(322, MooncakeKVSender)
        senders.known(sender).created = 0
        scheduler.find_workers(self.manager)
        self.assertTrue(chunks.of(322)[2])


    def test_a_sender_that_sent_nothing_is_not_failed_either(self):
        req = self.in_queue(self.sender(323, MooncakeKVSender))
        self.assertEqual(self.ask("fail", **self.fail_arguments(req))["refused"], "backend_unproved")

    def test_a_release_that_cannot_be_told_is_not_proved(self):
        with mock.patch.object(backend, "release", lambda: None):
            self.assertFalse(backend.proved(backend.MOONCAKE))
            self.assertTrue(backend.proved(backend.NIXL))


class Mori(Engine):
    manager_class, sender_class = MoriKVManager, MoriKVSender

    def test_its_queues_are_counted_and_every_chunk_leaves_its_room_abandoned(self):
        sender = self.send(330)
        self.assertEqual(self.settled(330), (0, 0, True))
        steps = [mark[0] for mark in self.kinds("CHUNK_QUEUED", "WORK_BEGIN", "WORK_END")]
        self.assertEqual(steps, ["CHUNK_QUEUED", "WORK_BEGIN", "WORK_END"])
        self.assertEqual(description.hello(self.scheduler, 0, False, "prefill")["counts"], "queues")
        del sender

    def test_it_is_not_failed(self):
        req = self.in_queue(self.sender(331, MoriKVSender))
        self.assertEqual(self.ask("fail", **self.fail_arguments(req))["refused"], "backend_unproved")

    def test_decodes_abort_is_marked(self):
        sender = self.sender(332, MoriKVSender)
        self.manager._handle_abort_message([b"ABORT", b"332"])
        self.assertIn(("PEER_ABORT", 332, 1, 0), self.marks)
        del sender


if __name__ == "__main__":
    unittest.main()
