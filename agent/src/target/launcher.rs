//! Where a scheduler's server answers over HTTP: its launcher, what that was told on its command line, and the socket on which
//! it listens.
//!
//! The address is not taken from the command line, where a name may stand that only the container knows, but from the kernel:
//! of the sockets that listen in the launcher's network namespace, the one on that port that the launcher has open itself. So
//! nothing but the server's own socket is ever connected to.

use std::{
    collections::HashSet,
    fs::{self, File},
    io::Read as _,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
};

use super::discover;
use crate::event::ProcessKey;

/// SGLang's default of `--port` (`server_args.py`, 0.4.5 to 0.5.23).
const DEFAULT_PORT: u16 = 30_000;
/// How far up the launcher is looked for: a scheduler's parent, or that of its data-parallel controller, or of a shell's.
const MAX_ANCESTORS: usize = 4;
/// Bytes of a command line that are read, and of the kernel's tables of sockets, which begin with those that listen.
const MAX_CMDLINE: u64 = 64 << 10;
const MAX_TABLE: u64 = 1 << 20;
/// Descriptors of a process that are looked at.
const MAX_DESCRIPTORS: usize = 1 << 16;
/// State of a socket that listens, in `/proc/net/tcp` (`TCP_LISTEN`).
const LISTEN: &str = "0A";

/// A server's HTTP socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// The process that has it open; its network namespace is the one to connect in.
    pub process: ProcessKey,
    /// Where to connect.
    pub address: SocketAddr,
}

/// Why a server's own page is not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum NoEndpoint {
    /// None of the processes above the scheduler is SGLang's launcher.
    #[error(
        "no process above the scheduler is `sglang.launch_server` or `sglang serve`; say the port in `server_metrics.ports`"
    )]
    NoLauncher,
    /// The server has no metrics.
    #[error("the server was started without --enable-metrics")]
    Off,
    /// The command line leaves it to a file.
    #[error("the server reads its arguments from a file (--config); say the port in `server_metrics.ports`")]
    ConfigFile,
    /// It speaks TLS.
    #[error("the server speaks TLS (--ssl-certfile), which is not read")]
    Tls,
    /// The launcher does not listen on that port.
    #[error("the server does not listen on its port (yet)")]
    NotListening,
}

impl NoEndpoint {
    /// Label value of metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::NoLauncher => "no_launcher",
            Self::Off => "off",
            Self::ConfigFile => "config_file",
            Self::Tls => "tls",
            Self::NotListening => "not_listening",
        }
    }
}

/// Finds the HTTP socket of a scheduler's server. `ports` are those on which servers answer whose command line does not say.
///
/// # Errors
///
/// It has none, or it cannot be told which.
pub fn find(scheduler: ProcessKey, ports: &[u16]) -> Result<Endpoint, NoEndpoint> {
    let ancestors = || {
        let parent = |key: &ProcessKey| discover::parent(key.pid);
        std::iter::successors(Some(scheduler), parent).take(MAX_ANCESTORS + 1)
    };
    if !ports.is_empty()
        && let Some(found) = ancestors().find_map(|process| Some((process, listens(process.pid, ports)?)))
    {
        return Ok(Endpoint { process: found.0, address: found.1 });
    }
    let launcher = ancestors().find_map(|process| Some((process, Arguments::of(&cmdline(process.pid)?)?)));
    let (process, arguments) = launcher.ok_or(NoEndpoint::NoLauncher)?;
    let port = arguments.port()?;
    let address = listens(process.pid, &[port]).ok_or(NoEndpoint::NotListening)?;
    Ok(Endpoint { process, address })
}

fn cmdline(pid: u32) -> Option<Vec<u8>> {
    read_at_most(&format!("/proc/{pid}/cmdline"), MAX_CMDLINE)
}

fn read_at_most(path: &str, most: u64) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path).ok()?.take(most).read_to_end(&mut bytes).ok()?;
    Some(bytes)
}

/// What a launcher was told, as far as it matters.
#[derive(Debug, Default, PartialEq, Eq)]
struct Arguments {
    port: Option<u16>,
    sidecar_port: Option<u16>,
    has_metrics: bool,
    has_config_file: bool,
    has_tls: bool,
    speaks_grpc: bool,
}

