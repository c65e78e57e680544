# A chat over plain TCP: tcp_chat.py HOST PORT TOKEN CONVERSATION. Lines of standard input are sent, messages printed.
import json, socket, sys, threading, uuid

host, port, token, conversation = sys.argv[1:5]
server = socket.create_connection((host, int(port)))
incoming = server.makefile("rb")

def send(**frame):
    data = json.dumps(frame).encode()
    server.sendall(len(data).to_bytes(4, "big") + data)

def talk():
    for line in sys.stdin:
        send(type="msg.send", id=str(uuid.uuid4()), conversation_id=conversation, body={"text": line.rstrip("\n")})

send(type="connect", token=token, device_id="python")
threading.Thread(target=talk, daemon=True).start()
while length := incoming.read(4):
    frame = json.loads(incoming.read(int.from_bytes(length, "big")))
    if frame["type"] == "msg.push":
        text = frame["body"]["text"] if isinstance(frame["body"], dict) else frame["body"]
        print(f"{frame['seq']} {frame['from']}: {text}", flush=True)
        send(type="msg.recv", conversation_id=frame["conversation_id"], seq=frame["seq"])
    elif frame["type"] != "pong":
        print(frame["type"], frame.get("message", ""), flush=True)
