//! The documented user may do what Tidegate does, and nothing else.

use futures_util::future::join_all;
use tonic::Code;

use super::{PREFIX, Service, keys, user};
use crate::redis::Single;
use crate::redis::user::{Shape, User};
use crate::support::{eventually, repository};

/// What somebody with the password of the documented user must not be able to do.
const FORBIDDEN: &[&[&str]] = &[
    &["FLUSHALL"],
    &["FLUSHDB"],
    &["KEYS", "*"],
    &["SCAN", "0"],
    &["DEL", "tidegate:a"],
    &["GET", "other:a"],
    &["SET", "other:a", "1"],
    &["SET", "a", "1"],
    &["EVAL", "return 1", "0"],
    &["SCRIPT", "FLUSH"],
    &["SCRIPT", "KILL"],
    &["FUNCTION", "LIST"],
    &["CONFIG", "GET", "*"],
    &["CONFIG", "SET", "requirepass", ""],
    &["DEBUG", "SLEEP", "0"],
    &["ACL", "LIST"],
    &["CLIENT", "LIST"],
    &["MONITOR"],
    &["SAVE"],
    &["REPLICAOF", "NO", "ONE"],
    &["MODULE", "LIST"],
    &["CLUSTER", "FAILOVER"],
    &["CLUSTER", "RESET"],
    &["PUBLISH", "channel", "message"],
    &["SUBSCRIBE", "channel"],
    &["SHUTDOWN", "NOSAVE"],
];

#[tokio::test]
async fn the_documented_user_may_do_nothing_else() {
    // What a server allows to nobody says nothing of a user.
    let server = Single::start(&["--enable-debug-command", "yes"]).await;
    for shape in [Shape::Single, Shape::Sentinel, Shape::Cluster] {
        let user = User::of(shape);
        user.let_in(&server).await;
        assert_eq!(user.cli(&server, &["SET", "tidegate:a", "1"]).await, "OK");
        let answers = join_all(FORBIDDEN.iter().map(|command| user.cli(&server, command))).await;
        for (command, answer) in FORBIDDEN.iter().zip(answers) {
            assert!(answer.starts_with("NOPERM"), "{shape:?} {command:?}: {answer}");
        }
        // In a script too.
        for body in ["redis.call('FLUSHALL')", "redis.call('GET', 'other:a')"] {
            let sha = user.cli(&server, &["SCRIPT", "LOAD", body]).await;
            let answer = user.cli(&server, &["EVALSHA", &sha, "0"]).await;
            // Until Redis 7, and from Redis 8 on.
            let is_refused = ["The user executing the script can't ", "ACL failure in script"];
            assert!(is_refused.iter().any(|text| answer.contains(text)), "{shape:?} {body}: {answer}");
        }
        assert!(!user.denied(&server).await.is_empty(), "what is refused is in the log that is empty elsewhere");
    }
    assert_eq!(server.cli(&["GET", "tidegate:a"]).await, "1");
}

#[tokio::test]
async fn a_server_takes_the_documented_lines_from_its_configuration() {
    let page = std::fs::read_to_string(repository("docs/redis.md")).expect("it reads");
    let block = page.split("## redis.conf").nth(1).and_then(|rest| rest.split("```").nth(1)).expect("a block");
    let lines = block.lines().skip(1).filter(|line| !line.starts_with('#'));
    let options: Vec<_> = lines.map(|line| line.split_once(' ').expect("a name and a value")).collect();
    assert!(options.contains(&("maxmemory-policy", "noeviction")), "{options:?}");
    let users = page.lines().filter(|line| line.starts_with("user tidegate "));
    for user in users.filter(|line| !line.contains("sentinel|")) {
        let configuration = tempfile::NamedTempFile::new().expect("a file");
        let text = options.iter().map(|(name, value)| format!("{name} {value}\n")).collect::<String>() + user + "\n";
        std::fs::write(configuration.path(), text).expect("it is written");
        let server = Single::start(&["--include", configuration.path().to_str().expect("a path of text")]).await;
        for (name, value) in &options {
            assert_eq!(server.cli(&["CONFIG", "GET", name]).await, format!("{name}\n{value}"));
        }
        let listed = server.cli(&["ACL", "LIST"]).await;
        assert!(listed.contains("user tidegate on "), "{listed}");
    }
}