impl Arguments {
    /// Those of a command line of SGLang's launcher; nothing when it is another one.
    fn of(cmdline: &[u8]) -> Option<Self> {
        let words: Vec<&str> =
            cmdline.split(|byte| *byte == 0).map(|word| std::str::from_utf8(word).unwrap_or_default()).collect();
        let is_launcher = words.iter().enumerate().any(|(place, word)| {
            let serves = || words.get(place + 1) == Some(&"serve");
            *word == "sglang.launch_server"
                || word.ends_with("sglang/launch_server.py")
                || ((*word == "sglang" || word.ends_with("/sglang")) && serves())
        });
        if !is_launcher {
            return None;
        }
        let mut arguments = Self::default();
        for (place, word) in words.iter().enumerate() {
            let (name, value) = match word.split_once('=') {
                Some((name, value)) => (name, Some(value)),
                None => (*word, words.get(place + 1).copied()),
            };
            let number = || value.and_then(|value| value.parse().ok());
            match name {
                "--port" => arguments.port = number(),
                "--smg-http-sidecar-port" => arguments.sidecar_port = number(),
                "--enable-metrics" => arguments.has_metrics = true,
                "--config" => arguments.has_config_file = true,
                "--ssl-certfile" => arguments.has_tls = true,
                "--grpc-mode" | "--smg-grpc-mode" => arguments.speaks_grpc = true,
                _ => {}
            }
        }
        Some(arguments)
    }

    /// The port on which `/metrics` is answered: the server's own, or with gRPC that of an HTTP server beside it
    /// (`entrypoints/grpc_server.py`, 0.5.22 and 0.5.23).
    fn port(&self) -> Result<u16, NoEndpoint> {
        let Self { port, sidecar_port, has_metrics, has_config_file, has_tls, speaks_grpc } = *self;
        let is_said = has_metrics && (port.is_some() || !has_config_file);
        if !is_said {
            return Err(if has_config_file { NoEndpoint::ConfigFile } else { NoEndpoint::Off });
        }
        if has_tls && !speaks_grpc {
            return Err(NoEndpoint::Tls);
        }
        let port = port.unwrap_or(DEFAULT_PORT);
        Ok(if speaks_grpc { sidecar_port.unwrap_or(port.saturating_add(1)) } else { port })
    }
}

/// Where a process listens on one of these ports, the first of them before the others, as an address to connect to in its
/// network namespace.
fn listens(pid: u32, ports: &[u16]) -> Option<SocketAddr> {
    let own = sockets(pid);
    let listening: Vec<(SocketAddr, u64)> = ["tcp", "tcp6"]
        .iter()
        .filter_map(|table| read_at_most(&format!("/proc/{pid}/net/{table}"), MAX_TABLE))
        .flat_map(|table| listeners(&String::from_utf8_lossy(&table)))
        .collect();
    ports.iter().find_map(|port| {
        let of_port = |(address, inode): &&(SocketAddr, u64)| address.port() == *port && own.contains(inode);
        listening.iter().find(of_port).map(|(address, _)| reachable(*address))
    })
}

/// An address that leads to a socket which listens there.
fn reachable(address: SocketAddr) -> SocketAddr {
    let ip = match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    SocketAddr::new(ip, address.port())
}

/// The sockets that a process has open, by their inodes.
fn sockets(pid: u32) -> HashSet<u64> {
    let Ok(descriptors) = fs::read_dir(format!("/proc/{pid}/fd")) else { return HashSet::new() };
    descriptors
        .take(MAX_DESCRIPTORS)
        .filter_map(|descriptor| {
            let link = fs::read_link(descriptor.ok()?.path()).ok()?;
            link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()
        })
        .collect()
}

/// The sockets that listen, of a table as `/proc/net/tcp` or `/proc/net/tcp6`: their addresses and inodes.
fn listeners(table: &str) -> Vec<(SocketAddr, u64)> {
    table.lines().skip(1).filter_map(listener).collect()
}

fn listener(line: &str) -> Option<(SocketAddr, u64)> {
    // number, local address, remote address, state, queues, timer, retransmits, user, time-out, inode
    let mut words = line.split_ascii_whitespace();
    let (address, port) = words.nth(1)?.split_once(':')?;
    (words.nth(1)? == LISTEN).then_some(())?;
    let inode = words.nth(5)?.parse().ok()?;
    Some((SocketAddr::new(ip(address)?, u16::from_str_radix(port, 16).ok()?), inode))
}

/// An address in hexadecimal, of words of four bytes in the order of this machine.
fn ip(text: &str) -> Option<IpAddr> {
    let word = |place: usize| {
        let digits = text.get(place * 8..place * 8 + 8)?;
        u32::from_str_radix(digits, 16).ok().map(u32::to_ne_bytes)
    };
    match text.len() {
        8 => Some(Ipv4Addr::from(word(0)?).into()),
        32 => {
            let mut bytes = [0; 16];
            for (place, into) in bytes.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                *into = word(place)?;
            }
            Some(Ipv6Addr::from(bytes).into())
        }
        _ => None,
    }
}

#[cfg(test)]
#[path = "launcher/tests.rs"]
mod tests;
