//! How much is kept, and that what is not is counted.

use super::*;
use crate::{
    core::{Effects, Pace},
    event::{Body, Event, ProcessKey},
    record::reader::{Found, Item, Reader},
    request::tracker::{Limits, Parting},
    rule::RuleSet,
};

const MEBIBYTE: usize = 1 << 20;
const PROCESS: ProcessKey = ProcessKey { pid: 7, start: 1 };

fn core() -> Core {
    let mut core = Core::new(RuleSet::default(), Limits { requests: 100_000, transfers: 10 });
    let attach = Input::Attach { process: PROCESS, identity: Box::default(), clock_offset: 0 };
    core.apply(attach, &mut Effects::default());
    core
}

fn event(serial: u64) -> Input {
    let body = Body::Open { room: crate::event::Room::Number(serial), sender: serial, backend: Default::default() };
    Input::Event(Event { pid: 7, tid: 7, at: Monotonic(serial), sequence: serial, detail_lost: false, body })
}

fn recorder(bytes: usize) -> Recorder {
    Recorder::new(Span { time: Duration::from_secs(3_600), bytes })
}

fn inputs(recorder: &Recorder) -> u64 {
    let mut file = Vec::new();
    recorder.recording(header()).write(&mut file).unwrap();
    let mut reader = Reader::open(file.as_slice()).unwrap();
    let mut count = 0;
    while let Found::Block(block) = reader.next_block().unwrap() {
        count += block.items(false).filter(|item| matches!(item, Item::Input(_))).count() as u64;
    }
    count
}

fn header() -> Header {
    Header {
        agent: String::new(),
        kernel: String::new(),
        boot: String::new(),
        node: String::new(),
        at: Monotonic(0),
        wall: 0,
        rules: String::new(),
        limits: Limits { requests: 1, transfers: 1 },
        dropped: Dropped::default(),
        anonymized: false,
    }
}

#[test]
fn the_oldest_go_when_there_are_too_many_and_each_one_is_kept_or_counted() {
    let (core, mut recorder) = (core(), recorder(MEBIBYTE));
    recorder.turn(&core, Monotonic(0));
    let all = 100_000;
    for serial in 0..all {
        recorder.record(&event(serial));
        if serial % 100 == 0 {
            recorder.turn(&core, Monotonic(serial));
        }
        assert!(recorder.bytes() <= MEBIBYTE);
    }
    let dropped = recorder.dropped();
    assert!(dropped.inputs > 0 && recorder.bytes() > MEBIBYTE / 2, "{dropped:?}");
    assert_eq!((inputs(&recorder) + dropped.inputs, dropped.not_recorded), (all, 0));
}

#[test]
fn a_storm_between_two_ticks_stays_within_the_bound_and_the_next_tick_begins_anew() {
    let (core, mut recorder) = (core(), recorder(MEBIBYTE));
    recorder.turn(&core, Monotonic(0));
    (0..100_000).for_each(|serial| recorder.record(&event(serial)));
    assert!(recorder.bytes() <= MEBIBYTE);
    let dropped = recorder.dropped();
    assert_eq!((dropped.inputs + dropped.not_recorded, inputs(&recorder)), (100_000, 0));
    recorder.turn(&core, Monotonic(1));
    recorder.record(&Input::Tick { now: Monotonic(2), pace: Pace::As(None) });
    assert_eq!(inputs(&recorder), 1);
}

#[test]
fn where_a_snapshot_has_no_room_nothing_is_kept_and_it_is_tried_again_later() {
    let (mut core, mut recorder) = (core(), recorder(MEBIBYTE));
    (0..20_000).for_each(|serial| core.apply(event(serial), &mut Effects::default()));
    recorder.turn(&core, Monotonic(1));
    recorder.record(&event(1));
    assert_eq!((recorder.dropped().not_recorded, recorder.bytes()), (1, 0));
    core.apply(Input::Detach { process: PROCESS, why: Parting::Ended, at: Monotonic(2) }, &mut Effects::default());
    recorder.turn(&core, Monotonic(2));
    assert_eq!(recorder.bytes(), 0, "too soon");
    recorder.turn(&core, Monotonic(2).plus(PATIENCE));
    assert!(recorder.bytes() > 0);
}
