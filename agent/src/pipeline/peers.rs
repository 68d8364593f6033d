//! Asking the agents of other nodes about rooms whose other end is not on this one: only of requests that have waited long, a few
//! at a time, off the loop. Nobody waits for an answer.

use std::{
    collections::{HashMap, HashSet},
    net::SocketAddr,
    time::Duration,
};

use reqwest::{Client, Url, header::HOST};
use tokio::{sync::mpsc, task::JoinSet};

use super::Pipeline;
use crate::{
    client,
    core::Input,
    event::{Room, clock::Monotonic},
    metrics::{Metrics, OutcomeLabel},
    request::ends::{RoomEnd, Side},
    server::rooms::RoomAnswer,
};

/// A request has waited long when its phase has not changed for this time: healthy ones are through.
const ASKED_AFTER: Duration = Duration::from_secs(10);
/// How often a room is asked about.
const ASKED_EVERY: Duration = Duration::from_secs(10);
/// How often anything is asked.
const TURN_EVERY: Duration = Duration::from_secs(1);
/// Rooms in one turn; the others have theirs in the next.
const ROOMS_A_TURN: usize = 16;
/// Addresses of all peers together; further ones are left out.
const MAX_ADDRESSES: usize = 64;
/// How long a peer may take.
const TIME_LIMIT: Duration = Duration::from_secs(2);
/// Longest answer, in bytes.
const MAX_ANSWER: usize = 64 << 10;

/// What peers told in a turn.
#[derive(Debug)]
pub(super) struct Told {
    at: Monotonic,
    rooms: Vec<(Room, Side, Vec<RoomEnd>)>,
}

/// Who is asked, and what was.
#[derive(Debug)]
pub(super) struct Peers {
    client: Client,
    urls: Vec<Url>,
    asked: HashMap<(Room, Side), Monotonic>,
    due: Monotonic,
    told: mpsc::Sender<Told>,
}

impl Peers {
    /// What is told comes back on the channel; one turn at a time is under way.
    ///
    /// # Errors
    ///
    /// The HTTP client cannot be made.
    pub(super) fn new(urls: Vec<Url>) -> Result<(Self, mpsc::Receiver<Told>), reqwest::Error> {
        let client = client::builder(TIME_LIMIT).tls_certs_only([]).build()?;
        let (told, telling) = mpsc::channel(1);
        Ok((Self { client, urls, asked: HashMap::new(), due: Monotonic(0), told }, telling))
    }

    /// The rooms of this turn, of those to be asked about.
    fn turn(&mut self, mut rooms: Vec<(Room, Side)>, now: Monotonic) -> Vec<(u64, Side)> {
        self.asked.retain(|_, at| now.since(*at) < ASKED_EVERY);
        rooms.retain(|room| !self.asked.contains_key(room));
        rooms.truncate(ROOMS_A_TURN);
        self.asked.extend(rooms.iter().map(|room| (*room, now)));
        let number = |(room, side)| match room {
            Room::Number(number) => Some((number, side)),
            Room::OutOfRange => None,
        };
        rooms.into_iter().filter_map(number).collect()
    }
}

impl Pipeline {
    /// Has other agents asked, when it is time and something is to be asked.
    pub(super) fn ask_peers(&mut self, now: Monotonic) {
        if self.peers.urls.is_empty() || now < self.peers.due {
            return;
        }
        self.peers.due = now.plus(TURN_EVERY);
        let Ok(permit) = self.peers.told.clone().try_reserve_owned() else { return };
        let rooms = self.core.tracker().ends_to_ask(ASKED_AFTER, now);
        let rooms = self.peers.turn(rooms, now);
        if rooms.is_empty() {
            return;
        }
        let (client, urls, metrics) = (self.peers.client.clone(), self.peers.urls.clone(), self.metrics.clone());
        tokio::spawn(async move {
            let rooms = ask_all(&client, &urls, rooms, &metrics).await;
            permit.send(Told { at: Monotonic::now(), rooms });
        });
    }

    /// Takes over what they told.
    pub(super) fn peers_told(&mut self, told: Told) {
        let Told { at, rooms } = told;
        for (room, side, ends) in rooms {
            self.apply(Input::RoomEnds { room, side, ends, at });
        }
    }

    /// What the agent of another node is told.
    pub(super) fn told_to_peer(&self, room: u64, side: Side, now: Monotonic) -> RoomAnswer {
        let ends = self.core.tracker().ends_of(Room::Number(room), side);
        RoomAnswer::new(self.config.node.clone(), &ends, now)
    }
}

