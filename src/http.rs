//! One bounded HTTP GET, and who answered it.
//!
//! The order proves the server's end while it exists: connect, look for the process that accepted, send, look on
//! until the answer begins if nobody was found, read, look once more, close. The request asks to keep the connection, so that the server's end is
//! still there when the answer has been read.
//!
//! Bounds: one deadline for everything, 16 KiB of header, 64 KiB of body. Only HTTP/1.0 and 1.1
//! answers are understood; redirects are answers like any other and are not followed; interim answers (1xx) are
//! skipped. A server that accepts late and closes as soon as it has answered may leave `peers` empty: unproved, not
//! wrong.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::fd::AsFd as _;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr as UnixAddress, UnixStream};
use std::time::{Duration, Instant};

use crate::manager::{HttpAnswer, HttpTarget, ProbeError};
use crate::peer;

/// The most header bytes: twice what common servers send at most.
const HEADER: usize = 16 << 10;
/// The most body bytes: a version answer is a line or a page.
const BODY: usize = 64 << 10;
/// How long to wait for the server to accept before anything is sent. A healthy server accepts in well under a
/// millisecond; one that is told of connections only with their data (`TCP_DEFER_ACCEPT`) never does.
const ACCEPT: Duration = Duration::from_millis(300);

/// Asks once. The processes in `first` are the first in which the server's end is looked for.
///
/// # Errors
/// Words for what went wrong and where: connecting, sending, reading, or an answer that is no HTTP or too large.
pub fn get(target: &HttpTarget, timeout: Duration, first: &[u32]) -> Result<HttpAnswer, ProbeError> {
    let deadline = Instant::now() + timeout;
    let mut connection = Connection::open(target, deadline)?;
    let mut peers = connection.await_peers(first, deadline.min(Instant::now() + ACCEPT));
    let (host, path) = match target {
        HttpTarget::Tcp { host, path, .. } => (host.as_str(), path),
        HttpTarget::Unix { path, .. } => ("localhost", path),
    };
    let request = format!(
        "GET {path} HTTP/1.1\r\nHost: {host}\r\nUser-Agent: cutover\r\nAccept: */*\r\nConnection: keep-alive\r\n\r\n"
    );
    connection.deadline("send to", deadline)?;
    connection.socket().write_all(request.as_bytes()).map_err(|error| says("send to", &error))?;

    if peers.is_empty() {
        peers = connection.await_answer(first, deadline)?;
    }
    let mut answer =
        Reader { source: &mut Bounded { connection: &mut connection, deadline }, buffer: Vec::new() };
    let (status, body) = answer.response()?;
    if peers.is_empty() {
        peers = connection.peers(first);
    }
    Ok(HttpAnswer { status, body, peers })
}

enum Connection {
    Tcp(TcpStream),
    Unix(UnixStream),
}

trait Socket: Read + Write {}
impl<T: Read + Write> Socket for T {}

impl Connection {
    fn open(target: &HttpTarget, deadline: Instant) -> Result<Self, ProbeError> {
        let connected = match target {
            HttpTarget::Tcp { address, .. } => {
                TcpStream::connect_timeout(address, left("connect to", deadline)?).map(Self::Tcp)
            }
            HttpTarget::Unix { socket, .. } => connect_unix(socket).map(Self::Unix),
        };
        connected.map_err(|error| says("connect to", &error))
    }

    /// Bounds the next read and write.
    fn deadline(&self, doing: &str, deadline: Instant) -> Result<(), ProbeError> {
        let left = Some(left(doing, deadline)?);
        match self {
            Self::Tcp(stream) => stream.set_read_timeout(left).and_then(|()| stream.set_write_timeout(left)),
            Self::Unix(stream) => stream.set_read_timeout(left).and_then(|()| stream.set_write_timeout(left)),
        }
        .map_err(|error| says(doing, &error))
    }

    fn socket(&mut self) -> &mut dyn Socket {
        match self {
            Self::Tcp(stream) => stream,
            Self::Unix(stream) => stream,
        }
    }

    /// Who holds the server's end now; empty where that cannot be read, whatever the reason.
    fn peers(&self, first: &[u32]) -> Vec<u32> {
        let inode = match self {
            Self::Tcp(stream) => peer::of_tcp(stream),
            Self::Unix(stream) => peer::of_unix(stream),
        };
        inode.ok().flatten().map(|inode| peer::holders(inode, first)).unwrap_or_default()
    }

