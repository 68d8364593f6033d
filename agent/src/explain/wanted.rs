//! Which request somebody asks about.

use reqwest::Url;

use crate::{
    core::Core,
    event::{Rid, Room},
    request::{Request, RequestKey, correlate::TransferSubject},
};

/// What was asked for. A request id is matched whole: SGLang itself matches by prefix, which names others too.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// As it was written.
    pub name: String,
    /// The only server.
    pub pid: Option<u32>,
    /// The only sender.
    pub serial: Option<u64>,
    room: Option<Room>,
}

/// Longest name that is asked for, in bytes: no request id that is kept is longer.
const MAX_NAME: usize = 1_024;

impl Wanted {
    /// A room or a whole request id; of this server, and this sender, where there are several.
    pub fn new(name: String, pid: Option<u32>, serial: Option<u64>) -> Self {
        let room = Room::try_from(name.clone()).ok();
        Self { name, pid, serial, room }
    }

    /// What a query of `/explain` names: `name`, and `pid` and `serial` where there are several.
    pub fn of_query(query: &str) -> Option<Self> {
        let url = Url::parse(&format!("http://agent/?{query}")).ok()?;
        let (mut name, mut pid, mut serial) = (None, None, None);
        for (key, value) in url.query_pairs() {
            match &*key {
                "name" => name = Some(value.into_owned()),
                "pid" => pid = Some(value.parse().ok()?),
                "serial" => serial = Some(value.parse().ok()?),
                _ => return None,
            }
        }
        name.filter(|name| !name.is_empty() && name.len() <= MAX_NAME).map(|name| Self::new(name, pid, serial))
    }

    /// Writes it as a query of `/explain`.
    pub fn to_query(&self, url: &mut Url) {
        let numbers = [("pid", self.pid.map(u64::from)), ("serial", self.serial)];
        let numbers = numbers.into_iter().filter_map(|(key, number)| Some((key, number?.to_string())));
        url.query_pairs_mut().clear().append_pair("name", &self.name).extend_pairs(numbers);
    }

    /// Whether a request is meant: by its room, or by its whole id.
    pub fn is(&self, key: RequestKey, request: &Request) -> bool {
        self.is_among(key) && (self.is_room(request.room) || request.rid.as_ref().is_some_and(|rid| self.is_rid(rid)))
    }

    fn is_among(&self, key: RequestKey) -> bool {
        self.pid.is_none_or(|pid| pid == key.process.pid) && self.serial.is_none_or(|serial| serial == key.serial)
    }

    fn is_room(&self, room: Room) -> bool {
        self.room == Some(room)
    }

    /// Whether transfers are seen of what is meant, as the engine names it.
    pub(super) fn has_transfers(&self, core: &Core) -> bool {
        let tracker = core.tracker();
        let servers = tracker.servers().filter(|(key, _)| self.pid.is_none_or(|pid| pid == key.pid));
        servers.filter_map(|(key, _)| tracker.transfers(key)).any(|transfers| {
            transfers.subjects().any(|(subject, _)| match subject {
                TransferSubject::Room(room) => self.is_room(*room),
                TransferSubject::Request(request) => *request == self.name,
            })
        })
    }

    fn is_rid(&self, rid: &Rid) -> bool {
        !rid.truncated && rid.text == self.name
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::{Backend, ProcessKey, clock::Monotonic};

    fn wanted(name: &str) -> Wanted {
        Wanted::new(name.to_owned(), None, None)
    }

    fn request(room: Room, rid: Option<(&str, bool)>) -> (RequestKey, Request) {
        let rid = rid.map(|(text, truncated)| Rid { text: text.to_owned(), truncated });
        let key = RequestKey { process: ProcessKey { pid: 7, start: 1 }, serial: 3 };
        (key, Request { rid, ..Request::opened(3, room, Backend::Nixl, Monotonic(1)) })
    }

    #[test]
    fn a_request_is_named_by_its_room_or_its_whole_id_and_never_by_a_part_of_it() {
        let (key, request) = request(Room::Number(77), Some(("cmpl-12", false)));
        for (name, is) in [("77", true), ("cmpl-12", true), ("7", false), ("cmpl-1", false), ("cmpl-123", false)] {
            assert_eq!(wanted(name).is(key, &request), is, "{name}");
        }
    }

    #[test]
    fn what_is_asked_for_survives_its_way_through_a_query_and_anything_else_is_refused() {
        let mut url = Url::parse("http://agent/explain").unwrap();
        for name in ["77", "a&pid=1 \u{1b}[31m%00+#\u{e9}", "out of range"] {
            for (pid, serial) in [(None, None), (Some(7), Some(u64::MAX))] {
                let wanted = Wanted::new(name.to_owned(), pid, serial);
                wanted.to_query(&mut url);
                assert_eq!(Wanted::of_query(url.query().unwrap()), Some(wanted), "{url}");
            }
        }
        let long = format!("name={}", "a".repeat(MAX_NAME + 1));
        for wrong in ["", "name=", "pid=1", "name=1&pid=x", "name=1&serial=-1", "name=1&colour=red", &long] {
            assert_eq!(Wanted::of_query(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn an_id_that_was_cut_names_nobody() {
        let (key, request) = request(Room::OutOfRange, Some(("cmpl-12", true)));
        assert!(!wanted("cmpl-12").is(key, &request) && wanted("out of range").is(key, &request));
    }

    #[test]
    fn a_server_or_a_sender_that_is_named_leaves_the_others_out() {
        let (key, request) = request(Room::Number(77), None);
        for (pid, serial, is) in [(Some(7), Some(3), true), (Some(8), None, false), (None, Some(4), false)] {
            assert_eq!(Wanted::new("77".to_owned(), pid, serial).is(key, &request), is);
        }
    }
}
