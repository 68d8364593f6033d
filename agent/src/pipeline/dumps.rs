//! Dumping the flight recorder: when an alert fires, or when asked. Written off the loop; observing never waits for it.

use std::{path::PathBuf, sync::Arc, time::Duration};

use tokio::sync::Semaphore;

use super::Pipeline;
use crate::{
    event::clock::Monotonic,
    metrics::{Metrics, RecordingLabel, reason},
    record::folder::{self, Folder, Reason},
};

/// How often a firing alert makes a dump. One that fires sooner after another is in the next dump.
const ALERTS_EVERY: Duration = Duration::from_secs(60);

/// The dumps of a pipeline.
#[derive(Debug)]
pub(super) struct Dumps {
    folder: Folder,
    on_firing: bool,
    most: usize,
    requested: bool,
    alerted: bool,
    last_alert: Option<Monotonic>,
    /// One is written at a time.
    writer: Arc<Semaphore>,
}

impl Dumps {
    pub(super) fn new(folder: Folder, on_firing: bool, most: usize) -> Self {
        let (requested, alerted, last_alert) = (false, false, None);
        Self { folder, on_firing, most, requested, alerted, last_alert, writer: Arc::new(Semaphore::new(1)) }
    }

    /// Why there should be one now.
    fn due(&self, now: Monotonic) -> Option<Reason> {
        let is_soon = self.last_alert.is_some_and(|last| now.since(last) < ALERTS_EVERY);
        if self.requested { Some(Reason::Request) } else { (self.alerted && !is_soon).then_some(Reason::Alert) }
    }
}

impl Pipeline {
    /// Somebody wants a dump.
    pub(super) fn request_dump(&mut self) {
        match &mut self.dumps {
            Some(dumps) => dumps.requested = true,
            None => tracing::warn!("asked for a recording, but none is kept: set `record.folder`"),
        }
        self.dump(Monotonic::now());
    }

    /// An alert fires.
    pub(super) fn alert_dump(&mut self) {
        if let Some(dumps) = &mut self.dumps {
            dumps.alerted |= dumps.on_firing;
        }
    }

    /// Writes the dump that is due, if one is and none is being written.
    pub(super) fn dump(&mut self, now: Monotonic) {
        let Some(dumps) = &mut self.dumps else { return };
        let Some(why) = dumps.due(now) else { return };
        let Ok(permit) = Arc::clone(&dumps.writer).try_acquire_owned() else { return };
        let Some(recording) = self.core.recording() else { return };
        match why {
            Reason::Request => dumps.requested = false,
            Reason::Alert => (dumps.alerted, dumps.last_alert) = (false, Some(now)),
        }
        let (folder, most, metrics) = (dumps.folder.path().to_owned(), dumps.most, self.metrics.clone());
        tokio::task::spawn_blocking(move || {
            told(&metrics, why, folder::dump(&folder, &recording, why, most));
            drop(permit);
        });
    }

    pub(super) fn publish_recorder(&self) {
        let Some((bytes, dropped)) = self.core.recorded() else { return };
        let metrics = &self.metrics;
        metrics.recorder_bytes.set(bytes as i64);
        for (why, total) in [("too_much", dropped.inputs), ("no_snapshot", dropped.not_recorded)] {
            Metrics::raise(&metrics.recorder_dropped.get_or_create(&reason(why)), total);
        }
    }
}

fn told(metrics: &Metrics, why: Reason, result: std::io::Result<PathBuf>) {
    let outcome = match result {
        Ok(path) => {
            tracing::info!(recording = %path.display(), reason = why.name(), "recording written");
            "written"
        }
        Err(error) => {
            tracing::error!(%error, "no recording could be written; observing goes on");
            "failed"
        }
    };
    metrics.recordings.get_or_create(&RecordingLabel { reason: why.name(), outcome }).inc();
}
