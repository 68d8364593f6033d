//! One GET over HTTP/1.0, so that no answer comes in chunks.

use std::{
    io::{Read as _, Write as _},
    net::TcpStream,
    time::Duration,
};

const PATIENCE: Duration = Duration::from_secs(10);

/// The status and the body; nothing when nobody answers.
pub fn get(address: &str, path: &str) -> Option<(u16, String)> {
    let mut stream = TcpStream::connect(address).ok()?;
    stream.set_read_timeout(Some(PATIENCE)).ok()?;
    write!(stream, "GET {path} HTTP/1.0\r\nHost: {address}\r\n\r\n").ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    let (head, body) = answer.split_once("\r\n\r\n")?;
    Some((head.split(' ').nth(1)?.parse().ok()?, body.to_owned()))
}
