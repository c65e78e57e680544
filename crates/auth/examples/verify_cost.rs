//! What it costs to judge a token: `cargo run --release -p bowline-auth --example verify_cost`.

use bowline_auth::{Claims, Question, Verifier, mint};
use bowline_protocol::UserId;
use std::{net::IpAddr, time::Instant};

fn main() {
    let (secret, now, rounds) = (b"a secret of thirty-two bytes ...", 1_800_000_000_000, 200_000);
    let mut claims = Claims::new(UserId::trusted("user-123456"), now, 3_600_000);
    claims.session_id = Some("0b0f8e0a-55aa-4b9f-a2a3-68a0c9a7c2c1".into());
    let token = mint(secret, &claims);
    let verifier = Verifier::with_secret(secret);
    let question = Question { token: &token, device_id: None, remote: IpAddr::from([127, 0, 0, 1]) };
    let begin = Instant::now();
    for _ in 0..rounds {
        let verdict = verifier.verify(question, now, || unreachable!("a secret judges at once"));
        assert!(matches!(verdict, Some(Ok(_))));
    }
    let ns = begin.elapsed().as_nanos() / rounds;
    println!("HS256, {} bytes: {ns} ns a token", token.len());
}
