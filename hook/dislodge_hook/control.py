"""The agent's way in: a socket pair and a memfd that says where it is. The contract is "The control channel" in
agent/ARCHITECTURE.md.

No path, no port, no thread: the agent finds the memfd under /proc, takes its end of the pair with `pidfd_getfd`, and the
scheduler's pass looks at ours now and then.
"""

import json
import os
import socket

from . import VERSION, process

PROTOCOL = 1
MESSAGE_BYTES = 4096


class Refused(Exception):
    """A request that is not carried out, with the contract's reason and something for a human."""

    def __init__(self, reason, detail=""):
        super().__init__(reason)
        self.reason, self.detail = reason, detail


def parse(data, now, newest):
    """A request from its bytes, or `Refused`. `newest` is the newest epoch seen, `now` CLOCK_MONOTONIC in nanoseconds."""
    if len(data) > MESSAGE_BYTES:
        raise Refused("malformed", f"longer than {MESSAGE_BYTES} bytes")
    try:
        request = json.loads(data)
    except Exception as error:  # also RecursionError
        raise Refused("malformed", type(error).__name__) from None
    if not isinstance(request, dict) or request.get("protocol") != PROTOCOL:
        raise Refused("malformed", f"not a request of protocol {PROTOCOL}")
    for name in ("epoch", "id", "deadline"):
        if type(request.get(name)) is not int or not 0 <= request[name] < 2**64:
            raise Refused("malformed", f"{name} is no number")
    if not isinstance(request.get("verb"), str):
        raise Refused("malformed", "verb is no text")
    if request["epoch"] < newest:
        raise Refused("stale_epoch", f"the newest is {newest}")
    if now > request["deadline"]:
        raise Refused("expired", f"by {now - request['deadline']} ns")
    return request


def header(data):
    """The epoch and id to answer to, as far as the message has them."""
    try:
        request = json.loads(data[:MESSAGE_BYTES])
        return tuple(request[name] if type(request.get(name)) is int else 0 for name in ("epoch", "id"))
    except Exception:
        return 0, 0


class Channel:
    """The hook's end."""

    def __init__(self, ours, theirs, memory):
        self._ours, self._theirs, self._memory = ours, theirs, memory
        self.newest_epoch = 0
        self.dropped_replies = 0

    @classmethod
    def open(cls, server=None):
        """The channel, or None where the system does not allow one; the hook marks without it. `server` is what `hello`
        says, for whoever only looks (`dislodge doctor`)."""
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            memory = os.memfd_create("dislodge-hook")
            ours.setblocking(False)
            theirs.setblocking(False)
            content = {"hook": VERSION, "protocol": PROTOCOL, "fd": theirs.fileno(), "server": server or {}}
            os.write(memory, json.dumps(content).encode())
            return cls(ours, theirs, memory)
        except Exception as error:
            process.fault("channel", error)
            return None

    def serve(self, now, verbs):
        """Takes one message, if there is one, and answers it. Never raises, never waits."""
        try:
            data = self._ours.recv(MESSAGE_BYTES + 1)
        except BlockingIOError:
            return
        except OSError as error:
            process.fault("recv", error)
            return
        self._reply(self.answer(data, now, verbs))

    def answer(self, data, now, verbs):
        """The reply to a message, after doing what it asks."""
        try:
            request = parse(data, now, self.newest_epoch)
            self.newest_epoch = request["epoch"]
            verb = verbs.get(request["verb"])
            if verb is None:
                raise Refused("unknown_verb", request["verb"][:64])
            result = verb(request)
            if request["verb"] == "ping":
                result.update(hook=VERSION, errors=process.errors)
            outcome = {"ok": True, **result}
        except Refused as refused:
            outcome = {"ok": False, "refused": refused.reason, "detail": refused.detail}
        except Exception as error:
            process.fault("verb", error)
            outcome = {"ok": False, "refused": "internal_error", "detail": type(error).__name__}
        epoch, number = header(data)
        return {"protocol": PROTOCOL, "epoch": epoch, "id": number, **outcome}

    def _reply(self, reply):
        try:
            data = json.dumps(reply).encode()
            if len(data) > MESSAGE_BYTES:
                raise ValueError("reply too long")
            self._ours.send(data)
        except Exception:  # a full socket, above all
            self.dropped_replies += 1

    def close(self):
        """In a forked child: the parent's descriptors are closed here and stay open there."""
        for end in (self._ours, self._theirs):
            end.close()
        os.close(self._memory)
