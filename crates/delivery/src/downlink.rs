//! What goes down: events to connections, each numbered for its connection, and answers to whoever asked.

use crate::{Action, Asker, Core, Origin, limits, users::ConnKey};
use bowline_protocol::{
    ConversationId, Frame, ServerFrame,
    error::Refusal,
    link::{Answer, ConnRef, Down, Downlink, Target},
};

impl Core {
    /// Sends one event to one connection.
    pub(crate) fn send_down(&mut self, key: ConnKey, event: Down) {
        let Some(conn) = self.conns.get_mut(&key) else { return };
        if let Down::Close { code, .. } = &event {
            self.closes.note(key, conn.login, *code);
        }
        conn.sent += 1;
        let to = [Target { connection: key.1, login: conn.login, no: conn.sent }].into();
        self.actions.push(Action::Send(Downlink { node: self.nodes.node(key.0).clone(), to, event }));
    }

    /// Sends one frame to many connections; those on one node share a message.
    pub(crate) fn broadcast(&mut self, keys: &[ConnKey], frame: &Frame) {
        let mut keys: smallvec::SmallVec<[ConnKey; 8]> = keys.into();
        keys.sort_by_key(|k| k.0);
        for group in keys.chunk_by(|a, b| a.0 == b.0) {
            let mut to = smallvec::SmallVec::with_capacity(group.len());
            for key in group {
                if let Some(conn) = self.conns.get_mut(key) {
                    if let Some(sync) = conn.sync.as_mut().filter(|sync| sync.resuming.is_some()) {
                        match sync.early.len() < limits::EARLY_FRAMES_MAX {
                            true => sync.early.push(frame.clone()),
                            false => sync.overflowed = true,
                        }
                        continue;
                    }
                    conn.sent += 1;
                    to.push(Target { connection: key.1, login: conn.login, no: conn.sent });
                }
            }
            if !to.is_empty() {
                let event = Down::Frame { frame: frame.clone(), decided: 0, answer: false };
                self.actions.push(Action::Send(Downlink {
                    node: self.nodes.node(group[0].0).clone(),
                    to,
                    event,
                }));
            }
        }
    }

    /// The frame of `asker` is decided, and this is its answer.
    pub(crate) fn answer_frame(&mut self, asker: &Asker, frame: Frame) {
        if let Origin::Conn { key, login } = asker.origin
            && self.conns.get(&key).is_some_and(|c| c.login == login)
        {
            self.send_down(key, Down::Frame { frame, decided: 1, answer: true });
        }
    }

    /// The frame of `asker` is decided; it has no answer.
    pub(crate) fn decide(&mut self, asker: &Asker) {
        if let Origin::Conn { key, login } = asker.origin
            && let Some(conn) = self.conns.get_mut(&key).filter(|c| c.login == login)
        {
            conn.decided += 1;
            if conn.decided == 1 {
                self.decided.push(key);
            }
        }
    }

    pub(crate) fn report_decided(&mut self) {
        for key in std::mem::take(&mut self.decided) {
            if let Some(count) =
                self.conns.get_mut(&key).map(|c| std::mem::take(&mut c.decided)).filter(|n| *n > 0)
            {
                self.send_down(key, Down::Decided(count));
            }
        }
    }

    pub(crate) fn answer_api(&mut self, node: u32, request_id: u64, answer: Answer) {
        let event = Down::Answer { request_id, answer: Box::new(answer) };
        let node = self.nodes.node(node).clone();
        self.actions.push(Action::Send(Downlink { node, to: Default::default(), event }));
    }

    /// Answers `ok`, or the API's `Done`.
    pub(crate) fn confirm(&mut self, asker: &Asker, conversation: Option<&ConversationId>) {
        match asker.origin {
            Origin::Api { node, request_id } => {
                let answer = match conversation {
                    Some(id) => Answer::Created { conversation_id: id.clone() },
                    None => Answer::Done,
                };
                self.answer_api(node, request_id, answer);
            }
            Origin::Conn { .. } => {
                let id = asker.frame_id.as_deref().unwrap_or_default();
                let frame =
                    ServerFrame::Ok { id, conversation_id: conversation.map(|c| c.as_str()) }.encode();
                self.answer_frame(asker, frame);
            }
        }
    }

    pub(crate) fn refuse(&mut self, asker: &Asker, refusal: Refusal) {
        match asker.origin {
            Origin::Api { node, request_id } => self.answer_api(node, request_id, Answer::Refused(refusal)),
            Origin::Conn { .. } => {
                let frame = ServerFrame::Error {
                    code: refusal.code,
                    message: &refusal.message,
                    id: asker.frame_id.as_deref(),
                    retry_after_ms: refusal.retry_after_ms,
                }
                .encode();
                self.answer_frame(asker, frame);
            }
        }
    }

    pub(crate) fn send_again(&mut self, conn: ConnRef, no: u64, event: Down) {
        let to = [Target { connection: conn.connection, login: conn.login, no }].into();
        self.actions.push(Action::Send(Downlink { node: conn.node, to, event }));
    }
}
