//! Whether this kernel can be trusted with return probes: tried on a process of our own before any server has one.
//!
//! Since Linux 6.11 a probed function returns through a system call (`uretprobe`) that no seccomp profile of a container
//! runtime knew. Where the kernel lets the filter judge it (6.11 to 6.13, before "seccomp: passthrough uretprobe systemcall
//! without filtering"), the process dies. The canary is this program, started anew under such a filter, with a return
//! probe on one of its functions.

use std::{
    collections::BTreeMap,
    ffi::CStr,
    hint,
    io::{self, Read as _, Write as _},
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::{net::UnixStream, process::ExitStatusExt as _},
    },
    process::{Child, Command, ExitStatus, Stdio},
    time::Duration,
};

use perf_event_open::{
    config::{Cpu, Opts, Proc},
    count::Counter,
    event::dp::Uretprobe,
};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, TargetArch};
use serde::Serialize;

use crate::target::mapping;

/// The hidden subcommand that makes this program a canary.
pub const SUBCOMMAND: &str = "canary";
/// Longest wait for each of the canary's answers; it needs milliseconds.
const PATIENCE: Duration = Duration::from_secs(10);
/// What the canary is told to go on with, and what it says when it came through.
const GO: u8 = b'g';
/// What a container runtime's filter answers to what it does not allow (Docker, containerd: `SCMP_ACT_ERRNO`, EPERM).
const DENIED: SeccompAction = SeccompAction::Errno(libc::EPERM as u32);
/// What the canary needs of what container runtimes allow.
const ALLOWED: [i64; 19] = [
    libc::SYS_brk,
    libc::SYS_clock_gettime,
    libc::SYS_close,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_futex,
    libc::SYS_getrandom,
    libc::SYS_madvise,
    libc::SYS_mmap,
    libc::SYS_mprotect,
    libc::SYS_munmap,
    libc::SYS_read,
    libc::SYS_recvfrom,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sendto,
    libc::SYS_sigaltstack,
    libc::SYS_write,
];

/// What became of the canary.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "canary")]
pub enum Outcome {
    /// Its function returned through the probe, and it went on.
    Survived,
    /// It was killed as its function returned.
    Died {
        /// The signal that killed it.
        signal: i32,
    },
    /// It could not be tried.
    NotPossible {
        /// Why.
        reason: String,
    },
}

/// Whether return probes may be put on servers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ReturnProbes {
    /// The canary survived one.
    Allowed,
    /// It did not, or could not be tried: a server is not risked for it.
    Refused {
        /// Why, for people.
        why: String,
    },
}

impl From<&Outcome> for ReturnProbes {
    fn from(outcome: &Outcome) -> Self {
        match outcome {
            Outcome::Survived => Self::Allowed,
            Outcome::Died { signal } => Self::Refused {
                why: format!(
                    "on this kernel a return probe kills a process under a container's seccomp filter (a canary died of \
                     signal {signal}): use a kernel older than 6.11 or newer than 6.13"
                ),
            },
            Outcome::NotPossible { reason } => Self::Refused {
                why: format!(
                    "whether a return probe kills a process under a seccomp filter could not be tried: {reason}"
                ),
            },
        }
    }
}

/// Sends the canary in. Takes milliseconds, and half a minute at the very worst: call it where waiting does no harm.
pub fn check() -> Outcome {
    let mut command = Command::new("/proc/self/exe");
    command.arg(SUBCOMMAND);
    send(command, c"/proc/self/exe")
}

/// Starts a canary, a command whose `program` calls [`serve`] on its standard input, and says what became of it.
pub fn send(command: Command, program: &'static CStr) -> Outcome {
    match try_send(command, program) {
        Ok((ending, returns)) => judge(ending, returns),
        Err(reason) => Outcome::NotPossible { reason },
    }
}

/// How a canary ended, after its probe was attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ending {
    Exited(i32),
    Killed(i32),
}

/// What the ending means, given how many returns the probe saw.
fn judge(ending: Ending, returns: u64) -> Outcome {
    let not_possible = |reason: String| Outcome::NotPossible { reason };
    match (ending, returns) {
        (Ending::Killed(signal), _) => Outcome::Died { signal },
        (Ending::Exited(0), 0) => not_possible("the return probe did not fire".to_owned()),
        (Ending::Exited(0), _) => Outcome::Survived,
        (Ending::Exited(status), _) => not_possible(format!("the canary failed with exit status {status}")),
    }
}

fn try_send(mut command: Command, program: &'static CStr) -> Result<(Ending, u64), String> {
    let say = |what: &'static str| move |error: io::Error| format!("{what}: {error}");
    let (mut channel, theirs) = UnixStream::pair().map_err(say("no socket for the canary"))?;
    for set in [UnixStream::set_read_timeout, UnixStream::set_write_timeout] {
        set(&channel, Some(PATIENCE)).map_err(say("no time limit for the canary"))?;
    }
    command.stdin(OwnedFd::from(theirs)).stdout(Stdio::null()).stderr(Stdio::null());
    let mut canary = Caged(command.spawn().map_err(say("the canary does not start"))?);
    // The command holds the canary's end too: without this, a dead canary would look like a slow one.
    drop(command);

    let mut address = [0; size_of::<u64>()];
    if let Err(error) = channel.read_exact(&mut address) {
        return Err(format!("the canary did not get as far as its probe: {error}; {}", canary.end()));
    }
    let counter = attach(canary.0.id(), program, u64::from_le_bytes(address))
        .map_err(say("cannot attach a return probe to the canary"))?;
    let mut answer = [0];
    let came_through = channel.write_all(&[GO]).and_then(|()| channel.read_exact(&mut answer));
    if let Err(error) = came_through
        && matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
    {
        return Err(format!("the canary did not answer within {} s", PATIENCE.as_secs()));
    }
    drop(channel);
    let ending = ending(canary.wait().map_err(say("cannot wait for the canary"))?);
    Ok((ending, counter.stat().map(|stat| stat.count).map_err(say("cannot read the probe's count"))?))
}

