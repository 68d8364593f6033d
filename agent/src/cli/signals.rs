//! Signals: SIGTERM and SIGINT stop, SIGHUP reloads, SIGUSR1 writes a recording.

use tokio::{
    signal::unix::{SignalKind, signal},
    sync::mpsc,
};
use tokio_util::sync::CancellationToken;

/// Cancels `stop` on SIGTERM or SIGINT, passes SIGHUP on to `reload` and SIGUSR1 to `dump`.
pub(super) fn watch(stop: CancellationToken, reload: mpsc::Sender<()>, dump: mpsc::Sender<()>) -> std::io::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut hangup = signal(SignalKind::hangup())?;
    let mut user = signal(SignalKind::user_defined1())?;
    tokio::spawn(async move {
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                _ = terminate.recv() => stop.cancel(),
                _ = interrupt.recv() => stop.cancel(),
                _ = user.recv() => drop(dump.try_send(())),
                // A reload that waits already will read what there is to be read.
                _ = hangup.recv() => drop(reload.try_send(())),
            }
        }
    });
    Ok(())
}
