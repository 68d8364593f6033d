"""The pages that the peers send and receive: page `i` of a prefill is filled with `pattern(i)`, those of a decode with zeros."""

import time

import numpy


def pattern(page, salt=0):
    """The byte that fills the page: never 0, and another one for each of 250 neighbours."""
    return (page + salt) % 251 + 1


class Memory:
    """Attributes: `base`, address of the first page; `page`, bytes of each; `pages`, their number."""

    def __init__(self, role, page, pages):
        self.page, self.pages = page, pages
        self.bytes = numpy.zeros((pages, page), dtype=numpy.uint8)
        self.base = self.bytes.ctypes.data
        if role == "prefill":
            self.fill()

    def fill(self, salt=0):
        for page in range(self.pages):
            self.bytes[page] = pattern(page, salt)

    def clear(self):
        self.bytes[:] = 0

    def wrong(self, pages, salt=0, within=0):
        """Those of the pages that do not hold their pattern from end to end, after waiting `within` seconds for it."""
        end = time.monotonic() + within
        while True:
            pages = [page for page in pages if not (self.bytes[page] == pattern(page, salt)).all()]
            if not pages or time.monotonic() >= end:
                return pages
            time.sleep(0.001)

    def written(self):
        """Number of bytes that are not 0: how much has arrived in memory that was cleared."""
        return int(numpy.count_nonzero(self.bytes))
