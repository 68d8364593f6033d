"""The live sections of layouts.py: what is in an engine's memory, and what is called, while transfers run, hang and fail."""

import collections
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from peers import NoAnswer, Pair
from symbols import CREATE, ERROR_CALLBACK, FREE, MAKE, MAKE_SPAN, POST, RELEASE
from watch import Watch

PENDING = 16 << 20  # bytes of a Mooncake page: more than the sockets of a stopped peer take


@dataclass(frozen=True, eq=False)
class Bed:
    """An engine that prepare.py unpacked."""

    name: str
    python: str
    environment: dict
    folder: Path

    @property
    def engine(self):
        return self.name.partition("-")[0]

    @property
    def version(self):
        return self.name.partition("-")[2]

    def pair(self, *arguments, **more):
        return Pair(self.engine, *arguments, python=self.python, environment={**self.environment, **more})

def memory(pid, address, count):
    with open(f"/proc/{pid}/mem", "rb") as file:
        file.seek(address)
        return file.read(count)


def run(prefill, **made):
    """Makes a transfer, posts it and polls it to its end; returns its handle."""
    handle = prefill.ask("make", **made)["handle"]
    prefill.ask("post", handle=handle)
    prefill.ask("poll", handle=handle, within=20)
    return handle


def said(answer):
    if "released" in answer:
        return "released"
    return " ".join(str(answer[key]) for key in ("raised", "message", "status", "code") if key in answer)


# NIXL

