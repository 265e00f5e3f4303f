//! Parses and writes [`Config`] in the form of `PYTORCH_CUDA_ALLOC_CONF` and `PYTORCH_ALLOC_CONF`:
//! `max_split_size_mb:128,garbage_collection_threshold:0.8`.
//!
//! The rules are those of each version of PyTorch (`c10/core/AllocatorConfig.cpp` and
//! `c10/cuda/CUDAAllocatorConfig.cpp` in <https://github.com/pytorch/pytorch>), checked against its
//! binaries. Spaces are dropped everywhere. The last value of a repeated setting counts. A trailing
//! comma is allowed. A whole number is read up to the first other character, so `64.5` and `64abc`
//! are 64 and `-1` is 2⁶⁴ − 1. Settings of pinned host memory and of graph capture are
//! checked but have no effect here.
//!
//! Three things that PyTorch accepts are errors here, because they are always mistakes: a wrong
//! separator (PyTorch accepts any of `:`, `,`, `[` and `]` for another, such as
//! `max_split_size_mb,64`), hexadecimal fractions, and values of `expandable_segments_reserve` that
//! it ignores with a warning.

mod error;
mod setting;

use std::fmt;

pub use self::error::{ConfError, ConfExcerpt};
use self::setting::Key;
pub use self::setting::Setting;
use super::config::{Config, SegmentReserve};
use super::torch::TorchVersion;
use crate::{allocator::MemoryFraction, units::Bytes};

/// `large_segment_size_mb` must be above this many MiB.
const LARGE_SEGMENT_SIZE_ABOVE: u64 = 10;
/// `pinned_num_register_threads` is at most this.
const MOST_REGISTER_THREADS: u64 = 128;

impl Config {
    /// Parses a configuration string of the newest version of PyTorch. The empty string is its
    /// default. Fails with a [`ConfError`] that has the place and PyTorch's rule.
    pub fn parse(text: &str) -> Result<Self, ConfError> {
        Self::parse_for(TorchVersion::default(), text)
    }

    /// Parses a configuration string of a version of PyTorch.
    /// Fails with a [`ConfError`] that has the place and PyTorch's rule.
    pub fn parse_for(torch: TorchVersion, text: &str) -> Result<Self, ConfError> {
        let mut reader = Reader {
            torch,
            text,
            tokens: tokens(text),
            next: 0,
        };
        let mut config = Self {
            torch,
            large_segment_size: reader.large_segment_size()?,
            ..Self::default()
        };
        config.max_non_split_rounding = config.large_segment_size;
        while let Some(setting) = reader.key()? {
            reader.expect(":", "`:` and a value after the key")?;
            reader.value(setting, &mut config)?;
            if reader.peek().is_some() {
                reader.expect(",", "`,` between two settings")?;
            }
        }
        Ok(config)
    }
}

impl Config {
    /// A sentence for each setting that has no effect because another one is missing.
    pub fn idle_settings(&self) -> Vec<&'static str> {
        let collects_nothing = self.garbage_collection_threshold.is_some()
            && self.memory_fraction == MemoryFraction::ALL;
        let rounds_nothing =
            self.max_non_split_rounding != self.large_segment_size && self.max_split_size.is_none();
        let reserves_nothing =
            self.expandable_segments_reserve.is_some() && !self.expandable_segments;
        let told = [
            collects_nothing.then_some(
                "garbage_collection_threshold has no effect without per_process_memory_fraction, \
                 unless the program sets a fraction itself",
            ),
            reserves_nothing.then_some(
                "expandable_segments_reserve has no effect without \
                 expandable_segments",
            ),
            rounds_nothing.then_some(
                "max_non_split_rounding_mb has no effect without \
                 max_split_size_mb",
            ),
        ];
        told.into_iter().flatten().collect()
    }
}

#[derive(Clone, Debug)]
struct Token {
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
            _ => tokens.push(Token {
                word: character.to_string(),
                start,
                end,
            }),
        }
        in_word = !is_sign;
    }
    tokens
}

