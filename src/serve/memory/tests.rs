use super::*;

const LARGE: usize = 4 << 20;

fn call(account: &Arc<Account>) -> Call {
    Call::new(Arc::clone(account), None)
}

fn untaken(account: &Arc<Account>, bytes: usize) -> Hold {
    Hold::untaken(Arc::clone(account), bytes)
}

fn begins(call: &mut Call) -> bool {
    call.may_begin(true, Waker::noop())
}

fn holds(call: &mut Call, bytes: usize) -> bool {
    call.may_hold(bytes, true, Waker::noop())
}

#[test]
fn beyond_the_bound_one_message_is_read_at_a_time_and_the_next_after_it() {
    let account = Arc::default();
    let full = untaken(&account, CONNECTION_BYTES_TO_BEGIN + 1);
    let [mut first, mut second, mut third] = [0; 3].map(|_| call(&account));
    assert_eq!([begins(&mut first), begins(&mut second), begins(&mut third)], [true, false, false]);
    assert!(holds(&mut first, LARGE), "it has the turn");
    drop(first);
    assert_eq!([begins(&mut third), begins(&mut second), begins(&mut third)], [false, true, false]);
    drop(second);
    assert!(begins(&mut third));
    drop((full, third));
    assert_eq!((account.held(), account.queue.lock().turn), (0, None));
}

#[test]
fn large_messages_wait_for_each_other_and_small_ones_pass_them() {
    let account = Arc::default();
    let [mut first, mut second, mut third, mut small] = [0; 4].map(|_| call(&account));
    assert!(holds(&mut first, CONNECTION_BYTES));
    assert!(holds(&mut second, LARGE), "it takes the turn");
    assert!(!holds(&mut third, LARGE));
    assert!(begins(&mut small) && !holds(&mut small, 1));
    drop(first);
    assert!(holds(&mut small, 1));
    assert!(holds(&mut third, CONNECTION_BYTES - 1));
    assert_eq!(account.held(), CONNECTION_BYTES, "the message that has the turn is not among them");
    drop((second, third, small));
    assert_eq!(account.held(), 0);
}

#[test]
fn a_message_is_counted_once_however_often_it_is_asked_for() {
    let account = Arc::default();
    let mut call = call(&account);
    assert!(holds(&mut call, 10) && holds(&mut call, 10) && holds(&mut call, 30));
    assert_eq!(account.held(), 30);
    call.release_request();
    assert_eq!(account.held(), 0);
}

#[test]
fn beginnings_that_wait_are_bounded() {
    let account = Arc::default();
    let begun = Hold::begun(Arc::clone(&account), BEGUN_BYTES + 1);
    let (mut turn, mut new) = (call(&account), call(&account));
    assert_eq!([begins(&mut turn), begins(&mut new)], [true, false]);
    drop(begun);
    assert!(begins(&mut new));
}

#[test]
fn a_call_that_need_not_end_does_not_take_the_turn_from_others() {
    let account = Arc::default();
    let full = untaken(&account, CONNECTION_BYTES_TO_BEGIN + 1);
    let (mut endless, mut other) = (call(&account), call(&account));
    assert!(!endless.may_begin(false, Waker::noop()));
    assert!(begins(&mut other));
    drop(full);
    assert!(endless.may_begin(false, Waker::noop()), "there is room");
}

#[test]
fn a_call_that_waits_is_woken_when_there_is_room_and_when_it_has_the_turn() {
    struct Woken(AtomicUsize);
    impl std::task::Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }
    let woken = Arc::new(Woken(AtomicUsize::new(0)));
    let waker = Waker::from(Arc::clone(&woken));
    let account = Arc::default();
    let [_full, one, other] = [CONNECTION_BYTES_TO_BEGIN, 1, 1].map(|bytes| untaken(&account, bytes));
    let (mut turn, mut waiting) = (call(&account), call(&account));
    assert!(begins(&mut turn) && !waiting.may_begin(true, &waker));
    drop(one);
    assert_eq!(woken.0.load(Ordering::Relaxed), 0, "there is a byte too many");
    drop(turn);
    assert_eq!(woken.0.load(Ordering::Relaxed), 1);
    drop(other);
    assert_eq!(woken.0.load(Ordering::Relaxed), 2);
}

#[test]
fn what_is_read_around_bodies_counts_until_those_that_were_open_have_ended() {
    let account: Arc<Account> = Arc::default();
    let around = |account: &Arc<Account>, bodies: usize| account.all.load(Ordering::Relaxed) - bodies * OPEN_BODY_BYTES;
    account.reads_around(1_000);
    assert_eq!(around(&account, 0), 0, "no body is open");
    let first = Hold::open_body(Arc::clone(&account));
    account.reads_around(100);
    let second = Hold::open_body(Arc::clone(&account));
    account.reads_around(20);
    drop(second);
    assert_eq!(around(&account, 1), 120, "the first may keep all of it");
    let third = Hold::open_body(Arc::clone(&account));
    account.reads_around(3);
    drop(first);
    let fourth = Hold::open_body(Arc::clone(&account));
    account.reads_around(4_000);
    drop(third);
    assert_eq!(around(&account, 1), 4_000, "the fourth began when the others had ended or later");
    drop(fourth);
    assert_eq!(around(&account, 0), 0);
}
