//! Recordings: replayed they give the verdicts that were given live, whatever was recorded and wherever it is cut; and
//! whatever is in a file, reading it ends well.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "fixtures/inputs.rs"]
mod inputs;

use std::{collections::HashMap, sync::Arc, time::Duration};

use dislodge::{
    core::{Core, Effects, Input, Pace},
    event::{Body, Event, Phase, Rid, Room, clock::Monotonic},
    record::{
        anonymize::anonymize,
        flight::Flight,
        format::{FRAME_HEAD, FrameHead, FrameKind, write_frame},
        reader::{End, Reader},
        recorder::Span,
        replay::{Replay, ReplayError, Summary, Told},
    },
    request::{
        gauge::{GaugeState, Gauges},
        tracker::Limits,
    },
    rule::{
        RuleSet,
        load::{Source, load},
    },
    verdict::Verdict,
};
use inputs::{SECOND, Step, inputs as inputs_of, process, steps};
use proptest::{prelude::*, strategy::ValueTree as _, test_runner::TestRunner};

const LIMITS: Limits = Limits { requests: 4, transfers: 3 };
const LONG: Span = Span { time: Duration::from_secs(86_400), bytes: 64 << 20 };

fn rules() -> RuleSet {
    let causes = ["RoomCollision", "UpdateDropped", "AbortIgnored", "Parked", "TransferStalled", "CompletionError"];
    let rule = |cause: &str| format!("  - {{name: {cause}, when: 'cause == \"{cause}\"', for: 1s, severity: info}}\n");
    let text = format!(
        "rules:\n{}  - {{name: Waiting, when: inflight, severity: info}}\n  - {{name: Sure, when: 'confidence == \"high\"', \
         for: 2s, severity: info}}\n  - {{name: Gauge, when: 'inflight && server_gauge != \"not_known\"', severity: \
         info}}\n",
        causes.map(rule).concat()
    );
    load(&[Source { file: "r.yaml", text: &text }]).unwrap()
}

/// The verdicts of a running agent, and its recorder.
fn live(inputs: Vec<Input>, span: Span) -> (Vec<Arc<Verdict>>, Flight) {
    let mut flight = Flight::new(rules(), LIMITS, "node-secret", Some(span), Monotonic(0));
    let mut effects = Effects::default();
    inputs.into_iter().for_each(|input| flight.apply(input, &mut effects));
    (effects.verdicts, flight)
}

fn file(flight: &Flight) -> Vec<u8> {
    let mut file = Vec::new();
    flight.recording().unwrap().write(&mut file).unwrap();
    file
}

fn replay(file: &[u8]) -> Result<(Vec<Arc<Verdict>>, Summary), ReplayError> {
    let mut verdicts = Vec::new();
    let (summary, _) = Replay::new(Reader::open(file)?, rules()).run(|told| {
        if let Told::Verdict(verdict) = told {
            verdicts.push(Arc::clone(verdict));
        }
        true
    })?;
    Ok((verdicts, summary))
}

fn whole(verdicts: &[Arc<Verdict>]) -> Vec<String> {
    verdicts.iter().map(|verdict| serde_json::to_string(&**verdict).unwrap()).collect()
}

/// What a verdict says, but for the words of its evidence: those of an alert whose request has gone are those of the last
/// change before the snapshot, and a snapshot makes them anew.
fn said(verdict: &Verdict) -> impl PartialEq + std::fmt::Debug + use<> {
    let diagnosis = (verdict.cause, verdict.diagnosis.quiescence, verdict.diagnosis.confidence);
    let request: (_, Option<Rid>, Room, Option<Phase>) =
        (verdict.request, verdict.rid.clone(), verdict.room, verdict.phase);
    (verdict.rule.to_string(), verdict.state, request, diagnosis, verdict.since, verdict.at, verdict.waiting_since)
}

fn contains(file: &[u8], words: &[u8]) -> bool {
    file.windows(words.len()).any(|window| window == words)
}

