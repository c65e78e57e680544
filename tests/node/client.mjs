// Clients in Node.js against a running server: the `ws` package, and the WebSocket that Node itself has from
// version 22 on. The suite starts the server and says in the environment where it is. The last line is
// `N passed, M failed`.

import assert from "node:assert/strict";
import { randomUUID } from "node:crypto";
import Ws from "ws";

const url = process.env.SERVER_WS;
const tokens = JSON.parse(process.env.SERVER_TOKENS);
const LIMIT = 20_000;

/** One connection: `next` gives the frames in order, `closed` the close code and reason. */
class Client {
  constructor(socket) {
    this.socket = socket;
    this.queue = [];
    this.waiting = null;
    socket.binaryType = "arraybuffer";
    socket.addEventListener("message", (event) => {
      this.queue.push(decode(event.data));
      this.waiting?.();
    });
    this.closed = new Promise((done) => {
      socket.addEventListener("close", (event) => done({ code: event.code, reason: event.reason }));
    });
  }

  static async open(Socket, user, query = "") {
    // The token travels where both implementations can put it: among the subprotocols.
    const client = new Client(new Socket(url + query, ["bowline.v1.json", `bearer.${tokens[user]}`]));
    const connected = await client.next();
    assert.equal(connected.type, "connected");
    assert.equal(connected.user_id, user);
    assert.equal(client.socket.protocol, "bowline.v1.json");
    return client;
  }

  send(frame) {
    this.socket.send(JSON.stringify(frame));
  }

  sendBinary(header, body) {
    const head = Buffer.from(JSON.stringify(header));
    const length = Buffer.alloc(4);
    length.writeUInt32BE(head.length);
    this.socket.send(Buffer.concat([length, head, body]));
  }

  async next() {
    const end = Date.now() + LIMIT;
    while (this.queue.length === 0) {
      let timer;
      await Promise.race([
        new Promise((wake) => (this.waiting = wake)),
        new Promise((_, fail) => {
          timer = setTimeout(() => fail(new Error("nothing was received in time")), end - Date.now());
        }),
      ]).finally(() => clearTimeout(timer));
    }
    return this.queue.shift();
  }

  /** The next frame of this type that fits; others are passed over, but for errors. */
  async expect(type, fields = {}) {
    for (;;) {
      const frame = await this.next();
      const fits = Object.entries(fields).every(([name, value]) => frame[name] === value);
      if (frame.type === type && fits) return frame;
      assert.ok(!["error", "session.closed"].includes(frame.type), `waiting for ${type}: ${JSON.stringify(frame)}`);
    }
  }

  async close() {
    this.socket.close(1000);
    await this.closed;
  }
}

function decode(data) {
  if (typeof data === "string") return data === "pong" ? { type: "bare pong" } : JSON.parse(data);
  const bytes = Buffer.from(data);
  const length = bytes.readUInt32BE(0);
  const frame = JSON.parse(bytes.subarray(4, 4 + length).toString());
  return { ...frame, bytes: bytes.subarray(4 + length) };
}

const tests = {
  async "a message travels and comes back"(Socket) {
    const [alice, bob] = [await Client.open(Socket, "alice"), await Client.open(Socket, "bob")];
    const id = randomUUID();
    alice.send({ type: "msg.send", id, to: "bob", body: { text: "grüß dich 🪢" } });
    const ack = await alice.expect("msg.ack", { id });
    const push = await bob.expect("msg.push", { id });
    assert.equal(push.seq, ack.seq);
    assert.equal(push.from, "alice");
    assert.deepEqual(push.body, { text: "grüß dich 🪢" });
    bob.send({ type: "msg.read", conversation_id: push.conversation_id, seq: push.seq });
    const receipt = await alice.expect("msg.receipt", { kind: "read", user_id: "bob" });
    assert.ok(receipt.seq >= push.seq);
    await alice.close();
    await bob.close();
  },

  async "bytes travel as bytes"(Socket) {
    const [alice, bob] = [await Client.open(Socket, "alice"), await Client.open(Socket, "bob")];
    const [id, body] = [randomUUID(), Buffer.from(Array.from({ length: 5000 }, (_, n) => n % 256))];
    alice.sendBinary({ type: "msg.send", id, to: "bob" }, body);
    const push = await bob.expect("msg.push", { id });
    assert.ok(push.bytes.equals(body));
    await alice.close();
    await bob.close();
  },

  async "many messages arrive once and in order"(Socket) {
    const [carol, dave] = [await Client.open(Socket, "carol"), await Client.open(Socket, "dave")];
    const ids = Array.from({ length: 300 }, () => randomUUID());
    for (const id of ids) carol.send({ type: "msg.send", id, to: "dave", body: id });
    for (const id of ids) assert.equal((await carol.expect("msg.ack")).id, id);
    const got = [];
    while (got.length < ids.length) {
      const push = await dave.expect("msg.push");
      if (got.includes(push.id) || !ids.includes(push.id)) continue;
      got.push(push.id);
      dave.send({ type: "msg.recv", conversation_id: push.conversation_id, seq: push.seq });
    }
    assert.deepEqual(got, ids);
    await carol.close();
    await dave.close();
  },

  async "a close has its code and reason"(Socket) {
    const client = await Client.open(Socket, "alice");
    client.socket.send("x".repeat(40_000));
    const notice = await client.next();
    assert.deepEqual([notice.type, notice.code, notice.reason], ["session.closed", 1009, "too-large"]);
    assert.deepEqual(await client.closed, { code: 1009, reason: "too-large" });
  },

  async "the same device replaces its older connection"(Socket) {
    const older = await Client.open(Socket, "erin", "?device_id=phone");
    const newer = await Client.open(Socket, "erin", "?device_id=phone");
    assert.deepEqual(await older.closed, { code: 4501, reason: "replaced" });
    newer.socket.send("ping");
    assert.equal((await newer.next()).type, "bare pong");
    await newer.close();
  },
};

const implementations = [["ws", Ws]];
if (globalThis.WebSocket) implementations.push(["built in", globalThis.WebSocket]);
else console.log(`Node ${process.version} has no WebSocket of its own; the ws package alone is used`);

let passed = 0;
let failed = 0;
for (const [name, Socket] of implementations) {
  for (const [test, run] of Object.entries(tests)) {
    try {
      await run(Socket);
      passed++;
      console.log("ok    ", `${test} (${name})`);
    } catch (error) {
      failed++;
      console.log("FAILED", `${test} (${name})`);
      console.log(error.stack);
    }
  }
}
console.log(`${passed} passed, ${failed} failed`);
process.exit(failed ? 1 : 0);
