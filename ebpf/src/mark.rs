//! The program on the entry of `dislodge_mark`.

use aya_ebpf::{macros::uprobe, programs::ProbeContext};
use dislodge_ebpf::wire::{Kind, Mark};

use crate::{abi::argument, emit::Traced};

/// No event has it: what a mark claims to be that the hook does not make.
const NO_KIND: u16 = u16::MAX;

/// Copies the five arguments of a mark into the ring.
#[uprobe]
pub fn mark(ctx: ProbeContext) -> u32 {
    try_mark(&ctx);
    0
}

fn try_mark(ctx: &ProbeContext) -> Option<()> {
    let (process, _) = Traced::of_probe(ctx)?;
    let kind = argument(ctx, 0)?;
    let mark = Mark { room: argument(ctx, 1)?, value: argument(ctx, 2)?, sender: argument(ctx, 3)? };
    // Whoever can call the marker must not be able to speak for the transfer engine.
    let number = if kind as u16 >= Kind::NixlMade as u16 { NO_KIND } else { kind as u16 };
    let flags = u16::from((kind >> 16) as u8);
    match argument(ctx, 4)? {
        0 => process.emit(number, flags, mark),
        detail => process.emit_detailed(number, flags, mark, detail),
    }
    Some(())
}
