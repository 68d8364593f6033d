//! `dislodge anonymize`.

use std::{
    fs::File,
    io::BufReader,
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::Args;
use dislodge::record::{
    anonymize::anonymize,
    folder::write_whole,
    reader::{End, Reader},
};

use super::fail;

#[derive(Args, Debug)]
pub(super) struct Anonymize {
    /// The recording
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Where to write the one without names
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
}

impl Anonymize {
    pub(super) fn run(self) -> ExitCode {
        match without_names(&self.file, &self.output) {
            Ok(end) => {
                if end != End::Whole {
                    eprintln!("dislodge: {} {}", self.file.display(), super::replay::in_words(end));
                }
                println!("{}", self.output.display());
                ExitCode::SUCCESS
            }
            Err(error) => fail(error),
        }
    }
}

/// Writes a recording without names.
pub(super) fn without_names(file: &Path, output: &Path) -> Result<End, String> {
    let error = |error: &dyn std::fmt::Display| format!("{}: {error}", file.display());
    let input = File::open(file).map_err(|source| error(&source))?;
    let reader = Reader::open(BufReader::new(input)).map_err(|source| error(&source))?;
    let mut end = End::Whole;
    write_whole(output, |out| {
        end = anonymize(reader, out).map_err(std::io::Error::other)?;
        Ok(())
    })
    .map_err(|source| format!("{}: {source}", output.display()))?;
    Ok(end)
}
