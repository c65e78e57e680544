// A small Bowline client: one pane, one user, one connection.
//
//   /                      two panes, alice and bob
//   /?user=alice&to=bob    one pane; also &device=… (a device id) and &token=… (where no demo tokens are given)
//   /?user=alice&conversation=g:team   the same for any conversation of the user
//
// What a test may rely on in the page:
//
//   #pane-<user>                       one pane
//   #pane-<user> .status               its text, and data-state: connecting, online, offline, stopped
//   #pane-<user> input[name=text]      what to send;  button.send sends it
//   #pane-<user> .messages > .message  in order; data-id, data-seq (none until acknowledged), class mine or theirs
//   … .message .body                   the text
//   … .message .ticks                  of own messages; data-state: sending, sent, delivered, read, failed
//   #pane-<user> .notice               what went wrong;  button.older loads older messages,
//   #pane-<user> button.again          connects again after a stop
//
// The rules it keeps: a message has an id of its own and is sent again with the same id until it is acknowledged;
// messages are shown by `seq`, each once; a gap is asked for with `history`; what is acknowledged to the server is
// the last number up to which everything is here; close codes from 4500 on end the reconnecting.
"use strict";

const PAGE = 50;
const REPAIR_PAGE = 200;
const BACKOFF_FIRST_MS = 1000;
const BACKOFF_MAX_MS = 30000;
const TICKS = { sending: "○", sent: "✓", delivered: "✓✓", read: "✓✓", failed: "!" };

