//! HTTP/1.1 and HTTP/2 as both listeners speak them: how long a head may be, and how long it may take.

use crate::{
    limits::{HEAD_BYTES_MAX, HEAD_TIMEOUT, HEADER_LINES_MAX, PING_AFTER, PING_TIMEOUT},
    rewind::Rewind,
};
use axum::{BoxError, Router};
use hyper::{
    server::conn::{http1, http2},
    service::{Service, service_fn},
};
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use std::{
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};
use tokio::time::sleep;

/// Who has ended its side of the socket still reads.
pub(crate) fn http1() -> http1::Builder {
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(HEAD_TIMEOUT).half_close(true);
    // A buffer that is full without a whole head is a head that is too large.
    builder.max_headers(HEADER_LINES_MAX).max_buf_size(HEAD_BYTES_MAX + 1);
    builder
}

/// Serves one connection over HTTP/2. The first request has to be there in time, whatever the client sends before it;
/// from then on a client that is silent is pinged.
pub(crate) async fn serve_http2(stream: Rewind, routes: TowerToHyperService<Router>) -> Result<(), BoxError> {
    let mut builder = http2::Builder::new(TokioExecutor::new());
    builder.timer(TokioTimer::new()).keep_alive_interval(PING_AFTER).keep_alive_timeout(PING_TIMEOUT);
    builder.max_header_list_size(HEAD_BYTES_MAX as u32);
    let has_asked = Arc::new(AtomicBool::new(false));
    let asked = has_asked.clone();
    let service = service_fn(move |request| {
        asked.store(true, Ordering::Relaxed);
        routes.call(request)
    });
    let mut connection = pin!(builder.serve_connection(TokioIo::new(stream), service));
    tokio::select! {
        ended = &mut connection => return Ok(ended?),
        () = sleep(HEAD_TIMEOUT) => {}
    }
    if !has_asked.load(Ordering::Relaxed) {
        return Err("no request came in time over HTTP/2".into());
    }
    Ok(connection.await?)
}
