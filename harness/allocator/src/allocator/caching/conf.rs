//! [`Config`] from and to the text that PyTorch reads from `PYTORCH_CUDA_ALLOC_CONF` or `PYTORCH_ALLOC_CONF`:
//! `max_split_size_mb:128,garbage_collection_threshold:0.8`.
//!
//! The rules are those of PyTorch 2.11 (`c10/core/AllocatorConfig.cpp` and `c10/cuda/CUDAAllocatorConfig.cpp` in
//! <https://github.com/pytorch/pytorch>), each of them checked against its binary: blanks are dropped wherever they stand; a setting that
//! is given twice counts as it stands last; a trailing comma is fine; a whole number is read as far as it goes, so `64.5` and `64abc` are
//! 64 and `-1` is 2⁶⁴ − 1. Settings of pinned host memory and of graph capture are checked and have no effect here.
//!
//! Two things that PyTorch lets pass are errors here, because nobody means them: a wrong separator (PyTorch takes any of `:`, `,`, `[` and
//! `]` for any other, so that `max_split_size_mb,64` works there) and hexadecimal fractions.

use std::fmt;

use super::config::Config;
use crate::allocator::MemoryFraction;
use crate::units::Bytes;

/// Everything between a key's colon and its comma is one of these.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Key {
    LargeSegmentSize,
    MaxSplitSize,
    MaxNonSplitRounding,
    RoundupPower2Divisions,
    GarbageCollectionThreshold,
    PerProcessMemoryFraction,
    ExpandableSegments,
    Backend,
    /// A boolean that does not concern device memory.
    HostSwitch,
    PinnedNumRegisterThreads,
    PinnedReserveSegmentSize,
}

/// Every key, those with an effect here first.
const KEYS: [(&str, Key); 16] = [
    ("large_segment_size_mb", Key::LargeSegmentSize),
    ("max_split_size_mb", Key::MaxSplitSize),
    ("max_non_split_rounding_mb", Key::MaxNonSplitRounding),
    ("roundup_power2_divisions", Key::RoundupPower2Divisions),
    ("garbage_collection_threshold", Key::GarbageCollectionThreshold),
    ("per_process_memory_fraction", Key::PerProcessMemoryFraction),
    ("expandable_segments", Key::ExpandableSegments),
    ("backend", Key::Backend),
    ("pinned_use_background_threads", Key::HostSwitch),
    ("pinned_use_cuda_host_register", Key::HostSwitch),
    ("pinned_use_hip_host_register", Key::HostSwitch),
    ("release_lock_on_cudamalloc", Key::HostSwitch),
    ("release_lock_on_hipmalloc", Key::HostSwitch),
    ("graph_capture_record_stream_reuse", Key::HostSwitch),
    ("pinned_num_register_threads", Key::PinnedNumRegisterThreads),
    ("pinned_reserve_segment_size_mb", Key::PinnedReserveSegmentSize),
];

/// `large_segment_size_mb` must be above this many MiB.
const LARGE_SEGMENT_SIZE_ABOVE: u64 = 10;
/// `pinned_num_register_threads` must not be above this.
const MOST_REGISTER_THREADS: u64 = 128;

impl Config {
    /// Reads a configuration string. The empty one is PyTorch's default.
    ///
    /// # Errors
    /// [`ConfError`], which shows the place and says PyTorch's rule.
    pub fn parse(text: &str) -> Result<Self, ConfError> {
        let mut reader = Reader { text, tokens: tokens(text), next: 0 };
        let mut config = Self { large_segment_size: reader.large_segment_size()?, ..Self::default() };
        config.max_non_split_rounding = config.large_segment_size;
        while let Some(key) = reader.key()? {
            reader.expect(":", "`:` and a value behind the key")?;
            reader.value(&key, &mut config)?;
            if reader.peek().is_some() {
                reader.expect(",", "`,` between two settings")?;
            }
        }
        Ok(config)
    }
}

/// A piece of the text: a word, or one of the four signs.
#[derive(Clone, Debug)]
struct Token {
    /// Without the blanks inside.
    word: String,
    start: usize,
    end: usize,
}