/// Puts a return probe on the function at an address of a process. The kernel instruments the return though no BPF program
/// hangs on the event: it counts.
fn attach(pid: u32, program: &'static CStr, address: u64) -> io::Result<Counter> {
    let mappings = mapping::read(pid).map_err(io::Error::other)?;
    let code = mappings
        .iter()
        .find(|mapping| mapping.execute && (mapping.start..mapping.end).contains(&address))
        .ok_or_else(|| io::Error::other("its function is nowhere in its code"))?;
    let offset = address - code.start + code.file_offset;
    let counter = Counter::new(Uretprobe { path: program, offset }, (Proc(pid), Cpu::ALL), Opts::default())?;
    counter.enable()?;
    Ok(counter)
}

fn ending(status: ExitStatus) -> Ending {
    match (status.signal(), status.code()) {
        (Some(signal), _) => Ending::Killed(signal),
        (None, code) => Ending::Exited(code.unwrap_or(-1)),
    }
}

/// A canary that does not outlive the one who sent it.
struct Caged(Child);

impl Caged {
    fn wait(&mut self) -> io::Result<ExitStatus> {
        // It has answered or died, or its channel is closed by now: it ends by itself. If not, it is ended.
        let deadline = std::time::Instant::now() + PATIENCE;
        while std::time::Instant::now() < deadline {
            if let Some(status) = self.0.try_wait()? {
                return Ok(status);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Err(io::ErrorKind::TimedOut.into())
    }

    /// How it ended, in words.
    fn end(&mut self) -> String {
        self.wait().map_or_else(|error| error.to_string(), |status| status.to_string())
    }
}

impl Drop for Caged {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The canary's own side: what the hidden subcommand does, with the sender's socket as standard input.
pub fn sing() -> io::Result<()> {
    let channel = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let filter = filter(ALLOWED).map_err(io::Error::other)?;
    seccompiler::apply_filter(&filter).map_err(io::Error::other)?;
    serve(channel, probed as *const () as usize, || {
        hint::black_box(probed as fn(u64) -> u64)(0);
    })
}

/// Tells the sender where the probed function is, calls it without a probe and, when told, with one.
pub fn serve(mut channel: UnixStream, function: usize, mut call: impl FnMut()) -> io::Result<()> {
    call();
    channel.write_all(&(function as u64).to_le_bytes())?;
    let mut go = [0];
    channel.read_exact(&mut go)?;
    call();
    channel.write_all(&[GO])
}

/// Denies everything but these system calls, as a container runtime's filter does.
pub fn filter(allowed: impl IntoIterator<Item = i64>) -> Result<BpfProgram, seccompiler::BackendError> {
    let rules: BTreeMap<i64, Vec<_>> = allowed.into_iter().map(|call| (call, Vec::new())).collect();
    let architecture = TargetArch::try_from(std::env::consts::ARCH)?;
    SeccompFilter::new(rules, DENIED, SeccompAction::Allow, architecture)?.try_into()
}

/// What the probe is put on. It returns its argument, 0: a return that goes wrong jumps there, and nowhere else.
#[inline(never)]
fn probed(argument: u64) -> u64 {
    hint::black_box(argument)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_canary_that_returned_through_the_probe_has_survived() {
        assert_eq!(judge(Ending::Exited(0), 1), Outcome::Survived);
        assert!(matches!(judge(Ending::Exited(0), 0), Outcome::NotPossible { .. }));
        assert!(matches!(judge(Ending::Exited(1), 1), Outcome::NotPossible { .. }));
        assert_eq!(judge(Ending::Killed(31), 0), Outcome::Died { signal: 31 });
        assert_eq!(judge(Ending::Killed(11), 1), Outcome::Died { signal: 11 });
    }

    #[test]
    fn return_probes_are_refused_unless_the_canary_survived() {
        assert_eq!(ReturnProbes::from(&Outcome::Survived), ReturnProbes::Allowed);
        for outcome in [Outcome::Died { signal: 31 }, Outcome::NotPossible { reason: "no rights".into() }] {
            assert!(matches!(ReturnProbes::from(&outcome), ReturnProbes::Refused { .. }), "{outcome:?}");
        }
    }

    #[test]
    fn a_canary_that_does_not_start_proves_nothing() {
        assert!(matches!(send(Command::new("/nowhere/canary"), c"/nowhere/canary"), Outcome::NotPossible { .. }));
    }

    #[test]
    fn a_program_that_is_no_canary_proves_nothing() {
        let Outcome::NotPossible { reason } = send(Command::new("/bin/true"), c"/bin/true") else {
            panic!("it is none")
        };
        assert!(reason.contains("exit status: 0"), "{reason}");
    }
}
