//! Rooms whose requests ended here lately, and how: for the other end, which may still wait. Bounded, the oldest go first.

use std::collections::{HashMap, VecDeque};

use minicbor::{Decode, Decoder, Encode, Encoder, decode, encode};

use super::{super::ends::Conclusion, Process};
use crate::{
    event::{LeaveReason, Phase, Room, clock::Monotonic},
    record::codec::Names,
    request::{
        Request,
        ends::{EndState, RoomEnd, Side},
        notified::PeerEnded,
    },
};

/// Of one process: what ends within half a minute, at a hundred requests a second.
const MAX_CONCLUDED: usize = 4_096;

#[derive(Debug, Default)]
pub(super) struct ConcludedRooms {
    order: VecDeque<(Monotonic, Room)>,
    by_room: HashMap<Room, (Monotonic, Conclusion)>,
}

impl ConcludedRooms {
    pub(super) fn keep(&mut self, room: Room, how: Conclusion, at: Monotonic) {
        self.by_room.insert(room, (at, how));
        self.order.push_back((at, room));
        if self.order.len() > MAX_CONCLUDED
            && let Some((at, room)) = self.order.pop_front()
            && self.by_room.get(&room).is_some_and(|(last, _)| *last == at)
        {
            self.by_room.remove(&room);
        }
    }

    /// How it ended is not known after all.
    pub(super) fn forget(&mut self, room: Room) {
        self.by_room.remove(&room);
    }

    /// How the room's last request ended, if that was at `since` or later.
    fn after(&self, room: Room, since: Monotonic) -> Option<EndState> {
        let (at, how) = *self.by_room.get(&room)?;
        (at >= since).then_some(EndState::Left { how, at })
    }
}

/// Recorded in the order of time.
impl<C: Names> Encode<C> for ConcludedRooms {
    fn encode<W: encode::Write>(&self, e: &mut Encoder<W>, names: &mut C) -> Result<(), encode::Error<W::Error>> {
        let last = |(at, room): &&(Monotonic, Room)| self.by_room.get(room).is_some_and(|(last, _)| last == at);
        e.array(self.order.iter().filter(last).count() as u64)?;
        for (at, room) in self.order.iter().filter(last) {
            (at, room, self.by_room.get(room).map(|(_, how)| how)).encode(e, names)?;
        }
        Ok(())
    }
}

impl<'b, C> Decode<'b, C> for ConcludedRooms {
    fn decode(d: &mut Decoder<'b>, context: &mut C) -> Result<Self, decode::Error> {
        let rooms: Vec<(Monotonic, Room, Option<Conclusion>)> = Decode::decode(d, context)?;
        let mut concluded = Self::default();
        for (at, room, how) in rooms {
            concluded.keep(room, how.ok_or_else(|| decode::Error::message("a room that has not ended"))?, at);
        }
        Ok(concluded)
    }
}

/// How a request ended that is taken out of the books.
pub(super) fn conclusion(request: &Request, left: Option<LeaveReason>) -> Conclusion {
    match (left, request.phase) {
        (Some(LeaveReason::Success), _) | (None, Some(Phase::Success)) => Conclusion::Success,
        (Some(LeaveReason::Failed), _) | (None, Some(Phase::Failed)) => Conclusion::Failed,
        (None, _) if request.failed.is_some() => Conclusion::Failed,
        (Some(LeaveReason::Removed) | None, _) => Conclusion::Dropped,
    }
}

impl Process {
    /// Which end of its rooms it is, as it said of itself.
    pub(in crate::request) fn side(&self) -> Option<Side> {
        self.state.hello.as_deref().and_then(|hello| Side::of_name(hello.role.as_deref()?))
    }

    /// Its live requests, in the order of their serials.
    pub(in crate::request) fn requests(&self) -> impl Iterator<Item = &Request> {
        self.requests.values().map(Box::as_ref)
    }

    /// Rooms that a live sender or receiver has.
    pub(in crate::request) fn rooms_with_senders(&self) -> impl Iterator<Item = Room> {
        self.rooms.iter().filter(|(_, state)| !state.senders.is_empty()).map(|(room, _)| *room)
    }

    /// What it does with a room, or did at `since` or later.
    pub(in crate::request) fn end_of_room(&self, room: Room, since: Monotonic) -> Option<EndState> {
        let newest = self.rooms.get(&room).and_then(|state| state.senders.last());
        match newest.and_then(|serial| self.requests.get(serial)) {
            Some(request) => Some(EndState::Lives { phase: request.phase, since: request.phase_since }),
            None => self.concluded.after(room, since),
        }
    }

    /// Takes over what the other end of a request does.
    pub(in crate::request) fn other_end(&mut self, serial: u64, end: Option<RoomEnd>) {
        if let Some(request) = self.requests.get_mut(&serial) {
            request.other_end = end.map(Box::new);
        }
    }

    /// Takes over whether the only process that it was seen to notify has ended.
    pub(in crate::request) fn only_peer_ended(&mut self, ended: Option<PeerEnded>) {
        self.state.native.peer_ended = ended;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_room_is_known_by_its_last_end_and_the_oldest_go() {
        let mut concluded = ConcludedRooms::default();
        for number in 0..MAX_CONCLUDED as u64 {
            concluded.keep(Room::Number(number), Conclusion::Failed, Monotonic(number));
        }
        let first = Room::Number(0);
        concluded.keep(first, Conclusion::Success, Monotonic(10_000));
        let again = EndState::Left { how: Conclusion::Success, at: Monotonic(10_000) };
        assert_eq!(concluded.after(first, Monotonic(10_000)), Some(again), "its older end has gone, not the room");
        assert_eq!(concluded.after(first, Monotonic(10_001)), None);
        concluded.keep(Room::Number(9_999_999), Conclusion::Dropped, Monotonic(10_001));
        assert_eq!(concluded.after(Room::Number(1), Monotonic(0)), None);
        assert_eq!(concluded.by_room.len(), MAX_CONCLUDED);
    }
}
