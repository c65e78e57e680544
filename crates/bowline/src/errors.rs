//! `docs/errors.md`, from the tables of the protocol.

use bowline_protocol::{CloseCode, ErrorCode};
use std::fmt::Write;

/// The page as Markdown.
pub fn reference() -> String {
    let mut out = String::from(
        "# Errors\n\n\
         Generated from the tables in `crates/protocol/src/error.rs` by `bowline config errors`.\n\n\
         ## Refusals\n\n\
         A frame `error` and the body of an HTTP answer hold `code` and `message`; the message says what happened to \
         which thing.\nWhat was refused is not done, and a message that was refused is not stored. Sending the same \
         `id` again is always safe.\n\n\
         | code | HTTP | meaning | whose fault | sent again unchanged | what to do |\n|---|---|---|---|---|---|\n",
    );
    for code in ErrorCode::ALL {
        let again = match (code, code.is_temporary()) {
            (_, true) => "yes, later",
            (ErrorCode::Internal, _) => "perhaps",
            _ => "no",
        };
        let _ = writeln!(
            out,
            "| `{}` | {} | {} | {} | {again} | {} |",
            code.as_str(),
            code.status(),
            code.meaning(),
            code.fault().as_str(),
            code.advice(),
        );
    }
    out.push_str(
        "\nHTTP has a status beside these: 405 with `malformed` and the header `Allow`, when a path is there and \
         the method is not.\nHandshakes are refused with 426 as well, when they are no upgrade, and 431, when \
         their head is above 64 KiB.\n\n\
         ## Ends of connections\n\n\
         The last frame is `session.closed` with `code` and `reason`; WebSocket has the same in its close frame. \
         4000 to 4499 invite\nto reconnect; 4500 and above ask not to, before a person or the program has changed \
         something. The reason is also the label\nof `bowline_gateway_closed_total`.\n\n\
         | code | reason | why | what the client does |\n|---|---|---|---|\n",
    );
    for code in CloseCode::ALL {
        let _ = writeln!(
            out,
            "| {} | `{}` | {} | {} |",
            code.code(),
            code.reason(),
            code.meaning(),
            code.advice()
        );
    }
    out
}

#[cfg(test)]
mod tests {
    #[test]
    fn docs_errors_md_is_up_to_date() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/errors.md");
        let found = std::fs::read_to_string(path).unwrap_or_default();
        assert!(found == super::reference(), "run: cargo run -p bowline -- config errors > docs/errors.md");
    }
}
