//! Measuring by turns: what is compared is measured within seconds of each other, so that what else the machine does
//! meets both alike.

/// The middle of values, and of their halves.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Spread {
    pub(crate) low: f64,
    pub(crate) middle: f64,
    pub(crate) high: f64,
}

impl Spread {
    pub(crate) fn of(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        let at = |part: f64| values[((values.len() - 1) as f64 * part).round() as usize];
        Self { low: at(0.25), middle: at(0.5), high: at(0.75) }
    }
}

/// The tenth part's upper end: what is measured when nothing else ran meanwhile, where each value takes less than the
/// scheduler's turns.
pub(crate) fn undisturbed(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 10]
}

pub(crate) fn median(values: Vec<f64>) -> f64 {
    Spread::of(values).middle
}

/// Measures `states` states `rounds` times, in another order each round; one row of values a round, by state.
pub(crate) fn take(rounds: usize, states: usize, mut measure: impl FnMut(usize) -> f64) -> Vec<Vec<f64>> {
    let round = |round: usize| {
        let mut values = vec![0.0; states];
        for turn in 0..states {
            // Forwards and backwards in turn, from another state each time.
            let turn = if round.is_multiple_of(2) { turn } else { states - 1 - turn };
            let state = (turn + round / 2) % states;
            values[state] = measure(state);
        }
        values
    };
    (0..rounds).map(round).collect()
}

/// Of one state over all rounds.
pub(crate) fn column(rows: &[Vec<f64>], state: usize) -> Vec<f64> {
    rows.iter().map(|row| row[state]).collect()
}

/// One state over another, round by round.
pub(crate) fn ratio(rows: &[Vec<f64>], state: usize, over: usize) -> Spread {
    Spread::of(rows.iter().map(|row| row[state] / row[over]).collect())
}
