//! Imports between the files of one crate: what each file uses of which other file, and the circles among them.
//!
//! A path counts for the file that defines the name: re-exports are followed. A parent's `mod child;` and its re-exports are no imports
//! unless the parent uses the name itself. Items under `#[cfg(test)]` and `#[cfg(fuzzing)]` are left out.

use std::collections::{BTreeMap, BTreeSet};

use crate::tokens::{Token, tokens};

/// For each file, the files that it imports from.
pub type Imports = BTreeMap<String, BTreeSet<String>>;

/// What one file declares, without its tests.
struct File {
    tokens: Vec<Token>,
    module: Vec<String>,
    /// Names of the items that the file defines.
    defined: BTreeSet<String>,
    uses: Vec<Use>,
}

/// One leaf of a use statement.
struct Use {
    /// As written: it may begin with `crate`, `super`, `self` or a child module.
    path: Vec<String>,
    /// What the name is called here; `*` for all of a module.
    name: String,
    /// The inline modules around the statement.
    inline: Vec<String>,
    reexport: bool,
}

/// The imports between the files of a crate. Keys of `sources` are paths under its `src`.
pub fn imports(sources: &BTreeMap<String, String>) -> Imports {
    let krate = Crate::read(sources);
    krate
        .files
        .keys()
        .map(|file| (file.clone(), krate.imports_of(file)))
        .collect()
}

/// The sets of more than `most` files that import each other in a circle.
pub fn circles(imports: &Imports, most: usize) -> Vec<BTreeSet<String>> {
    let reached: BTreeMap<&String, BTreeSet<&String>> = imports
        .keys()
        .map(|file| {
            let (mut seen, mut open) = (BTreeSet::new(), vec![file]);
            while let Some(at) = open.pop() {
                for next in imports.get(at).into_iter().flatten() {
                    if seen.insert(next) {
                        open.push(next);
                    }
                }
            }
            (file, seen)
        })
        .collect();
    let mut found: BTreeSet<BTreeSet<String>> = BTreeSet::new();
    for (file, ahead) in &reached {
        let circle: BTreeSet<String> = ahead
            .iter()
            .filter(|other| reached.get(*other).is_some_and(|back| back.contains(*file)))
            .map(|other| (*other).clone())
            .collect();
        if circle.len() > most {
            found.insert(circle);
        }
    }
    found.into_iter().collect()
}

/// The files of a crate without those of its tests, each with its tokens without the items under `#[cfg(test)]`.
pub fn production_files(sources: &BTreeMap<String, String>) -> BTreeMap<String, Vec<Token>> {
    let mut tests: Vec<Vec<String>> = Vec::new();
    let mut files = BTreeMap::new();
    for (file, source) in sources {
        let (tokens, left_out) = production(source);
        let module = module_of(file);
        for name in left_out {
            tests.push(module.iter().cloned().chain([name]).collect());
        }
        files.insert(file.clone(), tokens);
    }
    files.retain(|file, _| !tests.iter().any(|test| module_of(file).starts_with(test)));
    files
}

/// The tokens of a file without the items under `#[cfg(test)]`, and the modules that are declared there (`#[cfg(test)] mod tests;`).
fn production(source: &str) -> (Vec<Token>, Vec<String>) {
    let mut rest = tokens(source);
    let mut kept = Vec::new();
    let mut left_out = Vec::new();
    let mut at = 0;
    while at < rest.len() {
        if !is_test_attribute(&rest, at) {
            kept.push(Token {
                text: std::mem::take(&mut rest[at].text),
                line: rest[at].line,
            });
            at += 1;
            continue;
        }
        at = after_attribute(&rest, at);
        while text(&rest, at) == "#" {
            at = after_attribute(&rest, at);
        }
        let end = after_item(&rest, at);
        if let Some(module) = (at..end).find(|&at| text(&rest, at) == "mod")
            && text(&rest, module + 2) == ";"
        {
            left_out.push(rest[module + 1].text.clone());
        }
        at = end;
    }
    (kept, left_out)
}

