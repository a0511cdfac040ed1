//! The worker's watchdog: alive as long as the current step is within its time.
//!
//! systemd kills a unit with `WatchdogSec=` that does not report. A thread reports, so that a step may block; it is
//! silent once the step's deadline has passed, so that a step that hangs is ended by PID 1, at most the watchdog's
//! time later, and then recovered. The deadline is the budget, and it moves with the step. Times are on
//! CLOCK_MONOTONIC, as systemd's are.
//!
//! How it fails: without `NOTIFY_SOCKET` nobody listens, and [`Watchdog::start`] does nothing. A report that cannot
//! be sent is not sent again before the next is due; the watchdog's time bears three such in a row.

use std::io;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::systemd::monotonic_now;

/// Between two reports where systemd does not say how long it waits: a quarter of the unit's two minutes.
const EVERY: Duration = Duration::from_secs(30);

/// The reporting thread's deadline. Dropping it ends the reports.
#[derive(Debug)]
pub struct Watchdog {
    /// Microseconds on CLOCK_MONOTONIC until which it reports.
    until: Arc<AtomicU64>,
}

impl Watchdog {
    /// Starts to report, for `first` from now.
    ///
    /// # Errors
    /// Where there is a socket to report to, and it or the thread cannot be had.
    pub fn start(first: Duration) -> io::Result<Self> {
        let watchdog = Self { until: Arc::default() };
        watchdog.deadline(first);
        let Some(socket) = std::env::var_os("NOTIFY_SOCKET") else { return Ok(watchdog) };
        let socket = Socket::open(socket.as_bytes())?;
        let every = interval(std::env::var("WATCHDOG_USEC").ok().as_deref());
        let until = Arc::clone(&watchdog.until);
        std::thread::Builder::new().name("watchdog".to_owned()).spawn(move || {
            loop {
                match until.load(Ordering::Acquire) {
                    0 => return,
                    // One that is lost is made up for by the next.
                    until if micros(monotonic_now()) < until => drop(socket.send(b"WATCHDOG=1")),
                    _ => {}
                }
                std::thread::sleep(every);
            }
        })?;
        Ok(watchdog)
    }

    /// A new step: it has this long from now.
    pub fn deadline(&self, from_now: Duration) {
        let from_now = crate::failpoint::pace("deadline", from_now);
        self.until.store(micros(monotonic_now() + from_now), Ordering::Release);
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.until.store(0, Ordering::Release);
    }
}

/// A quarter of what systemd waits.
fn interval(watchdog_usec: Option<&str>) -> Duration {
    match watchdog_usec.and_then(|text| text.parse::<u64>().ok()) {
        Some(micros) if micros > 0 => Duration::from_micros(micros) / 4,
        _ => EVERY,
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

/// systemd's notification socket.
struct Socket {
    from: UnixDatagram,
    to: SocketAddr,
}

impl Socket {
    fn open(name: &[u8]) -> io::Result<Self> {
        let to = match name {
            [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
            path => SocketAddr::from_pathname(std::ffi::OsStr::from_bytes(path))?,
        };
        let from = UnixDatagram::unbound()?;
        // A full queue must not block the thread past the deadline.
        from.set_nonblocking(true)?;
        Ok(Self { from, to })
    }

    fn send(&self, state: &[u8]) -> io::Result<()> {
        self.from.send_to_addr(state, &self.to).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quarter_of_what_systemd_waits() {
        assert_eq!(interval(Some("120000000")), Duration::from_secs(30));
        assert_eq!(interval(Some("0")), EVERY);
        assert_eq!(interval(Some("x")), EVERY);
        assert_eq!(interval(None), EVERY);
    }

    #[test]
    fn reports_reach_the_socket() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let server = UnixDatagram::bind(&path).unwrap();
        Socket::open(path.as_os_str().as_bytes()).unwrap().send(b"WATCHDOG=1").unwrap();
        let mut buffer = [0; 64];
        let count = server.recv(&mut buffer).unwrap();
        assert_eq!(&buffer[..count], b"WATCHDOG=1");
    }
}