struct Reader<'a> {
    torch: TorchVersion,
    text: &'a str,
    tokens: Vec<Token>,
    next: usize,
}

impl Reader<'_> {
    /// Finds the segment size, because the checks of other settings depend on it. Leaves the reader
    /// at the start.
    fn large_segment_size(&mut self) -> Result<Bytes, ConfError> {
        const KEY: &str = "large_segment_size_mb";
        let mut size = Config::default().large_segment_size;
        while let Some(token) = self.take() {
            if token.word == KEY {
                self.expect(":", "`:` and a value after the key")?;
                let rule = format!("more than {LARGE_SEGMENT_SIZE_ABOVE} (MiB)");
                size = mebibytes(self.number_of(KEY, rule, |mib| mib > LARGE_SEGMENT_SIZE_ABOVE)?);
            }
        }
        self.next = 0;
        Ok(size)
    }

    fn key(&mut self) -> Result<Option<&'static Setting>, ConfError> {
        let Some(token) = self.take() else {
            return Ok(None);
        };
        if is_sign(&token.word) {
            return Err(self.syntax("a key: an item must not be empty", &token));
        }
        let unknown = || ConfError::UnknownKey {
            key: token.word.clone(),
            at: self.excerpt(&token),
        };
        let setting = Setting::from_name(&token.word).ok_or_else(unknown)?;
        if setting.since > self.torch {
            return Err(ConfError::TooNew {
                key: setting.name,
                since: setting.since,
                torch: self.torch,
                at: self.excerpt(&token),
            });
        }
        Ok(Some(setting))
    }

    fn value(
        &mut self,
        &Setting { key, name, .. }: &Setting,
        config: &mut Config,
    ) -> Result<(), ConfError> {
        match key {
            // `large_segment_size` has read it before.
            Key::LargeSegmentSize => drop(self.whole_number(name)?),
            Key::MaxSplitSize => {
                config.max_split_size = Some(self.at_least_a_segment(name, config)?)
            }
            Key::MaxNonSplitRounding => {
                config.max_non_split_rounding = self.at_least_a_segment(name, config)?
            }
            Key::RoundupPower2Divisions => {
                self.divisions(name, &mut config.roundup_power2_divisions)?
            }
            Key::GarbageCollectionThreshold => {
                let (threshold, at) = self.real_number(name)?;
                if threshold <= 0.0 || threshold >= 1.0 {
                    return Err(out_of_range(name, "above 0 and below 1", at));
                }
                config.garbage_collection_threshold = Some(threshold);
            }
            Key::PerProcessMemoryFraction => {
                let (fraction, at) = self.real_number(name)?;
                config.memory_fraction = MemoryFraction::new(fraction)
                    .ok_or_else(|| out_of_range(name, "from 0 to 1", at))?;
            }
            Key::ExpandableSegments => config.expandable_segments = self.boolean(name)?,
            Key::Backend => {
                let token = self.word("a backend: `native`")?;
                if token.word != "native" {
                    return Err(ConfError::Backend {
                        at: self.excerpt(&token),
                    });
                }
            }
            Key::HostSwitch => drop(self.boolean(name)?),
            Key::PinnedNumRegisterThreads => {
                let rule = format!("a power of two of at most {MOST_REGISTER_THREADS}");
                self.number_of(name, rule, |threads| {
                    threads.is_power_of_two() && threads <= MOST_REGISTER_THREADS
                })?;
            }
            Key::HostSize => drop(self.number_of(name, "more than 0", |mib| mib > 0)?),
            Key::ThrowOnMallocOom => config.throw_on_malloc_oom = self.boolean(name)?,
            Key::ExpandableSegmentsReserve => {
                config.expandable_segments_reserve = Some(self.reserve(name)?)
            }
            Key::ExpandableSegmentsReserveByClass => self.reserves_by_class(name)?,
        }
        Ok(())
    }

    fn at_least_a_segment(
        &mut self,
        name: &'static str,
        config: &Config,
    ) -> Result<Bytes, ConfError> {
        let (least, rule) = match self.torch.least_split_size() {
            Some(least) => (least, format!("at least {least}")),
            None => {
                let least = config.large_segment_size.0 >> 20;
                (
                    least,
                    format!("at least large_segment_size_mb, which is {least}"),
                )
            }
        };
        self.number_of(name, rule, |mib| mib >= least)
            .map(mebibytes)
    }

    fn divisions(
        &mut self,
        name: &'static str,
        divisions: &mut [u64; 16],
    ) -> Result<(), ConfError> {
        if self.peek().is_some_and(|token| token.word == "[") {
            self.next += 1;
            return self.divisions_by_interval(name, divisions);
        }
        let every = self.number_of(
            name,
            "a power of two (or a list such as `[256:1,512:2,>:4]`)",
            u64::is_power_of_two,
        )?;
        *divisions = [every; 16];
        Ok(())
    }

    /// Reads a list such as `[64:8,256:4,>:1]` after its bracket. A boundary of B MiB sets the
    /// interval that starts there. The first one also sets all intervals below, and `>` sets all
    /// intervals after the last one.
    fn divisions_by_interval(
        &mut self,
        name: &'static str,
        divisions: &mut [u64; 16],
    ) -> Result<(), ConfError> {
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
                return Err(out_of_range(
                    "the divisions of an interval",
                    "a power of two, or 0 for none",
                    at,
                ));
            }
            if token.word == ">" {
                let from = if self.torch.rest_includes_last_interval() {
                    last
                } else {
                    last + 1
                };
                divisions[from..].fill(value);
            } else {
                let index = self.interval(&token)?;
                if std::mem::take(&mut first) {
                    divisions[..index].fill(value);
                }
                divisions[index] = value;
                last = index;
            }
            if self.peek().is_none_or(|token| token.word != "]") {
                self.expect(",", "`,` or `]` after an interval")?;
            }
        }
    }

    /// A fraction of the device, or a number of GiB with `G`.
    fn reserve(&mut self, key: &'static str) -> Result<SegmentReserve, ConfError> {
        let token = self.word("a fraction or a size")?;
        let gib = token.word.strip_suffix(['G', 'g']);
        match gib
            .unwrap_or(&token.word)
            .parse::<f64>()
            .ok()
            .filter(|value| value.is_finite() && *value > 0.0)
        {
            Some(size) if gib.is_some() => Ok(SegmentReserve::Bytes(Bytes(
                (size * Bytes::gib(1).0 as f64) as u64,
            ))),
            Some(fraction) => Ok(SegmentReserve::Fraction(fraction)),
            None => {
                let form =
                    "a fraction of the device above 0 such as `0.5`, or a size such as `40G`";
                Err(ConfError::NotANumber {
                    key,
                    form,
                    at: self.excerpt(&token),
                })
            }
        }
    }

    /// A list such as `[a:0.5,b:40G]`. Streams have no class here.
    fn reserves_by_class(&mut self, key: &'static str) -> Result<(), ConfError> {
        self.expect("[", "a list such as `[a:0.5,b:40G]`")?;
        while self.peek().is_some_and(|token| token.word != "]") {
            self.word("the name of a class")?;
            self.expect(":", "`:` and a fraction or a size")?;
            self.reserve(key)?;
            if self.peek().is_some_and(|token| token.word != "]") {
                self.expect(",", "`,` or `]` after a class")?;
            }
        }
        self.expect("]", "`]` at the end of the list")
    }

    fn interval(&self, token: &Token) -> Result<usize, ConfError> {
        let boundary = self.read_whole_number("an interval of roundup_power2_divisions", token)?;
        if !boundary.is_power_of_two() {
            return Err(out_of_range(
                "an interval of roundup_power2_divisions",
                "a power of two (MiB), or `>`",
                self.excerpt(token),
            ));
        }
        Ok((boundary.ilog2() as usize).min(15))
    }

    fn boolean(&mut self, key: &'static str) -> Result<bool, ConfError> {
        let token = self.word("`True` or `False`")?;
        match token.word.as_str() {
            "True" => Ok(true),
            "False" => Ok(false),
            _ => Err(ConfError::NotABoolean {
                key,
                at: self.excerpt(&token),
            }),
        }
    }

    fn whole_number(&mut self, key: &'static str) -> Result<(u64, ConfExcerpt), ConfError> {
        let token = self.word("a whole number")?;
        Ok((self.read_whole_number(key, &token)?, self.excerpt(&token)))
    }

    fn number_of(
        &mut self,
        key: &'static str,
        rule: impl Into<String>,
        is_valid: impl Fn(u64) -> bool,
    ) -> Result<u64, ConfError> {
        let (number, at) = self.whole_number(key)?;
        if is_valid(number) {
            Ok(number)
        } else {
            Err(out_of_range(key, rule, at))
        }
    }

    /// As C's `strtoull` with base 10: reads the longest leading number, and a minus sign wraps
    /// around.
    fn read_whole_number(&self, key: &'static str, token: &Token) -> Result<u64, ConfError> {
        let (negative, digits) = sign(&token.word);
        let digits = &digits[..count(digits, |c| c.is_ascii_digit())];
        if digits.is_empty() {
            return Err(ConfError::NotANumber {
                key,
                form: "a whole number, as `64`",
                at: self.excerpt(token),
            });
        }
        let value: u64 = digits
            .parse()
            .map_err(|_| out_of_range(key, "below 2^64", self.excerpt(token)))?;
        Ok(if negative {
            value.wrapping_neg()
        } else {
            value
        })
    }

    /// As C's `strtod` for decimal numbers: reads the longest leading number.
    fn real_number(&mut self, key: &'static str) -> Result<(f64, ConfExcerpt), ConfError> {
        let token = self.word("a number")?;
        let at = self.excerpt(&token);
        let number = decimal_prefix(&token.word)
            .and_then(|prefix| prefix.parse::<f64>().ok().map(|value| (prefix, value)));
        let Some((prefix, value)) = number else {
            return Err(ConfError::NotANumber {
                key,
                form: "a decimal number, as `0.8`",
                at,
            });
        };
        let mantissa = prefix.split(['e', 'E']).next().unwrap_or_default();
        let is_zero = !mantissa.contains(|c: char| c.is_ascii_digit() && c != '0');
        if value.is_normal() || is_zero {
            Ok((value, at))
        } else {
            Err(out_of_range(
                key,
                "a number that double precision can hold",
                at,
            ))
        }
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

    fn excerpt(&self, token: &Token) -> ConfExcerpt {
        ConfExcerpt {
            text: self.text.to_owned(),
            offset: token.start,
            length: token.end - token.start,
        }
    }

    fn syntax(&self, expected: &'static str, found: &Token) -> ConfError {
        ConfError::Syntax {
            expected,
            at: self.excerpt(found),
        }
    }

    fn syntax_at_end(&self, expected: &'static str) -> ConfError {
        ConfError::Syntax {
            expected,
            at: ConfExcerpt {
                text: self.text.to_owned(),
                offset: self.text.len(),
                length: 0,
            },
        }
    }
}

