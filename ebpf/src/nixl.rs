//! The programs on libnixl (`nixlAgent`) and its UCX plugin. Argument positions and layouts: NIXL 0.3.1 to 1.5.1,
//! `src/core/nixl_agent.cpp`, `src/plugins/ucx/ucx_backend.cpp`.

use aya_ebpf::{
    helpers::bpf_ktime_get_ns,
    macros::{uprobe, uretprobe},
    programs::{ProbeContext, RetProbeContext},
};
use dislodge_ebpf::{
    process::{AttachCookie, MakeForm, NotificationForm},
    wire::{Kind, NIXL_LOCAL_LIST, Native, STATUS_NOT_READ, flag},
};

use crate::{
    abi::{argument, read, result},
    call::{Call, Function, entered, returned, under_way},
    completion::uct_status,
    emit::Traced,
};

const IN_PROGRESS: i32 = 1;

/// Offsets in `nixlAgentOptionalArgs`: `std::string notifMsg` or the string of `std::optional<std::string> notif`, and
/// the byte that says whether there is one.
const NOTIFICATION: u64 = 24;
const HAS_NOTIFICATION: u64 = 56;
/// Size of `nixlBasicDesc {addr, len, devId}`, and where its length is.
const DESCRIPTOR: u64 = 24;
const DESCRIPTOR_LENGTH: u64 = 8;
/// Descriptors that are added up; of a longer list the size is extrapolated.
const SUMMED: u64 = 64;

/// Entry of `createXferReq` or `makeXferReq`: remembers where the handle and the notification will be.
#[uprobe]
pub fn nixl_make(ctx: ProbeContext) -> u32 {
    try_make(&ctx);
    0
}

fn try_make(ctx: &ProbeContext) -> Option<()> {
    let (process, form) = Traced::of_probe(ctx)?;
    let (out, options) = match form {
        form if form == MakeForm::Create as u32 => (argument(ctx, 5)?, argument(ctx, 6)?),
        form if form == MakeForm::PreparedVector as u32 => (argument(ctx, 6)?, argument(ctx, 7)?),
        _ => (argument(ctx, 8)?, argument(ctx, 9)?),
    };
    let operation = match form {
        form if form == MakeForm::PreparedSpan as u32 => argument(ctx, 1)? as u32,
        _ => read::<u32>(argument(ctx, 1)?).unwrap_or(u32::MAX),
    };
    let (count, bytes, estimated) = match form {
        form if form == MakeForm::Create as u32 => descriptors(argument(ctx, 2)?),
        form if form == MakeForm::PreparedVector as u32 => (indices(argument(ctx, 3)?), 0, false),
        _ => (argument(ctx, 4)?, 0, false),
    };
    let what = u64::from(operation as u8) | u64::from(estimated) << 8 | count << 16;
    entered(&process, Function::NixlMake, Call([out, options, what, bytes, 0]));
    Some(())
}

/// Number and bytes of a `nixlDescList<nixlBasicDesc>`, and whether the bytes are extrapolated.
#[inline(always)]
fn descriptors(list: u64) -> (u64, u64, bool) {
    // The list has a virtual table since 0.6: what lies first is then a pointer, and before a small number.
    let vector = match read::<u64>(list) {
        Some(first) if first < 4096 => list + 8,
        _ => list + 16,
    };
    let (Some(begin), Some(end)) = (read::<u64>(vector), read::<u64>(vector + 8)) else { return (0, 0, true) };
    let count = end.wrapping_sub(begin) / DESCRIPTOR;
    let mut bytes = 0u64;
    let mut summed = 0;
    while summed < SUMMED && summed < count {
        let Some(length) = read::<u64>(begin + summed * DESCRIPTOR + DESCRIPTOR_LENGTH) else { break };
        bytes = bytes.wrapping_add(length);
        summed += 1;
    }
    if summed == count {
        return (count, bytes, false);
    }
    (count, if summed == 0 { 0 } else { bytes / summed * count }, true)
}

