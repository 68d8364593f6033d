#!/usr/bin/env python3
"""The agent beside an unmodified engine on soft-RoCE: what it says of transfers, held against the engine's own words and the
device's counters.

    agent.py nixl|mooncake...
"""

import json
import os
import re
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import rdma
from engines import Pair
from peer import PAGE, PAGES
from processes import Process, say, until

CONFIGURATION = """
listen: 127.0.0.1:9464
scan_interval: 200ms
mode: enforce
audit: { path: %s }
probes: { completions: always }
"""
STALLS_AFTER = 10  # seconds, as in agent/src/diagnose/cause.rs


class Agent(Process):
    """`dislodge run` on some processes, in the mode in which it would act if it might."""

    def __init__(self, *pids):
        folder = Path(tempfile.mkdtemp())
        self.audit = folder / "audit.jsonl"
        configuration = folder / "config.yaml"
        configuration.write_text(CONFIGURATION % self.audit)
        command = ["/share/dislodge", "run", "--config", str(configuration)]
        for pid in pids:
            command += ["--pid", str(pid)]
        super().__init__("dislodge", command)

    def get(self, path):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:9464{path}", timeout=10) as answer:
                return answer.read().decode()
        except OSError:
            return ""

    def transfers(self, pid):
        """What it says of a process's transfers; nothing while it does not watch it."""
        status = json.loads(self.get("/status") or "{}")
        for server in status.get("servers", []):
            if server["pid"] == pid and server["transfers"]["watch"] == "since":
                return {**server["transfers"], "lost": server["events_lost"]}
        return None

    def metric(self, name, **labels):
        """The sum of a metric's samples that have these labels."""
        total = 0.0
        for line in self.get("/metrics").splitlines():
            match = re.fullmatch(r"(\w+)(?:\{(.*)\})? ([0-9.e+-]+)(?: .*)?", line)
            if match and match[1] == name and all(f'{key}="{value}"' in (match[2] or "") for key, value in labels.items()):
                total += float(match[3])
        return total

    def subject(self, pid, name):
        known = self.transfers(pid)
        # Mooncake's transfers have no name; without the hook nobody knows their room.
        subjects = [it for it in known["subjects"] if name is None or it.get("room") == name]
        return subjects[0] if subjects else None

    def __exit__(self, failure, *_):
        if failure:
            print(*self.log[-40:], self.get("/status"), sep="\n  ", flush=True)
        self.kill()


def watched(engine, **environment):
    pair = Pair(engine, **environment)
    agent = Agent(pair.prefill.pid, pair.decode.pid)
    for process in (pair.prefill, pair.decode):
        until(f"the agent watches {process.name}", lambda process=process: agent.transfers(process.pid))
    return pair, agent


def in_good_times_and_when_nothing_gets_through_for_a_while(engine):
    pair, agent = watched(engine, **({"UCX_RC_RETRY_COUNT": "7"} if engine == "nixl" else {}))
    with agent, pair:
        every_transfer_is_seen(engine, pair, agent)
        nothing_gets_through_for_a_while(engine, pair, agent)


def every_transfer_is_seen(engine, pair, agent):
    first = pair.transfer(1)  # connects
    assert first[0]["good"] and first[1], first
    until("the agent saw the first", lambda: done(agent, engine) == 1)
    until_completions_are_seen(engine, pair, agent)
    settle()
    before, completed = rdma.counters(), completions(agent)
    ended = agent.metric("dislodge_transfers_ended_total", engine=engine, state="done")
    count = 4
    for room in range(2, 2 + count):
        end, arrived = pair.transfer(room)
        assert end["good"] and arrived, end
    want = ended + count
    until("the agent saw every transfer", lambda: done(agent, engine) >= want)
    settle()
    assert done(agent, engine) == want, (done(agent, engine), want)
    known = agent.transfers(pair.prefill.pid)
    assert known["under_way"] == 0 and known["lost"] == 0, known
    seen = {point: count - completed[point] for point, count in completions(agent).items()}
    packets = rdma.changed(before).get("sent_pkts", 0)
    # 5 x 1 MiB a transfer: each byte crosses the wire, and each work request completes once.
    say(engine=engine, transfers=count, completions=seen, packets=packets, device=rdma.changed(before))
    if engine == "mooncake":
        # Each work request is a slice of 64 KiB, each packet 1 KiB of it: every one completed once, and was counted.
        bytes_written = count * PAGE * PAGES
        assert seen["mooncake_poll"] == bytes_written >> 16, (seen, bytes_written)
        assert bytes_written >> 10 <= packets < 2 * (bytes_written >> 10), (packets, bytes_written)
    else:
        # UCX cuts as it likes and has its completions from the provider's `poll_cq`, which was found in its memory; a work
        # request of it is a packet or more.
        assert count <= seen["verbs_poll_cq"] < packets, (seen, packets)


def until_completions_are_seen(engine, pair, agent):
    """What NIXL's transport polls has no name: it is searched for in the memory of a server that has made a transfer."""
    if engine == "nixl":
        until("poll_cq", lambda: any(
            row["function"] == "poll_cq" and row["state"] == "attached"
            for row in agent.transfers(pair.prefill.pid)["probes"]))


def settle():
    """What was counted in BPF by now is in the agent's metrics afterwards: it takes them over five times a second."""
    time.sleep(2)


def done(agent, engine):
    return agent.metric("dislodge_transfers_ended_total", engine=engine, state="done")


