//! Takes the agent's end of the hook's control channel out of a server process.
//!
//! The channel has no path and no port: the hook holds a socketpair and a memory file that names its number. What is
//! taken is checked before the first read, since a hostile process may hold anything under that name.

use std::{
    fs::{self, File},
    io::{self, Read as _},
    os::fd::{AsFd as _, OwnedFd},
};

use rustix::{
    fs::FlockOperation,
    net::{RecvFlags, SocketType},
    process::{Pid, PidfdFlags, PidfdGetfdFlags},
};
use serde::{Deserialize, Serialize};

use crate::{
    event::{Hello, ProcessKey},
    target::discover::process_key,
};

/// Version of the control protocol that this agent speaks.
pub const PROTOCOL: u32 = 1;
/// Longest message in bytes, both ways.
pub const MAX_MESSAGE: usize = 4096;
/// What the memory file's link in `/proc/PID/fd` begins with.
const MEMFD: &str = "/memfd:dislodge-hook";
/// Longest content of the memory file that is read.
const MAX_CONTENT: u64 = 2048;
/// Entries of `/proc/PID/fd` that are looked at.
const MAX_FDS: usize = 65_536;
/// Stale messages that are drained before the channel counts as hostile.
const MAX_DRAIN: usize = 256;

/// What the hook's memory file says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HookFile {
    /// Version of the hook.
    pub hook: String,
    /// Version of the control protocol that it speaks.
    pub protocol: u32,
    /// Number of the agent's end in the server process.
    pub fd: i32,
    /// What the server says of itself.
    #[serde(default)]
    pub server: Box<Hello>,
}

/// The agent's end, and the lock that keeps a second agent out.
#[derive(Debug)]
pub struct Taken {
    /// The agent's end of the socketpair.
    pub socket: OwnedFd,
    /// What the hook says of itself.
    pub hook: HookFile,
    _lock: File,
}

/// Why the channel could not be taken.
#[derive(Debug, thiserror::Error)]
pub enum TakeError {
    /// The process cannot be looked at.
    #[error("cannot look at the process: {0}")]
    Process(io::Error),
    /// The hook has made no memory file (yet): it makes one on the first pass of a prefill scheduler.
    #[error("the hook is not active in this process")]
    NotActive,
    /// The memory file is not the hook's.
    #[error("the hook's memory file cannot be read: {0}")]
    BadFile(String),
    /// The hook is of another version.
    #[error("the hook speaks protocol {0}, this agent speaks {PROTOCOL}: install the hook of this agent's version")]
    OtherProtocol(u32),
    /// Another agent has it.
    #[error("another agent holds the hook of this process")]
    HeldByAnother,
    /// The rights are missing.
    #[error("may not take the hook's channel ({0}): the agent needs CAP_SYS_PTRACE")]
    NotPermitted(io::Error),
    /// What stands under that number is not the hook's socket.
    #[error("what the process offers as the hook's channel is {0}")]
    NotOurs(&'static str),
    /// The process was replaced meanwhile.
    #[error("the process ended meanwhile")]
    Ended,
}

impl TakeError {
    /// Label value of metrics.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Process(_) => "process",
            Self::NotActive => "not_active",
            Self::BadFile(_) => "bad_file",
            Self::OtherProtocol(_) => "other_protocol",
            Self::HeldByAnother => "held_by_another",
            Self::NotPermitted(_) => "not_permitted",
            Self::NotOurs(_) => "not_ours",
            Self::Ended => "ended",
        }
    }
}

/// What the hook in a process says of itself; nothing is taken.
pub fn inspect(pid: u32) -> Result<HookFile, TakeError> {
    open_hook_file(pid).map(|(_, hook)| hook)
}

/// Takes the agent's end of the channel of a process, drained of whatever an earlier agent left in it.
pub fn take(key: ProcessKey) -> Result<Taken, TakeError> {
    let (lock, hook) = open_hook_file(key.pid)?;
    if hook.fd < 0 {
        return Err(TakeError::BadFile(format!("{} is no descriptor", hook.fd)));
    }
    if hook.protocol != PROTOCOL {
        return Err(TakeError::OtherProtocol(hook.protocol));
    }
    rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive).map_err(|_| TakeError::HeldByAnother)?;
    let pid = i32::try_from(key.pid).ok().and_then(Pid::from_raw).ok_or(TakeError::Ended)?;
    let process = rustix::process::pidfd_open(pid, PidfdFlags::empty()).map_err(|_| TakeError::Ended)?;
    // The pidfd names whatever process has the pid now; only then is the start time worth comparing.
    if process_key(key.pid) != Some(key) {
        return Err(TakeError::Ended);
    }
    let socket = rustix::process::pidfd_getfd(&process, hook.fd, PidfdGetfdFlags::empty())
        .map_err(|error| TakeError::NotPermitted(error.into()))?;
    check_socket(&socket, pid)?;
    drain(&socket)?;
    Ok(Taken { socket, hook, _lock: lock })
}

fn open_hook_file(pid: u32) -> Result<(File, HookFile), TakeError> {
    let entries = fs::read_dir(format!("/proc/{pid}/fd")).map_err(TakeError::Process)?;
    let path = entries
        .flatten()
        .take(MAX_FDS)
        .map(|entry| entry.path())
        .find(|path| {
            fs::read_link(path).is_ok_and(|link| link.as_os_str().as_encoded_bytes().starts_with(MEMFD.as_bytes()))
        })
        .ok_or(TakeError::NotActive)?;
    let file = File::open(path).map_err(TakeError::Process)?;
    let mut text = String::new();
    (&file).take(MAX_CONTENT).read_to_string(&mut text).map_err(|error| TakeError::BadFile(error.to_string()))?;
    let hook = serde_json::from_str(&text).map_err(|error| TakeError::BadFile(error.to_string()))?;
    Ok((file, hook))
}

fn check_socket(socket: &OwnedFd, pid: Pid) -> Result<(), TakeError> {
    use rustix::net::sockopt;
    let socket = socket.as_fd();
    match sockopt::socket_type(socket) {
        Ok(SocketType::SEQPACKET) => {}
        Ok(_) => return Err(TakeError::NotOurs("a socket of another type")),
        Err(_) => return Err(TakeError::NotOurs("not a socket")),
    }
    let peer = sockopt::socket_peercred(socket).map_err(|_| TakeError::NotOurs("a socket without a peer"))?;
    if peer.pid != pid {
        return Err(TakeError::NotOurs("a socket of another process"));
    }
    let flags = rustix::fs::fcntl_getfl(socket).map_err(|_| TakeError::NotOurs("not open"))?;
    if !flags.contains(rustix::fs::OFlags::NONBLOCK) {
        return Err(TakeError::NotOurs("a blocking socket"));
    }
    Ok(())
}

fn drain(socket: &OwnedFd) -> Result<(), TakeError> {
    let mut buffer = [0; MAX_MESSAGE];
    for _ in 0..MAX_DRAIN {
        match rustix::net::recv(socket, &mut buffer, RecvFlags::DONTWAIT) {
            Ok((_, 0)) => return Err(TakeError::NotOurs("closed")),
            Ok(_) => {}
            Err(rustix::io::Errno::AGAIN) => return Ok(()),
            Err(_) => return Err(TakeError::NotOurs("a socket that cannot be read")),
        }
    }
    Err(TakeError::NotOurs("a socket that never empties"))
}