    /// Waits for somebody to accept.
    fn await_peers(&self, first: &[u32], until: Instant) -> Vec<u32> {
        let mut pause = Duration::from_millis(1);
        loop {
            let peers = self.peers(first);
            if !peers.is_empty() || Instant::now() + pause > until {
                return peers;
            }
            std::thread::sleep(pause);
            pause *= 2;
        }
    }

    /// Waits for the answer to begin, and goes on looking for who is about to give it: a server that accepts only
    /// when there is data may close as soon as it has answered.
    fn await_answer(&self, first: &[u32], deadline: Instant) -> Result<Vec<u32>, ProbeError> {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        loop {
            let peers = self.peers(first);
            left("read from", deadline)?;
            let socket = match self {
                Self::Tcp(stream) => stream.as_fd(),
                Self::Unix(stream) => stream.as_fd(),
            };
            let pause = Timespec { tv_sec: 0, tv_nsec: 5_000_000 };
            let ready = poll(&mut [PollFd::new(&socket, PollFlags::IN)], Some(&pause));
            // What it says beyond `not yet` is for the read that follows to find out.
            if !peers.is_empty() || !matches!(ready, Ok(0) | Err(rustix::io::Errno::INTR)) {
                return Ok(peers);
            }
        }
    }
}

/// Connects to a path, or to an abstract name where it begins with `@`. Never waits: a full backlog is an error.
fn connect_unix(socket: &str) -> io::Result<UnixStream> {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
    let Some(name) = socket.strip_prefix('@') else {
        // std's connect would wait for room in the backlog without a bound.
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let fd = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        connect(&fd, &SocketAddrUnix::new(socket)?)?;
        let stream = UnixStream::from(fd);
        stream.set_nonblocking(false)?;
        return Ok(stream);
    };
    UnixStream::connect_addr(&UnixAddress::from_abstract_name(name)?)
}

fn says(doing: &str, error: &io::Error) -> ProbeError {
    if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) {
        return ProbeError(format!("could not {doing} the application in time"));
    }
    ProbeError(format!("could not {doing} the application: {error}"))
}

fn left(doing: &str, deadline: Instant) -> Result<Duration, ProbeError> {
    match deadline.saturating_duration_since(Instant::now()) {
        Duration::ZERO => Err(ProbeError(format!("could not {doing} the application in time"))),
        left => Ok(left),
    }
}

/// Reads that all end at one deadline.
struct Bounded<'a> {
    connection: &'a mut Connection,
    deadline: Instant,
}

impl Read for Bounded<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.connection
            .deadline("read from", self.deadline)
            .map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?;
        self.connection.socket().read(buffer)
    }
}

/// An answer as it comes in: what was read and not yet used.
struct Reader<'a, R: Read> {
    source: &'a mut R,
    buffer: Vec<u8>,
}

/// Where a body ends.
#[derive(Debug, PartialEq, Eq)]
enum Length {
    None,
    Bytes(usize),
    Chunked,
    UntilClose,
}

