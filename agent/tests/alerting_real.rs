//! The Alertmanager sink against a real Alertmanager (Debian: `prometheus-alertmanager`), seen through its API and
//! through a receiver that it calls.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

#[path = "fixtures/request.rs"]
mod request;

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use axum::{Json, Router, routing::post};
use dislodge::{
    event::clock::Monotonic,
    rule::alert::AlertState,
    sink::alertmanager::{AlertmanagerSink, Settings},
};
use request::verdict;
use serde_json::Value;

const NAMES: [&str; 2] = ["/usr/bin/prometheus-alertmanager", "/usr/bin/alertmanager"];

/// The binary; nothing, loudly, when it is not installed.
fn installed() -> Option<&'static str> {
    let found = NAMES.into_iter().find(|path| Path::new(path).exists());
    if found.is_none() {
        println!("SKIPPED: no Alertmanager is installed; apt-get install prometheus-alertmanager");
        assert!(std::env::var("CI").as_deref() != Ok("true"), "CI must have an Alertmanager");
    }
    found
}

/// A certificate of 127.0.0.1 that is its own authority.
struct Certificate {
    file: PathBuf,
    key: PathBuf,
    _folder: tempfile::TempDir,
}

impl Certificate {
    /// Nothing, loudly, when `openssl` is not installed.
    fn new() -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let (file, key) = (folder.path().join("cert.pem"), folder.path().join("key.pem"));
        let made = Command::new("openssl")
            .args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"])
            .args([
                "-subj",
                "/CN=alertmanager",
                "-addext",
                "subjectAltName=IP:127.0.0.1",
                "-addext",
                "basicConstraints=critical,CA:FALSE",
            ])
            .arg("-out")
            .arg(&file)
            .arg("-keyout")
            .arg(&key)
            .stderr(Stdio::null())
            .status();
        if !made.is_ok_and(|status| status.success()) {
            println!("SKIPPED: openssl makes no certificate; apt-get install openssl");
            assert!(std::env::var("CI").as_deref() != Ok("true"), "CI must have openssl");
            return None;
        }
        Some(Self { file, key, _folder: folder })
    }
}

/// A running Alertmanager; ends with its test.
struct Alertmanager {
    process: Child,
    url: String,
    log: PathBuf,
    _folder: tempfile::TempDir,
}

impl Drop for Alertmanager {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        if std::thread::panicking() {
            println!("{}", std::fs::read_to_string(&self.log).unwrap_or_default());
        }
    }
}

impl Alertmanager {
    async fn start(binary: &str, receiver: SocketAddr, tls: Option<&Certificate>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let config = folder.path().join("alertmanager.yml");
        let text = format!(
            "route: {{receiver: us, group_by: [alertname], group_wait: 0s, group_interval: 1s, repeat_interval: 1h}}\n\
             receivers: [{{name: us, webhook_configs: [{{url: 'http://{receiver}/', send_resolved: true}}]}}]\n"
        );
        std::fs::write(&config, text).unwrap();
        let web = folder.path().join("web.yml");
        if let Some(tls) = tls {
            let text = format!(
                "tls_server_config: {{cert_file: '{}', key_file: '{}'}}\n",
                tls.file.display(),
                tls.key.display()
            );
            std::fs::write(&web, text).unwrap();
        }
        // A port that was free a moment ago may be taken by now: then it ends at once, and another one is tried.
        for _ in 0..5 {
            let address = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
            let log = folder.path().join("log");
            let file = std::fs::File::create(&log).unwrap();
            let mut process = Command::new(binary)
                .arg(format!("--config.file={}", config.display()))
                .arg(format!("--storage.path={}", folder.path().join("data").display()))
                .arg(format!("--web.listen-address={address}"))
                .args(["--cluster.listen-address=", "--log.level=debug"])
                .args(tls.map(|_| format!("--web.config.file={}", web.display())))
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(file)
                .spawn()
                .unwrap();
            let url = format!("{}://{address}", if tls.is_some() { "https" } else { "http" });
            let deadline = Instant::now() + Duration::from_secs(20);
            while process.try_wait().unwrap().is_none() && Instant::now() < deadline {
                if get(&format!("{url}/-/ready"), tls).await.is_some() {
                    return Self { process, url, log, _folder: folder };
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            let _ = process.kill();
            let _ = process.wait();
            println!("{}", std::fs::read_to_string(&log).unwrap());
        }
        panic!("Alertmanager does not start");
    }

    /// Its alerts as its API shows them.
    async fn alerts(&self) -> Vec<Value> {
        let text = get(&format!("{}/api/v2/alerts", self.url), None).await.unwrap_or_default();
        serde_json::from_str(&text).unwrap_or_default()
    }
}

async fn get(url: &str, tls: Option<&Certificate>) -> Option<String> {
    let authorities = tls.map(|tls| reqwest::Certificate::from_pem(&std::fs::read(&tls.file).unwrap()).unwrap());
    let client = reqwest::Client::builder()
        .no_proxy()
        .tls_certs_only(authorities)
        .timeout(Duration::from_secs(5))
        .build()
        .unwrap();
    let response = client.get(url).send().await.ok()?;
    if response.status().is_success() { response.text().await.ok() } else { None }
}

/// Whom Alertmanager tells.
async fn receiver() -> (SocketAddr, Arc<Mutex<Vec<Value>>>) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let told = Arc::new(Mutex::new(Vec::new()));
    let noted = Arc::clone(&told);
    let app = Router::new()
        .route("/", post(move |Json(message): Json<Value>| async move { noted.lock().unwrap().push(message) }));
    tokio::spawn(async move { axum::serve(listener, app).await });
    (address, told)
}

async fn until<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        if let Some(found) = look().await {
            return found;
        }
        assert!(Instant::now() < deadline, "{what} did not happen");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn a_real_alertmanager_shows_an_alert_while_it_fires_and_tells_its_end() {
    let Some(binary) = installed() else { return };
    let _ = rustls::crypto::ring::default_provider().install_default();
    let (address, told) = receiver().await;
    let alertmanager = Alertmanager::start(binary, address, None).await;
    let settings = Settings {
        urls: vec![alertmanager.url.parse().unwrap()],
        resend_interval: Duration::from_secs(1),
        ca_file: None,
        bearer_token_file: None,
        runbook_url: Some("https://runbooks.example/{cause}".to_owned()),
    };
    let sink = AlertmanagerSink::start(settings).unwrap();
    sink.send(&verdict("RoomCollision", 1, AlertState::Firing, Monotonic::now()));

    let first = until("the alert", async || alertmanager.alerts().await.into_iter().next()).await;
    assert_eq!(
        (&first["status"]["state"], &first["labels"]["alertname"], &first["labels"]["cause"]),
        (&"active".into(), &"RoomCollision".into(), &"RoomCollision".into())
    );
    assert_eq!(first["annotations"]["requests"], "1");
    let notified = async |status: &'static str| {
        until(status, async || told.lock().unwrap().iter().find(|message| message["status"] == status).cloned()).await
    };
    let firing = notified("firing").await;
    assert_eq!(
        (&firing["alerts"][0]["labels"]["server"], &firing["alerts"][0]["annotations"]["runbook_url"]),
        (&"sglang::scheduler".into(), &"https://runbooks.example/RoomCollision".into())
    );

