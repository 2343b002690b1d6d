use super::{Auth, RedisSettings};
use crate::file::{MAX_SECRET, Named};
use crate::model::Micros;
use crate::settings::StoreChoice;
use crate::settings::tests::{read, wrong};
use crate::store::redis::address::{Address, Topology};
use crate::store::redis::auth_command::AuthCommand;
use crate::store::redis::login::{Login, Secret};

fn main(given: &[(&str, &str)]) -> RedisSettings {
    match read(given).unwrap_or_else(|wrong| panic!("{given:?}: {wrong:?}")).store {
        StoreChoice::Redis { main, .. } => *main,
        StoreChoice::Memory { .. } => panic!("no Redis"),
    }
}

fn at(url: &str) -> RedisSettings {
    main(&[("REDIS_URL", url)])
}

/// Returns the user and the password.
fn credentials(auth: &Auth) -> Option<(Option<&str>, &str)> {
    match auth {
        Auth::Given(Login { user, password }) => Some((user.as_deref(), password.as_ref()?.expose())),
        _ => None,
    }
}

#[test]
fn a_single_server_has_many_spellings() {
    for (url, told) in [
        ("redis:6379", "redis at redis:6379"),
        (" 10.0.0.1:1 ", "redis at 10.0.0.1:1"),
        ("[::1]:6380", "redis at [::1]:6380"),
        ("/run/redis.sock", "redis at /run/redis.sock"),
        ("unix:///run/redis.sock", "redis at /run/redis.sock"),
        ("redis://cache.example.org", "redis at cache.example.org:6379"),
        ("redis://h:1/", "redis at h:1"),
        ("redis://h:1/15", "redis at h:1, database 15"),
        ("redis://[fe80::1]/2", "redis at [fe80::1]:6379, database 2"),
        ("rediss://h:1", "redis at h:1, TLS"),
    ] {
        assert_eq!(at(url).to_string(), told, "{url}");
    }
    let host = |url| match at(url).topology {
        Topology::Single(Address::Tcp(host, port)) => (host, port),
        other => panic!("{other:?}"),
    };
    assert_eq!(host("redis://[::1]:6380"), ("::1".to_owned(), 6380));
}

#[test]
fn a_url_may_say_who_asks() {
    let who = |url| at(url).auth;
    assert_eq!(credentials(&who("redis://alice:hunter2@h:1")), Some((Some("alice"), "hunter2")));
    assert_eq!(credentials(&who("redis://:hunter2@h:1")), Some((None, "hunter2")));
    assert_eq!(credentials(&who("redis://:h%40nt%3Aer%252@h:1")), Some((None, "h@nt:er%2")));
    assert_eq!(credentials(&who("redis://:h@nter:2@h:1")), Some((None, "h@nter:2")));
    assert_eq!(who("redis://h:1"), Auth::None);
}

#[test]
fn the_variables_win_over_the_url_and_one_of_them_is_enough() {
    let url = ("REDIS_URL", "redis://alice:hunter2@h:1");
    assert_eq!(credentials(&main(&[url, ("REDIS_AUTH", "bob:hunter3")]).auth), Some((Some("bob"), "hunter3")));
    assert_eq!(credentials(&main(&[url, ("REDIS_AUTH", " pass ")]).auth), Some((None, " pass ")));
    assert_eq!(credentials(&main(&[url, ("REDIS_AUTH", "")]).auth), Some((Some("alice"), "hunter2")));
    assert_eq!(
        main(&[url, ("REDIS_AUTH_FILE", "/secret")]).auth,
        Auth::File(Named::new("REDIS_AUTH_FILE", "/secret".into(), MAX_SECRET))
    );
    assert_eq!(
        wrong(&[url, ("REDIS_AUTH", "hunter3"), ("REDIS_AUTH_FILE", "/secret")]),
        [
            r#"REDIS_AUTH_FILE is "/secret": expected an empty value, because the variable without _FILE is set too; unset one of them"#
        ]
    );
}

