//! Reading a server's own page: from servers that misbehave in every way, and from one in a network namespace of its own.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "support/support.rs"]
mod support;

use std::{
    fs,
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{TcpListener, TcpStream},
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use dislodge::{
    event::{
        ProcessKey,
        exposition::{Queue, Rank, Sample},
    },
    target::{
        discover::process_key,
        launcher::{Endpoint, NoEndpoint},
        scrape::{MAX_PAGE, PATIENCE, ScrapeError, Scraped, connect, read},
    },
};
use support::{environment::python, needs};

const GAUGE: &str = "sglang:num_prefill_inflight_queue_reqs{pp_rank=\"0\",tp_rank=\"0\"}";
const OK: &str = "HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\n";

/// A server in this process that answers each connection so; its port, and how many connections there were.
fn server(answer: impl Fn(&mut TcpStream) + Send + Sync + 'static) -> (u16, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let asked = Arc::new(AtomicUsize::new(0));
    let (counted, answer) = (Arc::clone(&asked), Arc::new(answer));
    thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            counted.fetch_add(1, Ordering::Relaxed);
            let answer = Arc::clone(&answer);
            thread::spawn(move || answer(&mut stream));
        }
    });
    (port, asked)
}

/// Reads the head of a request.
fn head(stream: &mut TcpStream) -> String {
    let mut lines = BufReader::new(stream).lines().map_while(Result::ok);
    lines.by_ref().take_while(|line| !line.is_empty()).map(|line| line + "\n").collect()
}

fn says(text: impl Into<Vec<u8>>) -> u16 {
    let text = text.into();
    let answer = move |stream: &mut TcpStream| {
        head(stream);
        let _ = stream.write_all(&text);
    };
    server(answer).0
}

fn own() -> ProcessKey {
    process_key(std::process::id()).unwrap()
}

fn scrape(port: u16) -> Result<Scraped, ScrapeError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(read(own(), vec![port]))
}

fn inflight(length: u32) -> Scraped {
    let sample =
        Sample { queue: Queue::PrefillInflight, rank: Rank::default(), length: Some(length), is_old_spelling: false };
    Scraped { samples: vec![sample], left_out: 0 }
}

#[test]
fn a_page_is_asked_for_once_and_read_in_whatever_pieces_it_comes() {
    let page = format!("# HELP x\n{GAUGE} 3.0\nsglang:other 1\n");
    for text in [
        format!("{OK}Content-Length: {}\r\n\r\n{page}", page.len()),
        format!("{OK}\r\n{page}"),
        format!("{OK}Transfer-Encoding: chunked\r\n\r\n{:x}\r\n{page}\r\n0\r\n\r\n", page.len()),
    ] {
        let (port, asked) = server(move |stream| {
            let head = head(stream);
            assert!(
                head.starts_with("GET /metrics HTTP/1.1\n") && head.to_lowercase().contains("host: 127.0.0.1:"),
                "{head}"
            );
            for piece in text.as_bytes().chunks(7) {
                stream.write_all(piece).unwrap();
                stream.flush().unwrap();
            }
        });
        assert_eq!(scrape(port).unwrap(), inflight(3));
        assert_eq!(asked.load(Ordering::Relaxed), 1);
    }
}

#[test]
fn a_server_that_does_not_answer_in_time_is_left() {
    let silent = server(|stream| drop(stream.read_to_end(&mut Vec::new()))).0;
    let dripping = server(|stream| {
        head(stream);
        let _ = stream.write_all(format!("{OK}\r\n{GAUGE} 3.0\n").as_bytes());
        while stream.write_all(b"#").is_ok() {
            thread::sleep(Duration::from_millis(20));
        }
    })
    .0;
    let slow_head = server(|stream| while stream.write_all(b"H").is_ok() && !head_is_over(stream) {}).0;
    for port in [silent, dripping, slow_head] {
        let began = Instant::now();
        let error = scrape(port).unwrap_err();
        assert!(matches!(error, ScrapeError::TimedOut(_) | ScrapeError::Http(_)), "{error}");
        assert!(began.elapsed() < PATIENCE + Duration::from_secs(5), "{:?}", began.elapsed());
    }
}

fn head_is_over(_: &TcpStream) -> bool {
    thread::sleep(Duration::from_millis(20));
    false
}

