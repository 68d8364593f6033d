"""The control channel: what is not a request of now is refused, and nothing that arrives hurts the server."""

import json
import os
import socket
import unittest

from fixture import FAR, Server, scheduler, senders

from dislodge_hook import chunks, control, marks, process, state


class Channel(Server):
    def refused(self, data):
        reply = self.answer(data)
        self.assertFalse(reply["ok"])
        return reply["refused"]

    def message(self, **changes):
        message = {"protocol": 1, "epoch": 1, "id": 7, "deadline": FAR, "verb": "ping", **changes}
        return json.dumps({name: value for name, value in message.items() if value is not None}).encode()

    def test_ping_tells_passes_and_errors(self):
        process.errors["poll:ValueError"] = 3
        reply = self.ask("ping")
        process.errors.clear()
        self.assertEqual(reply["errors"], {"poll:ValueError": 3})
        self.assertEqual((reply["ok"], reply["epoch"], reply["id"], reply["dropped_replies"]), (True, 1, 7, 0))
        self.assertEqual(reply["passes"], 2)

    def test_the_memfd_says_where_the_channel_is(self):
        channel = scheduler._watch.channel
        with open(f"/proc/self/fd/{channel._memory}", "rb") as memory:
            told = json.load(memory)
        self.assertEqual(told["fd"], channel._theirs.fileno())
        self.assertTrue(os.readlink(f"/proc/self/fd/{channel._memory}").startswith("/memfd:dislodge-hook"))
        self.assertFalse(os.get_inheritable(told["fd"]) or os.get_inheritable(channel._memory))

    def test_what_is_no_request_is_refused_as_malformed(self):
        whole = self.message()
        for data in (b"", b"\xff\x00", whole[:-5], b"[]", b"7", b"[" * 4000, self.message(protocol=2), self.message(epoch=None),
                     self.message(epoch=True), self.message(id="7"), self.message(deadline=-1), self.message(deadline=2**64),
                     self.message(verb=None), self.message(verb=["ping"]), self.message(filler="x" * 4096)):  # fmt: skip
            if data == b"":
                continue  # a SOCK_SEQPACKET message of no bytes is not sent as one by every kernel
            self.assertEqual(self.refused(data), "malformed", data[:40])
        self.assertTrue(self.answer(whole)["ok"])

    def test_a_message_of_the_greatest_length_is_taken(self):
        data = self.message(filler="")
        data = self.message(filler="x" * (control.MESSAGE_BYTES - len(data)))
        self.assertEqual(len(data), control.MESSAGE_BYTES)
        self.assertTrue(self.answer(data)["ok"])

    def test_older_epochs_and_passed_deadlines_are_refused(self):
        self.assertTrue(self.ask("ping", epoch=5)["ok"])
        self.assertEqual(self.refused(self.message(epoch=4)), "stale_epoch")
        self.assertEqual(self.refused(self.message(epoch=9, deadline=1)), "expired")
        self.assertTrue(self.ask("ping", epoch=5)["ok"])

    def test_an_unknown_verb_is_refused(self):
        self.assertEqual(self.refused(self.message(verb="explode")), "unknown_verb")

    def test_a_fault_of_a_verb_is_an_answer(self):
        channel = scheduler._watch.channel
        reply = channel.answer(self.message(), 0, {"ping": lambda request: 1 / 0})
        self.assertEqual((reply["refused"], process.errors), ("internal_error", {"verb:ZeroDivisionError": 1}))
        process.errors.clear()

    def test_one_message_a_pass_and_none_between_ticks(self):
        theirs = scheduler._watch.channel._theirs
        theirs.send(self.message(id=1))
        theirs.send(self.message(id=2))
        self.run_pass()
        self.assertEqual(json.loads(theirs.recv(5000))["id"], 1)
        for _ in range(10):
            self.run_pass(tick=False)
        with self.assertRaises(BlockingIOError):
            theirs.recv(5000)
        self.run_pass()
        self.assertEqual(json.loads(theirs.recv(5000))["id"], 2)

    def test_a_reply_that_does_not_fit_is_dropped_and_counted(self):
        channel = scheduler._watch.channel
        for end in (channel._ours, channel._theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        for _ in range(100):
            channel._theirs.send(self.message())
            self.run_pass()
        self.assertGreater(channel.dropped_replies, 0)
        self.assertEqual(process.errors, {})

    def test_a_pass_that_meets_no_channel_goes_on(self):
        scheduler._watch.channel.close()
        scheduler._watch.channel = None
        self.request(200)
        self.assertEqual(self.run_pass(), [])


class Resynchronisation(Server):
    def test_at_most_64_entries_a_pass(self):
        kept = [self.sender(1000 + index) for index in range(150)]
        live = len(senders.live())
        self.marks.clear()
        self.assertEqual(self.ask("state", epoch=3)["entries"], live)
        counts = [len(self.kinds("ENTRY"))]
        while scheduler._watch.resynchronisation.running:
            self.run_pass(tick=False)  # each pass has its share until it is over
            counts.append(len(self.kinds("ENTRY")))
        self.assertEqual(max(b - a for a, b in zip([0, *counts], counts)), state.ENTRIES_A_PASS)
        self.assertEqual(counts[-1], live)
        kinds = [mark[0] for mark in self.marks]
        self.assertLess(kinds.index("HELLO"), kinds.index("STATE_BEGIN"))
        (end,) = self.kinds("STATE_END")
        self.assertEqual((end[2], json.loads(end[4])), (3, {"entries": live}))
        self.assertEqual({mark[2] for mark in self.kinds("HELLO", "STATE_BEGIN", "ENTRY")}, {3})
        del kept

    def test_an_entry_says_what_is_known_of_a_request(self):
        req = self.request(201, rid="r" * 200)
        req.disagg_kv_sender.abort()
        self.ask("state")
        entry = next(json.loads(mark[4]) for mark in self.kinds("ENTRY") if mark[1] == 201)
        self.assertEqual((entry["backend"], entry["phase"], entry["chunks"], entry["sent_last"]), (1, 2, 0, False))
        self.assertEqual((entry["rid"], entry["rid_truncated"]), ("r" * 128, True))
        self.assertGreater(entry["aborted"], entry["created"])
        self.assertGreater(entry["created"], 0)

    def test_no_request_id_makes_an_entry_too_long(self):
        greatest = 2**63
        for rid in ("r" * 999, "ü" * 999, "\x01" * 999, '"' * 999, "\ud800" * 999, "𝄞" * 999):
            record = senders.Record(greatest, self.manager, greatest, greatest)
            record.phase_since = record.entered = record.aborted = record.dropped = 2**60
            record.sent_chunks = record.sent_pages = record.shared_with = record.cleared_by = 2**24
            record.rid = rid
            detail = marks.record(state.entry(record, chunks.ABANDONED | chunks.ATTACHED_LATE))
            self.assertLessEqual(len(detail), marks.DETAIL_BYTES)
            entry = json.loads(detail)
            self.assertTrue(entry["rid_truncated"] and entry["rid"], entry)
            self.assertLessEqual(len(marks.text(rid)), 4 * (marks.DETAIL_BYTES + 1))

    def test_a_sender_that_ends_in_the_meantime_has_no_entry(self):
        kept = [self.sender(2000 + index) for index in range(100)]
        self.ask("state")
        gone = senders.known(kept[-1]).serial
        del kept[-1]
        self.run_pass()
        self.assertNotIn(gone, [mark[3] for mark in self.kinds("ENTRY")])


if __name__ == "__main__":
    unittest.main()
