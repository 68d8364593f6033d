"""The scheduler and the commands of one rank of several. Import it only after `release.load`."""

import queue
import time

import commands
import scheduler
from collectives import Group
from release import pause, until

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.utils import poll_and_all_reduce_attn_cp_tp_group


class Scheduler(scheduler.Scheduler):
    """In step with the other ranks: all learn of a command in the same turn, and take a request from the bootstrap queue in the
    same one, since the polls of that are reduced as well, by the released code."""

    def __init__(self, loaded, place, everybody, memory):
        self.place, self.everybody = place, everybody
        super().__init__(loaded, place.bootstrap_port, memory)
        self.attn_tp_cpu_group = Group(place.folder, f"tp-of-stage-{place.pp_rank}", place.tp_rank, place.tp)
        self.attn_cp_cpu_group = None  # one rank
        self.pass_sleep = 0.004  # each rank keeps a core busy, and so does its decode
        self.lines, self.answers = queue.SimpleQueue(), queue.SimpleQueue()

    def claim_sizes(self, tp, pp, cp):
        """What is claimed is true here."""
        place = self.place
        super().claim_sizes(place.tp, place.pp, cp)
        ranks = dict(tp_rank=place.tp_rank, attn_tp_rank=place.tp_rank, pp_rank=place.pp_rank)
        vars(self.parallel).update(ranks)
        if "ps" in self.names:
            vars(self.ps).update(ranks)
        vars(self).update({name: rank for name, rank in ranks.items() if name in self.names})

    def event_loop(self, commands):
        while True:
            commands.obey(self.everybody.broadcast(self.new_lines()))
            if not self._engine_paused:
                self.pop_bootstrapped()
                self.process_disagg_prefill_inflight_queue()
                self.on_idle()
            time.sleep(self.pass_sleep)

    def new_lines(self):
        lines = []
        while not self.lines.empty():
            lines.append(self.lines.get())
        return lines

    def bootstrap_polls(self, reqs):
        pollers = [req.disagg_kv_sender for req in reqs]
        return poll_and_all_reduce_attn_cp_tp_group(pollers, self.attn_cp_cpu_group, self.attn_tp_cpu_group) if reqs else []


class Commands(commands.Commands):
    def __init__(self, scheduler, decode, second_decode):
        super().__init__(scheduler, decode, second_decode)
        place = scheduler.place
        self.rank = place.pp_rank * place.tp + place.tp_rank
        self.next_room, self.admitted_so_far = place.first_room, 0

    def token(self):
        """The same on every rank, since the request is."""
        self.admitted_so_far += 1
        return str(self.admitted_so_far)

    def obey(self, lines):
        for line in lines:
            answer = queue.SimpleQueue()
            self.scheduler.answers.put(answer)
            self.scheduler.inbox.put((line, answer))
        self.advance()

    def do_only(self, rank, name, *arguments):
        if int(rank) == self.rank:
            return getattr(self, f"do_{name}")(*arguments)

    def do_held(self, rank):
        (req,) = yield from self.admitted(1, self.memory.slot_pages)
        if int(rank) == self.rank:
            self.decode.stop()
            self.send_to_stopped(req)
        else:
            self.scheduler.prefill(req)
        return {"rid": req.rid, "room": str(req.bootstrap_room)}

    def do_crossed(self):
        reqs = yield from self.admitted(2)
        for req in reqs[:: -1 if self.rank % 2 else 1]:
            self.scheduler.park(req)
        return {"rids": [req.rid for req in reqs], "rooms": [str(req.bootstrap_room) for req in reqs]}

    def do_alone(self, rank):
        (req,) = yield from self.admitted(1)
        if int(rank) == self.rank:
            self.scheduler.park(req)
        self.later = req  # the others keep it, as a request that is not prefilled yet
        return {"rid": req.rid}

    def do_late(self, rank, milliseconds):
        if int(rank) == self.rank:
            self.memory.release_takes = int(milliseconds) / 1000
        return {}

    def do_resurrected(self, rank):
        (req,) = yield from self.admitted(1)
        self.scheduler.park(req)
        yield from pause(3.0)  # older than what is compared
        self.scheduler.abort_request(req.rid)
        if int(rank) == self.rank:
            yield from until(lambda: any(req.rid in rids or () for rids in self.scheduler.transferred), "the stage's word")
            req.disagg_kv_sender.kv_mgr.update_status(req.bootstrap_room, KVPoll.Transferring)  # as a worker does
        return {"rid": req.rid}
