use super::*;
use jsonwebtoken::{Algorithm, EncodingKey, Header};
use serde_json::{Value, json};

const SECRET: &[u8] = b"a secret of thirty-two bytes ...";
/// In the middle of a second.
const NOW: Millis = 1_800_000_000_500;
const NOW_S: u64 = NOW / 1000;

macro_rules! key {
    ($name:literal) => {
        include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/src/tests/keys/", $name, ".pem"))
    };
}

fn question(token: &str) -> Question<'_> {
    Question { token, device_id: None, remote: IpAddr::from([127, 0, 0, 1]) }
}

fn judge(verifier: &Verifier, token: &str) -> Result<Identity, Fault> {
    verifier.verify(question(token), NOW, || panic!("nothing to wait for")).expect("a verdict at once")
}

fn signed(header: &Header, claims: &Value, key: &EncodingKey) -> String {
    jsonwebtoken::encode(header, claims, key).unwrap()
}

fn hs256(claims: &Value) -> String {
    signed(&Header::new(Algorithm::HS256), claims, &EncodingKey::from_secret(SECRET))
}

fn verifier(config: Config) -> Verifier {
    Verifier::new(config, Arc::default(), Arc::default()).unwrap()
}

#[test]
fn each_fault_of_the_claims_is_told() {
    let verifier = verifier(Config {
        secret: Some(SECRET.to_vec()),
        audience: Some("chat".into()),
        issuer: Some("https://login".into()),
        ..Config::default()
    });
    let good = json!({
        "sub": "ann", "exp": NOW_S + 60, "iat": NOW_S, "nbf": NOW_S, "aud": "chat", "iss": "https://login",
    });
    let with = |name: &str, value: Value| {
        let mut claims = good.clone();
        match value {
            Value::Null => claims.as_object_mut().unwrap().remove(name),
            value => claims.as_object_mut().unwrap().insert(name.into(), value),
        };
        claims
    };
    let many: Vec<_> = (0..1001).map(|room| format!("room{room}")).collect();
    // Empty: accepted. Otherwise a part of what is said.
    let rows: &[(&str, Value, &str)] = &[
        ("sub", json!("ann"), ""),
        ("sub", json!("@agent"), ""),
        ("sub", Value::Null, "claim sub is missing"),
        ("sub", json!(""), "claim sub is missing"),
        ("sub", json!("a:b"), "claim sub"),
        ("sub", json!("x".repeat(65)), "claim sub"),
        ("sub", json!(7), "claims are not as they should be"),
        ("exp", Value::Null, "claim exp is missing"),
        ("exp", json!("soon"), "claims are not as they should be"),
        ("exp", json!(NOW_S - 29), ""),
        ("exp", json!(NOW_S - 30), "expired"),
        ("exp", json!(0), "expired"),
        ("exp", json!(-5), "expired"),
        ("exp", json!(NOW_S as f64 + 0.25), ""),
        ("exp", json!(1e300), ""),
        ("nbf", json!(NOW_S + 30), ""),
        ("nbf", json!(NOW_S + 40), "not valid yet: nbf is 39 s ahead"),
        ("nbf", Value::Null, ""),
        ("iat", json!(NOW_S + 30), ""),
        ("iat", json!(NOW_S + 3600), "issued in the future"),
        ("iat", Value::Null, ""),
        ("aud", json!("other"), "not for the audience \"chat\""),
        ("aud", json!(["other", "chat"]), ""),
        ("aud", json!(["other"]), "not for the audience"),
        ("aud", json!([]), "not for the audience"),
        ("aud", Value::Null, "not for the audience"),
        ("iss", json!("https://evil"), "not from the issuer"),
        ("iss", Value::Null, "not from the issuer"),
        ("device_id", json!("phone"), ""),
        ("device_id", json!("a:b"), "claim device_id"),
        ("device_class", json!("ios"), ""),
        ("device_class", json!("fridge"), "claim device_class"),
        ("rooms", json!(["lobby", "team-*"]), ""),
        ("rooms", json!("lobby"), "claims are not as they should be"),
        ("rooms", json!(many), "1001 rooms"),
        ("unknown", json!({"a": [1]}), ""),
    ];
    for (name, value, expected) in rows {
        let verdict = judge(&verifier, &hs256(&with(name, value.clone())));
        match (verdict, *expected) {
            (Ok(_), "") => {}
            (Ok(_), _) => panic!("{name} {value} was accepted"),
            (Err(fault), "") => panic!("{name} {value} was refused: {fault}"),
            (Err(fault), part) => assert!(fault.to_string().contains(part), "{name} {value}: {fault}"),
        }
    }
    let kinds = [("exp", json!(1), Fault::Expired), ("sub", Value::Null, Fault::NoSubject)];
    for (name, value, fault) in kinds {
        assert_eq!(judge(&verifier, &hs256(&with(name, value))), Err(fault));
    }
}