function newId() {
  if (crypto.randomUUID) return crypto.randomUUID();
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

// The two users sorted by their bytes.
function directConversation(one, other) {
  const encoder = new TextEncoder();
  const [a, b] = [encoder.encode(one), encoder.encode(other)];
  for (let i = 0; i < Math.min(a.length, b.length); i++) {
    if (a[i] !== b[i]) return a[i] < b[i] ? `d:${one}:${other}` : `d:${other}:${one}`;
  }
  return a.length <= b.length ? `d:${one}:${other}` : `d:${other}:${one}`;
}

function stored(key, fallback) {
  try {
    return JSON.parse(localStorage.getItem(key)) ?? fallback;
  } catch {
    return fallback;
  }
}

function store(key, value) {
  try {
    localStorage.setItem(key, JSON.stringify(value));
  } catch {
    // Without storage the page works until it is closed.
  }
}

// A binary frame: 4-byte header length, JSON header, body.
function decode(data) {
  if (typeof data === "string") return data === "pong" ? { type: "pong" } : JSON.parse(data);
  const length = new DataView(data).getUint32(0);
  const frame = JSON.parse(new TextDecoder().decode(new Uint8Array(data, 4, length)));
  frame.body = `(${data.byteLength - 4 - length} bytes)`;
  return frame;
}

function textOf(body) {
  if (typeof body === "string") return body;
  if (body && typeof body === "object" && typeof body.text === "string") return body.text;
  return JSON.stringify(body);
}

class Client {
  constructor(options, view) {
    this.user = options.user;
    this.to = options.to;
    this.givenToken = options.token;
    this.view = view;
    this.conversation = options.conversation || directConversation(this.user, this.to);
    const keep = `bowline.${options.pane}.${this.user}`;
    this.deviceId = options.device || stored(`${keep}.device`, null) || newId();
    if (!options.device) store(`${keep}.device`, this.deviceId);
    this.waitingKey = `${keep}.waiting.${this.to}`;

    this.messages = new Map(); // seq → message
    this.waiting = stored(this.waitingKey, []); // own messages without a number, in the order of sending
    this.held = null; // the last seq up to which everything from `base` on is here
    this.base = null; // the first seq that is shown
    this.firstSeq = 1; // the first seq that this user may see
    this.newest = 0; // the highest seq that has been seen
    this.announced = 0; // the last seq that was acknowledged, and
    this.announcedRead = 0; // the last one that was acknowledged as read
    this.peerReceived = 0;
    this.peerRead = 0;

    this.requests = new Map(); // id → what to do with the answer
    this.failures = 0;
    this.sessionId = null;
    this.socket = null;
    this.timers = new Set();
    document.addEventListener("visibilitychange", () => this.acknowledge());
    addEventListener("online", () => this.view.state === "offline" && this.connect());
  }

  // Connection

  async connect() {
    this.dropSocket();
    this.closedRetryAfter = undefined;
    this.view.setStatus("connecting", "connecting …");
    const attempt = (this.attempt = Symbol());
    let token;
    try {
      token = await this.token();
    } catch (error) {
      if (attempt !== this.attempt) return;
      if (error.isFinal) return this.stop(error.message);
      return this.reconnectLater();
    }
    if (attempt !== this.attempt) return;
    const scheme = location.protocol === "https:" ? "wss:" : "ws:";
    const socket = new WebSocket(`${scheme}//${location.host}${document.body.dataset.wsPath}`, "bowline.v1.json");
    socket.binaryType = "arraybuffer";
    this.socket = socket;
    socket.onopen = () => {
      const connect = { type: "connect", token, device_id: this.deviceId, device_class: "web", version: 1 };
      if (this.sessionId) connect.resume = this.sessionId;
      this.send(connect);
    };
    socket.onmessage = (event) => {
      if (socket !== this.socket) return;
      this.lastHeard = Date.now();
      this.onFrame(decode(event.data));
    };
    socket.onclose = (event) => {
      if (socket !== this.socket) return;
      this.dropSocket();
      if (event.code >= 4500 && event.code <= 4999) return this.stop(event.reason || `closed ${event.code}`);
      this.reconnectLater(this.closedRetryAfter);
    };
  }

  async token() {
    if (this.givenToken) return this.givenToken;
    const answer = await fetch("/demo/token", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ user: this.user }),
    });
    const told = await answer.json().catch(() => ({}));
    if (answer.ok) return told.token;
    const error = new Error(told.message || `no token: HTTP ${answer.status}`);
    error.isFinal = answer.status < 500 && answer.status !== 429;
    throw error;
  }

  dropSocket() {
    const socket = this.socket;
    this.socket = null;
    this.isOnline = false;
    this.requests.clear();
    for (const timer of this.timers) clearTimeout(timer);
    this.timers.clear();
    if (socket) socket.close(1000);
  }

  after(ms, action) {
    const timer = setTimeout(() => {
      this.timers.delete(timer);
      action();
    }, ms);
    this.timers.add(timer);
  }

  // Full jitter: anywhere between nothing and the back-off, unless the server has said when.
  reconnectLater(retryAfterMs) {
    const backoff = Math.min(BACKOFF_MAX_MS, BACKOFF_FIRST_MS * 2 ** this.failures);
    this.failures = Math.min(this.failures + 1, 16);
    const delay = retryAfterMs ?? Math.random() * backoff;
    this.view.setStatus("offline", `offline, next try in ${Math.max(1, Math.round(delay / 1000))} s`);
    this.after(delay, () => this.connect());
  }

  stop(reason) {
    this.dropSocket();
    this.view.setStatus("stopped", `stopped: ${reason}`);
  }

  send(frame) {
    if (this.socket && this.socket.readyState === WebSocket.OPEN) this.socket.send(JSON.stringify(frame));
  }

  request(frame, onAnswer) {
    const id = newId();
    this.requests.set(id, onAnswer);
    this.send({ ...frame, id });
  }

  // A proxy or a network may die without a word.
  watch(pingAfterMs, closeAfterMs) {
    this.after(Math.min(pingAfterMs, 30000), () => {
      if (Date.now() - this.lastHeard > closeAfterMs) {
        this.dropSocket();
        return this.reconnectLater();
      }
      this.send({ type: "ping" });
      this.watch(pingAfterMs, closeAfterMs);
    });
  }

  // Frames

  onFrame(frame) {
    switch (frame.type) {
      case "connected":
        return this.onConnected(frame);
      case "ping":
        return this.send(frame.data === undefined ? { type: "pong" } : { type: "pong", data: frame.data });
      case "msg.push":
        if (frame.conversation_id === this.conversation) this.onMessages([frame]);
        return;
      case "msg.ack":
        return this.onAck(frame);
      case "msg.receipt":
        return this.onReceipt(frame);
      case "sync.notice":
        if (frame.conversations.some((one) => one.conversation_id === this.conversation)) this.repair();
        return;
      case "history.page":
      case "conversation.page":
      case "ok":
        return this.answer(frame);
      case "error":
        return this.onError(frame);
      case "auth.expiring":
        return this.refresh();
      case "session.migrate":
        // Planned, so it is no failure: the connection works on until its own moment has come.
        this.after(frame.retry_after_ms, () => this.connect());
        return;
      case "session.closed":
        this.closedRetryAfter = frame.retry_after_ms;
        return;
    }
  }

  onConnected(frame) {
    this.isOnline = true;
    this.failures = 0;
    this.sessionId = frame.session_id;
    this.lastHeard = Date.now();
    this.repairing = false;
    // What an earlier connection acknowledged may not have arrived.
    this.announced = this.announcedRead = 0;
    this.view.setStatus("online", "online");
    this.view.setNotice("");
    this.watch(frame.ping_after_ms, frame.close_after_ms);
    for (const message of this.waiting) this.sendMessage(message);
    this.request({ type: "conversation.list", limit: 200 }, (page) => this.onList(page));
    if (this.held === null) this.loadNewest();
    else this.repair();
  }

  answer(frame) {
    const onAnswer = this.requests.get(frame.id);
    this.requests.delete(frame.id);
    if (onAnswer) onAnswer(frame);
  }

  onError(frame) {
    if (this.requests.has(frame.id)) return this.answer(frame);
    const message = this.waiting.find((one) => one.id === frame.id);
    if (!message) return this.view.setNotice(frame.message);
    if (frame.retry_after_ms !== undefined) {
      return this.after(frame.retry_after_ms, () => this.waiting.includes(message) && this.sendMessage(message));
    }
    this.waiting = this.waiting.filter((one) => one !== message);
    store(this.waitingKey, this.waiting);
    message.failed = frame.message;
    this.view.show(message, "failed");
    this.view.setNotice(frame.message);
  }

  async refresh() {
    try {
      this.request({ type: "auth.refresh", token: await this.token() }, () => {});
    } catch {
      // The connection closes 4001 and comes back with a fresh token.
    }
  }

  onList(page) {
    const found = (page.conversations || []).find((one) => one.conversation_id === this.conversation);
    if (!found) return;
    this.firstSeq = found.first_seq;
    this.peerReceived = Math.max(this.peerReceived, found.peer_recv_seq || 0);
    this.peerRead = Math.max(this.peerRead, found.peer_read_seq || 0);
    this.showTicks();
  }

  // Sending

  write(text) {
    const message = { id: newId(), from: this.user, ts: Date.now(), body: { text } };
    this.waiting.push(message);
    store(this.waitingKey, this.waiting);
    this.view.show(message, "sending");
    if (this.isOnline) this.sendMessage(message);
  }

  sendMessage(message) {
    this.view.show(message, "sending");
    this.send({ type: "msg.send", id: message.id, conversation_id: this.conversation, body: message.body });
  }

  onAck(ack) {
    const message = this.waiting.find((one) => one.id === ack.id);
    if (!message) return;
    this.onMessages([{ ...message, seq: ack.seq, ts: ack.ts }]);
  }

  // Receiving

  loadNewest() {
    this.request({ type: "history", conversation_id: this.conversation, limit: PAGE }, (page) => {
      // A conversation that nobody has written to is forbidden; it begins with its first message.
      const messages = page.messages || [];
      if (page.first_seq) this.firstSeq = page.first_seq;
      this.base = messages.length ? messages[0].seq : this.firstSeq;
      this.held = this.base - 1;
      this.onMessages(messages);
    });
  }

  loadOlder() {
    const ask = { type: "history", conversation_id: this.conversation, before_seq: this.base, limit: PAGE };
    this.request(ask, (page) => {
      for (const message of page.messages || []) {
        this.base = Math.min(this.base, message.seq);
        this.keep(message);
      }
      if (!(page.messages || []).length) this.firstSeq = this.base;
      this.view.setOlder(this.base > this.firstSeq);
    });
  }

  // Asks for what is missing after `held`, page by page.
  repair() {
    if (this.repairing || this.held === null || !this.isOnline) return;
    this.repairing = true;
    const ask = { type: "history", conversation_id: this.conversation, after_seq: this.held, limit: REPAIR_PAGE };
    this.request(ask, (page) => {
      this.repairing = false;
      if (page.type === "error") {
        if (page.retry_after_ms !== undefined) this.after(page.retry_after_ms, () => this.repair());
        return;
      }
      const before = this.held;
      this.firstSeq = page.first_seq;
      this.held = Math.max(this.held, page.first_seq - 1);
      for (const message of page.messages) this.keep(message);
      this.advance();
      if (page.more || (this.newest > this.held && this.held > before)) this.repair();
    });
  }

  onMessages(messages) {
    for (const message of messages) this.keep(message);
    if (this.held === null) return;
    this.advance();
    if (this.newest > this.held) this.repair();
  }

  advance() {
    while (this.messages.has(this.held + 1)) this.held++;
    this.view.setOlder(this.base > this.firstSeq);
    this.acknowledge();
  }

  keep(message) {
    if (this.messages.has(message.seq)) return;
    this.messages.set(message.seq, message);
    this.newest = Math.max(this.newest, message.seq);
    if (message.from === this.user && this.waiting.some((one) => one.id === message.id)) {
      this.waiting = this.waiting.filter((one) => one.id !== message.id);
      store(this.waitingKey, this.waiting);
    }
    this.view.show(message, this.tick(message));
  }

  // Only what is complete: everything up to the last message of the other side that is held.
  acknowledge() {
    if (!this.isOnline || this.held === null) return;
    let last = this.held;
    while (last >= this.base && this.messages.get(last)?.from === this.user) last--;
    if (last < this.base || !this.messages.has(last)) return;
    const isVisible = document.visibilityState === "visible";
    const done = isVisible ? this.announcedRead : this.announced;
    if (last <= done) return;
    this.announced = last;
    if (isVisible) this.announcedRead = last;
    this.send({ type: isVisible ? "msg.read" : "msg.recv", conversation_id: this.conversation, seq: last });
  }

  onReceipt(receipt) {
    if (receipt.conversation_id !== this.conversation || receipt.user_id === this.user) return;
    this.peerReceived = Math.max(this.peerReceived, receipt.seq);
    if (receipt.kind === "read") this.peerRead = Math.max(this.peerRead, receipt.seq);
    this.showTicks();
  }

  tick(message) {
    if (message.from !== this.user) return null;
    if (message.seq === undefined) return "sending";
    if (message.seq <= this.peerRead) return "read";
    return message.seq <= this.peerReceived ? "delivered" : "sent";
  }

  showTicks() {
    for (const message of this.messages.values()) {
      if (message.from === this.user) this.view.show(message, this.tick(message));
    }
  }
}

