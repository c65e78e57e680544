"""One TLS handshake with Python's ssl: tls_probe.py HOST:PORT CA [1.2]. Says what was agreed, or what failed."""
import hashlib, json, socket, ssl, sys

host, port = sys.argv[1].rsplit(":", 1)
context = ssl.create_default_context(cafile=sys.argv[2])
context.set_alpn_protocols(["h2", "http/1.1"])
if sys.argv[3:] == ["1.2"]:
    context.maximum_version = ssl.TLSVersion.TLSv1_2
try:
    with socket.create_connection((host, int(port)), timeout=20) as plain:
        with context.wrap_socket(plain, server_hostname="localhost") as secure:
            print(json.dumps({
                "version": secure.version(),
                "alpn": secure.selected_alpn_protocol(),
                "cert": hashlib.sha256(secure.getpeercert(binary_form=True)).hexdigest(),
            }))
except (ssl.SSLError, OSError) as error:
    print(json.dumps({"failed": str(error)}))
