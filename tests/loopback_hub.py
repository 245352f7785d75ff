"""A Hub of models in memory on loopback, for huggingface_hub's own client: repositories, uploads, downloads.

`with LoopbackHub() as hub`: a process with the environment `hub.env` uses it. Large files are uploaded by the "basic" protocol of
LFS. `hub.unknown` lists requests that no route answers.
"""

import base64
import hashlib
import json
import re
import threading
import time
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import yaml

LFS_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".onnx", ".parquet", ".model", ".npz", ".zip")
TOKEN, USER = "hf_loopback_token", "tester"


def git_oid(data):
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class HubError(Exception):
    """An answer with an error, as the Hub gives it in headers."""

    def __init__(self, status, message, code=None, **headers):
        self.status, self.message = status, message
        self.headers = {"X-Error-Message": message, **({"X-Error-Code": code} if code else {}), **headers}


class Repo:
    """Commits by hash. A commit's tree maps paths to (content, SHA-256 or `None` for a file outside LFS)."""

    def __init__(self, id, type, private=False):
        self.id, self.type, self.private = id, type, private
        self.commits, self.branches = {}, {}
        attributes = b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"
        self.commit("main", "initial commit", {".gitattributes": (attributes, None)})

    def commit(self, branch, title, tree, parent=None):
        parent = parent or self.branches.get(branch)
        sha = hashlib.sha1(json.dumps([self.id, parent, title, time.time_ns(), sorted(tree)]).encode()).hexdigest()
        date = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")
        self.commits[sha] = {"id": sha, "parent": parent, "title": title, "tree": tree, "date": date}
        self.branches[branch] = sha
        return sha

    def resolve(self, revision):
        return self.branches.get(revision, revision)

    def commit_of(self, revision):
        return self.commits[self.resolve(revision)]