fn tokens(text: &str) -> Vec<Token> {
    let mut tokens: Vec<Token> = Vec::new();
    let mut in_word = false;
    for (start, character) in text.char_indices() {
        let end = start + character.len_utf8();
        let is_sign = matches!(character, ',' | ':' | '[' | ']');
        // C's isspace in the "C" locale.
        if matches!(character, ' ' | '\t' | '\n' | '\u{b}' | '\u{c}' | '\r') {
            continue;
        }
        match tokens.last_mut() {
            Some(token) if in_word && !is_sign => {
                token.word.push(character);
                token.end = end;
            }
            _ => tokens.push(Token { word: character.to_string(), start, end }),
        }
        in_word = !is_sign;
    }
    tokens
}

/// A key as it stands in the text.
struct KeyToken {
    key: Key,
    name: &'static str,
}

struct Reader<'a> {
    text: &'a str,
    tokens: Vec<Token>,
    next: usize,
}

impl Reader<'_> {
    /// The segment size, wherever it stands: the checks of other settings depend on it. Leaves the reader at the start.
    fn large_segment_size(&mut self) -> Result<Bytes, ConfError> {
        const KEY: &str = "large_segment_size_mb";
        let mut size = Config::default().large_segment_size;
        while let Some(token) = self.take() {
            if token.word == KEY {
                self.expect(":", "`:` and a value behind the key")?;
                let (mib, at) = self.whole_number(KEY)?;
                if mib <= LARGE_SEGMENT_SIZE_ABOVE {
                    return Err(out_of_range(KEY, format!("more than {LARGE_SEGMENT_SIZE_ABOVE} (MiB)"), at));
                }
                size = mebibytes(mib);
            }
        }
        self.next = 0;
        Ok(size)
    }

    /// The next key, or `None` at the end of the text.
    fn key(&mut self) -> Result<Option<KeyToken>, ConfError> {
        let Some(token) = self.take() else { return Ok(None) };
        if is_sign(&token.word) {
            return Err(self.syntax("a key: an item must not be empty", &token));
        }
        let known = KEYS.iter().find(|(name, _)| *name == token.word);
        let unknown = || ConfError::UnknownKey { key: token.word.clone(), at: self.excerpt(&token) };
        known.map(|&(name, key)| Some(KeyToken { key, name })).ok_or_else(unknown)
    }

    fn value(&mut self, &KeyToken { key, name }: &KeyToken, config: &mut Config) -> Result<(), ConfError> {
        match key {
            Key::LargeSegmentSize => self.whole_number(name).map(|_| ()),
            Key::MaxSplitSize => {
                config.max_split_size = Some(self.at_least_a_segment(name, config)?);
                Ok(())
            }
            Key::MaxNonSplitRounding => {
                config.max_non_split_rounding = self.at_least_a_segment(name, config)?;
                Ok(())
            }
            Key::RoundupPower2Divisions => self.divisions(name, &mut config.roundup_power2_divisions),
            Key::GarbageCollectionThreshold => {
                let (threshold, at) = self.real_number(name)?;
                let inside = threshold > 0.0 && threshold < 1.0;
                config.garbage_collection_threshold = Some(threshold).filter(|_| inside);
                if inside { Ok(()) } else { Err(out_of_range(name, "above 0 and below 1", at)) }
            }
            Key::PerProcessMemoryFraction => {
                let (fraction, at) = self.real_number(name)?;
                config.memory_fraction = MemoryFraction::new(fraction).ok_or_else(|| out_of_range(name, "from 0 to 1", at))?;
                Ok(())
            }
            Key::ExpandableSegments => {
                config.expandable_segments = self.boolean(name)?.0;
                Ok(())
            }
            Key::Backend => {
                let token = self.word("a backend: `native`")?;
                if token.word == "native" { Ok(()) } else { Err(ConfError::Backend { at: self.excerpt(&token) }) }
            }
            Key::HostSwitch => self.boolean(name).map(|_| ()),
            Key::PinnedNumRegisterThreads => match self.whole_number(name)? {
                (threads, _) if threads.is_power_of_two() && threads <= MOST_REGISTER_THREADS => Ok(()),
                (_, at) => Err(out_of_range(name, format!("a power of two of at most {MOST_REGISTER_THREADS}"), at)),
            },
            Key::PinnedReserveSegmentSize => match self.whole_number(name)? {
                (0, at) => Err(out_of_range(name, "more than 0", at)),
                _ => Ok(()),
            },
        }
    }

    fn at_least_a_segment(&mut self, name: &'static str, config: &Config) -> Result<Bytes, ConfError> {
        let (mib, at) = self.whole_number(name)?;
        let least = config.large_segment_size.0 >> 20;
        if mib < least {
            return Err(out_of_range(name, format!("at least large_segment_size_mb, which is {least}"), at));
        }
        Ok(mebibytes(mib))
    }

    fn divisions(&mut self, name: &'static str, divisions: &mut [u64; 16]) -> Result<(), ConfError> {
        if self.peek().is_some_and(|token| token.word == "[") {
            self.next += 1;
            return self.divisions_by_interval(name, divisions);
        }
        let (every, at) = self.whole_number(name)?;
        if !every.is_power_of_two() {
            return Err(out_of_range(name, "a power of two (or a list such as `[256:1,512:2,>:4]`)", at));
        }
        *divisions = [every; 16];
        Ok(())
    }

    /// A list as `[64:8,256:4,>:1]`, behind its bracket. A boundary of B MiB sets the interval that starts there; the first one also sets
    /// all intervals below; `>` sets all intervals after the last one set.
    fn divisions_by_interval(&mut self, name: &'static str, divisions: &mut [u64; 16]) -> Result<(), ConfError> {
        const EXPECTED: &str = "`MEBIBYTES:DIVISIONS`, `>:DIVISIONS` or `]`";
        let (mut first, mut last) = (true, 0);
        loop {
            let token = self.take().ok_or_else(|| self.syntax_at_end(EXPECTED))?;
            if token.word == "]" {
                return Ok(());
            }
            if is_sign(&token.word) {
                return Err(self.syntax(EXPECTED, &token));
            }
            self.expect(":", "`:` and the divisions of this interval")?;
            let (value, at) = self.whole_number(name)?;
            if value != 0 && !value.is_power_of_two() {
                return Err(out_of_range("the divisions of an interval", "a power of two, or 0 for none", at));
            }
            if token.word == ">" {
                divisions[last + 1..].fill(value);
            } else {
                let index = self.interval(&token)?;
                if std::mem::take(&mut first) {
                    divisions[..index].fill(value);
                }
                divisions[index] = value;
                last = index;
            }
            if self.peek().is_none_or(|token| token.word != "]") {
                self.expect(",", "`,` or `]` behind an interval")?;
            }
        }
    }

    fn interval(&self, token: &Token) -> Result<usize, ConfError> {
        let boundary = self.read_whole_number("an interval of roundup_power2_divisions", token)?;
        if !boundary.is_power_of_two() {
            return Err(out_of_range("an interval of roundup_power2_divisions", "a power of two (MiB), or `>`", self.excerpt(token)));
        }
        Ok((boundary.ilog2() as usize).min(15))
    }

    fn boolean(&mut self, key: &'static str) -> Result<(bool, Excerpt), ConfError> {
        let token = self.word("`True` or `False`")?;
        let at = self.excerpt(&token);
        match token.word.as_str() {
            "True" => Ok((true, at)),
            "False" => Ok((false, at)),
            _ => Err(ConfError::NotABoolean { key, at }),
        }
    }

    fn whole_number(&mut self, key: &'static str) -> Result<(u64, Excerpt), ConfError> {
        let token = self.word("a whole number")?;
        Ok((self.read_whole_number(key, &token)?, self.excerpt(&token)))
    }

    /// As C's `strtoull` with base 10: the longest number in front, and a minus wraps around.
    fn read_whole_number(&self, key: &'static str, token: &Token) -> Result<u64, ConfError> {
        let (negative, digits) = sign(&token.word);
        let digits = &digits[..count(digits, |c| c.is_ascii_digit())];
        if digits.is_empty() {
            return Err(ConfError::NotANumber { key, form: "a whole number, as `64`", at: self.excerpt(token) });
        }
        let value: u64 = digits.parse().map_err(|_| out_of_range(key, "below 2^64", self.excerpt(token)))?;
        Ok(if negative { value.wrapping_neg() } else { value })
    }

    /// As C's `strtod` for decimal numbers: the longest number in front.
    fn real_number(&mut self, key: &'static str) -> Result<(f64, Excerpt), ConfError> {
        let token = self.word("a number")?;
        let at = self.excerpt(&token);
        let number = decimal_prefix(&token.word).and_then(|prefix| prefix.parse::<f64>().ok().map(|value| (prefix, value)));
        let Some((prefix, value)) = number else {
            return Err(ConfError::NotANumber { key, form: "a decimal number, as `0.8`", at });
        };
        let mantissa = prefix.split(['e', 'E']).next().unwrap_or_default();
        let is_zero = !mantissa.contains(|c: char| c.is_ascii_digit() && c != '0');
        if value.is_normal() || is_zero { Ok((value, at)) } else { Err(out_of_range(key, "a number that double precision can hold", at)) }
    }

    /// A token that is not a sign.
    fn word(&mut self, expected: &'static str) -> Result<Token, ConfError> {
        match self.take() {
            Some(token) if is_sign(&token.word) => Err(self.syntax(expected, &token)),
            Some(token) => Ok(token),
            None => Err(self.syntax_at_end(expected)),
        }
    }

    fn expect(&mut self, sign: &str, expected: &'static str) -> Result<(), ConfError> {
        match self.take() {
            Some(token) if token.word == sign => Ok(()),
            Some(token) => Err(self.syntax(expected, &token)),
            None => Err(self.syntax_at_end(expected)),
        }
    }

    fn peek(&self) -> Option<&Token> {
        self.tokens.get(self.next)
    }

    fn take(&mut self) -> Option<Token> {
        let token = self.tokens.get(self.next).cloned();
        self.next += usize::from(token.is_some());
        token
    }

    fn excerpt(&self, token: &Token) -> Excerpt {
        Excerpt { text: self.text.to_owned(), offset: token.start, length: token.end - token.start }
    }

    fn syntax(&self, expected: &'static str, found: &Token) -> ConfError {
        ConfError::Syntax { expected, at: self.excerpt(found) }
    }

    fn syntax_at_end(&self, expected: &'static str) -> ConfError {
        ConfError::Syntax { expected, at: Excerpt { text: self.text.to_owned(), offset: self.text.len(), length: 0 } }
    }
}