impl<R: Read> Reader<'_, R> {
    fn response(&mut self) -> Result<(u16, Vec<u8>), ProbeError> {
        loop {
            let head = self.head()?;
            let (status, length) = parse_head(&head).map_err(ProbeError)?;
            if (100..200).contains(&status) && status != 101 {
                continue;
            }
            let body = match length {
                Length::None => Vec::new(),
                Length::Bytes(count) => self.exactly(count)?,
                Length::Chunked => self.chunks()?,
                Length::UntilClose => self.rest()?,
            };
            return Ok((status, body));
        }
    }

    /// Reads more; false at the end.
    fn more(&mut self) -> Result<bool, ProbeError> {
        let mut chunk = [0; 8192];
        loop {
            match self.source.read(&mut chunk) {
                Ok(0) => return Ok(false),
                Ok(count) => {
                    self.buffer.extend_from_slice(&chunk[..count]);
                    return Ok(true);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(says("read from", &error)),
            }
        }
    }

    /// The bytes up to and without `mark`, of which there may be `most`.
    fn until(&mut self, mark: &[u8], most: usize) -> Result<Vec<u8>, ProbeError> {
        loop {
            if let Some(at) = self.buffer.windows(mark.len()).position(|window| window == mark) {
                let found = self.buffer[..at].to_vec();
                self.buffer.drain(..at + mark.len());
                return Ok(found);
            }
            if self.buffer.len() > most {
                return Err(ProbeError(format!("the answer's header is larger than {most} bytes")));
            }
            if !self.more()? {
                return Err(ProbeError("the application closed the connection within its answer".to_owned()));
            }
        }
    }

    fn head(&mut self) -> Result<String, ProbeError> {
        let head = self.until(b"\r\n\r\n", HEADER)?;
        String::from_utf8(head).map_err(|_| ProbeError("the answer's header is no text".to_owned()))
    }

    fn exactly(&mut self, count: usize) -> Result<Vec<u8>, ProbeError> {
        if count > BODY {
            return Err(too_large());
        }
        while self.buffer.len() < count {
            if !self.more()? {
                return Err(ProbeError("the application closed the connection within its answer".to_owned()));
            }
        }
        Ok(self.buffer.drain(..count).collect())
    }

    fn chunks(&mut self) -> Result<Vec<u8>, ProbeError> {
        let mut body = Vec::new();
        loop {
            let line = self.until(b"\r\n", HEADER)?;
            let line = String::from_utf8_lossy(&line);
            // An extension may follow the size.
            let size = line.split(';').next().unwrap_or_default().trim();
            let size = usize::from_str_radix(size, 16)
                .map_err(|_| ProbeError("the answer has a chunk of unreadable size".to_owned()))?;
            if size == 0 {
                // What trails is of no interest, and the connection is closed anyway.
                return Ok(body);
            }
            if size > BODY - body.len() {
                return Err(too_large());
            }
            body.extend(self.exactly(size)?);
            self.until(b"\r\n", 2)?;
        }
    }

    fn rest(&mut self) -> Result<Vec<u8>, ProbeError> {
        loop {
            if self.buffer.len() > BODY {
                return Err(too_large());
            }
            if !self.more()? {
                return Ok(std::mem::take(&mut self.buffer));
            }
        }
    }
}

fn too_large() -> ProbeError {
    ProbeError(format!("the answer is larger than {BODY} bytes"))
}

