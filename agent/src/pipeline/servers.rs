//! Meeting servers and letting them go; what they lost, and asking them for their state.

use std::{sync::Arc, time::Duration};

use dislodge_ebpf::loss::ProcessCounters;
use tokio::sync::mpsc;

use super::{Pipeline, engines::EngineState, notice::Notice};
use crate::{
    core::Input,
    event::{ProcessKey, clock::Monotonic},
    metrics::{Metrics, reason},
    remedy::control::{Answer, Channel, Verb},
    request::{ResyncReason, tracker::Parting},
    target::{Target, discover, hook, marker},
    verdict::ServerIdentity,
};

/// How long a server has to answer a question for its state completely, before it is asked again.
const RESYNC_PATIENCE: Duration = Duration::from_secs(5);
/// How long a server has to begin with it.
const STATE_PATIENCE: Duration = Duration::from_secs(2);

/// A scheduler that was found.
pub(super) struct Server {
    pub(super) target: Target,
    pub(super) probe: Result<(), String>,
    pub(super) control: Result<Channel, String>,
    pub(super) engine: EngineState,
    is_tracked: bool,
    pub(super) shown_length: Option<u32>,
    counted: ProcessCounters,
    discarded: (u64, u64),
}

impl Server {
    /// How far the agent has got with it: a bounded label.
    pub(super) fn state(&self) -> &'static str {
        match (&self.probe, &self.control) {
            (Ok(()), Ok(_)) => "watched",
            (Ok(()), Err(_)) => "without_control",
            (Err(_), _) => "without_hook",
        }
    }
}

/// Looks for schedulers off the loop; a look that is still under way is not repeated.
pub(super) fn look(found: mpsc::Sender<Vec<Target>>, only: Vec<u32>) {
    if let Ok(permit) = found.try_reserve_owned() {
        tokio::task::spawn_blocking(move || permit.send(discover::servers(&only)));
    }
}

impl Pipeline {
    /// Takes note of the schedulers that there are now.
    pub(super) fn meet(&mut self, mut found: Vec<Target>) {
        let now = Monotonic::now();
        found.retain(|target| self.only.is_empty() || self.only.contains(&target.key.pid));
        let gone: Vec<ProcessKey> =
            self.servers.keys().copied().filter(|key| !found.iter().any(|target| target.key == *key)).collect();
        if !gone.is_empty() {
            // What they still said is theirs, not that of a process that gets their pid.
            self.drain();
        }
        for key in gone {
            self.let_go(key, now);
        }
        for target in &found {
            let server = self.servers.entry(target.key).or_insert_with(|| Server {
                target: target.clone(),
                probe: Err("not looked at yet".to_owned()),
                control: Err("not looked at yet".to_owned()),
                engine: EngineState::new(now),
                is_tracked: false,
                shown_length: None,
                counted: ProcessCounters::default(),
                discarded: (0, 0),
            });
            if server.probe.is_err() {
                self.attach(target);
            }
            if self.servers.get(&target.key).is_some_and(|server| server.probe.is_ok() && server.control.is_err()) {
                self.take_control(target.key);
            }
            self.survey(target.key, now);
        }
        let collected = self.kernel.collect_calls();
        self.metrics.calls_lost.get_or_create(&reason("thread_ended")).inc_by(collected as u64);
        if self.health.scanned() {
            self.say_what_is_missing(&found);
        }
    }

    /// After the first look: somebody who waits for a server that is not one should not wait in silence.
    fn say_what_is_missing(&self, found: &[Target]) {
        let title = discover::SCHEDULER_TITLE;
        for pid in self.only.iter().filter(|pid| !found.iter().any(|target| target.key.pid == **pid)) {
            if discover::process_key(*pid).is_none() {
                tracing::warn!("there is no process {pid} on this node (yet); looking on");
                continue;
            }
            tracing::warn!(
                "pid {pid} is not an SGLang scheduler (yet): its title does not begin with {title}, and it has no transfer \
                 engine loaded; looking on"
            );
        }
        if self.only.is_empty() && found.is_empty() {
            tracing::info!("no SGLang scheduler on this node yet: no process title begins with {title}; looking on");
        }
    }

    fn attach(&mut self, target: &Target) {
        let key = target.key;
        let result = match marker::find(key.pid) {
            Ok(site) => self.kernel.attach(key, &site).map_err(|error| (true, error.to_string())),
            Err(error) => Err((!matches!(error, marker::MarkerError::NotMapped), error.to_string())),
        };
        let probe = match result {
            Ok(()) => {
                tracing::info!(pid = key.pid, title = target.title, "attached");
                self.track(key);
                Ok(())
            }
            Err((is_error, message)) => {
                self.complain(key, is_error.then_some("probe"), &message, |server| server.probe.as_ref().err());
                Err(message)
            }
        };
        if let Some(server) = self.servers.get_mut(&key) {
            server.probe = probe;
        }
    }

    /// Starts to track a server: something of it is seen now.
    pub(super) fn track(&mut self, key: ProcessKey) {
        let Some(server) = self.servers.get_mut(&key) else { return };
        if std::mem::replace(&mut server.is_tracked, true) {
            return;
        }
        let identity = ServerIdentity {
            pid: key.pid,
            start: key.start,
            title: server.target.title.clone(),
            node: self.config.node.clone(),
            container: None,
            parent: discover::parent(key.pid),
        };
        let clock_offset = discover::clock_offset(key.pid);
        self.apply(Input::Attach { process: key, identity: Box::new(identity), clock_offset });
        if let Some(identity) = self.core.identity(key) {
            self.notify(Notice::Attached(Arc::clone(identity)));
        }
    }