#[tokio::test]
async fn a_missing_right_is_answered_by_policy_and_named_without_the_key() {
    let server = Single::start(&[]).await;
    let alice = user("alice");
    alice.let_in(&server).await;
    let (address, auth) = (server.address().to_string(), alice.auth());
    let given = [("REDIS_URL", address.as_str()), ("REDIS_AUTH", &auth)];
    let outside = Service::start(&[given[0], given[1], ("CACHE_KEY_PREFIX", "elsewhere:")]).await;
    outside.fails("NOPERM").await;

    // A right that is taken away while it runs, and given back.
    let inside = Service::start(&[given[0], given[1], ("CACHE_KEY_PREFIX", PREFIX)]).await;
    inside.counts("a").await;
    assert_eq!(server.cli(&["ACL", "SETUSER", "alice", "-set"]).await, "OK");
    inside.fails("store.script.refused").await;
    assert_eq!(server.cli(&["ACL", "SETUSER", "alice", "+set"]).await, "OK");
    inside.counts("a").await;

    assert_eq!(server.cli(&["ACL", "SETUSER", "alice", "-script"]).await, "OK");
    let unprepared = Service::start(&[given[0], given[1], ("CACHE_KEY_PREFIX", PREFIX)]).await;
    let log = unprepared.fails("cannot connect to Redis").await;
    assert!(log.contains("'script|load'"), "{log}");
    assert_eq!(server.cli(&["ACL", "SETUSER", "alice", "+script|load"]).await, "OK");
    unprepared.counts("a").await;

    let third =
        Service::start(&[("REDIS_URL", &format!("redis://{auth}@{address}/3")), ("CACHE_KEY_PREFIX", PREFIX)]).await;
    let log = third.fails("cannot connect to Redis").await;
    assert!(log.contains("select"), "{log}");
    assert_eq!(server.cli(&["ACL", "SETUSER", "alice", "+select"]).await, "OK");
    third.counts("a").await;
}

#[tokio::test]
async fn the_rights_from_zadd_to_pexpire_are_for_logs_and_for_counting_instances_alone() {
    let server = Single::start(&[]).await;
    let alice = user("alice");
    alice.let_in(&server).await;
    let page = std::fs::read_to_string(repository("docs/redis.md")).expect("it reads");
    let line = page.lines().find(|line| line.starts_with("user tidegate ")).expect("a user");
    let rights: Vec<_> = line.split(" +").skip_while(|right| *right != "zadd").collect();
    let last = rights.iter().position(|right| *right == "pexpire").expect("the last of them");
    let set = async |sign: &str| {
        let rights: Vec<_> = rights[..=last].iter().map(|right| format!("{sign}{right}")).collect();
        let command: Vec<_> =
            ["ACL", "SETUSER", "alice"].into_iter().chain(rights.iter().map(String::as_str)).collect();
        assert_eq!(server.cli(&command).await, "OK", "{command:?}");
    };
    set("-").await;
    let (address, auth) = (server.address().to_string(), alice.auth());
    let given = [("REDIS_URL", address.as_str()), ("REDIS_AUTH", &auth), ("CACHE_KEY_PREFIX", PREFIX)];
    // Instances that count themselves need some of them too.
    let service = Service::start(&[&given[..], &[("REPLICAS", "1")]].concat()).await;
    for others in ["week", "sliding_window", "token_bucket", "leaky_bucket", "gcra"] {
        eventually("Redis counts", async || service.ask(others, "a").await.ok()).await;
    }
    assert_eq!(alice.denied(&server).await, "");
    assert_eq!(service.ask("sliding_log", "a").await, Err(Code::Unavailable));
    assert_ne!(alice.denied(&server).await, "");
    set("+").await;
    eventually("Redis counts", async || service.ask("sliding_log", "a").await.ok()).await;
}

#[tokio::test]
async fn without_the_rights_of_a_log_its_policy_answers_and_the_others_count_on() {
    let server = Single::start(&[]).await;
    let alice = user("alice");
    alice.let_in(&server).await;
    let (address, auth) = (server.address().to_string(), alice.auth());
    let given = [("REDIS_URL", address.as_str()), ("REDIS_AUTH", &auth), ("CACHE_KEY_PREFIX", PREFIX)];
    let service = Service::start(&[&given[..], &[("REPLICAS", "1")]].concat()).await;
    service.counts("a").await;
    let mut left = service.ask("week", "a").await.expect("it counts");
    for (right, value) in [("@sortedset", "all"), ("zadd", "written"), ("zrange", "read")] {
        assert_eq!(server.cli(&["ACL", "SETUSER", "alice", &format!("-{right}")]).await, "OK");
        for _ in 0..3 {
            assert_eq!(service.ask("sliding_log", value).await, Err(Code::Unavailable), "without {right}");
            let now = service.ask("week", "a").await.expect("no log is asked");
            assert_eq!(now, left - 1, "without {right}");
            left = now;
        }
        assert_eq!(keys(&server, "0").await, ["tidegate:{d|week=a}fixed_window:7d"], "nothing was written of a log");
        alice.let_in(&server).await;
        eventually("the log counts", async || service.ask("sliding_log", "b").await.ok()).await;
        assert_eq!(server.cli(&["DEL", "tidegate:{d|sliding_log=b}sliding_log:7d"]).await, "1");
    }
    let log = service.log();
    assert!(log.contains("store.script.refused"), "{log}");
}
