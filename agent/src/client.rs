//! What every HTTP client of the agent has in common: it follows nobody elsewhere, asks no proxy, and has a time limit.

use std::time::Duration;

use reqwest::{Client, ClientBuilder, redirect};

/// A client whose requests take so long at most.
pub(crate) fn builder(time_limit: Duration) -> ClientBuilder {
    // reqwest has no provider of its own. An error says that somebody has installed one already, which is what is needed.
    let _ = rustls::crypto::ring::default_provider().install_default();
    Client::builder()
        .timeout(time_limit)
        .redirect(redirect::Policy::none())
        .no_proxy()
        .user_agent(concat!("dislodge/", env!("CARGO_PKG_VERSION")))
}
