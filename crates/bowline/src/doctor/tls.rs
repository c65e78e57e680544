//! The certificate and its key: there, readable, made for each other, valid today.

use super::Finding;
use crate::config::Settings;
use rustls::{
    crypto::aws_lc_rs,
    pki_types::{CertificateDer, PrivateKeyDer, UnixTime, pem::PemObject},
    sign::CertifiedKey,
};
use std::time::Duration;
use webpki::{EndEntityCert, Error, KeyUsage, anchor_from_trusted_cert};

const CHECK: &str = "TLS";
const DAY_S: u64 = 24 * 3600;
/// Renewals happen a month before; below this one has failed.
const LEFT_LOW_S: u64 = 14 * DAY_S;

/// Nothing where no TLS is configured.
pub fn examine(settings: &Settings) -> Option<Finding> {
    let files = (settings.text("gateway.tls.cert"), settings.text("gateway.tls.key"));
    match files {
        (None, None) => None,
        (Some(cert), Some(key)) => Some(judge(cert, key, crate::now_ms() / 1000)),
        (Some(_), None) | (None, Some(_)) => Some(Finding::fail(
            CHECK,
            "only one of gateway.tls.cert and gateway.tls.key is set",
            "set both, or none for plain connections",
        )),
    }
}

fn judge(cert: &str, key: &str, now_s: u64) -> Finding {
    let fail = |found: String, advice: &str| Finding::fail(CHECK, found, advice);
    let chain: Result<Vec<_>, _> =
        CertificateDer::pem_file_iter(cert).and_then(|certificates| certificates.collect());
    let chain = match chain {
        Ok(chain) if chain.is_empty() => {
            return fail(
                format!("{cert} holds no certificate"),
                "write the chain as PEM, the server's certificate first",
            );
        }
        Ok(chain) => chain,
        Err(error) => {
            return fail(format!("{cert} (gateway.tls.cert): {error}"), "name a PEM file that can be read");
        }
    };
    let private = match PrivateKeyDer::from_pem_file(key) {
        Ok(private) => private,
        Err(error) => {
            return fail(
                format!("{key} (gateway.tls.key): {error}"),
                "name a PEM file with the private key that can be read",
            );
        }
    };
    if let Err(error) = CertifiedKey::from_der(chain.clone(), private, &aws_lc_rs::default_provider()) {
        return fail(
            format!("{key} does not go with {cert}: {error}"),
            "use the key that the certificate was made for",
        );
    }
    match validity(&chain, now_s) {
        Ok(Validity::Expired { since_s }) => fail(
            format!("{cert} has expired {} days ago", since_s / DAY_S),
            "renew it; SIGHUP has the server read it again",
        ),
        Ok(Validity::NotYet { in_s }) => fail(
            format!("{cert} is valid in {} days only", in_s / DAY_S),
            "look at the clock, or use the certificate of today",
        ),
        Ok(Validity::Left { left_s }) if left_s < LEFT_LOW_S => Finding::warn(
            CHECK,
            format!("{cert} expires in {} days", left_s / DAY_S),
            "renew it; SIGHUP has the server read it again",
        ),
        Ok(Validity::Left { left_s }) => {
            Finding::ok(CHECK, format!("{cert} and its key, valid for {} days", left_s / DAY_S))
        }
        Err(error) => {
            fail(format!("{cert}: {error}"), "write the chain as PEM, the server's certificate first")
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Validity {
    Left { left_s: u64 },
    Expired { since_s: u64 },
    NotYet { in_s: u64 },
}

/// The dates of the server's certificate. The verifier looks at them before anything else, so that asking it about a
/// time far away tells where they end.
fn validity(chain: &[CertificateDer<'_>], now_s: u64) -> Result<Validity, Error> {
    let Some((first, rest)) = chain.split_first() else { return Err(Error::BadDer) };
    let leaf = EndEntityCert::try_from(first)?;
    let anchor = anchor_from_trusted_cert(chain.last().unwrap_or(first))?;
    let at = |seconds: u64| {
        leaf.verify_for_usage(
            webpki::ALL_VERIFICATION_ALGS,
            std::slice::from_ref(&anchor),
            rest,
            UnixTime::since_unix_epoch(Duration::from_secs(seconds)),
            KeyUsage::server_auth(),
            None,
            None,
        )
        .err()
    };
    // Whether the chain is trusted is for the clients to say.
    if let Some(Error::CertNotValidYet { not_before, .. }) = at(now_s) {
        return Ok(Validity::NotYet { in_s: not_before.as_secs().saturating_sub(now_s) });
    }
    const FAR_S: u64 = 253_402_300_799;
    match at(FAR_S) {
        Some(Error::CertExpired { not_after, .. }) => match not_after.as_secs() {
            end if end < now_s => Ok(Validity::Expired { since_s: now_s - end }),
            end => Ok(Validity::Left { left_s: end - now_s }),
        },
        Some(Error::BadDer) => Err(Error::BadDer),
        _ => Ok(Validity::Left { left_s: FAR_S.saturating_sub(now_s) }),
    }
}

#[cfg(test)]
mod tests {
    use super::{super::State, *};

    fn file(name: &str) -> String {
        format!("{}/src/doctor/tls/{name}", env!("CARGO_MANIFEST_DIR"))
    }

    #[test]
    fn certificates_are_judged_by_their_dates_and_keys() {
        // Valid from 2025-01-01 for a hundred years, and from 2020-01-01 for a year.
        let (good, key, old) = (file("good.pem"), file("key.pem"), file("expired.pem"));
        let now_s = 1_790_000_000;
        for (cert, key, at_s, state, part) in [
            (&good, &key, now_s, State::Ok, "valid for"),
            (&good, &key, 1_700_000_000, State::Fail, "is valid in"),
            (&good, &key, 1_735_689_600 + 36_500 * DAY_S - DAY_S, State::Warn, "expires in"),
            (&old, &key, now_s, State::Fail, "has expired"),
            (&good, &file("other-key.pem"), now_s, State::Fail, "does not go with"),
            (&good, &good, now_s, State::Fail, "gateway.tls.key"),
            (&key, &key, now_s, State::Fail, "holds no certificate"),
            (&file("missing.pem"), &key, now_s, State::Fail, "gateway.tls.cert"),
        ] {
            let finding = judge(cert, key, at_s);
            assert_eq!(finding.state, state, "{finding:?}");
            assert!(finding.found.contains(part), "{finding:?}");
        }
    }
}
