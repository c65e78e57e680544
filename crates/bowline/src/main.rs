//! The program: configuration, assembly of the roles, command line.

mod admin;
mod cli;
mod config;
mod data;
mod log;
mod metrics;
mod serve;
mod stop;
mod token;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> std::process::ExitCode {
    cli::run()
}