/// Asks every peer about each room. One that does not answer is not asked again in this turn.
async fn ask_all(
    client: &Client,
    urls: &[Url],
    rooms: Vec<(u64, Side)>,
    metrics: &Metrics,
) -> Vec<(Room, Side, Vec<RoomEnd>)> {
    let mut addresses = addresses(urls, metrics).await;
    let mut told = Vec::with_capacity(rooms.len());
    for (room, side) in rooms {
        let mut asking = JoinSet::new();
        for peer in addresses.clone() {
            let client = client.clone();
            asking.spawn(async move { (ask(&client, &peer, room, side).await, peer) });
        }
        let (mut ends, mut silent, mut answers) = (Vec::new(), HashSet::new(), 0_u32);
        while let Some(asked) = asking.join_next().await {
            let Ok((answer, peer)) = asked else { continue };
            let outcome = match answer {
                Ok(answer) => {
                    answers += 1;
                    ends.extend(answer.into_ends(Monotonic::now()));
                    "answered"
                }
                Err(why) => {
                    tracing::debug!(%peer.url, why, "a peer did not tell of a room");
                    silent.insert(peer.url);
                    why
                }
            };
            metrics.peer_questions.get_or_create(&OutcomeLabel { outcome }).inc();
        }
        addresses.retain(|peer| !silent.contains(&peer.url));
        if answers > 0 {
            told.push((Room::Number(room), side, ends));
        }
    }
    told
}

/// An agent at one address.
#[derive(Clone, Debug)]
struct Peer {
    /// With the address in place of the host's name.
    url: Url,
    host: String,
}

/// Every address of every peer, in the order of the configuration.
async fn addresses(urls: &[Url], metrics: &Metrics) -> Vec<Peer> {
    let mut peers: Vec<Peer> = Vec::new();
    for url in urls {
        let (Some(name), Some(port)) = (url.host_str(), url.port_or_known_default()) else { continue };
        let host = format!("{name}:{port}");
        let found = tokio::time::timeout(TIME_LIMIT, tokio::net::lookup_host(&host)).await;
        let Ok(Ok(found)) = found else {
            metrics.peer_questions.get_or_create(&OutcomeLabel { outcome: "unresolved" }).inc();
            continue;
        };
        for address in found {
            let url = at_address(url, address);
            if peers.len() < MAX_ADDRESSES && peers.iter().all(|peer| peer.url != url) {
                peers.push(Peer { url, host: host.clone() });
            }
        }
    }
    peers
}

fn at_address(url: &Url, address: SocketAddr) -> Url {
    let mut url = url.clone();
    // Neither fails for a URL that has a host.
    let _ = url.set_ip_host(address.ip());
    let _ = url.set_port(Some(address.port()));
    url
}

/// What one peer knows of a room; else why it does not say: a label.
async fn ask(client: &Client, peer: &Peer, room: u64, side: Side) -> Result<RoomAnswer, &'static str> {
    let mut url = peer.url.clone();
    url.set_path(&format!("{}/rooms/{room}", url.path().trim_end_matches('/')));
    url.set_query(Some(&format!("side={}", side.name())));
    let response = client.get(url).header(HOST, &peer.host).send().await;
    let mut response = response.map_err(|error| if error.is_timeout() { "late" } else { "unreachable" })?;
    if !response.status().is_success() {
        return Err("refused");
    }
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await.map_err(|_| "broken_off")? {
        if body.len() + chunk.len() > MAX_ANSWER {
            return Err("too_long");
        }
        body.extend_from_slice(&chunk);
    }
    serde_json::from_slice(&body).map_err(|_| "malformed")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_room_is_asked_about_every_ten_seconds_and_the_longest_waiting_first() {
        let (mut peers, _telling) = Peers::new(Vec::new()).unwrap();
        let rooms =
            |numbers: std::ops::Range<u64>| numbers.map(|number| (Room::Number(number), Side::Decode)).collect();
        let at = |seconds: u64| Monotonic(seconds * 1_000_000_000);
        let first = peers.turn(rooms(0..20), at(100));
        assert_eq!(first, (0..16).map(|number| (number, Side::Decode)).collect::<Vec<_>>());
        assert_eq!(peers.turn(rooms(0..20), at(101)).len(), 4, "the others have their turn next");
        assert_eq!(peers.turn(rooms(0..20), at(102)), []);
        assert_eq!(peers.turn(rooms(0..20), at(110)).len(), 16);
    }

    #[test]
    fn an_address_takes_the_place_of_a_name_and_nothing_else() {
        let url: Url = "http://agents.monitoring:9464/dislodge".parse().unwrap();
        let at = |address: &str| at_address(&url, address.parse().unwrap()).to_string();
        assert_eq!(at("10.0.0.7:9464"), "http://10.0.0.7:9464/dislodge");
        assert_eq!(at("[fd00::7]:9464"), "http://[fd00::7]:9464/dislodge");
    }
}
