use proptest::prelude::*;

use super::*;

fn read(page: &str) -> (Vec<Sample>, usize) {
    let mut reader = Page::default();
    reader.feed(page.as_bytes());
    reader.end()
}

fn sample(queue: Queue, rank: Rank, length: Option<u32>) -> Sample {
    Sample { queue, rank, length, is_old_spelling: false }
}

#[test]
fn the_queues_of_each_rank_are_read_whatever_else_is_on_the_page() {
    let page = r#"# HELP sglang:num_prefill_inflight_queue_reqs The number of requests in the prefill inflight queue.
# TYPE sglang:num_prefill_inflight_queue_reqs gauge
sglang:num_prefill_inflight_queue_reqs{engine_type="prefill",model_name="m",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 2.0
sglang:num_prefill_inflight_queue_reqs{dp_rank="1",engine_type="prefill",model_name="m",pp_rank="1",tp_rank="3"} 0.0 1395066363000
sglang_num_prefill_bootstrap_queue_reqs 7
sglang:num_prefill_inflight_queue_reqs_total{tp_rank="0"} 9.0
sglang:num_running_reqs{tp_rank="0"} 5.0
sglang:num_decode_prealloc_queue_reqs { tp_rank = "0" , } 1.0
sglang:num_decode_transfer_queue_reqs{} 4"#;
    let expected = [
        sample(Queue::PrefillInflight, Rank::default(), Some(2)),
        sample(Queue::PrefillInflight, Rank { dp: Some(1), pp: 1, tp: 3 }, Some(0)),
        sample(Queue::PrefillBootstrap, Rank::default(), Some(7)),
        sample(Queue::DecodePrealloc, Rank::default(), Some(1)),
        sample(Queue::DecodeTransfer, Rank::default(), Some(4)),
    ];
    assert_eq!(read(page), (expected.to_vec(), 0));
}

#[test]
fn old_spellings_are_the_same_queues() {
    let (samples, _) = read("sglang:num_prefill_infight_queue_reqs 1.0\nsglang:num_prefill_prealloc_queue_reqs 3.0\n");
    let said: Vec<_> = samples.iter().map(|it| (it.queue, it.length, it.is_old_spelling)).collect();
    assert_eq!(said, [(Queue::PrefillInflight, Some(1), true), (Queue::PrefillBootstrap, Some(3), false)]);
}

#[test]
fn the_share_of_a_priority_is_not_the_total() {
    let page = "sglang:num_prefill_inflight_queue_reqs{priority=\"\",tp_rank=\"0\"} 3.0\n\
                sglang:num_prefill_inflight_queue_reqs{priority=\"7\",tp_rank=\"0\"} 2.0\n\
                sglang:num_prefill_inflight_queue_reqs{priority=\"None\",tp_rank=\"0\"} 1.0\n";
    assert_eq!(read(page), (vec![sample(Queue::PrefillInflight, Rank::default(), Some(3))], 0));
}

#[test]
fn a_name_in_quotes_cannot_pass_for_a_rank() {
    let page = r#"sglang:num_prefill_inflight_queue_reqs{model_name="a\",tp_rank=\"7\"} 9.0 b,pp_rank=\"2\\",tp_rank="1"} 4.0"#;
    assert_eq!(read(page), (vec![sample(Queue::PrefillInflight, Rank { tp: 1, ..Rank::default() }, Some(4))], 0));
}

#[test]
fn what_is_no_count_is_no_length() {
    for value in ["NaN", "+Inf", "-Inf", "-1.0", "1e308", "0.5", "4294967296", "two", "0x1"] {
        let page = format!("sglang:num_prefill_inflight_queue_reqs {value}\n");
        assert_eq!(read(&page), (vec![sample(Queue::PrefillInflight, Rank::default(), None)], 0), "{value}");
    }
    for (value, length) in [("-0.0", 0), ("1e3", 1_000), ("4294967295.0", u32::MAX)] {
        let page = format!("sglang:num_prefill_inflight_queue_reqs {value}\n");
        assert_eq!(read(&page).0[0].length, Some(length), "{value}");
    }
}

#[test]
fn what_is_written_wrongly_is_counted_and_left_out() {
    let name = "sglang:num_prefill_inflight_queue_reqs";
    for rest in [
        "{tp_rank=\"x\"} 1.0",
        "{tp_rank=\"0\",tp_rank=\"1\"} 1.0",
        "{tp_rank=\"0\" 1.0",
        "{tp_rank=0} 1.0",
        "{tp_rank=\"0} 1.0",
        "{tp_rank=\"0\"}",
        "{",
        " ",
    ] {
        assert_eq!(read(&format!("{name}{rest}\n")), (Vec::new(), 1), "{rest}");
    }
    let long = format!("{name}{{model_name=\"{}\"}} 1.0\n{name} 2.0\n", "m".repeat(MAX_LINE));
    assert_eq!(read(&long).0, [sample(Queue::PrefillInflight, Rank::default(), Some(2))]);
    let many = format!("{name} 2.0\n").repeat(MAX_SAMPLES + 5);
    let (samples, left_out) = read(&many);
    assert_eq!((samples.len(), left_out), (MAX_SAMPLES, 5));
}

#[test]
fn a_title_says_the_ranks_that_stand_in_the_labels() {
    let rank = |dp, pp, tp| Rank { dp, pp, tp };
    for (title, expected) in [
        ("sglang::scheduler", rank(None, 0, 0)),
        ("sglang::scheduler_TP3", rank(None, 0, 3)),
        ("sglang::scheduler_DP1_PP2_ATTN_CP4_MOE_DP5_TP3_EP6", rank(Some(1), 2, 3)),
        ("sglang::scheduler_MOE_DP5_TP1", rank(None, 0, 1)),
        ("sglang::scheduler_TPx", rank(None, 0, 0)),
    ] {
        assert_eq!(Rank::of_title(title), expected, "{title}");
    }
}

/// Lines that are nearly ours.
fn line() -> impl Strategy<Value = String> {
    let name = prop_oneof![
        4 => Just("sglang:num_prefill_inflight_queue_reqs"),
        1 => Just("sglang_num_prefill_infight_queue_reqs"),
        1 => Just("sglang:num_running_reqs"),
        1 => Just("# TYPE sglang:num_prefill_inflight_queue_reqs"),
        1 => Just(""),
    ];
    let labels = prop_oneof![
        Just(String::new()),
        "\\{(tp_rank|dp_rank|priority|model_name)=\"[0-9a-z\\\\\",}{]{0,5}\"(,pp_rank=\"[0-9]{1,12}\")?\\}",
        "[{}\",=\\\\a-z]{0,12}",
    ];
    let value = prop_oneof![
        any::<f64>().prop_map(|value| value.to_string()),
        (0..5_u32).prop_map(|value| format!("{value}.0")),
        "\\PC{0,8}",
    ];
    (name, labels, value).prop_map(|(name, labels, value)| format!("{name}{labels} {value}"))
}

proptest! {
    #[test]
    fn a_page_is_the_same_wherever_it_is_cut(
        lines in prop::collection::vec(line(), 0..20),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..8),
    ) {
        let page = lines.join("\n");
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(page.len() + 1)).collect();
        cuts.extend([0, page.len()]);
        cuts.sort_unstable();
        let mut reader = Page::default();
        cuts.windows(2).for_each(|piece| reader.feed(&page.as_bytes()[piece[0]..piece[1]]));
        prop_assert_eq!(reader.end(), read(&page));
    }

    #[test]
    fn any_bytes_are_read_to_the_end(bytes in prop::collection::vec(any::<u8>(), 0..2_000)) {
        let mut reader = Page::default();
        reader.feed(&bytes);
        reader.end();
    }

    #[test]
    fn what_is_written_by_the_format_is_read_back(
        tp in any::<u32>(), pp in any::<u32>(), dp in prop::option::of(any::<u32>()), length in any::<u32>(),
        model in "\\PC{0,20}",
    ) {
        let escaped = model.replace('\\', "\\\\").replace('"', "\\\"");
        let dp_label = dp.map(|dp| format!(",dp_rank=\"{dp}\"")).unwrap_or_default();
        let page = format!(
            "sglang:num_prefill_inflight_queue_reqs{{model_name=\"{escaped}\",pp_rank=\"{pp}\",tp_rank=\"{tp}\"{dp_label}}} {length}.0\n"
        );
        prop_assert_eq!(read(&page), (vec![sample(Queue::PrefillInflight, Rank { dp, pp, tp }, Some(length))], 0));
    }
}
