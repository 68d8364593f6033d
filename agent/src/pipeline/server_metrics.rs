//! The servers' own `/metrics`, read beside the loop: one page for all schedulers of a server, and only when there is
//! something to hold it against.
//!
//! A page is asked for when a request has been in the queue for [`WORTH_AFTER`], or the queue has rested for so long and what
//! the gauge says of it since is not known, or is not what was seen: once after each burst of requests, and not at all of a
//! server with nothing to do whose gauge agrees. At most one request per server and interval; while a reading brings nothing
//! new, or fails, the next one comes twice as late, up to [`AT_LAST`]. Four are under way at once at most; who finds no place
//! comes a second later, the one that was asked longest ago first.

use std::{
    collections::{BTreeMap, HashMap},
    time::Duration,
};

use tokio::sync::mpsc;

use super::{Pipeline, servers::Server};
use crate::{
    config::ReadMetrics,
    core::Input,
    diagnose::gauge_fact,
    event::{ProcessKey, clock::Monotonic, exposition::Rank},
    metrics::{GaugeLabel, OutcomeLabel},
    request::{
        ServerState,
        gauge::{GaugeCheck, GaugeNotKnown, Gauges},
    },
    server::status::GaugeStatus,
    target::scrape::{self, ScrapeError, Scraped},
};

/// How long a queue has rested, or a request has been in it, before the server's own word is of interest.
const WORTH_AFTER: Duration = Duration::from_secs(5);
/// How often it is looked whether a page is of interest.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Pages that are read at once.
const AT_ONCE: usize = 4;
/// The latest that a page is asked for again while it is of interest.
const AT_LAST: Duration = Duration::from_secs(300);

/// A page that was read, or why not.
pub(super) struct Reading {
    server: ProcessKey,
    page: Result<Scraped, ScrapeError>,
    at: Monotonic,
}

/// What is known of the servers' pages.
pub(super) struct ServerMetrics {
    read: mpsc::Sender<Reading>,
    readings: Option<mpsc::Receiver<Reading>>,
    due: Monotonic,
    pages: HashMap<ProcessKey, PageState>,
}

/// One server's page.
struct PageState {
    asked: Monotonic,
    is_under_way: bool,
    again_after: Duration,
    failure: Option<String>,
}

impl ServerMetrics {
    /// Nothing is read yet.
    pub(super) fn new() -> Self {
        let (read, readings) = mpsc::channel(AT_ONCE);
        Self { read, readings: Some(readings), due: Monotonic(0), pages: HashMap::new() }
    }

    /// Where readings come back; nothing the second time.
    pub(super) fn take_readings(&mut self) -> Option<mpsc::Receiver<Reading>> {
        self.readings.take()
    }
}

/// Whether a server's page is of interest. `has_old` says whether a request has been in its queue for [`WORTH_AFTER`].
fn is_worth_reading(server: &ServerState, now: Monotonic, has_old: impl FnOnce() -> bool) -> bool {
    use GaugeNotKnown::{NoSeries, NotRead, QueueMoves, QueueNotSeen, ReadOnce, RefreshDue};
    let rests = server.gauge.queue_rests.is_some_and(|since| now.since(since) >= WORTH_AFTER);
    let is_open = match GaugeCheck::of(server, now) {
        GaugeCheck::Frozen | GaugeCheck::NotRefreshed => true,
        GaugeCheck::NotKnown(NotRead | QueueMoves | RefreshDue | ReadOnce) => true,
        // SGLang makes a series with the first batch.
        GaugeCheck::NotKnown(NoSeries) => has_moved(server),
        GaugeCheck::Agrees | GaugeCheck::NotKnown(QueueNotSeen) => false,
    };
    (rests && is_open) || has_old()
}

/// Whether a server's queue has changed since its page was read.
fn has_moved(server: &ServerState) -> bool {
    server.gauge.queue_rests.is_some_and(|rests| server.gauge.read.as_deref().is_none_or(|read| read.at < rests))
}

impl Pipeline {
    /// The process by which a scheduler's server is known: what started it, and the other ranks.
    fn server_of(&self, scheduler: ProcessKey) -> ProcessKey {
        self.core.identity(scheduler).and_then(|identity| identity.parent).unwrap_or(scheduler)
    }

