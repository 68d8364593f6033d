//! Libraries of running processes: found, opened, and their functions resolved. Where a library's content does not matter,
//! the hook's small marker library stands in under another name; NIXL's and Mooncake's are those of the released wheels.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "support/support.rs"]
mod support;

use std::{
    ffi::OsStr,
    fs,
    io::{BufRead as _, BufReader},
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use dislodge::target::{
    code::{self, Prologue},
    library::{self, LibraryRole, MappedLibrary},
    mapping::{OpenError, Presence},
    symbol::{SymbolPattern, SymbolTable},
};
use support::{environment::python, native, needs, repository};
use tempfile::TempDir;

/// Set in a test process that was started anew without the rights for `/proc/PID/map_files`.
const WITHOUT_RIGHTS: &str = "DISLODGE_TEST_WITHOUT_RIGHTS";
/// Loads what its arguments name, says so, and waits.
const LOADER: &str = "import ctypes, sys
libraries = [ctypes.CDLL(path) for path in sys.argv[1:]]
print('ready', flush=True)
sys.stdin.read()";

/// A process that has loaded libraries; ends with its test.
struct Loader(Child);

impl Drop for Loader {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Loader {
    fn start(libraries: &[&Path]) -> Self {
        let mut command = Command::new(python().unwrap());
        command.args(["-c", LOADER]).args(libraries);
        Self::spawn(command)
    }

    fn spawn(mut command: Command) -> Self {
        let mut process = Self(command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap());
        let mut line = String::new();
        BufReader::new(process.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        process
    }

    fn libraries(&self) -> Vec<MappedLibrary> {
        let found = library::find(self.0.id()).unwrap();
        assert!(found.unreachable.is_empty(), "{found:?}");
        found.mapped
    }

    fn only(&self) -> MappedLibrary {
        let found = self.libraries();
        assert_eq!(found.len(), 1, "{found:?}");
        found.into_iter().next().unwrap()
    }
}

fn marker() -> PathBuf {
    repository().join("hook/dislodge_hook/marker/x86_64.so")
}

/// A copy of the marker library.
fn stand_in(folder: &TempDir, name: &str) -> PathBuf {
    let path = folder.path().join(name);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::copy(marker(), &path).unwrap();
    path
}

fn folder() -> TempDir {
    tempfile::tempdir().unwrap()
}

fn inode(path: &Path) -> u64 {
    fs::metadata(path).unwrap().ino()
}

/// The rights for other processes' mappings, which root has.
fn rights() -> Result<(), String> {
    let own = fs::read_dir("/proc/self/map_files").map_err(|error| error.to_string())?;
    let entry = own.flatten().next().ok_or("no mappings")?;
    fs::metadata(entry.path()).map(|_| ()).map_err(|error| format!("/proc/PID/map_files: {error}"))
}

#[test]
fn a_library_in_a_hidden_folder_is_found_with_its_code() {
    let Some(()) = needs(rights()) else { return };
    let folder = folder();
    let path = stand_in(&folder, ".nixl_cu12.mesonpy.libs/libnixl.so");
    let found = Loader::start(&[&path]).only();
    assert_eq!((found.role, found.name.as_str(), found.presence), (LibraryRole::Nixl, "libnixl.so", Presence::Present));
    assert_eq!(found.file.inode, inode(&path));
    let table = SymbolTable::read(&path).unwrap();
    let mark = table.resolve(&SymbolPattern::Exact("dislodge_mark")).remove(0);
    let code = found.code.iter().find(|range| range.file_offset <= mark.file_offset).unwrap();
    let address = code.start + mark.file_offset - code.file_offset;
    assert_eq!(code.file_offset_of(address), Some(mark.file_offset));
}

#[test]
fn a_library_replaced_under_a_running_process_is_the_old_one_through_its_mapping() {
    let Some(()) = needs(rights()) else { return };
    let folder = folder();
    let path = stand_in(&folder, "libnixl.so");
    let old = inode(&path);
    let loader = Loader::start(&[&path]);
    fs::write(folder.path().join("new"), "not the library that runs").unwrap();
    fs::rename(folder.path().join("new"), &path).unwrap();
    let found = loader.only();
    assert_eq!((found.role, found.presence, found.file.inode), (LibraryRole::Nixl, Presence::Deleted, old));
    assert_eq!(fs::read(&found.path).unwrap(), fs::read(marker()).unwrap());
    assert_eq!(SymbolTable::read(&found.path).unwrap().resolve(&SymbolPattern::Exact("dislodge_mark")).len(), 1);
}

#[test]
fn two_copies_are_two_libraries_and_a_second_name_of_one_is_none() {
    let Some(()) = needs(rights()) else { return };
    let folder = folder();
    let one = stand_in(&folder, "a/libucp.so.0.0.0");
    let other = stand_in(&folder, "b/libucp-0a1b2c3d.so.0.0.0");
    let linked = folder.path().join("libucp.so.0");
    fs::hard_link(&one, &linked).unwrap();
    let loader = Loader::start(&[&one, &other, &linked]);
    let mut found: Vec<u64> = loader.libraries().iter().map(|library| library.file.inode).collect();
    found.sort_unstable();
    let mut expected = [inode(&one), inode(&other)];
    expected.sort_unstable();
    assert_eq!(found, expected);
}

#[test]
fn a_file_system_that_only_the_process_sees_is_no_obstacle() {
    let Some(()) = needs(rights()) else { return };
    let folder = folder();
    let mut command = Command::new("unshare");
    let script =
        r#"mount -t tmpfs none "$1" && cp "$2" "$1/libibverbs.so.1" && exec "$3" -c "$4" "$1/libibverbs.so.1""#;
    command.args(["--mount", "sh", "-c", script, "sh"]).arg(folder.path()).arg(marker());
    command.arg(python().unwrap()).arg(LOADER);
    let loader = Loader::spawn(command);
    let found = loader.only();
    assert!(!folder.path().join("libibverbs.so.1").exists(), "it is there for the process alone");
    assert_eq!((found.role, found.presence), (LibraryRole::Ibverbs, Presence::Present));
    assert_eq!(fs::read(&found.path).unwrap(), fs::read(marker()).unwrap());
}

#[test]
fn a_name_cannot_pretend() {
    let Some(()) = needs(rights()) else { return };
    let folder = folder();
    let newline = stand_in(&folder, "a\nb/libnixl.so");
    let escape = stand_in(&folder, "a\\012b/libuct.so.0");
    let deleted = stand_in(&folder, "libucp.so.0 (deleted)");
    let line = stand_in(&folder, "x 7f00-7f01 r-xp 0 0:0 1 /libibverbs.so.1\n/c/other.so");
    let loader = Loader::start(&[&newline, &escape, &deleted, &line]);
    let mut found = loader.libraries();
    found.sort_by_key(|library| library.role);
    let seen: Vec<_> = found.iter().map(|library| (library.role, library.presence, library.file.inode)).collect();
    assert_eq!(
        seen,
        [
            (LibraryRole::Nixl, Presence::Present, inode(&newline)),
            (LibraryRole::Ucp, Presence::Present, inode(&deleted)),
            (LibraryRole::Uct, Presence::Present, inode(&escape)),
        ]
    );
    fs::remove_file(&newline).unwrap();
    assert_eq!(loader.libraries().iter().filter(|library| library.presence == Presence::Deleted).count(), 1);
}

/// What is done where the rights for `/proc/PID/map_files` are missing.
fn look_without_rights() {
    let folder = folder();
    let path = stand_in(&folder, "a\nb/libnixl.so");
    let loader = Loader::start(&[&path]);
    let found = loader.only();
    assert!(found.path.starts_with(format!("/proc/{}/root", loader.0.id())), "{found:?}");
    assert_eq!(fs::read(&found.path).unwrap(), fs::read(marker()).unwrap());
    fs::remove_file(&path).unwrap();
    let gone = library::find(loader.0.id()).unwrap();
    assert!(matches!(gone.unreachable[0].why, OpenError::Unreachable { .. }), "{gone:?}");
    fs::copy(marker(), &path).unwrap();
    let replaced = library::find(loader.0.id()).unwrap();
    assert!(
        matches!(replaced.unreachable[0].why, OpenError::Replaced(_)) && replaced.mapped.is_empty(),
        "{replaced:?}"
    );
    assert!(replaced.unreachable[0].why.to_string().contains("CAP_CHECKPOINT_RESTORE"));
}

#[test]
fn without_the_rights_for_mappings_a_path_is_taken_only_where_it_leads_to_the_same_file() {
    if std::env::var_os(WITHOUT_RIGHTS).is_some() {
        return look_without_rights();
    }
    let Some(()) = needs(rights()) else { return };
    let done = Command::new("setpriv")
        .arg("--bounding-set=-sys_admin,-checkpoint_restore")
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "without_the_rights_for_mappings_a_path_is_taken_only_where_it_leads_to_the_same_file"])
        .env(WITHOUT_RIGHTS, "1")
        .output()
        .unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stdout));
    assert!(String::from_utf8_lossy(&done.stdout).contains("1 passed"));
}