fn text(tokens: &[Token], at: usize) -> &str {
    tokens.get(at).map_or("", |token| token.text.as_str())
}

/// `#[cfg(test)]`, `#[cfg(fuzzing)]` and `#[cfg(all(…, test, …))]`, but not `#[cfg(not(test))]`.
fn is_test_attribute(tokens: &[Token], at: usize) -> bool {
    let begins = ["#", "[", "cfg", "("];
    if begins
        .iter()
        .enumerate()
        .any(|(ahead, sign)| text(tokens, at + ahead) != *sign)
    {
        return false;
    }
    // The words before the parentheses that are open.
    let mut around: Vec<&str> = Vec::new();
    for at in at + 2..after_attribute(tokens, at) {
        match text(tokens, at) {
            "(" => around.push(text(tokens, at - 1)),
            ")" => {
                around.pop();
            }
            "test" | "fuzzing" if around.iter().all(|word| ["cfg", "all"].contains(word)) => {
                return true;
            }
            _ => {}
        }
    }
    false
}

fn after_attribute(tokens: &[Token], at: usize) -> usize {
    after_brackets(tokens, at + 1)
}

/// The place after the bracket that closes the one at `at`.
fn after_brackets(tokens: &[Token], mut at: usize) -> usize {
    let mut depth = 0_usize;
    while at < tokens.len() {
        match text(tokens, at) {
            "(" | "[" | "{" => depth += 1,
            ")" | "]" | "}" => depth = depth.saturating_sub(1),
            _ => {}
        }
        at += 1;
        if depth == 0 {
            break;
        }
    }
    at
}

/// The place after the item, statement, field or variant that begins at `at`.
fn after_item(tokens: &[Token], mut at: usize) -> usize {
    const ITEMS: &[&str] = &[
        "fn",
        "impl",
        "struct",
        "enum",
        "union",
        "trait",
        "mod",
        "const",
        "static",
        "unsafe",
        "async",
        "extern",
        "type",
        "macro_rules",
    ];
    let mut start = at;
    if text(tokens, start) == "pub" {
        start += 1;
        if text(tokens, start) == "(" {
            start = after_brackets(tokens, start);
        }
    }
    let is_item = ITEMS.contains(&text(tokens, start));
    let ends_at_brace = text(tokens, start) != "use";
    at = start;
    while at < tokens.len() {
        match text(tokens, at) {
            ";" => return at + 1,
            "," if !is_item => return at + 1,
            "}" | ")" | "]" => return at,
            "{" => {
                at = after_brackets(tokens, at);
                if ends_at_brace {
                    return at;
                }
            }
            "(" | "[" => at = after_brackets(tokens, at),
            _ => at += 1,
        }
    }
    at
}

/// The module that a file is: `mlx5/wqe.rs` is `mlx5::wqe`.
pub fn module_of(file: &str) -> Vec<String> {
    let mut parts: Vec<String> = file
        .trim_end_matches(".rs")
        .split('/')
        .map(str::to_owned)
        .collect();
    if parts
        .last()
        .is_some_and(|last| ["mod", "lib", "main"].contains(&last.as_str()))
    {
        parts.pop();
    }
    parts
}

struct Crate {
    files: BTreeMap<String, File>,
    by_module: BTreeMap<Vec<String>, String>,
}

impl Crate {
    fn read(sources: &BTreeMap<String, String>) -> Crate {
        let files: BTreeMap<String, File> = production_files(sources)
            .into_iter()
            .map(|(name, tokens)| (name.clone(), File::read(tokens, module_of(&name))))
            .collect();
        let by_module = files
            .iter()
            .map(|(name, file)| (file.module.clone(), name.clone()))
            .collect();
        Crate { files, by_module }
    }

