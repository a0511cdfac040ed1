//! What the documents show is tried: commands parse, links lead somewhere, adapters are accepted, and the manual of the
//! adapter leaves no key out.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use clap::Parser as _;

use super::args::Args;
use crate::adapter::Adapter;

const EXAMPLE: &str = include_str!("../adapter/example.toml");

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The Markdown files of the project, with their text.
fn documents() -> Vec<(PathBuf, String)> {
    let in_dir = |dir: PathBuf| std::fs::read_dir(dir).into_iter().flatten().flatten().map(|e| e.path());
    let mut found: Vec<PathBuf> = in_dir(root().to_owned()).chain(in_dir(root().join("docs"))).collect();
    found.retain(|path| path.extension().is_some_and(|e| e == "md"));
    found.sort();
    found.into_iter().map(|path| (path.clone(), std::fs::read_to_string(path).unwrap())).collect()
}

/// The blocks between three backticks, each with its language.
fn blocks(text: &str) -> Vec<(String, String)> {
    let mut found = vec![];
    let mut open: Option<(String, String)> = None;
    for line in text.lines() {
        match (line.trim_start().strip_prefix("```"), &mut open) {
            (Some(language), None) => open = Some((language.trim().to_owned(), String::new())),
            (Some(_), Some(_)) => found.extend(open.take()),
            (None, Some((_, block))) => *block += &format!("{line}\n"),
            (None, None) => {}
        }
    }
    found
}

/// The text outside of blocks: its spans between backticks, and what is left.
fn spans(text: &str) -> (Vec<String>, String) {
    let mut inside = false;
    let mut plain = String::new();
    for line in text.lines() {
        let fence = line.trim_start().starts_with("```");
        inside ^= fence;
        if !inside && !fence {
            plain += &format!("{line}\n");
        }
    }
    let parts: Vec<&str> = plain.split('`').collect();
    // A span may go over the end of a line.
    let one_line = |span: &&str| span.split_whitespace().collect::<Vec<_>>().join(" ");
    let spans = parts.iter().skip(1).step_by(2).map(one_line).collect();
    (spans, parts.iter().step_by(2).copied().collect())
}

fn parses(command: &str) -> Result<(), String> {
    match Args::try_parse_from(command.split_whitespace()) {
        Ok(_) => Ok(()),
        Err(e) => Err(format!("{command}: {e}")),
    }
}

#[test]
fn every_command_that_is_shown_parses() {
    let mut seen = 0;
    for (path, text) in documents() {
        let mut commands: Vec<String> = spans(&text).0;
        // In a sentence, a command's name stands for it.
        commands.retain(|command| !is_name(command));
        for (_, block) in blocks(&text) {
            commands.extend(block.lines().map(|line| line.trim_start_matches("# ").trim().to_owned()));
        }
        commands.retain(|command| command.starts_with("cutover "));
        for command in commands {
            // A synopsis stands for the command with everything that may be left out.
            let whole = command.replace(['[', ']'], "").replace('…', "");
            parses(&whole).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
            seen += 1;
        }
    }
    assert!(seen > 30, "{seen}");
}

fn is_name(command: &str) -> bool {
    let verb = command.strip_prefix("cutover ").unwrap_or_default();
    super::command().get_subcommands().any(|known| known.get_name() == verb)
}

#[test]
fn the_manual_shows_commands_that_parse() {
    let text = include_str!("../../packaging/man/cutover.1.end").replace('\\', "");
    let examples: Vec<&str> = text.lines().filter(|line| line.starts_with("cutover ")).collect();
    assert!(examples.len() > 3);
    for command in examples {
        parses(command).unwrap();
    }
}

#[test]
fn every_command_is_in_the_readme() {
    let readme = std::fs::read_to_string(root().join("README.md")).unwrap();
    for verb in super::command().get_subcommands().filter(|verb| !verb.is_hide_set()) {
        assert!(readme.contains(&format!("`cutover {}", verb.get_name())), "{}", verb.get_name());
    }
}

#[test]
fn every_relative_link_leads_somewhere() {
    let mut seen = 0;
    for (path, text) in documents() {
        for link in spans(&text).1.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            if link.contains("://") {
                continue;
            }
            let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
            let to = if file.is_empty() { path.clone() } else { path.parent().unwrap().join(file) };
            assert!(to.exists(), "{}: {link}", path.display());
            if !anchor.is_empty() {
                let headings = std::fs::read_to_string(&to).unwrap();
                let found = headings.lines().filter(|l| l.starts_with('#')).any(|l| slug(l) == anchor);
                assert!(found, "{}: {link}", path.display());
            }
            seen += 1;
        }
    }
    assert!(seen > 5, "{seen}");
}

/// A heading as a link names it.
fn slug(heading: &str) -> String {
    let text = heading.trim_start_matches('#').trim().to_lowercase();
    let kept = text.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    kept.map(|c| if c == ' ' { '-' } else { c }).collect()
}

#[test]
fn every_adapter_that_is_shown_is_accepted() {
    let mut seen = 0;
    for (path, text) in documents() {
        for (language, block) in blocks(&text) {
            if language == "toml" {
                Adapter::parse(&path, "demo", &block).unwrap();
                seen += 1;
            }
        }
    }
    assert!(seen > 0);
    let manual =
        include_str!("../../packaging/man/cutover.toml.5").replace("\\(dq", "\"").replace("\\-", "-");
    let example = manual.split("\n.nf\n").nth(1).and_then(|rest| rest.split("\n.fi").next()).unwrap();
    Adapter::parse(Path::new("cutover.toml.5"), "demo", example).unwrap();
}

#[test]
fn the_manual_of_the_adapter_names_every_key_in_its_section() {
    let manual = include_str!("../../packaging/man/cutover.toml.5").replace("\\-", "-");
    let section = |name: &str| {
        let parts = manual.split("\n.SH ").skip(1);
        parts.filter(|part| part.lines().next().unwrap().contains(name)).collect::<String>()
    };
    let mut keys = BTreeSet::new();
    let mut table = String::new();
    for line in EXAMPLE.lines().map(|line| line.trim_start_matches("# ")) {
        if let Some(name) = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            table = format!("[{name}]");
        } else if let Some((key, _)) = line.split_once(" = ")
            && key.chars().all(|c| c.is_ascii_lowercase() || c == '-')
        {
            keys.insert((table.clone(), key.to_owned()));
        }
    }
    assert!(keys.len() > 30, "{keys:?}");
    for (table, key) in keys {
        let part = section(if table.is_empty() { "TOP LEVEL" } else { &table });
        assert!(part.contains(&format!(".TP\n.B {key}\n")), "{table} {key}");
    }
}
