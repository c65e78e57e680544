//! One connection, as bare as it can be: frames out, frames in, nothing repaired and nothing hidden.

use super::plan::Content;
use anyhow::{Context, anyhow, bail};
use bowline_client::{Address, Stream, Trust};
use bytes::Bytes;
use futures_util::{SinkExt, StreamExt};
use serde::Deserialize;
use serde_json::{Value, json, value::RawValue};
use std::time::Duration;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    time,
};
use tokio_tungstenite::{
    WebSocketStream,
    tungstenite::{
        self,
        client::IntoClientRequest,
        http::HeaderValue,
        protocol::{CloseFrame, WebSocketConfig},
    },
};

/// How long a connection may take to be made, and a frame to be written.
const TIMEOUT: Duration = Duration::from_secs(10);
/// The largest frame that is read over TCP.
const FRAME_BYTES_MAX: usize = 16 << 20;

/// What a server's frames may hold.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Frame {
    #[serde(rename = "type")]
    pub kind: String,
    pub id: Option<String>,
    pub conversation_id: String,
    pub seq: u64,
    pub ts: u64,
    pub from: String,
    pub redelivered: bool,
    pub body: Option<Box<RawValue>>,
    pub body_encoding: Option<String>,
    pub conversations: Vec<Line>,
    pub messages: Vec<Frame>,
    pub more: bool,
    /// A text in `error`, a number in `session.closed`.
    pub code: Value,
    pub message: String,
    pub reason: String,
    pub retry_after_ms: Option<u64>,
    pub data: Option<String>,
    pub session_id: String,
    pub resumed: bool,
    pub user_id: Option<String>,
    #[serde(rename = "kind")]
    pub receipt: Option<String>,
    /// The bytes behind the header of a binary frame.
    #[serde(skip)]
    pub bytes: Option<Bytes>,
}

/// A line of `sync.notice` or of `conversation.page`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Line {
    pub conversation_id: String,
    pub first_seq: u64,
    pub last_seq: u64,
    pub read_seq: u64,
    pub unread: u64,
}

impl Frame {
    fn parse(text: &[u8]) -> anyhow::Result<Self> {
        serde_json::from_slice(text)
            .with_context(|| format!("the server sent what is no frame: {}", String::from_utf8_lossy(text)))
    }

    fn parse_binary(bytes: &Bytes) -> anyhow::Result<Self> {
        let length = bytes.first_chunk::<4>().map(|length| u32::from_be_bytes(*length) as usize);
        let end = length.and_then(|length| length.checked_add(4)).filter(|end| *end <= bytes.len());
        let end = end.context("the server sent a binary frame without a header")?;
        let mut frame = Self::parse(&bytes[4..end])?;
        frame.bytes = Some(bytes.slice(end..));
        Ok(frame)
    }

    /// Whether the body is what its sender sent under this id.
    pub fn is_intact(&self) -> bool {
        let content = Content::of(&self.from, self.id.as_deref().unwrap_or_default());
        let is_base64 = self.body_encoding.as_deref() == Some("base64");
        content.is_in(self.body.as_deref().map(RawValue::get), self.bytes.as_deref(), is_base64)
    }
}

/// How a device says who it is.
pub struct Login<'a> {
    pub url: &'a str,
    /// Whose certificates are taken for good, where there is TLS.
    pub trust: Option<&'a Trust>,
    pub token: &'a str,
    pub device_id: &'a str,
    pub resume: Option<&'a str>,
    /// In the handshake, where there is one, and not by a first frame.
    pub in_handshake: bool,
}

pub enum Socket {
    Ws(Box<WebSocketStream<Stream>>),
    Tcp { stream: Stream, buffer: Vec<u8> },
}

/// How a client ends a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cut {
    /// A close frame, or the end of the stream.
    Clean,
    /// A reset.
    Reset,
    /// A reset in the middle of a frame.
    InFrame,
}

impl Socket {
    /// Connects and shows the token; `connected` is still to come.
    pub async fn open(login: &Login<'_>) -> anyhow::Result<Self> {
        time::timeout(TIMEOUT, Self::open_patiently(login)).await.context("connecting takes too long")?
    }

    async fn open_patiently(login: &Login<'_>) -> anyhow::Result<Self> {
        let Login { url, trust, token, device_id, resume, in_handshake } = login;
        let address = address_of(url)?;
        let is_ws = address.is_web_socket;
        let stream = address.dial(*trust).await?;
        let mut socket = if is_ws {
            let mut target = (*url).to_owned();
            if *in_handshake {
                target.push_str(if url.contains('?') { "&" } else { "?" });
                target.push_str(&format!("device_id={device_id}"));
                if let Some(session) = resume {
                    target.push_str(&format!("&resume={session}"));
                }
            }
            let mut request = target.into_client_request()?;
            if *in_handshake {
                let bearer = HeaderValue::from_str(&format!("Bearer {token}")).context("the token")?;
                request.headers_mut().insert("authorization", bearer);
            }
            let config = WebSocketConfig::default().read_buffer_size(4096).write_buffer_size(4096);
            let connected = tokio_tungstenite::client_async_with_config(request, stream, Some(config)).await;
            Self::Ws(Box::new(connected.map_err(|error| refused(&error))?.0))
        } else {
            Self::Tcp { stream, buffer: Vec::new() }
        };
        if !(is_ws && *in_handshake) {
            let mut connect = json!({"type": "connect", "token": token, "device_id": device_id});
            if let Some(session) = resume {
                connect["resume"] = json!(session);
            }
            socket.send(&connect.to_string()).await?;
        }
        Ok(socket)
    }

