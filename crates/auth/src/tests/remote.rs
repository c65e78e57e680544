//! Key sets and hooks, against a small server of the test's own.

use super::*;
use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use jsonwebtoken::jwk::Jwk;
use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{TcpListener, TcpStream},
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
};

/// What the server does with a request.
#[derive(Clone)]
enum Play {
    Answer(u16, String),
    /// With this header line, too.
    AnswerWith(u16, &'static str, String),
    /// Nothing, until the other side gives up.
    Hang,
    /// Closes without a word.
    Close,
}

struct Server {
    url: String,
    requests: Arc<AtomicUsize>,
    /// Bodies of requests, in order.
    bodies: Arc<Mutex<Vec<String>>>,
    play: Arc<Mutex<Play>>,
}

impl Server {
    fn start(play: Play) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let server = Self {
            url: format!("http://{}/asked", listener.local_addr().unwrap()),
            requests: Arc::default(),
            bodies: Arc::default(),
            play: Arc::new(Mutex::new(play)),
        };
        let (requests, bodies, play) = (server.requests.clone(), server.bodies.clone(), server.play.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (requests, bodies, play) = (requests.clone(), bodies.clone(), play.clone());
                std::thread::spawn(move || serve(stream.unwrap(), &requests, &bodies, &play));
            }
        });
        server
    }

    fn play(&self, play: Play) {
        *self.play.lock().unwrap() = play;
    }

    fn count(&self) -> usize {
        self.requests.load(Ordering::SeqCst)
    }
}

fn serve(stream: TcpStream, requests: &AtomicUsize, bodies: &Mutex<Vec<String>>, play: &Mutex<Play>) {
    let mut reader = BufReader::new(stream);
    let (mut line, mut length) = (String::new(), 0);
    while reader.read_line(&mut line).unwrap_or(0) > 2 {
        if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
            length = value.trim().parse().unwrap();
        }
        line.clear();
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).unwrap();
    bodies.lock().unwrap().push(String::from_utf8(body).unwrap());
    requests.fetch_add(1, Ordering::SeqCst);
    let play = play.lock().unwrap().clone();
    let (status, header, body) = match play {
        Play::Answer(status, body) => (status, "x-nothing: 1", body),
        Play::AnswerWith(status, header, body) => (status, header, body),
        Play::Close => return,
        Play::Hang => {
            let _ = reader.read(&mut [0]);
            return;
        }
    };
    let mut stream = reader.into_inner();
    // The other side may have gone.
    let _ = write!(
        stream,
        "HTTP/1.1 {status} Played\r\ncontent-length: {}\r\nconnection: close\r\n{header}\r\n\r\n{body}",
        body.len()
    );
}

/// Asks and waits for the verdict, given at once or later.
fn asked(verifier: &Verifier, token: &str) -> Result<Identity, Fault> {
    ask(verifier, token).recv().expect("a verdict")
}

fn ask(verifier: &Verifier, token: &str) -> mpsc::Receiver<Result<Identity, Fault>> {
    let (give, verdict) = mpsc::channel();
    let later = give.clone();
    let reply = move || -> Reply { Box::new(move |verdict| later.send(verdict).unwrap()) };
    if let Some(verdict) = verifier.verify(question(token), NOW, reply) {
        give.send(verdict).unwrap();
    }
    verdict
}

fn limits() -> RemoteLimits {
    RemoteLimits { keys_interval_min_ms: 50, ..RemoteLimits::default() }
}

fn with_keys_at(url: &str, remote: RemoteLimits) -> Verifier {
    verifier(Config { jwks_url: Some(url.into()), remote, ..Config::default() })
}