    fn imports_of(&self, name: &str) -> BTreeSet<String> {
        let file = &self.files[name];
        let mut found = BTreeSet::new();
        for used in &file.uses {
            if !used.reexport || file.mentions(&used.name) {
                found.extend(self.file_of(&file.inside(&used.inline), &used.path, 0));
            }
        }
        file.each_path(|inline, path| {
            found.extend(self.file_of(&file.inside(inline), path, 0));
        });
        found.remove(name);
        found
    }

    /// The file that defines what `path`, written in the module `here`, names; nothing for a path that leaves the crate.
    fn file_of(&self, here: &[String], path: &[String], followed: usize) -> Option<String> {
        let mut module = here.to_vec();
        let mut rest = path;
        match path.first()?.as_str() {
            "crate" => {
                module.clear();
                rest = &path[1..];
            }
            "super" | "self" => {}
            child => {
                module.push(child.to_owned());
                if !self.is_module(&module) {
                    return None;
                }
                module.pop();
            }
        }
        while let [part, ..] = rest {
            match part.as_str() {
                "self" => {}
                "super" => {
                    module.pop()?;
                }
                name => {
                    module.push(name.to_owned());
                    if !self.is_module(&module) {
                        module.pop();
                        break;
                    }
                }
            }
            rest = &rest[1..];
        }
        let (file, depth) = self.holder(&module)?;
        let holder = &self.files[file];
        if let [name, ..] = rest
            && name != "*"
            && !holder.defined.contains(name)
            && followed < 8
        {
            let inline = &module[depth..];
            for used in holder.uses.iter().filter(|used| used.inline == inline) {
                let target = if used.name == *name {
                    used.path.clone()
                } else if used.name == "*" {
                    let mut path = used.path[..used.path.len() - 1].to_vec();
                    path.push(name.clone());
                    path
                } else {
                    continue;
                };
                let target = self.file_of(&module, &target, followed + 1);
                match &target {
                    _ if used.name == *name => return target,
                    Some(file) if self.files[file].defined.contains(name) => return target,
                    _ => {}
                }
            }
        }
        Some(file.clone())
    }

    /// Whether this is a module with a file of its own.
    fn is_module(&self, module: &[String]) -> bool {
        self.by_module.contains_key(module)
    }

    /// The file in which a module stands, and how many parts of the module's name are the file's.
    fn holder(&self, module: &[String]) -> Option<(&String, usize)> {
        (0..=module.len())
            .rev()
            .find_map(|depth| Some((self.by_module.get(&module[..depth])?, depth)))
    }
}

impl File {
    fn read(tokens: Vec<Token>, module: Vec<String>) -> File {
        const KINDS: &[&str] = &[
            "fn", "struct", "enum", "union", "trait", "const", "static", "type",
        ];
        let defined = tokens
            .windows(3)
            .filter_map(|three| match three {
                [kind, name, _] if KINDS.contains(&kind.text.as_str()) => Some(name.text.clone()),
                [kind, sign, name] if kind.text == "macro_rules" && sign.text == "!" => {
                    Some(name.text.clone())
                }
                _ => None,
            })
            .collect();
        let mut file = File {
            tokens,
            module,
            defined,
            uses: Vec::new(),
        };
        let mut uses = Vec::new();
        file.walk(|at, inline| {
            if text(&file.tokens, at) != "use" {
                return at + 1;
            }
            let before = text(&file.tokens, at.wrapping_sub(1));
            let reexport = before == "pub" || before == ")";
            let mut leaves = Vec::new();
            let end = use_tree(&file.tokens, at + 1, &[], &mut leaves);
            uses.extend(leaves.into_iter().map(|(path, name)| Use {
                path,
                name,
                inline: inline.to_vec(),
                reexport,
            }));
            end
        });
        file.uses = uses;
        file
    }

    fn inside(&self, inline: &[String]) -> Vec<String> {
        self.module.iter().chain(inline).cloned().collect()
    }

