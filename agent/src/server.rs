//! `/metrics`, `/live`, `/ready`, `/status`, `/rooms/ROOM`, `/explain` over HTTP.

pub mod replica;
pub mod rooms;
pub mod status;

use std::{net::SocketAddr, sync::Arc};

use axum::{
    Json, Router,
    extract::{Path, Query, RawQuery, State},
    http::{StatusCode, header},
    response::{IntoResponse, Response},
    routing::get,
};
use prometheus_client::{encoding::text::encode, registry::Registry};
use serde::Serialize;
use tokio::{
    net::TcpListener,
    sync::{mpsc, oneshot},
};
use tokio_util::sync::CancellationToken;

use crate::{
    event::clock::Monotonic,
    explain::{answer::Live, wanted::Wanted},
    request::Side,
};
use rooms::RoomAnswer;
use status::{Health, Status};

/// What the routes need.
#[derive(Clone, Debug)]
pub struct Api {
    /// The metrics.
    pub registry: Arc<Registry>,
    /// Whether the pipeline runs.
    pub health: Arc<Health>,
    /// Asks the pipeline.
    pub questions: mpsc::Sender<Question>,
}

/// What the pipeline is asked, and who wants to know.
#[derive(Debug)]
pub enum Question {
    /// For its status.
    Status(oneshot::Sender<Status>),
    /// What it knows of a request.
    Explain(Wanted, oneshot::Sender<Box<Live>>),
    /// What it knows of this end of a room, by its number.
    Room(u64, Side, oneshot::Sender<RoomAnswer>),
}

/// Why the API cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The address is taken or not this machine's.
    #[error("cannot listen on {address}: {source}; set `listen` to a free address of this machine")]
    Bind {
        /// Where.
        address: SocketAddr,
        /// Why not.
        source: std::io::Error,
    },
}

/// Binds the API's address.
///
/// # Errors
///
/// The address is taken or not this machine's.
pub async fn bind(address: SocketAddr) -> Result<TcpListener, ServeError> {
    TcpListener::bind(address).await.map_err(|source| ServeError::Bind { address, source })
}

/// Serves the API until `stop`.
pub async fn serve(listener: TcpListener, api: Api, stop: CancellationToken) {
    let routes = Router::new()
        .route("/metrics", get(metrics))
        .route("/live", get(live))
        .route("/ready", get(ready))
        .route("/status", get(status))
        .route("/rooms/{room}", get(room))
        .route("/explain", get(explain))
        .with_state(api);
    if let Err(error) = axum::serve(listener, routes).with_graceful_shutdown(stop.cancelled_owned()).await {
        tracing::error!(%error, "the HTTP server stopped");
    }
}

async fn metrics(State(api): State<Api>) -> Response {
    let mut text = String::new();
    match encode(&mut text, &api.registry) {
        Ok(()) => ([(header::CONTENT_TYPE, "application/openmetrics-text; version=1.0.0; charset=utf-8")], text)
            .into_response(),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

async fn live(State(api): State<Api>) -> (StatusCode, &'static str) {
    if api.health.is_live(Monotonic::now()) {
        (StatusCode::OK, "live\n")
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "the pipeline's loop does not turn\n")
    }
}

async fn ready(State(api): State<Api>) -> (StatusCode, &'static str) {
    if api.health.is_ready(Monotonic::now()) {
        (StatusCode::OK, "ready\n")
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "the first look for servers is not done\n")
    }
}

async fn status(State(api): State<Api>) -> Response {
    ask(&api, Question::Status).await
}

/// What is known of the requests that the query names: whoever asks has to know a room or a whole request id.
async fn explain(State(api): State<Api>, RawQuery(query): RawQuery) -> Response {
    match Wanted::of_query(&query.unwrap_or_default()) {
        Some(wanted) => ask(&api, |asker| Question::Explain(wanted, asker)).await,
        None => (StatusCode::BAD_REQUEST, "write /explain?name=ROOM or RID[&pid=PID][&serial=N]\n").into_response(),
    }
}

/// Asks the pipeline's loop, which answers between two of its turns.
async fn ask<T: Serialize>(api: &Api, question: impl FnOnce(oneshot::Sender<T>) -> Question) -> Response {
    let (asker, answer) = oneshot::channel();
    let stopped = (StatusCode::SERVICE_UNAVAILABLE, "the pipeline has stopped\n");
    if api.questions.send(question(asker)).await.is_err() {
        return stopped.into_response();
    }
    match answer.await {
        Ok(answer) => Json(answer).into_response(),
        Err(_) => stopped.into_response(),
    }
}

/// What is known of one end of a room: for the agent of the node at the other one.
async fn room(
    State(api): State<Api>,
    Path(room): Path<u64>,
    Query(rooms::Query { side }): Query<rooms::Query>,
) -> Response {
    ask(&api, |asker| Question::Room(room, side, asker)).await
}
