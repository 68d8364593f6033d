//! The program on the entry of `dislodge_mark`.

use aya_ebpf::{macros::uprobe, programs::ProbeContext};
use dislodge_ebpf::wire::Mark;

use crate::emit::Traced;

/// Copies the five arguments of a mark into the ring.
#[uprobe]
pub fn mark(ctx: ProbeContext) -> u32 {
    try_mark(&ctx);
    0
}

fn try_mark(ctx: &ProbeContext) -> Option<()> {
    let process = Traced::current(ctx)?;
    let kind: u64 = ctx.arg(0)?;
    let mark = Mark { room: ctx.arg(1)?, value: ctx.arg(2)?, sender: ctx.arg(3)? };
    let detail: *const u8 = ctx.arg(4)?;
    let (number, flags) = (kind as u16, (kind >> 16) as u8);
    if detail.is_null() {
        process.emit(number, u16::from(flags), mark);
    } else {
        process.emit_detailed(number, u16::from(flags), mark, detail);
    }
    Some(())
}
