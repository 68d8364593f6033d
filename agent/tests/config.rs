//! Configuration and its check.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{path::Path, time::Duration};

use dislodge::{
    check::check,
    config::{Config, ReadMetrics},
    problem::Problem,
    rule::{Mode, load},
};
use proptest::prelude::*;

fn complaints(text: &str) -> Vec<String> {
    Config::load(text, "c.yaml").unwrap_err().iter().map(Problem::to_string).collect()
}

fn repository(path: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

#[test]
fn without_a_setting_everything_has_its_default() {
    for text in ["", "# nothing\n\n", "{}"] {
        let config = Config::load(text, "c.yaml").unwrap();
        assert_eq!(config, Config::default());
    }
    let config = Config::default();
    assert_eq!((config.mode, config.listen.to_string().as_str()), (Mode::Observe, "127.0.0.1:9464"));
    assert!(!config.node.is_empty(), "the host has a name");
}

#[test]
fn the_example_says_the_defaults() {
    let text = std::fs::read_to_string(repository("config.example.yaml")).unwrap();
    assert_eq!(Config::load(&text, "config.example.yaml").unwrap(), Config::default());
    // What is commented out there is a setting as well.
    let with_examples: String = text
        .lines()
        .map(|line| {
            let setting = line.trim_start().strip_prefix("# ").filter(|rest| {
                rest.split_once(": ")
                    .is_some_and(|(key, _)| key.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_'))
            });
            match setting {
                Some(setting) => format!("{}{setting}\n", &line[..line.len() - line.trim_start().len()]),
                None => format!("{line}\n"),
            }
        })
        .collect();
    let config = Config::load(&with_examples, "with examples").unwrap();
    assert_eq!(config.node, "prefill-7");
    assert!(config.rules.is_some() && config.audit.path.is_some() && config.remediation.kill_switch.is_some());
    assert!(
        config.alertmanager.ca_file.is_some()
            && config.alertmanager.bearer_token_file.is_some()
            && config.alertmanager.runbook_url.is_some()
    );
}

#[test]
fn settings_are_read() {
    let text = "
listen: '[::1]:80'
rules: /r
mode: dry-run
node: n1
alertmanager:
  urls: [http://a:9093, 'https://b/prefix/']
  resend_interval: 30s
audit: {path: /a}
ring_size: 65536
drain_interval: 1ms
scan_interval: 5s
remediation: {max_per_minute: 0, kill_switch: /k}
max_requests: 10
server_metrics: {read: off, interval: 1m, ports: [30000, 8081]}
";
    let config = Config::load(text, "c.yaml").unwrap();
    assert_eq!(config.listen.to_string(), "[::1]:80");
    assert_eq!((config.mode, config.ring_size, config.max_requests), (Mode::DryRun, 65_536, 10));
    assert_eq!(
        config.alertmanager.urls.iter().map(|url| url.as_str()).collect::<Vec<_>>(),
        ["http://a:9093/", "https://b/prefix/"]
    );
    assert_eq!(
        (config.alertmanager.resend_interval, config.drain_interval),
        (Duration::from_secs(30), Duration::from_millis(1))
    );
    assert_eq!(config.remediation.max_per_minute, 0);
    assert_eq!(config.audit.path.as_deref(), Some(Path::new("/a")));
    let metrics = &config.server_metrics;
    assert_eq!(
        (metrics.read, metrics.interval, metrics.ports.as_slice()),
        (ReadMetrics::Off, Duration::from_secs(60), &[30_000, 8_081][..])
    );
}

#[test]
fn every_problem_is_told_at_once_with_its_place() {
    let text = "\
listen: localhost
mode: enforced
lissen: x
node: a b
alertmanager:
  urls:
    - alertmanager:9093
    - http://user:secret@host:9093
  resend_interval: 1ms
  resend: 5
ring_size: 100000
drain_interval: 2s
scan_interval: 10
remediation:
  max_per_minute: -1
max_requests: many
audit:
  path: ''
server_metrics:
  read: on
  interval: 100ms
  ports:
    - 0
    - 30000
    - http
  url: x
";
    let problems = complaints(text);
    let expected = [
        "c.yaml:3:1: unknown key `lissen`; did you mean `listen`?",
        "c.yaml:10:3: unknown key `resend` in `alertmanager`",
        "c.yaml:1:9: `localhost` is no address",
        "c.yaml:2:7: `enforced` is no mode; did you mean `enforce`?",
        "c.yaml:4:7: the node's name",
        "c.yaml:7:7: `alertmanager:9093` is no URL",
        "c.yaml:8:7: a URL must not hold a password",
        "c.yaml:9:20: `1ms` is too short; write at least 1000ms",
        "c.yaml:11:12: `100000` is no ring size; write a power of two",
        "c.yaml:12:17: `2s` is too long; write at most 1s",
        "c.yaml:13:16: `10` is not a duration",
        "c.yaml:15:19: `-1` does not fit; write a number from 0 to 6000",
        "c.yaml:16:15: `many` does not fit",
        "c.yaml:18:9: the path is empty",
        "c.yaml:20:9: `on` is no read",
        "c.yaml:21:13: `100ms` is too short; write at least 1000ms",
        "c.yaml:23:7: `0` does not fit; write a number from 1 to 65535",
        "c.yaml:25:7: `http` does not fit",
        "c.yaml:26:3: unknown key `url` in `server_metrics`",
    ];
    for expected in expected {
        assert!(
            problems.iter().any(|problem| problem.starts_with(expected)),
            "{expected} is missing in\n{}",
            problems.join("\n")
        );
    }
    assert_eq!(problems.len(), expected.len(), "{}", problems.join("\n"));
    assert!(!problems.join("\n").contains("secret"));
}

#[test]
fn yaml_errors_name_line_and_column() {
    assert_eq!(complaints("mode: observe\nmode: enforce\n").len(), 1);
    assert!(
        complaints("mode: observe\nmode: enforce\n")[0].starts_with("c.yaml:2:1: "),
        "{:?}",
        complaints("mode: observe\nmode: enforce\n")
    );
    assert!(complaints("audit: [1]\n")[0].starts_with("c.yaml:1:8: "), "{:?}", complaints("audit: [1]\n"));
    assert!(complaints("a: [\n")[0].starts_with("c.yaml:"));
    assert!(complaints(&"#".repeat(2 << 20))[0].contains("is larger than"));
}

#[test]
fn a_check_tells_the_problems_of_configuration_and_rules_together() {
    let folder = tempfile::tempdir().unwrap();
    let rules = folder.path().join("rules");
    std::fs::create_dir(&rules).unwrap();
    std::fs::write(rules.join("mine.yaml"), "rules: [{name: A, when: bogus, severity: info}]").unwrap();
    let config = folder.path().join("config.yaml");
    std::fs::write(&config, "mode: loud\n").unwrap();
    let report = check(Some(&config), Some(&rules));
    assert!(!report.ok && report.config.is_none() && report.rules.is_empty());
    assert_eq!(report.problems.len(), 2, "{:?}", report.problems);
    assert!(
        report.problems[0]
            .to_string()
            .ends_with("config.yaml:1:7: `loud` is no mode; known are observe, dry-run, enforce")
    );
    assert!(report.problems[1].to_string().contains("mine.yaml:1:25: unknown field `bogus`"));
}

#[test]
fn a_check_without_problems_tells_what_would_apply() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("config.yaml");
    std::fs::write(&config, "mode: dry-run\n").unwrap();
    let report = check(Some(&config), None);
    assert!(report.ok && report.problems.is_empty());
    assert_eq!(report.rules.len(), load::defaults().unwrap().len());
    assert!(report.rules.iter().all(|rule| rule.action <= Mode::DryRun), "the lower mode wins");
    let json = serde_json::to_value(&report).unwrap();
    assert_eq!(json["ok"], true);
    assert_eq!(json["config"]["mode"], "dry-run");
    assert_eq!(json["config"]["drain_interval"], "10ms");
    assert_eq!(json["rules"][0]["name"], "RoomCollision");

    std::fs::write(&config, format!("rules: {}\n", folder.path().join("none").display())).unwrap();
    assert!(!check(Some(&config), None).ok, "the configuration's own folder is checked");
    assert!(check(Some(&folder.path().join("missing.yaml")), None).problems[0].to_string().contains("cannot be read"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn no_text_makes_loading_panic(text in "\\PC*|[ \\n:{}\\[\\]|>'\"&*!#a-z0-9-]*") {
        let _ = Config::load(&text, "c.yaml");
    }

    #[test]
    fn no_value_makes_loading_panic(
        key in prop::sample::select(vec!["listen", "rules", "mode", "node", "alertmanager", "audit", "ring_size", "drain_interval", "max_requests", "remediation"]),
        value in "\\PC{0,30}|[0-9]{1,40}(ms|s|h|d)?|\\[.*\\]|\\{.*\\}",
    ) {
        if let Ok(config) = Config::load(&format!("{key}: {value}\n"), "c.yaml") {
            assert!(config.ring_size.is_power_of_two());
        }
    }
}

#[test]
fn peers_are_asked_over_plain_http_and_there_are_not_more_than_one_can_ask() {
    let good = Config::load("peers: { urls: [http://agents:9464, 'http://10.0.0.7:9464/'] }", "c.yaml").unwrap();
    let urls: Vec<&str> = good.peers.urls.iter().map(|url| url.as_str()).collect();
    assert_eq!(urls, ["http://agents:9464/", "http://10.0.0.7:9464/"]);
    let bad = Config::load("peers:\n  urls:\n    - https://agents\n    - agents\n", "c.yaml").unwrap_err();
    let told: Vec<String> = bad.iter().map(ToString::to_string).collect();
    assert_eq!(told.len(), 2, "{told:?}");
    assert!(told[0].starts_with("c.yaml:3:7") && told[0].contains("http://"), "{told:?}");
    let many = format!("peers: {{ urls: [{}] }}", vec!["http://a"; 65].join(", "));
    assert_eq!(Config::load(&many, "c.yaml").unwrap_err().len(), 1);
}
