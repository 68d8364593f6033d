//! What a process may hold under the hook's name without being the hook: none of it is taken.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{
    fs::File,
    io::Write as _,
    os::fd::{AsRawFd as _, OwnedFd},
    sync::{Mutex, MutexGuard},
};

use dislodge::target::{
    discover::process_key,
    hook::{TakeError, Taken, take},
};
use rustix::{
    fs::{FlockOperation, MemfdFlags, memfd_create},
    net::{AddressFamily, SendFlags, SocketFlags, SocketType, recv, send, socketpair},
};

/// This process poses as the server, and there is one memory file of that name at a time.
static POSING: Mutex<()> = Mutex::new(());

/// A memory file as the hook makes it, in this process.
struct Posing {
    file: File,
    _alone: MutexGuard<'static, ()>,
}

fn pose(content: &str) -> Posing {
    let alone = POSING.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let mut file = File::from(memfd_create("dislodge-hook", MemfdFlags::CLOEXEC).unwrap());
    file.write_all(content.as_bytes()).unwrap();
    Posing { file, _alone: alone }
}

fn pose_with(fd: &OwnedFd) -> Posing {
    pose(&format!(r#"{{"hook":"0.1.0","protocol":1,"fd":{}}}"#, fd.as_raw_fd()))
}

fn try_take() -> Result<Taken, TakeError> {
    take(process_key(std::process::id()).unwrap())
}

fn pair(kind: SocketType, flags: SocketFlags) -> (OwnedFd, OwnedFd) {
    socketpair(AddressFamily::UNIX, kind, flags, None).unwrap()
}

fn as_the_hook_makes_it() -> (OwnedFd, OwnedFd) {
    pair(SocketType::SEQPACKET, SocketFlags::NONBLOCK)
}

fn reason(result: Result<Taken, TakeError>) -> &'static str {
    result.unwrap_err().name()
}

#[test]
fn the_hooks_own_channel_is_taken_and_works_both_ways() {
    let (ours, theirs) = as_the_hook_makes_it();
    let _posing = pose_with(&theirs);
    let taken = try_take().unwrap();
    send(&taken.socket, b"there", SendFlags::empty()).unwrap();
    let mut buffer = [0; 16];
    let (_, length) = recv(&ours, &mut buffer, rustix::net::RecvFlags::empty()).unwrap();
    assert_eq!(&buffer[..length], b"there");
}

#[test]
fn a_process_without_a_memory_file_has_no_hook() {
    let _alone = POSING.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    assert_eq!(reason(try_take()), "not_active");
}

#[test]
fn a_hook_of_another_protocol_is_named_so() {
    let _posing = pose(r#"{"hook":"9.0.0","protocol":2,"fd":0}"#);
    let error = try_take().err().unwrap();
    assert!(matches!(error, TakeError::OtherProtocol(2)), "{error}");
    assert!(error.to_string().contains("install the hook of this agent's version"));
}

#[test]
fn garbage_in_the_memory_file_is_an_error() {
    for content in ["", "{", "[]", "null", r#"{"hook":"x","protocol":1}"#, r#"{"hook":1,"protocol":1,"fd":1}"#] {
        let _posing = pose(content);
        assert_eq!(reason(try_take()), "bad_file", "{content}");
    }
    let _posing = pose(&format!(r#"{{"hook":"{}","protocol":1,"fd":1}}"#, "x".repeat(1 << 20)));
    assert_eq!(reason(try_take()), "bad_file", "a megabyte");
}

#[test]
fn a_number_that_is_no_descriptor_is_refused() {
    for (fd, expected) in [("-1", "bad_file"), ("-100", "bad_file"), ("999999", "not_permitted")] {
        let _posing = pose(&format!(r#"{{"hook":"0.1.0","protocol":1,"fd":{fd}}}"#));
        assert_eq!(reason(try_take()), expected, "{fd}");
    }
}

#[test]
fn what_is_no_socket_of_that_kind_is_refused() {
    let file: OwnedFd = File::open("/proc/self/stat").unwrap().into();
    let (stream, _peer) = pair(SocketType::STREAM, SocketFlags::NONBLOCK);
    let (blocking, _other) = pair(SocketType::SEQPACKET, SocketFlags::empty());
    for (what, fd) in [("a file", &file), ("a stream", &stream), ("a blocking socket", &blocking)] {
        let _posing = pose_with(fd);
        assert_eq!(reason(try_take()), "not_ours", "{what}");
    }
}

#[test]
fn what_an_earlier_agent_left_is_drained() {
    let (ours, theirs) = as_the_hook_makes_it();
    let _posing = pose_with(&theirs);
    let mut left = 0;
    while left < 200 && send(&ours, b"stale", SendFlags::empty()).is_ok() {
        left += 1;
    }
    assert!(left > 0);
    let taken = try_take().unwrap();
    let mut buffer = [0; 16];
    assert!(recv(&taken.socket, &mut buffer, rustix::net::RecvFlags::empty()).is_err(), "something was left");
}

#[test]
fn a_channel_whose_hook_is_gone_is_refused() {
    let (ours, theirs) = as_the_hook_makes_it();
    let _posing = pose_with(&theirs);
    drop(ours);
    assert_eq!(reason(try_take()), "not_ours");
}

#[test]
fn a_second_agent_is_refused_until_the_first_lets_go() {
    let (_ours, theirs) = as_the_hook_makes_it();
    let posing = pose_with(&theirs);
    let other = File::open(format!("/proc/self/fd/{}", posing.file.as_raw_fd())).unwrap();
    rustix::fs::flock(&other, FlockOperation::NonBlockingLockExclusive).unwrap();
    assert_eq!(reason(try_take()), "held_by_another");
    drop(other);
    assert!(try_take().is_ok());
}

#[test]
fn a_process_that_was_replaced_is_not_taken_for_the_old_one() {
    let (_ours, theirs) = as_the_hook_makes_it();
    let _posing = pose_with(&theirs);
    let mut key = process_key(std::process::id()).unwrap();
    key.start += 1;
    assert_eq!(reason(take(key)), "ended");
}
