//! Which libraries of the transfer path a process has loaded: NIXL, UCX, Mooncake's engine, libibverbs and its providers.

use std::path::PathBuf;

use serde::Serialize;

use super::{
    mapping::{self, FileId, MappedFile, Mapping, MappingError, OpenError, Presence},
    symbol,
};

/// Libraries of one process that are looked at: a server has some ten.
const MAX_LIBRARIES: usize = 64;

/// What a library does on the way of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LibraryRole {
    /// libnixl: nixlAgent.
    Nixl,
    /// libplugin_UCX: NIXL's UCX backend.
    NixlUcxPlugin,
    /// libucp: UCX's protocols.
    Ucp,
    /// libuct: UCX's transports.
    Uct,
    /// libuct_ib: UCX's RDMA transports.
    UctIb,
    /// libuct_ib_mlx5: those of Mellanox devices.
    UctIbMlx5,
    /// libibverbs.
    Ibverbs,
    /// A device's part of libibverbs: libmlx5, librxe-rdmav34 and so on.
    VerbsProvider,
    /// Mooncake's transfer engine: engine.so, and the copy of it in store.so.
    MooncakeEngine,
}

/// Every role, in the order of the data's way.
pub const ROLES: [LibraryRole; 9] = [
    LibraryRole::Nixl,
    LibraryRole::NixlUcxPlugin,
    LibraryRole::Ucp,
    LibraryRole::Uct,
    LibraryRole::UctIb,
    LibraryRole::UctIbMlx5,
    LibraryRole::Ibverbs,
    LibraryRole::VerbsProvider,
    LibraryRole::MooncakeEngine,
];

/// Stems of libraries with one role.
const STEMS: [(&str, LibraryRole); 7] = [
    ("libnixl", LibraryRole::Nixl),
    ("libplugin_UCX", LibraryRole::NixlUcxPlugin),
    ("libucp", LibraryRole::Ucp),
    ("libuct", LibraryRole::Uct),
    ("libuct_ib", LibraryRole::UctIb),
    ("libuct_ib_mlx5", LibraryRole::UctIbMlx5),
    ("libibverbs", LibraryRole::Ibverbs),
];

/// rdma-core's providers (its folder `providers`, v28 to v64). Those with an interface of their own are mapped as
/// `libmlx5.so.1.24.44.0`, the others as `librxe-rdmav34.so`.
const PROVIDERS: [&str; 19] = [
    "bnxt_re",
    "cxgb4",
    "efa",
    "erdma",
    "hfi1verbs",
    "hns",
    "i40iw",
    "ionic",
    "ipathverbs",
    "irdma",
    "mana",
    "mlx4",
    "mlx5",
    "mthca",
    "ocrdma",
    "qedr",
    "rxe",
    "siw",
    "vmw_pvrdma",
];

/// A library as one process has it loaded.
#[derive(Clone, Debug, Serialize)]
pub struct MappedLibrary {
    /// What it does.
    pub role: LibraryRole,
    /// Its file's name.
    pub name: String,
    /// Where to open it and where to put probes: `/proc/PID/map_files/…`, or its path in the process's root.
    pub path: PathBuf,
    /// Which file it is: two copies are two libraries.
    pub file: FileId,
    /// Whether the file is still where it was.
    pub presence: Presence,
    /// Its code in memory, by address.
    pub code: Vec<CodeRange>,
    /// The linker's fingerprint of it, in hexadecimal.
    pub build_id: Option<String>,
}

/// Where a piece of a library's code is in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct CodeRange {
    /// First address.
    pub start: u64,
    /// Address behind the last.
    pub end: u64,
    /// Where it begins in the file, in bytes.
    pub file_offset: u64,
}

impl CodeRange {
    /// Where in the file the code at an address is; nothing when the address is not in this range.
    pub fn file_offset_of(&self, address: u64) -> Option<u64> {
        let inside = address.checked_sub(self.start).filter(|_| address < self.end)?;
        self.file_offset.checked_add(inside)
    }
}

/// A library that is loaded but cannot be opened.
#[derive(Debug)]
pub struct Unreachable {
    /// What it does.
    pub role: LibraryRole,
    /// Its file's name.
    pub name: String,
    /// Why it cannot be opened, and what to do.
    pub why: OpenError,
}