fn is_sign(word: &str) -> bool {
    matches!(word, "," | ":" | "[" | "]")
}

fn out_of_range(key: &'static str, rule: impl Into<String>, at: Excerpt) -> ConfError {
    ConfError::OutOfRange { key, rule: rule.into(), at }
}

/// As many bytes as whole mebibytes fit 64 bits, at most.
fn mebibytes(mib: u64) -> Bytes {
    Bytes::mib(mib.min(u64::MAX >> 20))
}

fn sign(word: &str) -> (bool, &str) {
    match word.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, word.strip_prefix('+').unwrap_or(word)),
    }
}

/// Bytes at the start of the text whose characters are all of that kind.
fn count(text: &str, kind: impl Fn(char) -> bool) -> usize {
    text.find(|c| !kind(c)).unwrap_or(text.len())
}

/// The longest decimal number in front: sign, digits with at most one point, exponent. `None` where there is none, or a hexadecimal one.
fn decimal_prefix(word: &str) -> Option<&str> {
    let digits = |from: usize| count(&word[from..], |c| c.is_ascii_digit());
    let mut end = word.len() - sign(word).1.len();
    if word[end..].starts_with("0x") || word[end..].starts_with("0X") {
        return None;
    }
    let whole = digits(end);
    end += whole;
    let point = usize::from(word[end..].starts_with('.'));
    let fraction = if point == 1 { digits(end + 1) } else { 0 };
    if whole + fraction == 0 {
        return None;
    }
    end += point + fraction;
    if word[end..].starts_with(['e', 'E']) {
        let signed = usize::from(word[end + 1..].starts_with(['+', '-']));
        let exponent = digits(end + 1 + signed);
        if exponent > 0 {
            end += 1 + signed + exponent;
        }
    }
    Some(&word[..end])
}