/// Length of a `std::vector<int>`.
#[inline(always)]
fn indices(vector: u64) -> u64 {
    match (read::<u64>(vector), read::<u64>(vector + 8)) {
        (Some(begin), Some(end)) => end.wrapping_sub(begin) / 4,
        _ => 0,
    }
}

/// Return of `createXferReq` or `makeXferReq`: the handle exists.
#[uretprobe]
pub fn nixl_made(ctx: RetProbeContext) -> u32 {
    try_made(&ctx);
    0
}

fn try_made(ctx: &RetProbeContext) -> Option<()> {
    let (process, _) = Traced::of_probe(ctx)?;
    let Call([out, options, what, size, _]) = returned(&process, Function::NixlMake)?;
    let status = result(ctx) as i32;
    if status < 0 {
        let native = Native { object: 0, value: i64::from(status) as u64, size: 0 };
        process.emit_native(Kind::NixlNotMade, 0, native);
        return Some(());
    }
    let estimated = if what & 0x100 != 0 { flag::SIZE_ESTIMATED } else { 0 };
    let handle = read::<u64>(out);
    let native = Native { object: handle.unwrap_or(0), value: what & 0xff | what >> 16 << 8, size };
    let flags = estimated | if handle.is_none() { flag::DETAIL_FAULT } else { 0 };
    let has_notification = options != 0 && read::<u8>(options + HAS_NOTIFICATION) == Some(1);
    if !has_notification {
        process.emit_native(Kind::NixlMade, flags, native);
        return Some(());
    }
    let (bytes, length) = string(options + NOTIFICATION);
    process.emit_native_bytes(Kind::NixlMade, flags, native, bytes, length);
    Some(())
}

/// Address and length of a libstdc++ `std::string`'s bytes. One that cannot be read has bytes that cannot be read.
#[inline(always)]
fn string(string: u64) -> (u64, u64) {
    (read::<u64>(string).unwrap_or(0), read::<u64>(string + 8).unwrap_or(1))
}

/// Entry of `postXferReq`: from now on bytes may move.
#[uprobe]
pub fn nixl_post(ctx: ProbeContext) -> u32 {
    try_post(&ctx);
    0
}

fn try_post(ctx: &ProbeContext) -> Option<()> {
    let (process, parameter) = Traced::of_probe(ctx)?;
    let handle = argument(ctx, 1)?;
    let list = read::<u64>(handle + NIXL_LOCAL_LIST).unwrap_or(0);
    process.emit_native(Kind::NixlPosting, 0, Native { object: handle, value: list, size: 0 });
    if parameter & AttachCookie::ENTRY_ONLY != 0 {
        return Some(());
    }
    entered(&process, Function::NixlPost, Call([handle, 0, 0, 0, 0]));
    Some(())
}

/// Return of `postXferReq`: told when the transfer is not under way.
#[uretprobe]
pub fn nixl_posted(ctx: RetProbeContext) -> u32 {
    try_posted(&ctx);
    0
}

fn try_posted(ctx: &RetProbeContext) -> Option<()> {
    let (process, _) = Traced::of_probe(ctx)?;
    let Call([handle, ..]) = returned(&process, Function::NixlPost)?;
    let status = result(ctx) as i32;
    if status != IN_PROGRESS {
        process.emit_native(Kind::NixlPosted, 0, Native { object: handle, value: i64::from(status) as u64, size: 0 });
    }
    Some(())
}

/// Entry of `releaseXferReq`. The probe's parameter is the offset of the status in the handle, or 0 where the agent
/// could not decode it.
#[uprobe]
pub fn nixl_release(ctx: ProbeContext) -> u32 {
    try_release(&ctx);
    0
}