/// Unpacked wheels of an engine: (release, folder).
fn wheels(engine: &str) -> Result<Vec<(String, PathBuf)>, String> {
    let native = native::native(engine)?;
    let of = |name: &str| (name.replacen(&format!("{engine}-"), "", 1), native.release(name).folder);
    Ok(native::releases(engine).into_iter().map(of).collect())
}

/// Every file below a folder that has a role.
fn libraries_below(folder: &Path) -> Vec<(LibraryRole, PathBuf)> {
    let (mut found, mut pending) = (Vec::new(), vec![folder.to_owned()]);
    while let Some(folder) = pending.pop() {
        for path in fs::read_dir(&folder).unwrap().flatten().map(|entry| entry.path()) {
            let name = |path: &Path| path.file_name().map(OsStr::as_encoded_bytes).unwrap_or_default().to_vec();
            if path.is_dir() {
                pending.push(path);
            } else if let Some(role) = LibraryRole::of(&name(&folder), &name(&path)) {
                found.push((role, path));
            }
        }
    }
    found.sort();
    found
}

/// Where `nixlXferReqH` has its status, by release: what `releaseXferReq` compares and `getXferStatus` writes, as
/// disassembled by another tool.
fn status_offset(release: &str) -> u32 {
    let mut numbers = release.split('.').map(|number| number.parse().unwrap_or(0));
    match (numbers.next().unwrap(), numbers.next().unwrap()) {
        (0, _) | (1, 0..=1) => 0x68,
        (1, 2..=3) => 0xa8,
        (1, 4) => 0xb0,
        _ => 0xb8,
    }
}

