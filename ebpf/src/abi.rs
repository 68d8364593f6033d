//! Where a function's arguments and results are, per architecture: the only place that knows a register's name.
//!
//! Arguments are counted in *eightbytes of integer class*, from 0 and with `this`: a `std::span` passed by value counts
//! twice. System V x86-64 ABI 3.2.3; AAPCS64 6.8.

use aya_ebpf::{
    EbpfContext as _,
    bindings::pt_regs,
    helpers::generated::bpf_probe_read_user,
    programs::{ProbeContext, RetProbeContext},
};

#[cfg(bpf_target_arch = "x86_64")]
mod registers {
    use super::pt_regs;

    /// A result that is returned in memory takes the first argument's place.
    pub const RESULT_POINTER_IS_AN_ARGUMENT: bool = true;
    /// At a function's entry the return address lies on the stack, before the arguments.
    pub const STACK_ARGUMENTS_AT: u64 = 8;
    pub const IN_REGISTERS: usize = 6;

    pub fn argument(regs: &pt_regs, n: usize) -> u64 {
        match n {
            0 => regs.rdi,
            1 => regs.rsi,
            2 => regs.rdx,
            3 => regs.rcx,
            4 => regs.r8,
            _ => regs.r9,
        }
    }

    pub fn stack_pointer(regs: &pt_regs) -> u64 {
        regs.rsp
    }
}

#[cfg(bpf_target_arch = "aarch64")]
mod registers {
    use super::pt_regs;

    /// A result that is returned in memory has a register of its own, x8.
    pub const RESULT_POINTER_IS_AN_ARGUMENT: bool = false;
    pub const STACK_ARGUMENTS_AT: u64 = 0;
    pub const IN_REGISTERS: usize = 8;

    pub fn argument(regs: &pt_regs, n: usize) -> u64 {
        match n {
            0..=7 => regs.regs[n],
            _ => 0,
        }
    }

    pub fn stack_pointer(regs: &pt_regs) -> u64 {
        regs.sp
    }
}

/// Argument `n` of a function, at its entry. Nothing when it is on the stack and the stack cannot be read.
#[inline(always)]
pub fn argument(ctx: &ProbeContext, n: usize) -> Option<u64> {
    // SAFETY: the kernel hands every program on a probe the registers of its thread.
    let regs = unsafe { &*ctx.as_ptr().cast::<pt_regs>() };
    if n < registers::IN_REGISTERS {
        return Some(registers::argument(regs, n));
    }
    let offset = registers::STACK_ARGUMENTS_AT + 8 * (n - registers::IN_REGISTERS) as u64;
    read(registers::stack_pointer(regs).wrapping_add(offset))
}

/// Argument `n` of a function that returns its result in memory, at its entry.
#[inline(always)]
pub fn argument_after_result(ctx: &ProbeContext, n: usize) -> Option<u64> {
    argument(ctx, if registers::RESULT_POINTER_IS_AN_ARGUMENT { n + 1 } else { n })
}

/// What a function returned; the address of a result in memory, where it has one. (On aarch64 x8 need not survive: such
/// a result is read at the address that its entry said.)
#[inline(always)]
pub fn result(ctx: &RetProbeContext) -> u64 {
    ctx.ret::<u64>()
}

/// Reads a value of the traced process. Its memory may be anything: a fault is an answer.
#[inline(always)]
pub fn read<T: Copy>(address: u64) -> Option<T> {
    let mut value = core::mem::MaybeUninit::<T>::uninit();
    // SAFETY: the helper writes at most the size given, into a value of that size, and zeroes it on a fault.
    let error = unsafe { bpf_probe_read_user(value.as_mut_ptr().cast(), size_of::<T>() as u32, address as *const _) };
    // SAFETY: it was written by the helper; T is a plain number or an array of them.
    (error == 0).then(|| unsafe { value.assume_init() })
}
