"""permessage-deflate as the `websockets` package speaks it. The suite starts a server that takes it and says in the
environment where it is. The last line is `N passed, M failed`.
"""

import asyncio
import json
import os
import struct
import sys
import traceback
import uuid

from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed
from websockets.extensions.permessage_deflate import ClientPerMessageDeflateFactory

WS = os.environ["SERVER_WS"]
TOKENS = json.loads(os.environ["SERVER_TOKENS"])
LIMIT = 20
LONG = "the same words again and again, " * 800


async def open_socket(user, factory=ClientPerMessageDeflateFactory(), device=None):
    extensions = [factory] if factory else []
    socket = await connect(
        f"{WS}?device_id={device or uuid.uuid4()}",
        additional_headers={"Authorization": f"Bearer {TOKENS[user]}"},
        compression=None,
        extensions=extensions,
        proxy=None,
        max_size=None,
    )
    agreed = socket.response.headers.get("Sec-WebSocket-Extensions")
    assert (agreed is not None) == bool(factory), agreed
    assert bool(socket.protocol.extensions) == bool(factory), socket.protocol.extensions
    return socket, agreed


async def frame(socket, kind):
    while True:
        data = await asyncio.wait_for(socket.recv(), LIMIT)
        if isinstance(data, bytes):
            size = struct.unpack(">I", data[:4])[0]
            found = json.loads(data[4 : 4 + size]) | {"bytes": data[4 + size :]}
        else:
            found = json.loads(data)
        if found["type"] == kind:
            return found


async def send(socket, to, body, pieces=None):
    id = str(uuid.uuid4())
    if isinstance(body, bytes):
        head = json.dumps(dict(type="msg.send", id=id, to=to)).encode()
        data = struct.pack(">I", len(head)) + head + body
    else:
        data = json.dumps(dict(type="msg.send", id=id, to=to, body=body))
    if pieces:
        size = len(data) // pieces + 1
        await socket.send([data[at : at + size] for at in range(0, len(data), size)])
    else:
        await socket.send(data)
    ack = await frame(socket, "msg.ack")
    assert ack["id"] == id, ack


async def long_messages_pass_between_clients_with_and_without():
    alice, _ = await open_socket("alice")
    bob, _ = await open_socket("bob", None)
    for n, (sender, to, reader) in enumerate([(alice, "bob", bob), (bob, "alice", alice)] * 3):
        body = f"{n} {LONG}"
        await send(sender, to, body)
        assert (await frame(reader, "msg.push"))["body"] == body
        await send(sender, to, body.encode())
        assert (await frame(reader, "msg.push"))["bytes"] == body.encode()


async def fragments_of_a_compressed_message_are_one():
    alice, _ = await open_socket("carol")
    bob, _ = await open_socket("dave")
    for pieces in (2, 7, 100):
        await send(alice, "dave", LONG, pieces)
        assert (await frame(bob, "msg.push"))["body"] == LONG


async def windows_are_agreed_and_kept():
    for bits in (9, 12, 15):
        factory = ClientPerMessageDeflateFactory(server_max_window_bits=bits, client_max_window_bits=bits)
        alice, agreed = await open_socket("erin", factory)
        assert f"server_max_window_bits={bits}" in agreed, agreed
        bob, _ = await open_socket("frank", factory)
        # Text that a larger window would shrink by reaching further back than this one allows.
        body = " ".join(f"{n * n}" for n in range(3000))
        await send(alice, "frank", body)
        assert (await frame(bob, "msg.push"))["body"] == body
        await alice.close()
        await bob.close()


async def nothing_is_taken_over_from_one_message_to_the_next():
    _, agreed = await open_socket("gina")
    assert "server_no_context_takeover" in agreed and "client_no_context_takeover" in agreed, agreed


async def a_bomb_is_closed_1009():
    hank, _ = await open_socket("hank")
    await hank.send(json.dumps(dict(type="msg.send", id="bomb", to="gina", body="0" * (64 << 20))))
    try:
        while True:
            await asyncio.wait_for(hank.recv(), LIMIT)
    except ConnectionClosed as closed:
        assert closed.rcvd and closed.rcvd.code == 1009, closed


TESTS = [
    long_messages_pass_between_clients_with_and_without,
    fragments_of_a_compressed_message_are_one,
    windows_are_agreed_and_kept,
    nothing_is_taken_over_from_one_message_to_the_next,
    a_bomb_is_closed_1009,
]


async def main():
    failed = 0
    for test in TESTS:
        try:
            await asyncio.wait_for(test(), 60)
            print("ok", test.__name__)
        except Exception:
            failed += 1
            print("FAILED", test.__name__)
            traceback.print_exc()
    print(f"{len(TESTS) - failed} passed, {failed} failed", flush=True)
    return 1 if failed else 0


sys.exit(asyncio.run(main()))
