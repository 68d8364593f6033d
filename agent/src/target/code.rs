//! What a function's code says: what a probe on it costs, and where NIXL keeps a transfer's status.
//!
//! Instructions are decoded with `iced-x86`, decoder only.

use iced_x86::{Code, Decoder, DecoderOptions, Instruction, OpKind, Register};
use object::Architecture;

/// The architecture that this agent, and every process that it can see, runs on.
pub const HOST: Architecture = if cfg!(target_arch = "aarch64") { Architecture::Aarch64 } else { Architecture::X86_64 };
/// Bytes at the start of a function that [`entry_point`] wants: the longest instruction has 15, `endbr64` has 4.
pub const ENTRY_BYTES: usize = 32;
/// Instructions before the probe that are skipped at most.
const MOST_SKIPPED: usize = 2;
/// Longest code that is searched for an offset: NIXL's releaseXferReq has some hundred bytes.
const MAX_CODE: usize = 1 << 16;
/// Farthest field that is believed: nixlXferReqH has some 200 bytes.
const MAX_OFFSET: u64 = 1 << 12;
/// `NIXL_IN_PROG` of `nixl_status_t`.
const IN_PROGRESS: u64 = 1;

/// The instruction that a probe replaces: what the kernel emulates costs some 0.5 µs, what it has to single-step several
/// microseconds (`arch_uprobe_analyze_insn` in `arch/x86/kernel/uprobes.c`; measured in docs/overhead.md).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prologue {
    /// `nop` of one byte: emulated by every kernel. (Longer ones only since 6.18.)
    Nop,
    /// `push` of a 64-bit register: emulated.
    Push,
    /// A relative jump or call: emulated.
    Branch,
    /// Anything else on x86-64.
    SingleStepped,
    /// Not x86-64, or not an instruction: what it costs is not known.
    Unknown,
}

impl Prologue {
    /// Whether every supported kernel emulates it.
    pub fn is_emulated(self) -> bool {
        matches!(self, Self::Nop | Self::Push | Self::Branch)
    }
}

/// Where to put a probe on a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EntryPoint {
    /// Bytes behind the function's first that the probe belongs on: those of an `endbr64` and of a constant that is
    /// loaded into a register which no argument is in, where an emulated instruction follows; else 0. Nothing has been
    /// pushed there yet, so arguments and the return address are where they were, and a return probe is as good as on
    /// the first byte.
    pub skip: u64,
    /// The instruction there.
    pub prologue: Prologue,
}

/// Where to put a probe on the function whose code begins with `code` ([`ENTRY_BYTES`] are enough).
///
/// On arm64 nothing is skipped: which of `bti` and `paciasp` a kernel steps or simulates is not known here, and behind
/// `paciasp` the return address is signed already.
pub fn entry_point(architecture: Architecture, code: &[u8]) -> EntryPoint {
    if architecture != Architecture::X86_64 {
        return EntryPoint { skip: 0, prologue: Prologue::Unknown };
    }
    let first = prologue(instructions(code).next().as_ref());
    let mut skip = 0;
    for instruction in instructions(code).take(MOST_SKIPPED + 1) {
        let here = prologue(Some(&instruction));
        if here.is_emulated() {
            return EntryPoint { skip, prologue: here };
        }
        if !changes_nothing_of_the_call(&instruction) {
            break;
        }
        skip += instruction.len() as u64;
    }
    EntryPoint { skip: 0, prologue: first }
}

/// Whether a probe behind the instruction sees what one on it would: it marks the function's entry, or loads a constant
/// (Mooncake's `freeBatchID` since 0.3.11) into a register that holds no argument, no result's address and no stack.
fn changes_nothing_of_the_call(instruction: &Instruction) -> bool {
    let loads_constant = matches!(instruction.code(), Code::Mov_r64_imm64 | Code::Mov_r32_imm32 | Code::Mov_rm64_imm32);
    let is_free = |register: Register| {
        matches!(
            register.full_register(),
            Register::RAX
                | Register::RBX
                | Register::RBP
                | Register::R10
                | Register::R11
                | Register::R12
                | Register::R13
                | Register::R14
                | Register::R15
        )
    };
    let into_free_register = instruction.op0_kind() == OpKind::Register && is_free(instruction.op0_register());
    instruction.code() == Code::Endbr64 || (loads_constant && into_free_register)
}

fn prologue(first: Option<&Instruction>) -> Prologue {
    let Some(first) = first else { return Prologue::Unknown };
    match first.code() {
        Code::INVALID => Prologue::Unknown,
        Code::Nopd | Code::Nopq | Code::Nopw if first.len() == 1 => Prologue::Nop,
        Code::Push_r64 => Prologue::Push,
        code if code.is_jmp_short_or_near() || code.is_jcc_short_or_near() || code.is_call_near() => Prologue::Branch,
        _ => Prologue::SingleStepped,
    }
}