    /// The next frame. Dropping the future loses nothing. An error is the end of the connection, and why.
    pub async fn next(&mut self) -> anyhow::Result<Frame> {
        match self {
            Self::Ws(stream) => loop {
                match stream.next().await {
                    Some(Ok(tungstenite::Message::Text(text))) => return Frame::parse(text.as_bytes()),
                    Some(Ok(tungstenite::Message::Binary(bytes))) => return Frame::parse_binary(&bytes),
                    Some(Ok(tungstenite::Message::Close(Some(CloseFrame { code, reason })))) => {
                        bail!("closed {} {reason}", u16::from(code))
                    }
                    Some(Ok(tungstenite::Message::Close(None))) | None => bail!("the connection ended"),
                    Some(Ok(_)) => {}
                    Some(Err(error)) => return Err(error.into()),
                }
            },
            Self::Tcp { stream, buffer } => loop {
                if let Some((length, rest)) = buffer.split_first_chunk::<4>() {
                    let length = u32::from_be_bytes(*length) as usize;
                    if length > FRAME_BYTES_MAX {
                        bail!("the server announces a frame of {length} bytes");
                    }
                    if let Some(frame) = rest.get(..length) {
                        let frame = Bytes::copy_from_slice(frame);
                        buffer.drain(..4 + length);
                        return match frame.first() {
                            Some(0) => Frame::parse_binary(&frame),
                            _ => Frame::parse(&frame),
                        };
                    }
                }
                let mut chunk = [0; 16 * 1024];
                match stream.read(&mut chunk).await {
                    Ok(0) => bail!("the connection ended"),
                    Ok(count) => buffer.extend_from_slice(&chunk[..count]),
                    Err(error) => return Err(error.into()),
                }
            },
        }
    }

    pub async fn send(&mut self, text: &str) -> anyhow::Result<()> {
        let sending = async {
            match self {
                Self::Ws(stream) => stream.send(tungstenite::Message::Text(text.into())).await?,
                Self::Tcp { stream, .. } => stream.write_all(&tcp_frame(text.as_bytes())).await?,
            }
            Ok(())
        };
        time::timeout(TIMEOUT, sending).await.context("the server reads nothing")?
    }

    /// Sends a header and the bytes of a body.
    pub async fn send_binary(&mut self, header: &str, body: &[u8]) -> anyhow::Result<()> {
        let mut frame = (header.len() as u32).to_be_bytes().to_vec();
        frame.extend_from_slice(header.as_bytes());
        frame.extend_from_slice(body);
        let sending = async {
            match self {
                Self::Ws(stream) => stream.send(tungstenite::Message::Binary(frame.into())).await?,
                Self::Tcp { stream, .. } => stream.write_all(&tcp_frame(&frame)).await?,
            }
            Ok(())
        };
        time::timeout(TIMEOUT, sending).await.context("the server reads nothing")?
    }

    pub async fn cut(self, how: Cut) {
        // Whatever fails here has ended all the same. Both beginnings are of a frame of 60 bytes.
        let (mut stream, begun): (Stream, &[u8]) = match self {
            Self::Ws(mut stream) => {
                if how == Cut::Clean {
                    let _ = time::timeout(TIMEOUT, SinkExt::close(&mut stream)).await;
                    return;
                }
                (stream.into_inner(), &[0x81, 0xbc, 1, 2, 3, 4, 5, 6, 7])
            }
            Self::Tcp { stream, .. } => (stream, &[0, 0, 0, 60, b'{', b'"']),
        };
        match how {
            Cut::Clean => drop(stream.shutdown().await),
            Cut::Reset => drop(stream.into_socket().set_zero_linger()),
            Cut::InFrame => {
                let _ = stream.write_all(begun).await;
                let _ = stream.into_socket().set_zero_linger();
            }
        }
    }
}

fn tcp_frame(payload: &[u8]) -> Vec<u8> {
    let mut frame = (payload.len() as u32).to_be_bytes().to_vec();
    frame.extend_from_slice(payload);
    frame
}

pub fn address_of(url: &str) -> anyhow::Result<Address> {
    Address::parse(url).ok_or_else(|| {
        anyhow!("--url {url:?}: write ws://host:port/ws or tcp://host:port, and with TLS wss:// or tls://")
    })
}

/// A refusal before the upgrade says why in its body.
fn refused(error: &tungstenite::Error) -> anyhow::Error {
    match error {
        tungstenite::Error::Http(response) => {
            let body = response.body().as_deref().unwrap_or_default();
            anyhow!("refused {}: {}", response.status().as_u16(), String::from_utf8_lossy(body))
        }
        other => anyhow!("{other}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_text_or_a_header_and_bytes() {
        let frame = Frame::parse(br#"{"type":"msg.push","id":"x","seq":3,"body":{"a":1},"new":[]}"#).unwrap();
        assert_eq!((frame.kind.as_str(), frame.seq), ("msg.push", 3));
        assert_eq!(frame.body.as_deref().map(RawValue::get), Some(r#"{"a":1}"#));
        let bytes = Bytes::from_static(b"\0\0\0\x0d{\"type\":\"ok\"}\x01\x02");
        assert_eq!(Frame::parse_binary(&bytes).unwrap().bytes.as_deref(), Some(&[1, 2][..]));
        assert!(Frame::parse_binary(&Bytes::from_static(b"\0\0\xff\xff{}")).is_err());
        assert!(Frame::parse(b"nonsense").is_err());
    }
}
