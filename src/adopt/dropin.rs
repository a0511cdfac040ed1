//! The drop-in: rendered from effective lines, recognised again, and compared with what systemd made of it. Pure.
//!
//! systemd gives `argv` after unquoting and after specifiers, and before the environment is expanded. So a line is
//! written with `%` doubled, with `$` as it is, and with anything else that its parser would take apart in double
//! quotes (`config_parse_exec` and `extract_first_word` in systemd's sources). What is rendered from the lines that
//! are then in effect must be the same text: that is the proof that it was understood.

use crate::manager::{ExecLine, UnitSettings};
use crate::operation::OperationId;
use crate::release::Digest;

/// The drop-in's file in the unit's own directory.
pub(super) const FILE: &str = "60-cutover.conf";

/// A drop-in to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct DropIn<'a> {
    /// The service.
    pub service: &'a str,
    /// Its unit.
    pub unit: &'a str,
    /// The operation that writes it.
    pub operation: &'a OperationId,
    /// Its state directory, absolute.
    pub state: &'a str,
    /// Each setting that is replaced, with all its lines.
    pub sections: &'a [(String, Vec<ExecLine>)],
    /// Whether the unit has to be allowed to execute what is in the state directory.
    pub open_for_execution: bool,
}

/// Who wrote a drop-in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mark {
    /// The service.
    pub service: String,
    /// The operation.
    pub operation: String,
    /// Whether all below the mark is as it was written.
    pub whole: bool,
}

const WRITTEN: &str = "# Written by cutover for the service ";
const OPERATION: &str = "# Operation: ";
const CHECKSUM: &str = "# SHA-256 of all below: ";

impl DropIn<'_> {
    pub(super) fn render(&self) -> String {
        let Self { service, unit, operation, state, .. } = self;
        let mut body = format!("[Unit]\nRequiresMountsFor={}\n\n[Service]\n", word(state));
        if self.open_for_execution {
            body += &format!("ExecPaths={}\n", word(&format!("{state}/releases")));
        }
        for (setting, lines) in self.sections {
            body += &section(setting, lines);
        }
        let sum = Digest::of(body.as_bytes());
        format!(
            "{WRITTEN}{service}\n\
             # The lines below were in effect before, and now go through {state}/current.\n\
             # To undo it: remove this file, then `systemctl daemon-reload`; the next start of {unit}\n\
             # runs what it ran before the adoption.\n\
             {OPERATION}{operation}\n\
             {CHECKSUM}{sum}\n\
             {body}"
        )
    }
}

/// Reads who wrote a drop-in; none where it was not cutover.
pub(super) fn mark(text: &str) -> Option<Mark> {
    let service = text.lines().next()?.strip_prefix(WRITTEN)?.to_owned();
    let operation = text.lines().find_map(|l| l.strip_prefix(OPERATION)).unwrap_or_default().to_owned();
    let whole = text
        .split_once(CHECKSUM)
        .and_then(|(_, rest)| rest.split_once('\n'))
        .is_some_and(|(sum, body)| Digest::of(body.as_bytes()).to_string() == sum);
    Some(Mark { service, operation, whole })
}

/// The first setting of the drop-in whose lines are not the ones in effect.
pub(super) fn overridden(text: &str, settings: &UnitSettings) -> Option<String> {
    let assigned = text.lines().filter(|l| l.starts_with("Exec") && !l.starts_with("ExecPaths="));
    let mut names: Vec<&str> = assigned.clone().filter_map(|l| l.split_once('=')).map(|(n, _)| n).collect();
    names.dedup();
    names
        .into_iter()
        .find(|name| {
            let wanted: String =
                assigned.clone().filter(|l| sets(l, name)).map(|l| format!("{l}\n")).collect();
            let effective: Vec<ExecLine> =
                settings.exec.iter().filter(|l| l.setting == *name).cloned().collect();
            section(name, &effective) != wanted
        })
        .map(str::to_owned)
}

/// The drop-in that was read last of those after `own` that assign `setting`; `read` gives the text of one.
pub(super) fn winner(
    drop_ins: &[String],
    own: &str,
    setting: &str,
    read: &dyn Fn(&str) -> Option<String>,
) -> Option<String> {
    let at = drop_ins.iter().position(|d| d == own)?;
    let assigns =
        |d: &&String| read(d).is_some_and(|text| text.lines().any(|l| sets(l.trim_start(), setting)));
    drop_ins[at + 1..].iter().rfind(assigns).cloned()
}

