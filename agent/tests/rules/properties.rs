//! Whatever stands in a rule.

use super::*;

/// Conditions that the prefilter understands in part.
fn conditions() -> impl Strategy<Value = String> {
    let atom = prop::sample::select(vec![
        "cause == 'Parked'",
        "'AbortIgnored' == cause",
        "cause != 'Unknown'",
        "cause in ['Parked', 'RoomCollision']",
        "inflight_seconds > 2",
        "phase_seconds >= 2.5",
        "3 < waiting_seconds",
        "waiting_seconds < 3.0",
        "abort_seconds > 1.0",
        "abort_seconds <= 1.0",
        "!paused",
        "inflight",
        "true",
        "queue_length > 1",
        "sent_pages == 8",
        "inflight_seconds > server_waiting_timeout_seconds + -297.5",
        "1.5 + phase_seconds <= waiting_seconds",
        "inflight_seconds != 2",
        "waiting_seconds == phase_seconds",
        "sglang.startsWith('0.5')",
        "2.0 * inflight_seconds > 5.0",
        "sent_chunks >= 1.0",
        "9007199254740993 < sent_pages",
        "backend in ['nixl', 'fake'] ",
        "(inflight ? 1 : 2) == 1",
    ]);
    atom.prop_map(str::to_owned).prop_recursive(4, 24, 2, |inner| {
        prop_oneof![
            (inner.clone(), inner.clone()).prop_map(|(left, right)| format!("({left} && {right})")),
            (inner.clone(), inner.clone()).prop_map(|(left, right)| format!("({left} || {right})")),
            inner.prop_map(|inner| format!("!({inner})")),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn the_prefilter_hides_no_match(source in conditions()) {
        let condition = Condition::compile(&source).unwrap();
        let root = condition::root();
        for cause in Cause::ALL {
            for seconds in [0.0, 1.0, 2.0, 2.5, 3.0, 3.5] {
                World::pinned(cause).look(at(seconds), |subject| {
                    let allowed = condition.prefilter().allows(subject.conclusion.cause, subject.age().as_secs_f64());
                    assert!(allowed || !condition.matches(&Scope::of(&root, subject)).unwrap(), "{source} with {cause} after {seconds}");
                });
            }
        }
    }

    #[test]
    fn what_is_decided_without_cel_is_what_cel_says(source in conditions()) {
        let condition = Condition::compile(&source).unwrap();
        let root = condition::root();
        for cause in Cause::ALL {
            for seconds in [0.0, 1.0, 2.0, 2.5, 3.0, 3.5] {
                World::pinned(cause).look(at(seconds), |subject| {
                    let decided = condition.decide(subject);
                    let matched = condition.matches(&Scope::of(&root, subject)).unwrap();
                    assert!(decided.is_none_or(|decided| decided == matched), "{source} with {cause} after {seconds}");
                });
            }
        }
    }

    #[test]
    fn no_text_makes_loading_panic(text in "\\PC*|[ \\n:{}\\[\\]|>'\"&*!#a-z0-9-]*") {
        let _ = load_text(&text);
    }

    #[test]
    fn no_condition_makes_loading_panic(source in "[a-z_ .()\\[\\]{}<>=!&|?:+*/%'\"0-9,\\n-]{0,120}|\\PC{0,60}") {
        let _ = Condition::compile(&source);
    }

    #[test]
    fn no_mix_of_real_words_makes_a_condition_panic(words in proptest::collection::vec(prop::sample::select(vec![
        "cause", "inflight_seconds", "inflight", "tp", "'Parked'", "\"x\"", "1", "2.5", "true", "==", "!=", "<", ">=", "&&", "||", "!", "-", "+", "/", "%",
        "?", ":", "(", ")", "[", "]", ",", "in", "size(", ".startsWith(", "double(", "has(", "9223372036854775807",
    ]), 0..24)) {
        let source = words.join(" ");
        if let Ok(condition) = Condition::compile(&source) {
            let root = condition::root();
            World::healthy().look(at(1.0), |subject| {
                let _ = condition.matches(&Scope::of(&root, subject));
            });
        }
    }
}
