//! Reading a server's own `/metrics`, where the server is: in its network namespace, over a connection that is made there.
//!
//! A container's loopback interface is not the node's, so a thread that lives for nothing else enters the server's network
//! namespace, connects, and ends; the connection stays in that namespace and is spoken over from the agent's own threads. (A
//! process that is not in the agent's network namespace is entered by `setns`, which needs CAP_SYS_ADMIN.) What answers is
//! not trusted: one request, no redirect, two seconds, sixteen megabytes, of which only the lines that matter are kept.

use std::{
    fs::{self, File},
    io,
    net::{SocketAddr, TcpStream},
    os::fd::AsFd as _,
    thread,
    time::Duration,
};

use http_body_util::{BodyExt as _, Empty};
use hyper::{
    Request, StatusCode,
    body::{Bytes, Incoming},
    client::conn::http1,
    header,
};
use hyper_util::rt::TokioIo;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use tokio::{
    sync::oneshot,
    task::JoinSet,
    time::{error::Elapsed, timeout},
};

use super::{
    discover,
    launcher::{self, Endpoint, NoEndpoint},
};
use crate::event::{
    ProcessKey,
    exposition::{Page, Sample},
};

/// How long a server has for the whole of it.
pub const PATIENCE: Duration = Duration::from_secs(2);
/// Longest page, in bytes: some hundred ranks with all their histograms.
pub const MAX_PAGE: usize = 16 << 20;
/// Longest head of an answer, in bytes.
const MAX_HEAD: usize = 32 << 10;

/// Why a server's page could not be read.
#[derive(Debug, thiserror::Error)]
pub enum ScrapeError {
    /// It is not known where it is, or there is none.
    #[error(transparent)]
    NoEndpoint(#[from] NoEndpoint),
    /// The process has ended.
    #[error("the server has ended")]
    Gone,
    /// Its network namespace cannot be entered.
    #[error("its network namespace cannot be entered: {0} (needs CAP_SYS_ADMIN)")]
    Namespace(io::Error),
    /// Nobody answers there.
    #[error("cannot connect to {0}: {1}")]
    Connect(SocketAddr, io::Error),
    /// It takes too long.
    #[error("did not answer completely within {} s", PATIENCE.as_secs())]
    TimedOut(#[from] Elapsed),
    /// It does not speak HTTP, or stops in the middle.
    #[error("its answer cannot be read: {0}")]
    Http(#[from] hyper::Error),
    /// It points elsewhere.
    #[error("answers with a redirection, which is not followed")]
    Redirected,
    /// It does not want to.
    #[error("answers with status {0}")]
    Status(StatusCode),
    /// It does not end.
    #[error("its page is longer than {} MiB", MAX_PAGE >> 20)]
    TooLong,
    /// The agent has no thread for it.
    #[error("no thread could be started: {0}")]
    Thread(io::Error),
}

impl ScrapeError {
    /// Label value of metrics.
    pub fn name(&self) -> &'static str {
        match self {
            Self::NoEndpoint(why) => why.name(),
            Self::Gone => "gone",
            Self::Namespace(_) => "namespace",
            Self::Connect(..) => "connect",
            Self::TimedOut(_) => "timed_out",
            Self::Http(_) => "http",
            Self::Redirected => "redirected",
            Self::Status(_) => "status",
            Self::TooLong => "too_long",
            Self::Thread(_) => "thread",
        }
    }
}

/// What a page says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scraped {
    /// Of queues.
    pub samples: Vec<Sample>,
    /// Samples of queues that were written wrongly, or were too many.
    pub left_out: usize,
}

/// Finds the page of a scheduler's server and reads it. `ports` are those of [`launcher::find`].
///
/// # Errors
///
/// See [`ScrapeError`].
pub async fn read(scheduler: ProcessKey, ports: Vec<u16>) -> Result<Scraped, ScrapeError> {
    let found = tokio::task::spawn_blocking(move || launcher::find(scheduler, &ports)).await;
    let endpoint = found.map_err(|error| ScrapeError::Thread(io::Error::other(error)))??;
    timeout(PATIENCE, async { get(connect(endpoint).await?, endpoint.address).await }).await?
}

/// A connection to `endpoint`, made in the network namespace of its process.
///
/// # Errors
///
/// The process is gone, its namespace cannot be entered, or nobody answers.
pub async fn connect(endpoint: Endpoint) -> Result<TcpStream, ScrapeError> {
    let (made, connection) = oneshot::channel();
    // Nothing else must run in a thread that is in another namespace, so it is none of the runtime's.
    let enter = move || {
        // Who asked may have given up.
        let _ = made.send(connect_there(endpoint));
    };
    thread::Builder::new().name("server-metrics".to_owned()).spawn(enter).map_err(ScrapeError::Thread)?;
    connection.await.unwrap_or(Err(ScrapeError::Gone))
}

fn connect_there(Endpoint { process, address }: Endpoint) -> Result<TcpStream, ScrapeError> {
    let path = format!("/proc/{}/ns/net", process.pid);
    let namespace = File::open(&path).map_err(ScrapeError::Namespace)?;
    let there = fs::read_link(&path).map_err(ScrapeError::Namespace)?;
    // The pid may be another process's by now, but not once its namespace is open.
    if discover::process_key(process.pid) != Some(process) {
        return Err(ScrapeError::Gone);
    }
    if fs::read_link("/proc/thread-self/ns/net").ok() != Some(there) {
        move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))
            .map_err(|error| ScrapeError::Namespace(error.into()))?;
    }
    let connect = TcpStream::connect_timeout(&address, PATIENCE);
    let stream = connect.map_err(|error| ScrapeError::Connect(address, error))?;
    stream.set_nonblocking(true).map_err(|error| ScrapeError::Connect(address, error))?;
    Ok(stream)
}

