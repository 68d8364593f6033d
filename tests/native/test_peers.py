"""The peers on every engine of prepare.py's DEFAULT: `python3 -m unittest -v test_peers` in this folder.

`DISLODGE_TEST_NATIVE` may name the test-bed's folder; otherwise it is target/native.
"""

import json
import os
import subprocess
import sys
import tempfile
import unittest
from contextlib import contextmanager
from pathlib import Path

from fake_verbs import Device
from peers import NoAnswer, Pair

HERE = Path(__file__).resolve().parent
PAGES = [0, 1, 2, 3]
BIG = ("--page", 1 << 20, "--pages", 64)  # more than the sockets between two processes hold
bed = None


def setUpModule():
    global bed
    into = os.environ.get("DISLODGE_TEST_NATIVE") or HERE.parents[1] / "target" / "native"
    made = subprocess.run([sys.executable, str(HERE / "prepare.py"), "--verbs", "--into", str(into)], stdout=subprocess.PIPE, check=True)
    bed = json.loads(made.stdout.splitlines()[-1])


class Engines(unittest.TestCase):
    def each(self, engine, *arguments):
        """For every version the context of a pair; what fails says which."""
        return [self.pair(name, engine, arguments) for name in bed["engines"] if name.startswith(engine)]

    @contextmanager
    def pair(self, name, engine, arguments):
        environment = bed["engines"][name]["environment"]
        with self.subTest(name), Pair(engine, *arguments, python=bed["python"], environment=environment) as pair:
            yield pair


class Nixl(Engines):
    def test_a_transfer_arrives_with_its_notification(self):
        for pairing in self.each("nixl"):
            with pairing as pair:
                for form in ("create", "prepped"):
                    pair.decode.ask("clear")
                    made = pair.prefill.ask("make", room=7, pages=PAGES, form=form, notification_hex="00ff37")
                    pair.prefill.ask("post", handle=made["handle"])
                    self.assertEqual(pair.prefill.ask("poll", handle=made["handle"], within=20)["status"], "DONE")
                    self.assertEqual(pair.decode.ask("notifications", within=20)["notifications"], ["00ff37"])
                    self.assertTrue(pair.decode.ask("check", pages=PAGES)["ok"])
                    self.assertIn("released", pair.prefill.ask("release", handle=made["handle"]))

    def test_a_transfer_to_a_stopped_decode_is_in_progress_until_it_goes_on(self):
        for pairing in self.each("nixl", *BIG):
            with pairing as pair:
                warm(pair)
                made = pair.prefill.ask("make", room=8, pages=list(range(64)))
                pair.decode.stop()
                pair.prefill.ask("post", handle=made["handle"])
                polling = pair.prefill.send("poll", handle=made["handle"], within=2, on="worker")
                self.assertGreater(len(pair.prefill.ask("notifications")), 0)  # answered while the worker polls
                self.assertEqual(pair.prefill.answer(polling)["status"], "PROC")
                pair.decode.go_on()
                self.assertEqual(pair.prefill.ask("poll", handle=made["handle"], within=20)["status"], "DONE")

    def test_a_thousand_handles_can_be_leaked(self):
        for pairing in self.each("nixl"):
            with pairing as pair:
                leaked = pair.prefill.ask("leak", count=1000, pages=[0], notification_size=4096)
                self.assertEqual(leaked["handles"], 1000)
                self.assertNotEqual(leaked["first"], leaked["last"])


class Mooncake(Engines):
    def test_a_transfer_arrives(self):
        for pairing in self.each("mooncake"):
            with pairing as pair:
                self.assertEqual(pair.prefill.ask("transfer", pages=PAGES)["code"], 0)
                self.assertEqual(pair.prefill.ask("transfer", pages=[4], kind="single", on="worker")["code"], 0)
                batch = pair.prefill.ask("submit", page=5)["batch"]
                self.assertEqual(pair.prefill.ask("poll", batch=batch, within=20)["code"], 1)
                self.assertTrue(pair.decode.ask("check", pages=[*PAGES, 4, 5], within=20)["ok"])

    def test_a_transfer_to_a_stopped_decode_ends_when_it_goes_on(self):
        for pairing in self.each("mooncake", *BIG):
            with pairing as pair:
                pair.decode.stop()
                writing = pair.prefill.send("transfer", pages=list(range(64)), on="worker")
                with self.assertRaises(NoAnswer):
                    pair.prefill.answer(writing, patience=2)
                pair.decode.go_on()
                self.assertEqual(pair.prefill.answer(writing)["code"], 0)

    def test_a_transfer_to_a_killed_decode_fails(self):
        for pairing in self.each("mooncake"):
            with pairing as pair:
                pair.decode.end()
                self.assertEqual(pair.prefill.ask("transfer", pages=PAGES)["code"], -1)


class Verbs(Engines):
    """Mooncake's rdma transport on the stand-in for an RDMA device."""

    def each(self):
        return [self.pair(name) for name in bed["engines"] if name.startswith("mooncake") and name != "mooncake-0.3.9"]

    @contextmanager
    def pair(self, name):
        with self.subTest(name), tempfile.TemporaryDirectory() as folder:
            device = Device(f"{folder}/state")
            environment = {**bed["engines"][name]["verbs"], **device.environment(), "MC_TRANSFER_TIMEOUT": "5"}
            arguments = ("--protocol", "rdma", "--device", "fake0")
            with Pair("mooncake", *arguments, python=bed["python"], environment=environment) as pair:
                yield pair, device

    def test_pages_arrive_by_work_requests(self):
        for pairing in self.each():
            with pairing as (pair, device):
                self.assertEqual(pair.prefill.ask("transfer", pages=PAGES)["code"], 0)
                self.assertTrue(pair.decode.ask("check", pages=PAGES)["ok"])
                self.assertEqual(device.counters(), {"posted": 4, "completed": 4, "failed": 0})

    def test_a_stalled_write_is_done_when_the_device_goes_on_even_after_mooncake_gave_up(self):
        for pairing in self.each():
            with pairing as (pair, device):
                device.stall()
                self.assertEqual(pair.prefill.ask("transfer", pages=PAGES)["code"], -1)
                self.assertFalse(pair.decode.ask("check", pages=PAGES)["ok"])
                device.ok()
                self.assertTrue(pair.decode.ask("check", pages=PAGES, within=20)["ok"])

    def test_one_failed_completion_is_tried_again_and_many_fail_the_transfer(self):
        for pairing in self.each():
            with pairing as (pair, device):
                device.fail(count=1)
                self.assertEqual(pair.prefill.ask("transfer", pages=[0])["code"], 0)
                self.assertGreaterEqual(device.counters()["failed"], 1)
                device.fail(count=1000)
                self.assertEqual(pair.prefill.ask("transfer", pages=[1])["code"], -1)

    def test_a_decode_killed_under_a_stalled_write_completes_it_with_an_error(self):
        for pairing in self.each():
            with pairing as (pair, device):
                device.stall()
                writing = pair.prefill.send("transfer", pages=PAGES, on="worker")
                with self.assertRaises(NoAnswer):
                    pair.prefill.answer(writing, patience=1)
                pair.decode.end()
                device.ok()
                self.assertEqual(pair.prefill.answer(writing)["code"], -1)
                self.assertGreaterEqual(device.counters()["failed"], 1)


def warm(pair):
    """A first transfer: what comes after it finds the connection made."""
    made = pair.prefill.ask("make", room=1, pages=[0])
    pair.prefill.ask("post", handle=made["handle"])
    pair.prefill.ask("poll", handle=made["handle"], within=20)


if __name__ == "__main__":
    unittest.main()
