"""`fail`: each guard refuses, and the same request without that guard's reason is carried out."""

import gc
import itertools
import types
import unittest
from types import SimpleNamespace

from fixture import FakeKVSender, Server, chunks_of_test, senders, wait_until
from sglang.srt.disaggregation.common.conn import CommonKVSender

from dislodge_hook import backend, chunks, description, importing, patching, process, quiescence, remedy

rooms = itertools.count(50_000)


class Ordering(Server):
    def order(self, req, **changes):
        return self.ask("fail", **self.fail_arguments(req, **changes))

    def refused(self, req, **changes):
        reply = self.order(req, **changes)
        self.assertFalse(reply["ok"], reply)
        return reply["refused"]

    def allowed(self, req=None):
        """The twin: it is failed, in the very pass that read the request, and leaves."""
        req = req or self.request(next(rooms))
        reply = self.order(req)
        self.assertTrue(reply["ok"], reply)
        self.assertNotIn(req, self.scheduler.disagg_prefill_inflight_queue)
        return reply["flag"]


class Guards(Ordering):
    def test_the_flag_fails_the_request_in_the_same_pass(self):
        req = self.request(next(rooms))
        self.manager.request_status.clear()
        self.assertEqual(self.order(req, reason="näh\n" + "x" * 999), {"protocol": 1, "epoch": 1, "id": 7, "ok": True,
                                                                      "flag": "send_failed"})  # fmt: skip
        text = str(req.error)
        self.assertTrue(text.startswith("failed by dislodge: n?h?xxx") and text.isascii() and len(text) == 256, text)
        record = senders.known(req.disagg_kv_sender)
        self.assertEqual([mark[0] for mark in self.kinds("REMEDY", "PHASE", "FAILURE", "LEAVE") if mark[3] == record.serial][-4:],
                         ["REMEDY", "PHASE", "FAILURE", "LEAVE"])

    def test_malformed(self):
        req = self.request(next(rooms))
        for changes in ({"serial": "1"}, {"serial": True}, {"rid": 1}, {"room": 5}, {"phase": "2"}, {"reason": None}):
            self.assertEqual(self.refused(req, **changes), "malformed", changes)
        self.allowed(req)

    def test_unknown_sender(self):
        req = self.request(next(rooms))
        self.assertEqual(self.refused(req, serial=10**9), "unknown_sender")
        arguments = self.fail_arguments(req)
        self.allowed(req)
        del req
        gc.collect()  # the error's traceback holds the sender
        self.assertEqual(self.ask("fail", **arguments)["refused"], "unknown_sender")

    def test_a_sender_that_has_ended_is_unknown(self):
        req = self.request(next(rooms))
        self.manager.request_status[req.disagg_kv_sender.bootstrap_room] = 4
        self.run_pass()
        self.assertEqual(self.refused(req), "unknown_sender")

    def test_identity(self):
        req = self.request(next(rooms), rid="the-rid")
        self.assertEqual(self.refused(req, rid="the-ri"), "rid_mismatch")
        self.assertEqual(self.refused(req, room="1"), "room_mismatch")
        self.assertEqual(self.refused(req, room=f"0{req.disagg_kv_sender.bootstrap_room}"), "room_mismatch")
        self.allowed(req)

    def test_rooms_that_are_no_64_bit_number_match_nothing(self):
        for room in (2**64, -1):
            self.assertEqual(self.refused(self.request(room), room=str(room)), "room_mismatch")
        self.allowed(self.request(2**64 - 1))

    def test_phase(self):
        req = self.request(next(rooms), status=3)
        self.assertEqual(self.refused(req, phase=2), "phase_changed")
        self.allowed(req)

    def test_success_since_the_last_poll(self):
        req = self.request(next(rooms), status=3)
        self.manager.request_status[req.disagg_kv_sender.bootstrap_room] = 4
        self.assertEqual(self.refused(req), "phase_changed")
        self.assertEqual(senders.known(req.disagg_kv_sender).phase, 4)
        self.allowed()

    def test_terminal(self):
        req = self.request(next(rooms))
        senders.known(req.disagg_kv_sender).phase = 4
        self.assertEqual(self.refused(req), "terminal")

    def test_not_in_queue(self):
        req = self.request(next(rooms))
        queue, self.scheduler.disagg_prefill_inflight_queue = self.scheduler.disagg_prefill_inflight_queue, []
        self.assertEqual(self.refused(req), "not_in_queue")
        self.scheduler.disagg_prefill_inflight_queue = queue
        self.run_pass()
        self.allowed(req)

    def test_room_shared(self):
        room = next(rooms)
        req, other = self.request(room), self.sender(room)
        self.assertEqual(self.refused(req), "room_shared")
        del other
        self.allowed(req)

    def test_an_ended_sender_does_not_share(self):
        room = next(rooms)
        req, other = self.request(room), self.sender(room)
        with self.assertRaises(RuntimeError):
            other.failure_exception()
        self.allowed(req)

    def test_chunks_queued_and_working(self):
        req = self.request(next(rooms))
        room = req.disagg_kv_sender.bootstrap_room
        with chunks_of_test(room, queued=1):
            self.assertEqual(self.refused(req), "chunks_queued")
        with chunks_of_test(room, working=1):
            self.assertEqual(self.refused(req), "chunks_working")
        with chunks_of_test(room, abandoned=True):
            self.assertEqual(self.refused(req), "abandoned_handles")
        self.allowed(req)

    def test_after_a_fault_in_what_observes_nothing_is_failed(self):
        class Unhashable:
            room, work = [], None

        req = self.request(next(rooms))
        self.manager.transfer_queues[0].put(Unhashable())
        wait_until(lambda: len(process.errors) == 2)  # in `put`, and in the worker's `get`
        self.assertEqual(self.refused(req), "counts_unknown")
        process.errors.clear()
        process.errors["marker:ImportError"] = 1
        self.allowed(req)
        process.errors.clear()

    def test_attached_late(self):
        req = self.request(next(rooms))
        queue = self.manager.transfer_queues[0]
        setattr(queue, chunks.STATE, None)
        self.assertEqual(self.refused(req), "attached_late")
        setattr(queue, chunks.STATE, chunks.WATCHED)
        self.allowed(req)

    def test_ranks(self):
        manager = self.manager
        for name, reason in (("attn_tp_size", "tensor_parallel"), ("attn_cp_size", "context_parallel"), ("pp_size", "pipeline_parallel")):
            req = self.request(next(rooms))
            setattr(manager, name, 2)
            self.assertEqual(self.refused(req), reason)
            delattr(manager, name)
            self.assertEqual(self.refused(req), "ranks_unknown")
            setattr(self.scheduler, name, 2)  # the scheduler knows, too
            self.assertEqual(self.refused(req), reason)
            setattr(self.scheduler, name, None)
            setattr(manager, name, 1)
            self.allowed(req)

    def test_backend_unproved(self):
        req = self.request(next(rooms))
        record = senders.known(req.disagg_kv_sender)
        for unproved in (backend.MORI, backend.ASCEND, backend.OTHER):
            record.backend = unproved
            self.assertEqual(self.refused(req), "backend_unproved")
        record.backend = backend.NIXL
        self.allowed(req)

    def test_once_per_sender(self):
        req = self.request(next(rooms))
        req.disagg_kv_sender.failure_exception  # noqa: B018  it is there
        record = senders.known(req.disagg_kv_sender)
        arguments = self.fail_arguments(req)
        self.allowed(req)
        self.assertEqual(self.ask("fail", **arguments)["refused"], "already_failed")
        self.assertFalse(record.live)

    def test_no_sender_flag(self):
        facts = self.facts(self.request(next(rooms)))
        self.assertIsNone(remedy.refusal(facts))
        self.assertEqual(remedy.refusal(facts._replace(can_be_flagged=False)), "no_sender_flag")

    def facts(self, req):
        record = senders.known(req.disagg_kv_sender)
        room = str(record.room)
        return remedy.gather(self.scheduler, record, req.disagg_kv_sender, req.rid, room, record.phase)

    def test_each_reason_of_the_contract_is_one_that_a_guard_or_the_channel_gives(self):
        facts = self.facts(self.request(next(rooms)))
        counts = facts.counts
        broken = {
            "already_failed": {"remedied": True}, "unknown_sender": {"live": False}, "room_mismatch": {"asked_room": "x"},
            "not_in_queue": {"in_queue": False}, "rid_mismatch": {"asked_rid": "x"}, "terminal": {"phase": 0},
            "phase_changed": {"succeeded": True}, "room_shared": {"shared_with": 1}, "ranks_unknown": {"cp": None},
            "attached_late": {"counts": counts._replace(late=True)}, "chunks_queued": {"counts": counts._replace(queued=1)},
            "chunks_working": {"counts": counts._replace(working=1)}, "counts_unknown": {"counts": counts._replace(in_flight=None)},
            "transfer_in_flight": {"counts": counts._replace(in_flight=2)}, "tensor_parallel": {"tp": 2},
            "abandoned_handles": {"counts": counts._replace(abandoned=True)}, "context_parallel": {"cp": 2},
            "pipeline_parallel": {"pp": 2}, "backend_unproved": {"proved": False}, "no_sender_flag": {"can_be_flagged": False},
        }  # fmt: skip
        self.assertIsNone(remedy.refusal(facts))
        for reason, change in broken.items():
            self.assertEqual(remedy.refusal(facts._replace(**change)), reason)


