//! Writes what is made from the command line's grammar: the man page and the completions.
//!
//! ```text
//! cargo run --example generate              writes packaging/man/cutover.1 and packaging/completions/
//! cargo run --example generate -- --check   compares them with the grammar, and ends with 1 where they differ
//! ```
#![expect(clippy::disallowed_methods, reason = "nothing here has to survive a power cut")]

use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap_complete::aot::{Bash, Fish, Generator, Zsh};
use clap_mangen::Man;

/// What the grammar does not say, behind what it says.
const END_OF_MAN: &str = include_str!("man/cutover.1.end");

fn main() -> ExitCode {
    let check = match std::env::args().nth(1).as_deref() {
        None => false,
        Some("--check") => true,
        Some(other) => {
            eprintln!("unknown argument {other:?}; it takes --check or nothing");
            return ExitCode::from(64);
        }
    };
    let mut differ = false;
    for (path, bytes) in generated().expect("memory") {
        let there = std::fs::read(&path).unwrap_or_default();
        if there == bytes {
            continue;
        }
        differ = true;
        if check {
            eprintln!(
                "{}: is not what the grammar gives; run `cargo run --example generate`",
                path.display()
            );
        } else if let Err(e) = write(&path, &bytes) {
            eprintln!("{}: {e}", path.display());
            return ExitCode::FAILURE;
        }
    }
    if check && differ { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    std::fs::create_dir_all(path.parent().expect("a file in a directory"))?;
    std::fs::write(path, bytes)
}

/// Each file with its bytes.
fn generated() -> io::Result<Vec<(PathBuf, Vec<u8>)>> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("packaging");
    let completions = here.join("completions");
    Ok(vec![
        (here.join("man/cutover.1"), man()?),
        (completions.join("cutover.bash"), completion(Bash)),
        (completions.join("_cutover"), completion(Zsh)),
        (completions.join("cutover.fish"), completion(Fish)),
    ])
}

/// The grammar without what only systemd calls: nobody should be led to it by a completion.
fn grammar() -> clap::Command {
    let whole = cutover::cli::command();
    let mut shown = clap::Command::new("cutover")
        .version(env!("CARGO_PKG_VERSION"))
        .about(whole.get_about().cloned().unwrap_or_default())
        .long_about(whole.get_long_about().cloned().unwrap_or_default())
        .subcommand_required(true)
        .args(whole.get_arguments().cloned());
    for verb in whole.get_subcommands().filter(|verb| !verb.is_hide_set()) {
        shown = shown.subcommand(verb.clone());
    }
    shown.build();
    shown
}

fn completion(shell: impl Generator) -> Vec<u8> {
    let mut bytes = vec![];
    clap_complete::generate(shell, &mut grammar(), "cutover", &mut bytes);
    bytes
}

/// One page for all commands: each as a section of its own.
fn man() -> io::Result<Vec<u8>> {
    let grammar = grammar();
    let mut page = vec![];
    let whole = Man::new(grammar.clone()).manual("cutover manual");
    whole.render_title(&mut page)?;
    whole.render_name_section(&mut page)?;
    page.extend(b".SH SYNOPSIS\n\\fBcutover\\fR [\\fB\\-\\-json\\fR] \\fICOMMAND\\fR ...\n");
    whole.render_description_section(&mut page)?;
    whole.render_options_section(&mut page)?;
    page.extend(b".SH COMMANDS\n");
    for verb in grammar.get_subcommands().filter(|verb| verb.get_name() != "help") {
        // What holds for every command is said once, above.
        let verb = verb.clone().disable_help_flag(true).mut_args(|arg| {
            let common = matches!(arg.get_id().as_str(), "json" | "help");
            arg.hide(common)
        });
        page.extend(section(&verb)?);
    }
    page.extend(END_OF_MAN.bytes());
    Ok(page)
}

/// A command's part of the page: its usage as the heading, then its description and its options.
fn section(verb: &clap::Command) -> io::Result<Vec<u8>> {
    let usage = verb.clone().render_usage().to_string();
    let usage = usage.trim_start_matches("Usage: ").replace('-', "\\-");
    let man = Man::new(verb.clone());
    let (mut description, mut options) = (vec![], vec![]);
    man.render_description_section(&mut description)?;
    man.render_options_section(&mut options)?;
    let mut section = format!(".SS {usage}\n");
    for part in [description, options] {
        // Their own headings would stand on one level with NAME.
        let part = String::from_utf8(part).expect("text");
        let body = part.lines().skip_while(|line| !line.starts_with(".SH")).skip(1);
        section.extend(body.map(|line| format!("{line}\n")));
    }
    Ok(section.into_bytes())
}
