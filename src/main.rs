//! cutover's one executable.

fn main() {}