// The page. Text from messages only ever becomes text nodes.

class View {
  constructor(user, to) {
    this.user = user;
    this.peer = to; // whose name need not stand with every message
    this.items = new Map(); // sender and id → element
    this.root = element("section", "pane");
    this.root.id = `pane-${user}`;
    const top = element("div", "top");
    const title = element("h2", "", user);
    title.append(" ", element("small", "", `to ${to}`));
    this.status = element("span", "status");
    this.again = element("button", "again", "connect again");
    this.again.type = "button";
    this.again.hidden = true;
    top.append(title, this.status, this.again);
    this.list = element("ol", "messages");
    this.older = element("button", "older", "older messages");
    this.older.type = "button";
    this.older.hidden = true;
    this.notice = element("p", "notice");
    this.form = element("form", "");
    this.input = element("input", "");
    this.input.name = "text";
    this.input.autocomplete = "off";
    this.input.placeholder = `Message to ${to}`;
    this.input.setAttribute("aria-label", `Message to ${to}`);
    const send = element("button", "send", "Send");
    send.type = "submit";
    this.form.append(this.input, send);
    this.root.append(top, this.older, this.list, this.notice, this.form);
    this.setStatus("connecting", "connecting …");
  }

  setStatus(state, text) {
    this.state = state;
    this.status.dataset.state = state;
    this.status.textContent = text;
    this.again.hidden = state !== "stopped";
  }

