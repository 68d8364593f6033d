//! A hand on a hook's control channel: what an agent would send, and what it never would.

use std::time::Duration;

use dislodge::{
    event::{Phase, clock::Monotonic},
    target::{
        discover,
        hook::{self, MAX_MESSAGE, Taken},
    },
};
use rustix::net::{RecvFlags, SendFlags};
use serde_json::{Value, json};

use super::{server::SglangServer, wait::until};

/// The agent's end of a server's channel.
pub struct Hand {
    taken: Taken,
    epoch: u64,
    id: u64,
}

/// A request in the inflight queue, as a `fail` has to name it.
#[derive(Clone)]
pub struct Named {
    pub serial: u64,
    pub rid: String,
    pub room: String,
    pub phase: u8,
}

impl Named {
    /// The request of an alert, in the phase that it polls now.
    pub fn of(alert: &Value, server: &mut SglangServer) -> Self {
        let rid = super::server::text(&alert["rid"]["text"]);
        let queue = server.command("queue");
        let entry = queue.as_array().unwrap().iter().find(|entry| entry["rid"] == *rid).unwrap();
        let phase = Phase::ALL.into_iter().find(|phase| entry["poll"] == phase.name()).unwrap();
        let (serial, room) = (alert["serial"].as_u64().unwrap(), super::server::text(&alert["room"]));
        Self { serial, rid, room, phase: phase.number() }
    }

    /// The arguments of `fail`.
    pub fn arguments(&self) -> Value {
        let Self { serial, rid, room, phase } = self;
        json!({"verb": "fail", "serial": serial, "rid": rid, "room": room, "phase": phase, "reason": "a test"})
    }
}

impl Hand {
    /// Takes the channel of a server that no agent holds.
    pub fn take(server: &SglangServer) -> Self {
        Self::of(server.pid())
    }

    /// Takes the channel of a process that no agent holds.
    pub fn of(pid: u32) -> Self {
        let key = discover::process_key(pid).unwrap();
        let taken = until("the hook's channel", || hook::take(key).ok());
        Self { taken, epoch: Monotonic::now().0, id: 0 }
    }

    /// The epoch of its requests.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// A request with these arguments, to be carried out within `patience`.
    pub fn request(&mut self, arguments: &Value, patience: Duration) -> Value {
        self.id += 1;
        let deadline = Monotonic::now().plus(patience).0;
        let mut request = json!({"protocol": 1, "epoch": self.epoch, "id": self.id, "deadline": deadline});
        request.as_object_mut().unwrap().extend(arguments.as_object().unwrap().clone());
        request
    }

    /// Sends bytes, whatever they are.
    pub fn send(&self, bytes: &[u8]) {
        rustix::net::send(&self.taken.socket, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL).unwrap();
    }

    /// What waits to be read.
    pub fn receive(&self) -> Option<Value> {
        let mut buffer = [0; MAX_MESSAGE];
        let (_, length) = rustix::net::recv(&self.taken.socket, &mut buffer, RecvFlags::DONTWAIT).ok()?;
        Some(serde_json::from_slice(&buffer[..length]).unwrap())
    }

    /// Sends bytes and waits for the reply.
    pub fn ask_raw(&self, bytes: &[u8]) -> Value {
        self.send(bytes);
        until("a reply", || self.receive())
    }

    /// Asks and waits for the reply to it.
    pub fn ask(&mut self, arguments: &Value) -> Value {
        let request = self.request(arguments, Duration::from_secs(30));
        let reply = self.ask_raw(request.to_string().as_bytes());
        assert_eq!((&reply["epoch"], &reply["id"]), (&request["epoch"], &request["id"]), "{reply}");
        reply
    }

    /// Asks to fail a request; returns why the hook refused, or nothing when it did not.
    pub fn fail(&mut self, named: &Named) -> Option<String> {
        let reply = self.ask(&named.arguments());
        (reply["ok"] == false).then(|| super::server::text(&reply["refused"]))
    }

    /// The hook lives, and none of its code has failed.
    pub fn assert_hook_is_well(&mut self) {
        let reply = self.ask(&json!({"verb": "ping"}));
        assert_eq!((&reply["ok"], &reply["errors"]), (&json!(true), &json!({})), "{reply}");
    }
}