def calls(bed, libraries):
    """Arguments of create, make, post and release, each compared with what Python asked for and got."""
    library = libraries["libnixl"]
    vector = 8 if version(bed) <= (0, 5, 1) else 16  # nixlDescList got a vptr in 0.6
    script = calls_script(library, vector)
    with bed.pair("--page", 4096) as pair, Watch(pair.prefill.pid, script) as watch:
        for form, pages, notification in (("create", [0, 2, 4], "373a" * 25), ("prepped", [1, 3, 5, 7], "00ff" * 8),
                                          ("create", [1], "00" * (1 << 20)), ("create", [1], "")):
            made = pair.prefill.ask("make", pages=pages, form=form, notification_hex=notification)
            pair.prefill.ask("post", handle=made["handle"])
            pair.prefill.ask("poll", handle=made["handle"], within=20)
            pair.prefill.ask("release", handle=made["handle"])
            seen = dict(line.split(" ", 1) for line in watch.lines())
            wanted = {"handle": made["handle"], "posted": made["handle"], "n": len(pages), "has": int(bool(notification)),
                      "op": 1, "release": 0}
            if notification:
                wanted |= {"size": len(notification) // 2, "bytes": notification[:16]}
            if form == "create":
                wanted["length"] = 4096
            wrong = {key: seen.get(key) for key, value in wanted.items() if seen.get(key) != str(value)}
            yield f"{form}, {len(pages)} pages, {len(notification) // 2} bytes", shown(seen), wrong or "yes"


def calls_script(library, vector):
    """Prints `key value` lines. The notification is read where has_notification is not 0: without, those bytes are whatever
    was on the stack."""
    notification = """printf("has %d\\n", *(uint8*)($o + 56)); if (*(uint8*)($o + 56)) { $t = *(uint64*)($o + 24);
        printf("size %llu\\nbytes %02x%02x%02x%02x%02x%02x%02x%02x\\n", *(uint64*)($o + 32), *(uint8*)$t, *(uint8*)($t + 1),
        *(uint8*)($t + 2), *(uint8*)($t + 3), *(uint8*)($t + 4), *(uint8*)($t + 5), *(uint8*)($t + 6), *(uint8*)($t + 7)); }"""
    made = '/pid == PID && @out[tid]/ { printf("handle %llu\\n", *(uint64*)@out[tid]); delete(@out[tid]); }'
    forms = {
        CREATE: f"""@out[tid] = arg5; $o = *(uint64*)(reg("sp") + 8); $b = *(uint64*)(arg2 + {vector});
            printf("form create\\nop %d\\nn %d\\nlength %llu\\n", *(uint32*)arg1, (*(uint64*)(arg2 + {vector} + 8) - $b) / 24,
            *(uint64*)($b + 8));""",
        MAKE: """@out[tid] = *(uint64*)(reg("sp") + 8); $o = *(uint64*)(reg("sp") + 16);
            printf("form vector\\nop %d\\nn %d\\n", *(uint32*)arg1, (*(uint64*)(arg3 + 8) - *(uint64*)arg3) / 4);""",
        MAKE_SPAN: """@out[tid] = *(uint64*)(reg("sp") + 24); $o = *(uint64*)(reg("sp") + 32);
            printf("form span\\nop %d\\nn %d\\n", arg1, arg4);""",
    }
    script = ""
    for symbol, body in forms.items():
        if symbol in library.symbols:
            script += f'uprobe:{library.path}:"{symbol}" /pid == PID/ {{ {body} {notification} }}\n'
            script += f'uretprobe:{library.path}:"{symbol}" {made}\n'
    return script + f"""uprobe:{library.path}:"{POST}" /pid == PID/ {{ printf("posted %llu\\noptions %d\\n", arg1, arg2 != 0); }}
        uretprobe:{library.path}:"{RELEASE}" /pid == PID/ {{ printf("release %d\\n", (int32)retval); }}"""


def shown(seen):
    return ", ".join(f"{key} {value}" for key, value in seen.items() if key not in ("handle", "posted"))


def version(bed):
    return tuple(int(part) for part in bed.version.split(".")[:3])


def life(bed, offset):
    """`status` of a handle, read from outside, after each step of its life."""

    def field(handle):
        return struct.unpack("<i", memory(prefill.pid, handle + offset, 4))[0]

    everything = list(range(64))
    with bed.pair("--page", 1 << 20, "--pages", 64) as pair:
        prefill, decode = pair.prefill, pair.decode
        handle = prefill.ask("make", pages=[0])["handle"]
        yield "make", "", field(handle)
        yield "post", said(prefill.ask("post", handle=handle)), field(handle)
        decode.ask("check", pages=[0], within=5)
        yield "its data arrived, nobody polled", "", field(handle)
        yield "poll", said(prefill.ask("poll", handle=handle, within=20)), field(handle)
        handle = prefill.ask("make", pages=everything)["handle"]
        decode.ask("clear")
        decode.stop()
        prefill.ask("post", handle=handle)
        yield "1 s of polls, decode stopped", said(prefill.ask("poll", handle=handle, within=1)), field(handle)
        yield "release of it", said(prefill.ask("release", handle=handle)), "(freed)"
        prefill.ask("fill", salt=100)
        decode.go_on()
        time.sleep(2)
        kept = 64 - len(decode.ask("check", pages=everything)["wrong"])
        yield ("decode went on 2 s ago; prefill's pages were filled anew after the release",
               f"{decode.ask('written')['bytes'] >> 20} of 64 MiB written, {64 - kept} pages with bytes of the new content", "")
        first, second = (prefill.ask("make", pages=pages)["handle"] for pages in (everything, [0]))
        decode.stop()
        prefill.ask("post", handle=first)
        prefill.ask("post", handle=second)
        decode.end()
        time.sleep(1)
        yield "two posted, decode killed 1 s ago, nobody polled", "", f"{field(first)}, {field(second)}"
        yield "poll of the first", said(prefill.ask("poll", handle=first, within=5)), field(first)
        yield "poll of the second", said(prefill.ask("poll", handle=second, within=5)), field(second)
        for name, handle in (("first", first), ("second", second)):
            try:
                yield f"release of the {name}", said(prefill.ask("release", handle=handle)), ""
            except NoAnswer as ended:
                yield f"release of the {name}", str(ended).partition(") ")[2], ""
                return


def flush(bed, libraries):
    """UCX's completions. `flush - N` is a completion whose argument is N bytes below what a ucp_ep_flush_nbx returned."""
    script = flush_script(libraries)
    with bed.pair("--page", 65536, "--pages", 256) as pair:
        prefill, decode = pair.prefill, pair.decode
        prefill.ask("release", handle=run(prefill, pages=[0], room=1))
        requests = {}
        with Watch(prefill.pid, script) as watch:
            for count in (1, 16):
                handle = run(prefill, pages=list(range(0, 2 * count, 2)), room=1)
                yield f"{count} pages written, polled to the end", hits(watch.lines(), prefill.pid, requests)
                prefill.ask("release", handle=handle)
            for ending in ("goes on", "is killed"):
                watch.lines()
                decode.stop()
                handles = [prefill.ask("make", pages=list(range(256)), room=1)["handle"] for _ in range(2)]
                for handle in handles:
                    prefill.ask("post", handle=handle)
                yield "decode stopped, 2 x 256 pages posted", hits(watch.lines(), prefill.pid, requests)
                prefill.ask("release", handle=handles[0])
                yield "one of them released", hits(watch.lines(), prefill.pid, requests)
                decode.go_on() if ending == "goes on" else decode.end()
                yield f"decode {ending}, nobody polls", hits(watch.lines(2), prefill.pid, requests)
                if ending == "goes on":
                    prefill.ask("poll", handle=handles[1], within=20)


def flush_script(libraries):
    plugin, ucp, uct = (libraries[name] for name in ("libplugin_UCX", "libucp", "libuct"))
    status = "(int8)arg2"
    script = f"""uretprobe:{ucp.path}:"ucp_ep_flush_nbx" /pid == PID/ {{ printf("ucp_ep_flush_nbx %d 0 %llu\\n", tid, retval); }}
        uprobe:{ucp.path}:"ucp_ep_flush_completion" /pid == PID/ {{ printf("flush %d %d %llu\\n", tid, *(int8*)(arg0 + 12), arg0); }}
        uprobe:{ucp.path}:"ucp_proto_request_zcopy_completion" /pid == PID/
            {{ printf("zcopy %d %d 0\\n", tid, *(int8*)(arg0 + 12)); }}\n"""
    for library, symbol, name in ((ucp, "ucp_ep_set_lanes_failed", "set_lanes_failed"), (ucp, "ucp_ep_set_failed", "set_failed"),
                                  (uct, "uct_iface_handle_ep_err", "handle_ep_err"), (plugin, ERROR_CALLBACK, "err_cb")):
        if symbol in library.symbols:
            script += f'uprobe:{library.path}:"{symbol}" /pid == PID/ {{ printf("{name} %d %d 0\\n", tid, {status}); }}\n'
    return script


def hits(lines, pid, requests):
    """`name @ thread: status x count`; `requests` keeps the addresses that flushes returned, for their completions."""
    counts = collections.Counter()
    for line in lines:
        name, tid, status, address = line.split()
        if name == "ucp_ep_flush_nbx":
            requests[int(address)] = True
        elif name == "flush":
            distance = next((at for at in (0x80, 0x78) if int(address) + at in requests), None)
            name = "flush - ?" if distance is None else f"flush - {distance:#x}"
        counts[f"{name} @ {'main' if int(tid) == pid else 'progress'}: {status}"] += 1
    return ", ".join(f"{what} x {count}" for what, count in sorted(counts.items())) or "none"


# Mooncake

def free(bed, library, stride):
    """Each task's counters when freeBatchID is entered, and in memory while a batch hangs or was abandoned."""
    script = free_script(library, stride)

    def seen(answer):
        lines = [line.split() for line in watch.lines()]
        tasks = ["/".join(line[1:]) for line in lines if line[0] == "task"]
        return said(answer), " ".join(tasks), " ".join(f"returned {line[1]}" for line in lines if line[0] == "freed")

    def now(batch):
        begin, end = struct.unpack("<2Q", memory(prefill.pid, batch + 16, 16))
        tasks = [struct.unpack("<4QB", memory(prefill.pid, at, 33)) for at in range(begin, end, stride)]
        return "", " ".join("/".join(map(str, task)) for task in tasks), "(from outside)"

    with bed.pair("--page", PENDING, "--pages", 8, MC_TRANSFER_TIMEOUT="5") as pair:
        prefill, decode = pair.prefill, pair.decode
        with Watch(prefill.pid, script) as watch:
            yield "three pages written", *seen(prefill.ask("transfer", pages=[0, 1, 2]))
            decode.stop()
            hanging = prefill.ask("submit", page=3)["batch"]
            prefill.ask("poll", batch=hanging, times=5)
            yield "one submitted and polled, decode stopped", *now(hanging)
            answer = prefill.ask("transfer", pages=[0, 1, 2])
            lines = watch.lines()
            abandoned = next(int(line.split()[1]) for line in lines if line.startswith("free "))
            yield ("three pages, 5 s timeout", said(answer), " ".join("/".join(line.split()[1:]) for line in lines if "task" in line),
                   next("returned " + line.split()[1] for line in lines if "freed" in line))
            yield "the abandoned batch, 0.5 s later", *now(abandoned)
            decode.go_on()
            decode.ask("check", pages=[0, 1, 2, 3], within=20)
            time.sleep(1)
            yield "decode went on: the hanging one, not polled", *now(hanging)
            yield "and the abandoned one", *now(abandoned)
            yield "poll of the hanging one", *seen(prefill.ask("poll", batch=hanging, within=5))
            decode.stop()
            hanging = prefill.ask("submit", page=3)["batch"]
            writing = prefill.send("transfer", pages=[0, 1, 2], on="worker")
            time.sleep(1)
            decode.end()
            yield "three pages, decode killed while they hang", *seen(prefill.answer(writing))
            yield "one submitted before, decode killed, not polled", *now(hanging)
            yield "poll of it", *seen(prefill.ask("poll", batch=hanging, within=5))
            yield "three pages to the killed decode", *seen(prefill.ask("transfer", pages=[0, 1, 2]))


def free_script(library, stride):
    """`free BATCH`, then `task` and its counters for up to four tasks, then `freed CODE` (mooncake::Status::Code)."""
    tasks = "".join(f"""if ($n > {at}) {{ $t = $b + {at * stride}; printf("task %llu %llu %llu %llu %d\\n", *(uint64*)$t,
        *(uint64*)($t + 8), *(uint64*)($t + 16), *(uint64*)($t + 24), *(uint8*)($t + 32)); }}""" for at in range(4))
    return f"""uprobe:{library.path}:"{FREE}" /pid == PID/ {{ $b = *(uint64*)(arg2 + 16);
            $n = (*(uint64*)(arg2 + 24) - $b) / {stride}; printf("free %llu\\n", arg2); {tasks} }}
        uretprobe:{library.path}:"{FREE}" /pid == PID/ {{ printf("freed %d\\n", *(uint16*)retval); }}"""