/// Where `nixlXferReqH` keeps its status, in bytes, from the code of `nixlAgent::releaseXferReq`: the handle is not laid
/// out alike in any two series of releases, but this function compares its status with `NIXL_IN_PROG` once (104 in
/// 0.3–1.1, 168 in 1.2–1.3, 176 in 1.4, 184 in 1.5.1). Nothing where the code shows none, or more than one candidate;
/// x86-64 only.
pub fn status_offset(architecture: Architecture, code: &[u8]) -> Option<u32> {
    if architecture != Architecture::X86_64 || code.len() > MAX_CODE {
        return None;
    }
    let mut found = None;
    let mut before = Instruction::default();
    for instruction in instructions(code) {
        if instruction.is_invalid() {
            return None;
        }
        if let Some(offset) = status_compared(&before, &instruction) {
            match found {
                Some(other) if other != offset => return None,
                _ => found = Some(offset),
            }
        }
        before = instruction;
    }
    found
}

/// The field of an object that an instruction compares with `NIXL_IN_PROG`, in memory or as loaded just before.
fn status_compared(before: &Instruction, instruction: &Instruction) -> Option<u32> {
    let with_immediate = matches!(instruction.code(), Code::Cmp_rm32_imm8 | Code::Cmp_rm32_imm32 | Code::Cmp_EAX_imm32);
    if !with_immediate || instruction.immediate(1) != IN_PROGRESS {
        return None;
    }
    if instruction.op0_kind() == OpKind::Memory {
        return field_offset(instruction);
    }
    let loaded = before.code() == Code::Mov_r32_rm32
        && before.op1_kind() == OpKind::Memory
        && before.op0_register() == instruction.op0_register();
    if loaded { field_offset(before) } else { None }
}

/// The displacement of `[register + displacement]`, where that can be a field of an object: not on the stack, not an
/// array's, not a global.
fn field_offset(instruction: &Instruction) -> Option<u32> {
    let base = instruction.memory_base();
    let is_object = base.is_gpr64()
        && base != Register::RSP
        && instruction.memory_index() == Register::None
        && instruction.segment_prefix() == Register::None;
    let offset = instruction.memory_displacement64();
    (is_object && offset > 0 && offset < MAX_OFFSET && offset.is_multiple_of(size_of::<i32>() as u64))
        .then(|| u32::try_from(offset).ok())
        .flatten()
}

