//! What a server's `hello` says of its release, and of what the server ends by itself.

use super::Hello;

/// How long a server lets a request be in a state before it ends it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ServerTimeout {
    /// So many seconds.
    After(f64),
    /// It does not end it.
    Never,
    /// It has not said.
    NotKnown,
}

/// The first release in which NIXL's senders look at the time-out of a bootstrap (`disaggregation/nixl/conn.py`,
/// `NixlKVSender.poll` → `_check_bootstrap_timeout`: not in 0.5.15, in 0.5.18; sglang#34692).
const NIXL_ENDS_BOOTSTRAPS: [u32; 3] = [0, 5, 18];
/// The first release in which Mooncake's do (`disaggregation/mooncake/conn.py`; Ascend's senders are Mooncake's).
const MOONCAKE_ENDS_BOOTSTRAPS: [u32; 3] = [0, 4, 7];
/// The first release in which NIXL's receivers look at the time-out of waiting.
const NIXL_ENDS_WAITING: [u32; 3] = [0, 5, 6];

impl Hello {
    /// The three numbers of SGLang's release: `0.5.12.post1` is 0, 5, 12. Nothing when it does not begin with a number.
    pub fn release(&self) -> Option<[u32; 3]> {
        let mut numbers = self.sglang.as_deref()?.split('.').map(|part| {
            let end = part.find(|character: char| !character.is_ascii_digit()).unwrap_or(part.len());
            part.get(..end).and_then(|digits| digits.parse().ok())
        });
        let first = numbers.next()??;
        let mut further = || numbers.next().flatten().unwrap_or(0);
        Some([first, further(), further()])
    }

    /// After which time this server's senders give a bootstrap up.
    pub fn ends_bootstraps(&self) -> ServerTimeout {
        let since = match self.backend.as_deref() {
            Some("nixl") => NIXL_ENDS_BOOTSTRAPS,
            Some("mooncake" | "ascend") => MOONCAKE_ENDS_BOOTSTRAPS,
            _ => [0; 3],
        };
        self.timeout(self.bootstrap_timeout, since)
    }

    /// After which time this server's receivers give a transfer up.
    pub fn ends_waiting(&self) -> ServerTimeout {
        let since = if self.backend.as_deref() == Some("nixl") { NIXL_ENDS_WAITING } else { [0; 3] };
        self.timeout(self.waiting_timeout, since)
    }

    /// A time-out that releases before `since` have, but do not look at. A release that is not known is taken to look.
    fn timeout(&self, seconds: Option<f64>, since: [u32; 3]) -> ServerTimeout {
        if self.release().is_some_and(|release| release < since) {
            return ServerTimeout::Never;
        }
        match seconds {
            Some(seconds) if seconds.is_finite() && seconds > 0.0 => ServerTimeout::After(seconds),
            _ => ServerTimeout::NotKnown,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello(backend: &str, release: &str) -> Hello {
        Hello {
            backend: Some(backend.to_owned()),
            sglang: Some(release.to_owned()),
            bootstrap_timeout: Some(120.0),
            waiting_timeout: Some(200.0),
            ..Hello::default()
        }
    }

    #[test]
    fn a_release_is_three_numbers_whatever_follows() {
        for (text, release) in [
            ("0.5.22", Some([0, 5, 22])),
            ("0.5.12.post1", Some([0, 5, 12])),
            ("0.5.2rc1", Some([0, 5, 2])),
            ("0.5.23.dev7+g12ab", Some([0, 5, 23])),
            ("1.0", Some([1, 0, 0])),
            ("1", Some([1, 0, 0])),
            ("main", None),
            ("", None),
            ("99999999999.1", None),
        ] {
            assert_eq!(hello("nixl", text).release(), release, "{text}");
        }
        assert_eq!(Hello::default().release(), None);
    }

    #[test]
    fn a_time_out_counts_where_the_release_looks_at_it() {
        use ServerTimeout::{After, Never, NotKnown};
        for (backend, release, bootstrap, waiting) in [
            ("nixl", "0.5.22", After(120.0), After(200.0)),
            ("nixl", "0.5.18", After(120.0), After(200.0)),
            ("nixl", "0.5.17", Never, After(200.0)),
            ("nixl", "0.5.5", Never, Never),
            ("mooncake", "0.5.10", After(120.0), After(200.0)),
            ("mooncake", "0.4.6.post5", Never, After(200.0)),
            ("nixl", "main", After(120.0), After(200.0)),
        ] {
            let hello = hello(backend, release);
            assert_eq!((hello.ends_bootstraps(), hello.ends_waiting()), (bootstrap, waiting), "{backend} {release}");
        }
        for seconds in [None, Some(0.0), Some(-1.0), Some(f64::NAN), Some(f64::INFINITY)] {
            let hello = Hello { bootstrap_timeout: seconds, ..hello("nixl", "0.5.22") };
            assert_eq!(hello.ends_bootstraps(), NotKnown, "{seconds:?}");
        }
    }
}
