//! The RDMA devices that a process has open, and the errors that they count themselves: a witness beside the probes.
//!
//! What a device counts is of all that use it, on this node.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use serde::Serialize;

/// Where the kernel shows its RDMA devices.
pub const SYSFS: &str = "/sys/class/infiniband";
/// Where it shows which of them a file of a process is.
const VERBS: &str = "/sys/class/infiniband_verbs";
/// What a process has open of a device, before its number.
const DEVICE_FILE: &str = "/dev/infiniband/uverbs";
/// Descriptors of a process that are looked at.
const MAX_DESCRIPTORS: usize = 1 << 16;
/// Ports of a device that are read: real ones have one or two.
const MAX_PORTS: usize = 16;
/// Where a port's counters are: the driver's, and InfiniBand's.
const FOLDERS: [&str; 2] = ["hw_counters", "counters"];

/// What an error of a device means for a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum DeviceErrorKind {
    /// Something was sent again: the way to a peer is slow, or loses packets.
    Retried,
    /// A work request failed for good.
    GaveUp,
    /// The link went down, or damages what it carries.
    Link,
}

use DeviceErrorKind::{GaveUp, Link, Retried};

/// The counters that are read, as drivers name them (Linux 6.12, `drivers/infiniband`): rxe (`sw/rxe/rxe_hw_counters.c`),
/// mlx5 (`hw/mlx5/counters.c`), efa (`hw/efa/efa_verbs.c`), bnxt_re (`hw/bnxt_re/hw_counters.c`), and InfiniBand's own
/// (`core/sysfs.c`).
const COUNTERS: [(&str, DeviceErrorKind); 33] = [
    // rxe
    ("completer_retry_err", Retried),
    ("rcvd_seq_err", Retried),
    ("rcvd_rnr_err", Retried),
    ("retry_exceeded_err", GaveUp),
    ("retry_rnr_exceeded_err", GaveUp),
    ("send_err", GaveUp),
    // mlx5
    ("local_ack_timeout_err", Retried),
    ("packet_seq_err", Retried),
    ("rnr_nak_retry_err", Retried),
    ("out_of_sequence", Retried),
    ("roce_slow_restart", Retried),
    ("req_transport_retries_exceeded", GaveUp),
    ("req_rnr_retries_exceeded", GaveUp),
    ("req_cqe_error", GaveUp),
    ("req_cqe_flush_error", GaveUp),
    ("req_remote_access_errors", GaveUp),
    ("req_remote_invalid_request", GaveUp),
    ("resp_cqe_error", GaveUp),
    ("resp_cqe_flush_error", GaveUp),
    ("resp_local_length_error", GaveUp),
    ("resp_remote_access_errors", GaveUp),
    // efa
    ("retrans_timeout_events", Retried),
    ("impaired_remote_conn_events", Retried),
    ("unresponsive_remote_events", GaveUp),
    ("rdma_write_wr_err", GaveUp),
    ("rdma_read_wr_err", GaveUp),
    // bnxt_re
    ("to_retransmits", Retried),
    ("seq_err_naks_rcvd", Retried),
    ("max_retry_exceeded", GaveUp),
    // InfiniBand
    ("link_downed", Link),
    ("link_error_recovery", Link),
    ("symbol_error", Link),
    ("port_rcv_errors", Link),
];

/// One counter of one port.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Counter {
    /// The device's name, `mlx5_0`.
    pub device: Arc<str>,
    /// The port's number.
    pub port: u32,
    /// As the driver names it.
    pub name: &'static str,
    /// What it counts.
    pub kind: DeviceErrorKind,
}

/// The names of the devices that a process has open.
pub fn of_process(pid: u32) -> BTreeSet<Arc<str>> {
    let Ok(descriptors) = fs::read_dir(format!("/proc/{pid}/fd")) else { return BTreeSet::new() };
    descriptors
        .take(MAX_DESCRIPTORS)
        .filter_map(|descriptor| {
            let link = fs::read_link(descriptor.ok()?.path()).ok()?;
            let number: u32 = link.to_str()?.strip_prefix(DEVICE_FILE)?.parse().ok()?;
            let name = fs::read_to_string(format!("{VERBS}/uverbs{number}/ibdev")).ok()?;
            Some(name.trim().into())
        })
        .collect()
}

/// The error counters of devices, of those that their drivers have. `sysfs` is [`SYSFS`].
pub fn errors(sysfs: &Path, devices: &BTreeSet<Arc<str>>) -> Vec<(Counter, u64)> {
    devices.iter().flat_map(|device| ports(sysfs, device).into_iter().map(move |port| (device, port))).fold(
        Vec::new(),
        |mut seen, (device, (port, folder))| {
            for (name, kind) in COUNTERS {
                let read = |counters: &str| fs::read_to_string(folder.join(counters).join(name)).ok();
                let value = FOLDERS.iter().find_map(|counters| read(counters)?.trim().parse().ok());
                if let Some(value) = value {
                    seen.push((Counter { device: Arc::clone(device), port, name, kind }, value));
                }
            }
            seen
        },
    )
}

fn ports(sysfs: &Path, device: &str) -> Vec<(u32, PathBuf)> {
    let Ok(ports) = fs::read_dir(sysfs.join(device).join("ports")) else { return Vec::new() };
    let mut ports: Vec<(u32, PathBuf)> = ports
        .take(MAX_PORTS)
        .filter_map(|port| {
            let port = port.ok()?;
            Some((port.file_name().to_str()?.parse().ok()?, port.path()))
        })
        .collect();
    ports.sort_unstable();
    ports
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counter(folder: &Path, device: &str, port: u32, path: &str, value: &str) {
        let file = folder.join(device).join("ports").join(port.to_string()).join(path);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, value).unwrap();
    }

    #[test]
    fn errors_are_read_of_each_port_of_the_devices_that_are_asked_for() {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path();
        counter(at, "mlx5_0", 1, "hw_counters/req_transport_retries_exceeded", "3\n");
        counter(at, "mlx5_0", 1, "hw_counters/lifespan", "10\n");
        counter(at, "mlx5_0", 1, "counters/link_downed", "1\n");
        counter(at, "mlx5_0", 2, "hw_counters/local_ack_timeout_err", "not a number\n");
        counter(at, "mlx5_1", 1, "counters/link_downed", "9\n");
        let devices = BTreeSet::from(["mlx5_0".into(), "gone".into()]);
        let seen: Vec<_> =
            errors(at, &devices).into_iter().map(|(it, value)| (it.port, it.name, it.kind, value)).collect();
        assert_eq!(seen, [(1, "req_transport_retries_exceeded", GaveUp, 3), (1, "link_downed", Link, 1)]);
    }

    #[test]
    fn no_counter_is_read_twice() {
        assert_eq!(BTreeSet::from(COUNTERS.map(|(name, _)| name)).len(), COUNTERS.len());
    }

    #[test]
    fn a_process_without_devices_has_none() {
        assert_eq!(of_process(std::process::id()), BTreeSet::new());
        assert_eq!(of_process(0), BTreeSet::new());
    }
}
