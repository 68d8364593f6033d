//! One request through a recording: what concerns it, its room, its transfers, its server, and other ranks' requests of the
//! same room.

use std::{borrow::Cow, time::Duration};

use super::{
    answer::{self, Explanation, Line, Timeline},
    beside::{Counted, whose},
    lines::{Lines, Origin, Weight},
    remediation::{Surroundings, of_ended},
    state::{self, Times},
    transfers::{Known, Way},
    words,
};
use crate::{
    core::{Core, Effects, Input},
    diagnose::{Confidence, Diagnosis, Fact, diagnose},
    event::{
        Body, Event, Room,
        clock::{Monotonic, WallClock},
        native::NativeEvent,
        receiver::ReceiverEvent,
    },
    request::{Request, RequestKey, tracker::Step},
    rule::alert::AlertState,
};

/// For how long after its end what its transfers do still belongs to it.
const AFTERMATH: Duration = Duration::from_secs(60);

/// What is known of a request so far.
#[derive(Debug)]
pub(super) struct Follower {
    key: RequestKey,
    /// As it was when it was looked at last.
    request: Option<Box<Request>>,
    lines: Lines,
    known: Known,
    passes: Counted,
    said: Option<Diagnosis>,
    doubts: Vec<String>,
    server: answer::Server,
    /// The latest time that was told of.
    now: Monotonic,
    /// When what is told now happened: what waited in the ring while a tick was made is older than that.
    at: Monotonic,
    way: Way,
    ticks: bool,
    begins: bool,
    was_there: bool,
    /// What the input is about was told already.
    told: bool,
}

impl Follower {
    pub(super) fn of(key: RequestKey) -> Self {
        Self {
            key,
            request: None,
            lines: Lines::default(),
            known: Known::default(),
            passes: Counted::default(),
            said: None,
            doubts: Vec::new(),
            server: answer::Server::default(),
            now: Monotonic(0),
            at: Monotonic(0),
            way: Way::Call,
            ticks: false,
            begins: false,
            was_there: false,
            told: false,
        }
    }

    fn is_here(&self) -> bool {
        self.request.as_ref().is_some_and(|request| request.ended.is_none())
    }

    /// The room, as long as what happens to it is this request's.
    fn room(&self) -> Option<Room> {
        let request = self.request.as_ref()?;
        let is_its_own = request.ended.as_ref().is_none_or(|ended| self.now.since(ended.at) < AFTERMATH);
        is_its_own.then_some(request.room)
    }

    fn step(&mut self, origin: Origin, text: impl Into<Cow<'static, str>>) {
        self.lines.push(self.at, origin, Weight::Step, text);
    }

    fn comes_to(&mut self, at: Monotonic) {
        self.at = at;
        self.now = self.now.max(at);
        if std::mem::take(&mut self.was_there) {
            self.step(Origin::Agent, "was there already when this begins");
        }
    }

    pub(super) fn before(&mut self, input: &Input, core: &Core) {
        self.way = Way::of(input);
        (self.ticks, self.told) = (false, false);
        self.begins = matches!(input, Input::Snapshot(_));
        // Of an input that does not say when.
        self.at = self.now;
        let process = self.key.process;
        match input {
            Input::Snapshot(_) | Input::Rules { .. } => {}
            // Read every few seconds; what follows from it is in the diagnosis.
            Input::ServerMetrics { at, .. } => self.comes_to(*at),
            Input::Looked { at, .. } | Input::Observed { at, .. } => self.comes_to(*at),
            Input::Tick { now, .. } => {
                self.comes_to(*now);
                self.ticks = true;
            }
            Input::Event(event) => {
                self.comes_to(event.at);
                self.event(event, core);
            }
            Input::Detach { process: of, at, .. } => {
                if *of == process && self.is_here() {
                    self.comes_to(*at);
                    self.server = state::server(core, process, self.created());
                    self.step(Origin::Agent, "the server is gone, or not watched any more");
                }
            }
            _ if !self.is_here() => {}
            Input::Doubt { process: of, why } => {
                if *of == process {
                    self.step(Origin::Agent, format!("the picture of the server may be wrong: {}", why.name()));
                }
            }
            Input::Asked { process: of, .. } => {
                if *of == process {
                    self.step(Origin::Agent, "the hook was asked for everything that lives");
                }
            }
            Input::Watch { process: of, engine, .. } => {
                if *of == process {
                    let text = engine.map_or("not every transfer is seen any more".to_owned(), |engine| {
                        format!("each transfer is seen from now on ({})", engine.name())
                    });
                    self.step(Origin::Agent, text);
                }
            }
            Input::NativeLost { process: of, .. } => {
                if *of == process {
                    self.step(Origin::Agent, "calls into the transfer engine are missing");
                }
            }
            Input::DeviceError { process: of, error } => {
                if *of == process {
                    self.step(Origin::Devices, Fact::of_device(error).to_string());
                }
            }
            Input::RoomEnds { room, ends, .. } => {
                if self.room() == Some(*room) {
                    for end in ends {
                        let text = Fact::OtherEnd(end.clone()).to_string();
                        self.lines.push(self.at, Origin::Peer, Weight::Routine, text);
                    }
                }
            }
            Input::Attach { process: of, .. } if *of == process => {
                self.step(Origin::Agent, "the agent begins to watch the server");
            }
            // What was added to the inputs and has no words here; another server's is known by its pid.
            other => {
                let (weight, text) = words::unknown(other);
                let pid = process.pid;
                if !text.contains("pid: ") || text.contains(&format!("pid: {pid},")) {
                    self.lines.push(self.now, Origin::Agent, weight, text);
                }
            }
        }
    }