fn is_sign(word: &str) -> bool {
    matches!(word, "," | ":" | "[" | "]")
}

fn out_of_range(key: &'static str, rule: impl Into<String>, at: ConfExcerpt) -> ConfError {
    ConfError::OutOfRange {
        key,
        rule: rule.into(),
        at,
    }
}

fn mebibytes(mib: u64) -> Bytes {
    Bytes::mib(mib.min(u64::MAX >> 20))
}

fn sign(word: &str) -> (bool, &str) {
    match word.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, word.strip_prefix('+').unwrap_or(word)),
    }
}

fn count(text: &str, kind: impl Fn(char) -> bool) -> usize {
    text.find(|c| !kind(c)).unwrap_or(text.len())
}

/// The longest leading decimal number: sign, digits with at most one point, exponent. `None` if
/// there is none or it is hexadecimal.
fn decimal_prefix(word: &str) -> Option<&str> {
    let unsigned = sign(word).1;
    if unsigned.starts_with("0x") || unsigned.starts_with("0X") {
        return None;
    }
    let end = count(word, |c| {
        c.is_ascii_digit() || matches!(c, '+' | '-' | '.' | 'e' | 'E')
    });
    (1..=end)
        .rev()
        .map(|end| &word[..end])
        .find(|prefix| prefix.parse::<f64>().is_ok())
}