/// A configuration string that PyTorch would refuse, or that asks for what is not there.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfError {
    /// Correct the key, or leave the setting out.
    #[error("`{key}` is not a setting of PyTorch 2.11's allocator; there are {}\n{at}", key_names())]
    UnknownKey {
        /// What stands there.
        key: String,
        /// Where.
        at: Excerpt,
    },
    /// Write what is expected.
    #[error("expected {expected}; settings are written `KEY:VALUE,KEY:VALUE`\n{at}")]
    Syntax {
        /// What is accepted there.
        expected: &'static str,
        /// Where.
        at: Excerpt,
    },
    /// Write a number.
    #[error("{key} must be {form}\n{at}")]
    NotANumber {
        /// Of which setting.
        key: &'static str,
        /// What is accepted.
        form: &'static str,
        /// Where.
        at: Excerpt,
    },
    /// Choose a value that PyTorch allows.
    #[error("{key} must be {rule}\n{at}")]
    OutOfRange {
        /// Of which setting.
        key: &'static str,
        /// What PyTorch allows.
        rule: String,
        /// Where.
        at: Excerpt,
    },
    /// Write `True` or `False`.
    #[error("{key} must be `True` or `False`, capital letter included\n{at}")]
    NotABoolean {
        /// Of which setting.
        key: &'static str,
        /// Where.
        at: Excerpt,
    },
    /// Leave the backend out.
    #[error("the only backend here is `native`: PyTorch's `cudaMallocAsync` is not this allocator, and it knows no others\n{at}")]
    Backend {
        /// Where.
        at: Excerpt,
    },
}