  setNotice(text) {
    this.notice.textContent = text;
  }

  setOlder(hasOlder) {
    this.older.hidden = !hasOlder;
  }

  show(message, tick) {
    const key = `${message.from}\n${message.id}`;
    let item = this.items.get(key);
    if (!item) {
      item = element("li", `message ${message.from === this.user ? "mine" : "theirs"}`);
      item.dataset.id = message.id;
      if (message.from !== this.user && message.from !== this.peer) {
        item.append(element("span", "from", message.from));
      }
      item.append(element("span", "body", textOf(message.body)), element("span", "meta"));
      this.items.set(key, item);
    }
    const seq = message.seq === undefined ? "" : String(message.seq);
    if (!item.isConnected || (item.dataset.seq || "") !== seq) {
      if (seq) item.dataset.seq = seq;
      this.place(item, message.seq ?? Infinity);
    }
    const meta = item.lastChild;
    meta.textContent = `${new Date(message.ts).toLocaleTimeString()} `;
    if (tick) {
      const ticks = element("span", "ticks", TICKS[tick]);
      ticks.dataset.state = tick;
      ticks.title = message.failed || tick;
      meta.append(ticks);
    }
  }

  // By number; what has none yet stands at the end, in the order of sending.
  place(item, seq) {
    const isAtEnd = this.list.scrollHeight - this.list.scrollTop - this.list.clientHeight < 40;
    item.remove();
    let before = null;
    for (let other = this.list.lastChild; other; other = other.previousSibling) {
      const otherSeq = other.dataset.seq ? Number(other.dataset.seq) : Infinity;
      if (otherSeq <= seq) break;
      before = other;
    }
    this.list.insertBefore(item, before);
    if (isAtEnd) this.list.scrollTop = this.list.scrollHeight;
  }
}

