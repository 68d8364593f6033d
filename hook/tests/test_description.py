"""What `hello` says of ranks, where releases keep them, and that it fits."""

import json
import unittest
from types import SimpleNamespace
from unittest import mock

from fixture import NixlKVManager, Scheduler

from dislodge_hook import backend, description, marks

REPLICAS = dict(attn_dp_size=1, attn_dp_rank=0, system_dp_size=4, system_dp_rank=3)
"""Two replicas behind a controller, as `CommonKVManager` has them (0.5.10 to 0.5.23)."""


def ranks(manager=None, scheduler=None, arguments=None):
    server = Scheduler(NixlKVManager())
    vars(server.disagg_prefill_bootstrap_queue.kv_manager).update(manager or {})
    vars(server).update(scheduler or {}, server_args=SimpleNamespace(**arguments or {}))
    return description.ranks(server)


class Ranks(unittest.TestCase):
    def test_of_the_manager(self):
        told = ranks(dict(attn_tp_size=4, attn_tp_rank=3, attn_cp_size=2, attn_cp_rank=1, pp_size=2, pp_rank=1, **REPLICAS))
        expected = dict(tp=4, tp_rank=3, cp=2, cp_rank=1, pp=2, pp_rank=1, dp=4, dp_rank=3, nodes=None, node_rank=None)
        self.assertEqual(told, expected)

    def test_of_the_scheduler_and_of_its_parallel_state(self):
        there = dict(attn_tp_rank=3, attn_cp_rank=1, pp_rank=1, dp_rank=2)
        for scheduler in (there, dict(ps=SimpleNamespace(**there))):
            told = ranks(scheduler=scheduler)
            self.assertEqual([told[f"{name}_rank"] for name in ("tp", "cp", "pp", "dp")], [3, 1, 1, 2])

    def test_of_data_parallel_attention_the_attentions_number_counts(self):
        told = ranks(dict(attn_dp_size=2, attn_dp_rank=1, system_dp_size=1, system_dp_rank=0))
        self.assertEqual((told["dp"], told["dp_rank"]), (2, 1))

    def test_a_rank_that_no_source_knows_is_not_made_up(self):
        told = ranks()
        self.assertEqual([told[f"{name}_rank"] for name in ("tp", "cp", "pp", "dp")], [None] * 4)

    def test_nodes_are_told_where_there_are_several(self):
        several, one = ranks(arguments=dict(nnodes=2, node_rank=1)), ranks(arguments=dict(nnodes=1, node_rank=0))
        self.assertEqual((several["nodes"], several["node_rank"]), (2, 1))
        self.assertEqual((one["nodes"], one["node_rank"]), (None, None))


class Length(unittest.TestCase):
    LONGEST = dict(tp=1024, tp_rank=1023, pp=128, pp_rank=127, cp=128, cp_rank=127, dp=1024, dp_rank=1023, nodes=128, node_rank=127)

    def hello(self, sglang):
        server = Scheduler(NixlKVManager())
        values = dict(release=lambda: sglang, class_beside=lambda *_: type("MooncakeKVSender", (), {}), of=lambda _: backend.MOONCAKE,
                      flag_of_class=lambda _: 2, distribution=lambda _: "0.3.13.post1")  # fmt: skip
        patches = [mock.patch.object(backend, name, value) for name, value in values.items()]
        patches += [mock.patch.object(description, "ranks", lambda _: self.LONGEST),
                    mock.patch.object(description, "_number", lambda _: 86400.5)]  # fmt: skip
        for patch in patches:
            patch.start()
            self.addCleanup(patch.stop)
        text = marks.record(description.hello(server, 2**63 - 1, False, "prefill"))
        self.assertLessEqual(len(text), marks.DETAIL_BYTES)
        return json.loads(text)

    def test_the_longest_of_a_release_is_whole(self):
        told = self.hello("0.5.12.post1")
        self.assertEqual({name: told.get(name) for name in self.LONGEST}, self.LONGEST)
        self.assertEqual((told["engine"][:9], told["waiting_timeout"]), ("mooncake-", 86400.5))

    def test_of_a_build_with_a_long_name_the_timeouts_go_first(self):
        told = self.hello("0.5.24.dev1234+g0123456789ab.d20261130")
        self.assertEqual({name: told.get(name) for name in self.LONGEST}, self.LONGEST)
        self.assertNotIn("waiting_timeout", told)


if __name__ == "__main__":
    unittest.main()