fn sets(line: &str, setting: &str) -> bool {
    line.strip_prefix(setting).is_some_and(|rest| rest.trim_start().starts_with('='))
}

fn section(setting: &str, lines: &[ExecLine]) -> String {
    let mut text = format!("{setting}=\n");
    for line in lines {
        text += &format!("{setting}={}\n", render(line));
    }
    text
}

/// The value of one line.
fn render(line: &ExecLine) -> String {
    let ExecLine { path, argv, prefixes, .. } = line;
    let (first, rest) = argv.split_first().map_or((path, &[][..]), |(first, rest)| (first, rest));
    let mut words = vec![];
    if first == path {
        words.push(format!("{prefixes}{}", word(path)));
    } else {
        words.push(format!("{prefixes}@{}", word(path)));
        words.push(word(first));
    }
    words.extend(rest.iter().map(|argument| word(argument)));
    words.join(" ")
}

/// One word, so that systemd reads it back as it is.
fn word(plain: &str) -> String {
    if plain == ";" {
        return "\\;".into();
    }
    let special = |c: char| c.is_ascii_control() || matches!(c, ' ' | '"' | '\'' | '\\');
    let quoted = plain.is_empty() || plain.contains(special);
    let mut text = String::new();
    for c in plain.chars() {
        match c {
            '%' => text.push_str("%%"),
            '"' | '\\' => text.extend(['\\', c]),
            '\n' => text.push_str("\\n"),
            '\t' => text.push_str("\\t"),
            c if c.is_ascii_control() => text.push_str(&format!("\\x{:02x}", u32::from(c))),
            c => text.push(c),
        }
    }
    if quoted { format!("\"{text}\"") } else { text }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn line(prefixes: &str, path: &str, argv: &[&str]) -> ExecLine {
        ExecLine {
            setting: "ExecStart".into(),
            path: path.into(),
            argv: argv.iter().map(|a| (*a).to_owned()).collect(),
            prefixes: prefixes.into(),
        }
    }

    #[test]
    fn words_are_escaped_as_systemd_reads_them() {
        for (plain, text) in [
            ("plain", "plain"),
            ("", r#""""#),
            ("a b", r#""a b""#),
            ("100%", "100%%"),
            ("%n %h", r#""%%n %%h""#),
            ("$MAINPID", "$MAINPID"),
            ("$$", "$$"),
            ("${A} b", r#""${A} b""#),
            (";", r"\;"),
            ("a;b", "a;b"),
            ("; ;", r#""; ;""#),
            ("it's", r#""it's""#),
            (r#"say "hi""#, r#""say \"hi\"""#),
            (r"C:\x", r#""C:\\x""#),
            ("a\nb\tc", r#""a\nb\tc""#),
            ("\u{1}\u{7f}\r", r#""\x01\x7f\x0d""#),
            ("größe", "größe"),
            ("#x", "#x"),
        ] {
            assert_eq!(word(plain), text, "{plain:?}");
        }
    }

    #[test]
    fn prefixes_and_another_first_argument_are_kept() {
        for (prefixes, path, argv, text) in [
            ("", "/bin/a", &["/bin/a"][..], "/bin/a"),
            ("-", "/bin/a", &["/bin/a", "x"], "-/bin/a x"),
            (":!!", "/bin/a", &["/bin/a"], ":!!/bin/a"),
            ("+", "/bin/a", &["a"], "+@/bin/a a"),
            ("", "/bin/a", &["a b", ";"], "@/bin/a \"a b\" \\;"),
            ("-", "/opt/a b", &["/opt/a b"], "-\"/opt/a b\""),
            ("", "/bin/a", &[], "/bin/a"),
        ] {
            assert_eq!(render(&line(prefixes, path, argv)), text);
        }
    }

    /// What systemd's parser makes of a line, for the part of its language that we write.
    fn parse(text: &str) -> Vec<String> {
        let mut words = vec![];
        let mut chars = text.chars().peekable();
        loop {
            while chars.next_if(|c| *c == ' ').is_some() {}
            if chars.peek().is_none() {
                return words;
            }
            let (mut word, mut quoted) = (String::new(), false);
            while let Some(c) = chars.next_if(|c| quoted || *c != ' ') {
                match c {
                    '"' => quoted = !quoted,
                    '\\' => match chars.next().unwrap() {
                        'n' => word.push('\n'),
                        't' => word.push('\t'),
                        'x' => {
                            let digits: String = chars.by_ref().take(2).collect();
                            word.push(char::from(u8::from_str_radix(&digits, 16).unwrap()));
                        }
                        other => word.push(other),
                    },
                    other => word.push(other),
                }
            }
            words.push(word.replace("%%", "%"));
        }
    }

    proptest! {
        #[test]
        fn any_argument_reads_back(argv in proptest::collection::vec("[ -~äé\\n\\t\\x01-\\x1f]{0,12}", 0..5)) {
            let argv: Vec<&str> = std::iter::once("first").chain(argv.iter().map(String::as_str)).collect();
            let text = render(&line("", "/bin/a", &argv));
            prop_assert!(!text.contains('\n'), "one line stays one line");
            let mut read = parse(&text);
            prop_assert_eq!(read.remove(0), "@/bin/a");
            prop_assert_eq!(read, argv);
        }
    }

    fn drop_in(lines: Vec<ExecLine>) -> String {
        DropIn {
            service: "demo",
            unit: "demo.service",
            operation: &"op-1".parse().unwrap(),
            state: "/var/lib/cutover/demo",
            sections: &[("ExecStart".into(), lines)],
            open_for_execution: true,
        }
        .render()
    }

    #[test]
    fn a_drop_in_is_recognised_and_every_change_to_it_is_seen() {
        let text = drop_in(vec![line("-", "/var/lib/cutover/demo/current/demo", &["demo", "a b"])]);
        let body = text.lines().skip_while(|l| l.starts_with('#')).collect::<Vec<_>>().join("\n");
        assert_eq!(
            body,
            "[Unit]\nRequiresMountsFor=/var/lib/cutover/demo\n\n[Service]\n\
             ExecPaths=/var/lib/cutover/demo/releases\nExecStart=\n\
             ExecStart=-@/var/lib/cutover/demo/current/demo demo \"a b\""
        );
        let ours = Mark { service: "demo".into(), operation: "op-1".into(), whole: true };
        assert_eq!(mark(&text), Some(ours.clone()));
        for changed in [format!("{text}# mine\n"), text.replace("a b", "a  b")] {
            assert_eq!(mark(&changed), Some(Mark { whole: false, ..ours.clone() }));
        }
        assert_eq!(mark("[Service]\n"), None);
        assert_eq!(mark(""), None);
    }

    #[test]
    fn what_is_in_effect_is_compared_line_by_line() {
        let lines = vec![line("", "/bin/a", &["/bin/a", "x"]), line("-", "/bin/b", &["/bin/b"])];
        let text = drop_in(lines.clone());
        let with = |exec: Vec<ExecLine>| UnitSettings { exec, ..UnitSettings::default() };
        let other = ExecLine { setting: "ExecStop".into(), ..line("", "/bin/c", &["/bin/c"]) };
        let mut all = lines.clone();
        all.push(other);
        assert_eq!(overridden(&text, &with(all)), None, "settings that it does not name do not count");
        let mut more = lines.clone();
        more.push(line("", "/bin/d", &["/bin/d"]));
        for effective in [vec![], lines[..1].to_vec(), vec![lines[1].clone(), lines[0].clone()], more] {
            assert_eq!(overridden(&text, &with(effective)).as_deref(), Some("ExecStart"));
        }
    }

    #[test]
    fn the_file_that_wins_is_named() {
        let files =
            ["/a/50-x.conf", "/a/60-cutover.conf", "/a/70-y.conf", "/a/override.conf"].map(String::from);
        let read = |path: &str| match path {
            "/a/70-y.conf" => Some("[Service]\nExecStartPre=/bin/true\n".to_owned()),
            "/a/override.conf" | "/a/50-x.conf" => Some("[Service]\n  ExecStart =\nExecStart=/x\n".into()),
            _ => None,
        };
        let of = |setting| winner(&files, "/a/60-cutover.conf", setting, &read);
        assert_eq!(of("ExecStart").as_deref(), Some("/a/override.conf"));
        assert_eq!(of("ExecStartPre").as_deref(), Some("/a/70-y.conf"));
        assert_eq!(of("ExecStop"), None);
        assert_eq!(winner(&files, "/not/read.conf", "ExecStart", &read), None);
    }
}
