//! Problems in files that people write, each with its place: shared by configuration and rules.
//!
//! YAML is read into plain texts with positions first. What a text means is decided afterwards, so that one run of
//! `check` shows every problem instead of the first.

use std::{fmt, fs::File, io::Read, path::Path, time::Duration};

use serde::{
    Deserialize, Deserializer, Serialize,
    de::{self, DeserializeOwned, IgnoredAny, MapAccess, SeqAccess, Visitor},
};
use serde_yaml::Spanned;

/// Files beyond this many bytes are refused: none that a person writes is larger.
pub const MAX_FILE: u64 = 1 << 20;

/// Something wrong in a file, and where. Displays as `file:line:column: message`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Problem {
    /// The file as it was named to us.
    pub file: String,
    /// Line, from 1; 0 when it is about the file as a whole.
    pub line: u64,
    /// Column in characters, from 1; 0 when it is about the file as a whole.
    pub column: u64,
    /// What is wrong and what to write instead.
    pub message: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.line == 0 {
            write!(f, "{}: {}", self.file, self.message)
        } else {
            write!(f, "{}:{}:{}: {}", self.file, self.line, self.column, self.message)
        }
    }
}

impl Problem {
    /// A problem of the file as a whole.
    pub fn of_file(file: &str, message: impl Into<String>) -> Self {
        Self { file: file.to_owned(), line: 0, column: 0, message: message.into() }
    }
}

/// A text of a YAML file with its place.
pub(crate) type Text = Spanned<String>;

/// Collects the problems of one file.
#[derive(Debug)]
pub(crate) struct Problems<'a> {
    file: &'a str,
    found: Vec<Problem>,
}

impl<'a> Problems<'a> {
    pub(crate) fn of(file: &'a str) -> Self {
        Self { file, found: Vec::new() }
    }

    /// Notes a problem of the value `at`.
    pub(crate) fn at<T>(&mut self, at: &Spanned<T>, message: impl Into<String>) {
        self.at_place(at.referenced.line(), at.referenced.column(), message);
    }

    pub(crate) fn at_place(&mut self, line: u64, column: u64, message: impl Into<String>) {
        self.found.push(Problem { file: self.file.to_owned(), line, column, message: message.into() });
    }

    pub(crate) fn of_file(&mut self, message: impl Into<String>) {
        self.found.push(Problem::of_file(self.file, message));
    }

    pub(crate) fn into_found(self) -> Vec<Problem> {
        self.found
    }

    /// Reads `text` into `T` and notes keys that `shape` does not have. Nothing when it is not YAML of that shape.
    pub(crate) fn parse<T: DeserializeOwned>(&mut self, text: &str, shape: &Shape) -> Option<T> {
        let options = serde_yaml::options! { with_snippet: false };
        // The keys come first: a value under a misspelt key may have any shape.
        match serde_yaml::from_str_with_options::<Keys>(text, options.clone()) {
            Ok(keys) => self.unknown_keys(&keys, shape, ""),
            Err(error) => {
                self.yaml(&error);
                return None;
            }
        }
        match serde_yaml::from_str_with_options(text, options) {
            Ok(value) => Some(value),
            Err(error) => {
                self.yaml(&error);
                None
            }
        }
    }

    fn yaml(&mut self, error: &serde_yaml::Error) {
        let text = error.without_snippet().to_string();
        // The library puts the place into its text; ours stands in front already.
        let message = text.split(" at line ").next().unwrap_or(&text);
        let message = message.strip_prefix("error: ").unwrap_or(message);
        match error.location() {
            Some(place) => self.at_place(place.line(), place.column(), message),
            None => self.of_file(message),
        }
    }

    fn unknown_keys(&mut self, keys: &Keys, shape: &Shape, within: &str) {
        match (keys, shape) {
            (Keys::Map(entries), Shape::Map(known)) => {
                for (key, inner) in entries {
                    match known.iter().find(|(name, _)| *name == key.value) {
                        Some((name, shape)) => self.unknown_keys(inner, shape, name),
                        None => {
                            let names: Vec<&str> = known.iter().map(|(name, _)| *name).collect();
                            let place = if within.is_empty() { String::new() } else { format!(" in `{within}`") };
                            let hint = nearest(&key.value, &names);
                            self.at(key, format!("unknown key `{}`{place}; {hint}", key.value));
                        }
                    }
                }
            }
            (Keys::List(items), Shape::List(shape)) => {
                items.iter().for_each(|item| self.unknown_keys(item, shape, within));
            }
            _ => {}
        }
    }
}

/// Which keys a file may have.
#[derive(Debug)]
pub(crate) enum Shape {
    /// A scalar, or anything.
    Any,
    /// A list of such.
    List(&'static Shape),
    /// A map with these keys.
    Map(&'static [(&'static str, Shape)]),
}

/// The keys of a YAML file with their places, without its scalars.
enum Keys {
    Map(Vec<(Text, Keys)>),
    List(Vec<Keys>),
    Scalar,
}

impl<'de> Deserialize<'de> for Keys {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(KeysVisitor)
    }
}

struct KeysVisitor;