/// The frames of a file with checksums that fit; what is no frame stays as it is.
fn mended(file: &[u8]) -> Vec<u8> {
    let (mut mended, mut rest) = (Vec::new(), file);
    while let Some((head, after)) = rest.split_first_chunk::<FRAME_HEAD>() {
        let Some(head) = FrameHead::read(head) else { break };
        let (payload, after) = after.split_at(after.len().min(head.length as usize));
        write_frame(&mut mended, head.kind, payload).unwrap();
        rest = after;
    }
    mended.extend_from_slice(rest);
    mended
}

/// What the properties below are about does happen in their streams.
#[test]
fn streams_make_alerts_of_every_state_and_recordings_that_lost_their_beginning_in_the_middle_of_one() {
    let mut runner = TestRunner::deterministic();
    let (mut states, mut begun_late) = (HashMap::new(), 0);
    for _ in 0..200 {
        let steps = steps().new_tree(&mut runner).unwrap().current();
        let (told, flight) = live(inputs_of(&steps), Span { time: Duration::from_secs(30), ..LONG });
        told.iter().for_each(|verdict| *states.entry(verdict.state.name()).or_insert(0) += 1);
        let (again, summary) = replay(&file(&flight)).unwrap();
        let goes_on = again.iter().any(|verdict| summary.span.is_some_and(|(first, _)| verdict.since < first));
        begun_late += u32::from(summary.dropped.inputs > 0 && goes_on);
    }
    assert!(states.len() == 3 && states.values().all(|count| *count > 40), "{states:?}");
    assert!(begun_late > 5, "{begun_late}");
}

#[test]
fn what_a_servers_page_said_is_recorded_as_it_was_and_goes_on_in_a_snapshot() {
    let second = |seconds: u64| Monotonic(seconds * SECOND);
    let event = |seconds, body| {
        Input::Event(Event { pid: 7, tid: 7, at: second(seconds), sequence: 1, detail_lost: false, body })
    };
    let gauges = Gauges {
        prefill_inflight: Some(2),
        prefill_bootstrap: Some(3),
        decode_prealloc: None,
        decode_transfer: Some(u32::MAX),
        is_old_spelling: true,
    };
    let page = |seconds| Input::ServerMetrics { process: process(false), gauges, at: second(seconds) };
    let told = || {
        let mut told = inputs_of(&[]);
        told.extend([event(2, Body::Pass { queue_length: 1, passes: 9 }), page(20), page(35)]);
        told.into_iter()
    };
    // Long after: what came before is in the recording's snapshot only.
    let ticks = || (40..400).map(|seconds| Input::Tick { now: second(seconds), pace: Pace::As(None) });
    for (span, is_cut) in [(LONG, false), (Span { time: Duration::from_secs(30), ..LONG }, true)] {
        let (_, flight) = live(told().chain(ticks()).collect(), span);
        let known =
            |core: &Core| core.tracker().server(process(false)).map(|it| (it.gauge.read.clone(), it.gauge.queue_rests));
        let expected = GaugeState { gauges, at: second(35), since: second(20), readings: 2 };
        assert_eq!(known(&flight), Some((Some(Box::new(expected)), Some(second(2)))));
        let file = file(&flight);
        let (summary, core) = Replay::new(Reader::open(&file[..]).unwrap(), rules()).run(|_| true).unwrap();
        assert_eq!((known(&core), summary.dropped.inputs > 0, summary.unknown), (known(&flight), is_cut, 0));
    }
}

