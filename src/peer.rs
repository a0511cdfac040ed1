//! Which processes hold the other end of a connection, as the kernel shows it.
//!
//! `SO_PEERCRED` names who called `listen()`, which is PID 1 under socket activation and the parent in pre-fork
//! servers, and TCP has no such thing. So the other end's socket is found by its inode (TCP: `/proc/net/tcp` and
//! `tcp6`; Unix: the kernel's socket diagnosis), and then the processes that have it open (`/proc/PID/fd`).
//!
//! A connection that the server has not accepted yet has no inode there: the answer is empty, and the caller asks
//! again. It stays empty where the other end is on another machine, in another network namespace or behind
//! address translation, where the kernel was built without Unix socket diagnosis (`CONFIG_UNIX_DIAG`), and where
//! the processes may not be read (CAP_SYS_PTRACE).

use std::fs::File;
use std::io::{self, BufRead as _, BufReader};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::net::netlink::{SOCK_DIAG, SocketAddrNetlink};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, sendto, socket_with, sockopt,
};

/// The inode of the socket at the server's end of a TCP connection; none before it is accepted, and where it is
/// not on this machine.
///
/// # Errors
/// Where the connection is gone or /proc cannot be read.
pub fn of_tcp(stream: &TcpStream) -> io::Result<Option<u64>> {
    let (ours, theirs) = (canonical(stream.local_addr()?), canonical(stream.peer_addr()?));
    // A server on [::] has IPv4 connections in tcp6.
    for table in ["/proc/self/net/tcp", "/proc/self/net/tcp6"] {
        let file = match File::open(table) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue, // no IPv6
            file => file?,
        };
        for line in BufReader::new(file).lines() {
            if let Some(row) = parse_row(&line?)
                && row.local == theirs
                && row.remote == ours
            {
                return Ok((row.inode != 0).then_some(row.inode));
            }
        }
    }
    Ok(None)
}

/// As [`of_tcp`], of a Unix connection.
///
/// # Errors
/// Where the kernel cannot be asked.
pub fn of_unix(stream: &UnixStream) -> io::Result<Option<u64>> {
    // Socket inodes are numbered in 32 bits.
    let Ok(inode) = u32::try_from(rustix::fs::fstat(stream)?.st_ino) else { return Ok(None) };
    let netlink =
        socket_with(AddressFamily::NETLINK, SocketType::DGRAM, SocketFlags::CLOEXEC, Some(SOCK_DIAG))?;
    // The kernel answers before sendto returns; the bound is against a kernel that does not.
    sockopt::set_socket_timeout(&netlink, sockopt::Timeout::Recv, Some(Duration::from_secs(1)))?;
    sendto(&netlink, &unix_diag_request(inode), SendFlags::empty(), &SocketAddrNetlink::new(0, 0))?;
    let mut answer = [0; 4096];
    let (_, length) = recv(&netlink, &mut answer[..], RecvFlags::empty())?;
    Ok(parse_unix_diag(&answer[..length.min(answer.len())])?.map(u64::from))
}

/// The processes that have the socket open: among `first` if any of them has, else among all.
#[must_use]
pub fn holders(inode: u64, first: &[u32]) -> Vec<u32> {
    let wanted = format!("socket:[{inode}]");
    let found: Vec<u32> = first.iter().copied().filter(|pid| holds(*pid, &wanted)).collect();
    if !found.is_empty() {
        return found;
    }
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    let mut all: Vec<u32> = entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(|pid| holds(*pid, &wanted))
        .collect();
    all.sort_unstable();
    all
}

fn holds(pid: u32, wanted: &str) -> bool {
    // Gone or not ours to read: it holds nothing that we can prove.
    let Ok(entries) = std::fs::read_dir(format!("/proc/{pid}/fd")) else { return false };
    entries
        .flatten()
        .any(|entry| std::fs::read_link(entry.path()).is_ok_and(|link| link.as_os_str() == wanted))
}

/// IPv4 in IPv6 clothes is IPv4; scope and flow are not in the kernel's table.
fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

/// One connection in `/proc/net/tcp` or `tcp6`.
#[derive(Debug, PartialEq, Eq)]
struct Row {
    local: SocketAddr,
    remote: SocketAddr,
    inode: u64,
}

/// `sl local remote st tx:rx tr:when retrnsmt uid timeout inode …`
fn parse_row(line: &str) -> Option<Row> {
    let mut fields = line.split_ascii_whitespace();
    let local = parse_address(fields.nth(1)?)?;
    let remote = parse_address(fields.next()?)?;
    let inode = fields.nth(6)?.parse().ok()?;
    Some(Row { local, remote, inode })
}

/// `0100007F:1F90`: each 32-bit word of the address as a number in the machine's byte order, the port as a number.
fn parse_address(text: &str) -> Option<SocketAddr> {
    let (words, port) = text.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    let word = |at: usize| u32::from_str_radix(words.get(at..at + 8)?, 16).ok().map(u32::to_ne_bytes);
    let ip = match words.len() {
        8 => IpAddr::V4(Ipv4Addr::from(word(0)?)),
        32 => {
            let mut bytes = [0; 16];
            for (index, chunk) in bytes.chunks_exact_mut(4).enumerate() {
                chunk.copy_from_slice(&word(index * 8)?);
            }
            IpAddr::V6(Ipv6Addr::from(bytes))
        }
        _ => return None,
    };
    Some(canonical(SocketAddr::new(ip, port)))
}

