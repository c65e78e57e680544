"""Clients on Python's own sockets and on the `websockets` package against a running server.

The suite starts the server and says in the environment where it is. The last line is `N passed, M failed`.
"""

import asyncio
import base64
import json
import os
import ssl
import struct
import sys
import traceback
import uuid

from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

WS = os.environ["SERVER_WS"]
TCP_HOST, TCP_PORT = os.environ["SERVER_TCP"].rsplit(":", 1)
# The listeners speak TLS; SSL_CERT_FILE names whom to trust.
TLS = {"ssl": True, "server_hostname": "localhost"} if WS.startswith("wss:") else {}
TOKENS = json.loads(os.environ["SERVER_TOKENS"])
LIMIT = 20


class Ws:
    """Frames over WebSocket."""

    def __init__(self, socket):
        self.socket = socket

    @classmethod
    async def open(cls, user, **options):
        headers = {"Authorization": f"Bearer {TOKENS[user]}"}
        device = options.pop("device", None)
        url = WS + (f"?device_id={device}" if device else "")
        self = cls(await connect(url, additional_headers=headers, proxy=None, **options))
        self.connected = await self.next()
        return self

    async def send(self, **frame):
        await self.socket.send(json.dumps(frame))

    async def send_binary(self, body, **header):
        head = json.dumps(header).encode()
        await self.socket.send(struct.pack(">I", len(head)) + head + body)

    async def next(self):
        data = await asyncio.wait_for(self.socket.recv(), LIMIT)
        return json.loads(data) if isinstance(data, str) else split(data)

    async def close(self):
        await self.socket.close()


