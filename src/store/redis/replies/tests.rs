//! Tests: valid replies pass in pieces of any size; all others are refused before they take memory.

use proptest::prelude::*;
use redis::{Cmd, cmd, parse_redis_value};

use super::*;

/// Length of the shortest packed charge, which allows the smallest reply.
const SHORTEST_CHARGE: usize = 53;
/// Length of the longest row of a reply.
const ROW: usize = 37;

fn question(name: &str, argument: &str) -> Cmd {
    let mut command = cmd(name);
    command.arg(argument);
    command
}

fn script(charges: usize) -> Cmd {
    let mut command = question("EVALSHA", "7413a8b4c9c1e2d07413a8b4c9c1e2d07413a8b4");
    command.arg(1).arg("{d|key=value}gcra:1m");
    command.arg(vec![0_u8; charges * SHORTEST_CHARGE]);
    command
}

/// Returns the same call by the text of the script, which takes more than one write.
fn eval(charges: usize) -> Cmd {
    let mut command = question("EVAL", &"x".repeat(20_000));
    command.arg(1).arg("{d|key=value}gcra:1m");
    command.arg(vec![0_u8; charges * SHORTEST_CHARGE]);
    command
}

fn bulk(length: usize) -> Vec<u8> {
    [format!("${length}\r\n").into_bytes(), vec![b'x'; length], b"\r\n".to_vec()].concat()
}

/// Returns the longest reply to `charges` charges.
fn rows(charges: usize) -> Vec<u8> {
    bulk(8 + charges * ROW)
}

/// Returns a line of `CLUSTER SLOTS` with three nodes, as Redis 7.0 writes it.
fn line(slot: usize) -> String {
    let node = |port: usize| format!("*4\r\n$9\r\n127.0.0.1\r\n:{port}\r\n$40\r\n{port:040x}\r\n*0\r\n");
    format!("*5\r\n:{slot}\r\n:{slot}\r\n{}{}{}", node(30_001), node(30_002), node(30_003))
}

fn map(lines: usize) -> Vec<u8> {
    let lines_text: String = (0..lines).map(line).collect();
    format!("*{lines}\r\n{lines_text}").into_bytes()
}

fn asking(commands: &[Cmd]) -> ReplyStream {
    let mut replies = ReplyStream::default();
    commands.iter().for_each(|command| replies.sent(&command.get_packed_command()));
    replies
}

/// Returns the refusal of `received` as a reply to `command`, and the number of bytes that passed before it.
fn refused(command: &Cmd, received: &[u8]) -> (InvalidReply, usize) {
    let mut replies = asking(std::slice::from_ref(command));
    let mut passed = 0;
    for piece in received.chunks(100) {
        match replies.received(piece) {
            Ok(()) => passed += piece.len(),
            Err(refusal) => return (refusal, passed),
        }
    }
    panic!("{} bytes came through", received.len())
}