/// What was found in a process.
#[derive(Debug, Default)]
pub struct Libraries {
    /// Libraries that probes can be put on, by first address.
    pub mapped: Vec<MappedLibrary>,
    /// Those that cannot be opened.
    pub unreachable: Vec<Unreachable>,
}

impl LibraryRole {
    /// Label value of metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Nixl => "nixl",
            Self::NixlUcxPlugin => "nixl_ucx_plugin",
            Self::Ucp => "ucp",
            Self::Uct => "uct",
            Self::UctIb => "uct_ib",
            Self::UctIbMlx5 => "uct_ib_mlx5",
            Self::Ibverbs => "ibverbs",
            Self::VerbsProvider => "verbs_provider",
            Self::MooncakeEngine => "mooncake_engine",
        }
    }

    /// The role of a file, by its name and its folder's.
    pub fn of(folder: &[u8], file_name: &[u8]) -> Option<Self> {
        let name = std::str::from_utf8(file_name).ok()?;
        if folder == b"mooncake" && is_mooncake_engine(name) {
            return Some(Self::MooncakeEngine);
        }
        let stem = library_stem(name)?;
        let known = STEMS.iter().find_map(|(known, role)| (*known == stem).then_some(*role));
        known.or_else(|| is_provider(stem).then_some(Self::VerbsProvider))
    }
}