#[test]
fn of_every_nixl_the_agents_methods_are_found_and_the_status_decoded() {
    let Some(wheels) = needs(wheels("nixl")) else { return };
    for (release, folder) in wheels {
        let (_, path) = libraries_below(&folder).into_iter().find(|(role, _)| *role == LibraryRole::Nixl).unwrap();
        let table = SymbolTable::read(&path).unwrap();
        for prefix in
            ["13createXferReq", "11makeXferReq", "11postXferReq", "13getXferStatus", "14releaseXferReq", "8genNotif"]
        {
            let pattern: &'static str = format!("_ZNK9nixlAgent{prefix}E").leak();
            let found = table.resolve(&SymbolPattern::Prefix(pattern));
            assert!(!found.is_empty(), "{release}: {pattern}");
            for symbol in found {
                let entry = code::entry_point(table.architecture(), &table.code(&symbol, code::ENTRY_BYTES).unwrap());
                assert!(entry.prologue.is_emulated(), "{release}: {} begins with {entry:?}", symbol.name);
            }
        }
        let release_request = SymbolPattern::Exact("_ZNK9nixlAgent14releaseXferReqEP12nixlXferReqH");
        let symbol = table.resolve(&release_request).remove(0);
        let code = table.code(&symbol, symbol.size as usize).unwrap();
        let offset = code::status_offset(table.architecture(), &code);
        println!("nixl {release}: {} functions, build id {:?}, status at {offset:?}", table.len(), table.build_id());
        assert_eq!(offset, Some(status_offset(&release)), "{release}");
    }
}