proptest! {
    #[test]
    fn a_replay_gives_the_verdicts_that_were_given_live(steps in steps()) {
        let (told, flight) = live(inputs_of(&steps), LONG);
        let (again, summary) = replay(&file(&flight)).unwrap();
        prop_assert_eq!(whole(&told), whole(&again));
        prop_assert_eq!(summary.end, Some(End::Whole));
        let events = steps.iter().filter(|(_, step)| matches!(step, Step::Event(..))).count() as u64;
        prop_assert_eq!((summary.events, summary.unknown, summary.damaged), (events, 0, 0));
    }

    /// What is left after the oldest blocks were dropped begins at a snapshot: at any tick.
    #[test]
    fn a_recording_that_has_lost_its_beginning_gives_the_same_verdicts_from_there_on(steps in steps(), seconds in 1..60_u64) {
        let span = Span { time: Duration::from_secs(seconds), bytes: 64 << 20 };
        let (told, flight) = live(inputs_of(&steps), span);
        let (again, summary) = replay(&file(&flight)).unwrap();
        let expected: Vec<_> = told.iter().skip(told.len() - again.len()).map(|verdict| said(verdict)).collect();
        prop_assert_eq!(again.iter().map(|verdict| said(verdict)).collect::<Vec<_>>(), expected);
        let since = summary.span.map_or(Monotonic(u64::MAX), |(first, _)| first);
        prop_assert_eq!(told.iter().filter(|verdict| verdict.at >= since).count(), again.len(), "none is missing");
    }

    #[test]
    fn a_file_that_is_cut_anywhere_replays_what_is_there(steps in steps(), cut in 0.0..1.0_f64) {
        let (told, flight) = live(inputs_of(&steps), LONG);
        let file = file(&flight);
        let cut = (file.len() as f64 * cut) as usize;
        match replay(&file[..cut]) {
            Ok((again, summary)) => {
                prop_assert_eq!(whole(&told[..again.len()]), whole(&again));
                prop_assert_eq!(summary.end, Some(End::Cut { at: cut as u64 }));
            }
            Err(error) => prop_assert!(matches!(error, ReplayError::Read(_)), "{error}"),
        }
    }

    #[test]
    fn a_file_with_a_wrong_byte_is_read_to_some_end(steps in steps(), place: prop::sample::Index, byte: u8) {
        let (_, flight) = live(inputs_of(&steps), Span { time: Duration::from_secs(16), ..LONG });
        let mut file = file(&flight);
        let place = place.index(file.len());
        file[place] ^= byte | 1;
        // With a checksum that fits, the byte reaches what reads the values.
        let _ = replay(&file);
        let _ = replay(&mended(&file));
    }

    #[test]
    fn any_bytes_are_read_to_some_end(bytes: Vec<u8>) {
        let _ = replay(&bytes);
        let mut file = file(&live(Vec::new(), LONG).1);
        write_frame(&mut file, FrameKind::Block, &bytes).unwrap();
        let _ = replay(&file);
    }

    #[test]
    fn without_names_the_verdicts_are_the_same_and_no_name_is_left(steps in steps()) {
        let (told, flight) = live(inputs_of(&steps), Span { time: Duration::from_secs(16), ..LONG });
        let named = file(&flight);
        let mut file = Vec::new();
        anonymize(Reader::open(named.as_slice()).unwrap(), &mut file).unwrap();
        let (again, _) = replay(&file).unwrap();
        let kept = &told[told.len() - again.len()..];
        let names_apart = |verdict: &Verdict| {
            let diagnosis = (verdict.cause, verdict.diagnosis.quiescence, verdict.diagnosis.confidence);
            (verdict.rule.to_string(), verdict.state, verdict.request, diagnosis, verdict.since, verdict.at)
        };
        prop_assert_eq!(
            kept.iter().map(|verdict| names_apart(verdict)).collect::<Vec<_>>(),
            again.iter().map(|verdict| names_apart(verdict)).collect::<Vec<_>>()
        );
        let (mut rooms, mut rids) = (HashMap::new(), HashMap::new());
        for (verdict, again) in kept.iter().zip(&again) {
            prop_assert_eq!(*rooms.entry(verdict.room).or_insert(again.room), again.room, "one room, one hash");
            prop_assert_eq!(verdict.room == Room::OutOfRange, again.room == Room::OutOfRange);
            let rid = again.rid.as_ref().map(|rid| rid.text.clone());
            prop_assert_eq!(rids.entry(verdict.rid.clone()).or_insert(rid.clone()), &rid, "one id, one hash");
        }
        prop_assert!(!contains(&file, b"secret"), "a word is left");
        for room in 770_001..770_006_u64 {
            prop_assert!(!contains(&file, room.to_string().as_bytes()), "a room is left in a notification");
            let mut number = vec![0x1a];
            number.extend((room as u32).to_be_bytes());
            prop_assert!(!contains(&file, &number), "a room is left");
        }
    }
}
