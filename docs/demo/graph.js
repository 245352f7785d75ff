// Runs the model's graph. Messages: {} -> the names of its inputs; then inputs {name: {data, dims}} -> [logits, states], or {error}.
import * as ort from "./lib/ort.wasm.bundle.min.mjs";

const LIB = new URL("./lib/", import.meta.url).href;

// whether a module with an instruction on vectors of 128 bits is valid
function hasSimd() {
  return WebAssembly.validate(new Uint8Array([
    0, 97, 115, 109, 1, 0, 0, 0, 1, 5, 1, 96, 0, 1, 123, 3, 2, 1, 0, 10, 10, 1, 8, 0, 65, 0, 253, 15, 253, 98, 11,
  ]));
}

async function open() {
  if (!hasSimd()) throw new Error("This browser has no WebAssembly SIMD, which onnxruntime-web needs. Update it, or use lexperts-lite in Python.");
  ort.env.wasm.wasmPaths = LIB;
  ort.env.wasm.numThreads = 1; // more need headers that servers of static files do not send
  const response = await fetch(`${LIB}model/onnx/model_int8.onnx`);
  if (!response.ok) throw new Error(`model_int8.onnx cannot be loaded: HTTP status ${response.status}.`);
  return ort.InferenceSession.create(new Uint8Array(await response.arrayBuffer()), { executionProviders: ["wasm"] });
}

async function answer(session, inputs) {
  if (!Object.keys(inputs).length) return session.inputNames;
  const feeds = Object.entries(inputs).map(([name, { data, dims }]) => [name, new ort.Tensor("int64", data, dims)]);
  const { logits, last_hidden_state: states } = await session.run(Object.fromEntries(feeds));
  return [logits, states].map(({ data, dims }) => ({ data, dims }));
}

const opened = open();

self.addEventListener("message", ({ data }) => {
  opened.then((session) => answer(session, data)).then(
    (found) => self.postMessage(found),
    (error) => self.postMessage({ error: error.message }),
  );
});
