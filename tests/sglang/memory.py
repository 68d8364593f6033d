"""Host memory that stands for a server's KV pool, and the arguments that describe it to the transfer backend.

A slot is what one request may use: so many pages in each buffer, and one aux record. An ordinary request takes the first
few pages of its slot. A large one takes them all: more than the kernel's TCP buffers hold, so that a write to a stopped
peer has really not been read from memory yet. Memory that is never touched costs nothing.
"""

import time

import numpy as np

from collectives import Place

LAYERS = 2
SLOTS = 32
PAGES = 8  # of an ordinary request
PAGE_BYTES = 32 * 1024
AUX_BYTES = 256
POISON = 0xEE  # what a page holds from the moment it is released


def pattern(room: int) -> int:
    """The byte that fills the pages of a room's request: never zero, never poison."""
    return room % 199 + 1


class Memory:
    def __init__(self, slot_pages: int):
        self.slot_pages = slot_pages
        self.kv = [np.zeros((SLOTS * slot_pages, PAGE_BYTES), dtype=np.uint8) for _ in range(2 * LAYERS)]
        self.aux = np.zeros((SLOTS, AUX_BYTES), dtype=np.uint8)

    def pages(self, slot: int, count: int):
        return np.arange(count, dtype=np.int32) + slot * self.slot_pages

    def fill(self, slot: int, count: int, value: int):
        first = slot * self.slot_pages
        for layer in self.kv:
            layer[first:first + count] = value
        self.aux[slot] = value

    def holds(self, slot: int, count: int, value: int) -> bool:
        first = slot * self.slot_pages
        return bool(all((layer[first:first + count] == value).all() for layer in self.kv) and (self.aux[slot] == value).all())

    def census(self, slot: int, count: int) -> dict:
        """How many pages begin, and how many end, with which byte, over all buffers."""
        first = slot * self.slot_pages
        values, counts = np.unique([layer[first:first + count, [0, -1]] for layer in self.kv], return_counts=True)
        return {str(value): int(count) for value, count in zip(values, counts)}

    def kv_args(self):
        """SGLang's KVArgs: all fields that any release reads."""
        from sglang.srt.disaggregation.base.conn import KVArgs

        args = KVArgs()
        place = Place.of_this_process()
        for name in "gpu_id system_dp_rank prefill_start_layer num_draft_entries".split():
            setattr(args, name, 0)
        args.engine_rank, args.pp_rank = place.tp_rank, place.pp_rank
        args.kv_head_num = args.page_size = 1
        args.total_kv_head_num = place.tp
        for name in "ib_device prefill_end_layer mla_compression_ratios swa_kv_cache_layout rust_http_port".split():
            setattr(args, name, None)
        for name in """state_types state_data_ptrs state_data_lens state_item_lens state_dim_per_tensor state_layer_ids
                       state_slice_outer_counts state_conv_shard_groups""".split():
            setattr(args, name, [])
        args.is_hybrid_mla_backend = False
        args.kv_data_ptrs = [layer.ctypes.data for layer in self.kv]
        args.kv_data_lens = [layer.nbytes for layer in self.kv]
        args.kv_item_lens = [PAGE_BYTES] * len(self.kv)
        args.kv_layer_ids = [*range(LAYERS)] * 2
        args.kv_cache_dtype_str = "bf16"
        args.kv_data_mem_kinds = ["DRAM"] * len(self.kv)
        args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens = [self.aux.ctypes.data], [self.aux.nbytes], [AUX_BYTES]
        return args


class PrefillMemory(Memory):
    """Knows the pages of each request, and what was released when."""

    def __init__(self, slot_pages: int):
        super().__init__(slot_pages)
        self.owned = {}  # rid -> (slot, pages)
        self.released = []  # rids, once for each release
        self.written_from = set()  # rids whose pages a stopped peer's transfer still reads
        self.released_early = []
        self.release_takes = 0.0  # seconds, the next time

    def own(self, rid: str, slot: int, pages: int, value: int):
        self.owned[rid] = slot, pages
        self.fill(slot, pages, value)

    def release_kv_cache(self, req, *_, **__):
        """Where SGLang gives a request's pages back. Their next owner writes to them at once."""
        time.sleep(self.release_takes)
        self.release_takes = 0.0
        self.released.append(req.rid)
        if req.rid in self.written_from:
            self.released_early.append(req.rid)
        if req.rid in self.owned:
            self.fill(*self.owned.pop(req.rid), POISON)