class Flags(Ordering):
    """Which flag it is, by what the sender has and its `poll` reads."""

    def test_fake_concludes_and_leaves_no_record_of_failure_in_a_manager_that_never_reads_it(self):
        req = self.request(next(rooms), cls=FakeKVSender)
        self.assertEqual(self.allowed(req), "conclude_state")
        self.assertEqual(self.manager.failure_records, {})

    def era(self, **methods):
        """A NIXL sender as another release has it, wrapped as that release's module would be."""
        module = types.ModuleType(importing.PREFIX + "nixl.conn")
        methods["__module__"] = module.__name__
        module.NixlKVSender = type("NixlKVSender", (CommonKVSender,), methods)
        patching.apply(module)
        return module.NixlKVSender

    def test_conclude_state_where_poll_reads_it_through_another_method(self):
        def poll(self):
            return self._poll_with_status(self.kv_mgr.check_status)

        def _poll_with_status(self, check_status):
            return self.conclude_state if self.conclude_state is not None else check_status(self.bootstrap_room)

        def failure_exception(self):
            raise RuntimeError(self.kv_mgr.failure_records.pop(self.bootstrap_room, None))

        cls = self.era(poll=poll, _poll_with_status=_poll_with_status, failure_exception=failure_exception)
        req = self.request(next(rooms), cls=cls)
        self.assertEqual(self.allowed(req), "conclude_state")
        self.assertEqual(str(req.error), "failed by dislodge: because")
        self.assertEqual(backend.flag_of_class(cls), backend.CONCLUDE_STATE)

    def handles_era(self):
        def __init__(self, mgr, bootstrap_addr, bootstrap_room):
            CommonKVSender.__init__(self, mgr, bootstrap_addr, bootstrap_room)
            self.xfer_handles, self.has_sent = [], False

        def poll(self):
            return 2

        def failure_exception(self):
            raise RuntimeError("NIXL")

        self.states = {}
        self.manager = SimpleNamespace(
            request_status={}, attn_tp_size=1, attn_cp_size=1, pp_size=1, update_status=lambda room, status: None,
            agent=SimpleNamespace(check_xfer_state=lambda handle: self.states[handle]),
        )  # fmt: skip
        self.scheduler.disagg_prefill_bootstrap_queue.kv_manager = self.manager
        return self.era(__init__=__init__, poll=poll, failure_exception=failure_exception)

    def test_without_transfer_queues_each_handle_of_the_room_is_asked(self):
        cls, room = self.handles_era(), next(rooms)
        req, ended = self.request(room, cls=cls), self.sender(room, cls)
        with self.assertRaises(RuntimeError):
            ended.failure_exception()
        ended.xfer_handles = ["old"]
        req.disagg_kv_sender.xfer_handles = ["a", "b"]
        self.states.update(a="DONE", b="ERR", old="PROC")
        self.assertEqual(self.refused(req), "transfer_in_flight")
        counts = quiescence.look(senders.known(req.disagg_kv_sender), req.disagg_kv_sender)
        self.assertEqual(counts.packed(), 1 << 16 | chunks.NO_QUEUES)
        del self.states["old"]
        self.assertEqual(self.refused(req), "counts_unknown")
        self.states["old"] = "DONE"
        req.disagg_kv_sender.has_sent = True
        self.states["b"] = "DONE"
        self.assertEqual(self.refused(req), "phase_changed")  # its next poll says Success
        self.states["b"] = "ERR"
        self.assertEqual(self.allowed(req), "marking_poll")
        self.assertEqual(self.kinds("REMEDY")[-1][2], backend.MARKING_POLL)
        self.assertEqual(self.kinds("PHASE")[-1][1:3], (room, 2 | 0 << 8))

    def test_a_sender_whose_handles_cannot_be_found_is_refused(self):
        cls = self.handles_era()
        req = self.request(next(rooms), cls=cls)
        del req.disagg_kv_sender.xfer_handles
        self.assertEqual(self.refused(req), "counts_unknown")

    def test_a_marking_poll_keeps_nothing_alive(self):
        cls = self.handles_era()
        sender = self.sender(next(rooms), cls)
        record = senders.known(sender)
        remedy.set_flag(record, sender, "")
        self.assertEqual(sender.poll(), 0)
        del sender
        self.assertIsNone(record.reference())


class Ranks(unittest.TestCase):
    def test_the_largest_known_size_counts_and_the_attention_group_before_the_whole(self):
        queue = SimpleNamespace(kv_manager=SimpleNamespace(attn_tp_size=1, server_args=SimpleNamespace(tp_size=8)))
        made = SimpleNamespace(disagg_prefill_bootstrap_queue=queue, attn_cp_size=object(), pp_size=True)
        self.assertEqual(description.sizes(made), (1, None, None))
        made.ps = SimpleNamespace(attn_tp_size=4, attn_cp_size=1, pp_size=2)
        self.assertEqual(description.sizes(made), (4, 1, 2))
        del queue.kv_manager.attn_tp_size, made.ps
        self.assertEqual(description.sizes(made)[0], 8)


if __name__ == "__main__":
    unittest.main()
