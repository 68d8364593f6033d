//! The folder of dumps: who owns it, writing into it, and not letting it grow.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read as _, Seek as _, Write as _},
    os::unix::fs::{MetadataExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
};

use rustix::fs::{FlockOperation, flock};

use super::recorder::Recording;

/// The file that says whose the folder is: locked by an agent while it runs, with its pid in it.
const OWNER: &str = "agent.pid";
/// How the names of dumps begin and end.
const PREFIX: &str = "dislodge-";
const SUFFIX: &str = ".cborseq";

/// Why a folder cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FolderError {
    /// It is not there, or not ours.
    #[error("the folder of recordings {folder} cannot be used: {source}; make it, writable for the agent alone", folder = folder.display())]
    Open {
        /// Which.
        folder: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Another agent records there.
    #[error("another agent (pid {pid}) records in {folder}; give each its own", folder = folder.display())]
    Taken {
        /// Which.
        folder: PathBuf,
        /// Whose it is.
        pid: String,
    },
}

/// Why a dump was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// An alert fired.
    Alert,
    /// Somebody asked.
    Request,
}

impl Reason {
    /// Its name in file names and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Alert => "alert",
            Self::Request => "request",
        }
    }
}

/// An agent's folder of dumps, its own while this lives.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    _owner: File,
}

impl Folder {
    /// Takes the folder for this process.
    ///
    /// # Errors
    ///
    /// It cannot be written, or another agent has it.
    pub fn take(path: &Path) -> Result<Self, FolderError> {
        let error = |source| FolderError::Open { folder: path.to_owned(), source };
        let mut options = OpenOptions::new();
        let options = options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let mut owner = options.custom_flags(libc::O_NOFOLLOW).open(path.join(OWNER)).map_err(error)?;
        if let Err(errno) = flock(&owner, FlockOperation::NonBlockingLockExclusive) {
            if errno != rustix::io::Errno::WOULDBLOCK {
                return Err(error(errno.into()));
            }
            let pid = running(path).map_or_else(|| "?".to_owned(), |pid| pid.to_string());
            return Err(FolderError::Taken { folder: path.to_owned(), pid });
        }
        owner.set_len(0).and_then(|()| owner.rewind()).map_err(error)?;
        writeln!(owner, "{}", std::process::id()).map_err(error)?;
        Ok(Self { path: path.to_owned(), _owner: owner })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// The agent that has a folder, if one has.
pub fn running(folder: &Path) -> Option<u32> {
    running_if(folder, |_| true)
}

/// The same, only where it is an agent of this very user: for somebody to whom another one named the folder.
pub fn running_as_me(folder: &Path) -> Option<u32> {
    let me = rustix::process::geteuid().as_raw();
    running_if(folder, |owner| owner.uid() == me && owner.mode() & 0o022 == 0)
}

fn running_if(folder: &Path, is_trusted: impl Fn(&fs::Metadata) -> bool) -> Option<u32> {
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW).open(folder.join(OWNER)).ok()?;
    file.metadata().ok().filter(is_trusted)?;
    // Whoever gets the lock knows that nobody has it.
    flock(&file, FlockOperation::NonBlockingLockShared).is_err().then_some(())?;
    let mut text = String::new();
    file.take(16).read_to_string(&mut text).ok()?;
    text.trim().parse().ok()
}

/// Writes a dump into `folder`: whole or not at all, readable for its owner only; then removes the oldest ones beyond
/// `most`.
///
/// # Errors
///
/// There is no room, or the folder is gone: nothing is left behind.
pub fn dump(folder: &Path, recording: &Recording, reason: Reason, most: usize) -> io::Result<PathBuf> {
    let time = recording.header.clock().timestamp(recording.header.at);
    let time = time.strftime("%Y%m%dT%H%M%S.%3fZ");
    let path = folder.join(format!("{PREFIX}{time}-{}{SUFFIX}", reason.name()));
    write_whole(&path, |out| recording.write(out))?;
    for old in dumps(folder)?.iter().rev().skip(most) {
        // Somebody else may have removed it.
        let _ = fs::remove_file(old);
    }
    Ok(path)
}

/// Writes a file through a temporary one beside it: mode 0600, on disk before it has its name.
///
/// # Errors
///
/// Those of `write` and of the file system.
pub fn write_whole(path: &Path, write: impl FnOnce(&mut io::BufWriter<&File>) -> io::Result<()>) -> io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let file = tempfile::Builder::new().prefix(".dislodge-").tempfile_in(folder)?;
    let mut out = io::BufWriter::new(file.as_file());
    write(&mut out)?;
    out.flush()?;
    drop(out);
    file.as_file().sync_all()?;
    file.persist(path).map_err(|error| error.error)?;
    Ok(())
}

/// The dumps of a folder, the oldest first.
///
/// # Errors
///
/// It cannot be read.
pub fn dumps(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let is_dump = |name: &str| name.starts_with(PREFIX) && name.ends_with(SUFFIX);
    let mut dumps: Vec<PathBuf> = fs::read_dir(folder)?
        .flatten()
        .filter(|entry| entry.file_name().to_str().is_some_and(is_dump))
        .map(|entry| entry.path())
        .collect();
    dumps.sort_unstable();
    Ok(dumps)
}
