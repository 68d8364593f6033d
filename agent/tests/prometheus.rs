//! A real Prometheus (Debian: `prometheus`) scrapes the agent while a request of a real server is pinned and freed.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

#[path = "support/support.rs"]
mod support;

use std::{
    fs::{self, File},
    net::TcpListener,
    path::Path,
    process::{Child, Command, Stdio},
    rc::Rc,
    thread,
};

use serde_json::Value;
use support::{
    agent,
    environment::on_each,
    http, needs, rules,
    server::Setup,
    wait::{until, until_true},
};

const BINARY: &str = "/usr/bin/prometheus";

/// A running Prometheus; ends with its test.
struct Prometheus {
    process: Child,
    address: String,
    folder: Rc<tempfile::TempDir>,
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        if thread::panicking() {
            println!("{}", fs::read_to_string(self.folder.path().join("log")).unwrap_or_default());
        }
    }
}

impl Prometheus {
    fn scraping(agent: &str) -> Self {
        let folder = Rc::new(tempfile::tempdir().unwrap());
        let config = folder.path().join("prometheus.yml");
        let text = format!(
            "global: {{scrape_interval: 200ms}}\n\
             scrape_configs: [{{job_name: dislodge, static_configs: [{{targets: ['{agent}']}}]}}]\n"
        );
        fs::write(&config, text).unwrap();
        // A port that was free a moment ago may be taken by now: then it ends at once, and another one is tried.
        for _ in 0..5 {
            let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
            let process = Command::new(BINARY)
                .arg(format!("--config.file={}", config.display()))
                .arg(format!("--storage.tsdb.path={}", folder.path().join("data").display()))
                .arg(format!("--web.listen-address={address}"))
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(File::create(folder.path().join("log")).unwrap())
                .spawn()
                .unwrap();
            let mut started = Self { process, address, folder: Rc::clone(&folder) };
            let is_ready = until("Prometheus", || {
                if started.process.try_wait().unwrap().is_some() {
                    return Some(false);
                }
                http::get(&started.address, "/-/ready").is_some_and(|(status, _)| status == 200).then_some(true)
            });
            if is_ready {
                return started;
            }
        }
        panic!("Prometheus does not start")
    }

    /// The value of the only series that an instant query finds; nothing when it finds none.
    fn query(&self, query: &str) -> Option<f64> {
        let (_, body) = http::get(&self.address, &format!("/api/v1/query?query={}", encoded(query)))?;
        let answer: Value = serde_json::from_str(&body).unwrap();
        assert_eq!(answer["status"], "success", "{answer}");
        let result = answer["data"]["result"].as_array().unwrap();
        assert!(result.len() <= 1, "{query} finds several series: {answer}");
        result.first()?["value"][1].as_str()?.parse().ok()
    }
}

fn encoded(query: &str) -> String {
    query.bytes().map(|byte| format!("%{byte:02X}")).collect()
}

#[test]
fn a_real_prometheus_sees_the_request_stuck_and_freed() {
    let installed =
        Path::new(BINARY).exists().then_some(()).ok_or("no Prometheus; apt-get install prometheus".to_owned());
    if needs(installed).is_none() {
        return;
    }
    on_each(&["0.5.22"], |release| {
        let mut server = Setup::of(release).start();
        let mut observer = agent::Setup::watching(&[server.pid()], &rules::shipped()).attach();
        let prometheus = Prometheus::scraping(observer.address());
        const STUCK: &str = r#"dislodge_stuck_requests{cause="RoomCollision"}"#;
        until_true("the first scrape", || prometheus.query(STUCK) == Some(0.0));
        assert_eq!(prometheus.query("up"), Some(1.0));

        server.pin(77);
        until_true("the stuck request", || prometheus.query(STUCK) == Some(1.0));
        let alert = r#"dislodge_alerts{rule="RoomCollision",severity="critical",state="firing"}"#;
        assert_eq!(prometheus.query(alert), Some(1.0));
        until_true("its age", || {
            prometheus.query("dislodge_oldest_inflight_request_age_seconds").is_some_and(|age| age > 1.0)
        });
        assert_eq!(prometheus.query("dislodge_inflight_requests"), Some(1.0));
        assert_eq!(prometheus.query("count(dislodge_build_info)"), Some(1.0));

        // The same address again: Prometheus goes on with the same series.
        let address = observer.address().to_owned();
        assert!(observer.terminate().success());
        let setup = agent::Setup::watching(&[server.pid()], &rules::shipped()).mode("enforce").listen(&address);
        let agent = setup.attach();
        until_true("the effect", || agent.remediations("effective") == 1.0);
        until_true("no stuck request", || prometheus.query(STUCK) == Some(0.0));
        let effective = r#"dislodge_remediations_total{outcome="effective"}"#;
        until_true("the remediation", || prometheus.query(effective) == Some(1.0));
        until_true("an empty queue", || prometheus.query("dislodge_inflight_requests") == Some(0.0));
    });
}
