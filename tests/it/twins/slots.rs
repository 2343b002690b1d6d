//! Requests with counters in several slots share a call of the script, at a node of a real cluster that does not have all of them.

use redis::{Connection, Value};
use tidegate::algorithm::{Algorithm, Charge};
use tidegate::model::key::KeyPart;
use tidegate::model::{Charging, Colocation, CounterKey, Hits, Micros, Unit};
use tidegate::store::redis::script::{self, By, Mode, Requests};

use super::bench::{PREFIX, answers, key, rows};
use crate::histories::{charge, per_minute};
use crate::redis::cluster::{Cluster, slot};

/// A deadline that does not pass.
const NEVER: Micros = Micros::new(1 << 52);

/// A charge of one hit of ten on a counter of `name`; those of one name are in one slot.
fn one(name: &str, algorithm: Algorithm, unit: Unit) -> Charge {
    let user = std::iter::once(KeyPart::own(b"user", name.as_bytes()));
    let key = CounterKey::new("d", user, Colocation::Descriptor, "any", unit.length());
    Charge { key, ..charge(name, per_minute(algorithm, 10), Charging::Each, Hits::take(1)) }
}

fn slot_of(charge: &Charge) -> u16 {
    slot(&String::from_utf8(key(charge)).expect("a text"))
}

/// What a node answers to these requests in one call: what remains after each charge, or the code of the error.
fn remaining(node: &mut Connection, asked: &[(Vec<Charge>, Mode)]) -> Vec<Result<Vec<u32>, String>> {
    let mut requests = Requests::default();
    for (charges, mode) in asked {
        requests.charge(PREFIX, &charges.iter().collect::<Vec<_>>(), *mode, NEVER);
    }
    let reply = requests.command_over_slots(By::Hash).query::<Value>(node).expect("the node answers");
    let replies = script::split(reply, asked.len()).into_iter().map(script::unframed);
    let read = |(reply, (charges, mode)): (Value, &(Vec<Charge>, Mode))| match reply {
        Value::ServerError(error) => Err(error.code().to_owned()),
        reply => Ok(answers(&rows(&reply, charges.len(), *mode)).iter().map(|verdict| verdict.remaining).collect()),
    };
    replies.zip(asked).map(read).collect()
}

#[tokio::test]
async fn a_request_whose_counters_are_not_all_at_the_node_writes_nothing_and_concerns_no_other() {
    let cluster = Cluster::start().await;
    let shards = cluster.shards().await;
    let client = redis::Client::open(cluster.nodes()[shards[0].master].url()).expect("a URL");
    let mut node = client.get_connection().expect("it connects");
    script::load().query::<Value>(&mut node).expect("it compiles");
    let unread = Err(script::UNREAD.to_owned());
    for (name, algorithm) in Algorithm::ALL {
        let owned = |shard: usize| {
            let charges = (0..).map(move |number| one(&format!("{name}{number}"), algorithm, Unit::Minute));
            let shard = shards[shard].clone();
            charges.filter(move |charge| shard.owns(slot_of(charge)))
        };
        let mut here = owned(0);
        let [first, second, moving] = [(); 3].map(|()| here.next().expect("there are many"));
        let there = owned(1).next().expect("there are many");
        let of_day = (0..).map(|number| one(&format!("{name}{number}"), algorithm, Unit::Day));
        let mut of_day = of_day.filter(|charge| slot_of(charge) == slot_of(&moving));
        let absent = of_day.next().expect("the slot has it");

        let each = |charges: &[&Charge]| (charges.iter().map(|&charge| charge.clone()).collect::<Vec<_>>(), Mode::Each);
        assert_eq!(remaining(&mut node, &[each(&[&moving]), each(&[&second])]), [Ok(vec![9]), Ok(vec![9])]);
        let migration = cluster.migrate(slot_of(&moving), shards[1].master).await;
        let asked = [
            each(&[&first]),
            each(&[&there]),
            each(&[&moving, &absent]),
            (vec![moving.clone(), absent.clone()], Mode::All),
            (vec![moving.clone(), absent.clone()], Mode::Take),
            each(&[&second]),
            each(&[&moving]),
        ];
        let expected =
            [Ok(vec![9]), unread.clone(), unread.clone(), unread.clone(), unread.clone(), Ok(vec![8]), Ok(vec![8])];
        assert_eq!(
            remaining(&mut node, &asked),
            expected,
            "{algorithm:?}: what is there yet is not charged beside what is not"
        );
        migration.move_keys().await;
        migration.finish().await;
    }
}
