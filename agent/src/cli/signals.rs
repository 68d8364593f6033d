//! Signals: SIGTERM and SIGINT stop, SIGHUP reloads.

use tokio::{
    signal::unix::{SignalKind, signal},
    sync::mpsc,
};
use tokio_util::sync::CancellationToken;

/// Cancels `stop` on SIGTERM or SIGINT, and passes SIGHUP on to `reload`.
pub(super) fn watch(stop: CancellationToken, reload: mpsc::Sender<()>) -> std::io::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut hangup = signal(SignalKind::hangup())?;
    tokio::spawn(async move {
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                _ = terminate.recv() => stop.cancel(),
                _ = interrupt.recv() => stop.cancel(),
                // A reload that waits already will read what there is to be read.
                _ = hangup.recv() => drop(reload.try_send(())),
            }
        }
    });
    Ok(())
}