#[test]
fn a_command_is_taken_apart_and_excludes_other_passwords() {
    let url = ("REDIS_URL", "redis://alice:hunter2@h:1");
    let command = AuthCommand::parse("REDIS_AUTH_COMMAND", "/bin/token --for 'my cache'").unwrap();
    assert_eq!(main(&[url, ("REDIS_AUTH_COMMAND", "/bin/token --for 'my cache'")]).auth, Auth::Command(command));
    let taken = r#"expected an empty value, because the password is given in another way too; unset one of them"#;
    for other in [("REDIS_AUTH", "hunter3"), ("REDIS_AUTH_FILE", "/secret")] {
        let found = wrong(&[url, other, ("REDIS_AUTH_COMMAND", "/bin/token")]);
        assert_eq!(found, [format!(r#"REDIS_AUTH_COMMAND is "***": {taken}"#)]);
    }
    for none in ["/bin/token 'a", "   ", "\n", "''"] {
        assert_eq!(
            wrong(&[url, ("REDIS_AUTH_COMMAND", none)]),
            [
                r#"REDIS_AUTH_COMMAND is "***": expected a program and its arguments, in quotes where they have spaces, as in a shell"#
            ],
            "{none:?}"
        );
    }
    assert_ne!(main(&[url, ("REDIS_AUTH_COMMAND", "")]).auth, Auth::None, "the URL has the login");
    assert!(matches!(main(&[url, ("REDIS_AUTH_COMMAND", " /bin/token ")]).auth, Auth::Command(_)));
}

#[test]
fn connections_have_a_greatest_age_of_a_second_or_more_or_none() {
    let url = ("REDIS_URL", "h:1");
    let age = |text| main(&[url, ("REDIS_CONNECTION_MAX_AGE", text)]).max_age;
    assert_eq!([age("12h"), age("1s"), age("0s")], [12 * 3600, 1, 0].map(Micros::from_secs));
    assert_eq!(
        wrong(&[url, ("REDIS_CONNECTION_MAX_AGE", "999ms")]),
        [r#"REDIS_CONNECTION_MAX_AGE is "999ms": expected 0s, or a duration of at least 1s, such as 12h"#]
    );
}

#[test]
fn sentinels_are_asked_for_a_master_by_its_name() {
    let given = [("REDIS_TYPE", "SENTINEL"), ("REDIS_URL", "tide, s1:26379,[::2]:26379"), ("REDIS_AUTH", "hunter2")];
    let settings = main(&[given[0], given[1], given[2], ("REDIS_SENTINEL_AUTH", "watch:hunter3")]);
    assert_eq!(settings.to_string(), "redis master tide, sentinels at s1:26379,[::2]:26379");
    assert_eq!(credentials(&settings.auth), Some((None, "hunter2")));
    let Topology::Sentinel { login: auth, .. } = settings.topology else { panic!("sentinels") };
    assert_eq!((auth.user.as_deref(), auth.password.as_ref().map(Secret::expose)), (Some("watch"), Some("hunter3")));
    for url in ["tide", "tide,", "s1:26379,s2:26379", ",s1:26379", "tide,s1", "tide,/run/redis.sock"] {
        let wrong = wrong(&[given[0], ("REDIS_URL", url)]);
        assert!(wrong.len() == 1 && wrong[0].contains("expected MASTER,HOST:PORT"), "{wrong:?}");
    }
}

#[test]
fn a_cluster_is_some_of_its_nodes() {
    let given = ("REDIS_TYPE", "Cluster");
    // The reference's images often set the socket type, which has no effect for a cluster.
    let settings = main(&[given, ("REDIS_URL", "n1:6379, n2:6379"), ("REDIS_SOCKET_TYPE", "unix")]);
    assert_eq!(settings.to_string(), "redis cluster at n1:6379,n2:6379");
    for url in ["n1", "n1:6379,", "n1:6379 n2:6379", "n1:0", "n1:65536", "redis://n1:6379", "::1:6379"] {
        let wrong = wrong(&[given, ("REDIS_URL", url)]);
        assert!(wrong.len() == 1 && wrong[0].contains("expected HOST:PORT,HOST:PORT"), "{wrong:?}");
    }
}

#[test]
fn a_bare_address_needs_no_socket_type_and_a_wrong_one_is_named() {
    assert_eq!(main(&[("REDIS_URL", "h:1"), ("REDIS_SOCKET_TYPE", "tcp")]).to_string(), "redis at h:1");
    assert_eq!(main(&[("REDIS_URL", "redis.sock"), ("REDIS_SOCKET_TYPE", "unix")]).to_string(), "redis at redis.sock");
    assert_eq!(
        wrong(&[("REDIS_URL", "h:1"), ("REDIS_SOCKET_TYPE", "unix")]),
        [r#"REDIS_SOCKET_TYPE is "unix": expected tcp or empty, because the URL is not a path"#]
    );
    assert_eq!(
        wrong(&[("REDIS_URL", "/run/redis.sock"), ("REDIS_SOCKET_TYPE", "TCP"), ("REDIS_TLS", "true")]),
        [
            r#"REDIS_SOCKET_TYPE is "tcp": expected unix or empty, because the URL is a path"#,
            r#"REDIS_TLS is "true": expected false, because the URL is the path of a socket"#,
        ]
    );
}

#[test]
fn what_is_no_address_stops_the_start() {
    for url in [
        "redis",
        "redis:",
        ":6379",
        "redis:0",
        "redis:99999",
        "h:1:2",
        "a b:1",
        "::1:6379",
        "[::1]",
        "[::1]6379",
        "[h]:1",
        "h:1,h:2",
        "http://h:1",
        "redis://",
        "redis://h:1/x",
        "redis://h:1/-1",
        "redis://h:1/1/2",
        "redis://user@h:1",
        "redis://user:@h:1",
        "redis://:%zz@h:1",
        "redis://:%ff@h:1",
        "redis://h:1?db=1",
        "unix://run/redis.sock",
        "REDIS://h:1",
    ] {
        let wrong = wrong(&[("REDIS_URL", url)]);
        assert!(wrong.len() == 1 && wrong[0].starts_with("REDIS_URL is "), "{url}: {wrong:?}");
    }
    for timeout in ["", "0", "5", "-1s"] {
        assert!(read(&[("REDIS_TIMEOUT", timeout)]).is_err(), "{timeout}");
    }
    assert!(read(&[("REDIS_TYPE", "")]).is_err());
}

#[test]
fn an_address_that_is_meant_for_another_topology_or_has_a_bare_slash_in_its_password_gets_that_advice() {
    for url in ["mymaster,s1:26379", "n1:6379,n2:6379", "mymaster,s1:26379,s2:26379"] {
        let single = "expected one address; for several, set REDIS_TYPE=sentinel (MASTER,HOST:PORT,HOST:PORT,...) or REDIS_TYPE=cluster (HOST:PORT,HOST:PORT,...)";
        assert_eq!(wrong(&[("REDIS_URL", url)]), [format!("REDIS_URL is {url:?}: {single}")]);
        let apart = [("REDIS_URL", "h:1"), ("REDIS_PERSECOND", "true"), ("REDIS_PERSECOND_URL", url)];
        assert!(wrong(&apart)[0].contains("set REDIS_PERSECOND_TYPE=sentinel (MASTER"), "{url}");
    }
    for (password, written) in [("a/b", "a%2Fb"), ("a?b", "a%3Fb"), ("a#b", "a%23b"), ("a%b", "a%25b")] {
        let found = wrong(&[("REDIS_URL", &format!("redis://:{password}@h:6379"))]);
        assert!(
            found[0].contains("`/`, `?`, `#`, `%` and `@` of user and password are written %2F, %3F, %23"),
            "{found:?}"
        );
        assert!(found[0].starts_with(r#"REDIS_URL is "redis://***"#), "{found:?}");
        assert_eq!(credentials(&at(&format!("redis://:{written}@h:6379")).auth), Some((None, password)));
    }
}

#[test]
fn no_password_is_in_an_error_or_in_what_is_printed() {
    for url in [
        "redis://alice:hunter2@h:x",
        "redis://alice:hunter2@",
        "redis://:hunter2",
        "redis://alice:hunter2",
        "redis://:hun?ter2@h:1",
        "redis://h:1?password=hunter2",
        "redis://h:1#hunter2",
        "redis://[::1]:hunter2",
        "redis://h:1/0?password=a@hunter2",
        "http://alice:hunter2@h:1",
        "alice:hunter2@h:1",
        "alice:hunter2@h:1,bob:hunter2@h:2",
        "redis://alice:hunter2@h:1,redis://bob:hunter2@h:2",
        "redis://alice:hun/hunter2@h:1:2",
    ] {
        for kind in ["single", "cluster", "sentinel"] {
            let wrong = wrong(&[("REDIS_URL", url), ("REDIS_TYPE", kind)]);
            assert!(!wrong.concat().contains("hunter2") && !wrong.concat().contains("ter2"), "{url}: {wrong:?}");
            assert!(wrong.concat().contains("***"), "{url}: {wrong:?}");
        }
    }
    let wrong = wrong(&[("REDIS_AUTH", "alice:\n"), ("REDIS_SENTINEL_AUTH", "hunter2\nhunter2")]);
    assert_eq!(
        wrong,
        [
            r#"REDIS_AUTH is "***": expected PASSWORD or USER:PASSWORD, on one line"#,
            r#"REDIS_SENTINEL_AUTH is "***": expected PASSWORD or USER:PASSWORD, on one line"#,
        ]
    );
    let settings = read(&[
        ("REDIS_URL", "redis://alice:hunter2@h:1"),
        ("REDIS_PERSECOND", "true"),
        ("REDIS_PERSECOND_TYPE", "sentinel"),
        ("REDIS_PERSECOND_URL", "tide,s:1"),
        ("REDIS_PERSECOND_AUTH", "hunter2"),
        ("REDIS_PERSECOND_SENTINEL_AUTH", "hunter2"),
    ]);
    let shown = format!("{:?}", settings.expect("settings"));
    assert!(shown.contains("password: Some(***)") && !shown.contains("hunter2"), "{shown}");
}
