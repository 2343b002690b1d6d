//! A cluster of six: three masters and a replica of each.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::ops::RangeInclusive;
use std::process::Stdio;
use std::time::Duration;

use futures_util::future::join_all;
use redis::cluster_routing::Slot;
use tokio::process::Command;
use tokio::sync::OnceCell;

use super::clock::Clock;
use super::proxy::Proxy;
use super::{Port, Single};
use crate::support::{eventually, in_time, output};

/// How many nodes there are; the first half begins as masters.
pub const NODES: usize = 6;

/// Where a node's cluster bus listens, above its port.
const BUS: u16 = 10_000;

/// Below the ports that the system hands out, the bus too, and above the numbers of slots: what the nodes tell is
/// searched for ports.
const PORTS: RangeInclusive<u16> = 17_000..=22_000;

/// Where cluster buses listen, and nobody else.
pub const BUS_PORTS: RangeInclusive<u16> = 27_000..=32_000;

/// A running cluster. Its nodes are named by their index, whatever their role is.
///
/// A node is thought dead after a second (`cluster-node-timeout`), and a shard without a node leaves the others at work
/// (`cluster-require-full-coverage no`).
pub struct Cluster {
    nodes: Vec<Single>,
}

/// A master that owns slots, and its replicas.
#[derive(Clone, Debug, PartialEq)]
pub struct Shard {
    /// The master.
    pub master: usize,
    /// Its replicas, in order.
    pub replicas: Vec<usize>,
    /// Its slots, in order.
    pub slots: Vec<RangeInclusive<u16>>,
}

impl Shard {
    /// Whether this slot is its.
    pub fn owns(&self, slot: u16) -> bool {
        self.slots.iter().any(|slots| slots.contains(&slot))
    }
}

/// Lets clients of a cluster see this machine by a second address, where proxies may stand: for `start_with`.
///
/// `CLUSTER SLOTS` and redirects name it, with the ports of the nodes. Nodes go on talking to each other directly, so
/// that a fault between a client and a master is none between the master and its replica.
pub const NAMES_PROXIES: &[&str] =
    &["--cluster-preferred-endpoint-type", "hostname", "--cluster-announce-hostname", "127.0.0.2"];

/// Lets clients of a cluster see ports only, each at the address that the client came by: for `start_with`.
///
/// `CLUSTER SLOTS` has a null for the host, and redirects have nothing before the colon; both mean the host that was
/// asked. So each of several clients may have proxies of its own, at 127.0.0.2, 127.0.0.3 and so on, and one of them can
/// be cut off one shard while the others are not.
pub const NAMES_NO_HOST: &[&str] = &["--cluster-preferred-endpoint-type", "unknown-endpoint"];

/// The slot of a key.
pub fn slot(key: &str) -> u16 {
    let slot = Some(Slot::for_key(key));
    (0..16_384).find(|number| Slot::new(*number) == slot).expect("every key has a slot")
}

impl Cluster {
    /// Starts a cluster for a test that breaks it.
    pub async fn start() -> Self {
        Self::start_with(&[]).await
    }

    /// Starts a cluster with more arguments for each node, such as `["--cluster-node-timeout", "2000"]` (milliseconds).
    pub async fn start_with(arguments: &[&str]) -> Self {
        Self::create(|| None, arguments).await
    }

    /// The same, with wall clocks that can be shifted or stopped, each alone.
    pub async fn with_clocks(arguments: &[&str]) -> Self {
        Self::create(|| Some(Clock::new()), arguments).await
    }

    async fn create(clock: fn() -> Option<Clock>, arguments: &[&str]) -> Self {
        let own = [
            ["--cluster-enabled", "yes"],
            ["--cluster-node-timeout", "1000"],
            ["--cluster-require-full-coverage", "no"],
            // Else a replica waits for five seconds before it copies its master.
            ["--repl-diskless-sync-delay", "0"],
        ];
        let arguments = [own.as_flattened(), arguments].concat();
        let nodes = (0..NODES).map(|_| Single::launch(ports(), None, clock(), &arguments));
        let cluster = Self { nodes: in_time("six nodes start", join_all(nodes)).await };
        let addresses = cluster.nodes.iter().map(|node| node.address().to_string());
        let mut create = Command::new("redis-cli");
        create.args(["--cluster", "create"]).args(addresses).args(["--cluster-replicas", "1", "--cluster-yes"]);
        let (status, printed, errors) = output(&mut create).await;
        assert!(status.success(), "the cluster is not created: {printed}{errors}");
        cluster.is_whole().await;
        cluster
    }

