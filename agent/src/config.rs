//! The agent's configuration: every setting, its default and its limits.
//!
//! [`Config::load`] decides about the whole file and names every problem with its place.

mod peers;
mod probes;
mod record;
mod server_metrics;

use std::{
    net::{Ipv4Addr, SocketAddr},
    path::PathBuf,
    time::Duration,
};

use reqwest::Url;
use serde::{Deserialize, Serialize, Serializer};

use crate::{
    kernel::Sizes,
    problem::{MAX_FILE, Problem, Problems, Shape, Text, duration},
    rule::{Mode, load::one_of},
    sink::alertmanager,
};

pub use peers::Peers;
use peers::RawPeers;
use probes::RawProbes;
pub use probes::{Completions, Probes};
use record::RawRecord;
pub use record::Record;
use server_metrics::RawServerMetrics;
pub use server_metrics::{ReadMetrics, ServerMetrics};

/// The configuration, checked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Config {
    /// Where the agent serves its metrics, its API and its page.
    pub listen: SocketAddr,
    /// Folder of the rules; the rules that come with the agent when not set.
    pub rules: Option<PathBuf>,
    /// The most that may be done about stuck requests; a rule can allow less.
    pub mode: Mode,
    /// Name of the node in alerts.
    pub node: String,
    /// The Alertmanagers.
    pub alertmanager: Alertmanager,
    /// The agents of other nodes.
    pub peers: Peers,
    /// The audit log.
    pub audit: Audit,
    /// Size of the ring buffer between kernel and agent, in bytes.
    pub ring_size: u32,
    /// How often the ring buffer is drained.
    #[serde(with = "humantime_serde")]
    pub drain_interval: Duration,
    /// How often new server processes are looked for.
    #[serde(with = "humantime_serde")]
    pub scan_interval: Duration,
    /// Limits of remediation.
    pub remediation: Remediation,
    /// The flight recorder.
    pub record: Record,
    /// Most requests that are tracked at once, of one server.
    pub max_requests: usize,
    /// The probes on transfer engines.
    pub probes: Probes,
    /// Reading the servers' own metrics.
    pub server_metrics: ServerMetrics,
    /// Calls into transfer engines that are under way at once on this node: one a thread.
    pub max_calls: u32,
    /// Transfers of one server that are kept: those that are over or were never posted go first.
    pub max_transfers: usize,
}

/// The Alertmanagers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Alertmanager {
    /// Base URLs. None: no alert is sent.
    #[serde(serialize_with = "as_texts")]
    pub urls: Vec<Url>,
    /// How often a firing alert is told again.
    #[serde(with = "humantime_serde")]
    pub resend_interval: Duration,
    /// PEM file with the only authorities to trust; the system's when not set.
    pub ca_file: Option<PathBuf>,
    /// File with a bearer token.
    pub bearer_token_file: Option<PathBuf>,
    /// URL of a runbook, `{cause}` standing for the cause.
    pub runbook_url: Option<String>,
}

/// The audit log.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Audit {
    /// Its file. None: no audit log, and no remediation either.
    pub path: Option<PathBuf>,
}

/// Limits of remediation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Remediation {
    /// Most requests that are failed in a minute, on this node.
    pub max_per_minute: u32,
    /// While this file exists, nothing is done.
    pub kill_switch: Option<PathBuf>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 9464)),
            rules: None,
            mode: Mode::Observe,
            node: hostname(),
            alertmanager: Alertmanager::default(),
            peers: Peers::default(),
            audit: Audit::default(),
            ring_size: 8 << 20,
            drain_interval: Duration::from_millis(10),
            scan_interval: Duration::from_secs(1),
            remediation: Remediation::default(),
            record: Record::default(),
            max_requests: 200_000,
            probes: Probes::default(),
            server_metrics: ServerMetrics::default(),
            max_calls: 8_192,
            max_transfers: 65_536,
        }
    }
}

impl Default for Alertmanager {
    fn default() -> Self {
        Self {
            urls: Vec::new(),
            resend_interval: Duration::from_secs(60),
            ca_file: None,
            bearer_token_file: None,
            runbook_url: None,
        }
    }
}

impl Default for Remediation {
    fn default() -> Self {
        Self { max_per_minute: 6, kill_switch: None }
    }
}

impl From<Alertmanager> for alertmanager::Settings {
    fn from(config: Alertmanager) -> Self {
        let Alertmanager { urls, resend_interval, ca_file, bearer_token_file, runbook_url } = config;
        Self { urls, resend_interval, ca_file, bearer_token_file, runbook_url }
    }
}