/// The instructions of a piece of code, up to its end; one that is cut off there is an invalid one.
fn instructions(code: &[u8]) -> impl Iterator<Item = Instruction> + use<'_> {
    let mut decoder = Decoder::new(64, code, DecoderOptions::NONE);
    std::iter::from_fn(move || decoder.can_decode().then(|| decoder.decode()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ENDBR64: [u8; 4] = [0xf3, 0x0f, 0x1e, 0xfa];

    fn entry(code: &[u8]) -> (u64, Prologue) {
        let EntryPoint { skip, prologue } = entry_point(Architecture::X86_64, code);
        (skip, prologue)
    }

    fn status(code: &[u8]) -> Option<u32> {
        status_offset(Architecture::X86_64, code)
    }

    #[test]
    fn first_instructions_are_told_apart() {
        let cases: [(&[u8], Prologue); 13] = [
            (&[0x90], Prologue::Nop),
            (&[0x0f, 0x1f, 0x44, 0, 0], Prologue::SingleStepped), // nop5: emulated from 6.18 on only
            (&[0x55], Prologue::Push),
            (&[0x41, 0x57], Prologue::Push),
            (&[0xeb, 0x10], Prologue::Branch),
            (&[0xe9, 0, 0, 0, 0], Prologue::Branch),
            (&[0xe8, 0, 0, 0, 0], Prologue::Branch),
            (&[0x74, 0x10], Prologue::Branch),
            (&[0xff, 0x25, 0, 0, 0, 0], Prologue::SingleStepped), // jmp through memory
            (&[0x6a, 0x01], Prologue::SingleStepped),             // push of a number
            (&[0x48, 0x83, 0xec, 0x08], Prologue::SingleStepped), // sub rsp, 8
            (&[0x06], Prologue::Unknown),                         // not an instruction in 64-bit mode
            (&[], Prologue::Unknown),
        ];
        for (code, expected) in cases {
            assert_eq!(entry(code), (0, expected), "{code:02x?}");
        }
    }

    #[test]
    fn endbr64_is_skipped_where_that_lands_on_an_emulated_instruction() {
        assert_eq!(entry(&[&ENDBR64[..], &[0x41, 0x54]].concat()), (4, Prologue::Push));
        assert_eq!(entry(&[&ENDBR64[..], &[0x48, 0x89, 0xf8]].concat()), (0, Prologue::SingleStepped));
        assert_eq!(entry(&ENDBR64), (0, Prologue::SingleStepped));
        assert_eq!(entry(&ENDBR64[..3]), (0, Prologue::Unknown));
    }

    #[test]
    fn a_constant_in_a_register_without_an_argument_is_skipped_and_no_other() {
        let movabs = |register: u8| [&[0x48, 0xb8 + register][..], &[0; 8]].concat();
        let (rax, rdx, push) = (0, 2, [0x41, 0x54]);
        assert_eq!(entry(&[&movabs(rax)[..], &push].concat()), (10, Prologue::Push));
        assert_eq!(entry(&[&ENDBR64[..], &movabs(rax), &push].concat()), (14, Prologue::Push));
        assert_eq!(entry(&[&movabs(rdx)[..], &push].concat()), (0, Prologue::SingleStepped));
        assert_eq!(entry(&[&[0xb8, 1, 0, 0, 0][..], &[0x55]].concat()), (5, Prologue::Push));
        assert_eq!(entry(&[&[0xbf, 1, 0, 0, 0][..], &[0x55]].concat()), (0, Prologue::SingleStepped), "edi");
        assert_eq!(entry(&[&[0x48, 0x8b, 0x07][..], &[0x55]].concat()), (0, Prologue::SingleStepped), "a load");
        let three = [&movabs(rax)[..], &movabs(rax), &movabs(rax), &push].concat();
        assert_eq!(entry(&three).0, 0);
    }

    #[test]
    fn arm64_is_left_alone() {
        let unknown = EntryPoint { skip: 0, prologue: Prologue::Unknown };
        assert_eq!(entry_point(Architecture::Aarch64, &[0x5f, 0x24, 0x03, 0xd5]), unknown);
        assert_eq!(status_offset(Architecture::Aarch64, &[0x83, 0x7b, 0x68, 0x01]), None);
    }

    #[test]
    fn the_status_is_found_in_every_form_of_the_comparison() {
        let cases: [(&[u8], u32); 5] = [
            (&[0x83, 0x7b, 0x68, 0x01], 0x68),                      // cmp dword [rbx+0x68], 1
            (&[0x41, 0x83, 0xbc, 0x24, 0xb8, 0, 0, 0, 0x01], 0xb8), // cmp dword [r12+0xb8], 1
            (&[0x81, 0xbd, 0xa8, 0, 0, 0, 1, 0, 0, 0], 0xa8),       // cmp dword [rbp+0xa8], imm32 1
            (&[0x8b, 0x87, 0xb0, 0, 0, 0, 0x83, 0xf8, 0x01], 0xb0), // mov eax, [rdi+0xb0]; cmp eax, 1
            (&[0x8b, 0x87, 0xb0, 0, 0, 0, 0x3d, 1, 0, 0, 0], 0xb0), // the same, with an imm32
        ];
        for (code, offset) in cases {
            assert_eq!(status(&[&[0x53], code, &[0x5b, 0xc3]].concat()), Some(offset), "{code:02x?}");
        }
    }

    #[test]
    fn what_is_no_comparison_of_a_field_with_one_is_none() {
        let cases: [&[u8]; 9] = [
            &[0x83, 0x7b, 0x68, 0x00],             // with 0
            &[0x83, 0x7c, 0x24, 0x68, 0x01],       // on the stack
            &[0x83, 0x3d, 0x00, 0x10, 0, 0, 0x01], // a global: [rip+…]
            &[0x83, 0x3b, 0x01],                   // no displacement
            &[0x80, 0x7b, 0x68, 0x01],             // a byte
            &[0x66, 0x83, 0x7b, 0x68, 0x01],       // two bytes
            &[0x83, 0x7b, 0x98, 0x01],             // a negative displacement
            &[0x83, 0x7c, 0x8b, 0x68, 0x01],       // an array's element
            &[0x8b, 0x4f, 0x68, 0x83, 0xf8, 0x01], // another register was loaded
        ];
        for code in cases {
            assert_eq!(status(code), None, "{code:02x?}");
        }
    }

    #[test]
    fn two_candidates_are_none_and_one_twice_is_one() {
        let (one, other) = ([0x83, 0x7b, 0x68, 0x01], [0x83, 0x7b, 0x6c, 0x01]);
        assert_eq!(status(&[one, other].concat()), None);
        assert_eq!(status(&[one, one].concat()), Some(0x68));
    }

    #[test]
    fn code_that_makes_no_sense_is_not_believed() {
        assert_eq!(status(&[0x83, 0x7b, 0x68, 0x01, 0x06]), None);
        assert_eq!(status(&[0x83, 0x7b, 0x68]), None);
        assert_eq!(status(&vec![0x90; MAX_CODE + 1]), None);
    }
}