    /// The cluster that tests of one process share: they leave its nodes and slots alone and use keys of their own. No node of
    /// it is thought dead because the machine is busy.
    pub async fn shared() -> &'static Self {
        static SHARED: OnceCell<Cluster> = OnceCell::const_new();
        let start = || async {
            let (started, cluster) = tokio::sync::oneshot::channel();
            // The nodes live as long as the thread that starts them; a test's ends with the test.
            std::thread::spawn(|| {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
                let cluster = runtime.block_on(Self::start_with(&["--cluster-node-timeout", "60000"]));
                // Nobody drops what is shared, so another process takes its files away, when this one has ended.
                let mut sweep = std::process::Command::new("sh");
                sweep.args(["-c", "read _; rm -rf -- \"$@\"", "sweep"]).stdin(Stdio::piped());
                sweep.args(cluster.nodes.iter().map(Single::directory));
                let mut sweep = sweep.spawn().expect("a shell");
                let _until_the_end = sweep.stdin.take();
                assert!(started.send(cluster).is_ok(), "the test that started it is gone");
                sweep.wait().expect("it reads");
            });
            cluster.await.expect("the cluster starts")
        };
        SHARED.get_or_init(start).await
    }

    /// How often its nodes have run a script.
    pub async fn scripts_run(&self) -> u32 {
        join_all(self.nodes.iter().map(Single::scripts_run)).await.into_iter().sum()
    }

    /// Waits until all nodes serve, all replicas follow, and all nodes tell clients of all replicas.
    async fn is_whole(&self) {
        eventually("all nodes serve", async || {
            let info = join_all(self.nodes.iter().map(|node| node.cli(&["CLUSTER", "INFO"]))).await;
            info.iter().all(|info| info.contains("cluster_state:ok")).then_some(())
        })
        .await;
        // `CLUSTER SLOTS` leaves out a replica that has not copied a byte yet.
        for node in 0..NODES / 2 {
            let key = self.key_of(node, "warm").await;
            assert_eq!(self.nodes[node].cli(&["SET", &key, ""]).await, "OK");
            assert_eq!(self.nodes[node].cli(&["DEL", &key]).await, "1");
        }
        eventually("all replicas follow", async || {
            let replicas = &self.nodes[NODES / 2..];
            let info = join_all(replicas.iter().map(|node| node.cli(&["INFO", "replication"]))).await;
            let slots = join_all(self.nodes.iter().map(|node| node.cli(&["CLUSTER", "SLOTS"]))).await;
            let follows = info.iter().all(|info| info.contains("master_link_status:up"));
            let is_told = slots.iter().all(|slots| {
                let lines: Vec<_> = slots.lines().collect();
                self.nodes.iter().all(|node| lines.contains(&node.address().port().to_string().as_str()))
            });
            (follows && is_told).then_some(())
        })
        .await;
    }

    /// The nodes; commands go to one with `cli`, signals with `signal`.
    pub fn nodes(&self) -> &[Single] {
        &self.nodes
    }

    /// A node, to restart it.
    pub fn node_mut(&mut self, node: usize) -> &mut Single {
        &mut self.nodes[node]
    }

    /// Its addresses as `REDIS_URL` takes them: `127.0.0.1:7000,127.0.0.1:7001,...`.
    pub fn addresses(&self) -> String {
        let addresses: Vec<_> = self.nodes.iter().map(|node| node.address().to_string()).collect();
        addresses.join(",")
    }

    /// Starts a proxy in front of each node, on the node's port at another loopback address, such as 127.0.0.2.
    ///
    /// Clients keep to them if the cluster was started with `NAMES_PROXIES` or `NAMES_NO_HOST`.
    pub async fn proxies(&self, host: Ipv4Addr) -> Vec<Proxy> {
        let proxies = self.nodes.iter().map(async |node| {
            let number = node.address().port();
            let port = eventually("nobody else is at this address", async || Port::beside(host, number)).await;
            Proxy::listen(port, node.address()).await
        });
        join_all(proxies).await
    }

    /// The shards, in the order of their masters, as soon as all nodes that answer agree on them.
    ///
    /// A master that died is named until its replica is promoted.
    pub async fn shards(&self) -> Vec<Shard> {
        /// A node that is paused has no say.
        const SILENT: Duration = Duration::from_millis(500);
        eventually("all nodes agree on the shards", async || {
            let asked = self.nodes.iter().map(|node| tokio::time::timeout(SILENT, node.cli(&["CLUSTER", "NODES"])));
            let answers = join_all(asked).await.into_iter().filter_map(Result::ok);
            let mut views = answers.filter(|answer| answer.contains("myself")).map(|answer| self.view(&answer));
            let first = views.next()?;
            views.all(|view| view == first).then_some(first)
        })
        .await
    }

    /// Reads an answer to `CLUSTER NODES`.
    fn view(&self, answer: &str) -> Vec<Shard> {
        let node_at = |address: &str| {
            let ends = |node: &Single| address.starts_with(&format!("{}@", node.address()));
            self.nodes.iter().position(ends).unwrap_or_else(|| panic!("no node of ours: {address}"))
        };
        let lines = answer.lines().map(|line| line.split(' ').collect::<Vec<_>>());
        let members: Vec<_> = lines.map(|words| (node_at(words[1]), words)).collect();
        let mut shards = Vec::new();
        for (master, words) in &members {
            let slots = words[8..].iter().filter(|slots| !slots.starts_with('['));
            let slots: Vec<_> = slots.map(|slots| range(slots)).collect();
            if !slots.is_empty() {
                let follows = members.iter().filter(|(_, replica)| replica[3] == words[0]);
                let mut replicas: Vec<_> = follows.map(|(replica, _)| *replica).collect();
                replicas.sort_unstable();
                shards.push(Shard { master: *master, replicas, slots });
            }
        }
        shards.sort_by_key(|shard| shard.master);
        shards
    }

    /// The shard of a slot.
    pub async fn shard_of(&self, slot: u16) -> Shard {
        let shards = self.shards().await;
        shards.into_iter().find(|shard| shard.owns(slot)).unwrap_or_else(|| panic!("nobody owns the slot {slot}"))
    }

    /// A key that this master owns: the prefix and a number.
    pub async fn key_of(&self, master: usize, prefix: &str) -> String {
        let shards = self.shards().await;
        let shard = shards.iter().find(|shard| shard.master == master).expect("a master that owns slots");
        let mut keys = (0_u32..).map(|number| format!("{prefix}{number}"));
        keys.find(|key| shard.owns(slot(key))).expect("there are many keys")
    }

    /// Every key with its text, as the masters hold them now. What holds no text is left out, and what goes meanwhile:
    /// where the cluster is shared, other tests have keys of their own.
    pub async fn contents(&self) -> BTreeMap<String, String> {
        let mut contents = BTreeMap::new();
        for shard in self.shards().await {
            let client = redis::Client::open(self.nodes[shard.master].url()).expect("a URL");
            let connection = in_time("a master answers", client.get_multiplexed_async_connection()).await;
            let mut connection = connection.expect("it takes connections");
            let keys: Vec<String> = redis::cmd("KEYS").arg("*").query_async(&mut connection).await.expect("its keys");
            if !keys.is_empty() {
                let mut get = redis::pipe();
                for key in &keys {
                    // Unlike `GET` it fails on no type.
                    get.cmd("MGET").arg(key);
                }
                let texts: Vec<[Option<Vec<u8>>; 1]> =
                    get.query_async(&mut connection).await.expect("texts or nothing");
                contents.extend(keys.into_iter().zip(texts).filter_map(|(key, [text])| {
                    // Counters are packed numbers.
                    Some((key, String::from_utf8_lossy(&text?).into_owned()))
                }));
            }
        }
        contents
    }

    /// Makes a replica the master of its shard as an operator does, and waits until all nodes know.
    pub async fn failover(&self, replica: usize) {
        assert_eq!(self.nodes[replica].cli(&["CLUSTER", "FAILOVER"]).await, "OK");
        let is_master = async || self.shards().await.iter().any(|shard| shard.master == replica).then_some(());
        eventually("the replica is master", is_master).await;
    }

    /// Waits until another node is the master of a shard, and says what the shard is then.
    pub async fn promoted(&self, shard: &Shard) -> Shard {
        let slot = *shard.slots[0].start();
        eventually("a replica is promoted", async || {
            Some(self.shard_of(slot).await).filter(|now| now.master != shard.master)
        })
        .await
    }

    /// Begins to move a slot, whose keys are with its owner still: a key that is not there is asked for at the other.
    pub async fn migrate(&self, slot: u16, to: usize) -> Migration<'_> {
        let from = self.shard_of(slot).await.master;
        let migration = Migration { cluster: self, slot, from, to };
        migration.set(to, &["IMPORTING", &self.id(from).await]).await;
        migration.set(from, &["MIGRATING", &self.id(to).await]).await;
        migration
    }

    /// Moves so many slots from one master to another while both serve, with `redis-cli`.
    pub async fn reshard(&self, from: usize, to: usize, slots: u16) {
        let mut reshard = Command::new("redis-cli");
        reshard.args(["--cluster", "reshard", &self.nodes[from].address().to_string(), "--cluster-yes"]);
        reshard.args(["--cluster-from", &self.id(from).await, "--cluster-to", &self.id(to).await]);
        let (status, printed, errors) = output(reshard.args(["--cluster-slots", &slots.to_string()])).await;
        assert!(status.success(), "no resharding: {printed}{errors}");
    }

    /// The name a node gave itself.
    async fn id(&self, node: usize) -> String {
        self.nodes[node].cli(&["CLUSTER", "MYID"]).await
    }
}

