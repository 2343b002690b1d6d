//! A master, its replica, and three sentinels that watch over them.

use futures_util::future::join_all;

use super::{Port, Single, directory};
use crate::support::eventually;

/// What the sentinels call the master.
pub const MASTER: &str = "tides";

/// How many sentinels there are; two agree that the master is dead.
const SENTINELS: usize = 3;

/// A running set. A master is thought dead after a second (`down-after-milliseconds`).
pub struct Sentinel {
    servers: [Single; 2],
    sentinels: Vec<Single>,
}

impl Sentinel {
    /// Starts a set.
    pub async fn start() -> Self {
        Self::start_with("", &[]).await
    }

    /// Starts a set whose sentinels want a password; the servers want none.
    pub async fn with_password(password: &str) -> Self {
        Self::start_with(password, &[]).await
    }

    /// Starts a set whose servers do not know `HELLO`.
    pub async fn without_hello() -> Self {
        Self::start_with("", &["--rename-command", "HELLO", ""]).await
    }

    async fn start_with(password: &str, more: &[&str]) -> Self {
        let master = Single::start(&[&["--repl-diskless-sync-delay", "0"], more].concat()).await;
        let port = master.address().port().to_string();
        let following = ["--repl-diskless-sync-delay", "0", "--replicaof", "127.0.0.1", &port];
        let replica = Single::start(&[&following, more].concat()).await;
        eventually("the replica follows", async || {
            replica.cli(&["INFO", "replication"]).await.contains("master_link_status:up").then_some(())
        })
        .await;
        let sentinels = join_all((0..SENTINELS).map(|_| sentinel(&port, password))).await;
        let set = Self { servers: [master, replica], sentinels };
        eventually("the sentinels know each other and the replica", async || {
            for sentinel in &set.sentinels {
                let known = sentinel.cli(&["SENTINEL", "CKQUORUM", MASTER]).await;
                let replicas = sentinel.cli(&["SENTINEL", "REPLICAS", MASTER]).await;
                let replica = set.servers[1].address().to_string();
                if !known.starts_with(&format!("OK {SENTINELS} usable")) || !replicas.contains(&replica) {
                    return None;
                }
            }
            Some(())
        })
        .await;
        set
    }

    /// The servers: who begins as the master comes first.
    pub fn servers(&self) -> &[Single; 2] {
        &self.servers
    }

    /// The sentinels.
    pub fn sentinels(&self) -> &[Single] {
        &self.sentinels
    }

    /// What `REDIS_URL` takes: the name of the master and where the sentinels are.
    pub fn addresses(&self) -> String {
        let addresses = self.sentinels.iter().map(|sentinel| sentinel.address().to_string());
        [vec![MASTER.to_owned()], addresses.collect()].concat().join(",")
    }

    /// The server that a sentinel names as the master: 0 or 1.
    pub async fn master(&self) -> usize {
        let named = self.sentinels[0].cli(&["SENTINEL", "GET-MASTER-ADDR-BY-NAME", MASTER]).await;
        let named = named.replace('\n', ":");
        let master = self.servers.iter().position(|server| server.address().to_string() == named);
        master.unwrap_or_else(|| panic!("no server of ours: {named}"))
    }

    /// Makes the other server the master as an operator does, and waits until it is.
    pub async fn failover(&self) {
        let before = self.master().await;
        assert_eq!(self.sentinels[0].cli(&["SENTINEL", "FAILOVER", MASTER]).await, "OK");
        eventually("the other is master", async || (self.master().await != before).then_some(())).await;
    }
}

/// Sentinels of a server without a replica. They name what they are told to, so that some of them are like those that a partition
/// keeps from hearing of a failover.
pub struct Divided(Vec<Single>);

impl Divided {
    /// All of them name `server`.
    pub async fn of(server: &Single) -> Self {
        let port = server.address().port().to_string();
        Self(join_all((0..SENTINELS).map(|_| sentinel(&port, ""))).await)
    }

    /// The sentinels.
    pub fn sentinels(&self) -> &[Single] {
        &self.0
    }

    /// What `REDIS_URL` takes.
    pub fn addresses(&self) -> String {
        let addresses = self.0.iter().map(|sentinel| sentinel.address().to_string());
        [vec![MASTER.to_owned()], addresses.collect()].concat().join(",")
    }

    /// Has all but the first name `server`.
    pub async fn others_name(&self, server: &Single) {
        let port = server.address().port().to_string();
        for sentinel in &self.0[1..] {
            sentinel.cli(&["SENTINEL", "REMOVE", MASTER]).await;
            assert_eq!(sentinel.cli(&["SENTINEL", "MONITOR", MASTER, "127.0.0.1", &port, "2"]).await, "OK");
        }
    }
}

async fn sentinel(master_port: &str, password: &str) -> Single {
    let (port, directory) = (Port::free(), directory());
    let mut configuration = format!(
        "bind 127.0.0.1\nport {}\nlogfile redis.log\n\
         sentinel monitor {MASTER} 127.0.0.1 {master_port} 2\n\
         sentinel down-after-milliseconds {MASTER} 1000\n",
        port.address().port()
    );
    if !password.is_empty() {
        configuration += &format!("requirepass {password}\n");
    }
    // It writes there what it learns.
    let file = directory.path().join("sentinel.conf");
    std::fs::write(&file, configuration).expect("it is written");
    let password = Some(password).filter(|password| !password.is_empty()).map(str::to_owned);
    Single::run(vec![port], password, None, directory, vec![file.into(), "--sentinel".into()]).await
}