impl<'de> Visitor<'de> for KeysVisitor {
    type Value = Keys;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map, a list or a scalar")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Keys, A::Error> {
        let mut entries = Vec::new();
        while let Some(entry) = map.next_entry()? {
            entries.push(entry);
        }
        Ok(Keys::Map(entries))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Keys, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = list.next_element()? {
            items.push(item);
        }
        Ok(Keys::List(items))
    }

    fn visit_bool<E: de::Error>(self, _: bool) -> Result<Keys, E> {
        Ok(Keys::Scalar)
    }

    fn visit_i64<E: de::Error>(self, _: i64) -> Result<Keys, E> {
        Ok(Keys::Scalar)
    }

    fn visit_u64<E: de::Error>(self, _: u64) -> Result<Keys, E> {
        Ok(Keys::Scalar)
    }

    fn visit_i128<E: de::Error>(self, _: i128) -> Result<Keys, E> {
        Ok(Keys::Scalar)
    }

    fn visit_u128<E: de::Error>(self, _: u128) -> Result<Keys, E> {
        Ok(Keys::Scalar)
    }

    fn visit_f64<E: de::Error>(self, _: f64) -> Result<Keys, E> {
        Ok(Keys::Scalar)
    }

    fn visit_str<E: de::Error>(self, _: &str) -> Result<Keys, E> {
        Ok(Keys::Scalar)
    }

    fn visit_bytes<E: de::Error>(self, _: &[u8]) -> Result<Keys, E> {
        Ok(Keys::Scalar)
    }

    fn visit_unit<E: de::Error>(self) -> Result<Keys, E> {
        Ok(Keys::Scalar)
    }

    fn visit_none<E: de::Error>(self) -> Result<Keys, E> {
        Ok(Keys::Scalar)
    }

    fn visit_some<D: Deserializer<'de>>(self, inner: D) -> Result<Keys, D::Error> {
        inner.deserialize_any(self)
    }

    fn visit_newtype_struct<D: Deserializer<'de>>(self, inner: D) -> Result<Keys, D::Error> {
        inner.deserialize_any(self)
    }

    fn visit_enum<A: de::EnumAccess<'de>>(self, data: A) -> Result<Keys, A::Error> {
        data.variant::<IgnoredAny>()?;
        Ok(Keys::Scalar)
    }
}

/// Reads a regular file of at most [`MAX_FILE`] bytes.
///
/// # Errors
///
/// A problem of the file as a whole: it cannot be read, is no regular file, is too large, or is not UTF-8.
pub(crate) fn read_file(path: &Path) -> Result<String, Problem> {
    let name = path.display().to_string();
    let problem = |message: String| Problem::of_file(&name, message);
    // Looked at before it is opened: opening a FIFO would wait for its writer.
    let metadata = std::fs::metadata(path).map_err(|error| problem(format!("cannot be read: {error}")))?;
    if !metadata.is_file() {
        return Err(problem("is not a regular file".to_owned()));
    }
    let mut bytes = Vec::new();
    File::open(path)
        .and_then(|file| file.take(MAX_FILE + 1).read_to_end(&mut bytes))
        .map_err(|error| problem(format!("cannot be read: {error}")))?;
    if bytes.len() as u64 > MAX_FILE {
        return Err(problem(format!("is larger than {} KiB; split it", MAX_FILE >> 10)));
    }
    String::from_utf8(bytes).map_err(|error| {
        problem(format!("is not UTF-8: the byte at offset {} is not text", error.utf8_error().valid_up_to()))
    })
}

/// A duration such as `30s`, `5m`, `1h 30m`; no longer than `longest`.
///
/// # Errors
///
/// A message that says what to write.
pub(crate) fn duration(text: &str, longest: Duration) -> Result<Duration, String> {
    let duration = if text == "0" {
        Duration::ZERO
    } else {
        humantime_serde::re::humantime::parse_duration(text)
            .map_err(|_| format!("`{text}` is not a duration; write a number with a unit, such as 500ms, 30s or 5m"))?
    };
    if duration > longest {
        return Err(format!("`{text}` is too long; write at most {}s", longest.as_secs()));
    }
    Ok(duration)
}

/// A hint for a name that is not among `known`: the most similar one, or all of them.
pub(crate) fn nearest(name: &str, known: &[&str]) -> String {
    let best = known.iter().map(|known| (distance(name, known), known)).min();
    match best {
        Some((distance, best)) if distance <= 1 + best.len() / 4 => format!("did you mean `{best}`?"),
        _ => format!("known are {}", known.join(", ")),
    }
}

/// Levenshtein distance of two short names, by characters; long names are cut.
fn distance(left: &str, right: &str) -> usize {
    let right: Vec<char> = right.chars().take(64).collect();
    let mut row: Vec<usize> = (0..=right.len()).collect();
    for (line, left) in left.chars().take(64).enumerate() {
        let mut diagonal = line;
        let mut before = line + 1;
        for (cell, right) in row.iter_mut().skip(1).zip(&right) {
            let replaced = diagonal + usize::from(left != *right);
            diagonal = *cell;
            before = replaced.min(before + 1).min(diagonal + 1);
            *cell = before;
        }
        if let Some(first) = row.first_mut() {
            *first = line + 1;
        }
    }
    row.last().copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distance_counts_edits() {
        for (left, right, edits) in
            [("", "", 0), ("abc", "abc", 0), ("severty", "severity", 1), ("", "ab", 2), ("kitten", "sitting", 3)]
        {
            assert_eq!(distance(left, right), edits, "{left} {right}");
        }
    }

    #[test]
    fn durations_need_a_unit() {
        let day = Duration::from_secs(86_400);
        assert_eq!(duration("30s", day), Ok(Duration::from_secs(30)));
        assert_eq!(duration("1h 30m", day), Ok(Duration::from_secs(5_400)));
        assert_eq!(duration("0", day), Ok(Duration::ZERO));
        for bad in ["30", "", "soon", "-5s", "2d", "99999999999999999999999s"] {
            assert!(duration(bad, day).is_err(), "{bad}");
        }
    }
}
