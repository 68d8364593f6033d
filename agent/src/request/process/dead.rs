//! Rooms without a live sender that are kept nevertheless: a chunk of theirs is counted, or ended with an error. Bounded,
//! the oldest go first.

use std::collections::{BTreeMap, HashMap};

use minicbor::{Decode, Decoder, Encode, Encoder, decode, encode};

use crate::{event::Room, record::codec::Names};

/// As many as the hook remembers of abandoned rooms (`chunks.ABANDONED_ROOMS`). On mori and ascend every chunk abandons its
/// room, so a server fills this in hours.
pub(super) const MAX_DEAD_ROOMS: usize = 65_536;

/// Rooms by when their last sender went.
#[derive(Debug, Default)]
pub(super) struct DeadRooms {
    order: BTreeMap<u64, Room>,
    numbers: HashMap<Room, u64>,
    last: u64,
}

impl DeadRooms {
    /// Keeps a room; returns the one that has to go for it.
    pub(super) fn keep(&mut self, room: Room) -> Option<Room> {
        if self.numbers.contains_key(&room) {
            return None;
        }
        self.last += 1;
        self.order.insert(self.last, room);
        self.numbers.insert(room, self.last);
        if self.order.len() <= MAX_DEAD_ROOMS {
            return None;
        }
        let (_, oldest) = self.order.pop_first()?;
        self.numbers.remove(&oldest);
        Some(oldest)
    }

    #[cfg(test)]
    pub(super) fn rooms(&self) -> impl Iterator<Item = Room> {
        self.numbers.keys().copied()
    }

    /// A room is gone, or has a sender again.
    pub(super) fn forget(&mut self, room: Room) {
        if let Some(number) = self.numbers.remove(&room) {
            self.order.remove(&number);
        }
    }
}

/// Recorded as its rooms, the oldest first.
impl<C: Names> Encode<C> for DeadRooms {
    fn encode<W: encode::Write>(&self, e: &mut Encoder<W>, names: &mut C) -> Result<(), encode::Error<W::Error>> {
        e.array(self.order.len() as u64)?;
        self.order.values().try_for_each(|room| room.encode(e, names))
    }
}

impl<'b, C> Decode<'b, C> for DeadRooms {
    fn decode(d: &mut Decoder<'b>, context: &mut C) -> Result<Self, decode::Error> {
        let rooms: Vec<Room> = Decode::decode(d, context)?;
        let mut dead = Self::default();
        for room in rooms {
            dead.keep(room);
        }
        Ok(dead)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_goes_and_a_room_that_was_live_meanwhile_is_young_again() {
        let mut dead = DeadRooms::default();
        for number in 0..MAX_DEAD_ROOMS as u64 {
            assert_eq!(dead.keep(Room::Number(number)), None);
        }
        dead.forget(Room::Number(0));
        assert_eq!((dead.keep(Room::Number(0)), dead.keep(Room::Number(0))), (None, None));
        assert_eq!(dead.keep(Room::Number(u64::MAX)), Some(Room::Number(1)));
        assert_eq!((dead.order.len(), dead.numbers.len()), (MAX_DEAD_ROOMS, MAX_DEAD_ROOMS));
    }
}
