//! The BPF programs. Built for `bpfel-unknown-none` only (see `ebpf/build`); on other targets this is an empty program
//! so that `cargo build --workspace` stays plain.
#![cfg_attr(target_arch = "bpf", no_std, no_main)]
#![cfg_attr(target_arch = "bpf", feature(core_intrinsics))]
#![cfg_attr(
    target_arch = "bpf",
    expect(
        internal_features,
        reason = "core's AtomicU64 has no fetch_add for BPF; the instruction exists since Linux 5.12"
    )
)]
#![cfg_attr(
    target_arch = "bpf",
    expect(unreachable_pub, reason = "maps and programs must be public symbols of the object")
)]

#[cfg(target_arch = "bpf")]
mod abi;
#[cfg(target_arch = "bpf")]
mod call;
#[cfg(target_arch = "bpf")]
mod completion;
#[cfg(target_arch = "bpf")]
mod emit;
#[cfg(target_arch = "bpf")]
mod mark;
#[cfg(target_arch = "bpf")]
mod mooncake;
#[cfg(target_arch = "bpf")]
mod nixl;
#[cfg(target_arch = "bpf")]
mod status;

#[cfg(target_arch = "bpf")]
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";

/// A panic becomes an endless loop, which the verifier refuses: the object does not load, instead of misbehaving.
#[cfg(target_arch = "bpf")]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}

#[cfg(not(target_arch = "bpf"))]
fn main() {}
