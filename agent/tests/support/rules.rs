//! Rules for tests: the shipped conditions, and others that ask for more than any operator should, after one second.

use super::repository;

/// Requests pinned by a second one on their room, whatever the confidence.
pub const COLLISION: &str = "
rules:
  - name: Collision
    when: cause == \"RoomCollision\" && inflight
    for: 1s
    severity: critical
    action: enforce
";

/// Every request in the inflight queue is to be failed: only the guards stand between.
pub const EVERYTHING: &str = "
rules:
  - name: Everything
    when: inflight
    for: 1s
    severity: critical
    action: enforce
";

/// Requests that wait for one of these causes, wherever they are.
pub const WAITING: &str = "
rules:
  - name: Parked
    when: cause == \"Parked\"
    for: 1s
    severity: info
    action: enforce
  - name: Unbootstrapped
    when: cause == \"NeverBootstrapped\" && waiting_seconds > 5.0
    for: 1s
    severity: info
    action: enforce
";

/// The rules that come with the agent, each with a `for` of one second.
pub fn shipped() -> String {
    let text = std::fs::read_to_string(repository().join("rules/default.yaml")).unwrap();
    let short: Vec<String> = text
        .lines()
        .map(|line| match line.split_once("for:") {
            Some((indent, _)) if indent.trim().is_empty() => format!("{indent}for: 1s"),
            _ => line.to_owned(),
        })
        .collect();
    assert!(short.iter().any(|line| line.ends_with("for: 1s")), "the rules look different now");
    short.join("\n")
}