class Tcp:
    """Frames over plain TCP."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer

    @classmethod
    async def open(cls, user, device=None):
        self = cls(*await asyncio.open_connection(TCP_HOST, int(TCP_PORT), **TLS))
        await self.send(type="connect", token=TOKENS[user], device_id=device or str(uuid.uuid4()))
        self.connected = await self.next()
        return self

    async def write(self, data):
        self.writer.write(struct.pack(">I", len(data)) + data)
        await self.writer.drain()

    async def send(self, **frame):
        await self.write(json.dumps(frame).encode())

    async def send_binary(self, body, **header):
        head = json.dumps(header).encode()
        await self.write(struct.pack(">I", len(head)) + head + body)

    async def next(self):
        size = await asyncio.wait_for(self.reader.readexactly(4), LIMIT)
        data = await asyncio.wait_for(self.reader.readexactly(struct.unpack(">I", size)[0]), LIMIT)
        return split(data) if data[:1] == b"\0" else json.loads(data)

    async def close(self):
        self.writer.close()
        try:
            await self.writer.wait_closed()
        except ssl.SSLError as error:
            # What the server sent before it had read the end: nobody waits for it.
            if error.reason != "APPLICATION_DATA_AFTER_CLOSE_NOTIFY":
                raise


def split(data):
    size = struct.unpack(">I", data[:4])[0]
    frame = json.loads(data[4 : 4 + size])
    frame["bytes"] = data[4 + size :]
    return frame


async def expect(client, kind, /, **fields):
    """The next frame of this type with these fields; others are passed over, but for errors."""
    while True:
        frame = await client.next()
        if frame["type"] == kind and all(frame.get(name) == value for name, value in fields.items()):
            return frame
        assert frame["type"] not in ("error", "session.closed"), f"waiting for {kind}: {frame}"


def conversation(one, other):
    return "d:" + ":".join(sorted([one, other], key=str.encode))


def new_id():
    return str(uuid.uuid4())


async def a_message_travels_and_comes_back(transport):
    alice, bob = await transport.open("alice"), await transport.open("bob")
    assert alice.connected["type"] == "connected" and alice.connected["user_id"] == "alice"
    sent = new_id()
    await alice.send(type="msg.send", id=sent, to="bob", body={"text": "grüß dich 🪢"})
    ack = await expect(alice, "msg.ack", id=sent)
    push = await expect(bob, "msg.push", id=sent)
    assert push["seq"] == ack["seq"] and push["from"] == "alice", push
    assert push["body"] == {"text": "grüß dich 🪢"}, push
    await bob.send(type="msg.read", conversation_id=push["conversation_id"], seq=push["seq"])
    receipt = await expect(alice, "msg.receipt", kind="read", user_id="bob")
    assert receipt["seq"] >= push["seq"], receipt
    await alice.close()
    await bob.close()


async def bytes_travel_as_bytes(transport):
    alice, bob = await transport.open("alice"), await transport.open("bob")
    sent, body = new_id(), bytes(range(256)) * 50
    await alice.send_binary(body, type="msg.send", id=sent, to="bob")
    push = await expect(bob, "msg.push", id=sent)
    assert push["bytes"] == body
    await bob.send(type="history", id="h", conversation_id=push["conversation_id"], limit=1)
    page = await expect(bob, "history.page", id="h")
    message = page["messages"][0]
    assert message["body_encoding"] == "base64" and base64.b64decode(message["body"]) == body
    await alice.close()
    await bob.close()


async def many_messages_arrive_once_and_in_order(transport):
    carol, dave = await transport.open("carol"), await transport.open("dave")
    ids = [new_id() for _ in range(300)]

    async def send():
        for number, sent in enumerate(ids):
            await carol.send(type="msg.send", id=sent, to="dave", body=number)

    async def acks():
        return [(await expect(carol, "msg.ack"))["id"] for _ in ids]

    async def pushes():
        got = []
        while len(got) < len(ids):
            push = await expect(dave, "msg.push")
            if push["id"] in ids and push["id"] not in got:
                got.append(push["id"])
                await dave.send(type="msg.recv", conversation_id=push["conversation_id"], seq=push["seq"])
        return got

    _, acked, pushed = await asyncio.gather(send(), acks(), pushes())
    assert acked == ids, "acks come in the order of sending"
    assert pushed == ids, "pushes come in the order of sending"
    await carol.close()
    await dave.close()


async def history_is_read_in_pages(transport):
    erin = await transport.open("erin")
    with_frank = conversation("erin", "frank")
    for number in range(25):
        await erin.send(type="msg.send", id=new_id(), to="frank", body=number)
        await expect(erin, "msg.ack")
    await erin.send(type="history", id="all", conversation_id=with_frank, limit=200)
    everything = (await expect(erin, "history.page", id="all"))["messages"]
    seen, after, more = [], 0, True
    while more:
        ask = new_id()
        await erin.send(type="history", id=ask, conversation_id=with_frank, after_seq=after, limit=10)
        page = await expect(erin, "history.page", id=ask)
        seen += page["messages"]
        after, more = seen[-1]["seq"], page["more"]
    assert seen == everything and len(seen) >= 25
    await erin.close()


async def two_devices_of_one_user_both_have_it(transport):
    phone, laptop = await transport.open("gina", device="phone"), await transport.open("gina", device="laptop")
    hank = await transport.open("hank")
    sent = new_id()
    await phone.send(type="msg.send", id=sent, to="hank", body="hello")
    for device in (laptop, hank):
        push = await expect(device, "msg.push", id=sent)
        assert push["from"] == "gina", push
    for client in (phone, laptop, hank):
        await client.close()


async def every_way_to_give_a_token_works(_):
    token = TOKENS["alice"]
    ways = [
        dict(uri=WS, additional_headers={"Authorization": f"Bearer {token}"}),
        dict(uri=f"{WS}?token={token}"),
        dict(uri=WS, subprotocols=["bowline.v1.json", f"bearer.{token}"]),
        dict(uri=WS),
    ]
    for number, way in enumerate(ways):
        async with connect(proxy=None, **way) as socket:
            if number == 2:
                assert socket.subprotocol == "bowline.v1.json", socket.subprotocol
            if number == 3:
                await socket.send(json.dumps({"type": "connect", "token": token}))
            frame = json.loads(await asyncio.wait_for(socket.recv(), LIMIT))
            assert (frame["type"], frame["user_id"]) == ("connected", "alice"), frame


async def a_bad_token_is_refused_before_the_upgrade(_):
    try:
        await connect(WS, additional_headers={"Authorization": "Bearer garbage"}, proxy=None)
    except InvalidStatus as refusal:
        assert refusal.response.status_code == 401, refusal
        body = json.loads(refusal.response.body)
        assert body["code"] == "unauthenticated" and body["message"], body
    else:
        raise AssertionError("a bad token was taken")


async def a_close_has_its_code_and_reason(_):
    client = await Ws.open("alice")
    await client.socket.send("x" * 40_000)
    # What waits for alice from the tests before may come first.
    while (frame := await client.next())["type"] in ("sync.notice", "msg.push"):
        pass
    assert (frame["type"], frame["code"]) == ("session.closed", 1009), frame
    try:
        await asyncio.wait_for(client.socket.recv(), LIMIT)
        raise AssertionError("it is still open")
    except ConnectionClosed as closed:
        assert (closed.rcvd.code, closed.rcvd.reason) == (1009, "too-large"), closed


async def protocol_pings_and_bare_pings_are_answered(_):
    client = await Ws.open("alice")
    await asyncio.wait_for(await client.socket.ping(b"data"), LIMIT)
    await client.socket.send("ping")
    while (data := await asyncio.wait_for(client.socket.recv(), LIMIT)) != "pong":
        assert json.loads(data)["type"] in ("sync.notice", "msg.push"), data
    await client.close()


async def main():
    both = [
        a_message_travels_and_comes_back,
        bytes_travel_as_bytes,
        many_messages_arrive_once_and_in_order,
        history_is_read_in_pages,
        two_devices_of_one_user_both_have_it,
    ]
    websocket = [
        every_way_to_give_a_token_works,
        a_bad_token_is_refused_before_the_upgrade,
        a_close_has_its_code_and_reason,
        protocol_pings_and_bare_pings_are_answered,
    ]
    passed = failed = 0
    for transport, tests in ((Ws, both), (Tcp, both), (Ws, websocket)):
        for test in tests:
            name = f"{test.__name__} ({transport.__name__})"
            try:
                await asyncio.wait_for(test(transport), 60)
                passed += 1
                print("ok    ", name)
            except Exception:
                failed += 1
                print("FAILED", name)
                traceback.print_exc(file=sys.stdout)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


sys.exit(asyncio.run(main()))
