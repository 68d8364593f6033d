//! Where transfers stand, read in the server's own memory from outside. Everything there may be wrong: what does not
//! look as it should is not believed.

use std::{fs::File, io, os::unix::fs::FileExt as _};

use zerocopy::FromBytes as _;

use crate::event::native::TransferStatus;

/// Tasks of a batch that are read at most: SGLang's batches have one per layer and run of pages.
const MAX_TASKS: usize = 16_384;
/// Sizes of Mooncake's `TransferTask`, in bytes: 88 in 0.3.7, 112 in 0.3.13.
const TASK_SIZES: std::ops::RangeInclusive<usize> = 88..=352;
/// NIXL's statuses (`nixl_types.h`); anything else was read from a handle that is none any more.
const NIXL_STATUSES: std::ops::RangeInclusive<i32> = -12..=1;
/// Mooncake's `TransferStatusEnum::FAILED`.
const FAILED: i32 = 6;

/// The memory of one process, as it was when it was opened: another process of the same number, or another program in
/// it, is not read.
#[derive(Debug)]
pub struct EngineMemory(File);

/// Where a batch stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Terminal only when every task is complete.
    pub status: TransferStatus,
    /// Bytes that have moved.
    pub moved: u64,
}

impl EngineMemory {
    /// Opens the memory of a process: needs ptrace permission.
    pub fn open(pid: u32) -> io::Result<Self> {
        File::open(format!("/proc/{pid}/mem")).map(Self)
    }

    /// The status of a NIXL handle whose status is at `offset`; nothing when what is there is no status.
    pub fn nixl_status(&self, handle: u64, offset: u32) -> Option<TransferStatus> {
        let mut bytes = [0; 4];
        self.read(handle.checked_add(offset.into())?, &mut bytes)?;
        let code = i32::from_ne_bytes(bytes);
        NIXL_STATUSES.contains(&code).then(|| TransferStatus::of_nixl(code))
    }

    /// Where a Mooncake batch stands: `BatchDesc {id, batch_size, std::vector<TransferTask> task_list, …}`
    /// (`transport/transport.h`, 0.3.7 to 0.3.13). Nothing when that is not what is there.
    pub fn mooncake_batch(&self, batch: u64) -> Option<Batch> {
        let mut header = [0; 32];
        self.read(batch, &mut header)?;
        let [id, capacity, begin, end] = <[u64; 4]>::read_from_bytes(&header).ok()?;
        let (capacity, bytes) = (usize::try_from(capacity).ok()?, usize::try_from(end.checked_sub(begin)?).ok()?);
        if id != batch || capacity == 0 || capacity > MAX_TASKS || !bytes.is_multiple_of(capacity) {
            return None;
        }
        let size = bytes / capacity;
        if !TASK_SIZES.contains(&size) || !size.is_multiple_of(8) {
            return None;
        }
        let mut tasks = vec![0; bytes];
        self.read(begin, &mut tasks)?;
        batch_of_tasks(tasks.chunks_exact(size))
    }

    fn read(&self, address: u64, into: &mut [u8]) -> Option<()> {
        self.0.read_exact_at(into, address).ok()
    }
}

/// Each task begins with the numbers of its slices, of those that are done, of those that failed, and its moved bytes.
fn batch_of_tasks<'a>(tasks: impl Iterator<Item = &'a [u8]>) -> Option<Batch> {
    let (mut moved, mut incomplete, mut failed) = (0u64, false, false);
    for task in tasks {
        let ([slices, done, lost, bytes], _) = <[u64; 4]>::read_from_prefix(task).ok()?;
        if done.checked_add(lost)? > slices {
            return None;
        }
        incomplete |= slices == 0 || done + lost < slices;
        failed |= lost > 0;
        moved = moved.saturating_add(bytes);
    }
    let status = match (incomplete, failed) {
        (true, _) => TransferStatus::InProgress,
        (false, true) => TransferStatus::Failed { code: FAILED },
        (false, false) => TransferStatus::Done,
    };
    Some(Batch { status, moved })
}

#[cfg(test)]
mod tests {
    use zerocopy::IntoBytes as _;

    use super::*;

    fn own() -> EngineMemory {
        EngineMemory::open(std::process::id()).unwrap()
    }

    /// A batch in this test's memory: its header, and tasks of 96 bytes.
    struct Fake {
        header: Box<[u64; 5]>,
        _tasks: Vec<[u64; 12]>,
    }

    impl Fake {
        fn of(tasks: &[[u64; 4]]) -> Self {
            let tasks: Vec<[u64; 12]> =
                tasks.iter().map(|task| std::array::from_fn(|n| task.get(n).copied().unwrap_or_default())).collect();
            let begin = tasks.as_ptr() as u64;
            let end = begin + tasks.as_bytes().len() as u64;
            let mut header = Box::new([0, tasks.len() as u64, begin, end, end]);
            header[0] = std::ptr::from_ref(&*header) as u64;
            Self { header, _tasks: tasks }
        }

        fn address(&self) -> u64 {
            self.header[0]
        }
    }

    #[test]
    fn a_batch_is_over_only_when_every_task_is() {
        let status = |tasks: &[[u64; 4]]| own().mooncake_batch(Fake::of(tasks).address());
        let is = |status, moved| Some(Batch { status, moved });
        assert_eq!(status(&[[1, 1, 0, 8], [2, 2, 0, 8]]), is(TransferStatus::Done, 16));
        assert_eq!(status(&[[1, 1, 0, 8], [2, 1, 0, 4]]), is(TransferStatus::InProgress, 12));
        assert_eq!(status(&[[1, 0, 1, 0], [2, 1, 0, 4]]), is(TransferStatus::InProgress, 4));
        assert_eq!(status(&[[1, 0, 1, 0], [2, 2, 0, 8]]), is(TransferStatus::Failed { code: 6 }, 8));
        assert_eq!(status(&[[0, 0, 0, 0]]), is(TransferStatus::InProgress, 0), "not cut into slices yet");
    }

    #[test]
    fn what_does_not_look_like_a_batch_is_not_believed() {
        let mut other_id = Fake::of(&[[1, 1, 0, 8]]);
        let address = other_id.address();
        other_id.header[0] = 7;
        assert_eq!(own().mooncake_batch(address), None);
        assert_eq!(own().mooncake_batch(Fake::of(&[[1, 2, 0, 8]]).address()), None, "more done than there is");
        assert_eq!(own().mooncake_batch(Fake::of(&[[1, u64::MAX, 2, 8]]).address()), None);
        for (field, value) in [(1, 0), (1, 3), (1, u64::MAX), (2, 1), (2, u64::MAX), (3, 0), (3, u64::MAX)] {
            let mut fake = Fake::of(&[[1, 1, 0, 8], [1, 1, 0, 8]]);
            fake.header[field] = value;
            assert_eq!(own().mooncake_batch(fake.address()), None, "field {field} is {value}");
        }
        for address in [0, 1, u64::MAX, u64::MAX - 31] {
            assert_eq!(own().mooncake_batch(address), None);
            assert_eq!(own().nixl_status(address, 184), None);
        }
    }

    #[test]
    fn a_status_of_nixl_is_read_at_its_offset_and_nothing_else_is_taken_for_one() {
        let handle: [i32; 4] = [1, 0, -10, 4711];
        let address = handle.as_ptr() as u64;
        let status = |offset| own().nixl_status(address, offset);
        assert_eq!(status(0), Some(TransferStatus::InProgress));
        assert_eq!(status(4), Some(TransferStatus::Done));
        assert_eq!(status(8), Some(TransferStatus::Failed { code: -10 }));
        assert_eq!(status(12), None);
    }
}