#[test]
fn a_page_without_an_end_is_cut_off() {
    let endless = |line: &'static [u8]| {
        server(move |stream| {
            head(stream);
            let _ = stream.write_all(format!("{OK}\r\n").as_bytes());
            let piece = line.repeat(1 << 10);
            while stream.write_all(&piece).is_ok() {}
        })
        .0
    };
    for port in [endless(b"sglang:num_prefill_inflight_queue_reqs 1.0\n"), endless(b"no end of line ")] {
        let error = scrape(port).unwrap_err();
        assert!(matches!(error, ScrapeError::TooLong | ScrapeError::TimedOut(_)), "{error}");
    }
    let long = format!("{OK}Content-Length: {}\r\n\r\n{}", MAX_PAGE + 1, "#".repeat(MAX_PAGE + 1));
    let error = scrape(says(long)).unwrap_err();
    assert!(matches!(error, ScrapeError::TooLong | ScrapeError::TimedOut(_)), "{error}");
}

#[test]
fn a_redirection_is_not_followed() {
    let (elsewhere, asked) = server(|stream| drop(head(stream)));
    for status in ["301 Moved Permanently", "302 Found", "307 Temporary Redirect", "308 Permanent Redirect"] {
        let text =
            format!("HTTP/1.1 {status}\r\nLocation: http://127.0.0.1:{elsewhere}/metrics\r\nContent-Length: 0\r\n\r\n");
        assert!(matches!(scrape(says(text)), Err(ScrapeError::Redirected)), "{status}");
    }
    assert_eq!(asked.load(Ordering::Relaxed), 0);
}

#[test]
fn what_is_no_page_is_an_error_with_a_name() {
    let status = scrape(says("HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\n\r\n")).unwrap_err();
    assert_eq!((status.name(), status.to_string().contains("500")), ("status", true));
    assert_eq!(scrape(says("HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n")).unwrap_err().name(), "status");
    for answer in [
        String::new(),
        "\u{0}\u{1}\u{2} nothing that is HTTP\r\n\r\n".to_owned(),
        format!("{OK}Content-Length: 500\r\n\r\n{GAUGE} 3.0\n"),
        format!("{OK}Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\nx"),
        format!("{OK}{}\r\n\r\n", "X-Header: value\r\n".repeat(10_000)),
        format!("{OK}X-Header: {}\r\n\r\n", "x".repeat(1 << 20)),
    ] {
        let begins: String = answer.chars().take(60).collect();
        assert_eq!(scrape(says(answer)).unwrap_err().name(), "http", "{begins}");
    }
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let closed = scrape(port).unwrap_err();
    assert!(matches!(closed, ScrapeError::NoEndpoint(NoEndpoint::NoLauncher)), "nobody has it open: {closed}");
}

/// Serves a page on a port of its own choice, which it writes first.
const PAGE_SERVER: &str = r#"
import http.server, os
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = b'sglang:num_prefill_inflight_queue_reqs{pp_rank="0",tp_rank="0"} 5.0\n'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_):
        pass
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"#;

struct Ends(Child);

impl Drop for Ends {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_server_on_the_loopback_interface_of_its_own_network_namespace_is_read_there() {
    let Some(python) = needs(python()) else { return };
    let script = "ip link set lo up && exec \"$@\"";
    let mut command = Command::new("unshare");
    command.args(["--net", "sh", "-c", script, "sh"]).arg(python).args(["-c", PAGE_SERVER]).stdout(Stdio::piped());
    let spawned = command.spawn().map_err(|error| format!("unshare cannot be run: {error}"));
    let Some(mut process) = needs(spawned.map(Ends)) else { return };
    let mut line = String::new();
    BufReader::new(process.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let written = line.trim().parse::<u16>().map_err(|_| "no network namespace can be made".to_owned());
    let Some(port) = needs(written) else { return };
    let server = process_key(process.0.id()).unwrap();
    let own_namespace = || fs::read_link("/proc/self/ns/net").unwrap();
    assert_ne!(fs::read_link(format!("/proc/{}/ns/net", server.pid)).unwrap(), own_namespace(), "it is elsewhere");

    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let before = own_namespace();
    assert_eq!(runtime.block_on(read(server, vec![port])).unwrap(), inflight(5));
    assert_eq!((own_namespace(), fs::read_link("/proc/thread-self/ns/net").unwrap()), (before.clone(), before));

    let address = ([127, 0, 0, 1], port).into();
    let another = Endpoint { process: ProcessKey { start: server.start + 1, ..server }, address };
    assert!(matches!(runtime.block_on(connect(another)), Err(ScrapeError::Gone)), "a pid that another process has now");
    drop(process);
    let gone = runtime.block_on(read(server, vec![port])).unwrap_err();
    assert!(matches!(gone, ScrapeError::NoEndpoint(_)), "{gone}");
}
