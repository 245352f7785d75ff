"""A loopback, in-memory Hub for tests: enough of the Hub's HTTP API for the genuine huggingface_hub client
(create_repo / upload_folder / create_commit / snapshot_download / hf_hub_download / push_to_hub / from_pretrained).
stdlib only.  `with LoopbackHub() as hub: os.environ.update(hub.env)` BEFORE importing huggingface_hub.
Uploads go through the LFS "basic" protocol, so clients need HF_HUB_DISABLE_XET=1."""

import base64
import hashlib
import json
import re
import sys
import threading
import time
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

LFS_SUFFIXES = (
    ".safetensors", ".bin", ".pt", ".pth", ".onnx", ".msgpack", ".h5", ".arrow", ".parquet", ".model", ".npz", ".tar", ".gz",
    ".zip",
)  # fmt: skip


def git_oid(data):
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Repo:
    def __init__(self, rid, rtype, private=False):
        self.id, self.type, self.private = rid, rtype, private
        self.commits, self.branches, self.tags = {}, {}, {}
        self.commit(
            "main", "initial commit", {".gitattributes": (b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n", None)}
        )

    def commit(self, branch, title, tree, parent=None, body=""):
        parent = parent or self.branches.get(branch)
        key = json.dumps([self.id, parent, title, time.time_ns(), sorted(tree)])
        sha = hashlib.sha1(key.encode()).hexdigest()
        self.commits[sha] = {
            "id": sha,
            "parent": parent,
            "title": title,
            "message": body,
            "tree": tree,
            "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z"),
        }
        self.branches[branch] = sha
        return sha

    def resolve(self, rev):
        return self.branches.get(rev) or self.tags.get(rev) or (rev if rev in self.commits else None)


class Err(Exception):
    def __init__(self, status, code, msg):
        self.status, self.code, self.msg = status, code, msg


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *a):
        if self.hub.verbose:
            sys.stderr.write(f"hub: {self.command} {self.path}\n")

    def reply(self, status=200, obj=None, body=None, headers=None):
        if body is None:
            body = b"" if obj is None else json.dumps(obj).encode()
        self.send_response(status)
        hs = {"Content-Type": "application/json"} | (headers or {})
        for k, v in hs.items():
            self.send_header(k, v)
        if "Content-Length" not in hs:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def body(self):
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            out = b""
            while n := int(self.rfile.readline().split(b";")[0], 16):
                out += self.rfile.read(n)
                self.rfile.readline()
            self.rfile.readline()
            return out
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def auth(self):
        tok = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if tok not in self.hub.tokens:
            raise Err(401, None, "Invalid credentials in Authorization header")
        return self.hub.tokens[tok]

    def repo(self, rtype, rid):
        r = self.hub.repos.get((rtype, rid))
        tok = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if r is None or (r.private and tok not in self.hub.tokens):
            raise Err(401 if not tok else 404, "RepoNotFound", "Repository not found")
        return r

    def handle_any(self):
        u = urlsplit(self.path)
        self.q, path = parse_qs(u.query), u.path
        self.raw = self.body()
        self.hub.log.append((self.command, path))
        try:
            for method, rx, fn in ROUTES:
                if (self.command == method or (method == "GET" and self.command == "HEAD")) and (
                    m := re.fullmatch(rx, path)
                ):
                    with self.hub.lock:
                        return fn(self, **{k: unquote(v) if v is not None else v for k, v in m.groupdict().items()})
            self.hub.unknown.append((self.command, path))
            raise Err(404, None, "no such endpoint in loopback hub: " + path)
        except Err as e:
            h = {"X-Error-Message": e.msg} | ({"X-Error-Code": e.code} if e.code else {}) | getattr(e, "headers", {})
            self.reply(e.status, {"error": e.msg}, headers=h)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = handle_any

    @property
    def hub(self):
        return self.server.hub


def whoami(h):
    user = h.auth()
    h.reply(
        obj={
            "type": "user",
            "id": "u1",
            "name": user,
            "fullname": user,
            "email": f"{user}@localhost",
            "isPro": False,
            "orgs": [],
            "auth": {"type": "access_token", "accessToken": {"displayName": "test", "role": "write"}},
        }
    )


