//! Two nodes, as two agents that see one process each: what the other end of a room does is told by the other agent.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "support/support.rs"]
mod support;

use std::{
    io::{Read as _, Write as _},
    net::{TcpListener, TcpStream},
    thread,
};

use dislodge_ebpf::wire::Kind;
use serde_json::{Value, json};
use support::{
    agent::{self, Agent},
    environment,
    marks::Marker,
    needs,
    wait::{until, until_true},
};

const ROOM: u64 = 770_077;
/// Phases and reasons, by their numbers in the contract.
const WAITING_FOR_INPUT: u64 = 2;
const NONE: u64 = 0xff;
const NIXL: u64 = 1;
const FAILED: u64 = 2;

const RULES: &str = "
rules:
  - name: OtherEnd
    when: cause == \"FailureNotTold\" || cause == \"PeerGone\" || cause == \"CompletionLost\"
    for: 0s
    severity: warning
";

/// A process that looks like a scheduler and makes marks as one with this role.
struct Scheduler(Marker);

impl Scheduler {
    fn of(role: &str) -> Self {
        Self(Marker::titled(&format!("sglang::scheduler {role}")))
    }

    fn pid(&self) -> u32 {
        self.0.key().pid
    }

    fn mark(&mut self, kind: Kind, room: u64, value: u64, sender: u64) {
        self.0.tell(&json!(["mark", kind as u16, room, value, sender]));
    }

    /// Says who it is, and gets a request in its queue that has sent everything.
    fn begin(&mut self, role: &str) {
        let hello = json!({ "hook": "0.1.0", "epoch": 0, "role": role, "backend": "nixl", "late": false }).to_string();
        self.0.tell(&json!(["detail", Kind::Hello as u16, 0, 0, 0, hello]));
        self.mark(Kind::Open, ROOM, NIXL, 1);
        self.mark(Kind::Phase, ROOM, NONE | WAITING_FOR_INPUT << 8, 1);
        self.mark(Kind::Send, ROOM, 1 | 1 << 32, 1);
        self.mark(Kind::Enter, ROOM, 1, 1);
        self.pass();
    }

    fn pass(&mut self) {
        self.mark(Kind::Pass, 0, 1 | 1 << 32, 0);
    }
}

/// An agent on a node of this name that sees one process.
fn agent(node: &str, pid: u32, peers: &[String]) -> Agent {
    let config = format!("node: {node}\npeers: {{ urls: {} }}", json!(peers));
    let agent = agent::Setup::watching(&[pid], RULES).config(&config).start();
    until_true("a probe on the marker", || agent.server(pid).is_some_and(|server| server["probe"].is_null()));
    agent
}

fn url(agent: &Agent) -> String {
    format!("http://{}", agent.address())
}

/// A prefill and a decode with a request of the same room, each with its agent; the prefill's asks the decode's.
struct Nodes {
    prefill: Scheduler,
    decode: Scheduler,
    near: Agent,
    far: Agent,
}

impl Nodes {
    fn begin() -> Option<Self> {
        needs(environment::bpf().and(environment::python()))?;
        let (mut prefill, mut decode) = (Scheduler::of("prefill"), Scheduler::of("decode"));
        let far = agent("far", decode.pid(), &[]);
        let near = agent("near", prefill.pid(), &[url(&far)]);
        decode.begin("decode");
        prefill.begin("prefill");
        Some(Self { prefill, decode, near, far })
    }

    /// Waits for the prefill's alert, its scheduler polling on.
    fn alert(&mut self) -> Value {
        until("an alert", || {
            self.prefill.pass();
            self.near.firing().first().cloned()
        })
    }

    fn answers(&self) -> f64 {
        self.near.metric("dislodge_peer_questions_total", &[("outcome", "answered")])
    }
}

#[test]
fn a_failure_on_another_node_of_which_this_one_was_not_told_is_named_with_that_node() {
    let Some(mut nodes) = Nodes::begin() else { return };
    until_true("an answer", || {
        nodes.prefill.pass();
        nodes.answers() >= 1.0
    });
    assert!(nodes.near.firing().is_empty(), "while it lives at both ends, nothing is wrong");
    nodes.decode.mark(Kind::Leave, ROOM, FAILED, 1);
    let alert = nodes.alert();
    assert_eq!(alert["cause"], "FailureNotTold", "{alert:#}");
    assert!(alert.to_string().contains("far"), "{alert:#}");
    assert!(nodes.far.firing().is_empty());
}

