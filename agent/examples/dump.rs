use dislodge::core::Input;
use dislodge::simulate::*;
fn main() {
    let a: Vec<String> = std::env::args().collect();
    let s = Settings {
        family: Family::of_name(&a[1]).unwrap(),
        seed: a[2].parse().unwrap(),
        requests: a[3].parse().unwrap(),
        ranks: a[4].parse().unwrap(),
    };
    let sim = simulate(&s);
    for i in &sim.inputs {
        match i {
            Input::Tick { .. } | Input::Observed { .. } => {}
            Input::Event(e) => {
                if !matches!(e.body, dislodge::event::Body::Pass { .. }) {
                    println!(
                        "{:.3} pid {} tid {} #{} {:?}",
                        (e.at.0 as f64 - 1e12) / 1e9,
                        e.pid,
                        e.tid,
                        e.sequence,
                        e.body
                    )
                }
            }
            o => println!("{o:?}"),
        }
    }
    for t in &sim.truth {
        println!("{t:?}")
    }
}