#[test]
fn replies_of_an_honest_server_come_through_in_pieces_of_any_size() {
    let hello = "%7\r\n$6\r\nserver\r\n$5\r\nredis\r\n$7\r\nversion\r\n$6\r\n7.0.15\r\n$5\r\nproto\r\n:3\r\n\
                 $2\r\nid\r\n:5\r\n$4\r\nmode\r\n$10\r\nstandalone\r\n$4\r\nrole\r\n$6\r\nmaster\r\n$7\r\nmodules\r\n*0\r\n";
    let time = "*2\r\n$10\r\n1700000000\r\n$6\r\n123456\r\n";
    let role = "*3\r\n$6\r\nmaster\r\n:5\r\n*1\r\n*3\r\n$9\r\n127.0.0.1\r\n$4\r\n6380\r\n$1\r\n5\r\n";
    let moved = format!("-MOVED 12182 {}:65535\r\n", "h".repeat(253));
    let talk: Vec<(Cmd, Vec<u8>)> = vec![
        (question("HELLO", "3"), hello.into()),
        (cmd("TIME"), time.into()),
        (question("SCRIPT", "LOAD"), bulk(40)),
        (cmd("ROLE"), role.into()),
        (question("INFO", "memory"), bulk(1_392)),
        (question("SENTINEL", "get-master-addr-by-name"), b"*-1\r\n".to_vec()),
        (question("SENTINEL", "get-master-addr-by-name"), b"_\r\n".to_vec()),
        (question("CLUSTER", "INFO"), [b"=500\r\n".to_vec(), vec![b'\n'; 500], b"\r\n".to_vec()].concat()),
        (question("CLUSTER", "SLOTS"), map(3)),
        (script(1), rows(1)),
        (script(0), bulk(8)),
        (cmd("ASKING"), b"+OK\r\n".to_vec()),
        (eval(1), rows(1)),
        (eval(2), rows(2)),
        (script(1), moved.into_bytes()),
        (script(1), format!("-MISCONF {}\r\n", "x".repeat(340)).into_bytes()),
        (cmd("PING"), b"+PONG\r\n".to_vec()),
    ];
    let sent: Vec<u8> = talk.iter().flat_map(|(command, _)| command.get_packed_command()).collect();
    let received: Vec<u8> = talk.iter().flat_map(|(_, reply)| reply.clone()).collect();
    for size in [1, 2, 3, 7, 100, sent.len() + received.len()] {
        let mut replies = ReplyStream::default();
        sent.chunks(size).for_each(|piece| replies.sent(piece));
        assert_eq!(replies.asked.len(), talk.len());
        received.chunks(size).for_each(|piece| assert_eq!(replies.received(piece), Ok(()), "pieces of {size}"));
        assert_eq!(replies.asked.len(), 0, "pieces of {size}");
    }
}

#[test]
fn the_longest_replies_to_the_largest_requests_come_through() {
    for (calls, scripts, charges) in [(1_024, 1, 100), (1, 1, 1_000), (1, 25, 100), (4, 1_000, 1)] {
        let mut replies = asking(&vec![script(charges); calls * scripts]);
        for _ in 0..calls * scripts {
            assert_eq!(replies.received(&rows(charges)), Ok(()), "{charges} charges");
        }
        assert!(replies.asked.is_empty());
    }
    let slots = question("CLUSTER", "SLOTS");
    let (lines, mut replies) = (LARGEST_MAP / line(10_000).len() - 1, asking(std::slice::from_ref(&slots)));
    assert_eq!(replies.received(&map(lines)), Ok(()), "{lines} lines");
    assert_eq!(refused(&slots, &map(lines + 3_000)).0, InvalidReply::TooLarge);
}

#[test]
fn a_reply_that_announces_too_much_is_refused_before_it_arrives() {
    let (charge, time, slots) = (script(1), cmd("TIME"), question("CLUSTER", "SLOTS"));
    for announced in ["$536870912\r\n", "*1000000000\r\n", "%9223372036854775807\r\n", "*99999999999999999999\r\n"] {
        for command in [&charge, &eval(1), &time, &slots] {
            assert_eq!(refused(command, announced.as_bytes()), (InvalidReply::TooLarge, 0), "{announced}");
        }
    }
    assert_eq!(refused(&charge, b"*1\r\n"), (InvalidReply::TooLarge, 0), "the script answers no array");
    assert_eq!(refused(&charge, &bulk(2_000)).0, InvalidReply::TooLarge);
    assert_eq!(refused(&time, "*1\r\n".repeat(9).as_bytes()), (InvalidReply::Malformed, 0), "so deep is none");
    // Each value announces little, but together it is too much.
    let (refusal, passed) = refused(&time, "*100\r\n_\r\n".repeat(1_000).as_bytes());
    assert!(passed <= LARGEST, "{refusal}: {passed}");
}

#[test]
fn a_reply_without_an_end_is_refused_at_its_bound() {
    let endless = |begin: &str, more: &str| [begin, &more.repeat((10 << 20) / more.len())].concat().into_bytes();
    for (command, most) in [
        (script(1), 1_200),
        (script(1_000), 130_000),
        (cmd("TIME"), LARGEST),
        (question("CLUSTER", "SLOTS"), LARGEST_MAP),
    ] {
        for received in [endless("+", "x"), endless("-", "ERR "), endless(":", "1"), endless("*8000\r\n+", "x")] {
            let (refusal, passed) = refused(&command, &received);
            assert_eq!(refusal, InvalidReply::TooLarge);
            assert!(passed <= most, "{passed} of {most}");
        }
    }
}

