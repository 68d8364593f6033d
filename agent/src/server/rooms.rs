//! `/rooms/ROOM?side=…`: what this node knows of one end of a room, for the agent of the node at its other end. Times are told as
//! ages: clocks of nodes differ.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::{
    event::{Phase, clock::Monotonic},
    request::ends::{Conclusion, EndState, RoomEnd, Side},
};

/// Longest name of a node that is taken from another agent, in bytes.
const MAX_NODE: usize = 253;
/// Most ends that are taken from one answer.
const MAX_ENDS: usize = 16;

/// What the query says.
#[derive(Clone, Copy, Debug, Deserialize)]
pub(super) struct Query {
    pub(super) side: Side,
}

/// What an agent knows of an end of a room.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RoomAnswer {
    /// The agent's node.
    pub node: String,
    /// Servers that have or had the room.
    pub ends: Vec<EndAnswer>,
}

/// What one server does with it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndAnswer {
    /// Its process.
    pub pid: u32,
    /// What it does with it.
    #[serde(flatten)]
    state: StateAnswer,
    /// Milliseconds since that came about.
    age_ms: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
enum StateAnswer {
    Lives { phase: Option<Phase> },
    Left { how: Conclusion },
    ProcessEnded,
}

impl RoomAnswer {
    /// The answer of `node` at `now`.
    pub fn new(node: String, ends: &[RoomEnd], now: Monotonic) -> Self {
        let answer = |end: &RoomEnd| {
            let (state, at) = match end.state {
                EndState::Lives { phase, since } => (StateAnswer::Lives { phase }, since),
                EndState::Left { how, at } => (StateAnswer::Left { how }, at),
                EndState::ProcessEnded { at } => (StateAnswer::ProcessEnded, at),
            };
            EndAnswer { pid: end.pid, state, age_ms: now.since(at).as_millis() as u64 }
        };
        Self { node, ends: ends.iter().map(answer).collect() }
    }

    /// What it says, in this node's clock: it came in at `now`.
    pub fn into_ends(self, now: Monotonic) -> Vec<RoomEnd> {
        let mut node = self.node;
        node.truncate(node.floor_char_boundary(MAX_NODE));
        let end = |answer: EndAnswer| {
            let at = Monotonic(now.0.saturating_sub(nanoseconds(answer.age_ms)));
            let state = match answer.state {
                StateAnswer::Lives { phase } => EndState::Lives { phase, since: at },
                StateAnswer::Left { how } => EndState::Left { how, at },
                StateAnswer::ProcessEnded => EndState::ProcessEnded { at },
            };
            RoomEnd { node: Some(node.clone()), pid: answer.pid, state }
        };
        self.ends.into_iter().take(MAX_ENDS).map(end).collect()
    }
}

fn nanoseconds(milliseconds: u64) -> u64 {
    u64::try_from(Duration::from_millis(milliseconds).as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_told_comes_back_in_the_clock_of_who_asked() {
        let second = 1_000_000_000;
        let end = |pid, state| RoomEnd { node: None, pid, state };
        let told = [
            end(1, EndState::Lives { phase: Some(Phase::Transferring), since: Monotonic(5 * second) }),
            end(2, EndState::Left { how: Conclusion::Failed, at: Monotonic(7 * second) }),
            end(3, EndState::ProcessEnded { at: Monotonic(8 * second) }),
        ];
        let text = serde_json::to_string(&RoomAnswer::new("n1".to_owned(), &told, Monotonic(9 * second))).unwrap();
        assert_eq!(
            text,
            r#"{"node":"n1","ends":[{"pid":1,"state":"lives","phase":"Transferring","age_ms":4000},"#.to_owned()
                + r#"{"pid":2,"state":"left","how":"failed","age_ms":2000},{"pid":3,"state":"process_ended","age_ms":1000}]}"#
        );
        let heard: RoomAnswer = serde_json::from_str(&text).unwrap();
        let far = |pid, state| RoomEnd { node: Some("n1".to_owned()), pid, state };
        assert_eq!(
            heard.into_ends(Monotonic(100 * second)),
            [
                far(1, EndState::Lives { phase: Some(Phase::Transferring), since: Monotonic(96 * second) }),
                far(2, EndState::Left { how: Conclusion::Failed, at: Monotonic(98 * second) }),
                far(3, EndState::ProcessEnded { at: Monotonic(99 * second) }),
            ]
        );
    }

    #[test]
    fn an_answer_is_taken_within_bounds() {
        let one = r#"{"pid":1,"state":"lives","phase":null,"age_ms":18446744073709551615}"#;
        let text = format!(r#"{{"node":"{}","ends":[{}]}}"#, "ä".repeat(500), [one; 40].join(","));
        let ends = serde_json::from_str::<RoomAnswer>(&text).unwrap().into_ends(Monotonic(5));
        assert_eq!(ends.len(), MAX_ENDS);
        let RoomEnd { node, state, .. } = &ends[0];
        assert_eq!(node.as_deref().map(str::len), Some(252));
        assert_eq!(*state, EndState::Lives { phase: None, since: Monotonic(0) });
    }
}