/// A slot on its way from one master to another.
pub struct Migration<'a> {
    cluster: &'a Cluster,
    slot: u16,
    from: usize,
    to: usize,
}

impl Migration<'_> {
    /// Moves the keys that the slot has now; those that come later are made at the new owner, by clients that say `ASKING`.
    pub async fn move_keys(&self) {
        let (from, slot) = (&self.cluster.nodes[self.from], self.slot.to_string());
        let to = self.cluster.nodes[self.to].address();
        let (host, port) = (to.ip().to_string(), to.port().to_string());
        loop {
            let keys = from.cli(&["CLUSTER", "GETKEYSINSLOT", &slot, "100"]).await;
            if keys.is_empty() {
                return;
            }
            // In milliseconds, as everything waits while keys move.
            let mut migrate = vec!["MIGRATE", &host, &port, "", "0", "5000", "KEYS"];
            migrate.extend(keys.lines());
            // They may have expired meanwhile.
            let moved = from.cli(&migrate).await;
            assert!(matches!(&*moved, "OK" | "NOKEY"), "{moved}");
        }
    }

    /// Makes the slot the other master's, which has all its keys by now.
    pub async fn finish(self) {
        let (id, shards) = (self.cluster.id(self.to).await, self.cluster.shards().await);
        // The new owner first, so that no moment is without one.
        self.set(self.to, &["NODE", &id]).await;
        for shard in shards.iter().filter(|shard| shard.master != self.to) {
            self.set(shard.master, &["NODE", &id]).await;
        }
        let shard = self.cluster.shard_of(self.slot).await;
        assert_eq!(shard.master, self.to, "the slot {} has moved", self.slot);
    }

    async fn set(&self, node: usize, what: &[&str]) {
        let slot = self.slot.to_string();
        let command = [&["CLUSTER", "SETSLOT", &slot], what].concat();
        assert_eq!(self.cluster.nodes[node].cli(&command).await, "OK", "{command:?}");
    }
}

/// A port of a node, and that of its bus.
fn ports() -> Vec<Port> {
    // Where to begin differs between processes.
    let skipped = usize::try_from(std::process::id()).expect("it is small") * 50 % PORTS.len();
    let mut numbers = PORTS.cycle().skip(skipped).take(PORTS.len());
    let take = |number| Port::take(Ipv4Addr::LOCALHOST, number);
    let free = numbers.find_map(|number| Some(vec![take(number)?, take(number + BUS)?]));
    free.expect("some port is free")
}

fn range(slots: &str) -> RangeInclusive<u16> {
    let (first, last) = slots.split_once('-').unwrap_or((slots, slots));
    first.parse().expect("a slot")..=last.parse().expect("a slot")
}