def completions(agent):
    """Good completions that the agent counted, by where: of UCX's requests and its verbs transport, where Mooncake and
    soft-RoCE's provider poll."""
    points = "ucp_request", "uct_rc", "mooncake_poll", "verbs_poll_cq"
    return {point: agent.metric("dislodge_completions_total", point=point, status="0") for point in points}


def nothing_gets_through_for_a_while(engine, pair, agent):
    """A write that stalls is stalled in the agent's words; nothing is done about it; it ends well."""
    room = 10
    rdma.lose_everything()
    pair.post(room)
    name = str(room) if engine == "nixl" else None
    began = time.monotonic()
    if engine == "nixl":
        until("InFlight", lambda: (agent.subject(pair.prefill.pid, name) or {}).get("state") == "InFlight")
        until("stalled", lambda: (agent.subject(pair.prefill.pid, name) or {}).get("cause") == "TransferStalled")
    else:
        until("in flight", lambda: agent.transfers(pair.prefill.pid)["under_way_not_joined"] == 1)
        until("long", lambda: agent.metric("dislodge_oldest_transfer_age_seconds", engine=engine) > STALLS_AFTER)
    stalled = time.monotonic() - began
    rdma.lose_nothing()
    assert pair.end(room)["good"] and pair.has_arrived(room)
    until("it is over", lambda: agent.transfers(pair.prefill.pid)["under_way"] == 0)
    acted = agent.metric("dislodge_remediations_total")
    say(engine=engine, stalled_seconds=round(stalled, 1), acted=acted, looks=agent.metric("dislodge_looks_total"))
    assert acted == 0 and '"remed' not in agent.audit.read_text()


def the_way_to_the_peer_breaks(engine):
    """Retries run out: CompletionError, with the status that says so."""
    pair, agent = watched(engine)
    with agent, pair:
        assert pair.transfer(1)[0]["good"]
        until_completions_are_seen(engine, pair, agent)
        before = rdma.counters()
        rdma.lose_everything()
        pair.post(2)
        end = pair.end(2)
        rdma.lose_nothing()
        assert not end["good"], end
        until("an end with a failure", lambda: agent.metric("dislodge_transfers_ended_total", engine=engine, state="failed") > 0)
        subject, errors = agent.subject(pair.prefill.pid, "2"), agent.transfers(pair.prefill.pid)["errors"]
        say(engine=engine, fault="link", end=end, subject=subject, errors=errors, device=rdma.changed(before))
        assert subject["cause"] == "CompletionError", subject
        assert any("timeout" in error for error in errors), errors
        # What UCX polled, and what the device says of it.
        assert any("transport retry counter exceeded (12)" in error for error in errors), errors
        counted = until("the device's word", lambda: agent.metric(
            "dislodge_device_errors_total", device="rxe0", port="1", counter="retry_exceeded_err"))
        assert counted == rdma.changed(before)["retry_exceeded_err"], counted
        assert any("retry_exceeded_err" in error for error in agent.transfers(pair.prefill.pid)["errors"])


def the_peer_takes_its_memory_back():
    """The device at the other end refuses the write: a work completion with that status, where Mooncake polls."""
    engine = "mooncake"
    pair, agent = watched(engine)
    with agent, pair:
        assert pair.transfer(1)[0]["good"]
        pair.decode.tell("unregister")
        pair.decode.expect(event="unregistered")
        pair.post(2)
        end = pair.end(2)
        assert not end["good"], end
        refused = until("the completion", lambda: agent.metric("dislodge_completions_total", point="error", status="10"))
        errors = agent.transfers(pair.prefill.pid)["errors"]
        say(engine=engine, fault="unregistered", end=end, refused=refused, errors=errors)
        assert any("remote access error (10)" in error for error in errors), errors


def the_peer_is_killed(engine):
    # The least that Mooncake takes, in seconds.
    pair, agent = watched(engine, **({"MC_TRANSFER_TIMEOUT": "5"} if engine == "mooncake" else {}))
    with agent, pair:
        assert pair.transfer(1)[0]["good"]
        pair.decode.kill()
        pair.post(2)
        end = pair.end(2)
        assert not end["good"], end
        ends = ("failed", "given_up", "post_failed")
        seen = until("its end", lambda: [
            state for state in ends if agent.metric("dislodge_transfers_ended_total", engine=engine, state=state)])
        known = agent.transfers(pair.prefill.pid)
        say(engine=engine, fault="killed", end=end, seen=seen, errors=known["errors"], subjects=known["subjects"])
        if engine == "nixl":
            # The device's word is the same as of a broken way; that the process is gone is seen by whom it got notifications from.
            gone = until("PeerGone", lambda: (agent.subject(pair.prefill.pid, "2") or {}).get("cause") == "PeerGone")
            say(engine=engine, cause="PeerGone", seen=gone)


def main():
    os.environ.setdefault("RUST_LOG", "info")
    rdma.make_devices()
    for engine in sys.argv[1:]:
        in_good_times_and_when_nothing_gets_through_for_a_while(engine)
        if engine == "nixl":  # Mooncake on soft-RoCE: no end of retries (tests/vm/guest/faults.py)
            the_way_to_the_peer_breaks(engine)
        else:
            the_peer_takes_its_memory_back()
        the_peer_is_killed(engine)
        say(engine=engine, agent="good")


main()