impl ConfError {
    /// Where in the text, in bytes; its length for something missing at the end.
    #[must_use]
    pub fn offset(&self) -> usize {
        self.at().offset
    }

    /// How many bytes are meant; 0 for something missing.
    #[must_use]
    pub fn length(&self) -> usize {
        self.at().length
    }

    /// What is wrong and what would be right, in one line, without the excerpt that [`fmt::Display`] adds.
    #[must_use]
    pub fn rule(&self) -> String {
        self.to_string().lines().next().unwrap_or_default().to_owned()
    }

    fn at(&self) -> &Excerpt {
        match self {
            Self::UnknownKey { at, .. }
            | Self::Syntax { at, .. }
            | Self::NotANumber { at, .. }
            | Self::OutOfRange { at, .. }
            | Self::NotABoolean { at, .. }
            | Self::Backend { at } => at,
        }
    }
}

fn key_names() -> String {
    KEYS.map(|(name, _)| name).join(", ")
}

/// A place in a configuration string: displayed as the string and a line of carets below it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Excerpt {
    text: String,
    offset: usize,
    length: usize,
}

impl fmt::Display for Excerpt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // One column a character: tabs and line ends become blanks.
        let line: String = self.text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
        let column = self.text[..self.offset].chars().count();
        let carets = self.text[self.offset..self.offset + self.length].chars().count().max(1);
        write!(f, "  `{line}`\n   {:column$}{:^<carets$}", "", "")
    }
}

impl fmt::Display for Config {
    /// The shortest string that [`Config::parse`] reads as the same settings: defaults are left out, sizes are whole mebibytes, and
    /// [`Quirks`](super::Quirks), which PyTorch does not know, do not appear.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            max_split_size,
            max_non_split_rounding,
            large_segment_size,
            roundup_power2_divisions,
            garbage_collection_threshold,
            memory_fraction,
            expandable_segments,
            quirks: _,
        } = self;
        let mib = |size: Bytes| size.0 >> 20;
        let mut items = Vec::new();
        if *large_segment_size != Self::default().large_segment_size {
            items.push(format!("large_segment_size_mb:{}", mib(*large_segment_size)));
        }
        items.extend(max_split_size.map(|size| format!("max_split_size_mb:{}", mib(size))));
        if max_non_split_rounding != large_segment_size {
            items.push(format!("max_non_split_rounding_mb:{}", mib(*max_non_split_rounding)));
        }
        items.extend(write_divisions(roundup_power2_divisions));
        items.extend(garbage_collection_threshold.map(|threshold| format!("garbage_collection_threshold:{threshold}")));
        if *memory_fraction != MemoryFraction::ALL {
            items.push(format!("per_process_memory_fraction:{}", memory_fraction.get()));
        }
        if *expandable_segments {
            items.push("expandable_segments:True".to_owned());
        }
        f.write_str(&items.join(","))
    }
}