fn try_release(ctx: &ProbeContext) -> Option<()> {
    let (process, offset) = Traced::of_probe(ctx)?;
    let handle = argument(ctx, 1)?;
    let status = match offset {
        0 => Some(STATUS_NOT_READ),
        offset => read::<i32>(handle + u64::from(offset)).map(i64::from),
    };
    let flags = if status.is_none() { flag::DETAIL_FAULT } else { 0 };
    let value = status.unwrap_or(STATUS_NOT_READ) as u64;
    process.emit_native(Kind::NixlReleasing, flags, Native { object: handle, value, size: 0 });
    Some(())
}

/// Entry of `nixlUcxEngine::notifAmCb(arg, header, header_length, data, length, …)`.
#[uprobe]
pub fn nixl_notification_arrived(ctx: ProbeContext) -> u32 {
    try_notification_arrived(&ctx);
    0
}

fn try_notification_arrived(ctx: &ProbeContext) -> Option<()> {
    let (process, _) = Traced::of_probe(ctx)?;
    let (data, length) = (argument(ctx, 3)?, argument(ctx, 4)?);
    let native = Native { object: 0, value: 1, size: length };
    process.emit_native_bytes(Kind::NixlNotificationArrived, 0, native, data, length);
    Some(())
}

/// Entry of `notifSendPriv` or `sendNotif`.
#[uprobe]
pub fn nixl_notification_sent(ctx: ProbeContext) -> u32 {
    try_notification_sent(&ctx);
    0
}

fn try_notification_sent(ctx: &ProbeContext) -> Option<()> {
    let (process, form) = Traced::of_probe(ctx)?;
    let serialised = form == NotificationForm::Serialised as u32;
    // A unique_ptr is one pointer; `sendNotif` is handed its address.
    let message = if serialised { read::<u64>(argument(ctx, 0)?).unwrap_or(0) } else { argument(ctx, 2)? };
    let (bytes, length) = string(message);
    let native = Native { object: 0, value: u64::from(serialised), size: length };
    process.emit_native_bytes(Kind::NixlNotificationSent, 0, native, bytes, length);
    Some(())
}

/// Entry of `nixlUcxEngine::sendXferRange(operation, local, remote, agent, handle, first, last)`, on the thread that posted
/// or on one of NIXL's pool: the flush that this thread asks for next is that of this range.
#[uprobe]
pub fn nixl_range(ctx: ProbeContext) -> u32 {
    if let Some((process, _)) = Traced::of_probe(&ctx)
        && let (Some(list), Some(first), Some(last)) = (argument(&ctx, 2), argument(&ctx, 6), argument(&ctx, 7))
    {
        // SAFETY: a helper without arguments.
        let now = unsafe { bpf_ktime_get_ns() };
        entered(&process, Function::NixlRange, Call([list, last.wrapping_sub(first), now, 0, 0]));
    }
    0
}

/// Return of `ucp_ep_flush_nbx`: the flush of a range is under way. Others are not ours.
#[uretprobe]
pub fn ucp_flush_asked(ctx: RetProbeContext) -> u32 {
    if let Some((process, _)) = Traced::of_probe(&ctx)
        && let Some(Call([list, descriptors, began, ..])) = under_way(&process, Function::NixlRange)
    {
        // SAFETY: a helper without arguments.
        let took = unsafe { bpf_ktime_get_ns() }.wrapping_sub(began).min(u64::from(u32::MAX));
        let size = u64::from(descriptors as u32) | took << 32;
        process.emit_native(Kind::NixlRangePosted, 0, Native { object: list, value: result(&ctx), size });
    }
    0
}

/// Entry of `ucp_ep_flush_completion(uct_completion_t *)`: everything that was posted before the flush is over.
#[uprobe]
pub fn ucp_flushed(ctx: ProbeContext) -> u32 {
    if let Some((process, _)) = Traced::of_probe(&ctx)
        && let Some(completion) = argument(&ctx, 0)
    {
        let value = i64::from(uct_status(completion)) as u64;
        process.emit_native(Kind::UcpFlushed, 0, Native { object: completion, value, size: 0 });
    }
    0
}
