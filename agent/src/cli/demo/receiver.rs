//! Stands in for an Alertmanager: takes alerts as one does (`POST /api/v2/alerts`) and shows them.

use anyhow::Context as _;
use axum::{Json, Router, extract::State, routing::post};
use serde::Deserialize;
use tokio::{net::TcpListener, sync::mpsc};

/// An alert that was delivered.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Alert {
    pub(super) labels: std::collections::BTreeMap<String, String>,
    pub(super) ends_at: jiff::Timestamp,
}

/// A delivery.
#[derive(Debug)]
pub(super) struct Received {
    pub(super) alerts: Vec<Alert>,
    pub(super) at: jiff::Timestamp,
}

/// Starts the receiver; returns its base URL and what it receives.
pub(super) async fn start() -> anyhow::Result<(reqwest::Url, mpsc::Receiver<Received>)> {
    let listener = TcpListener::bind("127.0.0.1:0").await.context("binding the webhook's receiver")?;
    let url = format!("http://{}", listener.local_addr()?).parse()?;
    let (deliver, received) = mpsc::channel(64);
    let routes = Router::new().route("/api/v2/alerts", post(take)).with_state(deliver);
    tokio::spawn(async move { axum::serve(listener, routes).await });
    Ok((url, received))
}

async fn take(State(deliver): State<mpsc::Sender<Received>>, Json(alerts): Json<Vec<Alert>>) {
    // The demo may be over.
    let _ = deliver.send(Received { alerts, at: jiff::Timestamp::now() }).await;
}
