//! The programs of a look at status polls: they say whether anybody polls a transfer, and what the answer is.

use aya_ebpf::{
    helpers::bpf_ktime_get_ns,
    macros::{map, uprobe, uretprobe},
    maps::HashMap,
    programs::{ProbeContext, RetProbeContext},
};
use dislodge_ebpf::{
    look::{PollKey, Polls},
    wire::{Kind, Native},
};

use crate::{
    abi::{argument, argument_after_result, read, result},
    call::{Call, Function, entered, returned},
    completion::value_of,
    emit::{Traced, bump_by},
};

/// Filled by the programs, read and emptied by the agent.
#[map]
pub static POLLS: HashMap<PollKey, Polls> = HashMap::with_max_entries(8192, 0);

/// Entry of `getXferStatus(handle)`.
#[uprobe]
pub fn nixl_status(ctx: ProbeContext) -> u32 {
    if let Some((process, _)) = Traced::of_probe(&ctx)
        && let Some(handle) = argument(&ctx, 1)
    {
        entered(&process, Function::NixlStatus, Call([handle, 0, 0, 0, 0]));
    }
    0
}

/// Return of `getXferStatus`: counted; told when it is another status than before.
#[uretprobe]
pub fn nixl_status_read(ctx: RetProbeContext) -> u32 {
    try_status_read(&ctx);
    0
}

fn try_status_read(ctx: &RetProbeContext) -> Option<()> {
    let (process, _) = Traced::of_probe(ctx)?;
    let Call([handle, ..]) = returned(&process, Function::NixlStatus)?;
    let status = i64::from(result(ctx) as i32) as u64;
    if polled(&process, handle, status, 0) {
        process.emit_native(Kind::NixlStatus, 0, Native { object: handle, value: status, size: 0 });
    }
    Some(())
}

/// Entry of Mooncake's `getBatchTransferStatus(batch, &status)`.
#[uprobe]
pub fn mooncake_status(ctx: ProbeContext) -> u32 {
    if let Some((process, _)) = Traced::of_probe(&ctx)
        && let (Some(batch), Some(status)) = (argument_after_result(&ctx, 1), argument_after_result(&ctx, 2))
    {
        entered(&process, Function::MooncakeStatus, Call([batch, status, 0, 0, 0]));
    }
    0
}

/// Return of `getBatchTransferStatus`: counted; told when it is another status than before.
#[uretprobe]
pub fn mooncake_status_read(ctx: RetProbeContext) -> u32 {
    try_mooncake_status_read(&ctx);
    0
}

fn try_mooncake_status_read(ctx: &RetProbeContext) -> Option<()> {
    let (process, _) = Traced::of_probe(ctx)?;
    let Call([batch, status, ..]) = returned(&process, Function::MooncakeStatus)?;
    let (code, bytes) = (u64::from(read::<u32>(status)?), read::<u64>(status + 8).unwrap_or(0));
    if polled(&process, batch, code, bytes) {
        process.emit_native(Kind::MooncakeStatus, 0, Native { object: batch, value: code, size: bytes });
    }
    Some(())
}

/// Entry of `getTransferStatus(batch, task, &status)`. A task's end is not its batch's, so that its status tells nothing
/// that the batch's memory does not: it is only counted that somebody asks. `getBatchTransferStatus` calls it once per
/// task, which is counted too.
#[uprobe]
pub fn mooncake_task_status(ctx: ProbeContext) -> u32 {
    if let Some((process, _)) = Traced::of_probe(&ctx)
        && let Some(batch) = argument_after_result(&ctx, 1)
        && let Some(polls) = value_of(&POLLS, PollKey { slot: u64::from(process.slot()), object: batch }, &process)
    {
        // SAFETY: the value lives at least as long as this program runs; counts are atomic, the time is one store.
        unsafe {
            bump_by(&raw mut (*polls).count, 1);
            (&raw mut (*polls).last_ns).write_volatile(bpf_ktime_get_ns());
        }
    }
    0
}

/// Counts a poll; whether its answer is another one than that of the poll before.
#[inline(always)]
fn polled(process: &Traced, object: u64, status: u64, bytes: u64) -> bool {
    let key = PollKey { slot: u64::from(process.slot()), object };
    let Some(polls) = value_of(&POLLS, key, process) else { return true };
    // SAFETY: the value lives at least as long as this program runs; counts are atomic, the others are one store each.
    unsafe {
        let changed = (*polls).count == 0 || (*polls).status != status;
        bump_by(&raw mut (*polls).count, 1);
        (&raw mut (*polls).status).write_volatile(status);
        (&raw mut (*polls).bytes).write_volatile(bytes);
        (&raw mut (*polls).last_ns).write_volatile(bpf_ktime_get_ns());
        changed
    }
}