/// The status, and where the body ends.
fn parse_head(head: &str) -> Result<(u16, Length), String> {
    let mut lines = head.split("\r\n");
    let first = lines.next().unwrap_or_default();
    let mut words = first.splitn(3, ' ');
    let version = words.next().unwrap_or_default();
    let status: u16 = words.next().and_then(|word| word.parse().ok()).unwrap_or(0);
    if !matches!(version, "HTTP/1.0" | "HTTP/1.1") || !(100..1000).contains(&status) {
        return Err(format!("the answer is no HTTP/1.1: {:?}", first.chars().take(40).collect::<String>()));
    }
    let mut length = Length::UntilClose;
    for line in lines {
        let Some((name, value)) = line.split_once(':') else { continue };
        let value = value.trim();
        if name.eq_ignore_ascii_case("transfer-encoding") {
            if !value.eq_ignore_ascii_case("chunked") {
                return Err(format!("the answer has the unknown encoding {value:?}"));
            }
            // It wins over a length, which must then not be there.
            length = Length::Chunked;
        } else if name.eq_ignore_ascii_case("content-length") && length != Length::Chunked {
            let bytes =
                value.parse().map_err(|_| format!("the answer has the unreadable length {value:?}"))?;
            length = Length::Bytes(bytes);
        }
    }
    if status < 200 || matches!(status, 204 | 304) {
        length = Length::None;
    }
    Ok((status, length))
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    /// Hands out its bytes in small pieces, as a slow network does.
    struct Drip<'a>(&'a [u8]);

    impl Read for Drip<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            let count = self.0.len().min(7).min(buffer.len());
            buffer[..count].copy_from_slice(&self.0[..count]);
            self.0 = &self.0[count..];
            Ok(count)
        }
    }

    fn read(answer: &str) -> Result<(u16, String), String> {
        let mut source = Drip(answer.as_bytes());
        let mut reader = Reader { source: &mut source, buffer: Vec::new() };
        let answer = reader.response().map_err(|error| error.0);
        answer.map(|(status, body)| (status, String::from_utf8(body).unwrap()))
    }

    #[test]
    fn bodies_of_each_kind() {
        for (answer, status, body) in [
            ("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello, and more", 200, "hello"),
            ("HTTP/1.0 200 OK\r\n\r\nuntil the end", 200, "until the end"),
            ("HTTP/1.1 503 No\r\ncontent-length:0\r\n\r\n", 503, ""),
            (
                "HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n4\r\nWiki\r\n6;x=y\r\npedia!\r\n0\r\n\r\n",
                200,
                "Wikipedia!",
            ),
            ("HTTP/1.1 204 Nothing\r\n\r\nignored", 204, ""),
            ("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200\r\nContent-Length: 2\r\n\r\nok", 200, "ok"),
            ("HTTP/1.1 302 Found\r\nLocation: /x\r\nContent-Length: 0\r\n\r\n", 302, ""),
        ] {
            assert_eq!(read(answer), Ok((status, body.to_owned())), "{answer}");
        }
    }

    #[test]
    fn answers_that_are_refused() {
        for (answer, why) in [
            ("SSH-2.0-OpenSSH_9.2\r\n\r\n", "no HTTP"),
            ("HTTP/2 200\r\n\r\n", "no HTTP"),
            ("HTTP/1.1 OK\r\n\r\n", "no HTTP"),
            ("", "closed the connection"),
            ("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort", "closed the connection"),
            ("HTTP/1.1 200 OK\r\nContent-Length: 65537\r\n\r\n", "larger than 65536"),
            ("HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n", "unreadable length"),
            ("HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", "unknown encoding"),
            ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n10001\r\n", "larger than 65536"),
            ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "unreadable size"),
        ] {
            let error = read(answer).unwrap_err();
            assert!(error.contains(why), "{answer:?}: {error}");
        }
        let endless = format!("HTTP/1.1 200 OK\r\n{}", "X: y\r\n".repeat(4000));
        assert!(read(&endless).unwrap_err().contains("header is larger"));
        let large = format!("HTTP/1.0 200 OK\r\n\r\n{}", "x".repeat(BODY + 1));
        assert!(read(&large).unwrap_err().contains("larger than 65536"));
    }

    fn tcp(listener: &TcpListener) -> HttpTarget {
        let address = listener.local_addr().unwrap();
        HttpTarget::Tcp { address, host: "localhost".into(), path: "/version".into() }
    }

    #[test]
    fn the_answering_process_is_found() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let target = tcp(&listener);
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = [0; 4096];
            let count = stream.read(&mut request).unwrap();
            stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n1.2.3").unwrap();
            String::from_utf8_lossy(&request[..count]).into_owned()
        });
        let answer = get(&target, Duration::from_secs(5), &[]).unwrap();
        assert_eq!(
            answer,
            HttpAnswer { status: 200, body: b"1.2.3".to_vec(), peers: vec![std::process::id()] }
        );
        let request = server.join().unwrap();
        assert!(request.starts_with("GET /version HTTP/1.1\r\nHost: localhost\r\n"), "{request}");
    }

    #[test]
    fn a_silent_server_ends_at_the_deadline() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let begun = Instant::now();
        let error = get(&tcp(&listener), Duration::from_millis(500), &[]).unwrap_err();
        assert!(error.0.contains("in time"), "{error}");
        assert!(begun.elapsed() < Duration::from_secs(3));
    }

    #[test]
    fn nobody_there_is_said() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let target = tcp(&listener);
        drop(listener);
        let error = get(&target, Duration::from_secs(1), &[]).unwrap_err();
        assert!(error.0.starts_with("could not connect to the application"), "{error}");
        let target = HttpTarget::Unix { socket: "/no/such/socket".into(), path: "/".into() };
        assert!(get(&target, Duration::from_secs(1), &[]).is_err());
    }

    #[test]
    fn abstract_sockets_are_reached() {
        let name = format!("cutover-test-{}", std::process::id());
        let address = UnixAddress::from_abstract_name(&name).unwrap();
        let listener = std::os::unix::net::UnixListener::bind_addr(&address).unwrap();
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.write_all(b"HTTP/1.0 200 OK\r\n\r\nok").unwrap();
        });
        let target = HttpTarget::Unix { socket: format!("@{name}"), path: "/".into() };
        let answer = get(&target, Duration::from_secs(5), &[]);
        // The server closes without reading: the answer counts, or the reset does.
        if let Ok(answer) = answer {
            assert_eq!(answer.body, b"ok");
        }
    }
}
