//! Faults of a run.

use std::rc::Rc;
use std::time::Duration;

use tidegate::model::Clock as _;
use tokio::time::{Instant, sleep, sleep_until};

use super::deployment::{DECIDES, Deployment, Failover, Kind};
use super::world::{World, after};

/// The longest time of a failover, or of slots that move.
const LONGEST_CHANGE: Duration = Duration::from_secs(8);

impl World {
    /// Lets things fail until the end.
    pub async fn fail(&mut self, until: Instant) {
        let mean = self.random.u64(100..2_000);
        while Instant::now() < until {
            sleep(Duration::from_millis(self.random.u64(1..=2 * mean))).await;
            let began = Instant::now();
            let length = Duration::from_millis([5, 30, 200, 1_500][self.random.usize(..4)]);
            match self.random.u8(..20) {
                0..=7 => self.fail_on_the_way(length),
                8..=12 => self.fail_at_a_server(length),
                13 => self.set_clock(),
                14 | 15 => self.change_servers().await,
                16 | 17 => self.restart_instance(),
                18 => self.reload(),
                _ => self.recover().await,
            }
            // A change of servers is a task, which has not begun.
            tokio::task::yield_now().await;
            let lasting = if self.deployment.is_changing.get() { LONGEST_CHANGE } else { length };
            self.faults.push(began..Instant::now() + lasting);
        }
        sleep_until(until).await;
    }

    /// Lets the way between an instance and a server fail.
    fn fail_on_the_way(&mut self, length: Duration) {
        let of = self.random.usize(..self.deployment.servers.len());
        let (deployment, process) = (Rc::clone(&self.deployment), self.some_process());
        let (place, way) = (process.number, process.links[of].way.clone());
        let note = |what: &str| deployment.note(&format!("process {place} and redis {of}: {what}"));
        match self.random.u8(..6) {
            0 => {
                note(&format!("silence for {length:?}"));
                way.send_modify(|way| way.is_silent = true);
                after(length, move || way.send_modify(|way| way.is_silent = false));
            }
            1 => {
                note(&format!("no replies for {length:?}, and then the end of all connections"));
                way.send_modify(|way| way.is_mute = true);
                after(length, move || way.send_modify(|way| (way.is_mute, way.resets) = (false, way.resets + 1)));
            }
            2 | 3 => {
                note("the connections are cut");
                way.send_modify(|way| way.resets += 1);
            }
            4 => {
                let most = [200, 2_000, 30_000][self.random.usize(..3)];
                note(&format!("bytes take up to {most} us"));
                way.send_modify(|way| way.latency = most / 2..=most);
            }
            _ => {
                note(&format!("no connection for {length:?}"));
                way.send_modify(|way| (way.is_closed, way.resets) = (true, way.resets + 1));
                after(length, move || way.send_modify(|way| way.is_closed = false));
            }
        }
    }

    fn fail_at_a_server(&mut self, length: Duration) {
        let of = self.random.usize(..self.deployment.servers.len());
        let server = Rc::clone(&self.deployment.servers[of]);
        match self.random.u8(..5) {
            0 | 1 => {
                self.note(&format!("redis {of} pauses for {length:?}"));
                server.is_paused.send_replace(true);
                after(length, move || server.is_paused.send_modify(|paused| *paused = false));
            }
            2 => {
                self.note(&format!("redis {of} forgets its scripts"));
                server.flush_scripts();
            }
            3 => {
                self.note(&format!("redis {of} has no memory for {length:?}"));
                server.keys(|keys| keys.is_full = true);
                after(length, move || server.keys(|keys| keys.is_full = false));
            }
            _ if self.deployment.is_changing.get() => {}
            _ => {
                // It is emptied, or it restarts with what it had saved.
                let lag = self.random.bool().then(|| Duration::from_millis(self.random.u64(0..1_000)));
                let down_for = if lag.is_some() || self.random.bool() { length } else { Duration::ZERO };
                self.note(&format!("redis {of} is down for {down_for:?}, and loses the last {lag:?}"));
                tokio::task::spawn_local(Rc::clone(&self.deployment).restart(of, down_for, lag));
            }
        }
    }

    /// Sets the clock of Redis, ahead or back.
    fn set_clock(&mut self) {
        let step = self.random.i64(-3_000_000..5_000_000);
        let before = self.clock.now();
        self.clock.step(step);
        self.steps.push((Instant::now(), before, self.clock.now()));
        self.note(&format!("the clock of redis is set by {step} us"));
    }

    /// Moves slots, or replaces a master by its replica. Sometimes nothing else fails meanwhile.
    async fn change_servers(&mut self) {
        let (deployment, mut random) = (Rc::clone(&self.deployment), self.random.fork());
        if deployment.kind == Kind::Single || deployment.is_changing.get() {
            return;
        }
        if deployment.kind == Kind::Cluster && random.bool() {
            let (masters, slots) = (deployment.masters(), Deployment::some_slots(&mut random));
            let (to, steps) = (masters[random.usize(..3)], [1, 3, 6][random.usize(..3)]);
            tokio::task::spawn_local(deployment.move_slots(slots, to, steps, random));
            return;
        }
        let how = [Failover::Planned, Failover::Killed, Failover::Cut][random.usize(..3)];
        let shard = random.usize(..deployment.shards.borrow().len());
        let is_alone = random.bool();
        if is_alone {
            self.heal().await;
        }
        let done = tokio::task::spawn_local(deployment.fail_over(shard, how, Rc::clone(&self.processes), random));
        if is_alone {
            self.calm.push(done.await.expect("it ends"));
        }
    }

    /// Waits until nothing fails, and the store decides.
    async fn recover(&mut self) {
        self.heal().await;
        sleep(DECIDES).await;
        let began = Instant::now();
        sleep(Duration::from_millis(self.random.u64(1..2_000))).await;
        self.calm.push(began..Instant::now());
    }

    /// Ends all faults.
    pub async fn heal(&self) {
        while self.deployment.is_changing.get() {
            sleep(Duration::from_millis(50)).await;
        }
        self.note("all is well");
        for link in self.processes.borrow().iter().flat_map(|process| &process.links) {
            link.way.send_modify(|way| {
                (way.is_silent, way.is_mute, way.is_closed, way.latency) = (false, false, false, 100..=200);
            });
        }
        for server in &self.deployment.servers {
            server.is_paused.send_replace(false);
            server.keys(|keys| keys.is_full = false);
        }
    }

    /// Kills an instance, and starts another one in its place.
    fn restart_instance(&mut self) {
        let instances = self.processes.borrow().len();
        let (place, new) = (self.random.usize(..instances), self.process(instances));
        let old = std::mem::replace(&mut self.processes.borrow_mut()[place], new);
        self.note(&format!("process {} is killed, and process {} begins", old.number, self.started - 1));
        old.kill();
    }

    /// Changes the rules of all instances.
    fn reload(&mut self) {
        let rules = self.rules[0].1.changed(&mut self.random);
        let text = rules.text();
        self.note(&format!("new rules:\n{text}"));
        self.processes.borrow().iter().for_each(|process| process.reload(&text));
        self.rules.push((Instant::now(), rules));
    }
}
