//! The agents of other nodes.

use reqwest::Url;
use serde::{Deserialize, Serialize};

use super::{Setter, as_texts};
use crate::problem::Text;

/// Most URLs.
const MAX_URLS: usize = 64;

/// The agents of other nodes, which are asked about the other ends of rooms.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Peers {
    /// Base URLs, `http` only. A host that has several addresses, as a headless service of Kubernetes, is asked at each. None:
    /// nobody is asked.
    #[serde(serialize_with = "as_texts")]
    pub urls: Vec<Url>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct RawPeers {
    urls: Option<Vec<Text>>,
}

impl Peers {
    pub(super) fn set(&mut self, raw: RawPeers, set: &mut Setter<'_, '_>) {
        let texts = raw.urls.unwrap_or_default();
        if let Some(text) = texts.get(MAX_URLS) {
            set.problems.at(text, format!("are more than {MAX_URLS} URLs; name a host that has several addresses"));
        }
        for text in texts.iter().take(MAX_URLS) {
            let Some(url) = set.url(text) else { continue };
            if url.scheme() == "http" {
                self.urls.push(url);
            } else {
                set.problems.at(text, "agents serve plain HTTP: write http://");
            }
        }
    }
}