fn as_texts<S: Serializer>(urls: &[Url], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(urls.iter().map(Url::as_str))
}

fn hostname() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

const SHAPE: Shape = Shape::Map(&[
    ("listen", Shape::Any),
    ("rules", Shape::Any),
    ("mode", Shape::Any),
    ("node", Shape::Any),
    (
        "alertmanager",
        Shape::Map(&[
            ("urls", Shape::Any),
            ("resend_interval", Shape::Any),
            ("ca_file", Shape::Any),
            ("bearer_token_file", Shape::Any),
            ("runbook_url", Shape::Any),
        ]),
    ),
    ("peers", Shape::Map(&[("urls", Shape::Any)])),
    ("audit", Shape::Map(&[("path", Shape::Any)])),
    ("ring_size", Shape::Any),
    ("drain_interval", Shape::Any),
    ("scan_interval", Shape::Any),
    ("remediation", Shape::Map(&[("max_per_minute", Shape::Any), ("kill_switch", Shape::Any)])),
    (
        "record",
        Shape::Map(&[
            ("folder", Shape::Any),
            ("minutes", Shape::Any),
            ("max_bytes", Shape::Any),
            ("on_firing", Shape::Any),
            ("max_files", Shape::Any),
        ]),
    ),
    ("max_requests", Shape::Any),
    ("probes", Shape::Map(&[("transfers", Shape::Any), ("completions", Shape::Any)])),
    ("server_metrics", Shape::Map(&[("read", Shape::Any), ("interval", Shape::Any), ("ports", Shape::Any)])),
    ("max_calls", Shape::Any),
    ("max_transfers", Shape::Any),
]);

