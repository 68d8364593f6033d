//! What doctor found, for somebody who was woken by it. Pure.

use std::fmt::Write as _;

use dislodge::{
    kernel::{
        outlook::ProbeOutlook,
        preflight::{Check, Outcome},
    },
    target::discover,
};

use super::{
    Report,
    engine::EngineReport,
    replica,
    server::{Server, in_words},
};

/// What stands before everything that is said of the line above.
const INDENT: &str = "      ";
/// The heads of the table of probes.
const HEADS: [&str; 6] = ["OUTLOOK", "NEEDED", "FUNCTION", "SET", "ROLE", "LIBRARY"];

/// The whole report. What comes from a server has its control characters replaced: a terminal would obey them.
pub(super) fn render(report: &Report) -> String {
    let mut lines: Vec<String> = report.checks.iter().flat_map(check).collect();
    if report.servers.is_empty() {
        lines.push(format!(
            "no SGLang scheduler runs on this node (process titles that begin with {})",
            discover::SCHEDULER_TITLE
        ));
    }
    lines.extend(report.servers.iter().flat_map(server));
    lines.extend(report.replicas.iter().flat_map(replica::in_words));
    lines.iter().fold(String::new(), |mut text, line| {
        let line: String = line.trim_end().chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect();
        let _ = writeln!(text, "{line}");
        text
    })
}

fn check(check: &Check) -> Vec<String> {
    let mark = match check.outcome {
        Outcome::Good => "ok  ",
        Outcome::Degraded => "warn",
        Outcome::Bad => "FAIL",
    };
    let found = format!("{mark}  {:<16} {}", check.name, check.found);
    let fix = check.fix.as_ref().map(|fix| format!("{INDENT}{:<16} → {fix}", ""));
    [found].into_iter().chain(fix).collect()
}

fn server(Server { target, hook, proved, advice, engine, .. }: &Server) -> Vec<String> {
    let version = hook.as_ref().map_or("not active".to_owned(), |hook| format!("active, {}", hook.hook));
    let mut lines = vec![format!("pid {:<9} {}  hook: {version}", target.key.pid, target.title)];
    lines.extend(hook.as_ref().map(|hook| format!("{INDENT}{}", in_words(&hook.server, *proved))));
    lines.extend(advice.as_ref().map(|advice| format!("{INDENT}{:<16} → {advice}", "")));
    lines.extend(transfers(engine));
    lines
}

fn transfers(engine: &EngineReport) -> Vec<String> {
    let mut lines = Vec::new();
    for finding in &engine.findings {
        lines.push(format!("warn  {:<16} {}", "transfers", finding.what));
        lines.push(format!("{INDENT}{:<16} = {}", "", finding.means));
        lines.push(format!("{INDENT}{:<16} → {}", "", finding.fix));
    }
    if engine.findings.is_empty() {
        lines.push(format!("ok    {:<16} each one's posting and end will be seen", "transfers"));
    }
    for closed in &engine.unreachable {
        lines.push(format!("warn  {:<16} {} ({}): {}", "library", closed.library, closed.role.name(), closed.why));
    }
    lines.extend(table(&engine.probes));
    lines
}

/// The table of probes in aligned columns. A reason is a whole sentence and the same for many rows: it stands below, once.
fn table(probes: &[ProbeOutlook]) -> Vec<String> {
    if probes.is_empty() {
        return Vec::new();
    }
    let mut reasons: Vec<&str> = Vec::new();
    let mut cells: Vec<[String; 6]> = vec![HEADS.map(ToOwned::to_owned)];
    for row in probes {
        let note = row.state.why().map(|why| {
            let place = reasons.iter().position(|known| *known == why).unwrap_or_else(|| {
                reasons.push(why);
                reasons.len() - 1
            });
            format!(" [{}]", place + 1)
        });
        cells.push([
            format!("{}{}", row.state.name(), note.unwrap_or_default()),
            if row.required { "required" } else { "optional" }.to_owned(),
            row.function.to_owned(),
            row.set.name().to_owned(),
            row.role.name().to_owned(),
            row.library.clone(),
        ]);
    }
    let widths: [usize; 6] = std::array::from_fn(|column| {
        cells.iter().map(|row| row.get(column).map_or(0, |cell| cell.chars().count())).max().unwrap_or(0)
    });
    let line = |row: &[String; 6]| {
        let padded = row.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}"));
        format!("{INDENT}{}", padded.collect::<Vec<_>>().join("  "))
    };
    let notes = reasons.iter().zip(1..).map(|(why, number)| format!("{INDENT}[{number}] {why}"));
    cells.iter().map(line).chain(notes).collect()
}

#[cfg(test)]
mod tests {
    use dislodge::{event::ProcessKey, kernel::outlook::Outlook, target::Target};

    use super::{
        super::engine::{Finding, tests::row},
        *,
    };

    fn of(title: &str, engine: EngineReport) -> String {
        let target = Target { key: ProcessKey { pid: 77, start: 1 }, title: title.to_owned() };
        let server = Server { target, hook: None, proved: false, marker: false, advice: None, engine };
        render(&Report { checks: Vec::new(), servers: vec![server], replicas: Vec::new() })
    }

    fn lacking() -> EngineReport {
        let why = || "a canary died".to_owned();
        let finding = |text: &str| Finding { what: text.to_owned(), means: "it costs".to_owned(), fix: why() };
        EngineReport {
            findings: vec![finding("can't be followed")],
            probes: vec![
                row("nixlAgent::makeXferReq", true, Outlook::Refused { why: why() }),
                row("post", true, Outlook::EntryOnly { why: why() }),
                row("status", false, Outlook::Missing),
                row("release", true, Outlook::Attachable),
            ],
            unreachable: Vec::new(),
        }
    }

    #[test]
    fn the_columns_of_the_table_are_aligned_and_a_reason_is_given_once() {
        let expected = "\
pid 77        sglang::scheduler  hook: not active
warn  transfers        can't be followed
                       = it costs
                       → a canary died
      OUTLOOK         NEEDED    FUNCTION                SET        ROLE  LIBRARY
      refused [1]     required  nixlAgent::makeXferReq  transfers  nixl  libnixl.so
      entry only [1]  required  post                    transfers  nixl  libnixl.so
      missing         optional  status                  transfers  nixl  libnixl.so
      attachable      required  release                 transfers  nixl  libnixl.so
      [1] a canary died
";
        assert_eq!(of("sglang::scheduler", lacking()), expected);
    }

    #[test]
    fn a_server_whose_transfers_will_be_followed_is_said_to_be_well() {
        let engine = EngineReport { probes: vec![row("post", true, Outlook::Attachable)], ..EngineReport::default() };
        let text = of("sglang::scheduler", engine);
        assert!(text.contains("\nok    transfers        each one's posting and end will be seen\n"), "{text}");
        assert!(!text.contains("warn") && !text.contains("[1]"), "{text}");
    }

    #[test]
    fn a_title_cannot_give_the_terminal_orders() {
        let text = of("sglang::scheduler\x1b[2J\nok    everything", EngineReport::default());
        assert!(!text.contains('\x1b') && text.lines().count() == 2, "{text:?}");
    }

    #[test]
    fn a_node_without_a_scheduler_is_told_what_was_looked_for() {
        let text = render(&Report { checks: Vec::new(), servers: Vec::new(), replicas: Vec::new() });
        assert!(text.contains("sglang::scheduler"), "{text}");
    }
}
