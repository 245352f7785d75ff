// Writes the memory of Pyodide after its start and the import of what lexperts-lite needs of the standard library, from which a browser goes on.
//     node snapshot.mjs NODE_MODULES LIB
import fs from "node:fs";
import path from "node:path";
import { pathToFileURL } from "node:url";
import zlib from "node:zlib";

const [modules, lib] = process.argv.slice(2);
const { loadPyodide } = await import(pathToFileURL(path.resolve(modules, "pyodide/pyodide.mjs")).href);
const read = (name) => new Uint8Array(fs.readFileSync(path.join(lib, name)));

const whole = await loadPyodide();
for (const name of JSON.parse(fs.readFileSync(path.join(lib, "wheels.json")))) whole.unpackArchive(read(name), "whl");
whole.unpackArchive(read("lexperts_lite.zip"), "zip", { extractDir: "/lib/lexperts" });
const names = whole.runPython(`
import json, sys, zipfile
before = set(sys.modules)
sys.path.insert(0, "/lib/lexperts")
import lexperts_lite.browser
json.dumps([name for name in sys.modules if name not in before and name.partition(".")[0] in sys.stdlib_module_names])
`);
const python = await loadPyodide({ _makeSnapshot: true });
python.runPython(`
import importlib, json, zipfile
for name in json.loads('${names}'):
    importlib.import_module(name)
`);
fs.writeFileSync(path.join(lib, "snapshot.gz"), zlib.gzipSync(python.makeMemorySnapshot(), { level: 9 }));
