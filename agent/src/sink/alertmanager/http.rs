//! One message to one Alertmanager.

use std::{path::PathBuf, time::Duration};

use reqwest::{Client, StatusCode, Url};

use super::{Settings, payload::PostableAlert};
use crate::client;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
const TOTAL_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest bearer token that is read from its file.
const MAX_TOKEN: usize = 16 << 10;
/// Bytes of an Alertmanager's complaint that are repeated.
const MAX_COMPLAINT: usize = 256;

/// Why a sink cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    /// The authorities' file cannot be read.
    #[error("the ca_file {path} cannot be read: {source}", path = path.display())]
    CaFile {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// The authorities' file has no certificate, or one that is broken.
    #[error("the ca_file {path} has no usable PEM certificate", path = path.display())]
    NoCertificate {
        /// The file.
        path: PathBuf,
    },
    /// TLS cannot be set up.
    #[error("the HTTP client cannot be made; where no authorities are installed, set ca_file: {0}")]
    Client(#[from] reqwest::Error),
}

/// Why a message was not taken.
#[derive(Debug, thiserror::Error)]
pub(super) enum PostError {
    /// It may be taken later.
    #[error(transparent)]
    Again(#[from] Trouble),
    /// It never will.
    #[error("it answered {status}: {complaint}")]
    Refused { status: StatusCode, complaint: String },
}

/// What stands in a message's way for now.
#[derive(Debug, thiserror::Error)]
pub(super) enum Trouble {
    #[error("the bearer_token_file cannot be read: {0}")]
    Token(#[from] std::io::Error),
    #[error("the bearer_token_file has no token that fits a header")]
    BadToken,
    #[error(transparent)]
    Http(#[from] reqwest::Error),
    #[error("it answered {status}: {complaint}")]
    Busy { status: StatusCode, complaint: String },
}

/// Sends `alerts` and waits for the answer, five seconds at most.
pub(super) async fn post(
    client: &Client,
    url: &Url,
    settings: &Settings,
    alerts: &[PostableAlert],
) -> Result<(), PostError> {
    let mut request = client.post(url.clone()).json(alerts);
    if let Some(token) = token(settings)? {
        request = request.bearer_auth(token);
    }
    let mut response = request.send().await.map_err(Trouble::Http)?;
    let status = response.status();
    if status.is_success() {
        return Ok(());
    }
    let body = response.chunk().await.ok().flatten().unwrap_or_default();
    let body = String::from_utf8_lossy(body.get(..MAX_COMPLAINT).unwrap_or(&body));
    let complaint = body.trim().escape_debug().to_string();
    let again = !status.is_client_error()
        || matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT)
        // A token is being rotated, or a permission is being granted.
        || matches!(status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN);
    Err(if again { Trouble::Busy { status, complaint }.into() } else { PostError::Refused { status, complaint } })
}

fn token(settings: &Settings) -> Result<Option<String>, Trouble> {
    let Some(file) = &settings.bearer_token_file else { return Ok(None) };
    let token = std::fs::read_to_string(file)?.trim().to_owned();
    let fits = (1..=MAX_TOKEN).contains(&token.len()) && token.bytes().all(|byte| byte.is_ascii_graphic());
    if fits { Ok(Some(token)) } else { Err(Trouble::BadToken) }
}

/// A client for every Alertmanager of `settings`.
///
/// # Errors
///
/// The authorities' file is unusable, or TLS cannot be set up.
pub(super) fn client(settings: &Settings) -> Result<Client, SetupError> {
    let mut builder = client::builder(TOTAL_TIMEOUT).connect_timeout(CONNECT_TIMEOUT);
    if let Some(path) = &settings.ca_file {
        let pem = std::fs::read(path).map_err(|source| SetupError::CaFile { path: path.clone(), source })?;
        let authorities = reqwest::Certificate::from_pem_bundle(&pem).unwrap_or_default();
        if authorities.is_empty() {
            return Err(SetupError::NoCertificate { path: path.clone() });
        }
        builder = builder.tls_certs_only(authorities);
    } else if settings.urls.iter().all(|url| url.scheme() == "http") {
        // Without this the system's authorities are looked for, and a container often has none.
        builder = builder.tls_certs_only([]);
    }
    Ok(builder.build()?)
}

/// `base` with the path of the alerts' API behind its own.
pub(super) fn alerts_url(base: &Url) -> Url {
    let mut url = base.clone();
    url.set_path(&format!("{}/api/v2/alerts", base.path().trim_end_matches('/')));
    url
}
