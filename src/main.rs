//! cutover's one executable: the command line, and the worker.

fn main() {
    std::process::exit(cutover::cli::main());
}