    /// Has the pages read that are of interest, when it is time.
    pub(super) fn read_server_metrics(&mut self, now: Monotonic) {
        if now < self.server_metrics.due || self.config.server_metrics.read == ReadMetrics::Off {
            return;
        }
        self.server_metrics.due = now.plus(LOOK_EVERY);
        let mut servers: BTreeMap<ProcessKey, Vec<ProcessKey>> = BTreeMap::new();
        for (key, _) in self.core.tracker().servers() {
            servers.entry(self.server_of(key)).or_default().push(key);
        }
        self.server_metrics.pages.retain(|server, _| servers.contains_key(server));
        let mut due: Vec<(Monotonic, ProcessKey, ProcessKey)> = Vec::new();
        for (server, schedulers) in servers {
            let asked = self.server_metrics.pages.get(&server).map_or(Monotonic(0), |page| page.asked);
            if let Some(first) = schedulers.first()
                && self.is_due(server, &schedulers, now)
                && schedulers.iter().any(|scheduler| self.is_of_interest(*scheduler, now))
            {
                due.push((asked, server, *first));
            }
        }
        due.sort_unstable();
        for (_, server, scheduler) in due {
            self.ask_for_page(server, scheduler, now);
        }
    }

    fn is_due(&self, server: ProcessKey, schedulers: &[ProcessKey], now: Monotonic) -> bool {
        let Some(page) = self.server_metrics.pages.get(&server) else { return true };
        let moved = |scheduler: &ProcessKey| self.core.tracker().server(*scheduler).is_some_and(has_moved);
        let is_new = page.failure.is_none() && schedulers.iter().any(moved);
        let after = if is_new { self.config.server_metrics.interval } else { page.again_after };
        !page.is_under_way && now.since(page.asked) >= after
    }

    fn is_of_interest(&self, scheduler: ProcessKey, now: Monotonic) -> bool {
        let tracker = self.core.tracker();
        let has_old = || {
            tracker.requests().any(|tracked| {
                let since = tracked.request.entered.filter(|_| tracked.key.process == scheduler);
                since.is_some_and(|since| now.since(since) >= WORTH_AFTER)
            })
        };
        tracker.server(scheduler).is_some_and(|server| is_worth_reading(server, now, has_old))
    }

    fn ask_for_page(&mut self, server: ProcessKey, scheduler: ProcessKey, now: Monotonic) {
        let Ok(permit) = self.server_metrics.read.clone().try_reserve_owned() else { return };
        let interval = self.config.server_metrics.interval;
        let page = self.server_metrics.pages.entry(server).or_insert_with(|| PageState {
            asked: now,
            is_under_way: false,
            again_after: interval,
            failure: None,
        });
        (page.asked, page.is_under_way) = (now, true);
        let ports = self.config.server_metrics.ports.clone();
        tokio::spawn(async move {
            let page = scrape::read(scheduler, ports).await;
            permit.send(Reading { server, page, at: Monotonic::now() })
        });
    }

    /// Takes over what a page says.
    pub(super) fn server_metrics_read(&mut self, reading: Reading) {
        let Reading { server, page, at } = reading;
        let outcome = page.as_ref().map_or_else(ScrapeError::name, |_| "read");
        self.metrics.server_metrics_reads.get_or_create(&OutcomeLabel { outcome }).inc();
        let failure = page.as_ref().err().map(ToString::to_string);
        let mut is_news = false;
        if let Ok(Scraped { samples, left_out }) = page {
            self.metrics.server_metrics_left_out.inc_by(left_out as u64);
            // What happened to the queues until the page was read has to be known first.
            self.drain();
            self.account(at);
            let all = self.core.tracker().servers().map(|(key, _)| key);
            let schedulers: Vec<ProcessKey> = all.filter(|scheduler| self.server_of(*scheduler) == server).collect();
            for process in schedulers {
                let Some(title) = self.core.identity(process).map(|identity| identity.title.clone()) else { continue };
                let gauges = Gauges::of_rank(&samples, Rank::of_title(&title));
                is_news |= self.core.tracker().server(process).is_none_or(|state| {
                    has_moved(state) || state.gauge.read.as_deref().is_none_or(|before| before.gauges != gauges)
                });
                self.apply(Input::ServerMetrics { process, gauges, at });
            }
        }
        let Some(page) = self.server_metrics.pages.get_mut(&server) else { return };
        if failure.is_some() && failure != page.failure {
            tracing::info!(pid = server.pid, why = failure.as_deref(), "the server's own metrics are not read");
        }
        page.is_under_way = false;
        let interval = self.config.server_metrics.interval;
        page.again_after =
            if is_news { interval } else { (page.again_after * 2).clamp(interval, AT_LAST.max(interval)) };
        page.failure = failure;
    }

