use std::net::TcpListener;

use proptest::prelude::*;

use super::*;

fn port(words: &[&str]) -> Option<Result<u16, NoEndpoint>> {
    Arguments::of(words.join("\0").as_bytes()).map(|arguments| arguments.port())
}

#[test]
fn a_launcher_says_its_port_on_its_command_line() {
    let module = ["python3", "-m", "sglang.launch_server", "--model-path", "m"];
    let with = |more: &[&str]| port(&[&module[..], more].concat());
    assert_eq!(with(&["--enable-metrics", "--port", "31000", ""]), Some(Ok(31_000)));
    assert_eq!(with(&["--enable-metrics", "--port=31000"]), Some(Ok(31_000)));
    assert_eq!(with(&["--enable-metrics"]), Some(Ok(30_000)));
    assert_eq!(port(&["/venv/bin/sglang", "serve", "--enable-metrics"]), Some(Ok(30_000)));
    assert_eq!(port(&["python", "/usr/lib/sglang/launch_server.py", "--enable-metrics"]), Some(Ok(30_000)));
    assert_eq!(with(&["--enable-metrics", "--grpc-mode"]), Some(Ok(30_001)));
    assert_eq!(with(&["--enable-metrics", "--smg-grpc-mode", "--smg-http-sidecar-port", "7"]), Some(Ok(7)));
}

#[test]
fn a_launcher_without_metrics_is_not_asked() {
    let module = ["python3", "-m", "sglang.launch_server"];
    let with = |more: &[&str]| port(&[&module[..], more].concat());
    assert_eq!(with(&[]), Some(Err(NoEndpoint::Off)));
    assert_eq!(with(&["--port", "1"]), Some(Err(NoEndpoint::Off)));
    assert_eq!(with(&["--config", "server.yaml"]), Some(Err(NoEndpoint::ConfigFile)));
    assert_eq!(with(&["--config", "server.yaml", "--enable-metrics"]), Some(Err(NoEndpoint::ConfigFile)));
    assert_eq!(with(&["--config", "server.yaml", "--enable-metrics", "--port", "9"]), Some(Ok(9)));
    assert_eq!(with(&["--enable-metrics", "--ssl-certfile", "c"]), Some(Err(NoEndpoint::Tls)));
    assert_eq!(port(&["python3", "serve.py", "--enable-metrics"]), None, "somebody else's");
    assert_eq!(port(&["sglang::data_parallel_controller"]), None);
    assert_eq!(with(&["--enable-metrics", "--port", "70000"]), Some(Ok(30_000)), "no port: argparse refuses it");
}

#[test]
fn listening_sockets_are_read_from_the_kernels_tables() {
    let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n   \
                 0: 0100007F:7530 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4711 1 0 100 0\n   \
                 1: 00000000:0016 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 12 1 0 100 0\n   \
                 2: 0100007F:7530 0100007F:9999 01 00000000:00000000 00:00000000 00000000     0        0 4712 1 0 100 0\n   \
                 3: 0100007F:75";
    let expected = [("127.0.0.1:30000".parse().unwrap(), 4_711), ("0.0.0.0:22".parse().unwrap(), 12)];
    assert_eq!(listeners(table), expected);
    let six =
        "head\n 0: 00000000000000000000000001000000:7530 00000000000000000000000000000000:0000 0A 0:0 0:0 0 0 0 5 1\n";
    assert_eq!(listeners(six), [("[::1]:30000".parse().unwrap(), 5)]);
    assert_eq!(reachable("0.0.0.0:5".parse().unwrap()), "127.0.0.1:5".parse().unwrap());
    assert_eq!(reachable("[::]:5".parse().unwrap()), "[::1]:5".parse().unwrap());
    assert_eq!(reachable("10.1.2.3:5".parse().unwrap()), "10.1.2.3:5".parse().unwrap());
}

#[test]
fn a_process_is_found_on_a_port_that_is_said_and_on_no_other() {
    let listener = TcpListener::bind("0.0.0.0:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let own = discover::process_key(std::process::id()).unwrap();
    let found = find(own, &[1, port]).unwrap();
    assert_eq!(found, Endpoint { process: own, address: SocketAddr::new(Ipv4Addr::LOCALHOST.into(), port) });
    assert_eq!(listens(1, &[port]), None, "another process does not have it open");
    drop(listener);
    assert_eq!(find(own, &[port]), Err(NoEndpoint::NoLauncher));
}

proptest! {
    #[test]
    fn any_table_and_any_command_line_is_read_to_the_end(text in "[0-9A-F: \\n.]{0,400}", bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        listeners(&text);
        listeners(&String::from_utf8_lossy(&bytes));
        if let Some(arguments) = Arguments::of(&bytes) {
            let _ = arguments.port();
        }
    }
}
