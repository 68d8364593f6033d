//! The canary that is sent in before the first return probe: on this machine's kernel, and with canaries made to die.
//!
//! Those are this test's own program, started anew with [`CANARY`] in its environment, so that they can be put under what
//! the agent never puts itself under.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "support/support.rs"]
mod support;

use std::{
    ffi::CStr,
    fs, hint,
    io::{self, Read as _},
    os::{fd::AsFd as _, unix::net::UnixStream},
    process::{Command, Stdio},
    sync::atomic::{AtomicU8, AtomicU32, Ordering},
};

use dislodge::kernel::canary::{self, Outcome, ReturnProbes};
use support::needs;

/// Which canary a started program is.
const CANARY: &str = "DISLODGE_TEST_CANARY";
/// This program, wherever it is.
const SELF: &CStr = c"/proc/self/exe";
/// The agent.
const AGENT: &CStr = match CStr::from_bytes_with_nul(concat!(env!("CARGO_BIN_EXE_dislodge"), "\0").as_bytes()) {
    Ok(path) => path,
    Err(_) => panic!("no path has a zero in it"),
};
const SIGSYS: i32 = 31;

/// What the agent needs for any uprobe.
fn uprobes() -> Result<(), String> {
    fs::metadata("/sys/bus/event_source/devices/uprobe/type").map_err(|error| format!("no uprobes: {error}"))?;
    match agents_canary() {
        Outcome::NotPossible { reason } if reason.contains("os error 1)") || reason.contains("os error 13)") => {
            Err(reason)
        }
        _ => Ok(()),
    }
}

fn agents_canary() -> Outcome {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dislodge"));
    command.arg(canary::SUBCOMMAND);
    canary::send(command, AGENT)
}

/// Sends in a canary that is this test again.
fn send(test: &str, kind: &str) -> Outcome {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test]).env(CANARY, kind);
    canary::send(command, SELF)
}

/// Which canary this program is to be, if it is one.
fn kind() -> Option<String> {
    std::env::var(CANARY).ok()
}

fn channel() -> UnixStream {
    UnixStream::from(io::stdin().as_fd().try_clone_to_owned().unwrap())
}

/// Number of calls so far, for a canary whose second call is another than its first.
static CALLS: AtomicU32 = AtomicU32::new(0);
/// Whether the system calls of this thread are let through (`SYSCALL_DISPATCH_FILTER_ALLOW`, `…_BLOCK`).
static SELECTOR: AtomicU8 = AtomicU8::new(0);
/// Where system calls are always let through: no code is there. (The kernel wants a region that is not empty.)
static NOWHERE: [u8; 1] = [0];

/// Makes a system call when it is called for the second time.
#[inline(never)]
fn asks_for_its_parent(argument: u64) -> u64 {
    if CALLS.fetch_add(1, Ordering::Relaxed) > 0 {
        hint::black_box(rustix::process::getppid());
    }
    hint::black_box(argument)
}

/// Makes no system call, and blocks all until its caller lets them through again: its return must not make one either.
#[inline(never)]
fn returns_with_system_calls_blocked(argument: u64) -> u64 {
    SELECTOR.store(1, Ordering::SeqCst);
    hint::black_box(argument)
}

#[test]
fn the_agents_own_canary_survives_or_return_probes_are_refused() {
    let Some(()) = needs(uprobes()) else { return };
    let outcome = agents_canary();
    println!("{}: {outcome:?}", fs::read_to_string("/proc/sys/kernel/osrelease").unwrap().trim());
    match &outcome {
        Outcome::Survived => assert_eq!(ReturnProbes::from(&outcome), ReturnProbes::Allowed),
        // Linux 6.11 to 6.13.
        Outcome::Died { signal } => assert!([11, SIGSYS].contains(signal), "{outcome:?}"),
        Outcome::NotPossible { reason } => panic!("{reason}"),
    }
}