/// What stands before `.so` in the name of a library, without the hash that wheels add: `libucp` of
/// `libucp-5a1b2c3d.so.0.0.0`. Nothing where another ending follows (`libucp.so.bak`).
fn library_stem(name: &str) -> Option<&str> {
    let (stem, version) = name.split_once(".so")?;
    let numbered = version.is_empty()
        || version.strip_prefix('.').is_some_and(|numbers| {
            numbers.split('.').all(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
        });
    let unhashed = stem.rsplit_once('-').filter(|(_, hash)| is_hash(hash)).map_or(stem, |(stem, _)| stem);
    numbered.then_some(unhashed)
}

/// What auditwheel puts between name and ending: eight hexadecimal digits of a SHA-256.
fn is_hash(text: &str) -> bool {
    text.len() >= 8 && text.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
}

fn is_provider(stem: &str) -> bool {
    let Some(name) = stem.strip_prefix("lib") else { return false };
    match name.split_once("-rdmav") {
        Some((device, version)) => {
            !device.is_empty() && !version.is_empty() && version.bytes().all(|byte| byte.is_ascii_digit())
        }
        None => PROVIDERS.contains(&name),
    }
}

/// `engine.so`, `engine.cpython-312-x86_64-linux-gnu.so`, and `store` likewise.
fn is_mooncake_engine(name: &str) -> bool {
    ["engine", "store"].iter().any(|module| {
        name.strip_prefix(module)
            .and_then(|rest| rest.strip_suffix(".so"))
            .is_some_and(|tag| tag.is_empty() || tag.starts_with(".cpython-") || tag.starts_with(".abi3"))
    })
}

/// The libraries of the transfer path that a process has loaded. A file counts as loaded when code of it is mapped.
///
/// Opens files that belong to the process's container: call it where waiting does no harm.
pub fn find(pid: u32) -> Result<Libraries, MappingError> {
    let mappings = mapping::read(pid)?;
    let mut found = Libraries::default();
    let candidates = mapping::by_file(&mappings).into_iter().filter_map(candidate).take(MAX_LIBRARIES);
    for (role, code, file) in candidates {
        let name = String::from_utf8_lossy(code.file_name()).into_owned();
        match code.open_path(pid) {
            Ok(path) => found.mapped.push(MappedLibrary {
                role,
                name,
                build_id: symbol::build_id(&path),
                path,
                file: file.id,
                presence: code.presence(pid),
                code: code_ranges(&file),
            }),
            Err(why) => found.unreachable.push(Unreachable { role, name, why }),
        }
    }
    Ok(found)
}

/// A file with a role and its first mapping of code.
fn candidate(file: MappedFile<'_>) -> Option<(LibraryRole, &Mapping, MappedFile<'_>)> {
    let code = file.mappings.iter().copied().find(|mapping| mapping.execute)?;
    let role = LibraryRole::of(code.folder_name(), code.file_name())?;
    Some((role, code, file))
}

fn code_ranges(file: &MappedFile<'_>) -> Vec<CodeRange> {
    let range =
        |mapping: &Mapping| CodeRange { start: mapping.start, end: mapping.end, file_offset: mapping.file_offset };
    file.mappings.iter().filter(|mapping| mapping.execute).map(|mapping| range(mapping)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn role(path: &str) -> Option<LibraryRole> {
        let mut parts = path.rsplit('/');
        let name = parts.next().unwrap_or_default();
        LibraryRole::of(parts.next().unwrap_or_default().as_bytes(), name.as_bytes())
    }

    #[test]
    fn libraries_are_known_by_name_hashed_versioned_or_plain() {
        let cases = [
            ("/s/.nixl_cu12.mesonpy.libs/libnixl.so", LibraryRole::Nixl),
            ("/s/nixl_cu12.libs/libnixl-0a1b2c3d.so", LibraryRole::Nixl),
            ("/s/plugins/libplugin_UCX.so", LibraryRole::NixlUcxPlugin),
            ("/s/plugins/libplugin_UCX-00112233.so", LibraryRole::NixlUcxPlugin),
            ("/usr/lib/libucp.so.0.0.0", LibraryRole::Ucp),
            ("/s/nixl.libs/libucp-5a1b2c3d.so.0.0.0", LibraryRole::Ucp),
            ("/usr/lib/libuct.so.0", LibraryRole::Uct),
            ("/usr/lib/ucx/libuct_ib.so.0.0.0", LibraryRole::UctIb),
            ("/usr/lib/ucx/libuct_ib_mlx5.so.0.0.0", LibraryRole::UctIbMlx5),
            ("/s/nixl_cu12.libs/libibverbs-1de1263b.so.1.14.48.0", LibraryRole::Ibverbs),
            ("/usr/lib/x86_64-linux-gnu/libmlx5.so.1.24.44.0", LibraryRole::VerbsProvider),
            ("/s/nixl_cu12.libs/libmlx5-60dcc4be.so.1.24.48.0", LibraryRole::VerbsProvider),
            ("/usr/lib/x86_64-linux-gnu/libibverbs/librxe-rdmav34.so", LibraryRole::VerbsProvider),
            ("/usr/lib/libibverbs/libnewest-rdmav99.so", LibraryRole::VerbsProvider),
            ("/s/mooncake/engine.cpython-312-x86_64-linux-gnu.so", LibraryRole::MooncakeEngine),
            ("/s/mooncake/engine.so", LibraryRole::MooncakeEngine),
            ("/s/mooncake/store.abi3.so", LibraryRole::MooncakeEngine),
        ];
        for (path, expected) in cases {
            assert_eq!(role(path), Some(expected), "{path}");
        }
    }

    #[test]
    fn other_files_have_no_role() {
        for path in [
            "/s/libnixl_capi.so",
            "/s/libnixl.so.bak",
            "/s/libnixl.sock",
            "/s/libnixl.txt",
            "/s/xlibnixl.so",
            "/s/libnixl-x.so",
            "/s/libuct_ib_efa.so.0.0.0",
            "/s/libplugin_OBJ.so",
            "/s/engine.so",
            "/s/mooncake/engine_pool.so",
            "/s/mooncake/storefront.so",
            "/s/lib-rdmav34.so",
            "/s/libx-rdmav.so",
            "/s/libc.so.6",
            "",
        ] {
            assert_eq!(role(path), None, "{path}");
        }
        assert_eq!(LibraryRole::of(b"", b"libnixl\xff.so"), None);
    }

    #[test]
    fn an_address_leads_to_its_place_in_the_file() {
        let range = CodeRange { start: 0x7000, end: 0x8000, file_offset: 0x200 };
        assert_eq!(range.file_offset_of(0x7010), Some(0x210));
        assert_eq!((range.file_offset_of(0x8000), range.file_offset_of(0x6fff)), (None, None));
    }

    #[test]
    fn this_process_has_none() {
        let found = find(std::process::id()).unwrap();
        assert!(found.mapped.is_empty() && found.unreachable.is_empty(), "{found:?}");
    }
}