fn signers() -> [(Algorithm, EncodingKey, &'static str); 4] {
    [
        (Algorithm::RS256, EncodingKey::from_rsa_pem(key!("rsa")).unwrap(), "rsa"),
        (Algorithm::RS256, EncodingKey::from_rsa_pem(key!("rsa-other")).unwrap(), "rsa-other"),
        (Algorithm::ES256, EncodingKey::from_ec_pem(key!("p256")).unwrap(), "p256"),
        (Algorithm::EdDSA, EncodingKey::from_ed_pem(key!("ed25519")).unwrap(), "ed25519"),
    ]
}

/// A key set with the keys of these names.
fn set(names: &[&str]) -> String {
    let keys: Vec<Value> = signers()
        .iter()
        .filter(|(_, _, name)| names.contains(name))
        .map(|(algorithm, key, name)| {
            let mut jwk = match algorithm {
                Algorithm::EdDSA => {
                    let public = jsonwebtoken::DecodingKey::from_ed_pem(key!("ed25519.pub")).unwrap();
                    let x = URL_SAFE_NO_PAD.encode(public.as_bytes());
                    json!({"kty": "OKP", "crv": "Ed25519", "use": "sig", "x": x})
                }
                _ => serde_json::to_value(Jwk::from_encoding_key(key, *algorithm).unwrap()).unwrap(),
            };
            jwk["kid"] = json!(name);
            jwk
        })
        .collect();
    json!({ "keys": keys }).to_string()
}

/// A token signed with the key of this name, which its header calls `kid`.
fn token_of(signer: &str, kid: Option<&str>) -> String {
    let signers = signers();
    let (algorithm, key, _) = signers.iter().find(|(_, _, name)| *name == signer).unwrap();
    let mut header = Header::new(*algorithm);
    header.kid = kid.map(str::to_owned);
    signed(&header, &json!({"sub": "ann", "exp": NOW_S + 60}), key)
}

fn text(verdict: Result<Identity, Fault>) -> String {
    match verdict {
        Ok(identity) => format!("accepted {}", identity.user),
        Err(Fault::Unavailable(text)) => format!("unavailable: {text}"),
        Err(fault) => format!("refused: {fault}"),
    }
}

#[test]
fn tokens_are_judged_by_the_keys_of_the_set() {
    let server = Server::start(Play::Answer(200, set(&["rsa", "p256", "ed25519"])));
    let verifier = with_keys_at(&server.url, limits());
    let rows = [
        ("rsa", Some("rsa"), "accepted ann"),
        ("p256", Some("p256"), "accepted ann"),
        ("ed25519", Some("ed25519"), "accepted ann"),
        ("rsa", None, "accepted ann"),
        ("rsa-other", None, "refused: the token's signature"),
        ("rsa-other", Some("rsa"), "refused: the token's signature"),
        ("rsa-other", Some("rsa-other"), "refused: the token's key \"rsa-other\" is not known"),
        ("rsa", Some("p256"), "refused: the token's key \"p256\" is not known"),
    ];
    for (signer, kid, expected) in rows {
        let verdict = text(asked(&verifier, &token_of(signer, kid)));
        assert!(verdict.starts_with(expected), "{signer} as {kid:?}: {verdict}");
    }
    // The faults of claims are told as ever, and at once.
    let late = signed(
        &Header { kid: Some("rsa".into()), ..Header::new(Algorithm::RS256) },
        &json!({"sub": "ann", "exp": 1}),
        &signers()[0].1,
    );
    assert_eq!(judge(&verifier, &late), Err(Fault::Expired));
    assert_eq!(verifier.keys_fault(), None);
}

#[test]
fn keys_that_are_rotated_are_found_and_those_taken_away_are_refused() {
    let server = Server::start(Play::Answer(200, set(&["rsa"])));
    let verifier = with_keys_at(&server.url, limits());
    let (old, new) = (token_of("rsa", Some("rsa")), token_of("rsa-other", Some("rsa-other")));
    assert_eq!(text(asked(&verifier, &old)), "accepted ann");
    server.play(Play::Answer(200, set(&["rsa-other", "ed25519"])));
    assert_eq!(text(asked(&verifier, &new)), "accepted ann");
    assert!(text(asked(&verifier, &old)).contains("\"rsa\" is not known"));
}

#[test]
fn keys_are_fetched_again_without_being_asked_for() {
    let server = Server::start(Play::Answer(200, set(&["rsa"])));
    let limits = RemoteLimits { keys_interval_ms: 20, keys_interval_min_ms: 1, ..limits() };
    let verifier = with_keys_at(&server.url, limits);
    let old = token_of("rsa", Some("rsa"));
    assert_eq!(text(asked(&verifier, &old)), "accepted ann");
    server.play(Play::Answer(200, set(&["ed25519"])));
    // Until the verdict changes; the harness's own time limit ends a wait in vain.
    while asked(&verifier, &old).is_ok() {
        std::thread::yield_now();
    }
}

#[test]
fn a_reload_fetches_the_keys() {
    let server = Server::start(Play::Answer(200, set(&["rsa"])));
    let verifier = with_keys_at(&server.url, limits());
    let old = token_of("rsa", Some("rsa"));
    assert_eq!(text(asked(&verifier, &old)), "accepted ann");
    server.play(Play::Answer(200, set(&["ed25519"])));
    assert_eq!(text(asked(&verifier, &old)), "accepted ann");
    verifier.reload(None, None).unwrap();
    while asked(&verifier, &old).is_ok() {
        std::thread::yield_now();
    }
}

#[test]
fn old_keys_stay_in_force_while_the_issuer_is_away() {
    let server = Server::start(Play::Answer(200, set(&["rsa"])));
    let verifier = with_keys_at(&server.url, limits());
    let (known, unknown) = (token_of("rsa", Some("rsa")), token_of("ed25519", Some("ed25519")));
    assert_eq!(text(asked(&verifier, &known)), "accepted ann");
    let rows = [
        (Play::Answer(500, "broken".into()), "it answered 500"),
        (Play::Close, "cannot be used"),
        (Play::Answer(200, "no json".into()), "it is no key set"),
        (Play::Answer(200, "{\"keys\":[]}".into()), "it holds no key"),
        (Play::Answer(200, "x".repeat((1 << 20) + 1)), "longer than"),
        (Play::AnswerWith(302, "location: http://127.0.0.1:1/", String::new()), "it answered 302"),
    ];
    for (play, expected) in rows {
        server.play(play);
        let verdict = text(asked(&verifier, &unknown));
        assert!(verdict.starts_with("unavailable: ") && verdict.contains(expected), "{verdict}");
        assert!(verdict.contains(&server.url) && verdict.contains("auth.jwks_url"), "{verdict}");
        assert_eq!(text(judge(&verifier, &known)), "accepted ann");
        assert!(verifier.keys_fault().is_some_and(|fault| fault.contains(expected)));
    }
    server.play(Play::Answer(200, set(&["rsa", "ed25519"])));
    assert_eq!(text(asked(&verifier, &unknown)), "accepted ann");
    assert_eq!(verifier.keys_fault(), None);
}

#[test]
fn an_issuer_that_does_not_answer_makes_tokens_wait_no_longer_than_configured() {
    let server = Server::start(Play::Hang);
    let limits = RemoteLimits { keys_timeout_ms: 50, ..limits() };
    let verifier = with_keys_at(&server.url, limits.clone());
    let token = token_of("rsa", Some("rsa"));
    assert!(text(asked(&verifier, &token)).contains("no answer within 50 ms"));
    // Nobody listens at all.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    drop(listener);
    assert!(text(asked(&with_keys_at(&url, limits), &token)).starts_with("unavailable: "));
}

#[test]
fn made_up_key_names_do_not_make_the_issuer_busy() {
    let server = Server::start(Play::Answer(200, set(&["rsa"])));
    let verifier = with_keys_at(&server.url, RemoteLimits { keys_interval_min_ms: 500, ..limits() });
    assert_eq!(text(asked(&verifier, &token_of("rsa", Some("rsa")))), "accepted ann");
    let (before, begin) = (server.count(), std::time::Instant::now());
    let verdicts: Vec<_> = (0..200)
        .map(|number| ask(&verifier, &token_of("rsa-other", Some(&format!("made-up-{number}")))))
        .collect();
    for verdict in verdicts {
        assert!(text(verdict.recv().unwrap()).contains("is not known"));
    }
    let fetches = server.count() - before;
    let allowed = 2 + begin.elapsed().as_millis() / 500;
    assert!(fetches as u128 <= allowed, "{fetches} fetches for 200 made-up names");
    // Meanwhile, and afterwards, known keys are judged at once.
    assert_eq!(text(judge(&verifier, &token_of("rsa", Some("rsa")))), "accepted ann");
}

#[test]
fn a_secret_in_a_key_set_signs_nothing() {
    let rsa: Value = serde_json::from_str(&set(&["rsa"])).unwrap();
    let mut for_encryption = rsa["keys"][0].clone();
    for_encryption["use"] = json!("enc");
    for_encryption["kid"] = json!("encryption");
    let oct = json!({"kty": "oct", "kid": "oct", "alg": "HS256", "k": URL_SAFE_NO_PAD.encode(SECRET)});
    let body = json!({"keys": [oct, for_encryption, {"kty": "new"}, 7, rsa["keys"][0]]}).to_string();
    let server = Server::start(Play::Answer(200, body));
    let verifier = with_keys_at(&server.url, limits());
    assert_eq!(text(asked(&verifier, &token_of("rsa", Some("rsa")))), "accepted ann");
    let secret = signed(
        &Header { kid: Some("oct".into()), ..Header::new(Algorithm::HS256) },
        &json!({"sub": "ann", "exp": NOW_S + 60}),
        &EncodingKey::from_secret(SECRET),
    );
    assert!(text(judge(&verifier, &secret)).starts_with("refused: the token's algorithm \"HS256\""));
    let verdict = text(asked(&verifier, &token_of("rsa", Some("encryption"))));
    assert!(verdict.contains("\"encryption\" is not known"), "{verdict}");
}

fn with_hook_at(url: &str, remote: RemoteLimits) -> Verifier {
    verifier(Config { hook_url: Some(url.into()), remote, ..Config::default() })
}

#[test]
fn the_hook_is_asked_and_its_answer_is_the_verdict() {
    let rows: [(Play, &str); 15] = [
        (Play::Answer(200, r#"{"user_id":"ann"}"#.into()), "accepted ann"),
        (Play::Answer(201, r#"{"user_id":"ann","more":[1]}"#.into()), "accepted ann"),
        (
            Play::Answer(
                200,
                json!({"user_id": "ann", "expires_at": NOW + 1, "device_class": "iot"}).to_string(),
            ),
            "accepted ann",
        ),
        (
            Play::Answer(200, json!({"user_id": "ann", "expires_at": NOW}).to_string()),
            "refused: the token has expired",
        ),
        (Play::Answer(401, String::new()), "refused: the application refuses the token"),
        (Play::Answer(403, String::new()), "refused: the application refuses the token"),
        (Play::Answer(200, "{}".into()), "refused: the token names no user"),
        (
            Play::Answer(200, r#"{"user_id":"a:b"}"#.into()),
            "unavailable: the application's hook (auth.hook_url)",
        ),
        (Play::Answer(200, r#"{"user_id":"ann","device_class":"fridge"}"#.into()), "unavailable: "),
        (Play::Answer(200, "hello".into()), "unavailable: "),
        (Play::Answer(500, r#"{"user_id":"ann"}"#.into()), "unavailable: "),
        (Play::Answer(404, String::new()), "unavailable: "),
        (Play::AnswerWith(307, "location: http://127.0.0.1:1/", String::new()), "unavailable: "),
        (
            Play::Answer(200, format!("{{\"user_id\":\"ann\",\"x\":\"{}\"}}", "x".repeat(1 << 16))),
            "unavailable: ",
        ),
        (Play::Close, "unavailable: "),
    ];
    let server = Server::start(Play::Hang);
    let verifier = with_hook_at(&server.url, limits());
    for (play, expected) in rows {
        let name = match &play {
            Play::Answer(status, body) | Play::AnswerWith(status, _, body) => {
                format!("{status} {}", &body[..body.len().min(60)])
            }
            Play::Hang | Play::Close => "closed".to_owned(),
        };
        server.play(play);
        let verdict = text(asked(&verifier, "opaque \"token\""));
        assert!(verdict.starts_with(expected), "{name}: {verdict}");
    }
    let bodies = server.bodies.lock().unwrap();
    let first: Value = serde_json::from_str(&bodies[0]).unwrap();
    assert_eq!(first, json!({"token": "opaque \"token\"", "remote_addr": "127.0.0.1"}));
    drop(bodies);

    server.play(Play::Answer(200, json!({"user_id": "ann", "device_class": "ios"}).to_string()));
    let question = Question { device_id: Some("phone"), ..question("t") };
    let (give, verdict) = mpsc::channel();
    let at_once = verifier.verify(question, NOW, || Box::new(move |verdict| give.send(verdict).unwrap()));
    assert_eq!(at_once, None);
    let identity = verdict.recv().unwrap().unwrap();
    assert_eq!((identity.class, identity.expires_at), (Some(DeviceClass::Ios), Millis::MAX));
    assert!(server.bodies.lock().unwrap().last().unwrap().contains(r#""device_id":"phone""#));
}

#[test]
fn a_hook_that_hangs_holds_up_only_its_own_tokens_and_not_for_long() {
    let server = Server::start(Play::Hang);
    let limits = RemoteLimits { hook_timeout_ms: 300, ..limits() };
    let verifier = with_hook_at(&server.url, limits);
    let hanging = ask(&verifier, "hangs");
    while server.count() == 0 {
        std::thread::yield_now();
    }
    server.play(Play::Answer(200, r#"{"user_id":"ann"}"#.into()));
    for _ in 0..20 {
        assert_eq!(text(asked(&verifier, "quick")), "accepted ann");
    }
    assert!(text(hanging.recv().unwrap()).contains("no answer within 300 ms"));
}

#[test]
fn more_tokens_than_may_wait_are_refused_for_now() {
    let server = Server::start(Play::Hang);
    let limits = RemoteLimits {
        hook_timeout_ms: 600_000,
        hook_in_flight_max: 1,
        waiting_max: 4,
        ..RemoteLimits::default()
    };
    let verifier = with_hook_at(&server.url, limits);
    let verdicts: Vec<_> = (0..40).map(|_| ask(&verifier, "token")).collect();
    // Four wait for the hook, and four more at most are on the way there.
    let mut refused = 0;
    while refused < 32 {
        let new = verdicts.iter().filter_map(|verdict| verdict.try_recv().ok());
        refused += new.inspect(|verdict| assert_eq!(*verdict, Err(crate::remote::busy()))).count();
    }
    // The rest is answered when the verifier goes.
    drop(verifier);
    let rest: Vec<_> = verdicts.iter().flat_map(|verdict| verdict.iter()).map(text).collect();
    assert_eq!(refused + rest.len(), 40);
    assert!(rest.iter().any(|verdict| verdict.contains("the server is stopping")), "{rest:?}");
}

#[test]
fn with_keys_and_a_hook_the_form_of_the_token_decides() {
    let server = Server::start(Play::Answer(200, r#"{"user_id":"hooked"}"#.into()));
    let verifier = verifier(Config {
        secret: Some(SECRET.to_vec()),
        hook_url: Some(server.url.clone()),
        ..Config::default()
    });
    let token = hs256(&json!({"sub": "ann", "exp": NOW_S + 60}));
    assert_eq!(text(judge(&verifier, &token)), "accepted ann");
    assert!(text(judge(&verifier, &format!("{token}x"))).starts_with("refused"));
    assert_eq!(server.count(), 0);
    assert_eq!(text(asked(&verifier, "opaque")), "accepted hooked");
    // Without keys everything is the hook's.
    assert_eq!(text(asked(&with_hook_at(&server.url, limits()), &token)), "accepted hooked");
}

#[test]
fn users_that_the_hook_names_can_be_revoked() {
    let server = Server::start(Play::Answer(200, r#"{"user_id":"ann"}"#.into()));
    for (sessions, until, accepted) in [
        (SessionMode::Revocation, NOW - 1, true),
        (SessionMode::Revocation, NOW, false),
        (SessionMode::Required, NOW, false),
        (SessionMode::Required, NOW - 1, true),
        (SessionMode::Off, NOW, true),
    ] {
        let revocations = Arc::new(Revocations::default());
        let target = Target::User { user: UserId::trusted("ann"), issued_until: until };
        revocations.revoke(Revocation { target, expires_at: Millis::MAX }, NOW);
        let config = Config { hook_url: Some(server.url.clone()), sessions, ..Config::default() };
        let verifier = Verifier::new(config, revocations, Arc::default()).unwrap();
        assert_eq!(asked(&verifier, "token").is_ok(), accepted, "{sessions:?} until {until}");
    }
}

#[test]
fn an_address_that_is_none_is_refused_at_start() {
    for text in ["", "login", "ftp://login/keys", "http://", "file:///etc/keys"] {
        for config in [
            Config { jwks_url: Some(text.into()), ..Config::default() },
            Config { hook_url: Some(text.into()), ..Config::default() },
        ] {
            let refused = Verifier::new(config, Arc::default(), Arc::default()).err();
            assert!(matches!(refused, Some(KeyError::Url { .. })), "{text}: {refused:?}");
        }
    }
}