#[test]
fn what_is_no_token_of_ours_is_refused_with_the_reason() {
    let verifier = verifier(Config { secret: Some(SECRET.to_vec()), ..Config::default() });
    let claims = json!({"sub": "ann", "exp": NOW_S + 60});
    let good = hs256(&claims);
    let (signed_part, signature) = good.rsplit_once('.').unwrap();
    let other = signed(&Header::new(Algorithm::HS256), &claims, &EncodingKey::from_secret(b"other"));
    let longer = signed(&Header::new(Algorithm::HS512), &claims, &EncodingKey::from_secret(SECRET));
    let rsa =
        signed(&Header::new(Algorithm::RS256), &claims, &EncodingKey::from_rsa_pem(key!("rsa")).unwrap());
    let with_header = |header: &str| {
        use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
        let header = URL_SAFE_NO_PAD.encode(header);
        let claims = URL_SAFE_NO_PAD.encode(claims.to_string());
        let signed = format!("{header}.{claims}");
        let key = EncodingKey::from_secret(SECRET);
        let signature = jsonwebtoken::crypto::sign(signed.as_bytes(), &key, Algorithm::HS256).unwrap();
        format!("{signed}.{signature}")
    };
    let none = with_header(r#"{"alg":"none"}"#);
    let (unsigned, _) = none.rsplit_once('.').unwrap();
    let rows = [
        (String::new(), "three parts"),
        ("word".into(), "three parts"),
        (format!("{good}.x"), "three parts"),
        (signed_part.to_owned(), "three parts"),
        (format!("{signed_part}."), "signature is not"),
        (format!("{signed_part}.AAAA"), "signature is not"),
        (format!("{signed_part}.!!"), "signature is not"),
        (format!("{signed_part}x.{signature}"), "signature is not"),
        (other, "signature is not"),
        (longer, "algorithm \"HS512\" is not that of a configured key (HS256)"),
        (rsa, "algorithm \"RS256\" is not"),
        (none.clone(), "algorithm \"none\" is not"),
        (format!("{unsigned}."), "algorithm \"none\" is not"),
        (with_header(r#"{"alg":"None"}"#), "algorithm \"None\""),
        (with_header(r#"{"alg":"unsupported"}"#), "algorithm \"unsupported\""),
        (with_header(r#"{"typ":"JWT"}"#), "header is not as it should be"),
        (with_header(r#"["HS256"]"#), "no JSON object"),
        (with_header(r#"{"alg":"HS256","crit":["exp"]}"#), "crit"),
        (format!("!.{}", good.split_once('.').unwrap().1), "header is not Base64"),
    ];
    for (token, expected) in rows {
        match judge(&verifier, &token) {
            Err(Fault::Invalid(text)) => assert!(text.contains(expected), "{token}: {text}"),
            other => panic!("{token}: {other:?}"),
        }
    }
    assert!(judge(&verifier, &good).is_ok());
    assert!(judge(&verifier, &with_header(r#"{"alg":"HS256","kid":"whatever"}"#)).is_ok());
}

#[test]
fn a_public_key_takes_tokens_of_its_own_algorithm_only() {
    let claims = json!({"sub": "ann", "exp": NOW_S + 60});
    let sign = |algorithm, key: &EncodingKey| signed(&Header::new(algorithm), &claims, key);
    let rsa = EncodingKey::from_rsa_pem(key!("rsa")).unwrap();
    let tokens = [
        ("RS256", sign(Algorithm::RS256, &rsa)),
        ("ES256", sign(Algorithm::ES256, &EncodingKey::from_ec_pem(key!("p256")).unwrap())),
        ("EdDSA", sign(Algorithm::EdDSA, &EncodingKey::from_ed_pem(key!("ed25519")).unwrap())),
        ("RS512", sign(Algorithm::RS512, &rsa)),
        ("PS256", sign(Algorithm::PS256, &rsa)),
        ("other RSA", sign(Algorithm::RS256, &EncodingKey::from_rsa_pem(key!("rsa-other")).unwrap())),
        // The old trick: the public key, which everybody has, as the secret of HS256.
        ("HS256", sign(Algorithm::HS256, &EncodingKey::from_secret(key!("rsa.pub")))),
    ];
    let rows: [(&[u8], &str); 4] = [
        (key!("rsa.pub"), "RS256"),
        (key!("rsa.pkcs1"), "RS256"),
        (key!("p256.pub"), "ES256"),
        (key!("ed25519.pub"), "EdDSA"),
    ];
    for (pem, accepted) in rows {
        let verifier = verifier(Config { public_key: Some(pem.to_vec()), ..Config::default() });
        for (name, token) in &tokens {
            assert_eq!(
                judge(&verifier, token).is_ok(),
                *name == accepted,
                "{name} with a key for {accepted}"
            );
        }
    }
    let both = verifier(Config {
        secret: Some(SECRET.to_vec()),
        public_key: Some(key!("ed25519.pub").to_vec()),
        ..Config::default()
    });
    assert!(judge(&both, &tokens[2].1).is_ok());
    assert!(judge(&both, &hs256(&claims)).is_ok());
    assert!(judge(&both, &tokens[6].1).is_err());
}

#[test]
fn keys_are_replaced_as_a_whole_or_not_at_all() {
    let claims = json!({"sub": "ann", "exp": NOW_S + 60});
    let sign =
        |key| signed(&Header::new(Algorithm::RS256), &claims, &EncodingKey::from_rsa_pem(key).unwrap());
    let (old, new) = (sign(key!("rsa")), sign(key!("rsa-other")));
    let verifier = verifier(Config { public_key: Some(key!("rsa-other.pub").to_vec()), ..Config::default() });
    assert_eq!([judge(&verifier, &old).is_ok(), judge(&verifier, &new).is_ok()], [false, true]);
    verifier.reload(None, Some(key!("rsa.pub"))).unwrap();
    assert_eq!([judge(&verifier, &old).is_ok(), judge(&verifier, &new).is_ok()], [true, false]);
    assert_eq!(verifier.reload(Some(SECRET), Some(b"nonsense")), Err(KeyError::Unknown));
    assert_eq!([judge(&verifier, &old).is_ok(), judge(&verifier, &hs256(&claims)).is_ok()], [true, false]);
}

#[test]
fn a_key_that_will_not_do_is_refused_at_start() {
    let rows: [(&[u8], KeyError); 7] = [
        (key!("rsa"), KeyError::Private),
        (key!("p256"), KeyError::Private),
        (key!("ed25519"), KeyError::Private),
        (key!("p384.pub"), KeyError::Unknown),
        (b"", KeyError::Unknown),
        (b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n", KeyError::Unknown),
        (SECRET, KeyError::Unknown),
    ];
    for (pem, expected) in rows {
        let config = Config { public_key: Some(pem.to_vec()), ..Config::default() };
        let refused = Verifier::new(config, Arc::default(), Arc::default()).err();
        assert_eq!(refused, Some(expected), "{}", String::from_utf8_lossy(pem));
    }
}

#[test]
fn a_minted_token_says_what_was_asked() {
    let mut claims = Claims::new(UserId::trusted("ann"), NOW, 3_600_000);
    let plain = judge(&Verifier::with_secret(SECRET), &mint(SECRET, &claims)).unwrap();
    assert_eq!(
        plain,
        Identity {
            user: UserId::trusted("ann"),
            device: None,
            class: None,
            expires_at: (NOW_S + 3601) * 1000,
            issued_at: NOW,
            token_id: None,
            session_id: None,
            rooms: None,
        }
    );
    claims.device = Some(DeviceId::trusted("phone"));
    claims.class = Some(DeviceClass::Ios);
    claims.token_id = Some("t1".into());
    claims.session_id = Some("s1".into());
    claims.rooms = Some(vec!["lobby".into(), "team-*".into()]);
    claims.audience = Some("chat".into());
    claims.issuer = Some("bowline".into());
    let config = Config {
        secret: Some(SECRET.to_vec()),
        audience: Some("chat".into()),
        issuer: Some("bowline".into()),
        ..Config::default()
    };
    let full = judge(&verifier(config), &mint(SECRET, &claims)).unwrap();
    assert_eq!(full.device, Some(DeviceId::trusted("phone")));
    assert_eq!(full.class, Some(DeviceClass::Ios));
    assert_eq!((full.token_id.as_deref(), full.session_id.as_deref()), (Some("t1"), Some("s1")));
    assert_eq!(full.rooms.as_deref(), Some(&["lobby".into(), "team-*".into()][..]));
    assert_eq!(full.expires_at, claims.expires_at());
}

#[test]
fn a_revoked_token_is_refused_though_its_signature_is_good() {
    let token = |issued_at: Option<u64>| {
        let mut claims = json!({"sub": "ann", "exp": NOW_S + 60, "jti": "t1", "sid": "s1"});
        if let Some(at) = issued_at {
            claims["iat"] = json!(at);
        }
        hs256(&claims)
    };
    let user =
        |name: &str, until_s: u64| Target::User { user: UserId::trusted(name), issued_until: until_s * 1000 };
    let rows = [
        (Target::Token("t1".into()), Some(NOW_S), true),
        (Target::Token("s1".into()), Some(NOW_S), false),
        (Target::Session("s1".into()), Some(NOW_S), true),
        (Target::Session("t1".into()), Some(NOW_S), false),
        (user("ann", NOW_S - 10), Some(NOW_S - 11), true),
        (user("ann", NOW_S - 10), Some(NOW_S - 10), true),
        (user("ann", NOW_S - 10), Some(NOW_S - 9), false),
        (user("ann", NOW_S - 10), None, true),
        (user("bob", NOW_S), Some(NOW_S - 10), false),
    ];
    for (target, issued_at, revoked) in rows {
        for (mode, looks) in [(SessionMode::Off, false), (SessionMode::Revocation, true)] {
            let revocations = Arc::new(Revocations::default());
            let config = Config { secret: Some(SECRET.to_vec()), sessions: mode, ..Config::default() };
            let verifier = Verifier::new(config, Arc::clone(&revocations), Arc::default()).unwrap();
            let token = token(issued_at);
            let before = judge(&verifier, &token).expect("not revoked yet");
            assert_eq!(target.names(&before), revoked, "{target:?}");
            revocations.revoke(Revocation { target: target.clone(), expires_at: NOW + 60_000 }, NOW);
            let expected = if revoked && looks { Err(Fault::Revoked) } else { Ok(before) };
            assert_eq!(judge(&verifier, &token), expected, "{target:?} {mode:?}");
        }
    }
}

#[test]
fn a_token_made_right_after_its_users_were_revoked_is_good() {
    let revocations = Arc::new(Revocations::default());
    let config = Config { secret: Some(SECRET.to_vec()), ..Config::default() };
    let verifier = Verifier::new(config, Arc::clone(&revocations), Arc::default()).unwrap();
    let made_at = |at| mint(SECRET, &Claims::new(UserId::trusted("ann"), at, 60_000));
    let target = Target::User { user: UserId::trusted("ann"), issued_until: NOW };
    revocations.revoke(Revocation { target, expires_at: NOW + 60_000 }, NOW);
    assert_eq!(judge(&verifier, &made_at(NOW)), Err(Fault::Revoked));
    assert!(judge(&verifier, &made_at(NOW + 1)).is_ok());
}

#[test]
fn revocations_are_forgotten_when_the_tokens_have_expired() {
    let revocations = Revocations::default();
    let revoke = |id: u64, expires_at, now| {
        let target = Target::Token(id.to_string().into());
        revocations.revoke(Revocation { target, expires_at }, now);
    };
    (0..1000).for_each(|id| revoke(id, NOW + id, NOW));
    // Extended, and not shortened.
    revoke(0, NOW + 10_000_000, NOW);
    revoke(0, NOW + 1, NOW);
    assert_eq!(revocations.count(), 1000);
    let later = NOW + LEEWAY_MS + 1000;
    (2000..4048).for_each(|id| revoke(id, later + 1_000_000, later));
    assert_eq!(revocations.count(), 1 + 2048);
}

#[test]
fn where_sessions_are_required_a_token_needs_a_registered_one() {
    let sessions = Arc::new(Sessions::default());
    let revocations = Arc::new(Revocations::default());
    let config =
        Config { secret: Some(SECRET.to_vec()), sessions: SessionMode::Required, ..Config::default() };
    let verifier = Verifier::new(config, Arc::clone(&revocations), Arc::clone(&sessions)).unwrap();
    let token = |sid: Option<&str>| {
        let mut claims = Claims::new(UserId::trusted("ann"), NOW, 60_000);
        claims.session_id = sid.map(Into::into);
        mint(SECRET, &claims)
    };
    let put = |id: &str, user: &str, expires_at| {
        sessions.put(Session { id: id.into(), user: UserId::trusted(user), expires_at }, NOW);
    };
    put("mine", "ann", NOW + 1);
    put("ended", "ann", NOW);
    put("another's", "bob", NOW + 1);
    let rows = [
        (None, "names no session"),
        (Some("unknown"), "\"unknown\" is not registered"),
        (Some("ended"), "has ended"),
        (Some("another's"), "not registered"),
        (Some("mine"), ""),
    ];
    for (sid, expected) in rows {
        match judge(&verifier, &token(sid)) {
            Ok(_) => assert_eq!(expected, "", "{sid:?}"),
            Err(Fault::Invalid(text)) => assert!(!expected.is_empty() && text.contains(expected), "{text}"),
            Err(other) => panic!("{sid:?}: {other}"),
        }
    }
    revocations.revoke(Revocation { target: Target::Session("mine".into()), expires_at: NOW + 60_000 }, NOW);
    assert_eq!(judge(&verifier, &token(Some("mine"))), Err(Fault::Revoked));
}

mod remote;