class Handler(BaseHTTPRequestHandler):
    """Calls the function of the first route that matches; it returns an object for JSON, or replies by itself."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # a body would wait 40 ms for the acknowledgement of its headers

    def log_message(self, *_):
        pass

    def reply(self, status=200, body=b"", **headers):
        self.send_response(status)
        for name, value in ({"Content-Type": "application/json", "Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def knows_token(self):
        return (self.headers.get("Authorization") or "").removeprefix("Bearer ") == TOKEN

    def require_token(self):
        if not self.knows_token():
            raise HubError(401, "Invalid credentials in Authorization header")

    def repo(self, id):
        repo = self.hub.repos.get(("model", id))
        if repo is None or (repo.private and not self.knows_token()):
            raise HubError(404 if self.headers.get("Authorization") else 401, "Repository not found", "RepoNotFound")
        return repo

    def handle_request(self):
        url = urlsplit(self.path)
        self.content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        method = "GET" if self.command == "HEAD" else self.command
        try:
            for wanted, pattern, answer in ROUTES:
                if method == wanted and (match := re.fullmatch(pattern, url.path)):
                    with self.hub.lock:
                        found = {name: unquote(x) if x is not None else x for name, x in match.groupdict().items()}
                        result = answer(self, **found)
                        if result is not None:
                            self.reply(body=json.dumps(result).encode())
                    return
            self.hub.unknown.append((self.command, url.path))
            raise HubError(404, f"no such endpoint: {url.path}")
        except HubError as error:
            self.reply(error.status, json.dumps({"error": error.message}).encode(), **error.headers)

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    @property
    def hub(self):
        return self.server.hub


# --- one function per route ---


def create_repo(request):
    request.require_token()
    wanted = json.loads(request.content)
    id = f"{wanted.get('organization') or USER}/{wanted['name']}"
    url = f"{request.hub.url}/{id}"
    if ("model", id) in request.hub.repos:
        body = json.dumps({"error": "You already created this repo", "url": url}).encode()
        return request.reply(409, body, **{"X-Error-Message": "You already created this repo"})
    private = bool(wanted.get("private")) or wanted.get("visibility") == "private"
    request.hub.repos["model", id] = Repo(id, "model", private)
    return {"url": url, "name": id, "id": "x"}


def describe_file(path, data, sha256):
    lfs = {"lfs": {"oid": sha256, "size": len(data), "pointerSize": 134}} if sha256 else {}
    return {"type": "file", "oid": git_oid(data), "size": len(data), "path": path, **lfs}


def repo_info(request, id, revision="main"):
    repo = request.repo(id)
    commit = repo.commit_of(revision)
    tree = commit["tree"]
    head = re.match(rb"---\s*\n(.*?)\n---", tree.get("README.md", (b"", None))[0], re.S)
    card = (yaml.safe_load(head[1]) if head else None) or {}
    return {
        "id": id, "sha": commit["id"], "private": repo.private, "lastModified": commit["date"],
        "tags": card.get("tags") or [], "cardData": card, "siblings": [{"rfilename": path} for path in sorted(tree)],
        **{name: card[name] for name in ("pipeline_tag", "library_name") if card.get(name)},
    }  # fmt: skip


def list_tree(request, id, revision, path=None):
    tree, prefix = request.repo(id).commit_of(revision)["tree"], f"{path.strip('/')}/" if path else ""
    files = [describe_file(name, *file) for name, file in sorted(tree.items()) if name.startswith(prefix)]
    if not files:
        raise HubError(404, "Entry not found", "EntryNotFound")
    return files


def plan_upload(request, id, revision):
    request.require_token()
    tree, files = request.repo(id).commit_of(revision)["tree"], []
    for file in json.loads(request.content)["files"]:
        path, (data, sha256) = file["path"], tree.get(file["path"], (None, None))
        mode = "lfs" if path.endswith(LFS_SUFFIXES) else "regular"
        oid = None if data is None else sha256 or git_oid(data)
        files.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
    return {"files": files}


def plan_lfs(request, id):
    request.require_token()
    objects = json.loads(request.content)["objects"]
    for item in objects:
        if item["oid"] not in request.hub.lfs:
            item["actions"] = {"upload": {"href": f"{request.hub.url}/lfs-storage/{item['oid']}"}}
    body = json.dumps({"transfer": "basic", "objects": objects}).encode()
    request.reply(body=body, **{"Content-Type": "application/vnd.git-lfs+json"})


def store_lfs(request, oid):
    request.hub.lfs[oid] = request.content
    request.reply(ETag=f'"{oid}"')


def commit(request, id, revision):
    request.require_token()
    repo = request.repo(id)
    parent = repo.commit_of(revision)["id"]
    tree, title = dict(repo.commits[parent]["tree"]), ""
    for operation in map(json.loads, filter(bytes.strip, request.content.splitlines())):
        kind, value = operation["key"], operation["value"]
        if kind == "header":
            title = value.get("summary", "")
        elif kind == "file":
            tree[value["path"]] = (base64.b64decode(value["content"]), None)
        elif kind == "lfsFile":
            tree[value["path"]] = (request.hub.lfs[value["oid"]], value["oid"])
        else:
            assert kind == "deletedFile", kind
            del tree[value["path"]]
    sha = repo.commit(revision, title, tree, parent)
    return {"success": True, "commitOid": sha, "commitUrl": f"{request.hub.url}/{id}/commit/{sha}"}


def download(request, id, revision, path):
    found = request.repo(id).commit_of(revision)
    if path not in found["tree"]:
        raise HubError(404, "Entry not found", "EntryNotFound", **{"X-Repo-Commit": found["id"]})
    data, sha256 = found["tree"][path]
    headers = {"X-Repo-Commit": found["id"], "ETag": f'"{sha256 or git_oid(data)}"'}
    headers["Content-Type"] = "application/octet-stream"
    if sha256:
        headers |= {"X-Linked-Etag": f'"{sha256}"', "X-Linked-Size": str(len(data))}
    request.reply(body=data, **headers)


REPO = r"/api/models/(?P<id>[^/]+/[^/]+)"
REVISION = r"/(?P<revision>[^/]+)"
FILES = r"/(?P<id>[^/]+/[^/]+)"
ROUTES = [
    ("POST", "/api/repos/create", create_repo),
    ("POST", "/api/validate-yaml", lambda request: {"errors": [], "warnings": []}),
    ("GET", REPO, repo_info),
    ("GET", REPO + "/revision" + REVISION, repo_info),
    ("GET", REPO + "/tree" + REVISION + "(?P<path>/.*)?", list_tree),
    ("POST", REPO + "/preupload" + REVISION, plan_upload),
    ("POST", REPO + "/commit" + REVISION, commit),
    ("POST", FILES + r"\.git/info/lfs/objects/batch", plan_lfs),
    ("PUT", "/lfs-storage/(?P<oid>[0-9a-f]{64})", store_lfs),
    ("GET", FILES + "/resolve" + REVISION + "/(?P<path>.+)", download),
]


class LoopbackHub:
    """Repositories by (type, id), objects of LFS by hash, and the server in a thread."""

    def __init__(self):
        self.repos, self.lfs, self.unknown, self.lock = {}, {}, [], threading.RLock()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.hub, self.server.daemon_threads = self, True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.env = {"HF_ENDPOINT": self.url, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0"}
        self.env |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()