function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function open(options) {
  const view = new View(options.user, options.to);
  document.getElementById("panes").append(view.root);
  const client = new Client(options, view);
  for (const message of client.waiting) view.show(message, "sending");
  view.form.addEventListener("submit", (event) => {
    event.preventDefault();
    const text = view.input.value;
    if (!text.trim()) return;
    view.input.value = "";
    client.write(text);
  });
  view.older.addEventListener("click", () => client.loadOlder());
  view.again.addEventListener("click", () => client.connect());
  client.connect();
}

function link(user, to) {
  const made = element("a", "", `${user} alone`);
  made.href = `/?user=${encodeURIComponent(user)}&to=${encodeURIComponent(to)}`;
  made.target = "_blank";
  made.rel = "noopener";
  return made;
}

const query = new URLSearchParams(location.search);
if (query.get("user")) {
  const user = query.get("user");
  const conversation = query.get("conversation");
  const to = conversation || query.get("to") || (user === "bob" ? "alice" : "bob");
  document.getElementById("panes").className = "single";
  document.getElementById("hint").textContent = "";
  document.title = `${user} – Bowline demo`;
  open({ user, to, conversation, pane: "single", device: query.get("device"), token: query.get("token") });
} else {
  document.getElementById("windows").append(link("alice", "bob"), link("bob", "alice"));
  open({ user: "alice", to: "bob", pane: "left" });
  open({ user: "bob", to: "alice", pane: "right" });
}
