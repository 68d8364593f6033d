//! A real Prometheus and a real Alertmanager (Debian: `prometheus`, `prometheus-alertmanager`) while a request of a real
//! server is pinned and freed.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "support/support.rs"]
mod support;

use serde_json::Value;
use support::{
    agent,
    daemon::{Daemon, installed},
    environment::on_each,
    needs, rules,
    server::Setup,
    wait::until_true,
};

fn prometheus(scraping: &str) -> Daemon {
    let config = format!(
        "global: {{scrape_interval: 200ms}}\n\
         scrape_configs: [{{job_name: dislodge, static_configs: [{{targets: ['{scraping}']}}]}}]\n"
    );
    Daemon::start("/usr/bin/prometheus", &config, "--storage.tsdb.path", &[])
}

fn alertmanager() -> Daemon {
    let config = "route: {receiver: nobody}\nreceivers: [{name: nobody}]\n";
    Daemon::start("/usr/bin/prometheus-alertmanager", config, "--storage.path", &["--cluster.listen-address="])
}

/// The value of the only series that an instant query finds; nothing when it finds none.
fn query(prometheus: &Daemon, query: &str) -> Option<f64> {
    let encoded: String = query.bytes().map(|byte| format!("%{byte:02X}")).collect();
    let answer: Value = serde_json::from_str(&prometheus.get(&format!("/api/v1/query?query={encoded}"))?).unwrap();
    assert_eq!(answer["status"], "success", "{answer}");
    let result = answer["data"]["result"].as_array().unwrap();
    assert!(result.len() <= 1, "{query} finds several series: {answer}");
    result.first()?["value"][1].as_str()?.parse().ok()
}

/// The alerts that an Alertmanager holds to be active.
fn alerts(alertmanager: &Daemon) -> Vec<Value> {
    serde_json::from_str(&alertmanager.get("/api/v2/alerts?active=true").unwrap()).unwrap()
}

#[test]
fn a_real_prometheus_sees_the_request_stuck_and_freed() {
    if needs(installed("/usr/bin/prometheus", "prometheus")).is_none() {
        return;
    }
    on_each(&["0.5.22"], |release| {
        let mut server = Setup::of(release).start();
        let mut observer = agent::Setup::watching(&[server.pid()], &rules::shipped()).attach();
        let prometheus = prometheus(observer.address());
        const STUCK: &str = r#"dislodge_stuck_requests{cause="RoomCollision"}"#;
        until_true("the first scrape", || query(&prometheus, STUCK) == Some(0.0));
        assert_eq!(query(&prometheus, "up"), Some(1.0));

        server.pin(77);
        until_true("the stuck request", || query(&prometheus, STUCK) == Some(1.0));
        let alert = r#"dislodge_alerts{rule="RoomCollision",severity="critical",state="firing"}"#;
        assert_eq!(query(&prometheus, alert), Some(1.0));
        until_true("its age", || {
            query(&prometheus, "dislodge_oldest_inflight_request_age_seconds").is_some_and(|age| age > 1.0)
        });
        assert_eq!(query(&prometheus, "dislodge_inflight_requests"), Some(1.0));
        assert_eq!(query(&prometheus, "count(dislodge_build_info)"), Some(1.0));

        // The same address again: Prometheus goes on with the same series.
        let address = observer.address().to_owned();
        assert!(observer.terminate().success());
        let setup = agent::Setup::watching(&[server.pid()], &rules::shipped()).mode("enforce").listen(&address);
        let agent = setup.attach();
        until_true("the effect", || agent.remediations("effective") == 1.0);
        until_true("no stuck request", || query(&prometheus, STUCK) == Some(0.0));
        let effective = r#"dislodge_remediations_total{outcome="effective"}"#;
        until_true("the remediation", || query(&prometheus, effective) == Some(1.0));
        until_true("an empty queue", || query(&prometheus, "dislodge_inflight_requests") == Some(0.0));
    });
}

#[test]
fn a_real_alertmanager_holds_the_alert_until_the_request_is_freed() {
    if needs(installed("/usr/bin/prometheus-alertmanager", "prometheus-alertmanager")).is_none() {
        return;
    }
    on_each(&["0.5.22"], |release| {
        let alertmanager = alertmanager();
        let config = format!("alertmanager: {{urls: ['http://{}']}}", alertmanager.address());
        let mut server = Setup::of(release).start();
        let pid = server.pid();
        let setup = || agent::Setup::watching(&[pid], &rules::shipped()).config(&config);
        let mut observer = setup().attach();
        let enforcer = setup().mode("enforce");
        let rid = server.pin(77);
        until_true("the alert", || !alerts(&alertmanager).is_empty());
        let held = alerts(&alertmanager);
        let labels = &held[0]["labels"];
        assert_eq!((&labels["alertname"], &labels["cause"]), (&"RoomCollision".into(), &"RoomCollision".into()));
        assert_eq!(labels["severity"], "critical");
        assert!(!labels.to_string().contains(&rid), "a request id is no label: {labels}");
        assert!(held[0]["annotations"].to_string().contains(&rid), "the request is named: {}", held[0]["annotations"]);

        assert!(observer.terminate().success());
        assert_eq!(alerts(&alertmanager).len(), 1, "stopping the agent frees no request");
        let agent = enforcer.attach();
        until_true("the effect", || agent.remediations("effective") == 1.0);
        until_true("the end of the alert", || alerts(&alertmanager).is_empty());
    });
}