#[test]
fn of_every_mooncake_the_engines_methods_are_found_behind_endbr64() {
    const METHODS: [&str; 4] = [
        "_ZN8mooncake14MultiTransport15allocateBatchIDEm",
        "_ZN8mooncake14MultiTransport22getBatchTransferStatusEmRNS_9Transport14TransferStatusE",
        "_ZN8mooncake14MultiTransport11freeBatchIDEm",
        "_ZN8mooncake11RdmaContext4pollEiP6ibv_wci",
    ];
    let Some(wheels) = needs(wheels("mooncake")) else { return };
    for (release, folder) in wheels {
        let engines = libraries_below(&folder);
        assert_eq!(engines.iter().filter(|(role, _)| *role == LibraryRole::MooncakeEngine).count(), 2, "{engines:?}");
        for (_, path) in engines {
            let table = SymbolTable::read(&path).unwrap();
            let submit = "_ZN8mooncake14MultiTransport14submitTransferEm";
            assert!(!table.resolve(&SymbolPattern::Prefix(submit)).is_empty(), "{}", path.display());
            for method in METHODS {
                let symbol = table.resolve(&SymbolPattern::Exact(method)).remove(0);
                let bytes = table.code(&symbol, code::ENTRY_BYTES).unwrap();
                let entry = code::entry_point(table.architecture(), &bytes);
                println!("mooncake {release} {:?}: {method}: {entry:?}", path.file_name().unwrap());
                let lands_on = bytes[entry.skip as usize];
                assert_eq!(entry.prologue == Prologue::Push, matches!(lands_on, 0x41 | 0x50..=0x57), "{bytes:02x?}");
                assert!(entry.skip == 0 || entry.prologue.is_emulated());
            }
        }
    }
}

#[test]
fn stripped_ucx_libraries_have_their_exported_functions() {
    const FUNCTIONS: [(LibraryRole, &str); 4] = [
        (LibraryRole::Ucp, "ucp_ep_flush_completion"),
        (LibraryRole::Uct, "uct_iface_handle_ep_err"),
        (LibraryRole::UctIb, "uct_rc_ep_send_op_completion_handler"),
        (LibraryRole::UctIbMlx5, "uct_rc_mlx5_iface_handle_failure"),
    ];
    let Some(wheels) = needs(wheels("nixl")) else { return };
    for (release, folder) in wheels {
        for (role, path) in libraries_below(&folder) {
            let table = SymbolTable::read(&path).unwrap();
            for (_, function) in FUNCTIONS.iter().filter(|(of, _)| *of == role) {
                let found = table.resolve(&SymbolPattern::Exact(function)).len();
                assert_eq!(found, 1, "{release}: {function} in {}", path.display());
            }
        }
    }
}

#[test]
fn the_libraries_of_a_process_that_loaded_nixl_are_the_wheels() {
    let (Some(()), Some(wheels)) = (needs(rights()), needs(wheels("nixl"))) else { return };
    let Some((_, folder)) = wheels.into_iter().find(|(release, _)| release == "1.5.1") else {
        needs::<()>(Err("nixl 1.5.1 is not among the wheels".to_owned()));
        return;
    };
    let (_, path) = libraries_below(&folder).into_iter().find(|(role, _)| *role == LibraryRole::Nixl).unwrap();
    let found = Loader::start(&[&path]).only();
    assert_eq!((found.role, found.file.inode), (LibraryRole::Nixl, inode(&path)));
    assert_eq!(found.build_id.as_deref(), SymbolTable::read(&path).unwrap().build_id());
    assert!(found.build_id.is_some_and(|id| id.len() == 40));
}