    /// What is known of the gauge of a server.
    pub(super) fn gauge_status(&self, server: &Server, now: Monotonic) -> GaugeStatus {
        let key = server.target.key;
        let page = self.server_metrics.pages.get(&self.server_of(key));
        let state = self.core.tracker().server(key);
        let read = state.and_then(|state| state.gauge.read.as_deref());
        let not_read = GaugeCheck::NotKnown(GaugeNotKnown::NotRead);
        GaugeStatus {
            check: state.map_or(not_read, |state| GaugeCheck::of(state, now)),
            in_words: state.and_then(|state| gauge_fact(state, now)).map(|fact| fact.to_string()),
            said: read.map(|read| read.gauges),
            read_seconds_ago: read.map(|read| now.since(read.at).as_secs_f64()),
            unchanged_seconds: read.map(|read| now.since(read.since).as_secs_f64()),
            failure: page.and_then(|page| page.failure.clone()),
        }
    }

    /// Shows how many servers' gauges compare how with what was seen.
    pub(super) fn publish_gauges(&self, now: Monotonic) {
        let mut counts = GaugeCheck::NAMES.map(|name| (name, 0));
        for (_, state) in self.core.tracker().servers() {
            let name = GaugeCheck::of(state, now).name();
            counts.iter_mut().filter(|(other, _)| *other == name).for_each(|(_, count)| *count += 1);
        }
        for (gauge, count) in counts {
            self.metrics.server_gauges.get_or_create(&GaugeLabel { gauge }).set(count);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::{
        Sync,
        gauge::{GaugeState, ServerGauge},
    };

    fn at(seconds: u64) -> Monotonic {
        Monotonic((1_000 + seconds) * 1_000_000_000)
    }

    /// A server with `length` requests in its queue since 0, whose gauge was read at those times.
    fn server(length: u32, now: u64, readings: &[(u64, Option<u32>)]) -> ServerState {
        let mut state = ServerState {
            queue_length: Some((length, at(now))),
            gauge: ServerGauge { queue_rests: Some(at(0)), read: None },
            ..ServerState::new(Sync::Complete)
        };
        if let Some((first, last)) = readings.first().zip(readings.last()) {
            let gauges = Gauges { prefill_inflight: last.1, ..Gauges::default() };
            let readings = readings.len() as u32;
            state.gauge.read = Some(Box::new(GaugeState { gauges, at: at(last.0), since: at(first.0), readings }));
        }
        state
    }

    fn worth(server: &ServerState, now: u64) -> bool {
        is_worth_reading(server, at(now), || false)
    }

    #[test]
    fn a_server_is_asked_once_its_queue_rests_and_again_while_it_says_something_else() {
        assert!(!worth(&server(0, 4, &[]), 4), "it may go on");
        assert!(worth(&server(0, 6, &[]), 6));
        assert!(!worth(&server(0, 60, &[(6, Some(0))]), 60), "nothing to ask an idle server that agrees");
        assert!(worth(&server(0, 60, &[(6, Some(1))]), 60));
        assert!(worth(&server(1, 60, &[(6, Some(2))]), 60), "in doubt");
        assert!(worth(&server(1, 60, &[(6, Some(2)), (21, Some(2))]), 60), "frozen");
        assert!(!worth(&server(0, 60, &[(6, None)]), 60), "no such gauge");
        let mut moved = server(0, 60, &[(6, Some(0))]);
        moved.gauge.queue_rests = Some(at(50));
        assert!(worth(&moved, 60), "there were requests since");
        let mut never_seen = server(0, 60, &[]);
        (never_seen.queue_length, never_seen.gauge.queue_rests) = (None, None);
        assert!(!worth(&never_seen, 60));
    }

    #[test]
    fn a_request_that_waits_is_a_reason_whatever_the_queue_does() {
        let mut moving = server(1, 60, &[(6, Some(1))]);
        moving.gauge.queue_rests = Some(at(60));
        assert!(!worth(&moving, 60));
        assert!(is_worth_reading(&moving, at(60), || true));
    }
}