/// The intervals as PyTorch reads them: a number where they are all alike, else a list; nothing where there are none.
fn write_divisions(divisions: &[u64; 16]) -> Option<String> {
    let [head, .., tail] = *divisions;
    if *divisions == [head; 16] {
        return (head != 0).then(|| format!("roundup_power2_divisions:{head}"));
    }
    let first = divisions.iter().take_while(|&&value| value == head).count() - 1;
    let rest = divisions.len() - divisions.iter().rev().take_while(|&&value| value == tail).count();
    let mut items: Vec<String> = (first..rest).map(|index| format!("{}:{}", 1_u64 << index, divisions[index])).collect();
    if tail != 0 {
        items.push(format!(">:{tail}"));
    }
    Some(format!("roundup_power2_divisions:[{}]", items.join(",")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse(text: &str) -> Config {
        Config::parse(text).unwrap_or_else(|error| panic!("{error}"))
    }

    #[test]
    fn the_empty_string_and_blanks_are_the_default() {
        for text in ["", "  ", "backend:native", "expandable_segments:False,", "pinned_use_background_threads:True"] {
            assert_eq!(parse(text), Config::default(), "{text}");
        }
        assert_eq!(Config::default().to_string(), "");
    }

    #[test]
    fn numbers_are_read_as_far_as_they_go_and_wrap_below_zero() {
        let largest = Bytes(u64::MAX - 0xF_FFFF);
        let sizes = [("64", Bytes::mib(64)), ("64.5", Bytes::mib(64)), ("64abc", Bytes::mib(64)), (" 6 4 ", Bytes::mib(64))];
        for (text, size) in sizes.into_iter().chain([("+20", Bytes::mib(20)), ("-1", largest), ("18446744073709551615", largest)]) {
            assert_eq!(parse(&format!("max_split_size_mb:{text},")).max_split_size, Some(size), "{text}");
        }
        for (text, value) in [(".5", 0.5), ("5e-1", 0.5), ("0.25xyz", 0.25), ("0.25e", 0.25), ("+0.25", 0.25)] {
            assert_eq!(parse(&format!("garbage_collection_threshold:{text}")).garbage_collection_threshold, Some(value), "{text}");
        }
        assert_eq!(parse("per_process_memory_fraction:-0.0").memory_fraction.limit(Bytes::gib(1)), Some(Bytes::ZERO));
    }

    #[test]
    fn the_segment_size_counts_before_the_others_wherever_it_stands() {
        let config = parse("max_split_size_mb:11,large_segment_size_mb:11");
        assert_eq!((config.max_split_size, config.max_non_split_rounding), (Some(Bytes::mib(11)), Bytes::mib(11)));
        let error = Config::parse("max_split_size_mb:32,large_segment_size_mb:64").expect_err("32 is below 64");
        assert_eq!(error.rule(), "max_split_size_mb must be at least large_segment_size_mb, which is 64");
        assert_eq!((error.offset(), error.length()), (18, 2));
    }

    #[test]
    fn what_is_given_twice_counts_as_it_stands_last() {
        assert_eq!(parse("max_split_size_mb:64,max_split_size_mb:128").max_split_size, Some(Bytes::mib(128)));
        let config = parse("roundup_power2_divisions:4,roundup_power2_divisions:[64:8]");
        assert_eq!(config.roundup_power2_divisions, [8, 8, 8, 8, 8, 8, 8, 4, 4, 4, 4, 4, 4, 4, 4, 4]);
        assert!(Config::parse("max_split_size_mb:19,max_split_size_mb:128").is_err(), "each is checked");
    }

    #[test]
    fn a_list_of_divisions_leaves_what_it_does_not_name_unrounded() {
        for (list, expected) in [
            ("[64:8,256:4,>:1]", [8, 8, 8, 8, 8, 8, 8, 0, 4, 1, 1, 1, 1, 1, 1, 1]),
            ("[64:8,256:4]", [8, 8, 8, 8, 8, 8, 8, 0, 4, 0, 0, 0, 0, 0, 0, 0]),
            ("[>:4]", [0, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4]),
            ("[>:4,2:8]", [8, 8, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4]),
            ("[1048576:2,]", [2; 16]),
            ("[32768:0,>:2]", [0; 16]),
            ("[]", [0; 16]),
        ] {
            assert_eq!(parse(&format!("roundup_power2_divisions:{list}")).roundup_power2_divisions, expected, "{list}");
        }
    }

    #[test]
    fn what_pytorch_refuses_is_refused_at_its_place() {
        for (text, offset, length) in [
            ("max_split_size_mb:19", 18, 2),
            ("max_split_size_mb:x", 18, 1),
            ("max_split_size_mb:18446744073709551616", 18, 20),
            ("max_split_size_mb:[64]", 18, 1),
            ("max_split_size_mb", 17, 0),
            ("max_split_size_mb:", 18, 0),
            ("max_split_size_mb=64", 0, 20),
            ("max_split_size_mb:64,,backend:native", 21, 1),
            (",max_split_size_mb:64", 0, 1),
            (",", 0, 1),
            ("MAX_SPLIT_SIZE_MB:64", 0, 17),
            ("large_segment_size_mb:10", 22, 2),
            ("max_non_split_rounding_mb:19", 26, 2),
            ("garbage_collection_threshold:0", 29, 1),
            ("garbage_collection_threshold:1", 29, 1),
            ("garbage_collection_threshold:nan", 29, 3),
            ("garbage_collection_threshold:1e-400", 29, 6),
            ("garbage_collection_threshold:1e-310", 29, 6),
            ("per_process_memory_fraction:1.01", 28, 4),
            ("per_process_memory_fraction:-0.1", 28, 4),
            ("expandable_segments:true", 20, 4),
            ("backend:cudaMallocAsync", 8, 15),
            ("roundup_power2_divisions:0", 25, 1),
            ("roundup_power2_divisions:[64:8", 30, 0),
            ("roundup_power2_divisions:[,64:8]", 26, 1),
            ("roundup_power2_divisions:[64:8,,128:4]", 31, 1),
            ("roundup_power2_divisions:[64]", 28, 1),
            ("roundup_power2_divisions:[63:8]", 26, 2),
            ("roundup_power2_divisions:[64:3]", 29, 1),
            ("roundup_power2_divisions:[64:8]max_split_size_mb:64", 31, 17),
            ("pinned_use_background_threads:1", 30, 1),
            ("pinned_num_register_threads:256", 28, 3),
            ("pinned_reserve_segment_size_mb:0", 31, 1),
            ("throw_on_cudamalloc_oom:True", 0, 23),
            // Stricter than PyTorch, on purpose.
            ("max_split_size_mb,64", 17, 1),
            ("roundup_power2_divisions:[64:8:128:4]", 30, 1),
            ("per_process_memory_fraction:0x1p-1", 28, 6),
        ] {
            let error = Config::parse(text).expect_err(text);
            assert_eq!((error.offset(), error.length()), (offset, length), "{error}");
        }
    }

    #[test]
    fn an_error_quotes_the_string_and_points_at_the_character() {
        let error = Config::parse("backend:native, roundup_power2_divisions:[64:3]").expect_err("3 is no power of two");
        let shown = "the divisions of an interval must be a power of two, or 0 for none\n\
                     \x20 `backend:native, roundup_power2_divisions:[64:3]`\n\
                     \x20                                               ^";
        assert_eq!(error.to_string(), shown);
        assert!(parse("expandable_segments:True").expandable_segments);
        assert!(!parse("expandable_segments:True,expandable_segments:False").expandable_segments, "the last one counts");
    }

    fn divisions() -> impl Strategy<Value = u64> {
        prop_oneof![Just(0), (0_u32..64).prop_map(|shift| 1 << shift)]
    }

    prop_compose! {
        fn configs()(
            large in 11_u64..200,
            split in proptest::option::of(0_u64..1 << 45),
            rounding in prop_oneof![Just(0), 0_u64..1 << 45],
            roundup in prop_oneof![divisions().prop_map(|value| [value; 16]), prop::array::uniform16(divisions())],
            threshold in proptest::option::of((1_u32..u32::MAX).prop_map(|n| f64::from(n) / f64::from(u32::MAX))),
            fraction in 0.0_f64..=1.0,
            expandable_segments in any::<bool>(),
        ) -> Config {
            Config {
                max_split_size: split.map(|more| mebibytes(large + more)),
                max_non_split_rounding: mebibytes(large + rounding),
                large_segment_size: Bytes::mib(large),
                roundup_power2_divisions: roundup,
                garbage_collection_threshold: threshold,
                memory_fraction: MemoryFraction::new(fraction).expect("in range"),
                expandable_segments,
                ..Config::default()
            }
        }
    }

    proptest! {
        #[test]
        fn every_config_reads_back_from_its_string(config in configs()) {
            let text = config.to_string();
            prop_assert_eq!(Config::parse(&text), Ok(config), "{}", text);
        }

        #[test]
        fn any_text_is_read_or_refused_at_a_place_inside_it(text in "[a-z_:,\\[\\]>0-9. é-]{0,40}|(max_split_size_mb|backend)[:,][ -~]{0,20}") {
            if let Err(error) = Config::parse(&text) {
                prop_assert!(error.offset() + error.length() <= text.len());
                prop_assert_eq!(error.to_string().lines().count(), 3);
            }
        }
    }
}
