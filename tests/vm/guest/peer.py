"""What the NIXL and the Mooncake peer share: facts on standard output, commands on standard input, and meeting each other."""

import json
import mmap
import pickle
import select
import socket
import struct
import sys
import time

import ctypes

PAGE, PAGES = 65536, 16


def say(event, **fact):
    print(json.dumps({"event": event, **fact}), flush=True)


def commands():
    """Yields a command's words, or nothing when there is none: never waits."""
    while True:
        if select.select([0], [], [], 0)[0]:
            line = sys.stdin.buffer.raw.readline()
            if not line:
                return
            yield line.decode().split()
        else:
            yield []


class Buffer:
    """Memory that both write rooms into: each room's bytes are told apart from every other's of 250."""

    def __init__(self):
        self._map = mmap.mmap(-1, PAGE * PAGES)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.size = PAGE * PAGES

    def fill(self, room):
        self._map[:] = self._pattern(room)

    def holds(self, room):
        return self._map[:] == self._pattern(room)

    @staticmethod
    def _pattern(room):
        return bytes([room % 250 + 1]) * (PAGE * PAGES)


def meet(role, path, own):
    """Exchanges a value with the other role over a socket at that path."""
    if role == "decode":
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen()
            connection, _ = listener.accept()
    else:
        connection = socket.socket(socket.AF_UNIX)
        while connection.connect_ex(path):
            time.sleep(0.05)
    data = pickle.dumps(own)
    connection.sendall(struct.pack("!I", len(data)) + data)
    (length,) = struct.unpack("!I", connection.recv(4, socket.MSG_WAITALL))
    return pickle.loads(connection.recv(length, socket.MSG_WAITALL))
