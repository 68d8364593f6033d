use proptest::prelude::*;

use super::*;
use crate::event::native::{NIXL_REMOTE_DISCONNECT, failure_name};

fn native(object: u64, value: i64, size: u64) -> Native {
    Native { object, value: value as u64, size }
}

fn decoded(kind: Kind, flags: u16, native: Native, detail: &[u8]) -> NativeEvent {
    native_event(kind, flags, &native, detail).unwrap()
}

fn as_sent(peer: &[u8], message: &[u8]) -> Vec<u8> {
    let length = |bytes: &[u8]| (bytes.len() as u64).to_le_bytes();
    [b"nixlSerDes|name", &length(peer)[..], peer, b"|msg", &length(message), message, b"|"].concat()
}

#[test]
fn a_made_transfer_has_its_operation_descriptors_bytes_and_notification() {
    let event = decoded(Kind::NixlMade, 0, native(0x77, 1 | 4 << 8, 262_144), b"1000_kv_0_0_0");
    let NativeEvent::Made { handle, operation, parts, size, notification } = event else { panic!("{event:?}") };
    assert_eq!(handle, Handle { engine: Engine::Nixl, number: 0x77 });
    assert_eq!((operation, parts), (Some(Operation::Write), 4));
    assert_eq!(size, Some(Size { bytes: 262_144, estimated: false }));
    assert_eq!(notification, Some(Notification { bytes: b"1000_kv_0_0_0".to_vec(), cut: false }));
}

#[test]
fn a_notification_that_could_not_be_read_is_none_and_a_cut_one_says_so() {
    let made = |flags, detail: &[u8]| match decoded(Kind::NixlMade, flags, native(1, 1, 0), detail) {
        NativeEvent::Made { notification, .. } => notification,
        event => panic!("{event:?}"),
    };
    assert_eq!(made(flag::DETAIL_FAULT, b""), None);
    assert_eq!(made(0, b""), None);
    assert!(made(flag::DETAIL_TRUNCATED, b"12").unwrap().cut);
}

#[test]
fn statuses_are_those_of_their_engine() {
    let status = |kind, code| match decoded(kind, 0, native(1, code, 0), b"") {
        NativeEvent::Status { status, .. } | NativeEvent::Posted { status, .. } => status,
        event => panic!("{event:?}"),
    };
    assert_eq!(status(Kind::NixlPosted, 0), TransferStatus::Done);
    assert_eq!(status(Kind::NixlStatus, 1), TransferStatus::InProgress);
    assert_eq!(status(Kind::NixlPosted, -10), TransferStatus::Failed { code: NIXL_REMOTE_DISCONNECT });
    assert_eq!(status(Kind::MooncakeStatus, 4), TransferStatus::Done);
    assert_eq!(status(Kind::MooncakeStatus, 6), TransferStatus::Failed { code: 6 });
    assert_eq!(failure_name(Engine::Nixl, -10), "REMOTE_DISCONNECT");
    assert_eq!(failure_name(Engine::Mooncake, 6), "FAILED");
}

#[test]
fn a_release_without_a_status_says_that_it_is_not_known() {
    let status = |value| match decoded(Kind::NixlReleasing, 0, native(1, value, 0), b"") {
        NativeEvent::Releasing { status, .. } => status,
        event => panic!("{event:?}"),
    };
    assert_eq!(status(STATUS_NOT_READ), None);
    assert_eq!(status(1), Some(TransferStatus::InProgress));
    assert_eq!(status(0), Some(TransferStatus::Done));
    assert_eq!(status(-1), Some(TransferStatus::NotPosted));
}

#[test]
fn an_arrived_notification_is_taken_out_of_what_ucx_delivered_byte_for_byte() {
    for message in [&b"1000_kv_0_1_0"[..], b"", b"|msg\0\xff|", &[0; 300]] {
        let event = decoded(Kind::NixlNotificationArrived, 0, native(0, 1, 0), &as_sent(b"prefill", message));
        let expected = Notification { bytes: message.to_vec(), cut: false };
        assert_eq!(
            event,
            NativeEvent::NotificationArrived { peer: Some(Peer("prefill".into())), notification: expected }
        );
    }
}

#[test]
fn a_cut_notification_keeps_what_there_is_and_is_not_taken_for_a_whole_one() {
    let whole = as_sent(b"prefill", b"1000_kv_0_1_0");
    for length in 0..whole.len() - 1 {
        let flags = flag::DETAIL_TRUNCATED;
        let event = decoded(Kind::NixlNotificationArrived, flags, native(0, 1, 0), &whole[..length]);
        let NativeEvent::NotificationArrived { notification, .. } = event else { panic!("{event:?}") };
        assert!(notification.cut, "{length}: {notification:?}");
    }
}

#[test]
fn a_freed_batch_is_over_only_when_every_task_is() {
    let status = |value: u64, size: u64| match decoded(Kind::MooncakeFreed, 0, native(1, value as i64, size), b"") {
        NativeEvent::Releasing { status, .. } => status,
        event => panic!("{event:?}"),
    };
    let (busy, failed) = (1, 1 << 32);
    assert_eq!(status(0, 0), Some(TransferStatus::Done));
    assert_eq!(status(0, failed), Some(TransferStatus::Failed { code: 6 }));
    assert_eq!(status(4, busy | failed), Some(TransferStatus::InProgress), "the others go on");
    assert_eq!(status(4, 0), Some(TransferStatus::Done), "nobody asked, but all were complete");
    assert_eq!(status(batch::NOT_ALL_READ, 0), Some(TransferStatus::Done), "the engine has checked all of them");
    assert_eq!(status(batch::NOT_ALL_READ | 4, 0), Some(TransferStatus::InProgress));
    assert_eq!(status(batch::NOT_ALL_READ | batch::RESULT_NOT_SEEN, 0), None);
    assert_eq!(status(batch::RESULT_NOT_SEEN, 0), Some(TransferStatus::Done));
}

#[test]
fn an_endpoints_error_keeps_its_sign() {
    let event = decoded(Kind::EndpointError, 0, native(5, i64::from(-80i8 as u8) | 1 << 8, 0), b"");
    assert_eq!(event, NativeEvent::EndpointError { endpoint: 5, point: ErrorPoint::Ucp, status: -80 });
    assert!(native_event(Kind::EndpointError, 0, &native(5, 9 << 8, 0), b"").is_err());
}

proptest! {
    #[test]
    fn no_bytes_make_decoding_panic(number in 100u16..150, flags: u16, words: [u64; 3], detail: Vec<u8>) {
        if let Some(kind) = Kind::from_number(number) {
            let [object, value, size] = words;
            let _ = native_event(kind, flags, &Native { object, value, size }, &detail);
            let _ = native_event(kind, flags, &Native { object, value, size }, &as_sent(&detail, &detail));
        }
    }
}
