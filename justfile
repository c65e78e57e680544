# `just --list` names these; CONTRIBUTING.md has the same commands without just.

# Runs a server with the demo page on http://127.0.0.1:8080/
serve *flags:
    cargo run --release -- serve {{flags}}

# Every test
test *parts:
    ./scripts/test {{parts}}

# The end-to-end suite, or the tests whose names contain a text
e2e filter="":
    cargo build -p bowline
    cargo test -p bowline-tests --test e2e -- {{filter}}

# Formats everything
fmt:
    cargo fmt --all

# What CI says about style
lint:
    cargo fmt --all -- --check
    cargo clippy --workspace --all-targets -- -D warnings

# The Autobahn cases of RFC 6455
conformance:
    ./scripts/conformance

# Feeds decoders and state machines, each for so many seconds
fuzz target="all" seconds="10":
    ./scripts/fuzz {{target}} {{seconds}}

# Simulates a cluster, one run for each seed
sim seeds="0..10000" *flags:
    cargo run --release -p bowline-sim -- --seeds {{seeds}} {{flags}}

# Changes the cores of session and delivery bit by bit, and sees whether a test notices
mutants *crates:
    ./scripts/mutants {{crates}}

# 100,000 connections that come and go
churn count="100000":
    ./scripts/churn {{count}}

# A room of a thousand, with and without a member that stops reading
slow-consumer *rounds:
    ./scripts/slow-consumer {{rounds}}

# Delivery under kills, judged by what clients saw
check duration="30m" *flags:
    cargo run --release -- check --duration {{duration}} {{flags}}

# The API against its own description
openapi *flags:
    ./scripts/openapi-check {{flags}}

# Everything that CI runs
ci:
    ./.ci/run
