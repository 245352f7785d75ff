// The keyphrase demo: fills every element of class "keyphrase-demo". A worker reads the texts (see worker.js), and is started by the first click.
const HERE = new URL("./", import.meta.url);
const STYLES = { "": "as trained", terms: "terms of a textbook", authors: "authors of papers", phrases: "all noun phrases" };

const FIRST = 5; // keyphrases, before a reader asks for more or fewer

class Extractor {
  constructor() {
    this.waiting = new Map();
    this.count = 0;
  }

  start() {
    this.worker = new Worker(new URL("worker.js", HERE), { type: "module" });
    this.worker.addEventListener("message", ({ data }) => this.settle(data.id, data));
    this.worker.addEventListener("error", (event) => {
      const error = event.message || "The demo's files cannot be loaded.";
      for (const id of [...this.waiting.keys()]) this.settle(id, { error });
      this.worker = undefined;
    });
  }

  settle(id, data) {
    const { resolve, reject } = this.waiting.get(id);
    this.waiting.delete(id);
    data.error ? reject(new Error(data.error)) : resolve(data);
  }

  extract(text, options) {
    if (!this.worker) this.start();
    const id = this.count++;
    return new Promise((resolve, reject) => {
      this.waiting.set(id, { resolve, reject });
      this.worker.postMessage({ id, text, options });
    });
  }
}

export const extractor = new Extractor();

function element(name, attributes = {}, ...children) {
  const made = Object.assign(document.createElement(name), attributes);
  made.append(...children);
  return made;
}

// The text with its keyphrases marked; offsets count characters, not UTF-16 units.
function marked(text, phrases) {
  const characters = [...text];
  const spans = phrases.flatMap(({ mentions }, rank) => mentions.map(({ start, end }) => ({ start, end, rank })));
  spans.sort((a, b) => a.start - b.start || b.end - a.end);
  const parts = [];
  let position = 0;
  for (const { start, end, rank } of spans) {
    if (start < position) continue; // within a longer one
    parts.push(characters.slice(position, start).join(""));
    parts.push(element("mark", { title: `keyphrase ${rank + 1}` }, characters.slice(start, end).join("")));
    position = end;
  }
  return [...parts, characters.slice(position).join("")];
}

function row({ keyphrase, score }) {
  const percent = Math.round(100 * score);
  const bar = element("span", { className: "kd-bar", ariaHidden: "true" });
  bar.style.setProperty("--score", `${percent}%`);
  return element("li", {}, element("span", { className: "kd-phrase" }, keyphrase), bar, element("span", { className: "kd-score" }, `${percent}%`));
}

function fill(root) {
  const text = element("textarea", { rows: 4, spellcheck: false, ariaLabel: "Text" });
  const style = element("select", {}, ...Object.entries(STYLES).map(([value, label]) => element("option", { value }, label)));
  const number = element("input", { type: "number", min: 1, max: 50, value: FIRST });
  const button = element("button", { type: "submit" }, "Find keyphrases");
  const status = element("p", { className: "kd-status", role: "status" });
  const reading = element("div", { className: "kd-text" });
  const list = element("ol", { className: "kd-list" });
  const form = element(
    "form", {}, text,
    element("div", { className: "kd-controls" }, button, element("label", {}, "Style ", style), element("label", {}, "Keyphrases, at most ", number)),
  );
  root.replaceChildren(form, status, element("div", { className: "kd-result" }, reading, list));

  const show = (source, phrases) => {
    const kept = phrases.slice(0, Number(number.value) || FIRST);
    reading.replaceChildren(...marked(source, kept));
    list.replaceChildren(...kept.map(row));
  };

  fetch(new URL("example.json", HERE)).then((response) => response.json()).then((example) => {
    text.value = example.text;
    show(example.text, example.phrases);
    status.textContent = `The keyphrases of this text, by the small model. Put in one of yours: it stays in this page, and the first click loads ${Math.round(example.bytes / 1e6)} MB.`;
  });

  let first = true;
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    button.disabled = true;
    status.textContent = first ? "Loading the model into this page …" : "Reading …";
    const begin = performance.now();
    try {
      const options = { top_k: Number(number.value) || FIRST, style: style.value || null };
      const { phrases, seconds } = await extractor.extract(text.value, options);
      show(text.value, phrases);
      const loaded = first ? `loaded in ${((performance.now() - begin) / 1000 - seconds).toFixed(1)} s, ` : "";
      status.textContent = phrases.length ? `${phrases.length} keyphrases: ${loaded}read in ${Math.max(1, Math.round(1000 * seconds))} ms, in this page.` : "No keyphrases in this text.";
      first = false;
    } catch (error) {
      status.textContent = error.message;
    }
    button.disabled = false;
  });
}

for (const root of document.querySelectorAll(".keyphrase-demo")) fill(root);
