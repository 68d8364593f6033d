//! Bytes of an engine's events → [`NativeEvent`]. Pure; a traced process is the author of what they hold.

use std::time::Duration;

use dislodge_ebpf::wire::{Kind, NIXL_LOCAL_LIST, Native, STATUS_NOT_READ, batch, flag};

use super::{
    super::decode::DecodeError, Engine, ErrorPoint, Flush, Handle, NativeEvent, Notification, Operation, Peer, Size,
    TransferStatus,
};

/// The event of a native kind. `detail` is what BPF read of the notification.
pub(in crate::event) fn native_event(
    kind: Kind,
    flags: u16,
    native: &Native,
    detail: &[u8],
) -> Result<NativeEvent, DecodeError> {
    let &Native { object, value, size } = native;
    let nixl = Handle { engine: Engine::Nixl, number: object };
    let mooncake = Handle { engine: Engine::Mooncake, number: object };
    let code = value as i64 as i32;
    let unread = flags & flag::DETAIL_FAULT != 0;
    Ok(match kind {
        Kind::NixlMade => NativeEvent::Made {
            handle: nixl,
            operation: Some(Operation::from_number(value as u8)),
            parts: value >> 8,
            size: (size != 0).then_some(Size { bytes: size, estimated: flags & flag::SIZE_ESTIMATED != 0 }),
            notification: (!detail.is_empty() && !unread).then(|| notification(flags, detail)),
        },
        Kind::NixlNotMade => NativeEvent::NotMade { code },
        Kind::NixlPosting => NativeEvent::Posting {
            handle: nixl,
            operation: None,
            first_length: None,
            lists: [object.wrapping_add(NIXL_LOCAL_LIST), value],
        },
        Kind::NixlRangePosted => NativeEvent::RangePosted {
            list: object,
            flush: Flush::of_pointer(value),
            descriptors: u64::from(size as u32),
            took: Duration::from_nanos(size >> 32),
        },
        Kind::UcpFlushed => NativeEvent::Flushed { completion: object, status: value as i8 },
        Kind::NixlPosted => NativeEvent::Posted { handle: nixl, status: TransferStatus::of_nixl(code) },
        Kind::NixlStatus => NativeEvent::Status { handle: nixl, status: TransferStatus::of_nixl(code), moved: None },
        Kind::NixlReleasing => NativeEvent::Releasing {
            handle: nixl,
            status: (value as i64 != STATUS_NOT_READ).then(|| TransferStatus::of_nixl(code)),
        },
        Kind::NixlNotificationArrived => match serialised(detail) {
            Some((peer, bytes, complete)) => NativeEvent::NotificationArrived {
                peer: peer.map(Peer),
                notification: Notification { bytes: bytes.to_vec(), cut: !complete },
            },
            None => NativeEvent::NotificationArrived { peer: None, notification: notification(flags, detail) },
        },
        Kind::NixlNotificationSent => match serialised(detail).filter(|_| value != 0) {
            Some((_, bytes, complete)) => {
                NativeEvent::NotificationSent { notification: Notification { bytes: bytes.to_vec(), cut: !complete } }
            }
            None => NativeEvent::NotificationSent { notification: notification(flags, detail) },
        },
        Kind::MooncakeAllocated => {
            NativeEvent::Made { handle: mooncake, operation: None, parts: value, size: None, notification: None }
        }
        Kind::MooncakeSubmitting => NativeEvent::Posting {
            handle: mooncake,
            operation: Some(Operation::from_number(value as u8)),
            first_length: (!unread).then_some(size),
            lists: [0; 2],
        },
        Kind::MooncakeNotSubmitted => NativeEvent::Posted { handle: mooncake, status: TransferStatus::Failed { code } },
        Kind::MooncakeStatus => {
            NativeEvent::Status { handle: mooncake, status: TransferStatus::of_mooncake(code), moved: Some(size) }
        }
        Kind::MooncakeFreed => NativeEvent::Releasing { handle: mooncake, status: status_of_freed(value, size) },
        Kind::EndpointError => NativeEvent::EndpointError {
            endpoint: object,
            point: match value >> 8 {
                0 => ErrorPoint::Nixl,
                1 => ErrorPoint::Ucp,
                2 => ErrorPoint::Uct,
                _ => return Err(DecodeError::BadValue),
            },
            status: value as i8,
        },
        Kind::CompletionError => {
            NativeEvent::CompletionError { status: value as u32, vendor_error: (value >> 32) as u32, qp: size as u32 }
        }
        _ => return Err(DecodeError::UnknownKind),
    })
}

/// What became of a batch, from what its tasks said when it was freed and what freeing it returned: Mooncake refuses to
/// free one with a task whose end it was not asked for, and its Python side gives up all tasks when one has failed.
fn status_of_freed(value: u64, size: u64) -> Option<TransferStatus> {
    const FAILED: i32 = 6;
    let (incomplete, failed) = (size as u32, (size >> 32) as u32);
    let all_read = value & batch::NOT_ALL_READ == 0;
    let freed = (value & batch::RESULT_NOT_SEEN == 0).then_some(value as u16 == 0);
    if incomplete > 0 {
        return Some(TransferStatus::InProgress);
    }
    match (all_read, freed) {
        (true, _) | (false, Some(true)) if failed > 0 => Some(TransferStatus::Failed { code: FAILED }),
        (true, _) | (false, Some(true)) => Some(TransferStatus::Done),
        (false, Some(false)) => Some(TransferStatus::InProgress),
        (false, None) => None,
    }
}

fn notification(flags: u16, detail: &[u8]) -> Notification {
    let cut = flags & (flag::DETAIL_TRUNCATED | flag::DETAIL_FAULT) != 0;
    Notification { bytes: detail.to_vec(), cut }
}

/// Sender and message of a notification as NIXL's UCX plugin serialises it (`nixlSerDes`: a tag, a little-endian `u64`
/// length, that many bytes, `|`), and whether the message is complete.
fn serialised(data: &[u8]) -> Option<(Option<String>, &[u8], bool)> {
    let after = data.strip_prefix(b"nixlSerDes|name")?;
    let (peer, whole, after) = field(after)?;
    if !whole {
        return None;
    }
    let (message, whole, _) = field(after.strip_prefix(b"|msg")?)?;
    Some((std::str::from_utf8(peer).ok().map(str::to_owned), message, whole))
}

/// A length and that many bytes, or as many as there are; whether all were there; what follows.
fn field(data: &[u8]) -> Option<(&[u8], bool, &[u8])> {
    let (length, data) = data.split_first_chunk::<8>()?;
    let length = usize::try_from(u64::from_le_bytes(*length)).ok()?;
    Some(match data.split_at_checked(length) {
        Some((bytes, after)) => (bytes, true, after),
        None => (data, false, &[]),
    })
}

#[cfg(test)]
#[path = "decode_tests.rs"]
mod tests;