def create(h):
    user = h.auth()
    p = json.loads(h.raw)
    rt = p.get("type") or "model"
    rid = f"{p.get('organization') or user}/{p['name']}"
    url = f"{h.hub.url}/{'' if rt == 'model' else rt + 's/'}{rid}"
    if (rt, rid) in h.hub.repos:
        return h.reply(
            409,
            {"error": "You already created this model repo", "url": url},
            headers={"X-Error-Message": "You already created this model repo"},
        )
    h.hub.repos[(rt, rid)] = Repo(rid, rt, bool(p.get("private")) or p.get("visibility") == "private")
    h.reply(obj={"url": url, "name": rid, "id": "x"})


def rev_of(repo, rev):
    sha = repo.resolve(rev)
    if sha is None:
        raise Err(404, "RevisionNotFound", f"Invalid rev id: {rev}")
    return sha


def entry(path, item):
    data, sha256 = item
    e = {"type": "file", "oid": git_oid(data), "size": len(data), "path": path}
    if sha256:
        e["lfs"] = {"oid": sha256, "size": len(data), "pointerSize": 134}
    return e


def info(h, rt, rid, rev=None):
    r = h.repo(rt[:-1], rid)
    sha = rev_of(r, rev or "main")
    c = r.commits[sha]
    sib = [
        {"rfilename": p}
        | (
            {"size": len(i[0]), "blobId": git_oid(i[0])}
            | ({"lfs": {"sha256": i[1], "size": len(i[0]), "pointerSize": 134}} if i[1] else {})
            if "blobs" in h.q
            else {}
        )
        for p, i in sorted(c["tree"].items())
    ]
    cfg = json.loads(c["tree"]["config.json"][0]) if "config.json" in c["tree"] else {}
    card = card_data(c["tree"].get("README.md", (b"", None))[0])
    h.reply(
        obj={
            "_id": "x",
            "id": rid,
            "modelId": rid,
            "sha": sha,
            "private": r.private,
            "gated": False,
            "disabled": False,
            "author": rid.split("/")[0],
            "lastModified": c["date"],
            "createdAt": c["date"],
            "downloads": 0,
            "likes": 0,
            "tags": card.get("tags") or [],
            "cardData": card,
            "siblings": sib,
            "config": {k: cfg[k] for k in ("architectures", "model_type", "auto_map") if k in cfg},
            **({"pipeline_tag": card["pipeline_tag"]} if card.get("pipeline_tag") else {}),
            **({"library_name": card["library_name"]} if card.get("library_name") else {}),
        }
    )


def card_data(readme):
    m = re.match(rb"---\s*\n(.*?)\n---", readme, re.S)
    if not m:
        return {}
    import yaml

    return yaml.safe_load(m[1]) or {}


def tree(h, rt, rid, rev, path=""):
    r = h.repo(rt[:-1], rid)
    t = r.commits[rev_of(r, rev)]["tree"]
    pre = (path or "").strip("/")
    pre = pre + "/" if pre else ""
    out, dirs = [], set()
    for p, i in sorted(t.items()):
        if not p.startswith(pre):
            continue
        rest = p[len(pre) :].split("/")
        for k in range(1, len(rest)):
            d = pre + "/".join(rest[:k])
            if d not in dirs and (k == 1 or "recursive" in h.q):
                dirs.add(d)
                out.append({"type": "directory", "oid": hashlib.sha1(d.encode()).hexdigest(), "size": 0, "path": d})
        if len(rest) == 1 or h.q.get("recursive", ["false"])[0].lower() in ("true", "1"):
            out.append(entry(p, i))
    if pre and not out:
        raise Err(404, "EntryNotFound", "Entry not found")
    h.reply(obj=out)


def paths_info(h, rt, rid, rev):
    r = h.repo(rt[:-1], rid)
    t = r.commits[rev_of(r, rev)]["tree"]
    try:
        want = json.loads(h.raw)["paths"]
    except ValueError:
        want = parse_qs(h.raw.decode()).get("paths", [])
    h.reply(obj=[entry(p, t[p]) for p in want if p in t])


