//! Rust text as words and signs.

/// A word or sign of Rust text.
#[derive(Debug)]
pub struct Token {
    pub text: String,
    pub line: usize,
}

/// Words, `::` and single signs of Rust text, without comments, strings, characters and lifetimes.
pub fn tokens(source: &str) -> Vec<Token> {
    let chars: Vec<char> = source.chars().collect();
    let at_is = |at: usize, c: char| chars.get(at) == Some(&c);
    let (mut tokens, mut at, mut line) = (Vec::new(), 0, 1);
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    while at < chars.len() {
        let (c, start) = (chars[at], at);
        if c == '/' && at_is(at + 1, '/') {
            while at < chars.len() && chars[at] != '\n' {
                at += 1;
            }
        } else if c == '/' && at_is(at + 1, '*') {
            let mut depth = 0;
            loop {
                if at_is(at, '/') && at_is(at + 1, '*') {
                    depth += 1;
                    at += 2;
                } else if at_is(at, '*') && at_is(at + 1, '/') {
                    depth -= 1;
                    at += 2;
                } else {
                    at += 1;
                }
                if depth == 0 || at >= chars.len() {
                    break;
                }
            }
        } else if c == '"' {
            at = after_string(&chars, at);
        } else if c == '\'' {
            // A character ends with a quote, after one sign or an escape; a lifetime does not.
            if at_is(at + 1, '\\') {
                at += 3;
                while at < chars.len() && chars[at] != '\'' {
                    at += 1;
                }
                at += 1;
            } else if at_is(at + 2, '\'') {
                at += 3;
            } else {
                at += 1;
                while at < chars.len() && is_word(chars[at]) {
                    at += 1;
                }
            }
        } else if is_word(c) {
            while at < chars.len() && is_word(chars[at]) {
                at += 1;
            }
            let text: String = chars[start..at].iter().collect();
            let mut hashes = 0;
            while at_is(at + hashes, '#') {
                hashes += 1;
            }
            if ["r", "br", "cr"].contains(&text.as_str()) && at_is(at + hashes, '"') {
                at += hashes + 1;
                let end: Vec<char> = std::iter::once('"')
                    .chain(std::iter::repeat_n('#', hashes))
                    .collect();
                while at < chars.len() && !chars[at..].starts_with(&end) {
                    at += 1;
                }
                at += end.len();
            } else {
                tokens.push(Token { text, line });
            }
        } else if c == ':' && at_is(at + 1, ':') {
            tokens.push(Token {
                text: "::".to_owned(),
                line,
            });
            at += 2;
        } else {
            if !c.is_whitespace() {
                tokens.push(Token {
                    text: c.to_string(),
                    line,
                });
            }
            at += 1;
        }
        line += chars[start..at.min(chars.len())]
            .iter()
            .filter(|&&c| c == '\n')
            .count();
    }
    tokens
}

fn after_string(chars: &[char], quote: usize) -> usize {
    let mut at = quote + 1;
    while at < chars.len() && chars[at] != '"' {
        at += if chars[at] == '\\' { 2 } else { 1 };
    }
    at + 1
}
