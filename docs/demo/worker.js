// lexperts-lite in a browser: its Python modules run in Pyodide here, the graph in graph.js, and the tokenizer is @huggingface/tokenizers.
// Messages: {id, text, options} -> {id, phrases, seconds} or {id, error}. Everything is loaded from ./lib, next to this file.
import { Tokenizer } from "./lib/tokenizers.min.mjs";
import { loadPyodide } from "./lib/pyodide.mjs";

const LIB = new URL("./lib/", import.meta.url).href;
const MODEL = "/model";
const FILES = ["config.json", "tokenizer.json", "tokenizer_config.json"];

// the graph's inputs of each window as [name, bytes, shape], numpy arrays of what it returns, and keyphrases as JSON
const GLUE = `
import json, sys
import numpy as np
from pyodide.ffi import to_js
sys.path.insert(0, "/lib/lexperts")
from lexperts_lite.browser import BrowserExtractor

def prepare(extractor, text, options):
    windows = extractor.prepare(text, **options.to_py())
    return to_js([[(name, array.tobytes(), array.shape) for name, array in window.items()] for window in windows])

def array(tensor):
    return np.asarray(tensor.data.to_memoryview(), dtype=np.float32).reshape(tensor.dims.to_py())

def keyphrases(extractor, outputs):
    return json.dumps(extractor.keyphrases([(array(logits), array(states)) for logits, states in outputs]))
`;

async function load(name) {
  const response = await fetch(LIB + name);
  if (!response.ok) throw new Error(`${name} cannot be loaded: HTTP status ${response.status}.`);
  return response;
}

async function bytes(name) {
  return new Uint8Array(await (await load(name)).arrayBuffer());
}

// Python after its start (see snapshot.mjs), which takes 0.4 s instead of 2 s; a browser that cannot use it starts Python itself.
async function startPython() {
  try {
    const unpacked = (await load("snapshot.gz")).body.pipeThrough(new DecompressionStream("gzip"));
    return await loadPyodide({ indexURL: LIB, _loadSnapshot: new Uint8Array(await new Response(unpacked).arrayBuffer()) });
  } catch {
    return loadPyodide({ indexURL: LIB });
  }
}

async function openPython(files) {
  const names = (await (await load("wheels.json")).json());
  const archives = [...names.map((name) => [bytes(name), "whl"]), [bytes("lexperts_lite.zip"), "zip", { extractDir: "/lib/lexperts" }]];
  const python = await startPython();
  for (const [archive, ...how] of archives) python.unpackArchive(await archive, ...how);
  python.FS.mkdir(MODEL);
  for (const [name, file] of await files) python.FS.writeFile(`${MODEL}/${name}`, file);
  python.runPython(GLUE);
  return python;
}

// The worker that runs the graph, and what it has not answered yet.
class Graph {
  constructor() {
    this.worker = new Worker(new URL("graph.js", import.meta.url), { type: "module" });
    this.inputs = this.ask({});
  }

  ask(message) {
    return new Promise((resolve, reject) => {
      this.worker.onmessage = ({ data }) => (data.error ? reject(new Error(data.error)) : resolve(data));
      this.worker.onerror = (event) => reject(new Error(event.message || "graph.js cannot be loaded."));
      this.worker.postMessage(message);
    });
  }
}

async function open(graph) {
  const files = Promise.all(FILES.map(async (name) => [name, await bytes(`model/${name}`)]));
  const python = await openPython(files);
  const inputs = await graph.inputs;
  const [, settings, config] = (await files).map(([, file]) => JSON.parse(new TextDecoder().decode(file)));
  const tokenizer = new Tokenizer(settings, config);
  const encode = (text) => {
    const { ids, tokens } = tokenizer.encode(text, { add_special_tokens: false });
    return python.toPy([ids, tokens]);
  };
  const extractor = python.globals.get("BrowserExtractor")(MODEL, encode, python.toPy(inputs));
  return { graph, extractor, prepare: python.globals.get("prepare"), keyphrases: python.globals.get("keyphrases") };
}

let opened;

function openAgain() {
  const graph = new Graph();
  return open(graph).catch((error) => {
    graph.worker.terminate();
    opened = undefined; // the next text tries again
    throw error;
  });
}

async function extract(text, options) {
  opened ??= openAgain();
  const { graph, extractor, prepare, keyphrases } = await opened;
  const start = performance.now();
  const given = Object.entries(options ?? {}).filter(([, value]) => value !== null && value !== undefined);
  const outputs = [];
  for (const window of prepare(extractor, text, Object.fromEntries(given))) {
    const feeds = window.map(([name, array, dims]) => [name, { data: new BigInt64Array(array.slice().buffer), dims }]);
    outputs.push(await graph.ask(Object.fromEntries(feeds)));
  }
  const phrases = JSON.parse(keyphrases(extractor, outputs));
  return { phrases, seconds: (performance.now() - start) / 1000 };
}

// The last line of a Python error without its type, or the message of any other.
function readable(error) {
  const line = String(error.message ?? error).trim().split("\n").pop();
  return error.type ? line.replace(/^[\w.]+: /, "") : line;
}

let last = Promise.resolve(); // one text after the other: the extractor keeps the windows of one

self.addEventListener("message", ({ data: { id, text, options } }) => {
  last = last.then(() => extract(text, options)).then(
    (found) => self.postMessage({ id, ...found }),
    (error) => self.postMessage({ id, error: readable(error) }),
  );
});
