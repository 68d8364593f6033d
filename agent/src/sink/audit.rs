//! The audit log: one JSON line for every alert that fires or ends and for every step of a remediation.
//!
//! It is written before the agent acts: what cannot be recorded is not done, so every error is returned.

use std::{
    fs::{File, OpenOptions},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::Arc,
};

use serde::Serialize;

use crate::{
    diagnose::{Cause, Quiescence},
    event::{Rid, Room},
    request::RequestKey,
    rule::{Mode, alert::AlertState},
    verdict::{ServerIdentity, Verdict, shared},
};

/// Version of the records' layout. Fields may be added within a version.
pub const SCHEMA: u32 = 1;

/// One record.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "record", rename_all = "snake_case")]
pub enum AuditRecord {
    /// An alert fires or has ended.
    Verdict(#[serde(serialize_with = "shared")] Arc<Verdict>),
    /// A step of a remediation.
    Remediation(Box<Remediation>),
}

/// A step of a remediation.
#[derive(Clone, Debug, Serialize)]
pub struct Remediation {
    /// The rule that asked for it.
    #[serde(serialize_with = "shared")]
    pub rule: Arc<str>,
    /// The request.
    pub request: RequestKey,
    /// SGLang's id of the request, where known.
    pub rid: Option<Rid>,
    /// Its room.
    pub room: Room,
    /// Its server.
    #[serde(serialize_with = "shared")]
    pub server: Arc<ServerIdentity>,
    /// Why it waits.
    pub cause: Cause,
    /// Whether a write may be under way.
    pub quiescence: Quiescence,
    /// The mode that applied: the lower one of the rule's and the agent's.
    pub mode: Mode,
    /// What was decided or seen.
    pub step: RemediationStep,
}

/// What was decided about a stuck request, or seen after it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "step", rename_all = "snake_case")]
pub enum RemediationStep {
    /// A guard said no.
    Refused {
        /// Which one.
        guard: String,
        /// What it saw.
        detail: String,
    },
    /// Every guard said yes, and the mode is dry-run.
    WouldAct {
        /// How the failure would have been told to the sender.
        flag: String,
    },
    /// Every guard said yes: the hook is being asked. Recorded before it is.
    Acting {
        /// How the failure is told to the sender.
        flag: String,
    },
    /// The hook refused or did not answer.
    Failed {
        /// Its reason.
        reason: String,
    },
    /// The hook did it.
    Acted,
    /// The request left the queue as failed.
    Effective,
    /// The request is still there.
    NoEffect,
    /// The request had failed and then went on.
    Resurrected,
}

/// Why a record could not be written.
#[derive(Debug, thiserror::Error)]
pub enum AuditError {
    /// The file cannot be opened.
    #[error("the audit file {path} cannot be opened: {source}{hint}", path = path.display(), hint = hint(path, source))]
    Open {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// There is something else than a file.
    #[error("the audit file {path} is not a regular file; name one, or a new path", path = path.display())]
    NotAFile {
        /// The path.
        path: PathBuf,
    },
    /// The record cannot be written or is not known to be on disk.
    #[error("the audit file {path} cannot be written: {source}", path = path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
}

fn hint(path: &Path, error: &io::Error) -> String {
    match path.parent() {
        Some(parent) if error.kind() == io::ErrorKind::NotFound => format!("; create the folder {}", parent.display()),
        _ => String::new(),
    }
}

#[derive(Serialize)]
struct Line<'a> {
    schema: u32,
    time: jiff::Timestamp,
    #[serde(flatten)]
    record: &'a AuditRecord,
}

/// An open audit log.
#[derive(Debug)]
pub struct Audit {
    path: PathBuf,
    file: File,
    errors: u64,
    torn: bool,
}

impl Audit {
    /// Opens the file at `path` for appending; creates it, readable by its owner only, when it does not exist.
    ///
    /// # Errors
    ///
    /// It cannot be opened, or is not a regular file.
    pub fn open(path: &Path) -> Result<Self, AuditError> {
        Ok(Self { path: path.to_owned(), file: open(path)?, errors: 0, torn: false })
    }

    /// Opens the file again, after it was rotated.
    ///
    /// # Errors
    ///
    /// Those of [`open`](Self::open); records go on to the old file then.
    pub fn reopen(&mut self) -> Result<(), AuditError> {
        self.file = open(&self.path)?;
        self.torn = false;
        Ok(())
    }

    /// Appends a record of what happened at `time`. A pending alert is not recorded. A remediation's record is on disk
    /// when this returns.
    ///
    /// # Errors
    ///
    /// The record cannot be written: nothing may be done then.
    pub fn record(&mut self, record: &AuditRecord, time: jiff::Timestamp) -> Result<(), AuditError> {
        if matches!(record, AuditRecord::Verdict(verdict) if verdict.state == AlertState::Pending) {
            return Ok(());
        }
        let written = self.append(&Line { schema: SCHEMA, time, record }).and_then(|()| match record {
            AuditRecord::Remediation(_) => self.file.sync_data(),
            AuditRecord::Verdict(_) => Ok(()),
        });
        written.map_err(|source| {
            self.errors += 1;
            AuditError::Write { path: self.path.clone(), source }
        })
    }

    /// Records that could not be written.
    pub fn errors(&self) -> u64 {
        self.errors
    }

    fn append(&mut self, line: &Line<'_>) -> io::Result<()> {
        let mut bytes = Vec::with_capacity(1_024);
        if self.torn {
            // A disk that was full may have taken half a line: the next one must not continue it.
            bytes.push(b'\n');
        }
        serde_json::to_writer(&mut bytes, line)?;
        bytes.push(b'\n');
        let written = self.file.write_all(&bytes);
        self.torn = written.is_err();
        written
    }
}

fn open(path: &Path) -> Result<File, AuditError> {
    let cannot = |source| AuditError::Open { path: path.to_owned(), source };
    // Without O_NONBLOCK, opening a FIFO waits for its reader; regular files do not know the flag.
    let flags = rustix::fs::OFlags::NONBLOCK | rustix::fs::OFlags::NOFOLLOW;
    let file = OpenOptions::new()
        .append(true)
        .create(true)
        .mode(0o600)
        .custom_flags(flags.bits().cast_signed())
        .open(path)
        .map_err(cannot)?;
    if !file.metadata().map_err(cannot)?.is_file() {
        return Err(AuditError::NotAFile { path: path.to_owned() });
    }
    Ok(file)
}
