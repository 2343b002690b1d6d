//! The least privileged user that Tidegate needs: the one that docs/redis.md shows to operators, read from there.

use super::{Single, cli};
use crate::support::repository;

/// What the user may put in front of its keys: `CACHE_KEY_PREFIX` begins with it.
pub const PREFIX: &str = "tidegate:";

/// How the servers of a Redis stand together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    Single,
    Sentinel,
    Cluster,
    /// The sentinels themselves.
    OfSentinels,
}

impl Shape {
    /// What `REDIS_TYPE` says.
    pub fn name(self) -> &'static str {
        match self {
            Self::Single => "single",
            Self::Sentinel | Self::OfSentinels => "sentinel",
            Self::Cluster => "cluster",
        }
    }
}

/// A user as an ACL line makes it.
pub struct User {
    pub name: String,
    pub password: String,
    rules: Vec<String>,
}

impl User {
    /// The documented user of the servers of that shape, with a password of this test.
    pub fn of(shape: Shape) -> Self {
        let page = std::fs::read_to_string(repository("docs/redis.md")).expect("it reads");
        let lines: Vec<_> = page.lines().filter_map(|line| line.strip_prefix("user tidegate ")).collect();
        let [single, sentinel, cluster, sentinels] = lines[..] else {
            panic!("docs/redis.md has four users: {lines:?}")
        };
        let line = match shape {
            Shape::Single => single,
            Shape::Sentinel => sentinel,
            Shape::Cluster => cluster,
            Shape::OfSentinels => sentinels,
        };
        let password = format!("of-{}-{}", shape.name(), std::process::id());
        let rules = line.replace("PASSWORD", &password);
        Self { name: "tidegate".to_owned(), password, rules: rules.split(' ').map(str::to_owned).collect() }
    }

    /// The same rights under another name and password.
    pub fn but(self, name: &str, password: &str) -> Self {
        let rules = self.rules.iter().map(|rule| rule.replace(&self.password, password)).collect();
        Self { name: name.to_owned(), password: password.to_owned(), rules }
    }

    /// What `REDIS_AUTH` says.
    pub fn auth(&self) -> String {
        format!("{}:{}", self.name, self.password)
    }

    /// Makes a server know the user, and nothing of one that it had by that name.
    pub async fn let_in(&self, server: &Single) {
        let rules = self.rules.iter().map(String::as_str);
        let set: Vec<_> = ["ACL", "SETUSER", &self.name, "reset"].into_iter().chain(rules).collect();
        assert_eq!(server.cli(&set).await, "OK", "{set:?}");
    }

    /// What a server answers to a command of this user.
    pub async fn cli(&self, server: &Single, command: &[&str]) -> String {
        cli(&format!("redis://{}@{}", self.auth(), server.address()), command).await
    }

    /// What a server has kept of commands that it refused; empty when it has refused this user none.
    pub async fn denied(&self, server: &Single) -> String {
        let log = server.cli(&["ACL", "LOG"]).await;
        let is_ours = log.split("\nusername\n").skip(1).any(|rest| rest.lines().next() == Some(&self.name));
        if is_ours { log } else { String::new() }
    }
}
