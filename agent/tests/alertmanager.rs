//! The Alertmanager sink against servers that are slow, refuse, close or are not there. A real Alertmanager is asked in
//! `alerting_real.rs`.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "fixtures/request.rs"]
mod request;

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use axum::{
    Json, Router,
    http::{HeaderMap, StatusCode},
    response::{IntoResponse, Redirect},
    routing::post,
};
use dislodge::{
    event::clock::Monotonic,
    rule::alert::AlertState,
    sink::alertmanager::{AlertmanagerSink, Settings, SetupError},
    verdict::Verdict,
};
use request::verdict;
use serde_json::Value;

// A server that does as it is told

#[derive(Clone, Copy, Debug)]
enum Answer {
    Ok,
    Status(u16),
    Slow,
    Redirect,
}

/// A message's headers and its alerts.
type Message = (HeaderMap, Vec<Value>);

#[derive(Clone, Default)]
struct Seen(Arc<Mutex<Vec<Message>>>);

impl Seen {
    fn messages(&self) -> Vec<Message> {
        self.0.lock().unwrap().clone()
    }

    fn alerts(&self) -> Vec<Value> {
        self.messages().into_iter().flat_map(|(_, alerts)| alerts).collect()
    }
}

/// Answers as the list says, then with its last answer for ever.
async fn serve(answers: Vec<Answer>) -> (SocketAddr, Seen) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let seen = Seen::default();
    let noted = seen.clone();
    let answers = Arc::new(Mutex::new(answers));
    let handler = move |headers: HeaderMap, Json(alerts): Json<Vec<Value>>| async move {
        let answer = {
            let mut answers = answers.lock().unwrap();
            if answers.len() > 1 { answers.remove(0) } else { answers[0] }
        };
        noted.0.lock().unwrap().push((headers, alerts));
        match answer {
            Answer::Ok => StatusCode::OK.into_response(),
            Answer::Status(status) => (StatusCode::from_u16(status).unwrap(), "because\nI say so").into_response(),
            Answer::Slow => {
                tokio::time::sleep(Duration::from_secs(60)).await;
                StatusCode::OK.into_response()
            }
            Answer::Redirect => Redirect::temporary("http://127.0.0.1:1/api/v2/alerts").into_response(),
        }
    };
    let app =
        Router::new().route("/prefix/api/v2/alerts", post(handler.clone())).route("/api/v2/alerts", post(handler));
    tokio::spawn(async move { axum::serve(listener, app).await });
    (address, seen)
}

fn settings(urls: &[String]) -> Settings {
    Settings {
        urls: urls.iter().map(|url| url.parse().unwrap()).collect(),
        resend_interval: Duration::from_secs(60),
        ca_file: None,
        bearer_token_file: None,
        runbook_url: None,
    }
}

fn now_verdict(serial: u64, state: AlertState) -> Arc<Verdict> {
    verdict("RoomCollision", serial, state, Monotonic::now())
}

async fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < deadline, "{what} did not happen");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn a_firing_alert_says_what_somebody_on_call_needs() {
    let (address, seen) = serve(vec![Answer::Ok]).await;
    let folder = tempfile::tempdir().unwrap();
    let token = folder.path().join("token");
    std::fs::write(&token, "t0ken\n").unwrap();
    let settings = Settings {
        bearer_token_file: Some(token),
        runbook_url: Some("https://runbooks.example/{cause}".into()),
        ..settings(&[format!("http://{address}/prefix/")])
    };
    let sink = AlertmanagerSink::start(settings).unwrap();
    for serial in 1..=12 {
        sink.send(&now_verdict(serial, AlertState::Firing));
    }
    let (headers, alerts) = until("a message", || seen.messages().into_iter().next()).await;
    assert_eq!(headers["authorization"], "Bearer t0ken");
    assert_eq!(alerts.len(), 1, "one alert for twelve requests of one server");
    let alert = &alerts[0];
    let labels: BTreeMap<String, String> = serde_json::from_value(alert["labels"].clone()).unwrap();
    let expected = [
        ("alertname", "RoomCollision"),
        ("backend", "nixl"),
        ("cause", "RoomCollision"),
        ("node", "node-a"),
        ("pid", "4242"),
        ("server", "sglang::scheduler"),
        ("severity", "critical"),
        ("team", "serving"),
    ];
    assert_eq!(labels, expected.map(|(name, value)| (name.to_owned(), value.to_owned())).into(), "and no room or rid");
    let annotations = &alert["annotations"];
    assert_eq!(annotations["summary"], "Pinned for good: 12 requests in sglang::scheduler (pid 4242) on node-a");
    assert_eq!(
        (&annotations["requests"], &annotations["runbook_url"]),
        (&"12".into(), &"https://runbooks.example/RoomCollision".into())
    );
    let description = annotations["description"].as_str().unwrap();
    assert!(
        description.starts_with("room 7001, rid rid-1: waits for 30 s, quiescence NeverPosted, confidence high\n"),
        "{description}"
    );
    assert!(
        description.contains("… and 2 more")
            && description.contains("- sender 9 cleared room 7001 (calls, 30 s before)"),
        "{description}"
    );
    let times = ["startsAt", "endsAt"].map(|key| alert[key].as_str().unwrap().parse::<jiff::Timestamp>().unwrap());
    let now = jiff::Timestamp::now();
    assert!((28..=32).contains(&now.duration_since(times[0]).as_secs()), "{times:?}");
    assert!((235..=241).contains(&times[1].duration_since(now).as_secs()), "four intervals ahead: {times:?}");
    sink.shutdown().await;
}