def preupload(h, rt, rid, rev):
    h.auth()
    r = h.repo(rt[:-1], rid)
    t = r.commits[rev_of(r, rev)]["tree"]
    out = []
    for f in json.loads(h.raw)["files"]:
        lfs = f["path"].endswith(LFS_SUFFIXES) or f["size"] > 10_000_000
        cur = t.get(f["path"])
        out.append(
            {
                "path": f["path"],
                "uploadMode": "lfs" if lfs else "regular",
                "shouldIgnore": False,
                "oid": (cur[1] or git_oid(cur[0])) if cur else None,
            }
        )
    h.reply(obj={"files": out})


def lfs_batch(h, rt, rid):
    h.auth()
    p = json.loads(h.raw)
    out = []
    for o in p["objects"]:
        e = {"oid": o["oid"], "size": o["size"]}
        if o["oid"] not in h.hub.lfs:
            e["actions"] = {
                "upload": {"href": f"{h.hub.url}/lfs-storage/{o['oid']}"},
                "verify": {"href": f"{h.hub.url}/lfs-verify"},
            }
        out.append(e)
    h.reply(obj={"transfer": "basic", "objects": out}, headers={"Content-Type": "application/vnd.git-lfs+json"})


def lfs_put(h, oid):
    if hashlib.sha256(h.raw).hexdigest() != oid:
        raise Err(400, None, "sha256 mismatch")
    h.hub.lfs[oid] = h.raw
    h.reply(headers={"ETag": f'"{oid}"'})


def lfs_verify(h):
    p = json.loads(h.raw)
    if len(h.hub.lfs.get(p["oid"], b"")) != p["size"]:
        raise Err(422, None, "LFS object missing or of the wrong size")
    h.reply(obj={})


def commit(h, rt, rid, rev):
    h.auth()
    r = h.repo(rt[:-1], rid)
    head = {}
    base = rev_of(r, rev)
    t = dict(r.commits[base]["tree"])
    for line in h.raw.splitlines():
        if not line.strip():
            continue
        op = json.loads(line)
        k, v = op["key"], op["value"]
        if k == "header":
            head = v
            if v.get("parentCommit") and v["parentCommit"] != base:
                raise Err(412, None, "A commit has happened since. Please refresh and try again.")
        elif k == "file":
            t[v["path"]] = (base64.b64decode(v["content"]), None)
        elif k == "lfsFile":
            if v["oid"] not in h.hub.lfs:
                raise Err(400, None, f"LFS pointer pointed to a file that does not exist: {v['path']}")
            t[v["path"]] = (h.hub.lfs[v["oid"]], v["oid"])
        elif k == "deletedFile":
            if t.pop(v["path"], None) is None:
                raise Err(404, "EntryNotFound", f"{v['path']} is not in the repo")
        elif k == "deletedFolder":
            t = {p: i for p, i in t.items() if not p.startswith(v["path"].rstrip("/") + "/")}
    branch = rev
    out = {}
    if h.q.get("create_pr"):
        n = 1 + sum(b.startswith("refs/pr/") for b in r.branches)
        branch = f"refs/pr/{n}"
        out["pullRequestUrl"] = f"{h.hub.url}/{rid}/discussions/{n}"
    sha = r.commit(branch, head.get("summary", ""), t, parent=base, body=head.get("description", ""))
    h.reply(obj=out | {"success": True, "commitOid": sha, "commitUrl": f"{h.hub.url}/{rid}/commit/{sha}"})


