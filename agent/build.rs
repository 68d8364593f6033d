//! Puts the compiled BPF object, the hook's package and the demo's server where the agent can include them.
//!
//! The object is committed beside its sources with a digest of them, so that a plain stable toolchain can build the
//! agent. Where the sources have changed, it is compiled afresh if the BPF toolchain is there.

use std::{
    env,
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail};
use sha2::{Digest as _, Sha256};

fn main() -> Result<()> {
    let root = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?).join("..").canonicalize()?;
    let out = PathBuf::from(env::var("OUT_DIR")?);
    bpf_object(&root.join("ebpf"), &out)?;
    files(&root, &["hook/dislodge_hook", "hook/dislodge_hook-0.1.0.dist-info"], &out.join("hook_files.rs"))?;
    files(&root, &["agent/demo"], &out.join("demo_files.rs"))
}

fn bpf_object(ebpf: &Path, out: &Path) -> Result<()> {
    let object = ebpf.join("dislodge.bpf.o");
    for path in ["build", "Cargo.toml", "src", "dislodge.bpf.o", "dislodge.bpf.sha256"] {
        println!("cargo::rerun-if-changed={}", ebpf.join(path).display());
    }
    let committed = fs::read_to_string(ebpf.join("dislodge.bpf.sha256")).unwrap_or_default();
    if committed.trim() != digest(ebpf)? {
        // Cargo's variables for this build name another compiler and other flags than the nested build needs.
        let kept = env::vars_os().filter(|(name, _)| {
            ["PATH", "HOME", "CARGO_HOME", "LD_LIBRARY_PATH", "BPF_RUSTC", "BPF_CARGO"].iter().any(|kept| name == kept)
        });
        let build = Command::new(ebpf.join("build")).env_clear().envs(kept).status();
        if !build.is_ok_and(|status| status.success()) {
            bail!(
                "ebpf/dislodge.bpf.o was not compiled from the sources in ebpf/src, and could not be compiled here: \
                 run `ebpf/build` (it says what it needs) and commit the object with its digest"
            );
        }
    }
    fs::copy(&object, out.join("dislodge.bpf.o")).with_context(|| format!("copying {}", object.display()))?;
    Ok(())
}

/// The digest that `ebpf/build` writes.
fn digest(ebpf: &Path) -> Result<String> {
    let mut sources = vec![ebpf.join("build"), ebpf.join("Cargo.toml")];
    let mut modules: Vec<_> = fs::read_dir(ebpf.join("src"))?.collect::<Result<_, _>>()?;
    modules.sort_by_key(fs::DirEntry::file_name);
    sources.extend(modules.iter().map(fs::DirEntry::path).filter(|path| path.extension().is_some_and(|e| e == "rs")));
    let mut hasher = Sha256::new();
    for source in sources {
        hasher.update(fs::read(&source).with_context(|| format!("reading {}", source.display()))?);
    }
    Ok(hasher.finalize().iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    }))
}

/// Writes a Rust array of (relative path, content) for every file under `folders`.
fn files(root: &Path, folders: &[&str], target: &Path) -> Result<()> {
    let mut list = String::from("[\n");
    for folder in folders {
        let folder = root.join(folder);
        println!("cargo::rerun-if-changed={}", folder.display());
        let base = folder.parent().context("a folder has a parent")?.to_owned();
        let mut pending = vec![folder];
        while let Some(folder) = pending.pop() {
            let mut entries: Vec<_> = fs::read_dir(&folder)
                .with_context(|| format!("reading {}", folder.display()))?
                .collect::<Result<_, _>>()?;
            entries.sort_by_key(fs::DirEntry::file_name);
            for path in entries.iter().map(fs::DirEntry::path) {
                if path.is_dir() {
                    if path.file_name().is_some_and(|name| name != "__pycache__") {
                        pending.push(path);
                    }
                } else {
                    let name = path.strip_prefix(&base)?;
                    writeln!(list, "    ({name:?}, include_bytes!({path:?}).as_slice()),")?;
                }
            }
        }
    }
    list.push_str("]\n");
    fs::write(target, list).with_context(|| format!("writing {}", target.display()))
}