#[tokio::test]
async fn a_firing_alert_is_told_again_and_its_end_four_times() {
    let (address, seen) = serve(vec![Answer::Ok]).await;
    let interval = Duration::from_millis(100);
    let sink =
        AlertmanagerSink::start(Settings { resend_interval: interval, ..settings(&[format!("http://{address}")]) })
            .unwrap();
    sink.send(&now_verdict(1, AlertState::Firing));
    until("a second message", || (seen.alerts().len() >= 3).then_some(())).await;
    sink.send(&now_verdict(1, AlertState::Resolved));
    let alerts = until("the fourth end", || {
        let alerts = seen.alerts();
        let ends: Vec<&Value> = alerts.iter().rev().map(|alert| &alert["endsAt"]).take(4).collect();
        (ends.len() == 4 && ends.iter().all(|end| *end == ends[0])).then_some(alerts.clone())
    })
    .await;
    assert!(
        alerts.iter().all(|alert| alert["labels"] == alerts[0]["labels"] && alert["startsAt"] == alerts[0]["startsAt"])
    );
    sink.shutdown().await;
}

#[tokio::test]
async fn an_alertmanager_that_is_busy_is_asked_again() {
    let (address, seen) = serve(vec![Answer::Status(500), Answer::Status(429), Answer::Ok]).await;
    let sink = AlertmanagerSink::start(settings(&[format!("http://{address}")])).unwrap();
    sink.send(&now_verdict(1, AlertState::Firing));
    until("the third message", || (seen.messages().len() >= 3).then_some(())).await;
    until("its delivery", || sink.deliveries().next().filter(|(_, delivery)| delivery.sent() == 1).map(drop)).await;
    let (_, delivery) = sink.deliveries().next().unwrap();
    assert_eq!((delivery.failures(), delivery.rejected()), (2, 0));
    sink.shutdown().await;
}

#[tokio::test]
async fn what_an_alertmanager_refuses_for_good_is_counted_and_not_repeated_at_once() {
    let (address, seen) = serve(vec![Answer::Status(400)]).await;
    let sink = AlertmanagerSink::start(settings(&[format!("http://{address}")])).unwrap();
    sink.send(&now_verdict(1, AlertState::Firing));
    until("the refusal", || sink.deliveries().next().filter(|(_, delivery)| delivery.rejected() == 1).map(drop)).await;
    sink.shutdown().await;
    assert_eq!(seen.messages().len(), 1);
}

#[tokio::test]
async fn a_redirect_is_not_followed() {
    let (address, _) = serve(vec![Answer::Redirect]).await;
    let sink = AlertmanagerSink::start(settings(&[format!("http://{address}")])).unwrap();
    sink.send(&now_verdict(1, AlertState::Firing));
    until("the failure", || sink.deliveries().next().filter(|(_, delivery)| delivery.failures() == 1).map(drop)).await;
    sink.shutdown().await;
}

#[tokio::test]
async fn neither_a_slow_nor_an_absent_alertmanager_delays_the_caller_or_another_one() {
    let (slow, _) = serve(vec![Answer::Slow]).await;
    let closing = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let closes = closing.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((connection, _)) = closing.accept().await {
            drop(connection)
        }
    });
    let absent = {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.local_addr().unwrap()
    };
    let (good, seen) = serve(vec![Answer::Ok]).await;
    let sink =
        AlertmanagerSink::start(settings(&[slow, closes, absent, good].map(|address| format!("http://{address}"))))
            .unwrap();
    let begun = Instant::now();
    for serial in 1..=2_000 {
        sink.send(&now_verdict(serial, AlertState::Firing));
    }
    assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
    until("the good one's message", || (!seen.messages().is_empty()).then_some(())).await;
    assert!(begun.elapsed() < Duration::from_secs(4), "{:?}", begun.elapsed());
    until("the bad ones' failures", || {
        let failures: Vec<u64> = sink.deliveries().map(|(_, delivery)| delivery.failures()).collect();
        (failures[1] > 0 && failures[2] > 0).then_some(())
    })
    .await;
    let begun = Instant::now();
    sink.shutdown().await;
    assert!(begun.elapsed() < Duration::from_secs(3), "the drain is limited: {:?}", begun.elapsed());
}

#[tokio::test]
async fn what_is_due_is_told_before_the_end_and_nothing_is_resolved_by_it() {
    let (address, seen) = serve(vec![Answer::Ok]).await;
    let sink = AlertmanagerSink::start(settings(&[format!("http://{address}")])).unwrap();
    sink.send(&now_verdict(1, AlertState::Firing));
    sink.shutdown().await;
    let alerts = seen.alerts();
    assert_eq!(alerts.len(), 1);
    assert!(alerts[0]["endsAt"].as_str().unwrap().parse::<jiff::Timestamp>().unwrap() > jiff::Timestamp::now());
}

#[tokio::test]
async fn authorities_that_cannot_be_used_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("ca.pem");
    let with = || Settings { ca_file: Some(file.clone()), ..settings(&["https://localhost:1".to_owned()]) };
    assert!(matches!(AlertmanagerSink::start(with()), Err(SetupError::CaFile { .. })));
    std::fs::write(&file, "no certificate").unwrap();
    assert!(matches!(AlertmanagerSink::start(with()), Err(SetupError::NoCertificate { .. })));
}
