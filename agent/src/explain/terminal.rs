//! What a terminal is given: nothing that it obeys, and no line that is too long.

/// The time of day, in UTC.
pub(super) fn clock(time: jiff::Timestamp) -> String {
    time.strftime("%H:%M:%S.%3fZ").to_string()
}

/// A text without anything that a terminal obeys, or that looks like something else: what is neither ASCII nor a sign of
/// our own is escaped.
pub(super) fn safe(text: &str) -> String {
    let shown = |c: char| c == ' ' || c.is_ascii_graphic() || "\u{2192}\u{d7}\u{2026}".contains(c);
    text.chars().fold(String::with_capacity(text.len()), |mut safe, c| {
        if shown(c) {
            safe.push(c)
        } else {
            safe.extend(c.escape_unicode())
        }
        safe
    })
}

/// Lines of at most `width` characters, broken at spaces where there are some.
pub(super) fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let mut rest: Vec<char> = word.chars().collect();
        let used = lines.last().map_or(0, |line| line.chars().count());
        let fits = used == 0 || used + 1 + rest.len() <= width;
        if !fits {
            lines.push(String::new());
        } else if used > 0
            && let Some(line) = lines.last_mut()
        {
            line.push(' ');
        }
        loop {
            let used = lines.last().map_or(0, |line| line.chars().count());
            let later = rest.split_off(rest.len().min(width.saturating_sub(used).max(1)));
            if let Some(line) = lines.last_mut() {
                line.extend(rest);
            }
            if later.is_empty() {
                break;
            }
            rest = later;
            lines.push(String::new());
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_never_wider_than_they_may_be_and_no_word_is_lost() {
        let text = format!("a bb {} ccc  {}", "x".repeat(57), "y".repeat(9));
        for width in 1..80 {
            let lines = wrapped(&text, width);
            assert!(lines.iter().all(|line| line.chars().count() <= width), "{width}: {lines:?}");
            let letters = |text: &str| text.replace(' ', "");
            assert_eq!(letters(&lines.concat()), letters(&text), "{width}");
        }
    }

    #[test]
    fn what_a_terminal_would_obey_is_shown_instead() {
        let hostile = "\u{1b}[2J\u{9b}31m\r\n\t\u{202e}evil\u{7f}\u{430}";
        let shown = safe(hostile);
        assert!(shown.bytes().all(|byte| (0x20..0x7f).contains(&byte)), "{shown}");
        assert!(shown.contains("\\u{1b}[2J\\u{9b}31m") && shown.contains("\\u{202e}evil\\u{7f}\\u{430}"));
    }
}