impl fmt::Display for Config {
    /// The shortest string that [`Config::parse`] reads as the same settings. It omits defaults,
    /// writes sizes in whole mebibytes, and omits [`Quirks`](super::Quirks) and the version, which
    /// are not among PyTorch's settings.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            max_split_size,
            max_non_split_rounding,
            large_segment_size,
            roundup_power2_divisions,
            garbage_collection_threshold,
            memory_fraction,
            expandable_segments,
            expandable_segments_reserve,
            throw_on_malloc_oom,
            torch: _,
            quirks: _,
        } = self;
        let mib = |size: Bytes| size.0 >> 20;
        let mut items = Vec::new();
        if *large_segment_size != Self::default().large_segment_size {
            items.push(format!(
                "large_segment_size_mb:{}",
                mib(*large_segment_size)
            ));
        }
        items.extend(max_split_size.map(|size| format!("max_split_size_mb:{}", mib(size))));
        if max_non_split_rounding != large_segment_size {
            items.push(format!(
                "max_non_split_rounding_mb:{}",
                mib(*max_non_split_rounding)
            ));
        }
        items.extend(write_divisions(roundup_power2_divisions));
        items.extend(
            garbage_collection_threshold
                .map(|threshold| format!("garbage_collection_threshold:{threshold}")),
        );
        if *memory_fraction != MemoryFraction::ALL {
            items.push(format!(
                "per_process_memory_fraction:{}",
                memory_fraction.get()
            ));
        }
        if *expandable_segments {
            items.push("expandable_segments:True".to_owned());
        }
        items.extend(expandable_segments_reserve.map(|reserve| match reserve {
            SegmentReserve::Fraction(fraction) => format!("expandable_segments_reserve:{fraction}"),
            SegmentReserve::Bytes(bytes) => format!(
                "expandable_segments_reserve:{}G",
                bytes.0 as f64 / Bytes::gib(1).0 as f64
            ),
        }));
        if *throw_on_malloc_oom {
            items.push("throw_on_cudamalloc_oom:True".to_owned());
        }
        f.write_str(&items.join(","))
    }
}

/// The intervals in PyTorch's form: one number if all are equal, otherwise a list, and nothing
/// without divisions.
fn write_divisions(divisions: &[u64; 16]) -> Option<String> {
    let [head, .., tail] = *divisions;
    if *divisions == [head; 16] {
        return (head != 0).then(|| format!("roundup_power2_divisions:{head}"));
    }
    let first = divisions.iter().take_while(|&&value| value == head).count() - 1;
    let rest = divisions.len()
        - divisions
            .iter()
            .rev()
            .take_while(|&&value| value == tail)
            .count();
    let mut items: Vec<String> = (first..rest)
        .map(|index| format!("{}:{}", 1_u64 << index, divisions[index]))
        .collect();
    if tail != 0 {
        items.push(format!(">:{tail}"));
    }
    Some(format!("roundup_power2_divisions:[{}]", items.join(",")))
}

#[cfg(test)]
mod tests;