    fn take_control(&mut self, key: ProcessKey) {
        let control = match hook::take(key) {
            Ok(taken) => {
                tracing::info!(pid = key.pid, hook = taken.hook.hook, "control channel taken");
                Ok(Channel::new(key, taken, self.epoch, discover::clock_offset(key.pid)))
            }
            Err(error) => {
                let is_error = !matches!(error, hook::TakeError::NotActive);
                let message = error.to_string();
                self.complain(key, is_error.then_some(error.name()), &message, |server| server.control.as_ref().err());
                Err(message)
            }
        };
        if let Some(server) = self.servers.get_mut(&key) {
            server.control = control;
        }
    }

    /// Says once that something does not work with a server, and counts it when it is an error.
    fn complain(
        &self,
        key: ProcessKey,
        error: Option<&'static str>,
        message: &str,
        last: impl Fn(&Server) -> Option<&String>,
    ) {
        if self.servers.get(&key).and_then(last).is_some_and(|last| last == message) {
            return;
        }
        match error {
            Some(name) => {
                tracing::warn!(pid = key.pid, "{message}");
                self.metrics.attach_errors.get_or_create(&reason(name)).inc();
            }
            None => tracing::info!(pid = key.pid, "{message}"),
        }
    }

    fn let_go(&mut self, key: ProcessKey, now: Monotonic) {
        self.account_for(key, now);
        if self.looking.as_ref().is_some_and(|looking| looking.is_at(key)) {
            self.end_look();
        }
        self.count_transfers(key);
        self.kernel.detach(key);
        if let Some(server) = self.servers.remove(&key)
            && server.is_tracked
        {
            tracing::info!(pid = key.pid, title = server.target.title, "server ended");
            self.notify(Notice::Detached(key));
        }
        let why = if discover::is_over(key) { Parting::Ended } else { Parting::Unseen };
        self.apply(Input::Detach { process: key, why, at: now });
    }

    /// Takes over what BPF has counted since the last time.
    pub(super) fn account(&mut self, now: Monotonic) {
        let attached: Vec<ProcessKey> = self.kernel.attached().collect();
        for key in attached {
            self.account_for(key, now);
        }
    }

    fn account_for(&mut self, key: ProcessKey, now: Monotonic) {
        let (Some(counters), Some(server)) = (self.kernel.counters(key), self.servers.get_mut(&key)) else { return };
        let before = std::mem::replace(&mut server.counted, counters);
        let Metrics { events_seen, events_lost, details_lost, calls_lost, .. } = &self.metrics;
        events_seen.inc_by(counters.seen.saturating_sub(before.seen));
        let lost = counters.ring_full.saturating_sub(before.ring_full);
        let full = counters.calls_full.saturating_sub(before.calls_full);
        for (family, name, count) in [
            (events_lost, "ring_full", lost),
            (details_lost, "fault", counters.detail_fault.saturating_sub(before.detail_fault)),
            (details_lost, "truncated", counters.detail_truncated.saturating_sub(before.detail_truncated)),
            (calls_lost, "map_full", full),
            (calls_lost, "look_map_full", counters.look_full.saturating_sub(before.look_full)),
            (calls_lost, "entry_not_seen", counters.returns_unmatched.saturating_sub(before.returns_unmatched)),
        ] {
            family.get_or_create(&reason(name)).inc_by(count);
        }
        if lost > 0 {
            tracing::warn!(pid = key.pid, lost, "events lost: the ring was full");
            self.apply(Input::Doubt { process: key, why: ResyncReason::EventsLost });
        }
        if lost + full > 0 {
            self.apply(Input::NativeLost { process: key, at: now });
        }
    }

    /// Asks servers that are not known completely for their state.
    pub(super) fn resynchronise(&mut self, now: Monotonic) {
        if !self.resynchronise {
            return;
        }
        for (key, why) in self.core.tracker().to_ask(now, RESYNC_PATIENCE) {
            let Some(Server { control: Ok(channel), .. }) = self.servers.get_mut(&key) else { continue };
            match channel.send(&Verb::State, now, STATE_PATIENCE) {
                Ok(_) => {
                    tracing::debug!(pid = key.pid, reason = why.name(), "asked for its state");
                    self.metrics.resynchronisations.get_or_create(&reason(why.name())).inc();
                    self.apply(Input::Asked { process: key, epoch: self.epoch, why, at: now });
                }
                Err(error) => tracing::debug!(pid = key.pid, %error, "cannot ask for its state"),
            }
        }
    }

    /// Reads what hooks have answered.
    pub(super) fn hear(&mut self) {
        let now = Monotonic::now();
        let mut answers: Vec<(ProcessKey, u64, Answer)> = Vec::new();
        for (key, server) in &mut self.servers {
            let Ok(channel) = &mut server.control else { continue };
            if !channel.is_waiting() {
                continue;
            }
            answers.extend(channel.receive(now).into_iter().map(|(id, answer)| (*key, id, answer)));
            let discarded = channel.discarded();
            let (malformed, unasked) = server.discarded;
            let counts = &self.metrics.control_discarded;
            counts.get_or_create(&reason("malformed")).inc_by(discarded.malformed.saturating_sub(malformed));
            counts.get_or_create(&reason("unasked")).inc_by(discarded.unasked.saturating_sub(unasked));
            server.discarded = (discarded.malformed, discarded.unasked);
        }
        for (process, command, answer) in answers {
            if let Some((key, outcome)) = self.ladder.answered(process, command, &answer, now) {
                self.acted(key, outcome);
            } else if let Answer::Refused { reason, .. } = answer {
                tracing::warn!(pid = process.pid, reason, "the hook refused");
            }
        }
    }
}
