"""The live sections `ends` and `late` of layouts.py: how the end of a write is seen when nobody polls it, or its handle is gone.

postXferReq has the plugin's sendXferRange write each range of descriptors, on the posting thread or, with `--threads` and more than
1,024 descriptors, on those of its pool, and returns when all of them have. Its third argument is the handle's own list of local
descriptors: that is the join. Each range asks UCX for one flush on its thread; ucp_ep_flush_completion with the request that
ucp_ep_flush_nbx returned (less 0x80, or 0x78 up to UCX 1.18) is that range's end.
"""

from symbols import POST, RANGE
from watch import Watch

COMPLETION = (0x80, 0x78)  # bytes between a ucp_request_t's user part and its send.state.uct_comp


def ends(bed, libraries):
    for threads in (0, 8) if libraries["libplugin_UCX"].matching(RANGE) else (0,):  # 0.3.1 has no threads
        with bed.pair("--page", 4096, "--pages", 4096, "--threads", threads) as pair:
            prefill, decode = pair.prefill, pair.decode
            connect(prefill)
            with Watch(prefill.pid, script(libraries)) as watch:
                for count in (4, 3000):
                    decode.stop()
                    handle = prefill.ask("make", pages=list(range(count)))["handle"]
                    prefill.ask("post", handle=handle)
                    posted = parsed(watch.lines())
                    prefill.ask("release", handle=handle)
                    released = parsed(watch.lines())
                    decode.go_on()
                    ended = parsed(watch.lines(2))
                    yield f"{threads} threads, {count} pages", *row(handle, posted, released, ended)


def connect(prefill):
    """Every thread of the pool has its own connection, made by its first write."""
    for count in (1, 4096, 4096):
        handle = prefill.ask("make", pages=list(range(count)))["handle"]
        prefill.ask("post", handle=handle)
        prefill.ask("poll", handle=handle, within=20)
        prefill.ask("release", handle=handle)


def script(libraries):
    nixl, plugin, ucp = (libraries[name] for name in ("libnixl", "libplugin_UCX", "libucp"))
    text = f"""uprobe:{nixl.path}:"{POST}" /pid == PID/ {{ printf("post %llu %llu 0\\n", arg1 + 16, *(uint64*)(arg1 + 16)); }}
        uretprobe:{nixl.path}:"{POST}" /pid == PID/ {{ printf("posted 0 0 0\\n"); }}
        uretprobe:{ucp.path}:"ucp_ep_flush_nbx" /pid == PID/ {{ printf("asked %llu %d 0\\n", retval, tid); }}
        uprobe:{ucp.path}:"ucp_ep_flush_completion" /pid == PID/ {{ printf("flushed %llu %d 0\\n", arg0, *(int8*)(arg0 + 12)); }}"""
    if symbol := plugin.matching(RANGE):
        text += f"""\nuprobe:{plugin.path}:"{symbol}" /pid == PID/ {{ printf("range %llu %d %llu\\n", arg2, tid,
            *(uint64*)(reg("sp") + 16) - *(uint64*)(reg("sp") + 8)); }}"""
    return text


def parsed(lines):
    return [(name, *map(int, numbers)) for name, *numbers in map(str.split, lines)]


def row(handle, posted, released, ended):
    (embedded, pointed), = [line[1:3] for line in posted if line[0] == "post"]
    ranges = [line for line in posted if line[0] == "range"]
    how = {embedded: "handle + 16", pointed: "*(handle + 16)"}
    joined = {how.get(line[1], "nothing") for line in ranges} or {"(no sendXferRange)"}
    asked = {line[1] for line in posted if line[0] == "asked"}
    returned = posted.index(("posted", 0, 0, 0))
    inside = all(posted.index(line) < returned for line in posted if line[0] in ("range", "asked"))
    early = sum(line[0] == "flushed" for line in [*posted, *released])
    found = {line[1] + distance for line in ended if line[0] == "flushed" for distance in COMPLETION} & asked
    return (", ".join(sorted(joined)), f"{len(ranges)} of {sum(line[3] for line in ranges)} descriptors", "yes" if inside else "no",
            len(asked), early, len(found))


def late(bed, libraries):
    """A write of the pool that is released while in progress: when does it end, and what does it write?"""
    pages = list(range(3000))
    with bed.pair("--page", 32768, "--pages", 4096, "--threads", 8) as pair:
        prefill, decode = pair.prefill, pair.decode
        connect(prefill)
        decode.ask("clear")
        with Watch(prefill.pid, script(libraries)) as watch:

            def now(when, pause):
                ended = {line[1] + distance for line in parsed(watch.lines(pause)) if line[0] == "flushed" for distance in COMPLETION}
                flushed = len(ended & asked)
                asked.difference_update(ended)
                wrong = [len(decode.ask("check", pages=pages, salt=salt)["wrong"]) for salt in (0, 100)]
                return when, flushed, len(pages) - wrong[0], len(pages) - wrong[1]

            decode.stop()
            handle = prefill.ask("make", pages=pages)["handle"]
            prefill.ask("post", handle=handle)
            prefill.ask("poll", handle=handle, within=0.5)
            asked = {line[1] for line in parsed(watch.lines()) if line[0] == "asked"}
            prefill.ask("release", handle=handle)
            decode.go_on()
            yield now(f"{len(asked)} flushes asked; released; decode went on 5 s ago", 5)
            prefill.ask("fill", salt=100)
            for _ in range(20):
                handle = prefill.ask("make", pages=list(range(3000, 4096)) * 2)["handle"]
                prefill.ask("post", handle=handle)
                prefill.ask("poll", handle=handle, within=20)
                prefill.ask("release", handle=handle)
                if not asked:
                    break
                yield now("the pages were filled anew, others were written by 2,192 descriptors", 0.3)