#[test]
fn a_process_that_ended_on_another_node_is_a_peer_that_is_gone() {
    let Some(mut nodes) = Nodes::begin() else { return };
    until_true("the room at the other end", || {
        let (_, told) = nodes.far.page(&format!("/rooms/{ROOM}?side=decode")).unwrap();
        told.contains("\"lives\"")
    });
    nodes.decode.0.kill();
    let alert = nodes.alert();
    assert_eq!(alert["cause"], "PeerGone", "{alert:#}");
}

#[test]
fn a_room_is_told_of_with_what_each_server_does_and_a_question_that_is_none_is_refused() {
    let Some(nodes) = Nodes::begin() else { return };
    let room = |room: &str, side: &str| nodes.far.page(&format!("/rooms/{room}{side}")).unwrap();
    let told = until("the room", || {
        let (status, text) = room(&ROOM.to_string(), "?side=decode");
        let told: Value = serde_json::from_str(&text).unwrap();
        (status == 200 && told["ends"][0]["phase"] == "WaitingForInput").then_some(told)
    });
    let end = &told["ends"][0];
    assert_eq!(
        (&told["node"], &end["pid"], &end["state"]),
        (&json!("far"), &json!(nodes.decode.pid()), &json!("lives"))
    );
    let nobody = room("5", "?side=decode").1;
    assert_eq!(serde_json::from_str::<Value>(&nobody).unwrap(), json!({ "node": "far", "ends": [] }));
    let prefill = room(&ROOM.to_string(), "?side=prefill").1;
    assert!(prefill.contains("\"ends\":[]"), "{prefill}");
    for (number, side) in [("x", "?side=decode"), ("-1", "?side=decode"), ("5", ""), ("5", "?side=both")] {
        assert_eq!(room(number, side).0, 400, "{number}{side}");
    }
}

/// A peer that answers each question with this, and then does what `then` does.
fn peer(answer: &'static str, then: fn(TcpStream)) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            thread::spawn(move || {
                let mut stream = stream;
                let mut question = [0; 4096];
                let _ = stream.read(&mut question);
                let _ = stream.write_all(answer.as_bytes());
                then(stream);
            });
        }
    });
    format!("http://{address}")
}

#[test]
fn peers_that_are_slow_or_silent_or_lie_are_counted_and_do_no_harm() {
    let Some(()) = needs(environment::bpf().and(environment::python())).map(drop) else { return };
    let close: fn(TcpStream) = drop;
    let hang: fn(TcpStream) = |mut stream| {
        let _ = stream.read(&mut [0; 1]);
    };
    let flood: fn(TcpStream) = |mut stream| while stream.write_all(&[b' '; 65_536]).is_ok() {};
    let gone = {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        format!("http://{}", listener.local_addr().unwrap())
    };
    let ok = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n";
    let peers = [
        ("late", peer("", hang)),
        ("unreachable", gone),
        ("refused", peer("HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n", close)),
        ("malformed", peer("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", close)),
        ("broken_off", peer(ok, close)),
        ("too_long", peer("HTTP/1.1 200 OK\r\n\r\n", flood)),
        ("unresolved", "http://no-such-host.invalid:1".to_owned()),
    ];
    let mut prefill = Scheduler::of("prefill");
    let urls: Vec<String> = peers.iter().map(|(_, url)| url.clone()).collect();
    let agent = agent("near", prefill.pid(), &urls);
    prefill.begin("prefill");
    for (outcome, _) in &peers {
        until_true(outcome, || {
            prefill.pass();
            agent.metric("dislodge_peer_questions_total", &[("outcome", outcome)]) >= 1.0
        });
    }
    assert_eq!(agent.metric("dislodge_peer_questions_total", &[("outcome", "answered")]), 0.0);
    assert!(agent.firing().is_empty());
    assert_eq!(agent.page("/live").unwrap().0, 200);
}