#[derive(Default, Deserialize)]
#[serde(default)]
struct RawConfig {
    listen: Option<Text>,
    rules: Option<Text>,
    mode: Option<Text>,
    node: Option<Text>,
    alertmanager: Option<RawAlertmanager>,
    peers: Option<RawPeers>,
    audit: Option<RawAudit>,
    ring_size: Option<Text>,
    drain_interval: Option<Text>,
    scan_interval: Option<Text>,
    remediation: Option<RawRemediation>,
    record: Option<RawRecord>,
    max_requests: Option<Text>,
    probes: Option<RawProbes>,
    server_metrics: Option<RawServerMetrics>,
    max_calls: Option<Text>,
    max_transfers: Option<Text>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct RawAlertmanager {
    urls: Option<Vec<Text>>,
    resend_interval: Option<Text>,
    ca_file: Option<Text>,
    bearer_token_file: Option<Text>,
    runbook_url: Option<Text>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct RawAudit {
    path: Option<Text>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct RawRemediation {
    max_per_minute: Option<Text>,
    kill_switch: Option<Text>,
}

impl Config {
    /// How much the kernel keeps.
    pub fn sizes(&self) -> Sizes {
        Sizes { ring: self.ring_size, calls: self.max_calls }
    }

    /// Reads `text`, the YAML of `file`. What it does not set has its default.
    ///
    /// # Errors
    ///
    /// Every problem; of YAML errors the first.
    pub fn load(text: &str, file: &str) -> Result<Self, Vec<Problem>> {
        let mut problems = Problems::of(file);
        if text.len() as u64 > MAX_FILE {
            problems.of_file(format!("is larger than {} KiB", MAX_FILE >> 10));
            return Err(problems.into_found());
        }
        // A file of comments has no document; that is a configuration of defaults.
        let is_empty = text.lines().all(|line| line.trim().is_empty() || line.trim_start().starts_with('#'));
        let raw = if is_empty { Some(RawConfig::default()) } else { problems.parse::<RawConfig>(text, &SHAPE) };
        let config = raw.map(|raw| Self::from_raw(raw, &mut problems));
        let found = problems.into_found();
        match config {
            Some(config) if found.is_empty() => Ok(config),
            _ => Err(found),
        }
    }

    fn from_raw(raw: RawConfig, problems: &mut Problems<'_>) -> Self {
        let mut config = Self::default();
        let set = &mut Setter { problems };
        set.to(&mut config.listen, raw.listen, |text| {
            text.parse()
                .map_err(|_| format!("`{text}` is no address; write an IP address and a port, such as 127.0.0.1:9464"))
        });
        set.path(&mut config.rules, raw.rules);
        if let Some(mode) =
            raw.mode.and_then(|text| one_of("mode", &text, &Mode::ALL.map(|mode| (mode.name(), mode)), set.problems))
        {
            config.mode = mode;
        }
        set.to(&mut config.node, raw.node, |text| {
            let fits =
                !text.is_empty() && text.len() <= 253 && text.chars().all(|character| character.is_ascii_graphic());
            if fits {
                Ok(text.to_owned())
            } else {
                Err("the node's name must have 1 to 253 printable ASCII characters without spaces".to_owned())
            }
        });
        set.to(&mut config.ring_size, raw.ring_size, |text| {
            let size: Option<u32> = text.parse().ok().filter(|size: &u32| size.is_power_of_two());
            size.filter(|size| (64 << 10..=1 << 30).contains(size))
                .ok_or_else(|| format!("`{text}` is no ring size; write a power of two from 65536 to 1073741824 bytes"))
        });
        let (millisecond, second) = (Duration::from_millis(1), Duration::from_secs(1));
        set.duration(&mut config.drain_interval, raw.drain_interval, millisecond, second);
        set.duration(&mut config.scan_interval, raw.scan_interval, 100 * millisecond, 3_600 * second);
        set.number(&mut config.max_requests, raw.max_requests, 1, 10_000_000);
        config.record.set(raw.record.unwrap_or_default(), set);
        config.probes.set(raw.probes.unwrap_or_default(), set);
        config.server_metrics.set(raw.server_metrics.unwrap_or_default(), set);
        set.number(&mut config.max_calls, raw.max_calls, 64, 1_000_000);
        set.number(&mut config.max_transfers, raw.max_transfers, 1, 10_000_000);
        let alertmanager = raw.alertmanager.unwrap_or_default();
        config.alertmanager.urls =
            alertmanager.urls.unwrap_or_default().iter().filter_map(|url| set.url(url)).collect();
        set.duration(&mut config.alertmanager.resend_interval, alertmanager.resend_interval, second, 3_600 * second);
        set.path(&mut config.alertmanager.ca_file, alertmanager.ca_file);
        set.path(&mut config.alertmanager.bearer_token_file, alertmanager.bearer_token_file);
        if let Some(text) = alertmanager.runbook_url {
            set.url(&text);
            config.alertmanager.runbook_url = Some(text.value);
        }
        config.peers.set(raw.peers.unwrap_or_default(), set);
        set.path(&mut config.audit.path, raw.audit.unwrap_or_default().path);
        let remediation = raw.remediation.unwrap_or_default();
        set.number(&mut config.remediation.max_per_minute, remediation.max_per_minute, 0, 6_000);
        set.path(&mut config.remediation.kill_switch, remediation.kill_switch);
        config
    }
}

/// Turns texts into settings and notes those that do not fit.
struct Setter<'a, 'b> {
    problems: &'a mut Problems<'b>,
}

impl Setter<'_, '_> {
    fn to<T>(&mut self, setting: &mut T, text: Option<Text>, read: impl Fn(&str) -> Result<T, String>) {
        let Some(text) = text else { return };
        match read(text.value.trim()) {
            Ok(value) => *setting = value,
            Err(message) => self.problems.at(&text, message),
        }
    }

    fn path(&mut self, setting: &mut Option<PathBuf>, text: Option<Text>) {
        self.to(setting, text, |text| {
            if text.is_empty() {
                Err("the path is empty; leave the key out instead".to_owned())
            } else {
                Ok(Some(text.into()))
            }
        });
    }

    fn duration(&mut self, setting: &mut Duration, text: Option<Text>, least: Duration, most: Duration) {
        self.to(setting, text, |text| {
            let duration = duration(text, most)?;
            if duration < least {
                Err(format!("`{text}` is too short; write at least {}ms", least.as_millis()))
            } else {
                Ok(duration)
            }
        });
    }

    fn number<T: std::str::FromStr + PartialOrd + std::fmt::Display>(
        &mut self,
        setting: &mut T,
        text: Option<Text>,
        least: T,
        most: T,
    ) {
        self.to(setting, text, |text| {
            let number = text.parse().ok().filter(|number| *number >= least && *number <= most);
            number.ok_or_else(|| format!("`{text}` does not fit; write a number from {least} to {most}"))
        });
    }

    fn url(&mut self, text: &Text) -> Option<Url> {
        let url =
            Url::parse(text.value.trim()).ok().filter(|url| matches!(url.scheme(), "http" | "https") && url.has_host());
        let Some(url) = url else {
            self.problems
                .at(text, format!("`{}` is no URL; write http:// or https:// and a host", text.value.escape_debug()));
            return None;
        };
        if !url.username().is_empty() || url.password().is_some() {
            self.problems.at(text, "a URL must not hold a password: it would be in logs; use bearer_token_file");
            return None;
        }
        Some(url)
    }
}