#[test]
fn bytes_that_no_redis_sends_are_refused() {
    for wrong in
        ["x", "\r\n", "$\r\n", "$-\r\n", "$1x\r\n", "$1\n", "%-1\r\n", "!-1\r\n", "+a\nb\r\n", ">1\r\n", "|1\r\n"]
    {
        assert_eq!(refused(&cmd("TIME"), wrong.as_bytes()), (InvalidReply::Malformed, 0), "{wrong:?}");
    }
    assert_eq!(asking(&[]).received(b"+OK\r\n"), Err(InvalidReply::Unasked));
    assert_eq!(asking(&[cmd("PING")]).received(b"+PONG\r\n+PONG\r\n"), Err(InvalidReply::Unasked));
}

/// Pieces of valid and invalid replies.
const PIECES: [&str; 22] = [
    "*2\r\n",
    "*1\r\n",
    "*0\r\n",
    "*-1\r\n",
    "%1\r\n",
    "~1\r\n",
    "$3\r\nabc\r\n",
    "$0\r\n\r\n",
    "$-1\r\n",
    "+OK\r\n",
    "-ERR x\r\n",
    ":5\r\n",
    "_\r\n",
    "#t\r\n",
    ",1.5\r\n",
    "(123\r\n",
    "!3\r\nERR\r\n",
    "=7\r\ntxt:abc\r\n",
    "\n",
    "\r\n",
    "+a",
    "$07\r\n",
];

proptest! {
    #[test]
    fn requests_and_replies_mean_the_same_in_pieces_as_in_whole(
        requests in proptest::collection::vec((0_usize..4, 0_usize..300), 1..6),
        replies in proptest::collection::vec(proptest::sample::select(&PIECES[..]), 0..12),
        size in 1_usize..40,
    ) {
        let request = |&(kind, length): &(usize, usize)| match kind {
            0 => script(length),
            1 => question("CLUSTER", "SLOTS"),
            2 => cmd("TIME"),
            _ => question("SCRIPT", &"x".repeat(length)),
        };
        let sent: Vec<u8> = requests.iter().flat_map(|kind| request(kind).get_packed_command()).collect();
        let received = replies.concat().into_bytes();
        let talk = |size: usize| {
            let mut stream = ReplyStream::default();
            sent.chunks(size).for_each(|piece| stream.sent(piece));
            let asked = stream.asked.clone();
            let end = received.chunks(size).try_for_each(|piece| stream.received(piece));
            (asked, end, stream.asked)
        };
        prop_assert_eq!(talk(size), talk(usize::MAX));
    }

    #[test]
    fn the_end_of_a_reply_is_where_the_parser_finds_it(
        pieces in proptest::collection::vec(proptest::sample::select(&PIECES[..]), 1..12)
    ) {
        let bytes = pieces.concat().into_bytes();
        let mut rest = bytes.as_slice();
        let ours = ReplyFrames::default().read(&mut rest, Limits::NONE);
        let read = bytes.len() - rest.len();
        let theirs = (1..=bytes.len()).find(|end| parse_redis_value(&bytes[..*end]).is_ok());
        match ours {
            Ok(Some(_)) => prop_assert!(theirs.is_none_or(|theirs| theirs == read), "{read}, not {theirs:?}"),
            Ok(None) => prop_assert_eq!(theirs, None),
            Err(_) => {}
        }
    }
}

#[test]
fn only_lengths_of_up_to_four_digits_are_read_at_once() {
    assert_eq!(whole_length(b"9999\r\n"), Some((9_999, 6)));
    assert_eq!(whole_length(b"10000\r\n"), None, "byte by byte, so that each digit is checked");
    assert_eq!(whole_length(b"\r\n"), None);
}
