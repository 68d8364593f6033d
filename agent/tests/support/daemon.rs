//! Daemons of Debian packages that serve HTTP on a port: Prometheus, Alertmanager.

use std::{
    fs::{self, File},
    net::TcpListener,
    path::Path,
    process::{Child, Command, Stdio},
    rc::Rc,
    thread,
};

use super::{http, wait::until};

/// A running daemon; ends with its test.
pub struct Daemon {
    process: Child,
    address: String,
    folder: Rc<tempfile::TempDir>,
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        if thread::panicking() {
            println!("{}", fs::read_to_string(self.folder.path().join("log")).unwrap_or_default());
        }
    }
}

/// The program of a package, when it is installed.
pub fn installed(program: &'static str, package: &str) -> Result<&'static str, String> {
    let missing = || format!("no {program}; apt-get install {package}");
    Path::new(program).exists().then_some(program).ok_or_else(missing)
}

impl Daemon {
    /// Starts a daemon whose configuration is `config` and waits until it is ready. Its folder is empty but for that.
    pub fn start(program: &str, config: &str, storage: &str, more: &[&str]) -> Self {
        let folder = Rc::new(tempfile::tempdir().unwrap());
        let file = folder.path().join("config.yml");
        fs::write(&file, config).unwrap();
        // A port that was free a moment ago may be taken by now: then it ends at once, and another one is tried.
        for _ in 0..5 {
            let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
            let process = Command::new(program)
                .arg(format!("--config.file={}", file.display()))
                .arg(format!("{storage}={}", folder.path().join("data").display()))
                .arg(format!("--web.listen-address={address}"))
                .args(more)
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(File::create(folder.path().join("log")).unwrap())
                .spawn()
                .unwrap();
            let mut started = Self { process, address, folder: Rc::clone(&folder) };
            let is_ready = until(program, || {
                if started.process.try_wait().unwrap().is_some() {
                    return Some(false);
                }
                started.get("/-/ready").map(|_| true)
            });
            if is_ready {
                return started;
            }
        }
        panic!("{program} does not start")
    }

    /// Where it serves.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// A page of it, when it says 200.
    pub fn get(&self, path: &str) -> Option<String> {
        http::get(&self.address, path).filter(|(status, _)| *status == 200).map(|(_, body)| body)
    }
}