#[test]
fn a_canary_that_its_filter_kills_at_the_probed_call_means_refused() {
    const NAME: &str = "a_canary_that_its_filter_kills_at_the_probed_call_means_refused";
    if kind().is_some() {
        let function = hint::black_box(asks_for_its_parent as fn(u64) -> u64);
        let filter = seccompiler::SeccompFilter::new(
            [(libc::SYS_getppid, vec![])].into(),
            seccompiler::SeccompAction::Allow,
            seccompiler::SeccompAction::KillProcess,
            std::env::consts::ARCH.try_into().unwrap(),
        );
        let program: seccompiler::BpfProgram = filter.unwrap().try_into().unwrap();
        seccompiler::apply_filter(&program).unwrap();
        let _ = canary::serve(channel(), function as usize, || {
            function(0);
        });
        return;
    }
    let Some(()) = needs(uprobes()) else { return };
    let outcome = send(NAME, "killed");
    assert_eq!(outcome, Outcome::Died { signal: SIGSYS });
    let ReturnProbes::Refused { why } = ReturnProbes::from(&outcome) else { panic!("it died") };
    assert!(why.contains("signal 31") && why.contains("seccomp"), "{why}");
}

/// What kernels from 6.11 on do where nothing exempts the return's system call: syscall user dispatch refuses it as an
/// unfixed seccomp filter would.
#[test]
fn a_canary_that_dies_of_the_returns_own_system_call_means_refused() {
    const NAME: &str = "a_canary_that_dies_of_the_returns_own_system_call_means_refused";
    if kind().is_some() {
        let function = hint::black_box(returns_with_system_calls_blocked as fn(u64) -> u64);
        // SAFETY: the selector is static, and no system call is made before it is reset.
        unsafe { rustix::thread::enable_syscall_user_dispatch(&NOWHERE, &SELECTOR) }.unwrap();
        let _ = canary::serve(channel(), function as usize, || {
            function(0);
            SELECTOR.store(0, Ordering::SeqCst);
        });
        return;
    }
    let Some(()) = needs(uprobes().and_then(|()| returns_by_system_call())) else { return };
    assert_eq!(send(NAME, "blocked"), Outcome::Died { signal: SIGSYS });
}

/// Whether a probed function returns through a system call here.
fn returns_by_system_call() -> Result<(), String> {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let mut numbers = release.split('.').map_while(|number| number.parse::<u32>().ok());
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    if cfg!(target_arch = "x86_64") && version >= (6, 11) {
        Ok(())
    } else {
        Err(format!("Linux {release} returns from a probed function by a trap, not by a system call"))
    }
}

#[test]
fn a_canary_that_dies_before_its_probe_proves_nothing() {
    const NAME: &str = "a_canary_that_dies_before_its_probe_proves_nothing";
    if kind().is_some() {
        // The function's first call is the one without a probe.
        CALLS.store(1, Ordering::Relaxed);
        let filter = canary::filter([]).unwrap();
        seccompiler::apply_filter(&filter).unwrap();
        let _ = canary::serve(channel(), asks_for_its_parent as fn(u64) -> u64 as usize, || ());
        return;
    }
    let outcome = send(NAME, "dead");
    assert!(
        matches!(&outcome, Outcome::NotPossible { reason } if reason.contains("did not get as far")),
        "{outcome:?}"
    );
}

#[test]
fn a_canary_whose_probe_is_never_reached_proves_nothing() {
    const NAME: &str = "a_canary_whose_probe_is_never_reached_proves_nothing";
    if kind().is_some() {
        canary::serve(channel(), asks_for_its_parent as fn(u64) -> u64 as usize, || ()).unwrap();
        return;
    }
    let Some(()) = needs(uprobes()) else { return };
    let outcome = send(NAME, "missed");
    assert!(matches!(&outcome, Outcome::NotPossible { reason } if reason.contains("did not fire")), "{outcome:?}");
}

#[test]
fn the_hidden_subcommand_ends_by_itself_when_nobody_sent_it() {
    let done =
        Command::new(env!("CARGO_BIN_EXE_dislodge")).arg(canary::SUBCOMMAND).stdin(Stdio::null()).output().unwrap();
    assert_eq!(done.status.code(), Some(1), "{done:?}");
    let mut help = Vec::new();
    let shown = Command::new(env!("CARGO_BIN_EXE_dislodge")).arg("--help").output().unwrap();
    shown.stdout.as_slice().read_to_end(&mut help).unwrap();
    assert!(!String::from_utf8_lossy(&help).contains("  canary"), "it is hidden");
}
