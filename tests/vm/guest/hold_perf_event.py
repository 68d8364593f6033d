#!/usr/bin/env python3
"""Holds one perf event of a task open until it is killed; says so on its first line.

The kernel patches its scheduler's code when the first such event comes and when the last one goes (`perf_sched_events`,
a static key). An agent that attaches and detaches makes it do so again and again, and qemu's emulation of several
processors does not get that right: one now and then still runs the breakpoint that the patch put there for a moment,
and the kernel panics ("Oops: int3" in `__schedule`; seen on 6.12.117, in two runs of four).
"""

import ctypes
import os
import signal
import struct

PERF_EVENT_OPEN = 298  # x86_64
PERF_TYPE_SOFTWARE = 1
PERF_COUNT_SW_DUMMY = 9
# struct perf_event_attr, first published version: type, size, config, and nothing more.
ATTRIBUTES = struct.pack("IIQ48x", PERF_TYPE_SOFTWARE, 64, PERF_COUNT_SW_DUMMY)

libc = ctypes.CDLL(None, use_errno=True)
this_task, any_processor, no_group, no_flags = 0, -1, -1, 0
if libc.syscall(PERF_EVENT_OPEN, ATTRIBUTES, this_task, any_processor, no_group, no_flags) < 0:
    raise OSError(ctypes.get_errno(), f"perf_event_open: {os.strerror(ctypes.get_errno())}")
print("held", flush=True)
signal.pause()
