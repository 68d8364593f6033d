"""The commands of `server.py`. Each runs on the scheduler's thread; one that has to wait is a generator that goes on once a
pass. Nothing here writes to a sender or its manager: requests get pinned through public calls alone."""

import inspect
import os
import time
from types import SimpleNamespace

import backends
from memory import PAGES, POISON, pattern
from release import pause, until
from scheduler import POLL, KVPoll

IN_FLIGHT = 0.3  # seconds for a posted write to fill the sockets of a stopped peer


class Commands:
    def __init__(self, scheduler, decode, second_decode):
        self.scheduler, self.memory = scheduler, scheduler.memory
        self.decode, self.second_decode = decode, second_decode
        self.peers = {}  # rid -> the decode process that receives it
        self.rooms = {}  # rid -> room
        self.first = None  # rid of the last dup_inflight's first request
        self.later = None  # a request that was bootstrapped with it and is prefilled after it
        self.next_room = int(time.time()) * 1000

    def advance(self):
        """Once a pass: begins new commands, lets those that wait go on."""
        scheduler = self.scheduler
        while not scheduler.inbox.empty():
            line, answer = scheduler.inbox.get()
            scheduler.running.append((self.start(line), answer))
        for command in list(scheduler.running):
            steps, answer = command
            try:
                next(steps)
                continue
            except StopIteration as end:
                answer.put(end.value)
            except Exception as error:
                answer.put({"error": repr(error)})
            scheduler.running.remove(command)

    def start(self, line):
        name, *arguments = line.split()
        command = getattr(self, "do_" + name, None)
        if command is None:
            return {"error": f"unknown command: {name}"}
        result = command(*arguments)
        return (yield from result) if inspect.isgenerator(result) else result

    # The steps that the commands share.

    def admit(self, room=None, pages=PAGES, peer=None, fake=False, told=()):
        """A new request in the bootstrap queue; its decode is told to expect it, and how, unless `peer` is False."""
        if room is None:
            self.next_room += 1
            room = self.next_room
        req = self.scheduler.add_to_bootstrap_queue(f"req-{room}-{os.urandom(3).hex()}", room, pages, fake)
        self.rooms[req.rid] = room
        if peer is not False and not fake:
            self.peers[req.rid] = peer or self.decode
            self.peers[req.rid].expect(room, pages, *told)
        return req

    def bootstrapped(self, *reqs):
        waiting, failed = self.scheduler.waiting_queue, self.scheduler.finished
        yield from until(lambda: all(req in waiting or req.rid in failed for req in reqs), "the bootstrap")
        for req in reqs:
            if req.rid in failed:
                raise RuntimeError(f"{req.rid} did not bootstrap")
            waiting.remove(req)

    def manager(self):
        return self.scheduler.disagg_prefill_bootstrap_queue.kv_manager

    def admitted(self, count, pages=PAGES):
        reqs = [self.admit(pages=pages) for _ in range(count)]
        yield from self.bootstrapped(*reqs)
        return reqs

    def send_to_stopped(self, req):
        """The request's pages are read by an unfinished write from now on."""
        self.memory.written_from.add(req.rid)
        self.scheduler.prefill(req)

    def in_flight(self, req):
        manager = req.disagg_kv_sender.kv_mgr
        queues = backends.transfer_queues(manager)
        if queues and hasattr(manager, "agent"):  # NIXL's worker says that it has begun
            yield from until(lambda: req.disagg_kv_sender.poll() == KVPoll.Transferring, "the transfer worker")
        elif queues:
            room = req.bootstrap_room
            yield from until(lambda: all(chunk.room != room for queue in queues for chunk in queue._buf), "the transfer worker")
        yield from pause(IN_FLIGHT)

    def ended(self, rid):
        yield from until(lambda: rid in self.scheduler.finished, f"the end of {rid}")

    def result(self, rid):
        peer = self.peers.get(rid)
        return peer and peer.results.get(self.rooms[rid])

    # Requests.

    def do_healthy(self, count="1", size="small"):
        good = 0
        for _ in range(int(count)):
            (req,) = yield from self.admitted(1, self.memory.slot_pages if size == "large" else PAGES)
            rid = req.rid
            self.scheduler.prefill(req)
            del req
            yield from self.ended(rid)
            yield from until(lambda: self.result(rid), "the decode's answer")
            good += self.scheduler.finished[rid]["type"] == "length" and self.result(rid)["data"]
        return {"asked": int(count), "good": good}

    def do_dup(self, room):
        first = self.admit(int(room))
        second = self.admit(int(room), peer=False)
        yield from self.bootstrapped(first, second)
        self.scheduler.prefill(first)
        yield from self.ended(first.rid)
        self.scheduler.prefill(second)
        return {"first": first.rid, "second": second.rid}

    def do_dup_inflight(self, room, second_is="sent"):
        first = self.admit(int(room), self.memory.slot_pages)
        second = self.admit(int(room), peer=False)
        yield from self.bootstrapped(first, second)
        self.decode.stop()
        self.send_to_stopped(first)
        yield from self.in_flight(first)
        self.first, self.later = first.rid, None
        if second_is == "later":
            self.later = second
        elif second_is == "unsent":
            self.scheduler.park(second)
        else:
            self.scheduler.prefill(second)
        return {"first": first.rid, "second": second.rid}

    def do_end_first(self):
        self.go_on(self.decode)
        yield from self.ended(self.first)
        if self.later:
            self.scheduler.prefill(self.later)
            self.later = None
        return {"first": self.first, "reason": self.scheduler.finished[self.first]["type"]}

    def do_park(self, count="1", size="small"):
        reqs = yield from self.admitted(int(count), self.memory.slot_pages if size == "large" else PAGES)
        for req in reqs:
            self.scheduler.park(req)
        return {"rids": [req.rid for req in reqs]}

    def do_admit(self, count="1"):
        """Requests whose decode is told of them, and no more."""
        return {"rids": [self.admit().rid for _ in range(int(count))]}

    def do_send(self, rid):
        """A parked request's pages are sent after all."""
        req = next(req for req in self.scheduler.disagg_prefill_inflight_queue if req.rid == rid)
        self.scheduler.send_last_chunk(req, req.pages())
        return {"rid": rid}

    def do_unpark(self, rid):
        req = next(req for req in self.scheduler.disagg_prefill_inflight_queue if req.rid == rid)
        self.decode.stop()
        self.memory.written_from.add(rid)
        self.scheduler.send_last_chunk(req, req.pages())
        yield from self.in_flight(req)
        return {"decode": self.decode.pid}

    def do_broken(self, how):
        """The decode named an aux record that it has never registered: the worker posts the pages' transfer, cannot make the
        record's, and gives the chunk up."""
        if how not in ("alone", "paused", "shared"):
            raise ValueError(how)
        first = self.admit(pages=self.memory.slot_pages, told=["wrong_aux"])
        other = self.admit(first.bootstrap_room, peer=False) if how == "shared" else self.admit(peer=self.second_decode)
        yield from self.bootstrapped(first, other)
        self.decode.stop()
        self.send_to_stopped(first)
        self.first, self.later = first.rid, other
        if how == "paused":
            yield  # one pass sees the request in the queue
            self.scheduler.pause_generation(SimpleNamespace(mode="in_place"))
            if first.rid in self.scheduler.finished:
                raise RuntimeError("this release's worker gives a chunk up too soon for that")
        else:
            yield from self.ended(first.rid)
        return {"first": first.rid, "other": other.rid, "room": str(first.bootstrap_room)}

    def do_next(self):
        later, self.later = self.later, None
        self.scheduler.prefill(later)
        return {"rid": later.rid}

    def do_stop(self, count="1"):
        reqs = yield from self.admitted(int(count), self.memory.slot_pages)
        self.decode.stop()
        for req in reqs:
            self.send_to_stopped(req)
        if reqs:
            yield from self.in_flight(reqs[0])
        return {"decode": self.decode.pid, "rids": [req.rid for req in reqs]}

    def do_blocked(self, count="1", beside="nobody"):
        """Victims behind a culprit in the same transfer queue; another room, sent before, is stuck in the next queue."""
        queues = len(backends.transfer_queues(self.manager()))
        if not queues:
            raise RuntimeError("this release has no transfer queues")
        # Until 0.5.16 the room chooses the queue, since then the decode's port: with more queues than one the victims
        # can only be sure to share the culprit's where they share both.
        peer = self.second_decode if queues == 1 else self.decode
        base = self.next_room + queues - self.next_room % queues
        culprit = self.admit(base, self.memory.slot_pages)
        others = [self.admit(base + 1, self.memory.slot_pages)] if beside == "beside" else []
        victims = [self.admit(base + (n + 1) * queues, peer=peer) for n in range(int(count))]
        self.next_room = base + (len(victims) + 1) * queues
        yield from self.bootstrapped(culprit, *others, *victims)
        self.decode.stop()
        for req in (*others, culprit):
            self.send_to_stopped(req)
            yield from self.in_flight(req)
        for victim in victims:
            self.scheduler.prefill(victim)
        return {"culprit": culprit.rid, "room": str(culprit.bootstrap_room), "others": [other.rid for other in others],
                "victims": [victim.rid for victim in victims], "queues": queues}

    def do_orphan(self):
        return {"rid": self.admit(peer=False).rid}

    def do_warmup(self):
        return (yield from self.warm_up(PAGES))

    def do_warmup_pinned(self):
        return (yield from self.warm_up(0))

    def warm_up(self, last_chunk_pages):
        req = self.admit(room=0, fake=True)
        yield from self.bootstrapped(req)
        sent = self.scheduler.prefill(req, last_chunk_pages)
        return {"rid": req.rid, "sent": sent}

    # The decode process.

    def do_cont(self):
        for peer in (self.decode, self.second_decode):
            if peer.pid and peer.stopped:
                self.go_on(peer)
        return {"decode": self.decode.pid}

    def go_on(self, peer):
        peer.go_on()
        self.memory.written_from.clear()

    def do_kill(self):
        pid = self.decode.pid
        self.decode.kill()
        self.memory.written_from.clear()
        return {"decode": pid}

    def do_decode(self):
        self.decode.start()
        return {"decode": self.decode.pid}

    def do_decode_queues(self):
        self.decode.queues = None
        self.decode.tell("queues")
        yield from until(lambda: self.decode.queues, "the decode's answer")
        return self.decode.queues

    def do_decode_slots(self, count):
        self.decode.start()
        self.decode.tell(f"slots {int(count)}")
        return {"slots": int(count)}

    def do_stranger(self):
        self.next_room += 1
        self.decode.start()
        self.decode.tell(f"stranger {self.next_room}")
        return {"room": str(self.next_room)}

    def do_decode_abort(self, rid):
        self.peers[rid].tell(f"abort {self.rooms[rid]}")
        return {"room": self.rooms[rid]}

    def do_look(self, rid):
        """What the decode has in the request's pages by now."""
        peer, room = self.peers[rid], self.rooms[rid]
        peer.looks.pop(room, None)
        peer.tell(f"look {room}")
        yield from until(lambda: room in peer.looks, "the decode's answer")
        return peer.looks[room] | {"right": str(pattern(room)), "poison": str(POISON)}

    # The engine.

    def do_overwrite(self):
        return {"overwrites": backends.overwrite_what_was_sent(self.manager(), POISON)}

    def do_engine(self, mode):
        import engine_stand_in

        engine_stand_in.MODE.name = mode
        return {"engine": mode}

    # The server.

    def do_abort(self, rid):
        told, cannot = self.scheduler.abort_request(rid)
        return {"aborted": told, "without_abort": cannot}

    def do_pause(self):
        self.scheduler.pause_generation(SimpleNamespace(mode="in_place"))
        return {"paused": True}

    def do_resume(self):
        self.scheduler.continue_generation(SimpleNamespace())
        return {"paused": False}

    def do_slow(self, milliseconds):
        self.scheduler.pass_sleep = float(milliseconds) / 1000
        return {"sleep": self.scheduler.pass_sleep}

    def do_quit(self):
        self.scheduler.gracefully_exit = True
        return {}

    # What there is to see.

    def do_queue(self):
        return [self.entry(req) for req in self.scheduler.disagg_prefill_inflight_queue]

    def do_bootstrap(self):
        return [self.entry(req) for req in self.scheduler.disagg_prefill_bootstrap_queue.queue]

    def entry(self, req):
        since = req.time_stats.prefill_transfer_queue_entry_time  # 0 until the last chunk went through `send`
        return {"rid": req.rid, "room": req.bootstrap_room, "poll": POLL[req.disagg_kv_sender.poll()],
                "age": round(time.perf_counter() - since, 3) if since else None}

    def do_finished(self):
        released = self.memory.released
        return {rid: reason | {"released": released.count(rid)} for rid, reason in self.scheduler.finished.items()}

    def do_good(self):
        results = {rid: self.result(rid) for rid in self.peers}
        return {rid: result["data"] if result else None for rid, result in results.items()}

    def do_pages_intact(self):
        return {"in_flight": sorted(self.memory.written_from), "released": self.memory.released_early}

    def do_metrics(self):
        return {"port": self.scheduler.metrics_collector.port}
