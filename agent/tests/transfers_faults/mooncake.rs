//! The same of Mooncake.

use super::*;

/// Mooncake over TCP says that a write has ended when the sockets have it: one page of 16 MiB is more than they take.
const HUGE: (u64, u64) = (16 << 20, 3);

fn mooncake(release: &Release) -> Bench {
    let (mut prefill, decode) = pair(&release.clone().with("MC_TRANSFER_TIMEOUT", "5"), HUGE);
    // To a stopped decode that it never spoke to, Mooncake waits for the handshake, before there is a batch.
    assert_eq!(prefill.ask(json!({"do": "transfer", "pages": [2]}))["code"], 0);
    let (mut watcher, key) = (Watcher::new(), prefill.key());
    watcher.attach(key);
    Bench { watcher, prefill, decode, key }
}

impl Bench {
    fn not_joined_unproved(&self) -> u64 {
        self.watcher.transfers(self.key).not_joined().unproved
    }

    fn until_under_way(&mut self) {
        let key = self.key;
        self.watcher
            .until("the batch to be under way", |watcher| watcher.transfers(key).not_joined().under_way().is_some());
    }
}

#[test]
fn a_batch_that_timed_out_is_given_up_and_over_when_its_memory_says_so() {
    on_each("mooncake", |release| {
        let mut bench = mooncake(release);
        bench.decode.stop();
        let transfer = bench.prefill.send(json!({"do": "transfer", "pages": [0, 1], "on": "worker"}));
        bench.until_under_way();
        let answer = bench.prefill.answer(transfer, Duration::from_secs(60)).unwrap();
        assert!(answer["code"].as_i64().unwrap() < 0, "{answer}");
        bench.watcher.drain().observe(bench.key);
        assert_eq!(bench.not_joined_unproved(), 1);
        assert_eq!(bench.watcher.ended(bench.key, Engine::Mooncake, "given_up"), 1);
        let key = bench.key;
        bench.decode.go_on();
        // The twin: without a look into its memory nothing tells.
        let arrived = bench.decode.ask(json!({"do": "check", "pages": [0, 1], "within": 30}));
        assert_eq!(arrived["ok"], true);
        assert_eq!((bench.watcher.drain().transfers(key).not_joined().unproved, bench.not_joined_unproved()), (1, 1));
        until("the batch's memory to say so", || {
            bench.watcher.observe(key).transfers(key).not_joined().is_over().then_some(())
        });
        let not_joined = bench.watcher.transfers(key).not_joined();
        assert_eq!((not_joined.done, not_joined.failed), (1, 0));
        bench.watcher.assert_nothing_lost(key);
    });
}

#[test]
fn a_batch_to_a_killed_decode_is_over_and_failed() {
    on_each("mooncake", |release| {
        for (pages, kind) in [(json!([0]), "single"), (json!([0, 1]), "batch")] {
            let mut bench = mooncake(release);
            bench.decode.stop();
            let transfer = bench.prefill.send(json!({"do": "transfer", "pages": pages, "kind": kind, "on": "worker"}));
            bench.until_under_way();
            bench.decode.kill();
            let answer = bench.prefill.answer(transfer, Duration::from_secs(60)).unwrap();
            assert!(answer["code"].as_i64().unwrap() < 0, "{answer}");
            let key = bench.key;
            // Of several requests the first that fails ends the wait; the others are looked for in memory.
            until("all requests of the batch to be over", || {
                bench.watcher.drain().observe(key).transfers(key).not_joined().is_over().then_some(())
            });
            let ends = &bench.watcher.transfers(key).counted().ended;
            println!("{} {kind}: {ends:?}", release.name);
            assert_eq!(bench.watcher.transfers(key).not_joined().failed, 1, "{kind}");
            assert_eq!(bench.watcher.transfers(key).not_joined().posted, 1);
            bench.watcher.assert_nothing_lost(key);
        }
    });
}

#[test]
fn a_look_at_mooncake_tells_which_batch_somebody_waits_for() {
    on_each("mooncake", |release| {
        let mut bench = mooncake(release);
        bench.decode.stop();
        let left_alone = number(&bench.prefill.ask(json!({"do": "submit", "page": 0})), "batch");
        let key = bench.key;
        let look = |bench: &mut Bench| {
            let look = bench.watcher.kernel.begin_look(key, &surveyed(key), &[ProbeSet::Polls], &ReturnProbes::Allowed);
            let look = look.unwrap();
            thread::sleep(Duration::from_millis(100));
            bench.watcher.kernel.end_look(look)
        };
        assert_eq!(look(&mut bench), []);
        // What SGLang calls waits in a loop of `getBatchTransferStatus`, for 5 seconds here.
        let waiting = bench.prefill.send(json!({"do": "transfer", "pages": [1, 2], "on": "worker"}));
        let (batch, polls) = until("polls", || look(&mut bench).pop());
        println!("{}: {polls:?}", release.name);
        assert!(polls.count > 0 && polls.status <= 1, "waiting or pending: {polls:?}");
        bench.watcher.drain();
        let seen = |number| bench.watcher.transfer(key, number).map(|transfer| transfer.state);
        let in_flight = Some(TransferState::InFlight);
        assert_eq!((batch == left_alone, seen(batch), seen(left_alone)), (false, in_flight, in_flight));
        // `transfer_check_status` asks for one task of a batch.
        let asking = bench.prefill.send(json!({"do": "poll", "batch": left_alone, "within": 30, "on": "worker"}));
        let is_asked =
            |bench: &mut Bench| look(bench).into_iter().any(|(batch, polls)| batch == left_alone && polls.count > 0);
        until("polls of a task", || is_asked(&mut bench).then_some(()));
        bench.decode.go_on();
        for answer in [waiting, asking] {
            bench.prefill.answer(answer, Duration::from_secs(60)).unwrap();
        }
    });
}
