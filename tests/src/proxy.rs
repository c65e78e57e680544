//! A server made wrong on purpose: a proxy between clients and a good one that loses, doubles, swaps or forges what the
//! server says, once in a run.

use serde_json::{Value, json};
use std::{
    collections::HashMap,
    io::{self, Read, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

/// What is wrong with the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wrong {
    Nothing,
    /// One message is neither pushed to anybody nor in any history.
    Lost,
    /// One message is pushed, and in no history.
    Forgotten,
    /// One message is pushed to nobody, and there in the history.
    NotPushed,
    /// One push comes twice.
    PushedTwice,
    /// Two pushes change places.
    Swapped,
    /// One push has another number.
    Renumbered,
    /// One push has another body.
    Spoiled,
    /// One message is acknowledged and never stored.
    AckedOnly,
    /// One row comes twice in a page of history.
    RowTwice,
    /// One count of unread messages is one too high.
    Unread,
}

/// Pushes that pass before anything is wrong.
const GOOD_PUSHES: u64 = 100;

struct State {
    wrong: Wrong,
    pushes: u64,
    /// What is wrong concerns this message.
    chosen: Option<(String, u64)>,
    done: bool,
    /// The newest number that was acknowledged in each conversation.
    newest: HashMap<String, u64>,
}

/// Listens on two ports, for WebSocket and for TCP, until it is dropped.
pub struct Proxy {
    pub ws: SocketAddr,
    pub tcp: SocketAddr,
    state: Arc<Mutex<State>>,
    is_over: Arc<AtomicBool>,
}

impl Proxy {
    pub fn start(ws: SocketAddr, tcp: SocketAddr, wrong: Wrong) -> Self {
        let state = State { wrong, pushes: 0, chosen: None, done: false, newest: HashMap::new() };
        let state = Arc::new(Mutex::new(state));
        let is_over = Arc::new(AtomicBool::new(false));
        let listen = |to: SocketAddr, is_ws: bool| {
            let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
            let address = listener.local_addr().expect("it is bound");
            let (state, is_over) = (state.clone(), is_over.clone());
            std::thread::spawn(move || {
                for client in listener.incoming() {
                    if is_over.load(Ordering::Relaxed) {
                        return;
                    }
                    let (Ok(client), Ok(server)) = (client, TcpStream::connect(to)) else { continue };
                    relay(client, server, is_ws, &state);
                }
            });
            address
        };
        let (ws, tcp) = (listen(ws, true), listen(tcp, false));
        Self { ws, tcp, state, is_over }
    }

    /// Whether anything was wrong at all.
    pub fn has_done_wrong(&self) -> bool {
        lock(&self.state).done
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        for address in [self.ws, self.tcp] {
            // Wakes the listener.
            let _ = TcpStream::connect(address);
        }
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Two threads for each connection; an end of either side is the end of both.
fn relay(client: TcpStream, server: TcpStream, is_ws: bool, state: &Arc<Mutex<State>>) {
    let clone = |stream: &TcpStream| stream.try_clone().expect("a socket can be shared");
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    // Forged acks are written from the other direction.
    let out = Arc::new(Mutex::new(clone(&client)));
    let (up, down) = ((clone(&client), clone(&server), out.clone()), (server, client));
    let (up_state, down_state) = (state.clone(), state.clone());
    std::thread::spawn(move || {
        let (mut client, mut server, out) = up;
        let _ = if is_ws {
            io::copy(&mut client, &mut server).map(drop)
        } else {
            up_tcp(&mut client, &mut server, &out, &up_state)
        };
        let _ = (client.shutdown(Shutdown::Both), server.shutdown(Shutdown::Both));
    });
    std::thread::spawn(move || {
        let (mut server, client) = down;
        let _ = pass_down(&mut server, &out, is_ws, &down_state);
        let _ = (client.shutdown(Shutdown::Both), server.shutdown(Shutdown::Both));
    });
}

/// Frames of a client. One of them may be answered here and go no further.
fn up_tcp(
    client: &mut TcpStream,
    server: &mut TcpStream,
    out: &Mutex<TcpStream>,
    state: &Mutex<State>,
) -> io::Result<()> {
    loop {
        let payload = read_tcp(client)?;
        match lock(state).on_send(&payload) {
            Some(ack) => {
                let mut out = out.lock().unwrap_or_else(PoisonError::into_inner);
                write_frame(&mut out, false, false, ack.as_bytes())?;
            }
            None => write_frame(server, false, false, &payload)?,
        }
    }
}

/// Frames of the server, changed as it is wrong.
fn pass_down(
    server: &mut TcpStream,
    out: &Mutex<TcpStream>,
    is_ws: bool,
    state: &Mutex<State>,
) -> io::Result<()> {
    if is_ws {
        let mut head = Vec::new();
        let mut byte = [0];
        while !head.ends_with(b"\r\n\r\n") {
            server.read_exact(&mut byte)?;
            head.push(byte[0]);
        }
        out.lock().unwrap_or_else(PoisonError::into_inner).write_all(&head)?;
        if !head.starts_with(b"HTTP/1.1 101") {
            let mut out = out.lock().unwrap_or_else(PoisonError::into_inner);
            return io::copy(server, &mut *out).map(drop);
        }
    }
    // A push that waits for the next one of its conversation.
    let mut held: Option<(String, bool, Vec<u8>)> = None;
    loop {
        let (is_binary, payload) = if is_ws {
            let (opcode, payload) = read_ws(server)?;
            if opcode > 2 {
                let mut out = out.lock().unwrap_or_else(PoisonError::into_inner);
                write_raw_ws(&mut out, opcode, &payload)?;
                continue;
            }
            (opcode == 2, payload)
        } else {
            let payload = read_tcp(server)?;
            (payload.first() == Some(&0), payload)
        };
        let frames = lock(state).on_frame(is_binary, payload, &mut held);
        let mut out = out.lock().unwrap_or_else(PoisonError::into_inner);
        for (is_binary, payload) in frames {
            write_frame(&mut out, is_ws, is_binary, &payload)?;
        }
    }
}

impl State {
    /// A forged ack, in place of what the server would do with this frame.
    fn on_send(&mut self, payload: &[u8]) -> Option<String> {
        if self.wrong != Wrong::AckedOnly
            || self.done
            || self.pushes < GOOD_PUSHES
            || payload.first() == Some(&0)
        {
            return None;
        }
        let frame: Value = serde_json::from_slice(payload).ok()?;
        let conversation = frame["conversation_id"].as_str().filter(|_| frame["type"] == "msg.send")?;
        let seq = self.newest.get(conversation)? + 1;
        self.done = true;
        let ack = json!({"type": "msg.ack", "id": frame["id"], "conversation_id": conversation, "seq": seq, "ts": 1});
        Some(ack.to_string())
    }

    /// What a client is told in place of one frame.
    fn on_frame(
        &mut self,
        is_binary: bool,
        payload: Vec<u8>,
        held: &mut Option<(String, bool, Vec<u8>)>,
    ) -> Vec<(bool, Vec<u8>)> {
        let (header, body) = split(is_binary, &payload);
        let Ok(mut frame) = serde_json::from_slice::<Value>(header) else {
            return vec![(is_binary, payload)];
        };
        match frame["type"].as_str() {
            Some("msg.ack") => {
                let (conversation, seq) = place(&frame);
                let newest = self.newest.entry(conversation).or_default();
                *newest = seq.max(*newest);
            }
            Some("msg.push") => return self.on_push(is_binary, frame, body.to_vec(), payload.clone(), held),
            Some("history.page") => {
                self.on_page(&mut frame);
                return vec![(false, frame.to_string().into_bytes())];
            }
            Some("conversation.page") if self.wrong == Wrong::Unread && !self.done => {
                // The probe asks for one line only; the review for all.
                if let Some(lines) = frame["conversations"].as_array_mut().filter(|lines| lines.len() > 1) {
                    let unread = lines[0]["unread"].as_u64().unwrap_or_default();
                    lines[0]["unread"] = json!(unread + 1);
                    self.done = true;
                }
                return vec![(false, frame.to_string().into_bytes())];
            }
            _ => {}
        }
        vec![(is_binary, payload)]
    }

    fn on_push(
        &mut self,
        is_binary: bool,
        mut frame: Value,
        body: Vec<u8>,
        payload: Vec<u8>,
        held: &mut Option<(String, bool, Vec<u8>)>,
    ) -> Vec<(bool, Vec<u8>)> {
        self.pushes += 1;
        let (conversation, seq) = place(&frame);
        let good = vec![(is_binary, payload.clone())];
        if let Some((of, _, _)) = held
            && *of == conversation
            && let Some((_, was_binary, before)) = held.take()
        {
            self.done = true;
            return vec![(is_binary, payload), (was_binary, before)];
        }
        if self.pushes < GOOD_PUSHES {
            return good;
        }
        let is_first = frame["redelivered"] != json!(true);
        match self.wrong {
            // A message that nobody was told of so far.
            Wrong::Lost | Wrong::Forgotten | Wrong::NotPushed => {
                if self.chosen.is_none()
                    && is_first
                    && self.newest.get(&conversation).is_none_or(|n| *n < seq)
                {
                    self.chosen = Some((conversation.clone(), seq));
                    self.done = true;
                }
                let is_it = self.chosen == Some((conversation, seq));
                if is_it && self.wrong != Wrong::Forgotten { Vec::new() } else { good }
            }
            Wrong::PushedTwice if !self.done && is_first => {
                self.done = true;
                [good.clone(), good].concat()
            }
            Wrong::Swapped if self.chosen.is_none() && is_first => {
                self.chosen = Some((conversation.clone(), seq));
                *held = Some((conversation, is_binary, payload));
                Vec::new()
            }
            Wrong::Renumbered if !self.done && is_first => {
                self.done = true;
                frame["seq"] = json!(seq + 1);
                vec![(is_binary, join(is_binary, &frame, &body))]
            }
            Wrong::Spoiled if !self.done && !is_binary => {
                self.done = true;
                frame["body"] = json!("something else");
                vec![(is_binary, join(is_binary, &frame, &body))]
            }
            _ => good,
        }
    }

    fn on_page(&mut self, frame: &mut Value) {
        let conversation = frame["conversation_id"].as_str().unwrap_or_default().to_owned();
        let Some(rows) = frame["messages"].as_array_mut() else { return };
        match self.wrong {
            Wrong::Lost | Wrong::Forgotten => {
                if let Some((of, seq)) = &self.chosen
                    && *of == conversation
                {
                    rows.retain(|row| row["seq"] != json!(seq));
                }
            }
            Wrong::RowTwice if !self.done && self.pushes > GOOD_PUSHES && !rows.is_empty() => {
                self.done = true;
                rows.insert(0, rows[0].clone());
            }
            _ => {}
        }
    }
}

fn place(frame: &Value) -> (String, u64) {
    let conversation = frame["conversation_id"].as_str().unwrap_or_default();
    (conversation.to_owned(), frame["seq"].as_u64().unwrap_or_default())
}

/// Header and body of a frame.
fn split(is_binary: bool, payload: &[u8]) -> (&[u8], &[u8]) {
    let length = payload.first_chunk::<4>().filter(|_| is_binary).map(|bytes| u32::from_be_bytes(*bytes));
    match length.and_then(|length| payload[4..].split_at_checked(length as usize)) {
        Some(parts) => parts,
        None => (payload, &[]),
    }
}

fn join(is_binary: bool, header: &Value, body: &[u8]) -> Vec<u8> {
    let header = header.to_string().into_bytes();
    if !is_binary {
        return header;
    }
    [&(header.len() as u32).to_be_bytes(), &header[..], body].concat()
}

fn read_tcp(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    let mut payload = vec![0; u32::from_be_bytes(length) as usize & 0xff_ffff];
    stream.read_exact(&mut payload)?;
    Ok(payload)
}

/// One frame of a server, which neither masks nor splits.
fn read_ws(stream: &mut TcpStream) -> io::Result<(u8, Vec<u8>)> {
    let mut start = [0; 2];
    stream.read_exact(&mut start)?;
    let length = match start[1] {
        126 => {
            let mut long = [0; 2];
            stream.read_exact(&mut long)?;
            usize::from(u16::from_be_bytes(long))
        }
        127 => {
            let mut long = [0; 8];
            stream.read_exact(&mut long)?;
            u64::from_be_bytes(long) as usize
        }
        short => usize::from(short),
    };
    let mut payload = vec![0; length];
    stream.read_exact(&mut payload)?;
    Ok((start[0] & 0x0f, payload))
}

fn write_frame(stream: &mut TcpStream, is_ws: bool, is_binary: bool, payload: &[u8]) -> io::Result<()> {
    if is_ws {
        return write_raw_ws(stream, if is_binary { 2 } else { 1 }, payload);
    }
    stream.write_all(&crate::raw::tcp_frame(payload))
}

fn write_raw_ws(stream: &mut TcpStream, opcode: u8, payload: &[u8]) -> io::Result<()> {
    let mut frame = vec![0x80 | opcode];
    match payload.len() {
        length @ 0..126 => frame.push(length as u8),
        length @ 126..65536 => {
            frame.push(126);
            frame.extend_from_slice(&(length as u16).to_be_bytes());
        }
        length => {
            frame.push(127);
            frame.extend_from_slice(&(length as u64).to_be_bytes());
        }
    }
    frame.extend_from_slice(payload);
    stream.write_all(&frame)
}
