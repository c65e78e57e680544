//! What is wrong with the head of a request, whatever it asks for.

use crate::answer::Problem;
use axum::{
    extract::Request,
    middleware::Next,
    response::{IntoResponse, Response},
};
use http::{Version, header};

/// Answers 400 to a head that is malformed, before anything is made of it.
pub(crate) async fn check(request: Request, next: Next) -> Response {
    match fault(&request) {
        Some(fault) => Problem::malformed(fault).into_response(),
        None => next.run(request).await,
    }
}

fn fault<B>(request: &http::Request<B>) -> Option<&'static str> {
    let count = |name| request.headers().get_all(name).iter().count();
    // RFC 9112, 3.2; later versions name the host in another way.
    if request.version() == Version::HTTP_11 && count(header::HOST) != 1 {
        return Some("a request over HTTP/1.1 has the header Host, and has it once");
    }
    if count(header::ORIGIN) > 1 {
        return Some("the header Origin is given twice");
    }
    if !is_percent_encoded(request.uri().path()) {
        return Some(
            "the path is not percent-encoded: two hexadecimal digits follow a %, which is itself %25",
        );
    }
    None
}

fn is_percent_encoded(path: &str) -> bool {
    let is_hex = |digits: &[u8]| digits.iter().all(u8::is_ascii_hexdigit);
    path.as_bytes().split(|byte| *byte == b'%').skip(1).all(|rest| rest.get(..2).is_some_and(is_hex))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_percent_encoded_or_is_not() {
        for (path, expected) in [
            ("/", true),
            ("/a/%20b%c3%A9", true),
            ("/a%25zz", true),
            ("/%zz", false),
            ("/a%2", false),
            ("/a%", false),
            ("/a%%20", false),
            ("/%+1", false),
        ] {
            assert_eq!(is_percent_encoded(path), expected, "{path}");
        }
    }

    #[test]
    fn a_host_is_named_once_and_an_origin_not_twice() {
        let request = |version, headers: &[(&str, &str)]| {
            let mut request = http::Request::builder().version(version).uri("/x");
            for (name, value) in headers {
                request = request.header(*name, *value);
            }
            fault(&request.body(()).unwrap()).is_none()
        };
        let (host, origin) = (("host", "a"), ("origin", "http://a"));
        assert!(request(Version::HTTP_11, &[host, origin]));
        assert!(request(Version::HTTP_10, &[]));
        assert!(request(Version::HTTP_2, &[]));
        assert!(!request(Version::HTTP_11, &[]));
        assert!(!request(Version::HTTP_11, &[host, host]));
        assert!(!request(Version::HTTP_11, &[host, origin, origin]));
    }
}