    fn event(&mut self, event: &Event, core: &Core) {
        let (room, sender) = words::of_whom(&event.body);
        // Another process may have had the pid before, or have it after.
        let own = event.pid == self.key.process.pid && core.tracker().server(self.key.process).is_some();
        let (here, same_room) = (self.is_here(), room.is_some() && room == self.room());
        match (own, sender) {
            (true, Some(serial)) if serial == self.key.serial => {
                let (weight, text) = words::of_request(&event.body);
                self.lines.push(event.at, Origin::Calls, weight, text);
                self.told = true;
            }
            (true, Some(other)) if here && same_room => {
                let (weight, text) = words::of_request(&event.body);
                self.lines.push(event.at, Origin::Calls, weight, format!("sender {other} of its room: {text}"));
            }
            (true, None) if here && same_room => {
                let (weight, text) = words::of_request(&event.body);
                self.lines.push(event.at, Origin::Calls, weight, text);
            }
            (true, None) if here && room.is_none() => self.server_event(event),
            (false, Some(_)) if here && same_room => {
                let (origin, whose) = whose(event.pid, self.key, core);
                let (weight, text) = words::of_request(&event.body);
                self.lines.push(event.at, origin, weight, format!("{whose}: {text}"));
            }
            _ => {}
        }
    }

    fn pass(&mut self, queue_length: u32, at: Monotonic) {
        if let Some(gap) = self.passes.take(queue_length, at) {
            self.step(Origin::Calls, format!("a pass, after {:.1} s without one", gap.as_secs_f64()));
        }
    }

    fn server_event(&mut self, event: &Event) {
        match &event.body {
            Body::Pass { queue_length, .. } => self.pass(*queue_length, event.at),
            Body::Receiver(ReceiverEvent::Pass { prealloc, transfer, .. }) => {
                self.pass(prealloc.saturating_add(*transfer), event.at);
            }
            Body::Native(native) => match **native {
                NativeEvent::EndpointError { status, .. } => {
                    self.step(Origin::Completions, Fact::EndpointGivenUp { status }.to_string());
                }
                NativeEvent::CompletionError { status, .. } => {
                    self.step(Origin::Completions, Fact::WorkCompletionError { status }.to_string());
                }
                _ => {}
            },
            body => {
                if let Some((weight, text)) = words::of_server(body).filter(|(_, text)| self.may_be_its(text)) {
                    self.lines.push(event.at, Origin::Calls, weight, text);
                }
            }
        }
    }

    /// Whether something that is not known here may be about this request: it names no other sender, nor another room.
    fn may_be_its(&self, text: &str) -> bool {
        let room = self.request.as_ref().map(|request| format!("{:?}", request.room)).unwrap_or_default();
        let names = |field: &str, own: &str| !text.contains(field) || text.contains(&format!("{field}{own}"));
        names("sender: ", &self.key.serial.to_string()) && names("room: ", &room)
    }

    pub(super) fn after(&mut self, core: &Core, effects: &Effects) {
        for change in effects.changes.iter().filter(|change| change.key == self.key) {
            let Some(request) = &change.ended else { continue };
            if core.tracker().server(self.key.process).is_some() {
                self.server = state::server(core, self.key.process, request.created);
                if change.step == Step::Ended && !self.told {
                    self.lines.push(change.at, Origin::Agent, Weight::Step, "it is not among what lives any more");
                }
            }
            self.request = Some(request.clone());
        }
        self.look(core);
        self.tell_transfers(core);
        for verdict in effects.verdicts.iter().filter(|verdict| verdict.request == self.key) {
            let what = match verdict.state {
                AlertState::Pending => "is pending",
                AlertState::Firing => "fires",
                AlertState::Resolved => "is resolved",
            };
            let text = format!("alert {} ({}) {what}", verdict.rule, verdict.severity.name());
            self.lines.push(verdict.at, Origin::Rules, Weight::Step, text);
        }
    }

