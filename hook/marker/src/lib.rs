//! The marker: a function that does nothing, for the agent's uprobe to sit on, and two Python functions that call it.
//!
//! `dislodge_mark(kind, room, value, sender, detail)` starts with a one-byte `nop`, which every kernel emulates instead
//! of single-stepping; its arguments are the event. One library serves CPython 3.10 to 3.14: it uses the limited API
//! only (`METH_FASTCALL` is part of it since 3.10).
//!
//! Neither Python function raises, whatever it is given: a mark is never worth an exception in a server's scheduler.
#![no_std]

mod python;

use core::ffi::{c_char, c_int, c_void};

use python::{Method, Module, Object, PyErr_Clear, PyErr_Occurred};

/// Bit of `kind`: the room is not a number of 0 … 2⁶⁴−1, and `room` is 0.
const ROOM_IS_NOT_A_NUMBER: u64 = 1 << 16;

/// Bytes of a detail that are copied. The hook sends 456 at most, which is what fits an event; the length that is passed
/// on can be more than that, so that the reader sees a cut, but never more than what was copied.
const DETAIL_CAPACITY: usize = 512;

/// What `dislodge_mark` gets a pointer to: a length, then that many bytes of UTF-8.
#[repr(C)]
struct Detail {
    length: u32,
    bytes: [u8; DETAIL_CAPACITY],
}

/// The place of the probe. Its arguments are documented in the contract (agent/ARCHITECTURE.md, "The mark").
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
#[unsafe(no_mangle)]
#[unsafe(link_section = ".text.dislodge_mark")] // first in a section of its own, whose alignment the padding sets: 16
pub extern "C" fn dislodge_mark(_kind: u64, _room: u64, _value: u64, _sender: u64, _detail: *const c_void) {
    core::arch::naked_asm!(".byte 0x90", "ret", ".p2align 4")
}

/// The place of the probe. Its arguments are documented in the contract (agent/ARCHITECTURE.md, "The mark").
#[cfg(target_arch = "aarch64")]
#[unsafe(naked)]
#[unsafe(no_mangle)]
#[unsafe(link_section = ".text.dislodge_mark")] // first in a section of its own, whose alignment the padding sets: 16
pub extern "C" fn dislodge_mark(_kind: u64, _room: u64, _value: u64, _sender: u64, _detail: *const c_void) {
    core::arch::naked_asm!("nop", "ret", ".p2align 4")
}

/// The number that a Python object holds, if it is an `int` of 0 … 2⁶⁴−1. Leaves no exception set.
fn number(object: *mut Object) -> Option<u64> {
    // SAFETY: `object` is an argument of a running call, so it is alive; the GIL is held.
    let value = unsafe { python::PyLong_AsUnsignedLongLong(object) };
    // SAFETY: the GIL is held.
    if value == u64::MAX && !unsafe { PyErr_Occurred() }.is_null() {
        // SAFETY: the GIL is held.
        unsafe { PyErr_Clear() };
        return None;
    }
    Some(value)
}

/// The first four arguments of either function, as `dislodge_mark` wants them.
fn numbers(arguments: &[*mut Object]) -> Option<(u64, u64, u64, u64)> {
    let [kind, room, value, sender, ..] = *arguments else { return None };
    let (kind, value, sender) = (number(kind)?, number(value).unwrap_or(0), number(sender).unwrap_or(0));
    Some(match number(room) {
        Some(room) => (kind, room, value, sender),
        None => (kind | ROOM_IS_NOT_A_NUMBER, 0, value, sender),
    })
}

/// # Safety
///
/// As Python calls a `METH_FASTCALL` function: `count` objects at `arguments`, the GIL held.
unsafe fn slice<'a>(arguments: *const *mut Object, count: isize) -> &'a [*mut Object] {
    match usize::try_from(count) {
        // SAFETY: Python gives `count` valid pointers.
        Ok(count) if count > 0 && !arguments.is_null() => unsafe { core::slice::from_raw_parts(arguments, count) },
        _ => &[],
    }
}

extern "C" fn mark(_module: *mut Object, arguments: *const *mut Object, count: isize) -> *mut Object {
    // SAFETY: Python called this function.
    if let Some((kind, room, value, sender)) = numbers(unsafe { slice(arguments, count) }) {
        dislodge_mark(kind, room, value, sender, core::ptr::null());
    }
    python::none()
}

extern "C" fn mark_detail(_module: *mut Object, arguments: *const *mut Object, count: isize) -> *mut Object {
    // SAFETY: Python called this function.
    let arguments = unsafe { slice(arguments, count) };
    let Some((kind, room, value, sender)) = numbers(arguments) else { return python::none() };
    let mut detail = Detail { length: 0, bytes: [0; DETAIL_CAPACITY] };
    if let Some(&object) = arguments.get(4) {
        copy(object, &mut detail);
    }
    dislodge_mark(kind, room, value, sender, (&raw const detail).cast());
    python::none()
}

/// Copies a `bytes` object, cut at the capacity. Anything else leaves the detail empty, and no exception set.
fn copy(object: *mut Object, detail: &mut Detail) {
    let (mut start, mut length): (*mut c_char, isize) = (core::ptr::null_mut(), 0);
    // SAFETY: `object` is alive, the two places are ours, the GIL is held.
    let status: c_int = unsafe { python::PyBytes_AsStringAndSize(object, &mut start, &mut length) };
    if status != 0 || start.is_null() {
        // SAFETY: the GIL is held.
        unsafe { PyErr_Clear() };
        return;
    }
    let length = usize::try_from(length).unwrap_or(0).min(DETAIL_CAPACITY);
    // SAFETY: `length` is at most what the object has and what the buffer holds; they do not overlap.
    unsafe { core::ptr::copy_nonoverlapping(start.cast::<u8>(), detail.bytes.as_mut_ptr(), length) };
    detail.length = length as u32;
}

static METHODS: python::Static<[Method; 3]> = python::Static::new([
    Method::fast(c"mark", mark, c"mark(kind, room, value, sender): calls dislodge_mark without a detail"),
    Method::fast(c"mark_detail", mark_detail, c"mark_detail(kind, room, value, sender, detail: bytes)"),
    Method::END,
]);

static MODULE: python::Static<Module> =
    python::Static::new(Module::new(c"dislodge_marker", c"The place of Dislodge's uprobe", METHODS.get().cast()));

/// What Python's import machinery calls.
#[unsafe(no_mangle)]
pub extern "C" fn PyInit_dislodge_marker() -> *mut Object {
    // SAFETY: the definition lives for ever and is Python's from here on; the GIL is held.
    unsafe { python::PyModule_Create2(MODULE.get(), python::ABI_VERSION) }
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}