    // Each time that it is told again, the alert lives longer: past the end that the first message gave it.
    let time = |alert: &Value, key: &str| alert[key].as_str().unwrap().parse::<jiff::Timestamp>().unwrap();
    let first_end = time(&first, "endsAt");
    until("a life beyond the first message's end", async || (jiff::Timestamp::now() > first_end).then_some(())).await;
    let again = alertmanager.alerts().await;
    assert_eq!(again.len(), 1, "it is one alert: {again:?}");
    assert!(again[0]["status"]["state"] == "active" && time(&again[0], "endsAt") > first_end);
    assert_eq!(again[0]["startsAt"], first["startsAt"]);
    assert_eq!(told.lock().unwrap().iter().filter(|message| message["status"] == "resolved").count(), 0);

    sink.send(&verdict("RoomCollision", 1, AlertState::Resolved, Monotonic::now()));
    let resolved = notified("resolved").await;
    assert_eq!(resolved["alerts"][0]["status"], "resolved");
    until("an empty list", async || alertmanager.alerts().await.is_empty().then_some(())).await;
    sink.shutdown().await;
}

#[tokio::test]
async fn a_real_alertmanager_keeps_an_alert_when_the_agent_stops_and_lets_it_expire() {
    let Some(binary) = installed() else { return };
    let _ = rustls::crypto::ring::default_provider().install_default();
    let (address, told) = receiver().await;
    let alertmanager = Alertmanager::start(binary, address, None).await;
    let settings = Settings {
        urls: vec![alertmanager.url.parse().unwrap()],
        resend_interval: Duration::from_secs(1),
        ca_file: None,
        bearer_token_file: None,
        runbook_url: None,
    };
    let sink = AlertmanagerSink::start(settings).unwrap();
    for serial in 1..=20 {
        sink.send(&verdict("UpdateDropped", serial, AlertState::Firing, Monotonic::now()));
    }
    sink.shutdown().await;
    let alerts = alertmanager.alerts().await;
    assert_eq!(alerts.len(), 1, "stopping resolves nothing: {alerts:?}");
    until("its notification", async || {
        told.lock().unwrap().iter().any(|message| message["status"] == "firing").then_some(())
    })
    .await;
    until("its expiry", async || {
        told.lock().unwrap().iter().any(|message| message["status"] == "resolved").then_some(())
    })
    .await;
}

#[tokio::test]
async fn over_tls_only_the_authorities_of_the_ca_file_are_trusted() {
    let (Some(binary), Some(tls), Some(other)) = (installed(), Certificate::new(), Certificate::new()) else { return };
    let _ = rustls::crypto::ring::default_provider().install_default();
    let (address, _) = receiver().await;
    let alertmanager = Alertmanager::start(binary, address, Some(&tls)).await;
    let start = |authority: &Certificate| {
        AlertmanagerSink::start(Settings {
            urls: vec![alertmanager.url.parse().unwrap()],
            resend_interval: Duration::from_secs(60),
            ca_file: Some(authority.file.clone()),
            bearer_token_file: None,
            runbook_url: None,
        })
        .unwrap()
    };
    let (trusted, distrusted) = (start(&tls), start(&other));
    for sink in [&trusted, &distrusted] {
        sink.send(&verdict("RoomCollision", 1, AlertState::Firing, Monotonic::now()));
    }
    let counts = |sink: &AlertmanagerSink| {
        sink.deliveries().map(|(_, delivery)| (delivery.sent(), delivery.failures())).next().unwrap()
    };
    until("the delivery", async || (counts(&trusted).0 == 1).then_some(())).await;
    until("the refusal", async || (counts(&distrusted).1 > 0).then_some(())).await;
    assert_eq!(counts(&distrusted).0, 0);
    trusted.shutdown().await;
    distrusted.shutdown().await;
}