/// Asks for the page over a connection. It ends by itself only when the server does: the caller sets the time.
///
/// # Errors
///
/// It does not answer with a page.
pub async fn get(stream: TcpStream, address: SocketAddr) -> Result<Scraped, ScrapeError> {
    let stream = tokio::net::TcpStream::from_std(stream).map_err(|error| ScrapeError::Connect(address, error))?;
    let (mut sender, connection) =
        http1::Builder::new().max_buf_size(MAX_HEAD).handshake::<_, Empty<Bytes>>(TokioIo::new(stream)).await?;
    // Ends with this function, whatever it returns.
    let mut driver = JoinSet::new();
    driver.spawn(connection);
    let mut request = Request::new(Empty::new());
    *request.uri_mut() = hyper::Uri::from_static("/metrics");
    let headers = request.headers_mut();
    if let Ok(host) = header::HeaderValue::from_str(&address.to_string()) {
        headers.insert(header::HOST, host);
    }
    headers.insert(header::ACCEPT, header::HeaderValue::from_static("text/plain; version=0.0.4"));
    headers.insert(header::CONNECTION, header::HeaderValue::from_static("close"));
    let response = sender.send_request(request).await?;
    match response.status() {
        StatusCode::OK => page(response.into_body()).await,
        status if status.is_redirection() => Err(ScrapeError::Redirected),
        status => Err(ScrapeError::Status(status)),
    }
}

async fn page(mut body: Incoming) -> Result<Scraped, ScrapeError> {
    let (mut page, mut length) = (Page::default(), 0_usize);
    while let Some(frame) = body.frame().await {
        let frame = frame?;
        let Some(piece) = frame.data_ref() else { continue };
        length = length.saturating_add(piece.len());
        if length > MAX_PAGE {
            return Err(ScrapeError::TooLong);
        }
        page.feed(piece);
    }
    let (samples, left_out) = page.end();
    Ok(Scraped { samples, left_out })
}