    /// Takes over what the core knows of the request now.
    fn look(&mut self, core: &Core) {
        let tracker = core.tracker();
        let tracked = if self.ticks { tracker.judge(self.key, self.now) } else { tracker.get(self.key) };
        let Some(tracked) = tracked else { return };
        let is_new = self.request.is_none();
        if is_new || self.ticks {
            let room = tracked.request.room;
            if is_new {
                self.known.becomes(tracked.transfers.of_room(room), Way::Call);
                // When that was, the next input says.
                self.was_there = self.begins;
                for other in &tracked.room.senders {
                    if *other != self.key.serial {
                        let text = format!("sender {other} has the same room already");
                        self.lines.push(tracked.request.created, Origin::Calls, Weight::Step, text);
                    }
                }
            }
            self.request = Some(Box::new(tracked.request.clone()));
        } else if let Some(request) = &mut self.request
            && request.room != tracked.request.room
        {
            **request = tracked.request.clone();
        }
        if self.ticks {
            let diagnosis = diagnose(&tracked, self.now);
            let differs = self.said.as_ref().is_none_or(|said| {
                (said.cause, said.quiescence.name(), said.confidence)
                    != (diagnosis.cause, diagnosis.quiescence.name(), diagnosis.confidence)
            });
            if differs {
                let confidence = if diagnosis.confidence == Confidence::Low { ", confidence low" } else { "" };
                self.step(
                    Origin::Diagnosis,
                    format!("{}, transfer {}{confidence}", diagnosis.cause, diagnosis.quiescence),
                );
            }
            self.doubts = state::doubts(&tracked, &diagnosis);
            self.said = Some(diagnosis);
        }
    }

    fn tell_transfers(&mut self, core: &Core) {
        let Some(room) = self.room() else { return };
        let known = core.tracker().transfers(self.key.process).and_then(|transfers| transfers.of_room(room));
        for (origin, weight, text) in self.known.becomes(known, self.way) {
            self.lines.push(self.at, origin, weight, text);
        }
    }

    fn created(&self) -> Monotonic {
        self.request.as_ref().map_or(self.now, |request| request.created)
    }

    /// What became of it, as of `now`, with what `core` knows in the end.
    pub(super) fn explain(
        self,
        core: &Core,
        now: Monotonic,
        wall: &WallClock,
        surroundings: &Surroundings,
    ) -> Option<Explanation> {
        let request = self.request.as_ref()?;
        let times = Times::new(wall, request.created);
        let explanation = state::explain(core, self.key, now, wall, surroundings);
        let explanation = explanation.unwrap_or_else(|| self.ended(request, &times, now));
        Some(Explanation { timeline: Some(self.timeline(&times)), ..explanation })
    }

    /// Of a request that is not known any more: no rule is about it.
    fn ended(&self, request: &Request, times: &Times<'_>, now: Monotonic) -> Explanation {
        let diagnosis = match &self.said {
            Some(said) => state::in_words(said, self.doubts.clone(), times),
            None => state::not_said(),
        };
        // What it did to others goes on.
        let is_done = self.said.as_ref().is_some_and(|said| said.cause.is_past());
        Explanation {
            instance: state::instance(self.key, request, times),
            server: self.server.clone(),
            standing: state::standing(request, None, now, times),
            timeline: None,
            diagnosis: answer::Diagnosis {
                is_past: true,
                advice: if is_done { diagnosis.advice } else { "nothing any more: it has ended".to_owned() },
                ..diagnosis
            },
            rules: Vec::new(),
            remediation: of_ended(),
        }
    }

    fn timeline(&self, times: &Times<'_>) -> Timeline {
        Timeline {
            lines: self
                .lines
                .sorted()
                .into_iter()
                .map(|line| Line {
                    at: times.moment(line.at),
                    until: (line.count > 1).then(|| times.moment(line.until)),
                    count: line.count,
                    source: line.origin.name().to_owned(),
                    text: line.text.into_owned(),
                })
                .collect(),
            left_out: self.lines.left_out(),
            passes: self.passes.told(times),
        }
    }
}