// Numbers of linux/netlink.h, linux/sock_diag.h and linux/unix_diag.h.
const NLM_F_REQUEST: u16 = 1;
const NLMSG_ERROR: u16 = 2;
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const AF_UNIX: u8 = 1;
const UDIAG_SHOW_PEER: u32 = 4;
const UNIX_DIAG_PEER: u16 = 2;
const HEADER: usize = 16; // struct nlmsghdr
const UNIX_DIAG_MSG: usize = 16; // struct unix_diag_msg

/// `struct nlmsghdr` and `struct unix_diag_req`, asking for one socket's peer.
fn unix_diag_request(inode: u32) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.extend(40u32.to_ne_bytes()); // length of both
    bytes.extend(SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    bytes.extend(NLM_F_REQUEST.to_ne_bytes());
    bytes.extend([0; 8]); // sequence, port
    bytes.extend([AF_UNIX, 0, 0, 0]); // family, protocol, padding
    bytes.extend(u32::MAX.to_ne_bytes()); // any state
    bytes.extend(inode.to_ne_bytes());
    bytes.extend(UDIAG_SHOW_PEER.to_ne_bytes());
    bytes.extend([0xff; 8]); // any cookie
    bytes
}

/// The peer's inode in the answer; none where the peer has not been accepted.
fn parse_unix_diag(answer: &[u8]) -> io::Result<Option<u32>> {
    let short = || io::Error::new(io::ErrorKind::InvalidData, "a short answer to socket diagnosis");
    let u16_at = |at: usize| Some(u16::from_ne_bytes(answer.get(at..at + 2)?.try_into().ok()?));
    let u32_at = |at: usize| Some(u32::from_ne_bytes(answer.get(at..at + 4)?.try_into().ok()?));
    match u16_at(4).ok_or_else(short)? {
        NLMSG_ERROR => {
            let code = u32_at(HEADER).ok_or_else(short)?.cast_signed();
            return Err(io::Error::from_raw_os_error(-code));
        }
        SOCK_DIAG_BY_FAMILY => {}
        _ => return Ok(None),
    }
    let mut at = HEADER + UNIX_DIAG_MSG;
    while let (Some(length), Some(kind)) = (u16_at(at), u16_at(at + 2)) {
        if kind == UNIX_DIAG_PEER {
            return Ok(u32_at(at + 4).filter(|inode| *inode != 0));
        }
        // Attributes are aligned to four bytes, and none is shorter than its header.
        at += usize::from(length).max(4).next_multiple_of(4);
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    #[cfg(target_endian = "little")]
    fn rows_of_the_kernels_tables() {
        let line = "   0: 0100007F:1F90 0200000A:D431 01 00000000:00000000 00:00000000 00000000  1000        0 12345 1 0";
        assert_eq!(
            parse_row(line),
            Some(Row {
                local: "127.0.0.1:8080".parse().unwrap(),
                remote: "10.0.0.2:54321".parse().unwrap(),
                inode: 12345
            })
        );
        let mapped = parse_address("0000000000000000FFFF00000100007F:0050");
        assert_eq!(mapped, Some("127.0.0.1:80".parse().unwrap()), "IPv4 in tcp6");
        let v6 = parse_address("00000000000000000000000001000000:0050");
        assert_eq!(v6, Some("[::1]:80".parse().unwrap()));
        assert_eq!(parse_row("  sl  local_address rem_address   st"), None);
        assert_eq!(parse_address("01:0050"), None);
    }

    #[test]
    fn attributes_of_an_answer() {
        let mut answer = vec![0; HEADER + UNIX_DIAG_MSG];
        answer[4..6].copy_from_slice(&SOCK_DIAG_BY_FAMILY.to_ne_bytes());
        assert_eq!(parse_unix_diag(&answer).unwrap(), None, "no attribute");
        // A name (type 0, five bytes and padding), then the peer.
        answer.extend([9, 0, 0, 0, b'/', b'a', b'b', b'c', b'd', 0, 0, 0]);
        answer.extend([8, 0, 2, 0]);
        answer.extend(77u32.to_ne_bytes());
        if cfg!(target_endian = "little") {
            assert_eq!(parse_unix_diag(&answer).unwrap(), Some(77));
        }
        assert!(parse_unix_diag(&[0; 3]).is_err());
        let mut refused = vec![0; HEADER];
        refused[4..6].copy_from_slice(&NLMSG_ERROR.to_ne_bytes());
        refused.extend((-2i32).to_ne_bytes());
        assert_eq!(parse_unix_diag(&refused).unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn the_end_of_a_tcp_connection_is_found_once_accepted() {
        for address in ["127.0.0.1:0", "[::]:0"] {
            let Ok(listener) = TcpListener::bind(address) else { continue }; // no IPv6
            let port = listener.local_addr().unwrap().port();
            let stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
            assert_eq!(of_tcp(&stream).unwrap(), None, "not accepted yet");
            let accepted = listener.accept().unwrap();
            let inode = of_tcp(&stream).unwrap().unwrap();
            let me = std::process::id();
            assert_eq!(holders(inode, &[me]), [me]);
            assert_eq!(holders(inode, &[]), [me], "found without a hint");
            drop(accepted);
        }
    }

    #[test]
    fn the_end_of_a_unix_connection_is_found_once_accepted() {
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join("s")).unwrap();
        let stream = UnixStream::connect(dir.path().join("s")).unwrap();
        match of_unix(&stream) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return, // a kernel without it
            inode => assert_eq!(inode.unwrap(), None, "not accepted yet"),
        }
        let (accepted, _) = listener.accept().unwrap();
        let inode = of_unix(&stream).unwrap().unwrap();
        assert_eq!(inode, rustix::fs::fstat(&accepted).unwrap().st_ino);
        assert_eq!(holders(inode, &[]), [std::process::id()]);
    }
}