def resolve(h, rt, rid, rev, path):
    r = h.repo((rt or "models/")[:-2], rid)
    sha = rev_of(r, rev)
    item = r.commits[sha]["tree"].get(path)
    if item is None:
        e = Err(404, "EntryNotFound", "Entry not found")
        e.headers = {"X-Repo-Commit": sha}
        raise e
    data, lfs = item
    hd = {
        "X-Repo-Commit": sha,
        "ETag": f'"{lfs or git_oid(data)}"',
        "Accept-Ranges": "bytes",
        "Content-Type": "application/octet-stream",
    }
    if lfs:
        hd |= {"X-Linked-Etag": f'"{lfs}"', "X-Linked-Size": str(len(data))}
    rng = re.fullmatch(r"bytes=(\d+)-(\d*)", h.headers.get("Range") or "")
    if rng and h.command == "GET":
        a, b = int(rng[1]), int(rng[2] or len(data) - 1)
        return h.reply(206, body=data[a : b + 1], headers=hd | {"Content-Range": f"bytes {a}-{b}/{len(data)}"})
    h.reply(body=data, headers=hd | {"Content-Length": str(len(data))})


def refs(h, rt, rid):
    r = h.repo(rt[:-1], rid)
    h.reply(
        obj={
            "branches": [
                {"name": b, "ref": f"refs/heads/{b}", "targetCommit": s}
                for b, s in r.branches.items()
                if not b.startswith("refs/pr")
            ],
            "tags": [{"name": b, "ref": f"refs/tags/{b}", "targetCommit": s} for b, s in r.tags.items()],
            "converts": [],
            "pullRequests": [
                {"name": b, "ref": b, "targetCommit": s} for b, s in r.branches.items() if b.startswith("refs/pr")
            ],
        }
    )


def branch(h, rt, rid, rev):
    h.auth()
    r = h.repo(rt[:-1], rid)
    if h.command == "DELETE":
        r.branches.pop(rev, None)
    elif rev in r.branches:
        raise Err(409, None, "Reference already exists")
    else:
        r.branches[rev] = rev_of(r, (json.loads(h.raw or b"{}") or {}).get("startingPoint") or "main")
    h.reply(obj={})


def tag(h, rt, rid, rev):
    h.auth()
    r = h.repo(rt[:-1], rid)
    if h.command == "DELETE":
        r.tags.pop(rev, None)
    else:
        r.tags[json.loads(h.raw)["tag"]] = rev_of(r, rev)
    h.reply(obj={})


A = r"/api/(?P<rt>models|datasets|spaces)"
R = A + r"/(?P<rid>[^/]+/[^/]+)"
V = r"/(?P<rev>[^/]+)"
G = r"/(?P<rt>datasets/|spaces/)?(?P<rid>[^/]+/[^/]+)"
ROUTES = [
    ("GET", "/api/whoami-v2", whoami),
    ("POST", "/api/repos/create", create),
    ("POST", "/api/validate-yaml", lambda h: h.reply(obj={"errors": [], "warnings": []})),
    ("GET", R, info),
    ("GET", R + "/revision" + V, info),
    ("GET", R + "/tree" + V + "(?P<path>/.*)?", tree),
    ("POST", R + "/paths-info" + V, paths_info),
    ("GET", R + "/refs", refs),
    ("POST", R + "/preupload" + V, preupload),
    ("POST", R + "/commit" + V, commit),
    ("POST", R + "/branch" + V, branch),
    ("DELETE", R + "/branch" + V, branch),
    ("POST", R + "/tag" + V, tag),
    ("DELETE", R + "/tag" + V, tag),
    ("POST", G + r"\.git/info/lfs/objects/batch", lfs_batch),
    ("PUT", "/lfs-storage/(?P<oid>[0-9a-f]{64})", lfs_put),
    ("POST", "/lfs-verify", lfs_verify),
    ("GET", G + "/resolve" + V + "/(?P<path>.+)", resolve),
]


class LoopbackHub:
    def __init__(self, tokens=None, port=0, verbose=False):
        self.tokens = tokens or {"hf_loopback_token": "tester"}
        self.repos, self.lfs, self.log, self.unknown = {}, {}, [], []
        self.lock, self.verbose = threading.RLock(), verbose
        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.server.hub, self.server.daemon_threads = self, True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    @property
    def env(self):
        return {
            "HF_ENDPOINT": self.url,
            "HF_TOKEN": next(iter(self.tokens)),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_OFFLINE": "0",
        }

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *a):
        self.server.shutdown()
        self.server.server_close()
