//! What the RDMA devices of the servers count: read once a second, off the loop, while a server has one open.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    sync::Arc,
    time::Duration,
};

use tokio::sync::mpsc;

use super::Pipeline;
use crate::{
    core::Input,
    event::{ProcessKey, clock::Monotonic},
    metrics::DeviceLabel,
    request::DeviceError,
    target::device::{self, Counter, SYSFS},
};

/// How often they are read: drivers keep what they asked the device for some ten milliseconds.
const READ_EVERY: Duration = Duration::from_secs(1);

/// What devices counted, and when they were read.
pub(super) struct Reading {
    at: Monotonic,
    errors: Vec<(Counter, u64)>,
}

/// The readings so far.
pub(super) struct Devices {
    read: mpsc::Sender<Reading>,
    due: Monotonic,
    last: BTreeMap<Counter, u64>,
}

impl Devices {
    /// Readings come back on the channel; one at a time is made.
    pub(super) fn new() -> (Self, mpsc::Receiver<Reading>) {
        let (read, readings) = mpsc::channel(1);
        (Self { read, due: Monotonic(0), last: BTreeMap::new() }, readings)
    }

    /// What was counted since the last reading. A counter's first value tells nothing, and one that fell began anew.
    fn counted(&mut self, reading: Reading) -> Vec<(DeviceError, Counter)> {
        let at = reading.at;
        let mut counted = Vec::new();
        for (counter, value) in reading.errors {
            let Some(before) = self.last.insert(counter.clone(), value) else { continue };
            let by = value.saturating_sub(before);
            if by > 0 {
                let Counter { device, port, name, kind } = &counter;
                let error = DeviceError {
                    at,
                    device: device.to_string(),
                    port: *port,
                    counter: (*name).to_owned(),
                    kind: *kind,
                    by,
                };
                counted.push((error, counter));
            }
        }
        counted
    }
}

impl Pipeline {
    /// Has the devices of the servers read, when it is time.
    pub(super) fn read_devices(&mut self, now: Monotonic) {
        if now < self.devices.due {
            return;
        }
        self.devices.due = now.plus(READ_EVERY);
        let open: BTreeSet<Arc<str>> =
            self.servers.values().flat_map(|server| &server.engine.devices).map(Arc::clone).collect();
        if open.is_empty() {
            return;
        }
        let Ok(permit) = self.devices.read.clone().try_reserve_owned() else { return };
        tokio::task::spawn_blocking(move || {
            let errors = device::errors(Path::new(SYSFS), &open);
            permit.send(Reading { at: Monotonic::now(), errors })
        });
    }

    /// Takes over what the devices counted.
    pub(super) fn devices_read(&mut self, reading: Reading) {
        for (error, counter) in self.devices.counted(reading) {
            let Counter { device, port, name, .. } = counter;
            let users: Vec<ProcessKey> = self
                .servers
                .iter()
                .filter(|(_, server)| server.engine.devices.contains(&device))
                .map(|(key, _)| *key)
                .collect();
            let label = DeviceLabel { device: device.to_string(), port, counter: name };
            self.metrics.device_errors.get_or_create(&label).inc_by(error.by);
            for process in users {
                self.apply(Input::DeviceError { process, error: error.clone() });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::target::device::DeviceErrorKind;

    #[test]
    fn only_what_is_counted_between_two_readings_is_news() {
        let (mut devices, _) = Devices::new();
        let counter = |name| Counter { device: "mlx5_0".into(), port: 1, name, kind: DeviceErrorKind::GaveUp };
        let mut read = |at, errors: &[(&'static str, u64)]| {
            let errors = errors.iter().map(|(name, value)| (counter(*name), *value)).collect();
            let counted = devices.counted(Reading { at: Monotonic(at), errors });
            counted.into_iter().map(|(error, _)| (error.counter, error.by)).collect::<Vec<_>>()
        };
        assert_eq!(read(1, &[("a", 7), ("b", 0)]), [], "from before");
        assert_eq!(read(2, &[("a", 9), ("b", 0)]), [("a".to_owned(), 2)]);
        assert_eq!(read(3, &[("a", 1), ("b", 1)]), [("b".to_owned(), 1)], "the driver was loaded anew");
        assert_eq!(read(4, &[("a", 1)]), [], "one is gone");
    }
}
