//! A message of a room: encoded once, however many it is for.

use bowline_protocol::{
    Frame, Millis,
    frame::{Body, with_body, write_number, write_string},
};

/// What is to become a message. Without `from` it is of the application itself.
#[derive(Debug, Clone, Copy)]
pub struct Post<'a> {
    pub from: Option<&'a str>,
    pub body: &'a Body,
}

/// A message with its number. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Message {
    pub offset: u64,
    pub ts: Millis,
    /// `room.push`.
    pub frame: Frame,
    /// Where in the JSON of the frame the fields begin that stand in a `room.batch` as well.
    fields_at: u32,
}

impl Message {
    /// `head` is what [`head`] has made for the room.
    pub(crate) fn new(head: &[u8], offset: u64, ts: Millis, post: Post<'_>) -> Self {
        // Names of fields and two numbers take no more than that.
        let fields_bytes = 64 + post.from.map_or(0, str::len);
        let body_bytes = if let Body::Json(raw) = post.body { raw.len() } else { 0 };
        let mut json = Vec::with_capacity(head.len() + fields_bytes + body_bytes);
        json.extend_from_slice(head);
        json.extend_from_slice(b"\"offset\":");
        write_number(&mut json, offset);
        if let Some(from) = post.from {
            json.extend_from_slice(b",\"from\":");
            write_string(&mut json, from);
        }
        json.extend_from_slice(b",\"ts\":");
        write_number(&mut json, ts);
        Self { offset, ts, frame: with_body(json, post.body), fields_at: head.len() as u32 }
    }

    /// What it is in a `room.batch`, without the opening brace; none for bytes, which travel alone.
    fn fields(&self) -> Option<&[u8]> {
        self.frame.body.is_none().then(|| &self.frame.json[self.fields_at as usize..])
    }
}

/// What all pushes of a room begin with.
pub(crate) fn head(room: &str) -> Box<[u8]> {
    let mut head = b"{\"type\":\"room.push\",\"room\":".to_vec();
    write_string(&mut head, room);
    head.push(b',');
    head.into()
}

/// As many messages from the front as go into one `room.batch` of so many bytes at most: how many, and the frame. One
/// message travels as the push that it is, and so do bytes.
pub fn batch_frame(room: &str, messages: &[Message], bytes_max: usize) -> Option<(usize, Frame)> {
    let first = messages.first()?;
    let all_bytes = messages.iter().map(|message| message.frame.json.len()).sum::<usize>();
    let mut json = Vec::with_capacity(bytes_max.min(all_bytes + 256));
    json.extend_from_slice(b"{\"type\":\"room.batch\",\"room\":");
    write_string(&mut json, room);
    json.extend_from_slice(b",\"messages\":[");
    let mut count = 0;
    for message in messages {
        // With the braces or comma around it and the end of the frame.
        let Some(fields) = message.fields().filter(|fields| json.len() + fields.len() + 4 <= bytes_max)
        else {
            break;
        };
        if count > 0 {
            json.push(b',');
        }
        json.push(b'{');
        json.extend_from_slice(fields);
        count += 1;
    }
    if count < 2 {
        return Some((1, first.frame.clone()));
    }
    json.extend_from_slice(b"]}");
    Some((count, Frame { json: json.into(), body: None }))
}