    /// Goes through the tokens with the inline modules around each; `step` returns the place to go on at.
    fn walk(&self, mut step: impl FnMut(usize, &[String]) -> usize) {
        let (mut at, mut depth) = (0, 0_usize);
        let mut inline: Vec<String> = Vec::new();
        let mut depths: Vec<usize> = Vec::new();
        while at < self.tokens.len() {
            match text(&self.tokens, at) {
                "{" => depth += 1,
                "}" => {
                    depth = depth.saturating_sub(1);
                    if depths.pop_if(|inside| *inside > depth).is_some() {
                        inline.pop();
                    }
                }
                _ => {
                    if let Some(name) = inline_module(&self.tokens, at) {
                        inline.push(name);
                        depths.push(depth + 1);
                    }
                }
            }
            at = step(at, &inline);
        }
    }

    /// Every path in the file that does not stand in a use statement or a visibility, such as `pub(in crate::a)`.
    fn each_path(&self, mut each: impl FnMut(&[String], &[String])) {
        self.walk(|at, inline| {
            if text(&self.tokens, at) == "use" {
                return use_tree(&self.tokens, at + 1, &[], &mut Vec::new());
            }
            let begins = text(&self.tokens, at + 1) == "::"
                && text(&self.tokens, at.wrapping_sub(1)) != "::"
                && is_word(text(&self.tokens, at));
            if !begins {
                return at + 1;
            }
            let mut path = vec![self.tokens[at].text.clone()];
            let mut end = at + 1;
            while text(&self.tokens, end) == "::" && is_word(text(&self.tokens, end + 1)) {
                path.push(self.tokens[end + 1].text.clone());
                end += 2;
            }
            if text(&self.tokens, at.wrapping_sub(2)) != "(" || text(&self.tokens, at - 1) != "in" {
                each(inline, &path);
            }
            end
        });
    }

    /// Whether the name stands in the file's code, outside of use statements.
    fn mentions(&self, name: &str) -> bool {
        let mut found = false;
        self.walk(|at, _| {
            if text(&self.tokens, at) == "use" {
                return use_tree(&self.tokens, at + 1, &[], &mut Vec::new());
            }
            found |= text(&self.tokens, at) == name;
            at + 1
        });
        found
    }
}

/// The name of the inline module that is opened at `at`; in a macro it may be a variable.
pub fn inline_module(tokens: &[Token], at: usize) -> Option<String> {
    if text(tokens, at) != "mod" {
        return None;
    }
    let name = at + 1 + usize::from(text(tokens, at + 1) == "$");
    (text(tokens, name + 1) == "{").then(|| text(tokens, name).to_owned())
}

fn is_word(text: &str) -> bool {
    text.starts_with(|c: char| c.is_alphabetic() || c == '_')
}

/// Reads a path or a use tree from `at` on: adds each leaf with the name that it gets, and returns where the tree ends.
pub fn use_tree(
    tokens: &[Token],
    mut at: usize,
    prefix: &[String],
    leaves: &mut Vec<(Vec<String>, String)>,
) -> usize {
    let mut path = prefix.to_vec();
    loop {
        match text(tokens, at) {
            "{" => {
                at += 1;
                while !["}", ""].contains(&text(tokens, at)) {
                    at = use_tree(tokens, at, &path, leaves).max(at + 1);
                    if text(tokens, at) == "," {
                        at += 1;
                    }
                }
                return at + 1;
            }
            word if word == "*" || is_word(word) => {
                path.push(word.to_owned());
                at += 1;
            }
            _ => break,
        }
        if text(tokens, at) != "::" {
            break;
        }
        at += 1;
    }
    if path.len() > 1 && path.last().is_some_and(|last| last == "self") {
        path.pop();
    }
    if let Some(last) = path.last() {
        let mut name = last.clone();
        if text(tokens, at) == "as" {
            name = text(tokens, at + 1).to_owned();
            at += 2;
        }
        leaves.push((path, name));
    }
    at
}
