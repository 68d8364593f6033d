//! The programs on Mooncake's engine (`mooncake::MultiTransport`). Its methods return a `Status` in memory, whose first
//! two bytes are the code. Mooncake 0.3.4 to 0.3.13, `mooncake-transfer-engine/include`:
//! `multi_transport.h`, `transport/transport.h`.

use aya_ebpf::{
    macros::{uprobe, uretprobe},
    programs::{ProbeContext, RetProbeContext},
};
use dislodge_ebpf::{
    process::AttachCookie,
    wire::{Kind, Native, batch, flag},
};

use crate::{
    abi::{argument, argument_after_result, read, result},
    call::{Call, Function, entered, returned},
    emit::Traced,
};

/// Offsets in `TransferRequest {opcode, source, target_id, target_offset, length, …}`.
const REQUEST_LENGTH: u64 = 32;
/// Least size of `TransferTask {slice_count, success_slice_count, failed_slice_count, transferred_bytes, …}`: 88 in 0.3.7,
/// 112 in 0.3.13.
const TASK: u64 = 88;
/// Tasks of a batch that are read: some 30 ns each, once per batch.
const TASKS_READ: u64 = 256;

/// Entry of `allocateBatchID(size)`.
#[uprobe]
pub fn mooncake_allocate(ctx: ProbeContext) -> u32 {
    try_allocate(&ctx);
    0
}

fn try_allocate(ctx: &ProbeContext) -> Option<()> {
    let (process, _) = Traced::of_probe(ctx)?;
    entered(&process, Function::MooncakeAllocate, Call([argument(ctx, 1)?, 0, 0, 0, 0]));
    Some(())
}

/// Return of `allocateBatchID`: the batch exists.
#[uretprobe]
pub fn mooncake_allocated(ctx: RetProbeContext) -> u32 {
    try_allocated(&ctx);
    0
}

fn try_allocated(ctx: &RetProbeContext) -> Option<()> {
    let (process, _) = Traced::of_probe(ctx)?;
    let Call([size, ..]) = returned(&process, Function::MooncakeAllocate)?;
    process.emit_native(Kind::MooncakeAllocated, 0, Native { object: result(ctx), value: size, size: 0 });
    Some(())
}

/// Entry of `submitTransfer(batch, requests)`: from now on bytes may move.
#[uprobe]
pub fn mooncake_submit(ctx: ProbeContext) -> u32 {
    try_submit(&ctx);
    0
}

fn try_submit(ctx: &ProbeContext) -> Option<()> {
    let (process, parameter) = Traced::of_probe(ctx)?;
    let (batch, requests) = (argument_after_result(ctx, 1)?, argument_after_result(ctx, 2)?);
    let (begin, end) = (read::<u64>(requests).unwrap_or(0), read::<u64>(requests + 8).unwrap_or(0));
    let (opcode, length) = (read::<u32>(begin), read::<u64>(begin + REQUEST_LENGTH));
    let flags = if opcode.is_none() || length.is_none() { flag::DETAIL_FAULT } else { 0 };
    let value = u64::from(opcode.unwrap_or(0xff) as u8) | end.wrapping_sub(begin) << 8;
    let native = Native { object: batch, value, size: length.unwrap_or(0) };
    process.emit_native(Kind::MooncakeSubmitting, flags, native);
    if parameter & AttachCookie::ENTRY_ONLY != 0 {
        return Some(());
    }
    entered(&process, Function::MooncakeSubmit, Call([batch, 0, 0, 0, 0]));
    Some(())
}

/// Return of `submitTransfer`: told when it failed.
#[uretprobe]
pub fn mooncake_submitted(ctx: RetProbeContext) -> u32 {
    try_submitted(&ctx);
    0
}

fn try_submitted(ctx: &RetProbeContext) -> Option<()> {
    let (process, _) = Traced::of_probe(ctx)?;
    let Call([batch, ..]) = returned(&process, Function::MooncakeSubmit)?;
    match read::<u16>(result(ctx)) {
        Some(0) => {}
        code => {
            let flags = if code.is_none() { flag::DETAIL_FAULT } else { 0 };
            let value = u64::from(code.unwrap_or(u16::MAX));
            process.emit_native(Kind::MooncakeNotSubmitted, flags, Native { object: batch, value, size: 0 });
        }
    }
    Some(())
}

/// Entry of `freeBatchID(batch)`: the last moment at which the batch's tasks can be read.
#[uprobe]
pub fn mooncake_free(ctx: ProbeContext) -> u32 {
    try_free(&ctx);
    0
}

fn try_free(ctx: &ProbeContext) -> Option<()> {
    let (process, parameter) = Traced::of_probe(ctx)?;
    let batch = argument_after_result(ctx, 1)?;
    let (flags, size) = tasks(batch);
    if parameter & AttachCookie::ENTRY_ONLY != 0 {
        let value = flags | batch::RESULT_NOT_SEEN;
        process.emit_native(Kind::MooncakeFreed, 0, Native { object: batch, value, size });
        return Some(());
    }
    entered(&process, Function::MooncakeFree, Call([batch, flags, size, 0, 0]));
    Some(())
}

/// Whether all tasks of a batch could be read, and how many of those are not complete and how many failed.
#[inline(always)]
fn tasks(batch: u64) -> (u64, u64) {
    let Some([id, capacity, begin, end]) = read::<[u64; 4]>(batch) else { return (batch::NOT_ALL_READ, 0) };
    let stride = if capacity == 0 { 0 } else { end.wrapping_sub(begin) / capacity };
    // Another layout than the one that is known, or a batch that was not filled: nothing of it is believed.
    if id != batch || stride < TASK || stride > 4 * TASK || stride % 8 != 0 {
        return (batch::NOT_ALL_READ, 0);
    }
    let (mut incomplete, mut failed, mut nonsense, mut n) = (0, 0, 0, 0);
    while n < TASKS_READ && n < capacity {
        let Some([slices, done, lost]) = read::<[u64; 3]>(begin + n * stride) else { break };
        // Without branches: the verifier of Linux 6.1 would follow each one anew in each turn of the loop.
        let ended = done.wrapping_add(lost);
        incomplete += is_less(ended, slices) | is_zero(slices);
        failed += 1 - is_zero(lost);
        nonsense |= is_less(slices, ended);
        n += 1;
    }
    if nonsense != 0 {
        return (batch::NOT_ALL_READ, 0);
    }
    (if n == capacity { 0 } else { batch::NOT_ALL_READ }, incomplete | failed << 32)
}

/// 1 when `a` is less than `b`; both are numbers of slices, far below 2⁶³.
#[inline(always)]
fn is_less(a: u64, b: u64) -> u64 {
    core::hint::black_box(a.wrapping_sub(b)) >> 63
}

#[inline(always)]
fn is_zero(a: u64) -> u64 {
    core::hint::black_box(!a & a.wrapping_sub(1)) >> 63
}

/// Return of `freeBatchID`. It refuses to free a batch with a task whose end nobody asked for.
#[uretprobe]
pub fn mooncake_freed(ctx: RetProbeContext) -> u32 {
    try_freed(&ctx);
    0
}

fn try_freed(ctx: &RetProbeContext) -> Option<()> {
    let (process, _) = Traced::of_probe(ctx)?;
    let Call([batch, flags, size, ..]) = returned(&process, Function::MooncakeFree)?;
    let value = flags | read::<u16>(result(ctx)).map_or(batch::RESULT_NOT_SEEN, u64::from);
    process.emit_native(Kind::MooncakeFreed, 0, Native { object: batch, value, size });
    Some(())
}
