//! How values are written into recordings: as CBOR (RFC 8949), a structure as an array of its fields in a fixed order, a
//! choice as an array of its number and its fields.
//!
//! [`recorded!`] takes a type apart by name and leaves nothing out, so a field that is not recorded does not compile. The
//! numbers and the order are the format, not the layout in memory: both stay as they are within a version. A field may be
//! added at the end, if it is an `Option`: who does not know it skips it, who misses it reads `None`.

use std::borrow::Cow;

use minicbor::{Decode, Decoder, decode};

use crate::event::native::Notification;

/// How names are written: as they are, or so that nobody learns them.
pub trait Names {
    /// A room.
    fn room(&self, number: u64) -> u64;
    /// A request id, a process title, the name of a peer or a node.
    fn word<'a>(&self, word: &'a str) -> Cow<'a, str>;
    /// Something of which there are few, as a version: what is known in public stays.
    fn public<'a>(&self, word: &'a str) -> Cow<'a, str>;
    /// What an application says to its peer: names a room or a request.
    fn notification<'a>(&self, notification: &'a Notification) -> Cow<'a, Notification>;
}

/// Names as they are.
#[derive(Clone, Copy, Debug, Default)]
pub struct Plain;

impl Names for Plain {
    fn room(&self, number: u64) -> u64 {
        number
    }

    fn word<'a>(&self, word: &'a str) -> Cow<'a, str> {
        Cow::Borrowed(word)
    }

    fn public<'a>(&self, word: &'a str) -> Cow<'a, str> {
        Cow::Borrowed(word)
    }

    fn notification<'a>(&self, notification: &'a Notification) -> Cow<'a, Notification> {
        Cow::Borrowed(notification)
    }
}

/// The fields of a value that are still to be read.
#[derive(Debug)]
pub(crate) struct Fields(u64);

impl Fields {
    /// Begins to read a value.
    pub(crate) fn of(decoder: &mut Decoder<'_>) -> Result<Self, decode::Error> {
        decoder.array()?.map(Self).ok_or_else(|| decode::Error::message("a value of unknown length"))
    }

    /// Reads the next field; one that is not there was added later.
    pub(crate) fn next<'b, C, T: Decode<'b, C>>(
        &mut self,
        decoder: &mut Decoder<'b>,
        context: &mut C,
    ) -> Result<T, decode::Error> {
        if self.0 == 0 {
            return T::nil().ok_or_else(|| decode::Error::message("a field is missing"));
        }
        self.0 -= 1;
        T::decode(decoder, context)
    }

    /// Passes over fields that were added later.
    pub(crate) fn end(self, decoder: &mut Decoder<'_>) -> Result<(), decode::Error> {
        (0..self.0).try_for_each(|_| decoder.skip())
    }
}

/// Writes and reads a type: see the module.
macro_rules! recorded {
    (struct $type:ident { $($field:ident),+ $(,)? } $(else { $($left:ident: $default:expr),+ })?) => {
        impl<C: $crate::record::codec::Names> ::minicbor::Encode<C> for $type {
            fn encode<W: ::minicbor::encode::Write>(
                &self,
                encoder: &mut ::minicbor::Encoder<W>,
                names: &mut C,
            ) -> Result<(), ::minicbor::encode::Error<W::Error>> {
                let Self { $($field),+ $(, $($left: _),+)? } = self;
                encoder.array([$(stringify!($field)),+].len() as u64)?;
                $(::minicbor::Encode::<C>::encode($field, encoder, names)?;)+
                Ok(())
            }
        }

        impl<'b, C> ::minicbor::Decode<'b, C> for $type {
            fn decode(
                decoder: &mut ::minicbor::Decoder<'b>,
                context: &mut C,
            ) -> Result<Self, ::minicbor::decode::Error> {
                let mut fields = $crate::record::codec::Fields::of(decoder)?;
                $(let $field = fields.next(decoder, context)?;)+
                fields.end(decoder)?;
                Ok(Self { $($field),+ $(, $($left: $default),+)? })
            }
        }
    };
    (enum $type:ident { $($number:literal $variant:ident $fields:tt),+ $(,)? }) => {
        impl<C: $crate::record::codec::Names> ::minicbor::Encode<C> for $type {
            fn encode<W: ::minicbor::encode::Write>(
                &self,
                encoder: &mut ::minicbor::Encoder<W>,
                names: &mut C,
            ) -> Result<(), ::minicbor::encode::Error<W::Error>> {
                match self {
                    $(Self::$variant $fields => {
                        $crate::record::codec::write_fields!($number $fields encoder names)
                    })+
                }
                Ok(())
            }
        }

        impl<'b, C> ::minicbor::Decode<'b, C> for $type {
            fn decode(
                decoder: &mut ::minicbor::Decoder<'b>,
                context: &mut C,
            ) -> Result<Self, ::minicbor::decode::Error> {
                let mut fields = $crate::record::codec::Fields::of(decoder)?;
                let number: u16 = fields.next(decoder, context)?;
                let value = match number {
                    $($number => {
                        $crate::record::codec::read_fields!($fields fields decoder context);
                        Self::$variant $fields
                    })+
                    _ => return Err(::minicbor::decode::Error::message("a kind that is not known")),
                };
                fields.end(decoder)?;
                Ok(value)
            }
        }
    };
    (number $type:ident { $($number:literal $variant:ident),+ $(,)? }) => {
        impl<C> ::minicbor::Encode<C> for $type {
            fn encode<W: ::minicbor::encode::Write>(
                &self,
                encoder: &mut ::minicbor::Encoder<W>,
                _: &mut C,
            ) -> Result<(), ::minicbor::encode::Error<W::Error>> {
                encoder.u16(match self { $(Self::$variant => $number),+ })?;
                Ok(())
            }
        }

        impl<'b, C> ::minicbor::Decode<'b, C> for $type {
            fn decode(
                decoder: &mut ::minicbor::Decoder<'b>,
                _: &mut C,
            ) -> Result<Self, ::minicbor::decode::Error> {
                match decoder.u16()? {
                    $($number => Ok(Self::$variant),)+
                    _ => Err(::minicbor::decode::Error::message("a number that is not known")),
                }
            }
        }
    };
}

macro_rules! write_fields {
    ($number:literal ($($field:ident),*) $encoder:ident $names:ident) => {
        $crate::record::codec::write_fields!($number { $($field),* } $encoder $names)
    };
    ($number:literal { $($field:ident),* } $encoder:ident $names:ident) => {{
        const LENGTH: usize = 1 + { let fields: [&str; _] = [$(stringify!($field)),*]; fields.len() };
        $encoder.array(LENGTH as u64)?.u16($number)?;
        $(::minicbor::Encode::<C>::encode($field, $encoder, $names)?;)*
    }};
}

macro_rules! read_fields {
    (($($field:ident),*) $fields:ident $decoder:ident $context:ident) => {
        $(let $field = $fields.next($decoder, $context)?;)*
    };
    ({ $($field:ident),* } $fields:ident $decoder:ident $context:ident) => {
        $(let $field = $fields.next($decoder, $context)?;)*
    };
}

pub(crate) use {read_fields, recorded, write_fields};
