//! The programs on the paths of completions: UCX's, Mooncake's, libibverbs providers'. Counted in a map, since there may
//! be a million a second; only errors are events.

use aya_ebpf::{
    bindings::BPF_NOEXIST,
    helpers::bpf_ktime_get_ns,
    macros::{map, uprobe, uretprobe},
    maps::HashMap,
    programs::{ProbeContext, RetProbeContext},
};
use dislodge_ebpf::{
    look::{CompletionKey, CompletionPoint, Completions},
    wire::{Kind, Native},
};

use crate::{
    abi::{argument, read, result},
    call::{Call, Function, entered, returned},
    emit::{Traced, bump_by},
};

/// Size of `struct ibv_wc` and the offsets in it (libibverbs, `infiniband/verbs.h`).
const WORK_COMPLETION: u64 = 48;
const WC_STATUS: u64 = 8;
const WC_VENDOR_ERROR: u64 = 16;
const WC_QP_NUMBER: u64 = 28;
/// Work completions of one poll that are looked at; Mooncake and UCX ask for 16 to 64.
const POLLED: u64 = 64;
/// Offset of the status, one byte, in UCX's `uct_completion_t {func, count, status}`.
const UCT_COMPLETION_STATUS: u64 = 12;

/// Filled by the programs, read and emptied by the agent.
#[map]
pub static COMPLETIONS: HashMap<CompletionKey, Completions> = HashMap::with_max_entries(4096, 0);

#[inline(always)]
fn count(process: &Traced, point: CompletionPoint, status: i16, number: u64) {
    let key = CompletionKey { slot: process.slot(), point: point as u16, status };
    if let Some(completions) = value_of(&COMPLETIONS, key, process) {
        // SAFETY: the value lives at least as long as this program runs; counts are atomic, the time is one store.
        unsafe {
            bump_by(&raw mut (*completions).count, number);
            (&raw mut (*completions).last_ns).write_volatile(bpf_ktime_get_ns());
        }
    }
}

/// The value of a key, zeroes where there was none; nothing, and counted, where the map is full.
#[inline(always)]
pub fn value_of<K, V: Default>(map: &HashMap<K, V>, key: K, process: &Traced) -> Option<*mut V> {
    if map.get_ptr_mut(&key).is_none() {
        // Whoever else inserts it now, inserts the same zeroes.
        let _ = map.insert(&key, V::default(), u64::from(BPF_NOEXIST));
    }
    let value = map.get_ptr_mut(&key);
    if value.is_none() {
        process.count_look_full();
    }
    value
}

/// Entry of `RdmaContext::poll(n, ibv_wc *)`.
#[uprobe]
pub fn mooncake_poll(ctx: ProbeContext) -> u32 {
    if let Some((process, _)) = Traced::of_probe(&ctx)
        && let Some(completions) = argument(&ctx, 2)
    {
        entered(&process, Function::MooncakePoll, Call([completions, 0, 0, 0, 0]));
    }
    0
}

/// Return of `RdmaContext::poll`: how many work completions there were.
#[uretprobe]
pub fn mooncake_polled(ctx: RetProbeContext) -> u32 {
    polled(&ctx, Function::MooncakePoll, CompletionPoint::MooncakePoll);
    0
}

/// Entry of a provider's `poll_cq(cq, n, ibv_wc *)`.
#[uprobe]
pub fn verbs_poll_cq(ctx: ProbeContext) -> u32 {
    if let Some((process, _)) = Traced::of_probe(&ctx)
        && let Some(completions) = argument(&ctx, 2)
    {
        entered(&process, Function::VerbsPollCq, Call([completions, 0, 0, 0, 0]));
    }
    0
}

/// Return of a provider's `poll_cq`.
#[uretprobe]
pub fn verbs_polled_cq(ctx: RetProbeContext) -> u32 {
    polled(&ctx, Function::VerbsPollCq, CompletionPoint::VerbsPollCq);
    0
}

#[inline(always)]
fn polled(ctx: &RetProbeContext, function: Function, point: CompletionPoint) -> Option<()> {
    let (process, _) = Traced::of_probe(ctx)?;
    let Call([completions, ..]) = returned(&process, function)?;
    let number = result(ctx) as i32;
    if number <= 0 {
        return Some(());
    }
    let mut n = 0;
    while n < POLLED && n < number as u64 {
        let completion = completions + n * WORK_COMPLETION;
        let status = read::<u32>(completion + WC_STATUS)?;
        count(&process, point, status as i16, 1);
        if status != 0 {
            let vendor_error = read::<u32>(completion + WC_VENDOR_ERROR).unwrap_or(0);
            process.emit_native(
                Kind::CompletionError,
                0,
                Native {
                    object: read::<u64>(completion).unwrap_or(0),
                    value: u64::from(status) | u64::from(vendor_error) << 32,
                    size: u64::from(read::<u32>(completion + WC_QP_NUMBER).unwrap_or(0)),
                },
            );
        }
        n += 1;
    }
    Some(())
}

/// Entry of `uct_rc_ep_send_op_completion_handler`: a work request of UCX succeeded.
#[uprobe]
pub fn uct_operation_completed(ctx: ProbeContext) -> u32 {
    if let Some((process, _)) = Traced::of_probe(&ctx) {
        count(&process, CompletionPoint::UctRcOperation, 0, 1);
    }
    0
}

/// Entry of `ucp_proto_request_zcopy_completion(uct_completion_t *)`: a request of UCX ended.
#[uprobe]
pub fn ucp_request_completed(ctx: ProbeContext) -> u32 {
    if let Some((process, _)) = Traced::of_probe(&ctx)
        && let Some(completion) = argument(&ctx, 0)
    {
        let status = uct_status(completion);
        count(&process, CompletionPoint::UcpRequest, i16::from(status), 1);
    }
    0
}

/// The `ucs_status_t` of a `uct_completion_t`.
#[inline(always)]
pub fn uct_status(completion: u64) -> i8 {
    read::<i8>(completion + UCT_COMPLETION_STATUS).unwrap_or(i8::MIN)
}

/// Entry of a function that gives up an endpoint. The probe's parameter is a [`dislodge_ebpf::wire::ErrorPoint`]; each
/// function takes the object that failed (NIXL's endpoint, UCP's endpoint, UCT's interface) first and the `ucs_status_t`
/// (one byte, negative) third.
#[uprobe]
pub fn endpoint_error(ctx: ProbeContext) -> u32 {
    if let Some((process, point)) = Traced::of_probe(&ctx)
        && let (Some(endpoint), Some(status)) = (argument(&ctx, 0), argument(&ctx, 2))
    {
        let value = u64::from(status as u8) | u64::from(point) << 8;
        process.emit_native(Kind::EndpointError, 0, Native { object: endpoint, value, size: 0 });
    }
    0
}
