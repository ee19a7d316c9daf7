"""A client of FencedLease in Python's standard library, for leases without holderBinding; docs/protocol.md has the rules."""
import contextlib, datetime, http.client, json, re, threading, time, uuid

class Lost(Exception): """The lease is not held any more: nothing was sent."""

class Lease: # waits for the lease, then renews it in the background until release()
    def __init__(self, host, tls, namespace, name):
        self.host, self.tls, self.over = host, tls, threading.Event()
        group, claim = f"/apis/fencedlease.io/v1alpha1/namespaces/{namespace}", f"{name}-{uuid.uuid4()}"
        self.duration = self.send("GET", f"{group}/fencedleases/{name}")[1]["spec"]["leaseDurationSeconds"]
        review = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
        me = self.send("POST", "/apis/authentication.k8s.io/v1/selfsubjectreviews", review)[1]["status"]["userInfo"]
        self.me = [("Impersonate-User", me["username"])] + [("Impersonate-Group", g) for g in me["groups"]
            if g != "system:authenticated" and not me["username"].startswith("system:serviceaccount:")]
        self.path, self.until = f"{group}/leaseclaims/{claim}", time.monotonic() + self.duration * 0.8
        self.uid = self.send("POST", f"{group}/leaseclaims", {"apiVersion": "fencedlease.io/v1alpha1", "kind": "LeaseClaim",
            "metadata": {"name": claim}, "spec": {"leaseName": name, "holderIdentity": "python"}})[1]["metadata"]["uid"]
        threading.Thread(target=self.renew, daemon=True).start()
        reason = "Waiting"
        while reason in ("Pending", "Waiting"):
            time.sleep(0.2)
            status = self.send("GET", self.path)[1].get("status", {})
            reason = next((c["reason"] for c in status.get("conditions", []) if c["type"] == "Held"), reason)
        if reason != "Granted":
            raise Lost(reason)
        self.token = str(status["token"])
    def renew(self):
        while not self.over.is_set():
            sent, now = time.monotonic(), datetime.datetime.now(datetime.timezone.utc)
            body = {"metadata": {"uid": self.uid}, "spec": {"renewTime": now.strftime("%Y-%m-%dT%H:%M:%S.%fZ")}}
            with contextlib.suppress(OSError, ValueError, http.client.HTTPException): # a sign of nothing: the clock decides
                self.send("PATCH", self.path, body, timeout=self.duration / 4)
                self.until = sent + self.duration * 0.8
            self.over.wait(self.duration / (3 if self.until > sent else 12))
    def send(self, method, path, body=None, kind="application/merge-patch+json", headers=(), timeout=10, check=True):
        server, data = http.client.HTTPSConnection(self.host, context=self.tls, timeout=timeout), json.dumps(body or {}).encode()
        server.putrequest(method, path)
        for name, value in [("Content-Type", kind if method == "PATCH" else "application/json"), ("Content-Length", str(len(data))), *headers]:
            server.putheader(name, value)
        server.endheaders(data)
        answer = server.getresponse()
        said = json.loads(answer.read())
        if check and answer.status >= 300:
            raise OSError(answer.status, said.get("message"))
        return answer.status, said
    def write(self, method, path, body=None, kind="application/merge-patch+json"):
        """Presents the token, recording it first where asked to. Gives the status, the fence's cause, and what was said."""
        if self.over.is_set() or time.monotonic() >= self.until:
            raise Lost(self.path)
        status, said = self.send(method, path, body, kind, self.me + [("Impersonate-Extra-Fencedlease.io%2FToken", self.token)], check=False)
        cause = next(iter(re.findall(r"denied (?:the )?request: (\w+): ", said.get("message", ""))), "")
        record = {"metadata": {"annotations": {"fencedlease.io/token": self.token}}}
        if cause != "NotRecorded" or body == record:
            return status, cause, said
        recorded = self.write("PATCH", f"{path}?fieldManager=fencedlease", record)
        return self.write(method, path, body, kind) if recorded[0] < 300 else recorded
    def release(self):
        self.over.set()
        self.send("DELETE", self.path, {"preconditions": {"uid": self.uid}}, check=False)
