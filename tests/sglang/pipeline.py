"""Two stages of a pipeline: what they hand on to each other is the released code's (`managers/scheduler_pp_mixin.py`); batches, which
it exchanges too, are not there. Import it only after `release.load`."""

import sys
import time

import ranked
import stand_ins
from collectives import Channel

# What the mixin imports for batches.
UNUSED = """
    tqdm sglang.srt.distributed.communication_op sglang.srt.layers.attention sglang.srt.layers.attention.linear
    sglang.srt.layers.attention.linear.utils sglang.srt.layers.logits_processor sglang.srt.managers.overlap_utils
    sglang.srt.managers.utils sglang.srt.sampling sglang.srt.sampling.sampling_observer_pp sglang.srt.sampling.sampling_params
""".split()
PARTLY_USED = "sglang.srt.utils.common sglang.srt.layers.dp_attention sglang.srt.distributed.parallel_state".split()


def mixin():
    """The release's own."""
    for name in UNUSED:
        stand_ins.blank(name)
    for name in PARTLY_USED:
        sys.modules[name].__getattr__ = lambda _: stand_ins.Anything()
    # One TP and CP rank: nobody to share with.
    sys.modules["sglang.srt.distributed.communication_op"].attn_cp_tp_broadcast_pyobj = lambda data: data
    from sglang.srt.managers.scheduler_pp_mixin import SchedulerPPMixin

    return SchedulerPPMixin


def make_scheduler(loaded, place, everybody, memory):
    class Scheduler(ranked.Scheduler, mixin()):
        def __init__(self):
            super().__init__(loaded, place, everybody, memory)
            self.pp_group = self.world_group = loaded.parallel.pp_group
            next_stage, last_stage = (place.pp_rank + 1) % place.pp, (place.pp_rank - 1) % place.pp
            ends = [(f"from-{place.pp_rank}-to-{next_stage}", True), (f"from-{last_stage}-to-{place.pp_rank}", False)]
            made = {sends: Channel(place.folder, name, sends) for name, sends in ends[:: 1 if place.pp_rank % 2 else -1]}
            self.next_stage, self.last_stage = made[True], made[False]
            sys.modules[mixin_module()].point_to_point_pyobj = self.point_to_point
            self.transferred = [None] * place.pp

        def point_to_point(self, data, rank, group, source, destination, async_send=False):
            if rank != source:
                return self.last_stage.receive()
            self.next_stage.send(data)
            return []

        def bootstrap_polls(self, reqs):
            """A stand-in for the consensus of stages, which differs between releases: the least of what they poll."""
            return self.everybody.all_reduce_min([req.disagg_kv_sender.poll() for req in reqs])

        def event_loop(self, commands):
            """`event_loop_pp_disagg_prefill`, without batches and what is done for them. The first stage is a turn ahead of the
            other one, and must have handed on what that waits for before it waits for its polls of the bootstrap queue."""
            release_rids, size, is_last = None, place.pp, place.pp_rank == place.pp - 1
            while True:
                for microbatch in range(size):
                    following = (microbatch + 1) % size
                    commands.obey(self.everybody.broadcast(self.new_lines()))
                    if is_last:
                        self.pop_bootstrapped()
                    rids = self.transferred[microbatch] = self._pp_pd_get_prefill_transferred_ids()
                    _, release_rids = self._pp_pd_send_consensus_release_ids(self.transferred, microbatch, release_rids, rids)
                    if not is_last:
                        self.pop_bootstrapped()
                    if self.transferred[following] is not None:
                        release_rids = self._pp_recv_pyobj_from_prev_stage()
                        self.process_disagg_prefill_inflight_queue(release_rids)
                    else:
                        release_rids = None
                    if not is_last:
                        self._pp_send_pyobj_to_next_stage(rids, async_send=True)
                    time.sleep(self.pass_sleep)

    return Scheduler()


def mixin_module():
    return "sglang.srt.managers.scheduler_pp_mixin"
