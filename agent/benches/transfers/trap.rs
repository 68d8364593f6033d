//! What a probe costs apart from its program, by the first instruction of the function: on functions of this process.

use std::time::Duration;

use dislodge::{
    event::ProcessKey,
    kernel::Kernel,
    target::{code::Prologue, mapping, marker::MarkerSite},
};
use dislodge_ebpf::MARK_PROGRAM;

use crate::{
    programs::{self, Names},
    turns::median,
};

const ROUNDS: usize = 7;
const CALLS: u32 = 20_000;

type Probed = extern "C" fn(u32, u64, u64, u64, u64);

/// A function for each first instruction that engines' functions have, which does nothing else.
#[cfg(target_arch = "x86_64")]
mod probed {
    use std::arch::naked_asm;

    #[unsafe(naked)]
    pub(super) extern "C" fn push(_: u32, _: u64, _: u64, _: u64, _: u64) {
        naked_asm!("push rbp", "pop rbp", "ret")
    }

    #[unsafe(naked)]
    pub(super) extern "C" fn nop(_: u32, _: u64, _: u64, _: u64, _: u64) {
        naked_asm!("nop", "ret")
    }

    #[unsafe(naked)]
    pub(super) extern "C" fn mov(_: u32, _: u64, _: u64, _: u64, _: u64) {
        naked_asm!("mov eax, edi", "ret")
    }
}

#[cfg(target_arch = "x86_64")]
const PROBED: &[(Prologue, Probed)] =
    &[(Prologue::Push, probed::push), (Prologue::Nop, probed::nop), (Prologue::SingleStepped, probed::mov)];
#[cfg(not(target_arch = "x86_64"))]
const PROBED: &[(Prologue, Probed)] = &[];

/// Nanoseconds of a hit's trap.
pub(crate) struct Traps(Vec<(Prologue, f64)>);

impl Traps {
    /// Needs the kernel's statistics of programs to be on.
    pub(crate) fn measure(kernel: &mut Kernel, names: &Names, own: ProcessKey) -> Self {
        Self(PROBED.iter().map(|(prologue, function)| (*prologue, trap(kernel, names, own, *function))).collect())
    }

    pub(crate) fn at_entry(&self, prologue: Prologue) -> f64 {
        self.0.iter().find(|(known, _)| *known == prologue).map_or(f64::NAN, |(_, trap)| *trap)
    }

    pub(crate) fn all(&self) -> &[(Prologue, f64)] {
        &self.0
    }
}

/// What a call costs with the probe of marks on it, less the call and the program.
fn trap(kernel: &mut Kernel, names: &Names, own: ProcessKey, function: Probed) -> f64 {
    let site = site(own.pid, function as usize as u64);
    let traps = (0..ROUNDS).map(|_| {
        let without = nanoseconds_per_call(function);
        kernel.attach(own, &site).expect("the probe attaches");
        let before = programs::runs(names);
        let with = nanoseconds_per_call(function);
        let ran = programs::between(&before, &programs::runs(names));
        kernel.detach(own);
        kernel.wait_for_removal();
        with - without - ran[MARK_PROGRAM].each()
    });
    median(traps.collect())
}

fn site(pid: u32, address: u64) -> MarkerSite {
    let mappings = mapping::read(pid).expect("this process has mappings");
    let mapping =
        mappings.iter().find(|it| it.execute && it.start <= address && address < it.end).expect("mapped code");
    MarkerSite { file: "/proc/self/exe".into(), file_offset: address - mapping.start + mapping.file_offset }
}

fn nanoseconds_per_call(function: Probed) -> f64 {
    let before = this_thread();
    for _ in 0..CALLS {
        std::hint::black_box(function)(12, 77, 0x201, 1, 0);
    }
    (this_thread() - before).as_nanos() as f64 / f64::from(CALLS)
}

fn this_thread() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
